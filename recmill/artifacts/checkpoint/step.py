"""A published checkpoint of one model at one step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from recmill.artifacts.checkpoint.files import digest_of
from recmill.artifacts.checkpoint.records import read_records
from recmill.artifacts.manifest import read_manifest
from recmill.embeddings.table import AdmissionState, Array, EmbeddingTable, KeyRecords
from recmill.errors import ArtifactError

ADMISSION_FIELDS = tuple(field.name for field in fields(AdmissionState))


@dataclass(frozen=True)
class StepCheckpoint:
    """One published checkpoint."""

    path: Path
    manifest: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> StepCheckpoint:
        manifest = read_manifest(path, "step")
        if manifest.pop("digest", None) != manifest_digest(manifest):
            raise ArtifactError(f"Checkpoint {path} is damaged: manifest.json does not have its own digest.")
        return cls(path, manifest)

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.manifest["metrics"])

    @property
    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs: its cursor, and its measurements so far."""
        return dict(self.manifest["state"])

    @property
    def delta_of(self) -> str | None:
        """The name of the checkpoint that this one is based on; None when it is full."""
        return self.manifest["delta_of"]  # type: ignore[no-any-return]

    @property
    def num_bytes(self) -> int:
        return sum(int(file["num_bytes"]) for file in self.manifest["files"].values())

    def verify(self) -> None:
        """Verify every file against its digest."""
        for name, file in self.manifest["files"].items():
            if digest_of(self.path / name) != file["sha256"]:
                raise ArtifactError(
                    f"Checkpoint {self.path} is damaged: {name} does not have the digest of its record."
                )

    def arrays(self) -> dict[str, Array]:
        """Dense weights, optimizer state and random state."""
        return load_file(self.path / "dense.safetensors")

    def records(self, table: str) -> Iterator[KeyRecords]:
        """The keys of a table in this checkpoint, in chunks."""
        for name in self.manifest["tables"][table]["files"]:
            yield from read_records(self.path / name)

    def restore_into(self, tables: Mapping[str, EmbeddingTable]) -> None:
        """Apply this checkpoint alone; `Checkpoints.restore` applies its bases first."""
        expected = self.manifest["tables"]
        if set(expected) != set(tables):
            raise ArtifactError(
                f"Checkpoint {self.path} has tables {', '.join(sorted(expected))}; "
                f"the model has {', '.join(sorted(tables))}. Is it a checkpoint of this recipe?"
            )
        admission = self.admission()
        for name, table in tables.items():
            _check_fits(self.path, name, expected[name], table)
            table.remove(admission[f"{name}.removed"])
            for records in self.records(name):
                table.load(records)
            table.load_waiting(
                AdmissionState(**{part: admission[f"{name}.{part}"] for part in ADMISSION_FIELDS})
            )

    def admission(self) -> dict[str, Array]:
        """`<table>.removed`, and `<table>.<what>` of keys without a row."""
        names = [name for name in self.manifest["files"] if name.startswith("admission.")]
        parts = [load_file(self.path / name) for name in sorted(names, key=_rank_of)]
        every = {key: [part[key] for part in parts if key in part] for part in parts for key in part}
        return {key: values[0] if len(values) == 1 else _merged(key, values) for key, values in every.items()}


def _rank_of(name: str) -> int:
    """The rank of the worker that wrote `admission.RANK-SIZE.safetensors`."""
    numbers = name.split(".")[1]
    return int(numbers.split("-")[0]) if "-" in numbers else 0


def _merged(key: str, of_workers: Sequence[Array]) -> Array:
    """The files of several workers, merged into those of a single process."""
    what = key.rsplit(".", 1)[1]
    if what == "bloom":
        # Each worker counted its own keys: the maximum of the counters is too low for none of them.
        return np.asarray(np.maximum.reduce(of_workers))
    if what in ("shared_rows", "shared_states"):
        merged = of_workers[0].copy()
        for rank, values in enumerate(of_workers):
            merged[rank :: len(of_workers)] = values[rank :: len(of_workers)]
        return merged
    return np.concatenate(of_workers)


def manifest_digest(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def describe_table(name: str, table: EmbeddingTable) -> dict[str, Any]:
    spec = table.spec
    return {
        "files": [f"tables/{name}.arrow"],
        "dim": spec.dim,
        "optimizer": spec.optimizer,
        "num_states": table.num_states,
        "num_rows": spec.num_rows,
    }


def _check_fits(path: Path, name: str, saved: Mapping[str, Any], table: EmbeddingTable) -> None:
    expected = describe_table(name, table)
    for key in ("dim", "optimizer", "num_states", "num_rows"):
        if saved[key] != expected[key]:
            raise ArtifactError(
                f'Checkpoint {path}: table "{name}" has {key} {saved[key]}, the model has {expected[key]}. '
                "Is it a checkpoint of this recipe?"
            )

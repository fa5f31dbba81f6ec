"""publish: copy a bundle into a folder of versions and make it current, together with its checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from recmill.artifacts.bundle.bundle import Bundle, kept_checkpoint, previous_of, set_current
from recmill.artifacts.bundle.remote import bundles_written
from recmill.artifacts.checkpoint.checkpoint import REFIT, Checkpoint
from recmill.artifacts.manifest import is_published, link_or_copy
from recmill.errors import ArtifactError
from recmill.stages.export.versions import exporting, is_whole, keep_newest, written_aside
from recmill.storage.objects import is_url


@dataclass(frozen=True)
class PublishResult:
    """The current version, the one before, and the removed older ones."""

    bundle: Bundle
    previous: str | None
    removed: tuple[str, ...] = ()


def publish_at(
    candidate: str | Path,
    address: str | Path,
    checkpoint: str | Path | None = None,
    keep: int | None = None,
    despite_gate: bool = False,
) -> PublishResult:
    """`publish`, where any of them may be a URL."""
    bundle = Bundle.open(candidate)
    candidate = bundle.path
    if checkpoint is not None:
        folder = Checkpoint.open(checkpoint)
        is_of_refit = Path(bundle.manifest["checkpoint"]["path"]).name == REFIT
        checkpoint = folder.to_serve().path if is_of_refit else folder.path
    if not is_url(address):
        return publish(candidate, Path(address), checkpoint, keep, despite_gate)
    with bundles_written(str(address)) as bundles:
        published = publish(candidate, bundles.path, checkpoint, None, despite_gate)
        removed = bundles.push_version(published.bundle.version, keep)
    return replace(published, removed=tuple(removed))


def publish(
    candidate: Path,
    into: Path,
    checkpoint: Path | None = None,
    keep: int | None = None,
    despite_gate: bool = False,
) -> PublishResult:
    """Copy a verified bundle into `into`, then make it current. If it is killed, run it again: it resumes.

    The checkpoint is kept beside it, for the gate of its successor. A bundle that no gate passed is refused.
    """
    bundle = Bundle.open(candidate)
    _check_gate(bundle, despite_gate)
    if checkpoint is not None:
        _check_checkpoint(bundle, checkpoint)
    with exporting(into):
        if not is_whole(into / bundle.version):
            _copy(bundle.path, into, bundle.version)
        if checkpoint is not None:
            _keep_checkpoint(checkpoint, kept_checkpoint(into, bundle.version))
        set_current(into, bundle.version)
        removed = keep_newest(into, keep) if keep is not None else []
    return PublishResult(Bundle.open(into / bundle.version), previous_of(into), tuple(removed))


def _check_gate(bundle: Bundle, despite_gate: bool) -> None:
    gate = bundle.manifest["gate"]
    if despite_gate or (gate is not None and gate["passed"]):
        return
    why = "never went through a gate" if gate is None else "did not pass its gate"
    raise ArtifactError(
        f"Bundle {bundle.path} {why}, so it is not published. Run `recmill evaluate --gate` and `recmill export` "
        "again, or add --despite-gate."
    )


def _check_checkpoint(bundle: Bundle, path: Path) -> None:
    folder = Checkpoint.open(path)
    for model, step in bundle.manifest["checkpoint"]["steps"].items():
        if step not in [known.step for known in folder.of(model).all()]:
            raise ArtifactError(
                f"Checkpoint {path} has no step {step} of {model}, which bundle {bundle.path} is of. "
                "Give the checkpoint that it was exported from."
            )


def _keep_checkpoint(checkpoint: Path, kept: Path) -> None:
    kept.parent.mkdir(exist_ok=True)
    with exporting(kept.parent):
        if not is_published(kept):
            _copy(checkpoint, kept.parent, kept.name)


def _copy(path: Path, into: Path, name: str) -> None:
    """Hard links where possible: published files never change."""
    with written_aside(into, name) as aside:
        shutil.copytree(
            path,
            aside,
            ignore=shutil.ignore_patterns(".*"),
            copy_function=link_or_copy,
            dirs_exist_ok=True,
        )

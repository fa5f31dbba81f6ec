"""Sources to follow, files or a stream: each records how far a delta reaches, and reads the rows of deltas again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.delta import Delta, deltas_of
from recmill.artifacts.event_stream import EventStream, entry_id, entry_number, is_stream
from recmill.errors import ArtifactError, FeatureError
from recmill.logs.entries import after_export
from recmill.logs.stream_tail import StreamTail
from recmill.logs.tail import Tail
from recmill.logs.tally import Tally
from recmill.recipe.recipe import POSITION, Recipe

Items = Mapping[str, Mapping[str, Any]]


class Followed(Protocol):
    """A source of new rows in a stable order."""

    @property
    def items(self) -> Items:
        """Raw columns of items that servers received, by id."""

    def published(self) -> Iterator[pl.DataFrame]:
        """The rows of published deltas: trained on again, and not published again."""

    def read(self, tally: Tally) -> list[pl.DataFrame]:
        """Rows since the last call."""

    def facts(self) -> dict[str, Any]:
        """The progress, for the manifest of a delta."""

    def kept(self, frames: list[pl.DataFrame]) -> pl.DataFrame | None:
        """The rows that a delta must store because they cannot be read again."""

    def delta_published(self) -> None:
        """Called when a delta with this progress is on disk."""

    def close(self) -> None: ...


def open_followed(data: str, recipe: Recipe, bundle: Bundle, bundles: Path) -> Followed:
    """A stream's URL or a log's directory, from the end of a bundle's deltas."""
    deltas = deltas_of(bundles, bundle.version)
    last = Delta.open(deltas[-1]) if deltas else None
    has_stream = last is not None and "stream" in last.manifest
    if last is not None and has_stream != is_stream(data):
        kinds = ("a stream", "files") if has_stream else ("files", "a stream")
        raise ArtifactError(
            f"Deltas of {bundle.path} were learned from {kinds[0]}, and --follow names {kinds[1]}. Follow what was "
            "followed before, or begin with a new export."
        )
    if is_stream(data):
        return FollowedStream(data, recipe, bundle, bundles, deltas)
    return FollowedFiles(data, recipe, bundle, last)


class FollowedFiles:
    """Growing files: how many bytes of each were read. They can be read again."""

    def __init__(self, data: str, recipe: Recipe, bundle: Bundle, last: Delta | None) -> None:
        self._tail = Tail(recipe.log, data, dict(bundle.manifest["log_sizes"]))
        self._last = last

    @property
    def items(self) -> Items:
        return {}

    def published(self) -> Iterator[pl.DataFrame]:
        if self._last is not None:
            yield from self._tail.read(Tally(), self._last.manifest["log_sizes"])

    def read(self, tally: Tally) -> list[pl.DataFrame]:
        return list(self._tail.read(tally))

    def facts(self) -> dict[str, Any]:
        return {"log_sizes": dict(self._tail.done)}

    def kept(self, frames: list[pl.DataFrame]) -> pl.DataFrame | None:
        return None

    def delta_published(self) -> None:
        """Files need no cleanup."""

    def close(self) -> None:
        """No file stays open between polls."""


class FollowedStream:
    """A stream: the last entry that was read. Deltas store the rows, because consumed entries may be dropped."""

    def __init__(self, url: str, recipe: Recipe, bundle: Bundle, bundles: Path, deltas: list[Path]) -> None:
        if recipe.log.time is None:
            raise FeatureError(
                f"--follow {recipe.name} from a stream needs log.time: it tells which entries the bundle's log had."
            )
        self._stream, self._time, self._bundle = EventStream(url), recipe.log.time, bundle
        self._group = f"recmill-{recipe.name}"
        self._deltas = deltas
        self._end = _end_of(deltas[-1]) if deltas else 0
        # Rows that only other versions have learned: their entries may be gone from the stream.
        self._elsewhere = _deltas_of_others(bundles, bundle, self._stream.key)
        end = max([self._end, *map(_end_of, self._elsewhere)])
        self._tail = StreamTail(recipe.log, self._stream, end)

    @property
    def items(self) -> Items:
        return self._tail.items or {}

    def published(self) -> Iterator[pl.DataFrame]:
        yield from _events_of(self._deltas)

    def read(self, tally: Tally) -> list[pl.DataFrame]:
        new = list(self._tail.read(tally))
        frames = [self._after_export(frame) for frame in (*self._learned_elsewhere(), *new)]
        self._elsewhere = []
        return [frame for frame in frames if frame.height]

    def _learned_elsewhere(self) -> list[pl.DataFrame]:
        frames = list(_events_of(self._elsewhere))
        if not frames:
            return []
        rows = pl.concat(frames).filter(pl.col(POSITION) > self._end)
        return [rows.unique(POSITION).sort(POSITION)]

    def _after_export(self, rows: pl.DataFrame) -> pl.DataFrame:
        return after_export(rows, self._time, self._bundle.manifest)

    def facts(self) -> dict[str, Any]:
        end = {"key": self._stream.key, "end": entry_id(self._tail.done)}
        return {"stream": end, "log_sizes": self._bundle.manifest["log_sizes"]}

    def kept(self, frames: list[pl.DataFrame]) -> pl.DataFrame | None:
        return pl.concat(frames)

    def delta_published(self) -> None:
        self._stream.learned(self._group, self._tail.done)

    def close(self) -> None:
        self._stream.close()


def _events_of(deltas: list[Path]) -> Iterator[pl.DataFrame]:
    for path in deltas:
        events = Delta.open(path).events()
        if events is not None:
            yield events


def _end_of(delta: Path) -> int:
    return entry_number(Delta.open(delta).manifest["stream"]["end"])


def _deltas_of_others(bundles: Path, bundle: Bundle, key: str) -> list[Path]:
    """Deltas of all other versions of the recipe that were learned from this stream."""
    folders = [folder for folder in bundles.glob("*.deltas") if folder.stem != bundle.version]
    paths = [path for folder in folders for path in deltas_of(bundles, folder.stem)]
    manifests = {path: Delta.open(path).manifest for path in paths}
    return [
        path
        for path, manifest in manifests.items()
        if manifest.get("stream", {}).get("key") == key
        and manifest["recipe_digest"] == bundle.manifest["recipe_digest"]
    ]

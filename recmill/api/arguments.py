"""Converts arguments of public functions to what stages take, and chooses default locations of results."""

from __future__ import annotations

import atexit
import itertools
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from recmill.errors import ArtifactError, LogError, RecipeError

if TYPE_CHECKING:
    import polars as pl
    import pyspark.sql
    import ray.data

    from recmill.artifacts.bundle.bundle import Bundle
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint
    from recmill.dataset.table import Table
    from recmill.recipe.recipe import Recipe
    from recmill.reporting.progress import Progress


class ArrowStream(Protocol):
    """A frame of any library with Arrow's C stream interface: Polars, pandas, pyarrow, DuckDB, ..."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Frame: TypeAlias = "ArrowStream | pl.LazyFrame | ray.data.Dataset | pyspark.sql.DataFrame"
PathLike: TypeAlias = "str | os.PathLike[str]"
Source: TypeAlias = "PathLike | Frame"
Data: TypeAlias = "Source | Sequence[Source] | Mapping[str, Source | Sequence[Source]]"
RecipeLike: TypeAlias = "Recipe | PathLike | Mapping[str, Any]"


def load_recipe(recipe: RecipeLike, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Recipe:
    """Load a recipe by name or file, or from a dict with the keys of the TOML file. Reports all problems at once.

    A name is that of a shipped recipe; a file is TOML, or Python as `file.py:function`. `overrides` change values
    before validation: `{"ranking.train.epochs": 1}`, or texts as for `--set`.
    """
    from recmill.recipe.load import load_recipe as load
    from recmill.recipe.load import override, recipe_from_dict, tree_of
    from recmill.recipe.recipe import Recipe

    if isinstance(recipe, (str, os.PathLike)):
        return load(os.fspath(recipe), overrides)
    if isinstance(recipe, Recipe):
        tree = tree_of(recipe)
    elif isinstance(recipe, Mapping):
        tree = _copied(recipe)
    else:
        raise RecipeError(
            "recipe", [f"expected a name, a TOML file, a dict or a Recipe, got {type(recipe).__name__}"]
        )
    return recipe_from_dict(override(tree, overrides, "recipe"))


def _copied(value: Any) -> Any:
    """Copy dicts and lists, so that overrides do not modify the caller's."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def recipe_of(recipe: RecipeLike) -> Recipe:
    """The recipe of an argument; a loaded Recipe is returned as it is."""
    from recmill.recipe.recipe import Recipe

    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)


def as_address(path: PathLike) -> str | Path:
    """A directory, or an unchanged URL: a Path would drop one of its slashes."""
    return path if isinstance(path, str) and "://" in path else Path(path)


def table_of(table: Table | PathLike) -> Table:
    from recmill.dataset.table import Table

    if isinstance(table, (str, os.PathLike)):
        return Table.open(as_address(table))
    if isinstance(table, Table):
        return table
    raise _wrong("table", "a Table or its directory", table, "recmill.prepare(recipe, data) makes one")


def checkpoint_of(checkpoint: Checkpoint | PathLike) -> Checkpoint:
    from recmill.artifacts.checkpoint.checkpoint import Checkpoint

    if isinstance(checkpoint, (str, os.PathLike)):
        return Checkpoint.open(as_address(checkpoint))
    if isinstance(checkpoint, Checkpoint):
        return checkpoint
    raise _wrong(
        "checkpoint", "a Checkpoint or its directory", checkpoint, "recmill.train(recipe, table) makes one"
    )


def bundle_of(bundle: Bundle | PathLike, trust_code: Collection[str] = ()) -> Bundle:
    from recmill.artifacts.bundle.bundle import Bundle

    if isinstance(bundle, (str, os.PathLike)):
        return Bundle.open(as_address(bundle), trust_code)
    if isinstance(bundle, Bundle):
        return Bundle.open(bundle.path, trust_code or bundle.trust_code)
    raise _wrong("bundle", "a Bundle or its directory", bundle, "recmill.export(checkpoint) makes one")


def _wrong(name: str, expected: str, found: object, remedy: str) -> ArtifactError:
    return ArtifactError(f"{name}: expected {expected}, got {type(found).__name__}; {remedy}.")


def data_of(recipe: Recipe, data: Data, into: PathLike | None = None) -> str:
    """The directory or URL of a log; frames and single files go to a temporary directory of this process.

    That of frames that other machines write is beside `into`, which all machines see.
    """
    from recmill.logs.frames import open_data

    return open_data(recipe, data, lambda: folder_for(data, into, "data"))


def folder_for(data: Any, into: PathLike | None, name: str) -> Path:
    """A new directory for frames, removed at the end of this process, that whoever writes them can see."""
    from recmill.logs.cluster_frames import frames_in, is_elsewhere

    if not any(is_elsewhere(frame) for frame in frames_in(data)):
        return new_folder(name)
    if into is None or not isinstance(as_address(into), Path):
        raise LogError(
            "data: this frame's rows are on other machines, which write them beside `into` for all to read. Give into, "
            "a directory on a file system that all machines share; or write the frame as Parquet yourself, and pass "
            "the directory."
        )
    target = Path(into).absolute()
    folder = target.parent / f".{target.name}-{name}-{uuid.uuid4().hex[:12]}"
    folder.mkdir(parents=True)
    atexit.register(_remove, folder, os.getpid())
    return folder


def progress_of(quiet: bool) -> Progress:
    from recmill.reporting.progress import Progress

    return Progress(quiet)


# locations of results


def folder_of(into: PathLike | None, name: str) -> Path:
    """The requested directory, or one that lives as long as this process."""
    return Path(into) if into is not None else new_folder(name)


def target_of(into: PathLike | None, name: str) -> str | Path:
    """Like `folder_of`, where URLs are allowed."""
    return as_address(into) if into is not None else new_folder(name)


_numbers = itertools.count(1)


def new_folder(name: str) -> Path:
    """A new, empty directory of this process, removed at its end."""
    folder = _process_folder(os.getpid()) / f"{name}-{next(_numbers)}"
    folder.mkdir()
    return folder


@cache
def _process_folder(pid: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="recmill-"))
    atexit.register(_remove, folder, pid)
    return folder


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child process
        shutil.rmtree(folder, ignore_errors=True)

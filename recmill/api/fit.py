"""`recmill.fit`: a recommender from frames or files of events, without a recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from recmill.api.arguments import PathLike, Source, folder_for, folder_of
from recmill.api.commands import run
from recmill.errors import RecmillError
from recmill.logs.config import DEFAULT_MAX_BAD

if TYPE_CHECKING:
    from recmill.api.fitted import FittedRecommender
    from recmill.stages.init.config import InitConfig
    from recmill.stages.init.init import InitResult

_RECIPE = "recipe.toml"


def fit(
    events: Source,
    *,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    items: Source | None = None,
    users: Source | None = None,
    positive: str | None = None,
    time_format: str | None = None,
    into: PathLike | None = None,
    threads: int | None = None,
    max_bad: float = DEFAULT_MAX_BAD,
    quiet: bool = False,
) -> FittedRecommender:
    """Train a recommender on events: a frame of Polars, pandas, Arrow, Ray or Spark, or a file as for `recmill init`.

    `user`, `item` and `time` name columns; missing ones are detected by names and values. `positive` is a condition
    such as "rating >= 4", or "all". `items` and `users` are frames or files with one row for each, with the column of
    the events. Prints its decisions unless `quiet`. Results stay in `into`, if it is given.
    """
    from recmill.api.fitted import FittedRecommender
    from recmill.stages.init.config import InitConfig

    config = InitConfig(
        user=user, item=item, time=time, positive=positive, time_format=time_format, max_bad=max_bad
    )
    files = _files({"events": events, "items": items, "users": users}, into)
    decided = _decide(files, config)
    if decided.recipe.log.user is None:
        raise RecmillError(
            "fit: the events seem to have no users and items. Name their columns with user= and item=; "
            "a ranker alone is made by `recmill init` and recmill.run."
        )
    if not quiet:
        print("\n".join(decided.lines))
    folder = folder_of(into, "fit")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _RECIPE).write_text(decided.text, encoding="utf-8")
    ran = run(decided.recipe, decided.data, into=folder, threads=threads, max_bad=max_bad, quiet=quiet)
    if ran.bundle is None:
        raise RecmillError(
            f"fit: the list that users would get is worse than most popular items: see {ran.report}. "
            "Change what counts as positive, or edit the recipe beside it and call recmill.run."
        )
    return FittedRecommender(ran, decided.lines)


def _files(sources: dict[str, Source | None], into: PathLike | None) -> list[str]:
    """Paths as they are; frames as Parquet files in a temporary folder."""
    from recmill.logs.frames import write_all_columns

    folder: Path | None = None
    files = []
    for name, source in sources.items():
        if source is None:
            continue
        if isinstance(source, (str, os.PathLike)):
            files.append(os.fspath(source))
            continue
        folder = folder or folder_for(sources, into, "frames")
        write_all_columns(source, folder / f"{name}.parquet", name)
        files.append(str(folder / f"{name}.parquet"))
    return files


def _decide(files: list[str], config: InitConfig) -> InitResult:
    from recmill.stages.init.init import init
    from recmill.stages.init.roles import Unclear

    try:
        return init(files, config)
    except Unclear as unclear:
        options = f", one of: {', '.join(unclear.options[:12])}" if unclear.options else ""
        raise RecmillError(f"fit: {unclear.question} Give {unclear.name}={options}.") from None

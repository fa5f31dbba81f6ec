"""init: profile files of rows, decide their roles, and write a recipe for a person to edit."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from recmill.errors import LogError
from recmill.logs.describe import describe_files
from recmill.logs.sniff import HeaderUnclear
from recmill.recipe.load import recipe_from_dict
from recmill.recipe.recipe import Log, Recipe, SideTable
from recmill.stages.init.columns import FileProfile, profile
from recmill.stages.init.config import InitConfig
from recmill.stages.init.decide import Decisions
from recmill.stages.init.names import KNOWN
from recmill.stages.init.positives import find_positives, is_binary, is_like_rating
from recmill.stages.init.roles import (
    NO_TIME,
    TimeColumn,
    Unclear,
    column_named,
    find_key,
    find_time,
    is_like_time,
    only,
    seconds_of,
)
from recmill.stages.init.shown import ShownRows, describe_shown_rows, find_shown_rows
from recmill.stages.init.sides import Role, SideFile, find_keys_by_values, link
from recmill.stages.init.write import ranker_text, recipe_text

_SHOWN = 8


@dataclass(frozen=True)
class InitResult:
    """A recipe as text and parsed, the directory of its files, and the decisions behind it."""

    text: str
    recipe: Recipe
    data: str
    lines: tuple[str, ...]
    max_bad: float
    titles: tuple[str, ...] = ()  # names of columns that hold what people call items


def init(files: Sequence[str], config: InitConfig, name: str | None = None) -> InitResult:
    """Write a recipe for a log and the files of items and users that belong to it.

    Raises Unclear for questions that the files do not answer, and LogError for files that cannot be read.
    """
    events = _profile_events(files[0], config)
    others = [profile(path, known=KNOWN, max_bad=config.max_bad) for path in files[1:]]
    data = data_directory(files)
    shown = find_shown_rows(events, config, len(files), _names_below(data, files)[0])
    if shown is not None:
        return _init_ranker(shown, name or name_for(files[0]), data, config.max_bad)
    decided = decide(events, others, config, _names_below(data, files))
    text = recipe_text(name or name_for(files[0]), decided)
    recipe = recipe_from_dict(tomllib.loads(text), "the recipe that init wrote")
    _check_first_rows(recipe, data, config.max_bad)
    titles = tuple(
        side.title.name for side in decided.sides if side.role == "item" and side.title is not None
    )
    return InitResult(text, recipe, data, tuple(_describe(decided)), config.max_bad, titles)


def _init_ranker(shown: ShownRows, name: str, data: str, max_bad: float) -> InitResult:
    text = ranker_text(name, shown)
    recipe = recipe_from_dict(tomllib.loads(text), "the recipe that init wrote")
    _check_first_rows(recipe, data, max_bad)
    time = _time_words(shown.time) if shown.time is not None else ""
    lines = describe_shown_rows(shown, _file_line(shown.events), time)
    return InitResult(text, recipe, data, tuple(lines), max_bad)


def _profile_events(path: str, config: InitConfig) -> FileProfile:
    header = None if config.header is None else config.header == "yes"
    try:
        return profile(path, _separator(config.separator), header, KNOWN, config.max_bad)
    except HeaderUnclear as error:
        raise Unclear(str(error).partition(" Give --")[0], "header", ("yes", "no")) from None


def _separator(given: str | None) -> str | None:
    """The separator as a shell passes it: \\t is a tab."""
    return None if given is None else given.replace("\\t", "\t").replace("\\x01", "\x01")


def decide(
    events: FileProfile, others: Sequence[FileProfile], config: InitConfig, file_names: tuple[str, ...]
) -> Decisions:
    """Decide the columns' roles, and everything that follows from them."""
    if not events.has_names:
        events, config = _named_by_values(events, others, config)
    user = find_key(events, "user", config.user, [config.item or ""])
    item = find_key(events, "item", config.item, [user.name])
    if user.name == item.name:
        raise Unclear(f'{events.path}: user and item are both "{user.name}".', "item")
    keys = (user.name, item.name)
    # A number may order events or be a position on a page; the presence of impressions decides.
    first = find_time(events, config.time, config.time_format, keys, has_impressions=True)
    taken = keys if first is None else (*keys, first.name)
    positives = find_positives(events, config.positive, taken)
    time = first or find_time(events, config.time, config.time_format, keys, positives.has_impressions)
    sides: list[SideFile] = []
    for other in others:
        sides.append(link(other, user, item, {side.name for side in sides}))
    return Decisions(events, user, item, time, positives, tuple(sides), file_names)


def _named_by_values(
    events: FileProfile, others: Sequence[FileProfile], config: InitConfig
) -> tuple[FileProfile, InitConfig]:
    """Name the columns of a log without a header by their values: user, item, time, rating or label."""
    by_values = find_keys_by_values(events, others) if config.user is None or config.item is None else {}
    keys: dict[Role, str] = {}
    roles: tuple[tuple[Role, str | None], ...] = (("user", config.user), ("item", config.item))
    for role, given in roles:
        keys[role] = find_key(events, role, given or by_values.get(role), keys.values()).name
    names: dict[str, str] = {name: role for role, name in keys.items()}
    if config.time not in (None, NO_TIME):
        names[column_named(events, str(config.time), "time").name] = "time"
    elif config.time is None:
        names |= dict.fromkeys(only(is_like_time, events, names), "time")
    if config.positive is None:
        names |= dict.fromkeys(only(is_like_rating, events, names), "rating")
        names |= dict.fromkeys(only(is_binary, events, names), "label")
    config = replace(
        config, user="user", item="item", time="time" if "time" in names.values() else config.time
    )
    return events.renamed(names), config


# files


def data_directory(files: Sequence[str]) -> str:
    """The common directory of all files."""
    folders = [os.path.dirname(os.path.abspath(path)) for path in files]
    common = os.path.commonpath(folders)
    relative = os.path.relpath(common)
    return common if relative.startswith("..") else relative


def _names_below(data: str, files: Sequence[str]) -> tuple[str, ...]:
    return tuple(os.path.relpath(path, data) for path in files)


def name_for(path: str) -> str:
    """A file's name as a recipe name: `runs/My Events.csv.gz` -> My-Events."""
    stem = os.path.basename(path).partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).strip("-") or "mine"


def _check_first_rows(recipe: Recipe, data: str, max_bad: float) -> None:
    """Check that the recipe parses the files like the sample; a failure means a wrong guess, not a bad file."""
    specs: dict[str, Log | SideTable] = {"log": recipe.log, **recipe.tables}
    for name, spec in specs.items():
        report = describe_files(spec, data)
        if report.problem:
            raise LogError(report.problem)
        if len(report.bad) > max(max_bad * (report.num_good + len(report.bad)), 1 if max_bad else 0):
            row = report.bad[0]
            raise LogError(
                f"{name}: {row.file} at byte {row.offset:,} has {row.reason} (column {row.column}), though the sample "
                "did not. Write the recipe by hand from what is printed by --help."
            )


# the decisions in words


def _describe(decided: Decisions) -> Iterator[str]:
    """A summary of at most 18 lines."""
    events = decided.events
    yield f"read   {_file_line(events)}"
    for side in decided.sides[:3]:
        attributes = ", ".join(column.name for column in side.categories) or "none"
        title = f"   title: {side.title.name}" if side.title is not None and side.role == "item" else ""
        yield f"read   {_file_line(side.file)}   joined by {_key_line(side)}   attributes: {attributes}{title}"
    for role, column in (("user", decided.user), ("item", decided.item)):
        missing = decided.missing(column)
        without = f"   {missing:.1%} of rows have none and are left out" if missing else ""
        rare = "   those in one row alone share a vector" if decided.min_count(column) > 1 else ""
        yield f"{role}   {column.name}   {column.num_unique:,} {role}s{rare}{without}"
    yield f"time   {_time_line(decided)}"
    yield f"positive: {decided.positives.why}; change with --positive"
    yield f"split  {decided.split.by}: {decided.split_reason}"
    sizes = decided.sizes
    yield f"model  {sizes.reason} dim {sizes.embedding_dim}, {sizes.epochs} epochs"
    if decided.positives.has_impressions:
        context = ", ".join(column.name for column in decided.context[:_SHOWN]) or "no other columns"
        yield f"model  DLRM ranks by the probability of a positive row; it reads the ids and {context}"
    if decided.unused_columns:
        more = ", ..." if len(decided.unused_columns) > _SHOWN else ""
        yield f"unused {', '.join(decided.unused_columns[:_SHOWN])}{more}"
    left_out = [name for file in (events, *(side.file for side in decided.sides)) for name in file.left_out]
    if left_out:
        yield f"left out {', '.join(left_out[:_SHOWN])}: recipes cannot name or read such columns"


def _key_line(side: SideFile) -> str:
    key = side.key
    return f"{key.in_file}, which the log calls {key.name}" if key.in_file else key.name


def _file_line(file: FileProfile) -> str:
    form = file.form
    rows = f"{file.num_rows:,} rows" if file.is_whole else f"the first {file.num_rows:,} rows"
    bad = f", {file.num_bad:,} bad ones left out" if file.num_bad else ""
    if form.format != "delimited":
        return f"{file.path}   {form.format}   {rows}{bad}"
    parts = [f"separator {form.separator!r}", "header" if form.header else "no header"]
    parts += [f"quote {form.quote}"] if form.quote else []
    parts += [f"escape {form.escape}"] if form.escape else []
    return f"{file.path}   {', '.join([*parts, form.encoding])}   {rows}{bad}"


def _time_line(decided: Decisions) -> str:
    if decided.time is None:
        return "none: nothing orders the events; name a column with --time"
    return _time_words(decided.time)


def _time_words(time: TimeColumn) -> str:
    if not time.is_time:
        return f"{time.name}   {time.how}"
    seconds = seconds_of(time).drop_nulls()
    first, last = (datetime.fromtimestamp(float(end), UTC).date() for end in (seconds.min(), seconds.max()))  # type: ignore[arg-type]
    return f"{time.name}   {time.how}, {first} to {last}"

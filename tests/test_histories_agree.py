"""One definition of history: prepare, export, follow and serve see the same earlier events of a user.

A log is cut in two. `prepare` reads all of it; `export` reads the first part; `follow` and `serve` start from the
bundle of that export and take the rest, in batches and event by event.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from recmill.artifacts.bundle.bundle import Bundle, publish_bundle, side_layout
from recmill.features.history import add_history
from recmill.features.plan import Plan
from recmill.logs.tail import Tail
from recmill.logs.tally import Tally
from recmill.recall.parameters import UNFITTED
from recmill.recipe import recipe as r
from recmill.recipe.load import recipe_from_dict, recipe_to_dict
from recmill.recipe.recipe import POSITION
from recmill.stages.export.sides import write_items, write_users
from recmill.stages.export.snapshot import read_snapshot
from recmill.stages.serve.lookup import FeatureLookup
from recmill.stages.serve.messages import Query
from recmill.stages.train.follow import Histories

PRICES = {1: 1.0, 2: 4.0, 3: 6.0, 4: 9.0}
COUNTRIES = {"ann": "DE", "bob": "FR", "cat": "DE", "dan": "IT"}
CONDITIONS = (None, "click = 1", "price < 5", "country = 'DE'", "click = 1 and price < 5", "item <> 3")
END = 1_000  # after every event


@dataclass(frozen=True)
class LogRow:
    time: int
    user: str | None
    item: int
    click: int


Log = tuple[list[LogRow], list[LogRow]]


def recipe_of(condition: str | None, max_length: int, min_length: int, same_time: bool = False) -> r.Recipe:
    history: dict[str, Any] = {"columns": ["item", "price"], "by": "user", "order": "time"}
    history |= {"max_length": max_length, "min_length": min_length, "same_time": same_time}
    history |= {} if condition is None else {"where": condition}
    columns = [
        {"name": "row", "type": "int"},
        {"name": "time", "type": "int"},
        {"name": "user", "type": "text"},
        {"name": "item", "type": "int"},
        {"name": "click", "type": "int"},
        {"name": "price", "type": "float", "of": "item"},
        {"name": "country", "type": "text", "of": "user"},
    ]
    return recipe_from_dict(
        {
            "name": "histories",
            "log": {
                "files": ["events.csv"],
                "separator": ",",
                "user": "user",
                "item": "item",
                "time": "time",
                "columns": columns,
            },
            "rows": [{"history": history}],
            "labels": [{"name": "clicked", "columns": "click"}],
            "features": [
                {"columns": ["user", "item"], "steps": ["key"]},
                {"name": "past", "columns": "item_history", "steps": ["key"]},
            ],
            "ranking": {"model": "dlrm", "label": "clicked", "top": [4]},
        }
    )


rows = st.builds(
    LogRow,
    time=st.integers(0, 9),
    user=st.sampled_from([*COUNTRIES, None]),
    item=st.sampled_from(list(PRICES)),
    click=st.integers(0, 1),
)


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Rows up to a time in any order, and those after it in order."""
    drawn = draw(st.lists(rows, min_size=2, max_size=24))
    cut = draw(st.integers(1, 9))
    first = [row for row in drawn if row.time < cut] or [LogRow(0, "ann", 1, 1)]
    return first, sorted((row for row in drawn if row.time >= cut), key=lambda row: row.time)


def write(folder: Path, events: list[LogRow], first: int = 0) -> None:
    with open(folder / "events.csv", "a") as file:
        for number, row in enumerate(events, first):
            user, country = (row.user, COUNTRIES[row.user]) if row.user is not None else ("", "")
            file.write(f"{number},{row.time},{user},{row.item},{row.click},{PRICES[row.item]},{country}\n")


@contextmanager
def log_of(*events: LogRow) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "log").mkdir()
        write(path / "log", list(events))
        yield path


Seen = tuple[list[int], list[float]]  # histories of items and of their prices


def as_prepared(recipe: r.Recipe, *events: LogRow) -> dict[int, Seen]:
    """Row -> its history, by the function that prepare gives to engines."""
    users = [row.user for row in events]
    frame = pl.DataFrame(
        {
            "row": range(len(events)),
            "time": [row.time for row in events],
            "user": pl.Series(users, dtype=pl.String),
            "item": [row.item for row in events],
            "click": [row.click for row in events],
            "price": [PRICES[row.item] for row in events],
            "country": pl.Series([COUNTRIES.get(user or "") for user in users], dtype=pl.String),
            POSITION: range(len(events)),
        }
    )
    (history,) = recipe.rows
    assert isinstance(history, r.History)
    return _seen(add_history(history, frame), "row")


def _seen(rows: pl.DataFrame, key: str) -> dict[Any, Seen]:
    found = rows.select(key, "item_history", "price_history").iter_rows()
    return {key: (items, prices) for key, items, prices in found}


def at_end(recipe: r.Recipe, *events: LogRow) -> dict[str, Seen]:
    """User -> what a row after all of these would see in a Table."""
    users = list(dict.fromkeys(row.user for row in events if row.user is not None))
    probes = [LogRow(END, user, 1, 0) for user in users]
    found = as_prepared(recipe, *events, *probes)
    return {user: found[len(events) + number] for number, user in enumerate(users)}


MODELS = {"ranking": {"numbers": [], "keys": ["user", "item", "past"], "wide": []}}


def exported(recipe: r.Recipe, folder: Path) -> Bundle:
    """A bundle of users and items as export writes them; the model's own files are not there."""
    plan, into = Plan(recipe), folder / "bundle"
    plan.pending()
    found = read_snapshot(recipe, plan, str(folder / "log"), folder / "work")
    columns = plan.columns()
    write_users(into / "users", found, plan, side_layout(columns, MODELS, "user"))
    write_items(into / "items", found, plan, side_layout(columns, MODELS, "item"), UNFITTED, threads=1)
    plan.save(into / "plan")
    fields = {"recipe": recipe_to_dict(recipe), "columns": [asdict(column) for column in columns]}
    return publish_bundle(into, {**fields, "models": MODELS, "rows_dtype": "float32"})


few_examples = examples(10, suppress_health_check=[HealthCheck.too_slow])
recipes = st.builds(recipe_of, st.sampled_from(CONDITIONS), st.integers(1, 4), st.just(0))


@few_examples
@given(recipes, logs())
def test_export_stores_what_the_next_row_would_see(recipe: r.Recipe, log: Log) -> None:
    with log_of(*log[0]) as folder:
        users = exported(recipe, folder).users
        assert users is not None
        found = _seen(users.raw(np.arange(len(users))), "user")
    assert found == at_end(recipe, *log[0])


@few_examples
@given(st.sampled_from(CONDITIONS), st.integers(1, 4), st.data(), logs())
def test_follow_gives_new_rows_the_histories_of_prepare(
    condition: str | None, max_length: int, data: st.DataObject, log: Log
) -> None:
    min_length, same_time = data.draw(st.integers(0, max_length)), data.draw(st.booleans())
    recipe = recipe_of(condition, max_length, min_length, same_time)
    first, rest = log
    times = sorted({row.time for row in rest})
    with log_of(*first) as folder:
        bundle = exported(recipe, folder)
        tail = Tail(
            recipe.log, str(folder / "log"), {"events.csv": (folder / "log" / "events.csv").stat().st_size}
        )
        histories, written = Histories(recipe, bundle), len(first)
        found: dict[int, Seen] = {}
        while rest:
            until = data.draw(st.sampled_from(times))
            chunk = [row for row in rest if row.time <= until]
            rest = [row for row in rest if row.time > until]
            write(folder / "log", chunk, written)
            written += len(chunk)
            for rows in tail.read(Tally()):
                found |= _seen(histories.keep_long(histories.add(recipe.rows[0], rows)), "row")
        published = histories.put_into(pl.DataFrame({"user": list(COUNTRIES)}))
    nothing: Seen = ([], [])
    latest = at_end(recipe_of(condition, max_length, 0), *first, *log[1])
    assert _seen(published, "user") == {user: latest.get(user, nothing) for user in COUNTRIES}
    expected = as_prepared(recipe, *first, *log[1])
    assert found == {row: seen for row, seen in expected.items() if row >= len(first)}


@few_examples
@given(recipes, logs())
def test_serve_adds_live_events_as_prepare_would(recipe: r.Recipe, log: Log) -> None:
    first, rest = log
    with log_of(*first) as folder:
        lookup = FeatureLookup(exported(recipe, folder))
        stored = {user: lookup.raw_user(user) for user in COUNTRIES}
    for number, row in enumerate(rest, 1):
        if row.user is None:
            continue
        # The columns of a new user or item come with its first event, those of others are stored.
        raw = {"country": COUNTRIES[row.user], **stored[row.user]}
        item = {"item": row.item, "price": PRICES[row.item]}
        stored[row.user] = raw | lookup.after_event(raw, {**item, "time": row.time, "click": row.click})
        found = stored[row.user]["item_history"], stored[row.user]["price_history"]
        assert found == at_end(recipe, *first, *rest[:number])[row.user]


@few_examples
@given(recipes, logs())
def test_items_that_a_request_brings_count_as_events_that_say_nothing_else(
    recipe: r.Recipe, log: Log
) -> None:
    """Their label is not known: they are taken for clicks, and other columns are those of the user and the item."""
    first, rest = log
    known_items = {row.item for row in first}
    user = next((row.user for row in first if row.user is not None), None)
    recent = [row.item for row in rest if row.item in known_items]
    if user is None or not recent:
        return
    with log_of(*first) as folder:
        lookup = FeatureLookup(exported(recipe, folder))
        given = lookup.user_row(Query(user=user, recent=list(recent))).given
    clicks = [LogRow(100 + number, user, item, 1) for number, item in enumerate(recent)]
    expected = at_end(recipe, *first, *clicks)[user]
    assert (given["item_history"], given["price_history"]) == expected

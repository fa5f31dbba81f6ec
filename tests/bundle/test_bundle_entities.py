"""Users and items by id: raw columns, finished features, and what was put since."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import polars as pl
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from recmill.artifacts.bundle.entities import Entities, write_entities
from recmill.artifacts.bundle.entity_ids import Id
from recmill.dataset.batch import Batch, Keys, Layout
from recmill.errors import ArtifactError
from recmill.features import kernels

LAYOUT = Layout(("price", "age"), ("brand", "tags", "shop"), (), (), {"shop": 10})
RAW = pl.DataFrame(
    {
        "title": ["red hat", "blue hat", None],
        "item": ["a", "bé", "c"],
        "colours": [["red"], [], ["blue", "green"]],
        "stock": [5, None, 7],
    }
)
FEATURES = pl.DataFrame(
    {
        "price": [0.5, 1.5, 2.5],
        "age": [10.0, 20.0, 30.0],
        "brand": [-(2**63), 2**63 - 1, 3],
        "tags": [[1, 2], [], [3]],
        "shop": [7, 8, 9],
    },
    schema_overrides={"price": pl.Float32, "age": pl.Float32, "tags": pl.List(pl.Int64), "shop": pl.Int32},
)


@pytest.fixture
def items(tmp_path: Path) -> Entities:
    write_entities(tmp_path / "items", "item", RAW, FEATURES, LAYOUT, "item")
    return Entities(tmp_path / "items", "item", LAYOUT, "item")


def indices(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def plain(batch: Batch) -> list[Any]:
    """Each row as [numbers, keys of the features in their order]."""

    def key(keys: Keys, row: int) -> Any:
        if keys.offsets is None:
            return int(keys.values[row])
        return keys.values[keys.offsets[row] : keys.offsets[row + 1]].tolist()

    return [
        [batch.numbers[row].tolist(), *(key(keys, row) for keys in batch.keys.values())]
        for row in range(batch.size)
    ]


def test_items_are_found_by_their_id(items: Entities) -> None:
    assert len(items) == 3
    assert items.indices(["c", "nobody", "bé", "a", "a", ""]).tolist() == [2, -1, 1, 0, 0, -1]
    assert items.indices([]).tolist() == []
    assert items.ids(indices(2, 0)) == ["c", "a"]


def test_raw_rows_come_in_the_order_asked_for_with_the_id_first(items: Entities) -> None:
    assert items.raw(indices(2, 0, 2)).rows() == [
        ("c", None, ["blue", "green"], 7),
        ("a", "red hat", ["red"], 5),
        ("c", None, ["blue", "green"], 7),
    ]
    assert items.raw(indices(1, -1), ["stock", "title"]).rows() == [(None, "blue hat"), (None, None)]
    assert items.raw(indices()).columns == ["item", "title", "colours", "stock"]


def test_features_come_in_the_order_of_the_layout(items: Entities) -> None:
    batch = items.features(indices(2, 0, 1))
    assert list(batch.keys) == ["brand", "tags", "shop"]
    assert plain(batch) == [
        [[2.5, 30.0], 3, [3], 9],
        [[0.5, 10.0], -(2**63), [1, 2], 7],
        [[1.5, 20.0], 2**63 - 1, [], 8],
    ]
    assert plain(items.features(indices())) == []


def test_a_place_below_zero_has_the_unknown_users_features(items: Entities) -> None:
    assert plain(items.features(indices(-1, 0))) == [[[0, 0], 0, [], 0], [[0.5, 10.0], -(2**63), [1, 2], 7]]
    items.unknown_row = Batch(
        1,
        np.array([[8, 9]], np.float32),
        {
            "brand": Keys(np.array([4])),
            "tags": Keys(np.array([5, 6]), np.array([0, 2])),
            "shop": Keys(np.array([1])),
        },
        {},
        {},
    )
    assert plain(items.features(indices(0, -1, -1))) == [
        [[0.5, 10.0], -(2**63), [1, 2], 7],
        [[8, 9], 4, [5, 6], 1],
        [[8, 9], 4, [5, 6], 1],
    ]


def test_put_replaces_known_items_and_appends_new_ones_in_memory_only(items: Entities) -> None:
    raw = pl.DataFrame({"item": ["c", "new", "c"], "stock": [0, 1, 2], "title": ["x", "y", "z"]})
    features = pl.DataFrame(
        {
            "price": [1.0, 2.0, 3.0],
            "age": [1.0, 2.0, 3.0],
            "brand": [1, 2, 3],
            "tags": [[1], [2, 2], [3, 3, 3]],
            "shop": [1, 2, 3],
        }
    )
    assert items.put(raw, features).tolist() == [2, 3, 2]
    assert len(items) == 4
    assert items.indices(["new", "c", "a"]).tolist() == [3, 2, 0]
    assert items.ids(indices(3, 0, 2)) == ["new", "a", "c"]
    assert plain(items.features(indices(0, 3, -1, 2))) == [
        [[0.5, 10.0], -(2**63), [1, 2], 7],
        [[2, 2], 2, [2, 2], 2],
        [[0, 0], 0, [], 0],
        [[3, 3], 3, [3, 3, 3], 3],
    ]
    assert items.raw(indices(3, 0, 2)).rows() == [
        ("new", "y", None, 1),
        ("a", "red hat", ["red"], 5),
        ("c", "z", None, 2),
    ]
    assert items.column("stock").to_list() == [5, None, 2, 1]
    assert items.column("item").to_list() == ["a", "bé", "c", "new"]
    assert items.column("colours").to_list() == [["red"], [], None, None]
    again = Entities(items.path, "item", LAYOUT, "item")
    assert again.indices(["new"]).tolist() == [-1]
    assert plain(again.features(indices(2))) == [[[2.5, 30.0], 3, [3], 9]]


def test_putting_the_same_item_again_and_again_takes_no_more_memory(items: Entities) -> None:
    raw, features = RAW[:1], FEATURES[:1]
    items.put(raw, features)
    once = len(items), len(items._changed)
    for _ in range(50):
        items.put(raw, features)
    assert (len(items), len(items._changed)) == once


def test_an_id_out_of_range_or_missing_changes_nothing(items: Entities) -> None:
    with pytest.raises(ArtifactError, match='"shop" has id 10'):
        items.put(RAW[:1].with_columns(item=pl.lit("x")), FEATURES[:1].with_columns(shop=pl.lit(10)))
    with pytest.raises(ValueError, match="need an id each"):
        items.put(RAW[:1].with_columns(item=pl.lit(None, pl.String)), FEATURES[:1])
    assert len(items) == 3
    assert items.indices(["x"]).tolist() == [-1]


@pytest.mark.parametrize("ids", [["a", "a"], ["a", None]])
def test_items_without_an_id_of_their_own_are_not_written(tmp_path: Path, ids: list[str | None]) -> None:
    with pytest.raises(ValueError, match="2 items need"):
        write_entities(tmp_path, "item", pl.DataFrame({"item": ids}), FEATURES[:2], LAYOUT, "item")


def numbered(folder: Path, ids: list[Id]) -> Entities:
    layout = Layout((), (), (), (), {})
    raw = pl.DataFrame({"user": ids}, schema={"user": pl.Int64 if isinstance(ids[0], int) else pl.String})
    write_entities(folder, "user", raw, pl.DataFrame({"x": range(len(ids))}), layout, "user")
    return Entities(folder, "user", layout, "user")


def test_a_number_and_its_text_are_the_same_id(tmp_path: Path) -> None:
    ints = numbered(tmp_path / "ints", [7, -3, 0])
    wanted: list[Id] = ["7", "-3", "0", "07", "+7", " 7", "-0", "٧", "7.0", "x", "9" * 30, 2**70, -3]
    assert ints.indices(wanted).tolist() == [0, 1, 2, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1]
    texts = numbered(tmp_path / "texts", ["7", "007", "x"])
    assert texts.indices([7, "007", "x", 70]).tolist() == [0, 1, 2, -1]
    assert texts.indices(["\ud800", "x"]).tolist() == [-1, 2]


@pytest.mark.parametrize("ids", [["a1", "b1", "a2", "a3", "b2"], [11, 21, 12, 13, 22]])
def test_ids_with_one_hash_are_told_apart(tmp_path: Path, ids: list[Id]) -> None:
    numbered(tmp_path, ids)
    for wanted in range(len(ids)):
        hashes = kernels.hash64(pl.Series(ids[wanted : wanted + 1] * len(ids)), 0)
        np.save(tmp_path / "hashes.npy", hashes)
        np.save(tmp_path / "indices.npy", np.arange(len(ids)))
        users = Entities(tmp_path, "user", Layout((), (), (), (), {}), "user")
        assert users.indices([ids[wanted], "a4", 14]).tolist() == [wanted, -1, -1]


def test_ids_are_found_by_how_they_begin(tmp_path: Path) -> None:
    texts = numbered(tmp_path / "texts", ["ab", "b", "abc", "a", "xa"])
    assert texts.ids_with_prefix("a", 10) == ["ab", "abc", "a"]
    assert texts.ids_with_prefix("a", 2) == ["ab", "abc"]
    texts.put(pl.DataFrame({"user": ["az", "z"]}), pl.DataFrame({"x": [1, 2]}))
    assert texts.ids_with_prefix("a", 10) == ["ab", "abc", "a", "az"]
    assert numbered(tmp_path / "ints", [12, 2, 123]).ids_with_prefix("12", 10) == [12, 123]


def test_no_items_at_all_are_fine(tmp_path: Path) -> None:
    write_entities(tmp_path, "item", RAW[:0], FEATURES[:0], LAYOUT, "item")
    items = Entities(tmp_path, "item", LAYOUT, "item")
    assert items.indices(["a"]).tolist() == [-1]
    assert plain(items.features(indices(-1, -1))) == [[[0, 0], 0, [], 0]] * 2
    assert items.raw(indices(-1)).rows() == [(None, None, None, None)]
    assert items.put(RAW, FEATURES).tolist() == [0, 1, 2]
    assert plain(items.features(indices(2, -1))) == [[[2.5, 30.0], 3, [3], 9], [[0, 0], 0, [], 0]]


def test_a_place_that_is_not_there_is_an_error_and_never_another_row(items: Entities) -> None:
    for wrong in (3, -(2**40)):
        with pytest.raises(IndexError, match=r"is outside 0\.\.2"):
            items._numbers.take(indices(0, wrong))
    items.put(RAW[:1].with_columns(item=pl.lit("d")), FEATURES[:1])
    assert plain(items.features(indices(3))) == [[[0.5, 10.0], -(2**63), [1, 2], 7]]
    with pytest.raises(IndexError, match="below 0 has no id"):
        items.ids(indices(0, -1))
    with pytest.raises(IndexError, match=r"4 is outside 0\.\.3"):
        items.features(indices(0, 4))


def test_files_of_another_layout_are_refused(items: Entities) -> None:
    other = Layout(("price",), LAYOUT.keys, (), (), {})
    with pytest.raises(ArtifactError, match="do not fit each other and the recipe"):
        Entities(items.path, "item", other, "item")


@examples(20)
@given(st.data())
def test_any_sequence_of_puts_reads_like_a_dictionary(data: st.DataObject) -> None:
    known: dict[str, Any] = {}
    rows = st.tuples(
        st.text("abcé😀", max_size=2), st.integers(0, 99), st.lists(st.integers(-9, 9), max_size=3)
    )
    layout = Layout(("n",), ("k", "l"), (), (), {})

    def frames(some: list[Any]) -> tuple[pl.DataFrame, pl.DataFrame]:
        ids, numbers, lists = ([row[part] for row in some] for part in range(3))
        raw = pl.DataFrame({"u": ids, "n": numbers}, schema={"u": pl.String, "n": pl.Int64})
        columns = {"n": numbers, "k": numbers, "l": lists}
        return raw, pl.DataFrame(columns, schema={"n": pl.Float32, "k": pl.Int64, "l": pl.List(pl.Int64)})

    with TemporaryDirectory() as folder:
        first = data.draw(st.lists(rows, max_size=5, unique_by=lambda row: row[0]))
        write_entities(Path(folder), "user", *frames(first), layout, "u")
        users = Entities(Path(folder), "user", layout, "u")
        known.update({row[0]: row for row in first})
        for _ in range(data.draw(st.integers(0, 3))):
            some = data.draw(st.lists(rows, max_size=4))
            users.put(*frames(some))
            known.update({row[0]: row for row in some})
        wanted = data.draw(st.lists(st.text("abcé", max_size=2), max_size=6))
        found = users.indices(wanted)
        assert [index >= 0 for index in found.tolist()] == [one in known for one in wanted]
        expected = [known.get(one, (None, 0, [])) for one in wanted]
        assert plain(users.features(found)) == [[[float(n)], n, keys] for _, n, keys in expected]
        assert users.raw(found)["u"].to_list() == [row[0] for row in expected]
        assert users.column("u").to_list() == list(known)
        assert users.column("n").to_list() == [row[1] for row in known.values()]
        assert users.ids(np.arange(len(known))) == list(known)

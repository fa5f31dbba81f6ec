"""Feature rows as bytes: what goes in comes out, and what is not ours is not found."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from recmill.artifacts.feature_store.codec import RawCodec, RowCodec, add_checksums
from recmill.dataset.batch import Batch, Keys, Layout

KEYS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32, allow_nan=False)


def lists(rows: list[list[float]], dtype: type[np.generic]) -> Keys:
    lengths = [len(row) for row in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Keys(np.array([value for row in rows for value in row], dtype), offsets)


def shop_layout() -> Layout:
    return Layout(
        ("price", "age"), ("city", "cart", "device"), ("clicks",), ("click",), {"city": 100, "cart": 7}
    )


def shop_rows() -> Batch:
    return Batch(
        2,
        np.array([[1.5, 30], [2.5, 40]], np.float32),
        {
            "city": Keys(np.array([99, 0])),
            "cart": lists([[1, 2, 3], []], np.int64),
            "device": Keys(np.array([-(2**63), 7])),
        },
        {"clicks": lists([[], [0.25]], np.float32)},
        {},
    )


def unknown_user() -> Batch:
    keys = {"city": Keys(np.array([1])), "cart": lists([[6]], np.int64), "device": Keys(np.array([5]))}
    return Batch(1, np.array([[-1, -2]], np.float32), keys, {"clicks": lists([[9.0]], np.float32)}, {})


@pytest.fixture
def codec() -> RowCodec:
    return RowCodec(shop_layout(), unknown_user(), "plan")


def assert_same(left: Batch, right: Batch) -> None:
    assert left.size == right.size
    np.testing.assert_array_equal(left.numbers, right.numbers)
    for one, other in ((left.keys, right.keys), (left.lists, right.lists)):
        assert list(one) == list(other)
        for name, keys in one.items():
            np.testing.assert_array_equal(keys.values, other[name].values)
            assert keys.values.dtype == other[name].values.dtype
            assert (keys.offsets is None) == (other[name].offsets is None)
            if keys.offsets is not None:
                np.testing.assert_array_equal(keys.offsets, other[name].offsets)


def test_what_goes_in_comes_out_lists_and_empty_lists_too(codec: RowCodec) -> None:
    batch, found, _ = codec.decode(codec.encode(shop_rows()))
    assert found.tolist() == [True, True]
    assert_same(batch, shop_rows())


def test_the_bytes_are_those_of_the_page(codec: RowCodec) -> None:
    first, second = codec.encode(shop_rows())
    digest = codec.digest
    assert first[:-8] == digest + struct.pack("<ffiqIIiii", 1.5, 30, 99, -(2**63), 3, 0, 1, 2, 3)
    assert second[:-8] == digest + struct.pack("<ffiqIIf", 2.5, 40, 0, 7, 0, 1, 0.25)
    assert add_checksums([first[:-8], second[:-8]]) == [first, second]


def test_the_checksum_is_xxh64() -> None:
    assert add_checksums([b"", b"abc"]) == [
        (0xEF46DB3751D8E999).to_bytes(8, "little"),
        b"abc" + (0x44BC2CF5AD770999).to_bytes(8, "little"),
    ]


def test_a_missing_row_is_an_unknown_user(codec: RowCodec) -> None:
    first, second = codec.encode(shop_rows())
    batch, found, _ = codec.decode([second, None, first])
    assert found.tolist() == [True, False, True]
    assert batch.numbers.tolist() == [[2.5, 40], [-1, -2], [1.5, 30]]
    assert batch.keys["cart"].values.tolist() == [6, 1, 2, 3]
    assert batch.keys["cart"].offsets is not None
    assert batch.keys["cart"].offsets.tolist() == [0, 0, 1, 4]
    assert batch.lists["clicks"].values.tolist() == [0.25, 9.0]


def test_nothing_asked_is_nothing_found(codec: RowCodec) -> None:
    batch, found, _ = codec.decode([])
    assert batch.size == len(found) == len(batch.keys["cart"].values) == 0
    assert batch.numbers.shape == (0, 2)


@pytest.mark.parametrize("change", ["plan", "bounds", "names"])
def test_rows_of_another_layout_are_not_found(codec: RowCodec, change: str) -> None:
    layout = shop_layout()
    if change == "bounds":
        layout = Layout(layout.numbers, layout.keys, layout.lists, layout.labels, {"city": 101, "cart": 7})
    if change == "names":
        layout = Layout(("age", "price"), layout.keys, layout.lists, layout.labels, layout.bounds)
    other = RowCodec(layout, unknown_user(), "another plan" if change == "plan" else "plan")
    batch, found, _ = other.decode(codec.encode(shop_rows()))
    assert found.tolist() == [False, False]
    assert batch.numbers.tolist() == [[-1, -2], [-1, -2]]


@given(data=st.data())
@examples(60)
def test_damaged_rows_are_not_found_and_spoil_no_others(data: st.DataObject) -> None:
    codec = RowCodec(shop_layout(), unknown_user(), "plan")
    first, second = codec.encode(shop_rows())
    damaged = codec.digest + data.draw(st.binary(max_size=60))
    batch, found, _ = codec.decode([first, damaged, second])
    assert found[[0, 2]].all()
    assert batch.numbers[[0, 2]].tolist() == [[1.5, 30], [2.5, 40]]
    assert batch.keys["cart"].values[:3].tolist() == [1, 2, 3]


def test_every_flipped_bit_is_noticed(codec: RowCodec) -> None:
    first, second = codec.encode(shop_rows())
    flipped = [
        bytes(byte ^ 1 << bit if at == place else byte for at, byte in enumerate(first))
        for place in range(len(first))
        for bit in range(8)
    ]
    batch, found, unreadable = codec.decode([second, *flipped, None])
    assert found.tolist() == [True] + [False] * (len(flipped) + 1)
    assert unreadable.tolist() == [False] + [True] * len(flipped) + [False]
    assert batch.numbers[0].tolist() == [2.5, 40]
    assert (batch.numbers[1:] == [-1, -2]).all()


@pytest.mark.parametrize(
    ("city", "cart"), [(100, 0), (-1, 0), (2**31 - 1, 0), (0, 7), (0, -1), (0, 2**31 - 1)]
)
def test_ids_beyond_their_table_are_not_found_though_the_checksum_is_right(
    codec: RowCodec, city: int, cart: int
) -> None:
    first, second = codec.encode(shop_rows())
    forged = codec.digest + struct.pack("<ffiqIIii", 1.5, 30, city, 0, 2, 0, 1, cart)
    batch, found, unreadable = codec.decode([first, *add_checksums([forged]), second])
    assert found.tolist() == [True, False, True]
    assert unreadable.tolist() == [False, True, False]
    assert batch.keys["cart"].values.tolist() == [1, 2, 3, 6]


def test_lengths_beyond_the_row_are_not_found_though_the_checksum_is_right(codec: RowCodec) -> None:
    for lengths in ((2**32 - 1, 0), (0, 2**32 - 1), (3, 0)):
        forged = codec.digest + struct.pack("<ffiqIIii", 1.5, 30, 0, 0, *lengths, 1, 1)
        assert not codec.decode(add_checksums([forged])).found.any()


def test_damaged_raw_columns_and_those_of_other_columns_are_none() -> None:
    codec = RawCodec("user", [("id", "Int64"), ("city", "String")])
    (row,) = codec.encode([{"id": 7, "city": "Bern"}])
    assert codec.decode(row) == {"id": 7, "city": "Bern"}
    for place in range(len(row)):
        assert codec.decode(row[:place] + bytes([row[place] ^ 4]) + row[place + 1 :]) is None
    assert RawCodec("user", [("id", "Int64")]).decode(row) is None
    assert codec.decode(None) is codec.decode(b"") is codec.decode(codec.digest) is None


@st.composite
def batches(draw: st.DrawFn) -> tuple[Layout, Batch, Batch]:
    """A layout of any shape, some rows of it, and an unknown user."""
    num_rows = draw(st.integers(0, 5))
    numbers = tuple(f"n{i}" for i in range(draw(st.integers(0, 3))))
    keys = tuple(f"k{i}" for i in range(draw(st.integers(0, 4))))
    number_lists = tuple(f"l{i}" for i in range(draw(st.integers(0, 2))))
    bounds = {name: draw(st.sampled_from([1, 100, 2**31, 2**31 + 1])) for name in keys if draw(st.booleans())}
    listed = {name for name in keys if draw(st.booleans())}

    def rows(count: int) -> Batch:
        def column(name: str) -> Keys:
            values = st.integers(0, bounds[name] - 1) if name in bounds else KEYS
            if name in listed:
                return lists([draw(st.lists(values, max_size=4)) for _ in range(count)], np.int64)
            return Keys(np.array([draw(values) for _ in range(count)], np.int64))

        table = [[draw(FLOATS) for _ in numbers] for _ in range(count)]
        return Batch(
            count,
            np.array(table, np.float32).reshape(count, len(numbers)),
            {name: column(name) for name in keys},
            {
                name: lists([draw(st.lists(FLOATS, max_size=4)) for _ in range(count)], np.float32)
                for name in number_lists
            },
            {},
        )

    return Layout(numbers, keys, number_lists, (), bounds), rows(num_rows), rows(1)


@given(drawn=batches(), missing=st.sets(st.integers(0, 4)))
@examples(60)
def test_any_rows_of_any_layout_come_back(drawn: tuple[Layout, Batch, Batch], missing: set[int]) -> None:
    layout, rows, strange = drawn
    codec = RowCodec(layout, strange, "plan")
    coded: list[bytes | None] = list(codec.encode(rows))
    back, found, _ = codec.decode(coded)
    assert found.all()
    assert_same(back, rows)
    some = [None if place in missing else row for place, row in enumerate(coded)]
    _, found, _ = codec.decode(some)
    assert found.tolist() == [row is not None for row in some]
    for place, row in enumerate(some):
        alone, _, _ = codec.decode([row])
        assert_same(alone, codec.decode([coded[place]])[0] if row is not None else strange)

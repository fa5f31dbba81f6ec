"""Conditions of requests over many items: they end with the deadline, and what is kept of them is bounded."""

from __future__ import annotations

import time

import numpy as np
import polars as pl
import pytest

from recmill.artifacts.bundle.entities import Entities, write_entities
from recmill.dataset.batch import Layout
from recmill.errors import BadRequest, TooLate
from recmill.stages.serve.masks import Masks

NUM_ITEMS = 100_000
LONG = " or ".join(f"word like '%a{number}_b%'" for number in range(60))  # takes seconds for all items


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Entities:
    folder = tmp_path_factory.mktemp("items")
    layout = Layout((), (), (), (), {})
    raw = pl.DataFrame(
        {"item": range(NUM_ITEMS), "price": [number % 100 / 4 for number in range(NUM_ITEMS)]}
    ).with_columns(word=pl.lit("a1 " * 20) + pl.col("item").cast(pl.String))
    write_entities(folder, "item", raw, pl.DataFrame({"x": range(NUM_ITEMS)}), layout, "item")
    return Entities(folder, "item", layout, "item")


def test_pieces_of_items_make_one_mask(items: Entities) -> None:
    mask = Masks(items).of("price < 1 and item <> 3", None)
    indices = np.arange(NUM_ITEMS)
    np.testing.assert_array_equal(mask, (indices % 100 < 4) & (indices != 3))
    assert Masks(items).of("true", None).all()


def test_work_for_a_condition_ends_with_the_deadline(items: Entities) -> None:
    masks = Masks(items)
    began = time.thread_time()
    with pytest.raises(TooLate, match="while items were compared"):
        masks.of(LONG, time.monotonic() + 0.05)
    assert time.thread_time() - began < 1
    assert not masks._kept, "what is not finished is not kept"


def test_masks_are_kept_up_to_a_number_of_bytes(items: Entities) -> None:
    masks = Masks(items, kept_bytes=3 * NUM_ITEMS)
    kept = [masks.of(f"price < {number}", None) for number in range(3)]
    assert masks.of("price < 0", None) is kept[0]
    masks.of("price < 9", None)
    assert list(masks._kept) == ["price < 2", "price < 0", "price < 9"]
    assert masks.of("price < 2", None) is kept[2]


def test_a_condition_that_is_refused_leaves_nothing(items: Entities) -> None:
    masks = Masks(items)
    with pytest.raises(
        BadRequest, match=r"fails at character 12.*SELECT.*Columns of items: item, price, word"
    ):
        masks.of("price in ( SELECT 1)", None)
    assert not masks._kept

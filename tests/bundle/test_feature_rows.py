"""Features by name give models what a batch of the same rows gives them."""

from __future__ import annotations

import polars as pl
import pytest

from recmill.artifacts.bundle.features import FeatureRows
from recmill.dataset.batch import Batch, Layout, collate
from recmill.errors import ArtifactError

LAYOUT = Layout(("price", "age"), ("user", "words"), (), (), {"user": 3})
ROWS = pl.DataFrame(
    {"price": [1.5, -2.0], "age": [0.25, 8.0], "user": [2, 0], "words": [[7, 8], []]},
    schema={"price": pl.Float32, "age": pl.Float32, "user": pl.UInt32, "words": pl.List(pl.Int64)},
)


def _plain(batch: Batch) -> list[object]:
    keys = {
        name: (keys.values.tolist(), None if keys.offsets is None else keys.offsets.tolist())
        for name, keys in batch.keys.items()
    }
    return [batch.size, str(batch.numbers.dtype), batch.numbers.tolist(), keys]


def test_rows_of_a_frame_and_of_its_batch_become_the_same_batch_again():
    batch = collate(ROWS, LAYOUT, with_labels=False)
    keys = {"user": ([2, 0], None), "words": ([7, 8], [0, 2, 2])}
    expected = [2, "float32", [[1.5, 0.25], [-2.0, 8.0]], keys]

    assert _plain(batch) == expected
    assert _plain(FeatureRows.of(batch, LAYOUT).batch(LAYOUT)) == expected
    assert _plain(FeatureRows.of_frame(ROWS, LAYOUT).batch(LAYOUT)) == expected


def test_a_model_that_reads_other_features_in_another_order_gets_them_so():
    layout = Layout(("age", "price"), ("words",), (), (), {})

    found = FeatureRows.of_frame(ROWS, LAYOUT).batch(layout)

    assert found.numbers.tolist() == [[0.25, 1.5], [8.0, -2.0]]
    assert list(found.keys) == ["words"]


def test_an_id_out_of_range_is_an_error_by_either_way():
    rows = ROWS.with_columns(user=pl.lit(3, dtype=pl.UInt32))
    for make in (FeatureRows.of_frame, collate):
        with pytest.raises(ArtifactError, match='Feature "user" has id 3, but its ids are 0 to 2'):
            make(rows, LAYOUT)

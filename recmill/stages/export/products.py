"""Products in bytes: ranges of a ranker's layers by calibration, and what they change over other rows of the log."""

from __future__ import annotations

from functools import reduce
from operator import or_

import numpy as np
import polars as pl

from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.features import FeatureRows
from recmill.artifacts.bundle.layers import ByteRanges
from recmill.artifacts.bundle.models import RankModel
from recmill.artifacts.bundle.native_ranker import NativeRanker
from recmill.dataset.batch import Array, Batch, Layout, between, collate
from recmill.errors import ArtifactError
from recmill.metrics import exact_auc
from recmill.stages.export.check import Numbers, rank_correlation

SAMPLED_ROWS = 20_000  # half of them calibrate, half judge
MAX_AUC_CHANGE = 0.0005
_REQUESTS, _CANDIDATES = 200, 100  # that calibrate
_LISTS, _LIST_CANDIDATES, _TOP = 50, 500, 50


def fit_byte_products(bundle: Bundle, sample: pl.DataFrame) -> tuple[ByteRanges, Numbers]:
    """Ranges by every second row of the sample, and how scores of the others change; an error when AUC does."""
    model = RankModel(bundle)
    if model.native is None:
        raise ArtifactError(
            f"--products int8 needs a ranker that native code covers, but {model.runs}. Export without it."
        )
    rows = sample.sample(fraction=1, shuffle=True, seed=0)
    batch = collate(bundle.plan.apply(rows, only=model.layout.features), model.layout)
    middle, label = batch.size // 2, str(bundle.models["ranking"]["label"])
    calibrating, judging = between(batch, 0, middle), between(batch, middle, batch.size)
    ranges = _ranges(model.native, calibrating, model.layout)
    found = _compare(model.native, model.native.in_bytes(ranges), judging, model.layout, label)
    change = abs(found["auc_int8"] - found["auc_float32"])
    if not change <= MAX_AUC_CHANGE:
        raise ArtifactError(
            f"Products in int8 change AUC by {change:.5f} over {found['rows']:,} rows, more than {MAX_AUC_CHANGE}. "
            "Nothing was published. Export with --products float32."
        )
    return ranges, found


def _ranges(native: NativeRanker, batch: Batch, layout: Layout) -> ByteRanges:
    """Over users with the items of other rows, as in requests, and with their own."""
    starts = np.unique(np.linspace(0, max(0, batch.size - _CANDIDATES), _REQUESTS).astype(int)).tolist()
    requests = [
        (_rows(batch, start, 1, layout), _rows(batch, start, _CANDIDATES, layout)) for start in starts
    ]
    return reduce(or_, (native.ranges(user, items) for user, items in requests))


def _rows(batch: Batch, start: int, count: int, layout: Layout) -> FeatureRows:
    return FeatureRows.of(between(batch, start, min(start + count, batch.size)), layout)


def _compare(
    floats: NativeRanker, in_bytes: NativeRanker, batch: Batch, layout: Layout, label: str
) -> Numbers:
    rows = [_rows(batch, row, 1, layout) for row in range(batch.size)]
    exact, rounded = (np.concatenate([one.rank(row, row)[0] for row in rows]) for one in (floats, in_bytes))
    labels = batch.labels[label]
    return {
        "rows": batch.size,
        "auc_float32": exact_auc(labels, exact),
        "auc_int8": exact_auc(labels, rounded),
        "rank_correlation": rank_correlation(exact, rounded),
        "top_overlap": _overlap(floats, in_bytes, batch, layout),
        "max_logit_error": float(np.abs(exact - rounded).max()),
    }


def _overlap(floats: NativeRanker, in_bytes: NativeRanker, batch: Batch, layout: Layout) -> float:
    """The share of the best items that both have, over users with the items of other rows."""
    shares = []
    for start in np.linspace(0, max(0, batch.size - _LIST_CANDIDATES), _LISTS).astype(int).tolist():
        user, items = _rows(batch, start, 1, layout), _rows(batch, start, _LIST_CANDIDATES, layout)
        left, right = (_best(one.rank(user, items)[0]) for one in (floats, in_bytes))
        shares.append(len(np.intersect1d(left, right)) / len(left))
    return float(np.mean(shares))


def _best(logits: Array) -> Array:
    return np.argsort(-logits, kind="stable")[:_TOP]

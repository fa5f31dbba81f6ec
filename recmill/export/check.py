"""A bundle against the learners it was made of: the same rows must get the same scores and vectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill.batches import Array, Batch, Layout, collate
from recmill.bundle import Bundle
from recmill.errors import ArtifactError
from recmill.features.plan import Plan
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever
from recmill.spec.kinds import parts_of_features

TOLERANCE = 1e-5
_BFLOAT16_TOLERANCE = 0.02  # such a ranker scores with fewer digits than its graph
_MOST_MEAN = 0.05  # of rows with fewer bits: more is another model
_ITEMS = 1_000
_ROWS_ALONE = 50  # rank_split takes one user at a time

Numbers = dict[str, float]


def check_bundle(
    bundle: Bundle, learners: Mapping[str, Ranker | Retriever], plan: Plan, sample: pl.DataFrame
) -> dict[str, Numbers]:
    """How far scores and vectors of the bundle are from those of training; an error when that is too far."""
    found: dict[str, Numbers] = {}
    for learner in learners.values():
        check = _check_towers if isinstance(learner, Retriever) else _check_ranker
        found |= check(bundle, learner, plan, sample)  # type: ignore[arg-type]
    for name, numbers in found.items():
        _refuse_if_far(name, numbers, _tolerance(name, learners), bundle.rows_dtype == "float32")
    return found


def _check_ranker(bundle: Bundle, ranker: Ranker, plan: Plan, sample: pl.DataFrame) -> dict[str, Numbers]:
    expected = ranker.predict(_batch(plan, sample, ranker.layout))
    batch = _batch(bundle.plan, sample, ranker.layout)
    found = {"rank": _difference(expected, _sigmoid(_rank(bundle, batch)))}
    if bundle.graph("rank_split") is not None:
        alone = _sigmoid(_rank_split(bundle, batch, min(_ROWS_ALONE, batch.size)))
        found["rank_split"] = _difference(expected[: len(alone)], alone)
    return found


def _check_towers(
    bundle: Bundle, retriever: Retriever, plan: Plan, sample: pl.DataFrame
) -> dict[str, Numbers]:
    layout = retriever.layouts["user"]
    expected = retriever.user_vectors(_batch(plan, sample, layout))
    found = _tower(bundle, "user", _batch(bundle.plan, sample, layout), layout.numbers)
    items, layout = bundle.items, retriever.layouts["item"]
    assert items is not None
    places = np.unique(np.linspace(0, len(items) - 1, _ITEMS).astype(np.int64))
    stored = np.load(bundle.path / "items" / "vectors.npy", mmap_mode="r")[places]
    features = items.features(places)
    numbers = features.numbers[:, [items.layout.numbers.index(name) for name in layout.numbers]]
    batch = Batch(len(places), numbers, features.keys, {}, {})
    return {
        "user": _difference(expected, found),
        "item": _difference(stored, _tower(bundle, "item", batch, layout.numbers)),
    }


def _batch(plan: Plan, rows: pl.DataFrame, layout: Layout) -> Batch:
    return collate(plan.apply(rows, labels=False, only=layout.features), layout, with_labels=False)


def _tower(bundle: Bundle, side: str, batch: Batch, numbers: Sequence[str]) -> Array:
    collection = bundle.collection(side)
    names = [feature.name for feature in collection.features]
    inputs = {"pooled": collection.pooled(batch.keys, names)}
    if numbers:
        inputs["numbers"] = batch.numbers
    return _run(bundle.graph(side), inputs)


def _rank(bundle: Bundle, batch: Batch) -> Array:
    return _run(bundle.graph("rank"), _inputs(bundle, batch, "", lambda name: True))


def _rank_split(bundle: Bundle, batch: Batch, num_rows: int) -> Array:
    """Rows one by one, each with its user part and its item part."""
    parts = parts_of_features(bundle.recipe)
    once = ("user", "context")
    user = _inputs(bundle, batch, "user_", lambda name: parts[name] in once)
    item = _inputs(bundle, batch, "item_", lambda name: parts[name] not in once)
    session = _session(bundle.graph("rank_split"))
    rows = [slice(row, row + 1) for row in range(num_rows)]
    inputs = {**user, **item}
    return np.concatenate(
        [session.run(None, {name: values[row] for name, values in inputs.items()})[0] for row in rows]
    )


def _inputs(bundle: Bundle, batch: Batch, prefix: str, wanted: Any) -> dict[str, Array]:
    """What a ranker's graph takes of the wanted features; nothing for kinds of which there are none."""
    ranking = bundle.models["ranking"]
    numbers = [place for place, name in enumerate(ranking["numbers"]) if wanted(name)]
    keys = [name for name in ranking["keys"] if wanted(name)]
    wide = [name for name in ranking["wide"] if wanted(name)]
    inputs = {}
    if numbers:
        inputs[f"{prefix}numbers"] = batch.numbers[:, numbers]
    if keys:
        inputs[f"{prefix}pooled"] = bundle.collection("deep").pooled(batch.keys, keys)
    if wide:
        inputs[f"{prefix}wide"] = bundle.collection("wide").pooled(batch.keys, wide)[:, :, 0]
    return inputs


def _run(graph: Path | None, inputs: Mapping[str, Array]) -> Array:
    return np.asarray(_session(graph).run(None, dict(inputs))[0])


def _session(graph: Path | None) -> Any:
    import onnxruntime

    assert graph is not None, "every model has its graphs"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])


def _sigmoid(logits: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-logits.astype(np.float64))))


def _difference(expected: Array, found: Array) -> Numbers:
    distance = np.abs(expected.astype(np.float64) - found)
    numbers = {"rows": len(expected), "max": float(distance.max()), "mean": float(distance.mean())}
    if expected.ndim == 1:
        numbers["rank_correlation"] = _rank_correlation(expected, found)
    return numbers


def _rank_correlation(left: Array, right: Array) -> float:
    """Spearman's: 1 when both put the rows in the same order."""
    ranks = [pl.Series(values).rank().to_numpy() for values in (left, right)]
    if any(values.std() == 0 for values in ranks):
        return 1.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _tolerance(name: str, learners: Mapping[str, Ranker | Retriever]) -> float:
    ranker = learners.get("ranking")
    precise = ranker is None or ranker.train_spec.precision == "float32"
    return TOLERANCE if precise or not name.startswith("rank") else _BFLOAT16_TOLERANCE


def _refuse_if_far(name: str, numbers: Numbers, tolerance: float, is_exact: bool) -> None:
    if is_exact and not numbers["max"] <= tolerance:
        raise ArtifactError(
            f"The bundle does not give what training gives: {name} is off by up to {numbers['max']:.2e} over "
            f"{numbers['rows']:,} rows, more than {tolerance:g}. Nothing was published."
        )
    if not numbers["mean"] <= _MOST_MEAN:
        raise ArtifactError(
            f"Rows with fewer bits change {name} by {numbers['mean']:.3f} on average, more than {_MOST_MEAN}. "
            "Nothing was published. Export with --rows float32 or float16."
        )

"""Rows that one core ranks in a second, in process: ours with all its lookups, beside the dense model alone.

    python benchmarks/scoring.py --bundle bundles/shop [--candidates 500] [--seconds 10] [--json]

ours         Recommender.rank of whole requests: ids to indices, features, embedding rows, graph, probabilities
onnx_split   a bare ONNX Runtime loop over ready arrays, the user's part computed once (the floor of ours)
onnx         the same with the user's part repeated for every candidate
torch        the model as it was trained, in plain torch over the same ready arrays
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from recmill.artifacts.bundle.bundle import Bundle
from recmill.errors import RecmillError
from recmill.stages.bench.contest import Result, header, median_and_range, pinned_to

Array = np.ndarray[Any, np.dtype[Any]]
Act = Callable[[], object]
_NUM_REQUESTS = 32  # different ones
_ROUNDS = 5


def bench_scoring(bundle_path: Path, candidates: int = 500, seconds: float = 10.0, seed: int = 0) -> Result:
    """Interleave the contestants on one core; `seconds` is the time of each over all rounds. Medians of rounds."""
    bundle = Bundle.open(bundle_path)
    if "ranking" not in bundle.models:
        raise RecmillError(f"Bundle {bundle_path} has no ranking model; there is nothing to score with.")
    with pinned_to(1):
        acts = _contestants(bundle, candidates, np.random.default_rng(seed))
        speeds = _race(acts, candidates, seconds / _ROUNDS)
    ours = statistics.median(speeds["ours"])
    return {
        **header("scoring", 1),
        "bundle": {"version": bundle.version, "rows_dtype": bundle.rows_dtype},
        "candidates": candidates,
        "rounds": _ROUNDS,
        "rows_per_cpu_second": {
            name: {
                **median_and_range(values),
                "ours_over_this": round(ours / statistics.median(values), 3),
            }
            for name, values in speeds.items()
        },
    }


def _race(acts: dict[str, Act], candidates: int, seconds: float) -> dict[str, list[float]]:
    """Rows in a second of CPU time, of each contestant in each round."""
    speeds: dict[str, list[float]] = {name: [] for name in acts}
    for act in acts.values():
        act()
    for _ in range(_ROUNDS):
        for name, act in acts.items():
            speeds[name].append(_speed(act, seconds) * candidates)
    return speeds


def _speed(act: Act, seconds: float) -> float:
    """Calls in a second of CPU time, so that other work on the machine counts less."""
    number, began, cpu = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        act()
        number += 1
    return number / max(1e-9, time.process_time() - cpu)


def _contestants(bundle: Bundle, candidates: int, random: np.random.Generator) -> dict[str, Act]:
    acts = {"ours": _ours(bundle, candidates, random)}
    for name, graph in (("onnx_split", "rank_split"), ("onnx", "rank")):
        path = bundle.graph(graph)
        if path is not None:
            acts[name] = _onnx(path, candidates, random)
    learner = _torch(bundle, candidates, random)
    return acts | ({"torch": learner} if learner is not None else {})


def _ours(bundle: Bundle, candidates: int, random: np.random.Generator) -> Act:
    from recmill.stages.serve.messages import Rank
    from recmill.stages.serve.recommender import Recommender

    users, items = bundle.users, bundle.items
    if users is None or items is None:
        raise RecmillError(f"Bundle {bundle.path} has no users or no items to rank.")
    recommender = Recommender(bundle)
    requests = cycle(
        Rank(
            user=users.ids(random.integers(0, len(users), 1))[0],
            items=items.ids(random.integers(0, len(items), candidates)),
        )
        for _ in range(_NUM_REQUESTS)
    )
    return lambda: recommender.rank(next(requests))


def _onnx(path: Path, candidates: int, random: np.random.Generator) -> Act:
    """The graph alone, on arrays that are ready: nothing is looked up or copied."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    inputs = {
        node.name: _ready([size if isinstance(size, int) else candidates for size in node.shape], random)
        for node in session.get_inputs()
    }
    return lambda: session.run(None, inputs)


def _torch(bundle: Bundle, candidates: int, random: np.random.Generator) -> Act | None:
    """The trained model's dense part; None when its checkpoint or torch is not here."""
    folder = Path(bundle.manifest["checkpoint"]["path"])
    try:
        import torch

        from recmill.artifacts.checkpoint.checkpoint import Checkpoint
        from recmill.learner.saved import open_learner
    except ImportError:
        return None
    if not folder.is_dir():
        return None
    torch.set_num_threads(1)
    learner = open_learner(Checkpoint.open(folder), "ranking").learner
    spec = bundle.models["ranking"]
    deep = learner.collections["deep"]
    shapes = [(candidates, len(spec["numbers"])), (candidates, len(spec["keys"]), deep.dim)]
    shapes += [(candidates, len(spec["wide"]))] if spec["wide"] else []
    inputs = [torch.from_numpy(_ready(shape, random)) for shape in shapes]
    learner.model.eval()

    def act() -> object:
        with torch.inference_mode():
            return learner.model(*inputs)

    return act


def _ready(shape: Any, random: np.random.Generator) -> Array:
    return random.standard_normal(tuple(shape), dtype=np.float32) * np.float32(0.1)


def describe(result: Result) -> str:
    """The result as a table for people."""
    lines = [
        f"{result['candidates']} candidates a request, rows {result['bundle']['rows_dtype']}, one core of "
        f"{result['machine']['processor']}, medians of {result['rounds']} rounds",
        f"{'':<12}{'rows/s':>12}{'min':>12}{'max':>12}{'ours/this':>11}",
    ]
    for name, speed in result["rows_per_cpu_second"].items():
        lines.append(
            f"{name:<12}{speed['median']:>12,}{speed['min']:>12,}{speed['max']:>12,}"
            f"{speed['ours_over_this']:>10.2f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, required=True, metavar="DIR")
    parser.add_argument("--candidates", type=int, default=500, metavar="N")
    parser.add_argument("--seconds", type=float, default=10.0, metavar="S")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--json", action="store_true")
    parsed = parser.parse_args()
    result = bench_scoring(parsed.bundle, parsed.candidates, parsed.seconds, parsed.seed)
    print(json.dumps(result) if parsed.json else describe(result))


if __name__ == "__main__":
    main()

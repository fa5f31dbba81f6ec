"""AUC of every shipped ranker with native kernels and with torch's, three seeds each.

    python benchmarks/native_auc.py [--rows 100000] [--seeds 3] [--only criteo-dlrm,movielens] [--data NAME=DIR]

Each recipe learns from the log that `recmill generate` writes for it, or from the one that `--data` names. A seed is
one of the training: the same first weights and order of rows for both kinds of kernels. The numbers are of the test
rows, or of the eval rows where a recipe has no others.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import recmill
from recmill.models import layers
from recmill.stages.bench.contest import header


def rankers() -> list[str]:
    """Shipped recipes with a neural ranker."""
    names = recmill.recipes()
    return [name for name in names if _trains_layers(recmill.load_recipe(name))]


def _trains_layers(recipe: recmill.Recipe) -> bool:
    return recipe.ranking is not None and recipe.ranking.model != "trees"


@contextmanager
def kernels(are_native: bool) -> Iterator[None]:
    if are_native:
        yield
    else:
        with patch.object(layers, "_runs_natively", return_value=False):
            yield


def auc(recipe: recmill.Recipe, table: recmill.Table, seed: int, are_native: bool) -> dict[str, float]:
    """Of each label."""
    own = recmill.load_recipe(recipe, {"ranking.train.seed": seed})
    with kernels(are_native):
        checkpoint = recmill.train(own, table, only="ranking", threads=1, quiet=True)
        metrics = recmill.evaluate(checkpoint, table, only="ranking", threads=1, quiet=True).metrics
    (of_model,) = metrics.values()
    return {name: value for name, value in of_model.items() if name == "auc" or name.endswith("/auc")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="of generated logs")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="recipes, with commas")
    parser.add_argument("--data", action="append", default=[], metavar="NAME=DIR", help="a recipe's real log")
    parsed = parser.parse_args()
    real = dict(one.split("=", 1) for one in parsed.data)
    print(json.dumps(header("native_auc", 1)))
    print(f"{'recipe':28} {'label':12} {'native':>9} {'torch':>9} {'difference of each seed'}")
    for name in parsed.only.split(",") if parsed.only else rankers():
        recipe = recmill.load_recipe(name)
        data = real.get(name)
        if data is None:
            assert recipe.generate is not None
            data = recmill.generate(recipe.generate, rows=parsed.rows, quiet=True).path
        table = recmill.prepare(recipe, data, quiet=True)
        of_seeds = [
            [auc(recipe, table, seed, are_native) for are_native in (True, False)]
            for seed in range(parsed.seeds)
        ]
        for metric in of_seeds[0][0]:
            native, torch = zip(*((ours[metric], theirs[metric]) for ours, theirs in of_seeds), strict=True)
            differences = "  ".join(f"{a - b:+.1e}" for a, b in zip(native, torch, strict=True))
            label = metric.removesuffix("auc").strip("/")
            means = f"{statistics.mean(native):9.5f} {statistics.mean(torch):9.5f}"
            print(f"{name:28} {label:12} {means} {differences}", flush=True)


if __name__ == "__main__":
    main()

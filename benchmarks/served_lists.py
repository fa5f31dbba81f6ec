"""The served list of a recipe on a log: several seeds, beside baselines, and asked again over HTTP.

    python benchmarks/served_lists.py ml1m-by-time --data ml-1m --into runs/quality [--seeds 3] [--users 5000]

For each seed the recipe is trained, its list is measured by `recmill evaluate --served` for every held-out user, and
the bundle that was measured is served by `recmill serve`, which is asked for the same users over HTTP. recall@10 of
those answers is counted here from the Table rows and must be the number that the evaluation gave.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from recmill import Checkpoint, Table, load_recipe

K = 10
_RECMILL = [sys.executable, "-m", "recmill"]
_ALL = 10_000_000
_TOO_MANY = 429
_PATIENT_MS = 60_000  # other work on the machine must not leave a stage out


def measure(recipe: str, data: str, into: Path, seed: int, threads: int, users: int | None) -> dict[str, Any]:
    """Train with a seed, measure, serve, ask: the served part of evaluation.json and recall@10 over HTTP."""
    table, run = into / "table", into / f"seed-{seed}"
    kept = list(dict.fromkeys([*load_recipe(recipe).table.keep, *ids_of(recipe)]))
    keep = ["--set", f"table.keep={json.dumps(kept)}"]
    flags = ["--set", f"retrieval.train.seed={seed}", "--threads", str(threads)]
    checkpoint, bundle = run / "checkpoint", run / "served"
    if not bundle.exists():
        _recmill("prepare", recipe, "--data", data, "--into", table, *keep)
        _recmill("train", recipe, "--table", table, "--into", checkpoint, *flags)
        served = [
            "--served",
            "--served-users",
            users or _ALL,
            "--served-bundle",
            bundle,
            "--threads",
            threads,
        ]
        _recmill("evaluate", recipe, "--checkpoint", checkpoint, "--table", table, *served, "--data", data)
    measured = Checkpoint.open(checkpoint).to_serve().path
    found: dict[str, Any] = json.loads((measured / "evaluation.json").read_text())["served"]
    if users is None:
        relevant = held_out(recipe, Table.open(table), found["split"])
        with serving(bundle) as url:
            found["over_http"] = recall_over_http(url, relevant)
    return found


def ids_of(recipe: str) -> list[str]:
    """The columns of users and items, by which rows of the Table are counted here."""
    log = load_recipe(recipe).log
    return [str(log.user), str(log.item)]


def held_out(recipe: str, table: Table, split: str) -> dict[Any, set[Any]]:
    """User -> the items of the split's clicks that were new to them."""
    content = load_recipe(recipe)
    columns = [f"raw_{name}" for name in ids_of(recipe)]
    clicks = {
        name: table.scan(name).filter(pl.col(content.click_label) == 1).select(columns).unique()
        for name in ("train", "eval", "test")
    }
    before = [clicks["train"]] if split == "eval" else [clicks["train"], clicks["eval"]]
    new = clicks[split].join(pl.concat(before), on=columns, how="anti").collect()
    groups = new.group_by(columns[0]).agg(columns[1]).rows()
    return {user: set(items) for user, items in groups}


@contextmanager
def serving(bundle: Path) -> Iterator[str]:
    command = [*_RECMILL, "serve", "--bundle", str(bundle), "--http-port", "0", "--grpc-port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["http"]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def recall_over_http(url: str, relevant: dict[Any, set[Any]]) -> float:
    def recall(user: Any) -> float:
        items = {
            item["id"]
            for item in _ask(f"{url}/v1/recommend", {"user": user, "k": K, "deadline_ms": _PATIENT_MS})[
                "items"
            ]
        }
        return len(items & relevant[user]) / len(relevant[user])

    with ThreadPoolExecutor(2) as pool:
        return statistics.mean(pool.map(recall, relevant))


def _ask(url: str, query: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(query).encode(), {"Content-Type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code != _TOO_MANY:
                raise
            time.sleep(0.2)  # the machine is busy, and the server says so


def _recmill(*arguments: object) -> None:
    subprocess.run([*_RECMILL, *map(str, arguments), "--quiet"], check=True)


def _line(name: str, found: list[dict[str, float]], rest: str = "") -> str:
    means = {metric: [one[metric] for one in found] for metric in ("recall@10", "ndcg@10", "hit@10")}
    shown = "   ".join(f"{metric} {statistics.mean(values):.4f}" for metric, values in means.items())
    return f"{name:16} {shown}{rest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data", required=True)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--users", type=int, help="so many at random instead of all; these are not asked over HTTP"
    )
    parsed = parser.parse_args()
    found = [
        measure(parsed.recipe, parsed.data, parsed.into, seed, parsed.threads, parsed.users)
        for seed in range(parsed.first_seed, parsed.first_seed + parsed.seeds)
    ]
    metrics = [one["metrics"] for one in found]
    each = ", ".join(f"{one['recall@10']:.4f}" for one in metrics)
    print(f"{parsed.recipe}   {found[0]['users']:,} users of {found[0]['split']}   recall@10 by seed {each}")
    print(
        _line(
            "served",
            metrics,
            f"   95% CI +-{statistics.mean(one['recall@10_margin'] for one in metrics):.4f}",
        )
    )
    for name in found[0]["baselines"]:
        gains, margins = zip(*(one["differences"][name] for one in found), strict=True)
        gain = f"   served {statistics.mean(gains):+.4f} +-{statistics.mean(margins):.4f}"
        print(_line(name, [one["baselines"][name] for one in found], gain))
    if parsed.users is not None:
        return 0
    same = all(abs(one["over_http"] - one["metrics"]["recall@10"]) < 1e-9 for one in found)
    http = ", ".join(f"{one['over_http']:.4f}" for one in found)
    print(f"over HTTP        recall@10 {http}   {'equal' if same else 'DIFFERS'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

"""One log, one command, no recipe: what `recmill start` gives, beside ALS of `implicit` on the same split and users.

    python benchmarks/first_hour.py ratings.csv movies.csv --into runs/first-hour/movies --als-python als/bin/python

`recmill start` runs until it is ready and is asked for one list over HTTP; then it is stopped. A run that was measured
before is not made again. `--als-python` is the Python of an environment with `pip install implicit`; without it
there is no such row.
The baselines of `recmill` come from the run's own evaluation; most popular is computed here once more, from rows of
the Table, and has to be the same, so that both sides have the same users, rows and held-out items. Other flags go to
`recmill start`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from recmill import Table, load_recipe
from recmill.metrics import RankingSums
from recmill.recall.interactions import Interactions
from recmill.stages.replay.baselines import filled, popular_lists, seen_of
from recmill.stages.replay.queries import HeldOutQueries, offsets_of

K = 10
_MAX_EVAL_USERS = 2_000
_RECMILL = [sys.executable, "-m", "recmill"]
_PEER = Path(__file__).parent / "peers" / "implicit_als.py"


def start(files: list[str], into: Path, flags: list[str]) -> float:
    """Seconds from the command to the first list of a user over HTTP."""
    into.mkdir(parents=True, exist_ok=True)
    command = [*_RECMILL, "start", *files, "--into", str(into / "run"), "--quiet", *flags]
    began = time.monotonic()
    with (into / "start.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--http-port", "0", "--grpc-port", "0"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            for line in server.stdout:
                print(line, end="", file=log, flush=True)
                if line.startswith("ready"):
                    _ask(line.split()[1], _a_user(into / "run"))
                    return time.monotonic() - began
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    raise SystemExit(f"recmill start ended with {server.returncode}; see {into / 'start.log'}")


def _a_user(run: Path) -> Any:
    user = load_recipe(str(run / "recipe.toml")).log.user
    return Table.open(run / "table").scan("train").select(f"raw_{user}").first().collect().item()


def _ask(url: str, user: Any) -> None:
    content = json.dumps({"user": user, "k": K}).encode()
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/recommend", content, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["items"]


class Rows:
    """Positive rows of each split as indices of users and items."""

    def __init__(self, run: Path) -> None:
        recipe, table = load_recipe(str(run / "recipe.toml")), Table.open(run / "table")
        names = [f"raw_{recipe.log.user}", f"raw_{recipe.log.item}"]
        label = recipe.click_label
        found = []
        for split in ("train", "eval", "test"):
            rows = table.scan(split) if label is None else table.scan(split).filter(pl.col(label) == 1)
            found.append(rows.select(user=names[0], item=names[1], split=pl.lit(split)).collect())
        pairs = pl.concat(found)
        users, items = (pairs[name].unique().sort() for name in ("user", "item"))
        self.user_ids, self.num_items = users, len(items)
        self._pairs = pl.DataFrame(
            [
                pairs["user"].replace_strict(users, np.arange(len(users)), return_dtype=pl.Int64),
                pairs["item"].replace_strict(items, np.arange(len(items)), return_dtype=pl.Int64),
                pairs["split"],
            ]
        )

    def of(self, *splits: str) -> np.ndarray[Any, np.dtype[Any]]:
        return self._pairs.filter(pl.col("split").is_in(splits)).select("user", "item").to_numpy()

    def held_out(self, split: str, before: tuple[str, ...], most: int) -> HeldOutQueries:
        """The users that `recmill evaluate --served` asks for, and items of the split that were new to them."""
        taken = self._pairs.filter(pl.col("split").is_in(before))
        new = self._pairs.filter(pl.col("split") == split).unique(["user", "item"])
        groups = new.join(taken, on=["user", "item"], how="anti").group_by("user").agg("item").sort("user")
        is_known = groups["user"].is_in(taken["user"].implode())
        indices = np.where(is_known, groups["user"].to_numpy(), -1)
        relevant = [np.sort(items.to_numpy()) for items in groups["item"]]
        users = self.user_ids[groups["user"].to_numpy()].to_list()
        return HeldOutQueries(users, indices, relevant, 0).sample(most)


def als(python: str, rows: Rows, queries: HeldOutQueries) -> tuple[Any, dict[str, Any]]:
    """Lists of `implicit` for the users of the queries, and its settings."""
    on_eval = rows.held_out("eval", ("train",), _MAX_EVAL_USERS)
    known = on_eval.indices[on_eval.indices >= 0]
    with tempfile.TemporaryDirectory() as work:
        given, lists = Path(work) / "rows.npz", Path(work) / "lists.npy"
        np.savez(
            given,
            num_users=len(rows.user_ids),
            num_items=rows.num_items,
            train=rows.of("train"),
            eval=rows.of("eval"),
            eval_users=known,
            test_users=np.maximum(queries.indices, 0),
        )
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as implicit asks for
        command = [python, str(_PEER), str(given), str(lists)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
        found = np.load(lists)
    found[queries.is_new] = -1
    return found, json.loads(done.stdout)


def metrics_of(lists: Any, queries: HeldOutQueries) -> RankingSums:
    sums = RankingSums((K,))
    sums.add(lists, offsets_of(queries.relevant), np.concatenate(queries.relevant))
    return sums


def line(name: str, metrics: dict[str, float], rest: str = "") -> str:
    return f"{name:16} recall@10 {metrics['recall@10']:.4f}   ndcg@10 {metrics['ndcg@10']:.4f}{rest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--als-python")
    parsed, flags = parser.parse_known_args()
    run = parsed.into / "run"
    evaluation, seconds = run / "checkpoint" / "evaluation.json", parsed.into / "seconds.json"
    if not seconds.exists():
        seconds.write_text(json.dumps(start(parsed.files, parsed.into, flags)))
    print(f"first recommendation after {json.loads(seconds.read_text()):.0f} s")
    served = json.loads(evaluation.read_text())["served"]
    margin = f"   95% CI +-{served['metrics']['recall@10_margin']:.4f}   {served['users']:,} users of {served['split']}"
    print(line("served", served["metrics"], margin))
    for name, metrics in served["baselines"].items():
        gain, half = served["differences"][name]
        print(line(name, metrics, f"   served {gain:+.4f} +-{half:.4f}"))
    if parsed.als_python is not None:
        compare_als(parsed.als_python, run, served)
    return 0


def compare_als(python: str, run: Path, served: dict[str, Any]) -> None:
    rows = Rows(run)
    queries = rows.held_out("test", ("train", "eval"), served["users"])
    before = rows.of("train", "eval")
    interactions = Interactions(before[:, 0], before[:, 1], len(rows.user_ids), rows.num_items)
    seen = seen_of(interactions, queries)
    popular = popular_lists(interactions.counts.astype(np.float64), seen, K)
    ours, theirs = (
        metrics_of(popular, queries).means()["recall@10"],
        served["baselines"]["popular"]["recall@10"],
    )
    if len(queries) != served["users"] or abs(ours - theirs) > 2e-3:
        raise SystemExit(
            f"Not the same users and rows: {len(queries)} users and {ours:.4f} for most popular here, "
            f"{served['users']} and {theirs:.4f} in the evaluation."
        )
    lists, settings = als(python, rows, queries)
    sums = metrics_of(filled(lists, popular), queries)
    chosen = ", ".join(f"{name} {value:g}" for name, value in settings.items())
    print(line("implicit ALS", sums.means(), f"   95% CI +-{sums.margins()['recall@10']:.4f}   {chosen}"))


if __name__ == "__main__":
    sys.exit(main())

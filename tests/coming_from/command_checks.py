"""What the rows of the coming-from pages promise: one check for each flag of a command that they name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from coming_from_pages import Part, Row, flags_of
from row_checks import CHECKS, check
from small_runs import BATCH, SHORT, SMALL, SmallRuns

from recmill import open_bundle
from recmill.artifacts.bundle.bundle import Bundle
from recmill.artifacts.bundle.delta import deltas_of
from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.cli import main
from recmill.learner.saved import open_learner
from recmill.metrics import exact_auc
from recmill.recipe.load import load_recipe
from recmill.reporting.tracking import MLLOG_FILE, TENSORBOARD_DIRECTORY, read_history
from recmill.stages.serve.messages import Recall, Recommend

__all__ = ["CHECKS"]


@check("train --into", "train --table", "train --set")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    code, said, into = small.run_command(
        row.base, [word for word in row.command if word != "--resume"], capsys
    )
    assert (code, said["models"][0]["stopped_by"]) == (0, "steps")
    assert read_history(into / "ranking/history.jsonl")[-1]["data_wait"] >= 0
    assert open_learner(Checkpoint.open(into), "ranking", "last").checkpoint.step == 16
    if part.name == "train --set":
        changed = load_recipe(row.base, [part.value]).ranking
        assert Checkpoint.open(into).recipe.ranking.train.epochs == changed.train.epochs


@check("train --resume")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    into = small.new_folder()
    small.train_into(into, row.base, "ranking.train.max_steps=5")
    refused = [word for word in row.command if word != "--resume"]
    assert small.run_into(into, row.base, refused, capsys)[0] == 1
    code, said, _ = small.run_into(into, row.base, row.command, capsys)
    assert (code, said["models"][0]["resumed_from"], said["models"][0]["samples"]) == (0, 5, 16 * BATCH)


@check("train --threads")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    _, said, _ = small.run_command(row.base, row.command, capsys)
    assert said["models"][0]["threads"] == int(part.value)


@check("train --wait-policy")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OMP_WAIT_POLICY", raising=False)
        assert small.run_into(small.new_folder(), row.base, row.command, capsys)[0] == 0
        assert os.environ["OMP_WAIT_POLICY"] == part.value.upper()
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")


@check("train --profile")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    command = [word if word != part.value else "3" for word in row.command]
    _, _, into = small.run_command(row.base, command, capsys)
    events = json.loads((into / "ranking/trace.json").read_text())["traceEvents"]
    assert any("ProfilerStep" in event["name"] for event in events)


@check("train --track")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    _, _, into = small.run_command(row.base, row.command, capsys)
    if part.value == "tensorboard":
        assert list((into / "ranking" / TENSORBOARD_DIRECTORY).glob("events.out.tfevents.*"))
        return
    assert part.value == "mllog"
    lines = (into / "ranking" / MLLOG_FILE).read_text().splitlines()
    assert all(line.startswith(":::MLLOG {") for line in lines)
    assert {"eval_accuracy", "run_stop"} <= {
        json.loads(line.removeprefix(":::MLLOG "))["key"] for line in lines
    }


@check("train --table-memory")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    found = []
    for size in ("1B", part.value):
        command = [word if word != part.value else size for word in row.command]
        found.append(
            small.run_command(row.base, [*command, "--threads", "1"], capsys)[1]["models"][0]["metrics"]
        )
    assert found[0] == found[1]


@check("train --explain-placement")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    capsys.readouterr()
    assert main([*small.arguments(row.base, row.command, small.new_folder()), "--quiet"]) == 0
    placed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("place  ranking")]
    assert all(any(f"c{number} " in line for line in placed) for number in range(1, 27))
    assert any("dense weights" in line for line in placed)


@check("train --from-log", "train --plan")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    code, said, into = small.run_command(row.base, row.command, capsys)
    assert (code, said["models"][0]["samples"]) == (0, 16 * BATCH)
    fitted = small.table(load_recipe(row.base)).plan
    assert Checkpoint.open(into).plan.digest() == fitted.digest()


@check("evaluate --checkpoint", "evaluate --split")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    _, said, _ = small.run_command(row.base, row.command, capsys)
    assert said["models"]["ranking"]["split"] == "test"
    assert {"auc", "log_loss", "accuracy", "normalised_entropy"} <= set(said["models"]["ranking"]["metrics"])


@check("evaluate --gate")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    code, said, _ = small.run_command(row.base, row.command, capsys)
    gate = said["models"]["ranking"]["gate"]
    assert code == (0 if all(condition["passed"] for condition in gate) else 1)
    assert [condition["condition"] for condition in gate][-1] == "normalised_entropy <= constant"
    impossible = [word if word != part.value else "accuracy>=1.1" for word in row.command]
    assert small.run_command(row.base, impossible, capsys)[0] == 1


@check("score --checkpoint", "score --table")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    _, measured, _ = small.run_command(row.base, ["evaluate", "--split", "test"], capsys)
    into, table = small.new_folder(), small.table(load_recipe(row.base, SMALL[row.base]))
    places = {"--checkpoint": small.checkpoint(row.base), "--table": table.path, "--into": into}
    assert main(["score", *(str(word) for place in places.items() for word in place), "--quiet"]) == 0
    scores = pl.read_parquet(into / "scores")
    assert len(scores) == table.num_rows("test")
    auc = exact_auc(scores["label"].to_numpy(), scores["score"].to_numpy())
    assert auc == pytest.approx(measured["models"]["ranking"]["metrics"]["auc"], abs=1e-6)


@check("run --data")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    command = [*row.command, "--into", "x", "--threads", "1"]
    for _ in range(2):
        code, said, into = small.run_into(small.folder / "whole-chain", row.base, command, capsys)
        assert (code, list(said["seconds"])) == (0, ["prepare", "train", "evaluate", "export"])
        assert said["trained"][0]["stopped_by"] == "steps"
        Bundle.open(into / "bundle").verify()
    assert (into / "report.html").is_file()


@check("checkpoint show")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    capsys.readouterr()
    assert main(["checkpoint", "show", str(small.checkpoint(row.base)), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["ranking"]
    assert all(entry["keys"] > 0 and "auc" in entry["metrics"] for entry in shown)
    assert [entry["best"] for entry in shown].count(True) == 1


# deploy


@check("deploy --target", "deploy --set")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    """Every value that is set stands in a line that was not there without it, or in what is said to come next."""
    assert row.command is not None
    target, pairs = row.command[2], row.command[4::2]
    usual, _ = rendered(small, row.base, target, [], capsys)
    changed, said = rendered(small, row.base, target, pairs, capsys)
    for value in (pair.partition("=")[2] for pair in pairs):
        assert any(value in line for line in changed - usual) or value in said


def rendered(
    small: SmallRuns, base: str, target: str, pairs: Sequence[str], capsys: Any
) -> tuple[set[str], str]:
    """The lines of all files, and what the command said last."""
    into = small.new_folder()
    capsys.readouterr()
    settings = [word for pair in pairs for word in ("--set", pair)]
    assert main(["deploy", base, "--target", target, "--into", str(into), *settings]) == 0
    files = list((into / target).rglob("*.yaml"))
    assert files
    last = capsys.readouterr().out.splitlines()[-1]
    return {line for path in files for line in path.read_text().splitlines()}, last


# export and serving


@check("export --checkpoint", "export --into", "export --data", "export --index", "export --rows")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    flags = flags_of(row.command)
    chosen = {flag: flags[flag] for flag in ("--index", "--rows") if flag in flags}
    into = small.bundle(row.base, *(str(word) for pair in chosen.items() for word in pair))
    bundle = Bundle.open(into)
    bundle.verify()
    assert {graph.name for graph in (bundle.path / "graphs").iterdir()} >= {"rank.onnx"}
    assert bundle.rows_dtype == chosen.get("--rows", "float32")
    if row.base == "recsys2021":
        assert_tweets_are_recommended(into)
    else:
        assert bundle.items is None
        scores = small.scores_in_process(row.base, into)
        assert ((scores > 0) & (scores < 1)).all()


def assert_tweets_are_recommended(bundles: Path) -> None:
    """As the page about serving says: k of the candidates, also for unknown users, and items like others."""
    recommender = open_bundle(bundles)
    items = recommender.recommend(Recommend(user="29", k=10, candidates=5)).items
    assert len(items) == 10
    first = items[0].id
    similar = recommender.recall(Recall(recent=[first], channels=["similar"], k=3)).items
    assert {item.channel for item in similar} == {"similar"}
    assert first not in {item.id for item in similar}


@check("client -s", "client -d", "client -b", "client -n", "client -w", "client --label", "client --clients")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    said, rows = small.scored(row.base, capsys), small.rows_of_log(row.base)
    assert (said["batch_size"], said["batches"], said["rows"]) == (50, 4, 200)
    scores = small.scores_in_process(row.base, small.bundle(row.base))
    label = rows["label"].to_numpy()
    assert said["auc"] == pytest.approx(exact_auc(label, scores), abs=1e-4)
    assert said["accuracy"] == pytest.approx(np.mean((scores >= 0.5) == label), abs=1e-4)
    assert {"p50_ms", "p99_ms"} <= set(said["latency"])


@check("train --follow", "train --publish")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    log = Path(shutil.copytree(small.log(row.base), small.new_folder()))
    bundles = small.export(row.base, data=log)
    lines = (log / "train.txt").read_text().splitlines(keepends=True)
    with (log / "train.txt").open("a") as file:
        file.writelines(lines[:BATCH])
    recipe = [word for value in SHORT[row.base] for word in ("--set", value)]
    places = {"--follow": log, "--publish": bundles, "--into": small.checkpoint(row.base, "export")}
    where = [str(word) for place in places.items() for word in place]
    assert main(["train", row.base, *recipe, *where, "--every", "0.5", "--for", "2", "--quiet"]) == 0
    assert len(deltas_of(bundles, Bundle.open(bundles).version)) == 1

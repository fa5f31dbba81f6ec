"""What the rows of the coming-from pages promise: one check for each flag of a command that they name."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from coming_from_pages import Part, Row
from row_checks import CHECKS, check
from small_runs import BATCH, SmallRuns

from recmill.checkpoint import CheckpointFolder
from recmill.cli import main
from recmill.learner.saved import open_learner
from recmill.spec.load import load_recipe
from recmill.tracking import MLLOG_FILE, read_history

__all__ = ["CHECKS"]


@check("train --into", "train --table", "train --set")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    code, said, into = small.run_command(
        row.base, [word for word in row.command if word != "--resume"], capsys
    )
    assert (code, said["models"][0]["stopped_by"]) == (0, "steps")
    assert read_history(into / "ranking/history.jsonl")[-1]["wait_share"] >= 0
    assert open_learner(CheckpointFolder.open(into), "ranking", "last").checkpoint.step == 16
    if part.name == "train --set":
        changed = load_recipe(row.base, [part.value]).ranking
        assert CheckpointFolder.open(into).recipe.ranking.train.epochs == changed.train.epochs


@check("train --resume")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    into = small.new_folder()
    small.train(row.base, "ranking.train.max_steps=5", into=into)
    refused = [word for word in row.command if word != "--resume"]
    assert small.run_command(row.base, refused, capsys, into)[0] == 1
    code, said, _ = small.run_command(row.base, row.command, capsys, into)
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
        assert small.run_command(row.base, row.command, capsys)[0] == 0
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
    if part.value != "mllog":
        return
    assert row.command is not None
    _, _, into = small.run_command(row.base, row.command, capsys)
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


@check("train --from-log", "train --plan")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    code, said, into = small.run_command(row.base, row.command, capsys)
    assert (code, said["models"][0]["samples"]) == (0, 16 * BATCH)
    fitted = small.table(load_recipe(row.base)).plan
    assert CheckpointFolder.open(into).plan.digest() == fitted.digest()


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


@check("run --data")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    assert row.command is not None
    command = [*row.command, "--into", "x", "--threads", "1"]
    for _ in range(2):
        code, said, into = small.run_command(row.base, command, capsys, small.folder / "whole-chain")
        assert (code, list(said["seconds"])) == (0, ["prepare", "train", "evaluate"])
        assert said["trained"][0]["stopped_by"] == "steps"
    assert (into / "report.html").is_file()


@check("checkpoint show")
def _(small: SmallRuns, row: Row, part: Part, capsys: Any) -> None:
    capsys.readouterr()
    assert main(["checkpoint", "show", str(small.checkpoint(row.base)), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["ranking"]
    assert all(entry["keys"] > 0 and "auc" in entry["metrics"] for entry in shown)
    assert [entry["best"] for entry in shown].count(True) == 1

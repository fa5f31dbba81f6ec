"""train, evaluate, checkpoint and run on the command line: what they say, what they write, how they end."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import polars as pl
import pytest
import torch

from recmill.artifacts.lock import lock_folder
from recmill.cli import main

pytestmark = pytest.mark.stages

torch.set_num_threads(1)
SHORT = [
    "--set",
    "ranking.train.max_steps=6",
    "--set",
    "ranking.train.evaluations=3",
    "--set",
    "ranking.train.batch_size=500",
]
RANKING = ["--only", "ranking", "--threads", "1", "--quiet", *SHORT]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small shop: its log and its Table."""
    into = tmp_path_factory.mktemp("shop")
    assert main(["generate", "shop", "--rows", "6000", "--into", str(into / "log"), "--quiet"]) == 0
    prepare = ["prepare", "quickstart", "--data", str(into / "log"), "--into", str(into / "table"), "--quiet"]
    assert main(prepare) == 0
    return into


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Path:
    into = folder / "checkpoint"
    arguments = ["train", "quickstart", "--table", str(folder / "table"), "--into", str(into), *RANKING]
    assert main(arguments) == 0
    return into


def test_train_says_what_it_did_and_what_comes_next(recmill, folder, tmp_path):
    arguments = ["train", "quickstart", "--table", folder / "table", "--into", tmp_path / "c", *RANKING]
    code, out, err = recmill(*arguments)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "threads 1   as asked"
    assert lines[1].startswith("trained ranking   3,000 rows in ")
    assert "stopped by steps" in lines[1]
    assert lines[2].startswith(f"wrote  {tmp_path}/c/ranking/step-")
    assert lines[3] == f"next   recmill evaluate quickstart --checkpoint {tmp_path}/c --table {folder}/table"
    code, _, err = recmill(*arguments)
    assert code == 1
    assert "holds checkpoints already. Add --resume" in err
    code, out, _ = recmill(*arguments, "--resume", "--json")
    found = json.loads(out)["models"][0]
    assert (code, found["resumed_from"], found["stopped_by"]) == (0, 6, "steps")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_of_a_terminal_names_the_evaluation_that_it_waits_for(recmill, folder, tmp_path, monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    flags = [flag for flag in RANKING if flag != "--quiet"]
    code, _, _ = recmill("train", "quickstart", "--table", folder / "table", "--into", tmp_path, *flags)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert code == 0
    # The last step, which counts as done only afterwards.
    assert "step 6  evaluating on held-out rows" in shown


def test_both_models_train_and_every_tracker_hears_of_it(recmill, folder, tmp_path):
    flags = ["--threads", "1", "--quiet", *SHORT, "--set", "retrieval.train.max_steps=3", "--track", "mllog"]
    code, _, err = recmill(
        "train", "quickstart", "--table", folder / "table", "--into", tmp_path, *flags, "--profile", 2
    )
    assert (code, err) == (0, "")
    for model in ("ranking", "retrieval"):
        history = [json.loads(line) for line in (tmp_path / model / "history.jsonl").read_text().splitlines()]
        assert history[0]["begin"]["model"] == model
        assert history[-1]["end"] == "success"
        assert ":::MLLOG" in (tmp_path / model / "mllog.txt").read_text()
    trace = json.loads((tmp_path / "ranking/trace.json").read_text())
    assert any("addmm" in str(event.get("name")) for event in trace["traceEvents"])


def test_mllog_has_the_schedule_and_both_ends_of_each_evaluation(recmill, folder, tmp_path):
    schedule = "ranking.train.schedule={ warmup = 0.34, decay_from = 0.5 }"
    arguments = ["train", "quickstart", "--table", folder / "table", "--into", tmp_path, *RANKING]
    code, _, err = recmill(*arguments, "--set", schedule, "--track", "mllog")
    assert (code, err) == (0, "")
    text = (tmp_path / "ranking/mllog.txt").read_text()
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in text.splitlines()]
    facts = {line["key"]: line["value"] for line in lines}
    assert facts["opt_learning_rate_warmup_steps"] == 2
    assert facts["opt_learning_rate_decay_start_step"] == facts["opt_learning_rate_decay_steps"] == 3
    evaluations = [
        (line["key"], line["metadata"]["step"]) for line in lines if line["key"].startswith("eval_s")
    ]
    assert evaluations[0] == ("eval_samples", 0)
    assert evaluations[1:] == [(key, step) for step in (2, 4, 6) for key in ("eval_start", "eval_stop")]
    keys = [line["key"] for line in lines]
    assert keys[keys.index("eval_start") :][:4] == [
        "eval_start",
        "tracked_stats",
        "eval_accuracy",
        "eval_stop",
    ]


def test_tables_beyond_a_memory_bound_give_the_same_result(recmill, folder, tmp_path):
    found = []
    for name, flags in (("memory", []), ("disk", ["--table-memory", "1MB"])):
        arguments = ["train", "quickstart", "--table", folder / "table", "--into", tmp_path / name, *RANKING]
        code, out, err = recmill(*arguments, *flags, "--json")
        assert (code, err) == (0, "")
        found.append(json.loads(out)["models"][0]["metrics"])
    assert found[0] == found[1]


def test_a_raw_log_trains_without_a_table(recmill, tmp_path):
    code, _, _ = recmill("generate", "criteo", "--rows", 3000, "--into", tmp_path / "log", "--quiet")
    small = [
        "--set",
        "ranking.bottom=[32, 16]",
        "--set",
        "ranking.top=[32]",
        "--set",
        "ranking.train.max_steps=2",
    ]
    flags = ["--threads", "1", "--quiet", *small]
    code, out, err = recmill(
        "train", "criteo-deeprec", "--from-log", tmp_path / "log", "--into", tmp_path / "c", *flags
    )
    assert (code, err) == (0, "note   Rows come in log order: table.order = shuffle is for a Table only.\n")
    assert "auc 0." in out
    code, _, err = recmill(
        "train", "criteo-dlrm", "--from-log", tmp_path / "log", "--into", tmp_path / "d", *flags[:3]
    )
    assert code == 1
    assert "has features that are fitted. Fit them once with `recmill prepare` and add --plan DIR" in err


def test_a_log_and_a_table_of_the_same_rows_teach_the_same(recmill, tmp_path):
    """With a Plan from the Table, and rows in the log's order."""
    recmill("generate", "criteo", "--rows", 3000, "--into", tmp_path / "log", "--quiet")
    recipe = [
        "criteo-dlrm",
        "--set",
        "ranking.embedding_dim=8",
        "--set",
        "ranking.bottom=[16, 8]",
        "--set",
        "ranking.top=[16]",
    ]
    recipe += [
        "--set",
        "ranking.train.batch_size=100",
        "--set",
        "ranking.train.target=",
        "--set",
        "table.order=log",
    ]
    recmill("prepare", *recipe, "--data", tmp_path / "log", "--into", tmp_path / "table", "--quiet")
    found = []
    for source in (
        ["--table", tmp_path / "table"],
        ["--from-log", tmp_path / "log", "--plan", tmp_path / "table"],
    ):
        into = tmp_path / f"c{len(found)}"
        code, out, err = recmill(
            "train", *recipe, *source, "--into", into, "--threads", 1, "--quiet", "--json"
        )
        assert (code, err) == (0, "")
        found.append(json.loads(out)["models"][0]["metrics"])
    assert found[0] == found[1]


def test_evaluate_prints_the_auc_and_the_gate_decides_the_exit_code(recmill, folder, checkpoint):
    arguments = ["evaluate", "quickstart", "--checkpoint", checkpoint, "--table", folder / "table", "--quiet"]
    code, out, err = recmill(*arguments, "--by", "device", "--by", "price")
    assert (code, err) == (0, "")
    assert "AUC 0." in out
    assert "phone" in out
    assert (checkpoint / "report.html").read_text().count("<svg") >= 4
    code, out, _ = recmill(*arguments, "--gate", "auc>=0.999")
    assert code == 1
    assert "FAIL   auc >= 0.999" in out
    written = json.loads((checkpoint / "evaluation.json").read_text())
    assert written["passed"] is False
    code, out, _ = recmill(*arguments, "--gate", "auc>=live", "--live", checkpoint)
    assert "pass   auc >= live" in out
    code, _, err = recmill(*arguments, "--gate", "auc>=live")
    assert (code, "needs the live model" in err) == (2, True)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--by", "colour"], 'has no column "colour" to cut rows by; it has: '),
        (["--which", "5"], "no checkpoint of step 5; it has: "),
        (["--only", "retrieval"], "has no retrieval model; it has: ranking"),
        (["--live", "x"], "--live is for gates"),
    ],
)
def test_evaluate_names_what_is_not_there(recmill, folder, checkpoint, flags, problem):
    arguments = ["evaluate", "quickstart", "--checkpoint", checkpoint, "--table", folder / "table", "--quiet"]
    code, _, err = recmill(*arguments, *flags)
    assert code != 0
    assert problem in err


def test_checkpoints_can_be_shown_compared_and_pruned(recmill, folder, tmp_path):
    recmill("train", "quickstart", "--table", folder / "table", "--into", tmp_path, *RANKING)
    code, out, _ = recmill("checkpoint", "show", tmp_path, "--verify", "--json")
    shown = json.loads(out)["ranking"]
    assert (code, [entry["step"] for entry in shown][-1]) == (0, 6)
    assert any(entry["best"] for entry in shown)
    code, out, _ = recmill("checkpoint", "diff", tmp_path, shown[0]["step"], "last")
    assert code == 0
    assert "deep/item" in out
    assert "top.layers.0.weight" in out
    code, out, _ = recmill("checkpoint", "prune", tmp_path, "--keep", 1, "--json")
    assert (code, json.loads(out)["ranking"]["kept"][-1]) == (0, 6)
    code, _, err = recmill("checkpoint", "diff", tmp_path, "last")
    assert (code, "name two steps" in err) == (2, True)


def test_checkpoint_show_words_the_end_of_training_as_train_does(recmill, folder, tmp_path):
    to_the_end = ["ranking.train.epochs=1", "ranking.train.evaluations=1", "ranking.train.batch_size=2000"]
    flags = [*RANKING[:4], *(word for setting in to_the_end for word in ("--set", setting))]
    code, trained, _ = recmill("train", "quickstart", "--table", folder / "table", "--into", tmp_path, *flags)
    assert code == 0
    _, shown, _ = recmill("checkpoint", "show", tmp_path)
    assert trained.splitlines()[1].endswith("   all epochs done")
    assert shown.splitlines()[-1].endswith("  all epochs done")


@pytest.mark.stages
def test_run_takes_a_recipe_through_every_stage(recmill, tmp_path):
    flags = ["--rows", 3000, "--quiet", "--threads", 1, *SHORT, "--set", "retrieval.train.max_steps=3"]
    code, out, err = recmill("run", "quickstart", "--into", tmp_path / "run", *flags)
    assert (code, err) == (0, "")
    assert "AUC 0." in out
    assert "recall@50" in out
    titles = pl.read_csv(tmp_path / "run/log/items.csv")["title"]
    assert any(f"is recommended   {title} (0." in out for title in titles)
    assert out.splitlines()[-2].startswith("seconds generate ")
    assert out.splitlines()[-1] == f"next   recmill serve --bundle {tmp_path / 'run' / 'bundle'}"
    assert (tmp_path / "run/report.html").is_file()
    code, out, _ = recmill("run", "quickstart", "--into", tmp_path / "run", *flags, "--json")
    found = json.loads(out)
    assert (code, found["table"]) == (0, str(tmp_path / "run/table"))
    assert [model["resumed_from"] for model in found["trained"]] == [3, 6]
    code, _, _ = recmill("run", "quickstart", "--into", tmp_path / "run", *flags, "--gate", "auc>=0.999")
    assert code == 1


def test_while_prepared_is_for_tables_that_training_reads_itself(recmill, tmp_path):
    into = ("--into", tmp_path / "checkpoint", "--while-prepared")
    for rows in (("--from-log", tmp_path), ("--table", tmp_path, "--engine", "ray", "--data-workers", 1)):
        code, _, errors = recmill("train", "criteo-deeprec", *rows, *into)
        assert code == 2
        assert "--while-prepared reads the shards of a --table" in errors


def test_prune_leaves_a_folder_alone_that_is_being_written(checkpoint: Path, capsys) -> None:
    with lock_folder(checkpoint):
        assert main(["checkpoint", "prune", str(checkpoint)]) == 1
    assert "is being written by" in capsys.readouterr().err

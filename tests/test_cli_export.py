"""export and bundle on the command line: what they say, how they end."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from recmill.cli import main

pytestmark = pytest.mark.stages

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small shop with a ranker that failed its gate, and its bundle."""
    into = tmp_path_factory.mktemp("shop")
    small = ["--set", "ranking.bottom=[4]", "--set", "ranking.top=[4]", "--set", "ranking.embedding_dim=4"]
    small += ["--set", "ranking.train.max_steps=3", "--set", "ranking.train.evaluations=1"]
    small += ["--only", "ranking", "--threads", 1]
    where = ["--checkpoint", into / "checkpoint", "--table", into / "table"]
    for command in (
        ["generate", "shop", "--rows", 3000, "--into", into / "log"],
        ["prepare", "quickstart", "--data", into / "log", "--into", into / "table"],
        ["train", "quickstart", *small, "--table", into / "table", "--into", into / "checkpoint"],
        ["evaluate", "quickstart", *where, "--gate", "auc>=0.999", "--threads", 1],
        ["export", "--checkpoint", into / "checkpoint", "--into", into / "bundle", "--despite-gate"],
    ):
        main([*map(str, command), "--quiet"])
    return into


def test_export_says_what_it_read_checked_and_wrote(recmill, folder: Path, tmp_path: Path) -> None:
    code, out, err = recmill(
        "export",
        "--checkpoint",
        folder / "checkpoint",
        "--into",
        tmp_path,
        "--rows",
        "float16",
        "--quiet",
        "--despite-gate",
    )
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith(f"read   {folder}/log   3,000 events   ")
    assert lines[1].startswith("check  scores of 1,000 rows   off by at most ")
    assert lines[2].startswith(f"wrote  {tmp_path}/0000000003-")
    assert "rows float16" in lines[2]
    assert lines[3].startswith("gate   FAIL")
    assert lines[4] == f"next   recmill serve --bundle {tmp_path}"


def test_what_did_not_pass_its_gate_is_not_published(recmill, folder: Path, tmp_path: Path) -> None:
    code, _, err = recmill("export", "--checkpoint", folder / "checkpoint", "--into", tmp_path / "bundle")
    assert code == 1
    assert "add --despite-gate" in err
    assert not (tmp_path / "bundle").exists()


def test_the_same_export_again_says_that_it_is_there(recmill, folder: Path) -> None:
    again = ["export", "--checkpoint", folder / "checkpoint", "--into", folder / "bundle", "--despite-gate"]
    code, out, _ = recmill(*again)
    assert code == 0
    assert out.startswith(f"found  {folder}/bundle/0000000003-")
    code, out, _ = recmill(*again, "--table", folder / "table", "--json")
    found = json.loads(out)
    assert (code, found["was_complete"], found["rows_dtype"]) == (0, True, "float32")
    assert found["check"]["rank"]["max"] < 1e-5
    assert found["gate"]["passed"] is False


def test_show_is_a_model_card(recmill, folder: Path) -> None:
    code, out, _ = recmill("bundle", "show", folder / "bundle")
    assert code == 0
    for words in (
        "quickstart: A synthetic shop",
        "ranking step 3",
        "model      ranking   2 numbers, 11 embeddings, label click",
        "measured   ranking   test rows   auc 0.",
        "gate       FAIL   ranking auc >= 0.999 FAIL",
        "graph      rank_split.onnx",
        "table      deep/item",
    ):
        assert words in out
    card = json.loads(recmill("bundle", "show", folder / "bundle", "--json")[1])
    assert card["tables"][0].keys() == {"table", "rows", "dim", "num_bytes"}
    assert card["num_bytes"] > sum(table["num_bytes"] for table in card["tables"])


def test_verify_reads_every_file(recmill, folder: Path, tmp_path: Path) -> None:
    code, out, _ = recmill("bundle", "verify", folder / "bundle", "--json")
    assert (code, json.loads(out)["verified"]) == (0, True)
    copied = Path(shutil.copytree(folder / "bundle", tmp_path / "bundle"))
    rows = next(copied.glob("*/tables/deep/item/rows.npy"))
    np.save(rows, np.load(rows) + 1)
    code, _, err = recmill("bundle", "verify", copied)
    assert code == 1
    assert "tables/deep/item/rows.npy does not have the checksums of its record" in err


def test_diff_tells_two_bundles_apart(recmill, folder: Path) -> None:
    code, out, _ = recmill("bundle", "diff", folder / "bundle", folder / "bundle")
    assert (code, "plan        the same" in out) == (0, True)
    code, out, _ = recmill("bundle", "diff", folder / "bundle", folder / "bundle", "--json")
    assert (code, json.loads(out)["tables"]) == (0, {})


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--data", "nowhere"], "nowhere"),
        (["--which", "77"], "has no checkpoint of step 77; it has: "),
        (["--table", "nowhere"], "Table nowhere does not exist"),
    ],
)
def test_export_names_what_is_not_there(
    recmill, folder: Path, tmp_path: Path, flags: list[str], problem: str
) -> None:
    where = ["--checkpoint", folder / "checkpoint", "--into", tmp_path / "b", "--despite-gate"]
    code, _, err = recmill("export", *where, *flags)
    assert code == 1
    assert problem in err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("arguments", [["diff", "a"], ["show", "a", "b"]])
def test_the_wrong_number_of_bundles_is_a_usage_error(recmill, arguments: list[str]) -> None:
    code, _, err = recmill("bundle", *arguments)
    assert (code, "bundle" in err) == (2, True)


def test_what_is_no_bundle_is_named(recmill, folder: Path) -> None:
    code, _, err = recmill("bundle", "show", folder / "table")
    assert (code, err) == (1, f"recmill: {folder}/table is a table; expected a bundle.\n")

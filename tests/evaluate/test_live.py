"""The live model is measured on the same rows, whatever its Plan; the verdict says whether training on is worth it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from shop import Shop

from recmill.dataset.table import Table
from recmill.stages.evaluate.live import as_planned, misses_counted, raw_columns

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def table(shop: Shop, recmill: Run, tmp_path: Path) -> Table:
    """The shop's log of a day before, with fewer rows, and with the raw columns of its features."""
    log = Path(shutil.copytree(shop.log, tmp_path / "log"))
    lines = (log / "events.csv").read_text().splitlines(keepends=True)
    (log / "events.csv").write_text("".join(lines[:-200]))
    keep = f"table.keep={json.dumps(raw_columns(shop.folder.recipe))}"
    into = tmp_path / "table"
    assert recmill("prepare", "quickstart", "--data", log, "--into", into, "--set", keep, "--quiet")[0] == 0
    return Table.open(into)


def test_rows_get_the_features_of_the_live_plan(shop: Shop, table: Table, tmp_path: Path) -> None:
    """The first rows of both logs are the same: by the live Plan they are what the live Table has of them."""
    assert table.plan.digest() != shop.folder.plan.digest()
    names = [column.name for column in shop.folder.columns]
    with as_planned(shop.folder, table, ["train"], tmp_path) as replanned:
        found = replanned.scan("train").select(names).collect()
    known = Table.open(shop.table).scan("train").select(names).collect()
    in_live = {tuple(map(str, row)) for row in known.iter_rows()}
    assert found.height == table.num_rows("train")
    assert all(tuple(map(str, row)) in in_live for row in found.iter_rows())
    assert not (tmp_path / "live-table.partial").exists()


def test_the_same_plan_needs_no_other_table(shop: Shop, tmp_path: Path) -> None:
    own = Table.open(shop.table)
    with as_planned(shop.folder, own, ["test"], tmp_path) as found:
        assert found is own


def test_a_table_without_raw_columns_is_told_how_to_get_them(
    shop: Shop, table: Table, tmp_path: Path
) -> None:
    manifest = json.loads((table.path / "manifest.json").read_text())
    manifest["recipe"]["table"]["keep"] = ["time"]
    bare = Table(table.path, manifest)
    with (
        pytest.raises(Exception, match=r"Prepare it with --set 'table.keep=\[\"user_id\", \"item_id\""),
        as_planned(shop.folder, bare, ["test"], tmp_path),
    ):
        pass


def test_questions_that_the_live_model_cannot_be_asked_are_misses() -> None:
    live = {"users": 30.0, "recall@10": 0.4, "recall@10_margin": 0.1}
    found = misses_counted(live, {"users": 40.0, "recall@10": 0.3})
    assert found["recall@10"] == pytest.approx(0.3)
    assert misses_counted(live, {"users": 30.0}) == live


@pytest.fixture
def judged(shop: Shop, recmill: Run, tmp_path: Path) -> Callable[..., tuple[int, str]]:
    """Evaluate a checkpoint of one's own: exit code and verdict."""
    checkpoint = Path(shutil.copytree(shop.checkpoint, tmp_path / "checkpoint"))
    (checkpoint / "evaluation.json").unlink(missing_ok=True)

    def judge(gate: str, *more: object) -> tuple[int, str]:
        asked = ["--checkpoint", checkpoint, "--table", shop.table, "--threads", 1, "--gate", gate, *more]
        code, _, problem = recmill(
            "evaluate", "quickstart", *asked, "--verdict", tmp_path / "verdict", "--quiet"
        )
        assert not problem
        return code, (tmp_path / "verdict").read_text()

    return judge


def test_a_model_that_is_nearer_than_before_is_improving(
    judged: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    unreachable = ("recall@10>=0.999", "--only", "retrieval")
    assert judged(*unreachable) == (0, "improving")  # the first
    assert judged(*unreachable) == (0, "improving")  # the same again, for its pod was lost
    path = tmp_path / "checkpoint" / "evaluation.json"
    for before, verdict in ((0.99, "failed"), (0.0, "improving")):
        earlier = json.loads(path.read_text())
        earlier["models"]["retrieval"]["last_step"] -= 1  # of a run that was shorter
        earlier["models"]["retrieval"]["gate"][0]["found"] = before
        path.write_text(json.dumps(earlier))
        assert judged(*unreachable) == (0, verdict)


def test_what_meets_all_conditions_has_passed(judged: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert judged("recall@10>=0", "--only", "retrieval") == (0, "passed")
    nothing = ("--live", tmp_path / "bundle", "--allow-no-live", "--only", "retrieval")
    assert judged("recall@10>=live", *nothing) == (0, "passed")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--verdict", "v"], "--verdict writes the result of --gate"),
        (["--allow-no-live"], "--allow-no-live is about --live DIR"),
        (["--gate", "ne<=live", "--live", "nowhere"], "add --allow-no-live for the first model"),
    ],
)
def test_flags_that_do_not_go_together_are_told(
    shop: Shop, recmill: Run, flags: list[str], problem: str
) -> None:
    asked = ["--checkpoint", shop.checkpoint, "--table", shop.table, *flags]
    code, _, said = recmill("evaluate", "quickstart", *asked)
    assert code != 0
    assert problem in said

"""Users of a side table, of whom many have clicked nothing yet: weights for those who have are fitted without them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.recipe.load import load_recipe
from recmill.stages.prepare.prepare import prepare
from recmill.stages.replay import fit
from recmill.stages.replay.config import ReplayConfig
from recmill.stages.replay.replay import replay
from recmill.stages.train.config import TrainConfig
from recmill.stages.train.source import TableData
from recmill.stages.train.train import train

pytestmark = pytest.mark.stages

RECIPE = """
name = "readers"
[log]
files = ["events.csv"]
user = "user"
item = "item"
time = "time"
columns = [{ name = "user", type = "int" }, { name = "item", type = "int" }, { name = "time", type = "int" }]
[tables.users]
files = ["users.csv"]
columns = [{ name = "user", type = "int" }, { name = "country", type = "text" }]
[[rows]]
join = { table = "users", on = "user" }
[split]
by = "time"
column = "time"
held_out = 0.4
halve = true
[[features]]
columns = "user, item, country"
steps = ["vocabulary"]
[table]
order = "shuffle"
[retrieval]
user = ["user", "country"]
item = "item"
embedding_dim = 4
hidden = []
[retrieval.train]
batch_size = 256
max_steps = 4
"""
OLD, NEW, ITEMS = 40, 60, 30


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """`OLD` users click all the time; `NEW` ones, whose countries were known all along, click later."""
    random = np.random.default_rng(0)
    events = [(user, time) for time in range(100) for user in random.choice(OLD, 8, replace=False)]
    events += [(OLD + user, time) for user in range(NEW) for time in (80, 95)]
    lines = [f"{user},{random.integers(ITEMS)},{time}" for user, time in events]
    users = [f"{user},{user % 3}" for user in range(OLD + NEW)]
    (tmp_path / "events.csv").write_text("\n".join(["user,item,time", *lines]) + "\n")
    (tmp_path / "users.csv").write_text("\n".join(["user,country", *users]) + "\n")
    (tmp_path / "readers.toml").write_text(RECIPE)
    return tmp_path


def test_users_of_a_side_table_without_clicks_count_as_new_ones(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(str(log / "readers.toml"))
    table = prepare(recipe, str(log), log / "table").table
    train(recipe, TableData(table), log / "checkpoint", TrainConfig(threads=1))
    monkeypatch.setattr(fit, "_FEWEST_QUERIES", OLD + 1)  # more than there are with clicks before eval
    fitted = replay(Checkpoint.open(log / "checkpoint"), str(log), ReplayConfig(threads=1)).fit
    assert fitted.known_users is None
    assert fitted.new_users is not None

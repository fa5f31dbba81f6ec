"""A run that is killed again and again ends with the very weights of one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from forked import ForkedCommand

from recmill.artifacts.checkpoint.checkpoint import Checkpoint
from recmill.recipe.load import load_recipe
from recmill.reporting.tracking import read_history
from recmill.stages.prepare.prepare import prepare
from recmill.synthetic.generate import generate

NUM_KILLS = 6
# Dropout draws random numbers; keys come, wait, are evicted; a checkpoint every other step, so that kills hit writes.
SET = [
    "ranking.model=wide_deep",
    "ranking.bottom=",
    "ranking.top=",
    "ranking.interaction=",
    "ranking.hidden=[32]",
    "ranking.dropout=0.1",
    "ranking.features=['i1..i13', 'c1..c4']",
    "ranking.wide=c1..c4",
    "ranking.embedding_dim=8",
    "ranking.dynamic={ admit_after = 2, evict_after_steps = 20, evict_every_steps = 7, capacity = 300 }",
    "ranking.train.batch_size=100",
    "ranking.train.epochs=2",
    "ranking.train.evaluations=7",
    "ranking.train.saving={ every_steps = 2, full_every = 4, keep = 2 }",
    "ranking.train.dense={ name = 'adam', learning_rate = 0.002 }",
]

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    generate("criteo", 6_000, 3, folder / "log")
    prepare(load_recipe("criteo-deeprec"), str(folder / "log"), folder / "table")
    return folder / "table"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory, where there is such a place: a busy disk takes minutes to sync hundreds of checkpoints."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="recmill-resume-", dir=memory) as found:
        yield Path(found)


def start(table: Path, into: Path, *flags: str) -> ForkedCommand:
    overrides = [part for value in SET for part in ("--set", value)]
    command = ["train", "criteo-deeprec", "--table", table, "--into", into, *overrides]
    return ForkedCommand(*command, "--threads", 1, "--json", "--quiet", *flags)


def finish(process: ForkedCommand) -> dict:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)["models"][0]


def weights(into: Path) -> dict[str, bytes]:
    """Everything that the last checkpoint holds, whatever chain of deltas it is made of."""
    from recmill.learner.saved import open_learner

    saved = open_learner(Checkpoint.open(into), "ranking", "last")
    found = {name: value.tobytes() for name, value in saved.learner.arrays().items()}
    for name, table in saved.learner.tables.items():
        with table.begin_snapshot() as snapshot:
            for piece in snapshot:
                order = np.argsort(piece.keys)
                parts = (piece.keys, piece.rows, piece.states, piece.counts, piece.steps)
                found[name] = found.get(name, b"") + b"".join(part[order].tobytes() for part in parts)
    return found


def test_a_run_killed_again_and_again_gives_the_same_bits(table, folder):
    undisturbed = finish(start(table, folder / "whole"))
    moments = random.Random(7)
    kills, during_write = 0, 0
    while kills < NUM_KILLS:
        process = start(table, folder / "killed", "--resume")
        before = progress_of(folder / "killed")
        while process.poll() is None and progress_of(folder / "killed") <= before + moments.randrange(3):
            time.sleep(0.002)
        time.sleep(moments.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the run came to its end before it could be killed"
        kills += 1
        during_write += any((folder / "killed/ranking").glob("*.partial"))
    assert during_write
    resumed = finish(start(table, folder / "killed", "--resume"))
    assert resumed["resumed_from"] > 0
    assert (resumed["samples"], resumed["metrics"]) == (undisturbed["samples"], undisturbed["metrics"])
    assert weights(folder / "killed") == weights(folder / "whole")
    steps = [line["step"] for line in read_history(folder / "killed/ranking/history.jsonl")]
    assert steps == sorted(set(steps))


def progress_of(into: Path) -> int:
    """The step of the newest checkpoint."""
    steps = [int(path.name[5:]) for path in (into / "ranking").glob("step-????????")]
    return max(steps, default=0)


def test_a_second_writer_is_refused_and_the_first_goes_on(table, folder):
    first = start(table, folder / "c", "--resume", "--set", "ranking.train.epochs=1")
    while not progress_of(folder / "c"):
        assert first.poll() is None, first.communicate()
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGSTOP)  # so that it cannot end before the second one looks
    try:
        second = start(table, folder / "c", "--resume")
        _, said = second.communicate(timeout=120)
    finally:
        os.kill(first.pid, signal.SIGCONT)
    assert second.returncode == 1
    assert f"process {first.pid} on" in said
    finish(first)
    checkpoints = Checkpoint.open(folder / "c").of("ranking")
    for checkpoint in checkpoints.all():
        checkpoints.chain(checkpoint)

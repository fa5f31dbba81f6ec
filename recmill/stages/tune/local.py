"""Trials on this machine: each in a process of its own, some at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TextIO

from recmill.recipe.load import recipe_to_dict
from recmill.stages.tune.study import Study, Trial

_PROGRAM = "from recmill.stages.tune.trial import main; main()"
Lines = SimpleQueue[tuple[int, str | None]]  # what trials say, by their numbers; None when one is gone


def run_trials(study: Study, table: Path, num_jobs: int, num_threads: int) -> None:
    """Run trials until the study has no more. What runs when this is interrupted ends with it."""
    lines: Lines = SimpleQueue()
    running: dict[int, _Process] = {}
    try:
        while True:
            while len(running) < num_jobs and (trial := study.next()) is not None:
                running[trial.number] = _Process(study.model, trial, table, num_threads, lines)
            if not running:
                return
            number, line = lines.get()
            if line is not None:
                running[number].heard(study, json.loads(line))
            else:
                running.pop(number).ended(study)
    finally:
        for process in running.values():
            process.kill()


class _Process:
    """The process of one trial, and how it said that it ended."""

    def __init__(self, model: str, trial: Trial, table: Path, num_threads: int, lines: Lines) -> None:
        self.number = trial.number
        self.end: dict[str, Any] = {}
        self.why_stopped = ""
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115, closed when the trial ended
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            start_new_session=True,  # Ctrl-C is for whoever started the search
        )
        threading.Thread(target=self._read, args=(self.process.stdout, lines), daemon=True).start()
        recipe = recipe_to_dict(trial.recipe)
        self._say({"recipe": recipe, "model": model, "table": str(table), "threads": num_threads})

    def _read(self, out: TextIO, lines: Lines) -> None:
        for line in out:
            lines.put((self.number, line))
        lines.put((self.number, None))

    def _say(self, message: Any) -> None:
        with suppress(BrokenPipeError):  # it is gone; how it ended is read from its exit code
            print(json.dumps(message), file=self.process.stdin, flush=True)

    def heard(self, study: Study, message: dict[str, Any]) -> None:
        if "evaluation" in message:
            reason = study.heard(self.number, message["evaluation"])
            self.why_stopped = reason or ""
            self._say(reason is None)
        else:
            self.end = message

    def ended(self, study: Study) -> None:
        self._close()
        if "found" in self.end:
            study.completed(self.number, self.end["found"])
        elif "stopped" in self.end:
            study.pruned(self.number, self.why_stopped)
        else:
            study.failed(self.number, self.end.get("failed") or self._why_it_died())
        self.errors.close()

    def _why_it_died(self) -> str:
        code = self.process.returncode
        if code == -9:
            return "its process was killed, as systems do when memory is short"
        self.errors.seek(0)
        said = self.errors.read().decode("utf-8", "replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"its process ended with {how}: {said[-1] if said else 'it said nothing'}"

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        self.process.wait()

    def kill(self) -> None:
        self.process.kill()
        self._close()
        self.errors.close()

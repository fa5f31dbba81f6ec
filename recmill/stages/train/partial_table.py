"""Training while the Table is written: the first epoch follows the writer, later epochs read the finished Table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from recmill.dataset.partial_table import PartialTable, PartialTableBatches
from recmill.distributed.evaluation import evaluate_retriever
from recmill.distributed.workers import SINGLE_WORKER, Workers
from recmill.errors import ArtifactError
from recmill.learner.ranking import Ranker
from recmill.recipe import recipe as r
from recmill.stages.train.source import Evaluation, Learners, TableData, check_prepared, evaluate_on, seed_of
from recmill.stages.train.trainer import BatchSource, Metrics

FOLLOWED = "table of job "  # prefix of the name of such a source


class PartialTableData:
    """Rows of a Table that another process is preparing, or has prepared. The result of training is the same.

    Evaluations of a ranker wait for the held-out rows, which come first in an ordered Table; other evaluations wait
    for the finished Table. So does all training of a recipe whose number of training rows is not known from fitting,
    and of a model that takes only rows with some label.
    """

    def __init__(
        self,
        path: Path,
        data: str | None = None,
        patience_seconds: float | None = None,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.growing = PartialTable(path, patience_seconds)
        self.plan = self.growing.plan
        self.columns = self.plan.columns()
        self.name = FOLLOWED + self.growing.job
        self.data = data
        self.note = note

    def check(self, recipe: r.Recipe) -> None:
        check_prepared(recipe, self.plan.recipe, self.growing.path)

    def batches(self, learner: Learners) -> BatchSource:
        if learner.trains_on is None and self.plan.num_rows:
            seed = seed_of(self.plan.recipe, learner)
            return PartialTableBatches(self.growing, learner.batch_size, learner.layout.features, seed)
        if not self.growing.is_finished():
            self.note("the number of training rows is known only at the end: waits for the Table")
        return self._finished().batches(learner)

    def evaluation(self, learner: Learners, workers: Workers = SINGLE_WORKER) -> Evaluation | None:
        # All workers of a run must decide alike, so this must not depend on the writer's progress.
        return None if self.plan.recipe.split is None else lambda: self._evaluate(learner, workers)

    def num_rows(self, split: str) -> int:
        """Counts of held-out rows are 0 until the Table is finished."""
        if self.growing.is_finished():
            return self._finished().num_rows(split)
        return self.plan.num_rows if split == "train" else 0

    def with_eval_rows(self) -> TableData:
        return self._finished().with_eval_rows()

    def _evaluate(self, learner: Learners, workers: Workers) -> Metrics:
        table = self.growing.held_out("eval") if isinstance(learner, Ranker) else self.growing.finished
        if not table.num_rows("eval"):
            raise ArtifactError(
                f"Table {self.growing.path} has no eval rows, though its recipe holds some out. "
                "Train from it with --table alone, when it is finished."
            )
        if isinstance(learner, Ranker):
            return evaluate_on(table, learner, workers)
        return evaluate_retriever(learner, table, workers).means()

    def _finished(self) -> TableData:
        return TableData(self.growing.finished)


def open_growing(path: str, data: str | None, note: Callable[[str], None]) -> PartialTableData:
    """`open` as a function that can be sent to other nodes, with its first arguments bound."""
    return PartialTableData(Path(path), data, note=note)

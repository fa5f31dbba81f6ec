"""Evaluation by several workers: each measures a slice of the rows, and the sums are added."""

from __future__ import annotations

from collections.abc import Iterable

from recmill.dataset.batch import Batch
from recmill.dataset.schedule import Cursor
from recmill.dataset.splits import SplitRows
from recmill.distributed.slices import SliceSizes
from recmill.distributed.workers import Workers
from recmill.learner.ranking import Ranker
from recmill.learner.retrieval import Retriever, query_chunks
from recmill.metrics import RankerSums, RankingSums


def evaluate_ranker(ranker: Ranker, batches: Iterable[tuple[Batch, Cursor]], workers: Workers) -> RankerSums:
    if workers.size == 1:
        return ranker.evaluate(batches)
    sizes = SliceSizes(workers.size)
    own = ((sizes.slice_batch(batch, workers.rank), cursor) for batch, cursor in batches)
    return workers.sum(ranker.evaluate(own))


def evaluate_retriever(retriever: Retriever, table: SplitRows, workers: Workers) -> RankingSums:
    """Metrics of the eval rows. Lookups are collective, so each worker takes a slice of every chunk of queries."""
    if workers.size == 1:
        return retriever.evaluate(table)
    sizes = SliceSizes(workers.size)
    queries = retriever.eval_queries(table, "eval")
    catalogue = queries.catalogue.batch(retriever.layouts["item"])
    own_items = retriever.item_vectors(sizes.slice_batch(catalogue, workers.rank))
    items, _ = workers.steps.all_gather_rows(own_items)
    chunks = [sizes.slice_rows(rows, workers.rank) for rows in query_chunks(queries)]
    return workers.sum(retriever.measure(queries, items, chunks))

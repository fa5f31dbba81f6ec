"""Masks of the items that meet the `where` of a request: evaluated within its deadline and cached."""

from __future__ import annotations

import time
from collections import OrderedDict
from threading import Lock

import numpy as np
import polars as pl

from recmill.artifacts.bundle.entities import Entities
from recmill.dataset.batch import Array
from recmill.errors import BadRequest, ExpressionError, TooLate
from recmill.features.expressions import compiled, kinds_of_schema
from recmill.recipe.expressions import Node, columns_of, parse_condition
from recmill.recipe.expressions.syntax import Like

_KEPT_BYTES = 64 << 20
_NODES_AT_ONCE = 1 << 22  # cost times rows evaluated between two checks of the deadline
_LIKE_NODES = 128  # cost of matching a pattern, in comparisons
_FEWEST_ROWS = 1_024  # rows below which Polars' overhead for a call exceeds the work
_SHOWN = 60  # characters of a condition in an error


class Masks:
    """A mask over all items for each condition. Keeps the most recently used ones."""

    def __init__(self, items: Entities, kept_bytes: int = _KEPT_BYTES) -> None:
        self.items = items
        self.kept_bytes = kept_bytes
        self._kept: OrderedDict[str, Array] = OrderedDict()
        self._num_bytes = 0
        self._lock = Lock()

    def of(self, where: str, deadline: float | None) -> Array:
        """Which items meet the condition. Raises TooLate at the deadline, a `time.monotonic` time."""
        with self._lock:
            mask = self._kept.get(where)
            if mask is not None:
                self._kept.move_to_end(where)
                return mask
        mask = self._evaluate(where, deadline)
        mask.flags.writeable = False
        self._keep(where, mask)
        return mask

    def clear(self) -> None:
        """Drop all masks: the items have changed."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    def _keep(self, where: str, mask: Array) -> None:
        with self._lock:
            if where in self._kept or mask.nbytes > self.kept_bytes:
                return
            self._kept[where] = mask
            self._num_bytes += mask.nbytes
            while self._num_bytes > self.kept_bytes:
                self._num_bytes -= self._kept.popitem(last=False)[1].nbytes

    def _evaluate(self, where: str, deadline: float | None) -> Array:
        kinds = kinds_of_schema(self.items.raw_schema)
        try:
            tree = parse_condition(where, kinds)
        except ExpressionError as error:
            shown = where if len(where) <= _SHOWN else f"{where[:_SHOWN]}..."
            raise BadRequest(
                f'The condition "{shown}" fails {error}. Columns of items: {", ".join(kinds)}.'
            ) from None
        columns = []
        for name in columns_of(tree) or [self.items.id_column]:
            columns.append(self.items.column(name).alias(name))
            _check(deadline)
        return _mask(pl.DataFrame(columns), tree, deadline)


def _mask(frame: pl.DataFrame, tree: Node, deadline: float | None) -> Array:
    """Evaluate in chunks sized by the cost of the condition: timing it is unreliable on a busy machine."""
    rows = max(_FEWEST_ROWS, _NODES_AT_ONCE // _cost(tree))
    met = compiled(tree).fill_null(False).alias("met")
    mask = np.zeros(frame.height, bool)
    for start in range(0, frame.height, rows):
        mask[start : start + rows] = frame.slice(start, rows).select(met)["met"].to_numpy()
        _check(deadline)
    return mask


def _cost(node: Node) -> int:
    own = _LIKE_NODES if isinstance(node, Like) else 1
    return own + sum(_cost(child) for child in node.children())


def _check(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() > deadline:
        raise TooLate(
            "The deadline passed while items were compared with the condition. "
            "Give the request more time, or make the condition simpler."
        )

"""ALS: user and item vectors whose products predict clicks (Hu et al. 2008, as in Rendle et al. 2021).

Every pair of a user and an item without a click counts a little, as a 0. Users' vectors are fitted to the items',
then vice versa; each time by a few steps of conjugate gradients for all rows at once, so that no matrix per row is
needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recmill.recall.interactions import Array, Interactions, Sequences

MAX_INTERACTIONS = 2_000_000  # beyond this there is no model: a million take a minute and a half
_DIM = 64
_SWEEPS = 8
_STEPS = 3  # steps of conjugate gradients
_UNOBSERVED = 0.02  # weight of a pair without a click
_L2 = 0.3  # constant: regularisation that grows with the catalogue ruins large ones
_CHUNK = 65_536  # interactions whose vectors are in memory at once
_SCORES = 8_000_000  # scores in memory at once


@dataclass(frozen=True)
class Factors:
    """A vector for each user and each item."""

    users: Array  # float32 [users, dim]
    items: Array  # float32 [items, dim]

    def lists(self, users: Array, banned: Sequences, k: int) -> Array:
        """The k best items of each user, best first, padded with -1."""
        found = np.full((len(users), k), -1, np.int64)
        k = min(k, len(self.items))
        size = max(1, _SCORES // max(1, len(self.items)))
        for start in range(0, len(users), size):
            rows = np.arange(start, min(start + size, len(users)))
            scores = self.users[users[rows]] @ self.items.T
            for row in rows:
                scores[row - start, banned.of(int(row))] = -np.inf
            best = np.argpartition(-scores, k - 1, axis=1)[:, :k]
            values = np.take_along_axis(scores, best, axis=1)
            order = np.argsort(-values, axis=1, kind="stable")
            ranked = np.take_along_axis(best, order, axis=1)
            found[rows, :k] = np.where(np.isfinite(np.take_along_axis(values, order, axis=1)), ranked, -1)
        return found


def als(interactions: Interactions, l2: float = _L2, dim: int = _DIM) -> Factors:
    """Fit to who clicked what; repeated clicks do not matter."""
    clicked = interactions.sequences
    by_item = _transposed(clicked, interactions.num_items)
    random = np.random.default_rng(0)
    users = np.zeros((len(clicked), dim), np.float32)
    items = (random.standard_normal((interactions.num_items, dim)) * 0.1 / np.sqrt(dim)).astype(np.float32)
    for _ in range(_SWEEPS):
        users = _fitted(users, items, clicked, l2)
        items = _fitted(items, users, by_item, l2)
    return Factors(users, items)


def _transposed(sequences: Sequences, num_items: int) -> Sequences:
    """The users of each item."""
    order = np.argsort(sequences.items, kind="stable")
    counts = np.bincount(sequences.items, minlength=num_items)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    return Sequences(offsets, sequences.users[order].astype(np.int32))


def _fitted(rows: Array, others: Array, clicked: Sequences, l2: float) -> Array:
    """Fit the rows' vectors to the others': a ridge regression for each row, from its current vector."""
    gram = _UNOBSERVED * (others.T @ others)

    def product(vectors: Array) -> Array:
        return vectors @ gram + l2 * vectors + _sums(others, clicked, vectors)

    residual = _sums(others, clicked) - product(rows)
    direction, size = residual, (residual**2).sum(axis=1, keepdims=True)
    for _ in range(_STEPS):
        image = product(direction)
        step = size / np.maximum((direction * image).sum(axis=1, keepdims=True), 1e-20)
        rows, residual = rows + step * direction, residual - step * image
        before, size = size, (residual**2).sum(axis=1, keepdims=True)
        direction = residual + size / np.maximum(before, 1e-20) * direction
    return rows


def _sums(others: Array, clicked: Sequences, vectors: Array | None = None) -> Array:
    """For each row, the sum of its clicked vectors, each times its product with the row's vector if there is one."""
    sums = np.zeros((len(clicked), others.shape[1]), np.float32)
    for start in range(0, len(clicked.items), _CHUNK):
        some = slice(start, start + _CHUNK)
        of_rows, chosen = clicked.users[some], others[clicked.items[some]]
        if vectors is not None:
            chosen = chosen * np.einsum("nd,nd->n", chosen, vectors[of_rows])[:, None]
        firsts = np.flatnonzero(np.diff(of_rows, prepend=-1))
        sums[of_rows[firsts]] += np.add.reduceat(chosen, firsts, axis=0)
    return sums

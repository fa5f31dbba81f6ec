"""Interactions: which user acted on which item, oldest first, as indices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Sequences:
    """Items of each user, oldest first: those of user u are items[offsets[u]:offsets[u + 1]]."""

    offsets: Array  # int64
    items: Array  # int32

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of(self, user: int) -> Array:
        return np.asarray(self.items[self.offsets[user] : self.offsets[user + 1]])

    @cached_property
    def users(self) -> Array:
        """The user of each item."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    @cached_property
    def from_end(self) -> Array:
        """Number of later items of the same user, for each item."""
        return np.repeat(self.offsets[1:], np.diff(self.offsets)) - 1 - np.arange(len(self.items))

    def take(self, users: Array) -> Sequences:
        """The sequences of these users, in this order."""
        lengths = np.diff(self.offsets)[users]
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        index = np.arange(offsets[-1]) + np.repeat(self.offsets[:-1][users] - offsets[:-1], lengths)
        return Sequences(offsets, self.items[index])

    def last(self, number: int) -> Sequences:
        """The latest items of each user, at most this many."""
        return self.where(self.from_end < number)

    def where(self, keeps: Array) -> Sequences:
        """Only the items where a mask is true."""
        lengths = np.bincount(self.users[keeps], minlength=len(self))
        return Sequences(
            np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)]), self.items[keeps]
        )


@dataclass(frozen=True)
class Interactions:
    """Positive rows of a log, oldest first. A user may have an item several times."""

    users: Array  # int32
    items: Array  # int32
    num_users: int
    num_items: int

    def __len__(self) -> int:
        return len(self.items)

    @cached_property
    def counts(self) -> Array:
        """Number of occurrences of each item."""
        return np.bincount(self.items, minlength=self.num_items)

    @cached_property
    def sequences(self) -> Sequences:
        """Each user's distinct items in the order of their latest occurrence."""
        pairs = self.users.astype(np.int64) * self.num_items + self.items
        # The first occurrence from the end is the latest.
        _, from_end = np.unique(pairs[::-1], return_index=True)
        latest = np.sort(len(pairs) - 1 - from_end)
        latest = latest[np.argsort(self.users[latest], kind="stable")]
        lengths = np.bincount(self.users[latest], minlength=self.num_users)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
        return Sequences(offsets, self.items[latest].astype(np.int32))

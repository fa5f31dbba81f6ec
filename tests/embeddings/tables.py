"""The two ways to make a table that the tests go through."""

from __future__ import annotations

from collections.abc import Callable

from recmill.embeddings.table import DiskTier, EmbeddingTable, TableSpec

MakeTable = Callable[..., EmbeddingTable]
FOLDER = "/var/tmp"  # on a disk, where /tmp may be memory


def make_in_memory(spec: TableSpec, num_threads: int = 1) -> EmbeddingTable:
    return EmbeddingTable(spec, num_threads)


def make_on_disk(spec: TableSpec, num_threads: int = 1) -> EmbeddingTable:
    return EmbeddingTable(spec, num_threads, DiskTier(FOLDER, memory_bytes=0))

"""What the disk tier adds to a table: bounded memory, nothing left behind, a full disk as an error."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tables import FOLDER

from recmill.embeddings.table import DiskTier, EmbeddingTable, TableSpec

MEGABYTE = 1 << 20
SPEC = TableSpec("t", 16)


def train(table: EmbeddingTable, steps: int, num_keys: int, seed: int = 0) -> None:
    random = np.random.default_rng(seed)
    for step in range(steps):
        lookup = table.lookup(random.integers(0, num_keys, 250), True, step)
        table.update(lookup, random.standard_normal((250, 16)).astype(np.float32), 0.1, step)


def rows(table: EmbeddingTable, num_keys: int) -> Any:
    return table.pool(table.lookup(np.arange(num_keys), train=False))


def open_files() -> list[int]:
    """Descriptors of record files."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            if "recmill-embeddings" in os.readlink(link):
                found.append(int(link.name))
        except FileNotFoundError:
            continue
    return found


def cached_pages(file: int) -> list[bool]:
    """For each page of a file, whether the system holds it in memory."""
    size = os.fstat(file).st_size
    with mmap.mmap(file, size) as mapped:
        view = (ctypes.c_char * size).from_buffer(mapped)
        flags = (ctypes.c_ubyte * (size // mmap.PAGESIZE))()
        assert ctypes.CDLL(None).mincore(ctypes.byref(view), ctypes.c_size_t(size), flags) == 0
        del view
    return [bool(flag & 1) for flag in flags]


def cached_bytes(file: int) -> int:
    return sum(cached_pages(file)) * mmap.PAGESIZE


def test_memory_stays_below_the_bound_and_answers_are_the_same() -> None:
    bound = 2 * MEGABYTE
    spilled, whole = EmbeddingTable(SPEC, 2, DiskTier(FOLDER, bound)), EmbeddingTable(SPEC, 2)
    (file,) = open_files()
    for seed in range(4):
        for table in (spilled, whole):
            train(table, 160, num_keys=100_000, seed=seed)
        assert cached_bytes(file) <= bound
        assert 0 < spilled.statistics().resident_bytes <= bound
    found = spilled.statistics()
    assert found.disk_bytes == found.record_bytes == whole.statistics().record_bytes > 3 * bound
    np.testing.assert_array_equal(rows(spilled, 100_000), rows(whole, 100_000))


def test_scans_leave_memory_as_it_was() -> None:
    bound = 2 * MEGABYTE
    table = EmbeddingTable(SPEC, disk=DiskTier(FOLDER, bound))
    (file,) = open_files()
    train(table, 640, num_keys=100_000)
    before = table.statistics().resident_bytes
    assert sum(len(piece.keys) for piece in table.begin_snapshot()) == table.statistics().keys
    assert table.evict_by_age(step=640, max_age=320) > 10_000
    assert table.statistics().resident_bytes == before
    assert cached_bytes(file) <= bound


def test_keys_in_use_stay_in_memory_while_others_come_and_go() -> None:
    table = EmbeddingTable(SPEC, disk=DiskTier(FOLDER, MEGABYTE))
    (file,) = open_files()
    hot, random = np.arange(1_000), np.random.default_rng(0)
    for _ in range(400):
        table.lookup(hot, train=True)
        table.lookup(random.integers(1_000, 100_000, 100), train=True)
    pages = cached_pages(file)
    hot_pages = 1_000 * 88 // mmap.PAGESIZE
    assert all(pages[:hot_pages])
    assert sum(pages) * mmap.PAGESIZE <= MEGABYTE < len(pages) * mmap.PAGESIZE / 3


def test_tables_share_one_tier_and_give_their_space_back() -> None:
    disk = DiskTier(FOLDER, MEGABYTE)
    (file,) = open_files()
    specs = [TableSpec(name, 16, seed=seed) for seed, name in enumerate(["a", "b", "c"])]
    tables = [EmbeddingTable(spec, disk=disk) for spec in specs]
    alone = [EmbeddingTable(spec) for spec in specs]
    for table in (*tables, *alone):
        train(table, 160, num_keys=30_000)
    for shared, own in zip(tables, alone, strict=True):
        np.testing.assert_array_equal(rows(shared, 30_000), rows(own, 30_000))
    assert sum(table.statistics().resident_bytes for table in tables) <= MEGABYTE
    full = os.fstat(file).st_blocks
    tables.pop()
    del table, shared
    assert os.fstat(file).st_blocks < 0.7 * full
    del tables, disk
    assert open_files() == []


def test_the_folder_stays_empty_so_that_nothing_is_left_behind(tmp_path: Path) -> None:
    table = EmbeddingTable(SPEC, disk=DiskTier(tmp_path, 0))
    train(table, 2, num_keys=1_000)
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import resource, sys
import numpy as np
from recmill.embeddings.table import DiskTier, EmbeddingTable, TableSpec

table = EmbeddingTable(TableSpec("t", 16), disk=DiskTier(sys.argv[1], 1 << 20))
twin = EmbeddingTable(TableSpec("t", 16))
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
try:
    table.lookup(np.arange(100_000), train=True)
except OSError as error:
    print(error.strerror)
found = table.statistics()
assert found.disk_bytes <= 2 << 20, found
kept = np.arange(found.keys)
twin.lookup(kept, train=True)
for each in (table, twin):
    each.update(each.lookup(kept, train=True), np.ones((len(kept), 16), np.float32), 0.1)
np.testing.assert_array_equal(table.pool(table.lookup(kept, False)), twin.pool(twin.lookup(kept, False)))
assert sum(len(piece.keys) for piece in table.begin_snapshot()) == len(kept) == 5 * 4096
"""


def test_a_full_disk_is_an_error_and_the_table_stays_usable() -> None:
    """The limit on a file's size stands for a small disk."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, FOLDER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"Folder {FOLDER} has no room for 360448 more bytes of embedding records" in done.stdout


def test_a_folder_that_cannot_hold_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"Folder .*/nowhere cannot hold embedding records: No such file"):
        DiskTier(tmp_path / "nowhere", MEGABYTE)
    with pytest.raises(ValueError, match="memory_bytes must be a number from 0 on, got -1"):
        DiskTier(tmp_path, -1)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory")
def test_a_folder_in_memory_is_refused() -> None:
    with pytest.raises(OSError, match=r"/dev/shm lies in memory"):
        DiskTier("/dev/shm", MEGABYTE)

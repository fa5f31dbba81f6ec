"""Cores are counted as the container's limit says, in either way that Linux writes it."""

from __future__ import annotations

import os

import pytest

from recmill.reporting.machine import available_cores, cpu_quota
from recmill.stages.train.threads import threads_by_gain


@pytest.mark.parametrize(
    ("content", "quota"),
    [("max 100000", None), ("150000 100000", 1.5), ("50000 100000", 0.5), ("nonsense", None), ("", None)],
)
def test_the_quota_is_read_from_the_unified_hierarchy(tmp_path, content, quota):
    (tmp_path / "cpu.max").write_text(content)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(("microseconds", "quota"), [("-1", None), ("250000", 2.5)])
def test_the_quota_is_read_from_the_older_hierarchy(tmp_path, microseconds, quota):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text(microseconds)
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    assert cpu_quota(tmp_path) == quota


def test_there_is_always_one_core_and_never_more_than_we_are_bound_to(tmp_path):
    bound_to = len(os.sched_getaffinity(0))
    assert available_cores(tmp_path) == bound_to
    (tmp_path / "cpu.max").write_text("10000 100000")
    assert available_cores(tmp_path) == 1
    (tmp_path / "cpu.max").write_text("99900000 100000")
    assert available_cores(tmp_path) == bound_to


@pytest.mark.parametrize(
    ("gain", "number", "reason"),
    [
        (1.9, 2, "2 cores; 2 threads give 1.9x of one"),
        (1.1, 1, "2 cores; 2 threads give 1.1x of one"),
        (9.6, 2, "2 cores; other work runs on them, so the gain cannot be measured"),
    ],
)
def test_a_gain_beyond_the_number_of_cores_is_noise_and_is_not_printed(gain, number, reason):
    threads = threads_by_gain(gain, 2, "2 cores")
    assert (threads.number, threads.reason) == (number, reason)

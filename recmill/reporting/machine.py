"""The capacity of this machine that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


def available_cores(cgroups: Path = _CGROUPS) -> int:
    """Cores that this process may use: its affinity, and the container's quota if there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroups)
    return cores if quota is None else max(1, min(cores, int(quota + 0.5)))


def cpu_quota(cgroups: Path = _CGROUPS) -> float | None:
    """Cores that the container's limit allows; None without a limit."""
    try:
        quota, period = (cgroups / "cpu.max").read_text().split()
        return None if quota == "max" else float(quota) / float(period)
    except (OSError, ValueError):
        pass
    try:
        quota_us = int((cgroups / "cpu/cpu.cfs_quota_us").read_text())
        return quota_us / int((cgroups / "cpu/cpu.cfs_period_us").read_text()) if quota_us > 0 else None
    except (OSError, ValueError):
        return None

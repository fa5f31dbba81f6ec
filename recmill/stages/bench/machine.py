"""What the numbers of a benchmark depend on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

from recmill.reporting.html.environment import cpu
from recmill.reporting.machine import available_cores

_SIMD = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def machine(cores: int | None = None) -> dict[str, Any]:
    """Processor, vector units, the cores that took part, how busy they were, and how idle OpenMP threads wait."""
    processor, flags = cpu(Path("/proc/cpuinfo"))
    return {
        "processor": processor,
        "simd": [flag for flag in _SIMD if flag in flags],
        "cores": cores or available_cores(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY", "not set"),
    }

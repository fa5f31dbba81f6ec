"""The environment of a run."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

from recmill import __version__
from recmill.reporting.html.content import ReportTable, Section
from recmill.reporting.machine import available_cores

_CPU_INFO = Path("/proc/cpuinfo")
_PACKAGES = ("torch", "numpy", "polars", "pyarrow")  # named when the run has loaded them

# Instruction sets that decide the speed of vector and matrix operations, on x86 and ARM.
_SIMD = frozenset(
    {
        "sse4_2",
        "avx",
        "avx2",
        "fma",
        "f16c",
        "avx512f",
        "avx512bw",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
    }
    | {"amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "sve", "sve2", "bf16", "i8mm"}
)


def environment_section() -> Section:
    """Python, packages, processor and date."""
    return Section("Environment", tables=(ReportTable(("what", "value"), tuple(environment().items())),))


def environment() -> dict[str, str]:
    """Name -> value; nothing in it identifies the machine or its user."""
    model, flags = cpu(_CPU_INFO)
    return {
        "recmill": __version__,
        "Python": platform.python_version(),
        **{name: sys.modules[name].__version__ for name in _PACKAGES if name in sys.modules},
        **_torch_threads(),
        "system": f"{platform.system()} {platform.release()}",
        "processor": model,
        "cores": _cores(),
        "SIMD": " ".join(sorted(_SIMD & flags)) or "unknown",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def cpu(info: Path) -> tuple[str, frozenset[str]]:
    """Model name and feature flags from Linux; elsewhere what Python reports."""
    if not info.is_file():
        return platform.processor() or platform.machine(), frozenset()
    fields: dict[str, str] = {}
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name") or platform.machine(), frozenset(flags.split())


def _cores() -> str:
    """The number of usable cores, and the total."""
    usable = available_cores()
    return f"{usable} of {os.cpu_count() or usable}"


def _torch_threads() -> dict[str, str]:
    torch = sys.modules.get("torch")
    return {"torch threads": str(torch.get_num_threads())} if torch else {}

"""What every benchmark shares: the stamp of hardware and versions, interleaved timing, medians and ratios.

Interleaved: every round runs each candidate once, so that a machine that slows down or speeds up treats all alike.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["emit", "interleave", "keep_freed_memory", "medians", "minima", "ratios", "stamp", "table"]

_PACKAGES = ("numpy", "torch", "numba", "ml_dtypes", "keras", "tensorflow", "jax")


def stamp() -> dict[str, Any]:
    """Where and with what the numbers were measured: JSON-ready.

    The packages are those of the project's that are installed; `torch_threads` and `gpu` are there where torch is.
    """
    found: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if "torch" in found:
        import torch

        found["torch_threads"] = torch.get_num_threads()
        found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return found


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warmup: int = 2,
    synchronize: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Seconds that each candidate took in each round; all run once in every round, in alternating order.

    Args:
        candidates: what to time, by name.
        rounds: measured runs of each.
        warmup: runs of each before, not measured: compilation, caches, clocks.
        synchronize: called after each run and before its clock stops, such as `torch.cuda.synchronize`.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(-warmup, rounds):
        order = list(candidates.items())
        for name, run in order if round_number % 2 else reversed(order):
            start = time.perf_counter()
            run()
            if synchronize is not None:
                synchronize()
            elapsed = time.perf_counter() - start
            if round_number >= 0:
                seconds[name].append(elapsed)
    return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each candidate's times, in seconds."""
    return {name: statistics.median(times) for name, times in seconds.items()}


def minima(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Each candidate's shortest time, in seconds: what the work costs where other processes disturb the medians."""
    return {name: min(times) for name, times in seconds.items()}


def ratios(seconds: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    """The median over the rounds of each candidate's time relative to the reference's in the same round."""
    base = seconds[reference]
    return {
        name: statistics.median(time / other for time, other in zip(times, base, strict=True))
        for name, times in seconds.items()
    }


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Plain-text columns, the first one flush left, the others flush right; floats with three digits."""
    cells: list[list[str]] = [
        list(headers),
        *([f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows),
    ]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )


def emit(text: str, data: Mapping[str, Any], *, as_json: bool) -> None:
    """Print the report for people, or its data, under the stamp, as JSON."""
    here = stamp()
    if as_json:
        print(json.dumps({"stamp": here, **data}, indent=2))
    else:
        print(text)
        print("\n" + ", ".join(f"{name} {value}" for name, value in here.items() if value is not None))


def keep_freed_memory() -> None:
    """Starts this script anew with a C library that keeps freed memory; to be called first in `main`.

    Large blocks are otherwise given back to the system at every free and faulted in again page by page, which takes a
    large and irregular part of a small training step. Has no effect but on glibc.
    """
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        kept = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **kept})


def _cpu() -> str:
    """The processor's name."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

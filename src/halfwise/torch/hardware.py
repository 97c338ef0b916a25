"""What this machine can do in each format: its units, its speed against float32, and whether its results are right."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from halfwise.core.formats import FORMATS
from halfwise.core.hardware import (
    OPERATIONS,
    FormatSupport,
    HardwareReport,
    framework_versions,
    native_formats_cpu,
    native_formats_cuda,
)
from halfwise.errors import UsageError
from halfwise.torch.kernel_probes import Measurement, measure

__all__ = ["inspect"]

_NOTABLE_FLAGS = (
    *("avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16"),
    *("fp16_arith", "bf16", "sve_bf16"),
)


def inspect(
    device: str | torch.device | None = None,
    *,
    progress: Callable[[str, float], None] | None = None,
    seconds: float = 2e-3,
) -> HardwareReport:
    """Measures and checks every format on `device`. Takes a few seconds; leaves torch's settings and generators alone.

    Args:
        device: `"cpu"`, `"cuda"` or `"cuda:N"`. Default: the current GPU if there is one, else the CPU.
        progress: called with the operation being measured and the share of the work done before it.
        seconds: how long one float32 call should take, twice that on a GPU; the inputs grow up to 64 times to reach it.

    Raises:
        UsageError: `device` is not here, or is of a kind that cannot be inspected.

    >>> report = inspect("cpu", seconds=1e-4)
    >>> report.formats["float32"].support
    'native'
    """
    chosen = _device(device)
    native = _native(chosen)
    names = [name for name in FORMATS if name != "tensorfloat32" or name in native]
    results = {name: FormatSupport("native" if name in native else "emulated") for name in FORMATS}
    with _quiet_settings(chosen):
        for done, operation in enumerate(OPERATIONS):
            if progress is not None:
                progress(operation, done / len(OPERATIONS))
            for name, measurement in measure(operation, names, chosen, seconds).items():
                results[name] = _with(results[name], operation, measurement)
    return HardwareReport(
        device=str(chosen),
        device_name=_device_name(chosen),
        device_features=_device_features(chosen),
        frameworks=framework_versions() | {"torch": torch.__version__},
        formats={name: _concluded(support) for name, support in results.items()},
    )


def _with(support: FormatSupport, operation: str, found: Measurement) -> FormatSupport:
    return replace(
        support,
        relative_time={**support.relative_time, operation: found.relative_time},
        lower_bounds=(*support.lower_bounds, operation) if found.lower_bound else support.lower_bounds,
        faults=(*support.faults, f"{operation}: {found.fault}") if found.fault else support.faults,
    )


def _concluded(support: FormatSupport) -> FormatSupport:
    # A format without matrix products trains nothing, whatever else of it runs.
    runs = support.relative_time["matmul"] is not None
    return replace(support, support=support.support if runs else "absent", correct=runs and not support.faults)


@contextmanager
def _quiet_settings(device: torch.device) -> Iterator[None]:
    """No gradients, no autocast, one CPU thread where the CPU is timed; all as before afterwards."""
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        else:
            stack.callback(torch.set_num_threads, threads)
            torch.set_num_threads(1)
        yield


def _device(wanted: str | torch.device | None) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = ["cpu", *(f"cuda:{index}" for index in range(count))]
    if wanted is None:
        wanted = "cuda" if count else "cpu"
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError):
        device = None
    if device is not None and device.type == "cpu":
        return torch.device("cpu")
    if device is not None and device.type == "cuda" and count:
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    if device is None or str(device) not in here:
        raise UsageError(
            f"device {str(wanted)!r} cannot be inspected. Here: {', '.join(map(repr, here))} "
            f"(torch {torch.__version__}). "
            "Choose one of them, or install a torch build for the device you mean."
        )
    return device


def _native(device: torch.device) -> frozenset[str]:
    if device.type == "cuda":
        return native_formats_cuda(torch.cuda.get_device_capability(device))
    return native_formats_cpu({name for name, present in torch.cpu.get_capabilities().items() if present is True})


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return str(torch.cpu.get_capabilities().get("cpu_name") or platform.processor() or platform.machine())


def _device_features(device: torch.device) -> tuple[str, ...]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return (
            f"compute capability {capability}",
            f"{properties.total_memory / 2**30:.0f} GiB",
            f"CUDA {torch.version.cuda}",
        )
    flags = torch.cpu.get_capabilities()
    return (
        f"timed on 1 of {torch.get_num_threads()} threads",
        *(name for name in _NOTABLE_FLAGS if flags.get(name) is True),
    )

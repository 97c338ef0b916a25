"""Where the emulation is in force: a counted, process-wide change of the CPU's autocast, and regions that use it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from halfwise.errors import PolicyError
from halfwise.torch.emulation.kernels import WeightCasts, kernel
from halfwise.torch.emulation.lists import CATEGORIES, RECURRENT, Category
from halfwise.torch.profile import eager
from halfwise.torch.region import region

__all__ = ["emulated_region", "emulation"]

_COMPUTES = {
    "float32": "half",
    "bfloat16": "half",
    "float16": "half",
    "tensorfloat32": "tensorfloat32",
    "float8": "float8",
}


class _Installation:
    """The kernels, in place while anybody wants them. PyTorch's are the process's, so threads must agree on a mode."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users: list[str] = []
        self._library: Any = None
        self.casts = WeightCasts()

    def mode(self) -> str:
        """What is emulated: that of the innermost user."""
        return self._users[-1]

    def enter(self, mode: str) -> None:
        """One more user."""
        with self._lock:
            self._users.append(mode)
            if len(self._users) == 1:
                self._install()

    def leave(self, mode: str) -> None:
        """One less; the last one puts PyTorch's own kernels back."""
        with self._lock:
            place = len(self._users) - 1 - self._users[::-1].index(mode)
            del self._users[place]
            self.casts.clear()
            if not self._users:
                self._library._destroy()
                self._library = None

    def _install(self) -> None:
        library = torch.library.Library("aten", "IMPL")
        table: dict[str, Category] = {**CATEGORIES, **dict.fromkeys(RECURRENT, "lower_precision")}
        kernels: dict[str, Any] = {name: kernel(name, kind, self.casts, self.mode) for name, kind in table.items()}
        kernels |= dict.fromkeys(_only_on_cpu(), torch.library.fallthrough_kernel)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="Warning only once for all operators"
            )  # that kernels are replaced
            for name, made in kernels.items():
                library.impl(name, made, "AutocastCPU", allow_override=True)
        self._library = library


_installation = _Installation()


def _only_on_cpu() -> list[str]:
    """Operations that the CPU's autocast knows and CUDA's does not."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    known = {f"aten::{name}" for name in (*CATEGORIES, *RECURRENT)}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return [name.removeprefix("aten::") for name in names if name not in known and has_kernel(name, "AutocastCPU")]


@contextmanager
def emulation(compute: str) -> Iterator[None]:
    """Within the block the CPU's autocast regions act as CUDA's. Compiled code runs eagerly meanwhile.

    To be held around forward and backward where the latter runs parts of the former again (checkpointing).

    Args:
        compute: `"float32"`, `"bfloat16"`, `"float16"`, `"tensorfloat32"` or `"float8"`.

    Raises:
        PolicyError: it is none of these.
    """
    if compute not in _COMPUTES:
        raise PolicyError(f"cannot emulate {compute!r}; allowed: {', '.join(_COMPUTES)}")
    mode = _COMPUTES[compute]
    with eager():
        _installation.enter(mode)
        try:
            yield
        finally:
            _installation.leave(mode)


@contextmanager
def emulated_region(device_type: str, compute: str) -> Iterator[None]:
    """A precision region of another device, on the CPU. For forward pass and loss; the backward pass goes outside.

    Args:
        device_type: `"cuda"`; `"tpu"`, which is taken to follow CUDA's lists; `"cpu"` is this device's own region.
        compute: `"float32"`, `"bfloat16"` or `"float16"`: the device's autocast. `"tensorfloat32"`: float32, with the
            operands of products rounded. `"float8"`: bfloat16, with the operands of linear layers in float8, scaled
            per tensor (arXiv 2209.05433).

    Raises:
        PolicyError: the format cannot be emulated.

    Example:
        >>> x = torch.full((2, 2), 200.0)
        >>> with emulated_region("cuda", "float16"):
        ...     product = x @ x
        ...     (product.dtype, product.softmax(1).dtype, float(product[0, 0]))
        (torch.float16, torch.float32, inf)
    """
    if device_type == "cpu" and compute in ("float32", "bfloat16", "float16"):
        with region("cpu", compute):
            yield
        return
    with emulation(compute):
        if compute == "float32":
            inner = torch.autocast("cpu", enabled=False)
        else:
            dtype = torch.float16 if compute == "float16" else torch.bfloat16
            inner = torch.autocast("cpu", dtype=dtype)
        with inner:
            yield

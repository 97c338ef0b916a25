"""The emulation's kernels in the place of the CPU's own: counted, for the process has one set of them."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

from halfwise.torch.emulation.casts import WeightCasts
from halfwise.torch.emulation.kernels import kernels
from halfwise.torch.emulation.lists import CARELESS, CATEGORIES, RECURRENT
from halfwise.torch.emulation.redirect import redirected
from halfwise.torch.profile import eager

__all__ = ["installed"]


@contextmanager
def installed(compute: str) -> Iterator[None]:
    """Within the block autocast regions on the CPU act as CUDA's, in every thread; compiled code runs eagerly.

    Threads may overlap, and blocks nest. What is emulated is each thread's own; a thread that holds no block of its
    own is in the one that was entered last.
    """
    _installation.enter(compute)
    try:
        yield
    finally:
        _installation.leave(compute)


class _Holds(threading.local):
    """The formats whose blocks this thread is in, innermost last."""

    def __init__(self) -> None:
        self.computes: list[str] = []


class _Installation:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._mine = _Holds()
        self._everybodys: list[str] = []
        self._undo = ExitStack()
        self._is_eager = False
        self._casts = WeightCasts()
        self._kernels: dict[str, Any] = {}

    def enter(self, compute: str) -> None:
        with self._lock:
            if not self._everybodys:
                self._install()
            if not self._is_eager and "torch._dynamo" in sys.modules:  # the compiler may have been loaded since
                self._undo.enter_context(eager())
                self._is_eager = True
            self._everybodys.append(compute)
            self._mine.computes.append(compute)

    def leave(self, compute: str) -> None:
        with self._lock:
            self._mine.computes.pop()
            del self._everybodys[len(self._everybodys) - 1 - self._everybodys[::-1].index(compute)]
            if not self._everybodys:
                self._uninstall()

    def _install(self) -> None:
        with ExitStack() as undo:
            undo.callback(self._casts.clear)
            library = torch.library.Library("aten", "IMPL")
            undo.callback(library._destroy)
            self._kernels = self._kernels or _all_kernels(self._casts, self._is_float8)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Warning only once for all operators")  # kernels are replaced
                for name, kernel in self._kernels.items():
                    library.impl(name, kernel, "AutocastCPU", allow_override=True)
            undo.enter_context(redirected(self._in_force_here, self._casts.clear))
            self._undo = undo.pop_all()

    def _uninstall(self) -> None:
        self._is_eager = False
        self._undo.close()

    def _in_force_here(self) -> str | None:
        """The format of this thread's innermost block."""
        return self._mine.computes[-1] if self._mine.computes else None

    def _is_float8(self) -> bool:
        computes = self._mine.computes or self._everybodys
        return computes[-1:] == ["float8"]


def _all_kernels(casts: WeightCasts, is_float8: Any) -> dict[str, Any]:
    return {**dict.fromkeys(_only_on_cpu(), torch.library.fallthrough_kernel), **kernels(casts, is_float8)}


@cache
def _only_on_cpu() -> tuple[str, ...]:
    """Operations that the CPU's autocast knows and CUDA's does not."""
    known = {f"aten::{name}" for name in (*CATEGORIES, *RECURRENT, *CARELESS)}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return tuple(
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and name not in known and has_kernel(name, "AutocastCPU")
    )


_installation = _Installation()

"""What code within the emulation says to autocast itself, understood as said on a CUDA device.

A model may hold `torch.autocast("cuda", enabled=False)` around a loss, or functions made by
`torch.amp.custom_fwd(device_type="cuda")`. On a CPU these do nothing, or warn that there is no such device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch.amp import autocast_mode

__all__ = ["redirected"]


@contextmanager
def redirected(in_force: Callable[[], str | None], clear: Callable[[], None]) -> Iterator[None]:
    """Within the block `"cuda"` means the CPU to autocast, in the threads where a format is emulated.

    Args:
        in_force: the format that is emulated in the calling thread, None where none is.
        clear: called where autocast forgets the casts of weights.
    """
    init, cast, clear_cache = torch.autocast.__init__, autocast_mode._cast, torch.clear_autocast_cache

    @wraps(init)
    def made(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        compute = in_force()
        if compute is not None and device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
        wanted = dtype or torch.get_autocast_dtype("cpu")
        in_tensorfloat32 = compute == "tensorfloat32" and device_type == "cpu" and wanted is torch.float32
        init(self, device_type, dtype, enabled and not in_tensorfloat32, cache_enabled)
        if in_tensorfloat32:  # which autocast would take for an unsupported format
            self._enabled = enabled

    @wraps(cast)
    def cast_to(value: Any, device_type: str, dtype: torch.dtype) -> Any:
        return cast(value, "cpu" if device_type == "cuda" and in_force() is not None else device_type, dtype)

    @wraps(clear_cache)
    def forget() -> None:
        clear_cache()
        clear()

    with ExitStack() as undo:
        for owner, name, function in (
            (torch.autocast, "__init__", made),
            (autocast_mode, "_cast", cast_to),
            (torch, "clear_autocast_cache", forget),
        ):
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, function)
        yield

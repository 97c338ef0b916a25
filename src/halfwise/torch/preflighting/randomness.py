"""The same random numbers in every precision: torch draws others for a tensor in half than for one in float32.

A dropout mask is the same in both, but noise that code adds (`torch.randn_like`) is not, and losses could not be
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from halfwise.torch.tracing.operations import operation_of

__all__ = ["SameRandomNumbers"]

_HALF = (torch.float16, torch.bfloat16)
_IN_PLACE = frozenset({"normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_"})
_MAKING = frozenset({"rand", "rand_like", "randn", "randn_like", "normal"})


class SameRandomNumbers(TorchDispatchMode):
    """Within this context random numbers in half precision are drawn in float32 and rounded.

    >>> torch.manual_seed(0) and None
    >>> expected = torch.randn(100).half()
    >>> torch.manual_seed(0) and None
    >>> with SameRandomNumbers():
    ...     torch.equal(torch.randn(100, dtype=torch.float16), expected)
    True
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation, a random one in float32."""
        kwargs = kwargs or {}
        short = operation_of(func).short
        if short in _IN_PLACE and args[0].dtype in _HALF:
            drawn = func(args[0].float(), *args[1:], **kwargs)
            return args[0].copy_(drawn)
        if short in _MAKING:
            like = args[0].dtype if args and isinstance(args[0], Tensor) else torch.get_default_dtype()
            dtype = kwargs.get("dtype") or like
            if dtype in _HALF:
                return func(*args, **{**kwargs, "dtype": torch.float32}).to(dtype)
        return func(*args, **kwargs)

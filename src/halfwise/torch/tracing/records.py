"""What a trace holds: one record per floating-point result, its range, and which infinities stand there on purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from halfwise.core.diagnosis import Direction
from halfwise.torch.tracing.attribution import Place
from halfwise.torch.tracing.operations import SIGN_CHANGING

__all__ = ["Input", "Record", "is_intended", "measure", "read_ranges", "storage_of", "values_of"]

_MEASURED_AS_THEY_ARE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


class Input(NamedTuple):
    """An input of a record: the record that produced it, and the range of the part that was read (-1: all of it)."""

    record: int
    extent: int


@dataclass(slots=True)
class Record:
    """One floating-point result of one operation, or (kind not `""`) a tensor that came from outside.

    Attributes:
        index: position in the order of execution.
        operation: such as `"aten.addmm"`; `""` for tensors from outside.
        short: the operation's name alone.
        place: module path, module class and line.
        direction: `"forward"` or `"backward"`.
        of: backward, the forward operation that is being differentiated; `""` in the backward of a custom function.
        dtype: of the result, such as `"float16"`.
        numel: number of elements of the result.
        inputs: the producers of the floating-point inputs.
        scalars: the Python floats among the arguments.
        kind: of what comes from outside `"parameter"`, `"buffer"`, `"gradient"`, `"input"` (of the model) or `"tensor"`
            (any other); else `""`.
        name: of a tensor from outside, where it has one.
        previous: of a write to a part of a tensor, the record that wrote to it before; else -1.
        extent: number of the range in the trace.
        low, high: smallest and largest value; both NaN if there is one. Known after `Trace.settle()`.
        intended: the infinities in it stand there on purpose: a mask's -inf, or one passed on. Known after `settle()`.
    """

    index: int
    operation: str
    short: str
    place: Place
    direction: Direction
    of: str
    dtype: str
    numel: int
    inputs: tuple[Input, ...]
    scalars: tuple[float, ...]
    kind: str = ""
    name: str = ""
    previous: int = -1
    extent: int = -1
    low: float = 0.0
    high: float = 0.0
    intended: bool = False

    @property
    def finite(self) -> bool:
        """No NaN and no infinity in it."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def largest(self) -> float:
        """Largest magnitude; NaN or inf where there is one."""
        return max(abs(self.low), abs(self.high)) if self.low == self.low else math.nan

    @property
    def found(self) -> str:
        """What a reader has to know of the values: `"nan"`, `"inf"`, `"-inf"`, or the largest magnitude."""
        if math.isnan(self.low):
            return "nan"
        if self.high == math.inf:
            return "inf"
        return "-inf" if self.low == -math.inf else f"{self.largest:.3g}"


def measure(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Smallest and largest value of `tensor` as 0-dim tensors on its device, both NaN if it holds one; None if it is
    empty, or of a kind or dtype that cannot be measured.

    A tensor whose dimensions are in another order than its memory is read in the memory's order (12 times as fast), and
    expanded dimensions are read once.
    """
    values = values_of(tensor)
    if values is None or values.numel() == 0:
        return None
    try:
        if values.dtype not in _MEASURED_AS_THEY_ARE:
            values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values.float()
        if not values.is_contiguous():
            strides = values.stride()
            if 0 in strides:
                values = values[tuple(0 if stride == 0 else slice(None) for stride in strides)]
                strides = values.stride()
            values = values.permute(sorted(range(values.dim()), key=lambda d: -strides[d]))
        low, high = torch.aminmax(values)
    except NotImplementedError:  # torch has no kernel for this dtype or device
        return None
    return low, high


def read_ranges(ranges: list[tuple[Tensor, Tensor]]) -> list[tuple[float, float]]:
    """The values of all ranges with one transfer per device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, (low, _) in enumerate(ranges):
        groups.setdefault((low.device, low.dtype), []).append(index)
    read: list[tuple[float, float]] = [(0.0, 0.0)] * len(ranges)
    for (device, _), indices in groups.items():
        with torch.autocast(device.type, enabled=False):  # it refuses to stack float64
            lows = torch.stack([ranges[i][0] for i in indices]).tolist()
            highs = torch.stack([ranges[i][1] for i in indices]).tolist()
        for index, low, high in zip(indices, lows, highs, strict=True):
            read[index] = (low, high)
    return read


def is_intended(record: Record, records: Sequence[Record]) -> bool:
    """Whether each infinity in `record` is a constant that the code wrote, or comes from one. NaN never is.

    From outside, -inf alone passes as a mask; +inf does not, and neither does anything in a parameter.
    """
    if math.isnan(record.low):
        return False
    signs = {sign for sign in (-1, 1) if math.inf == sign * (record.high if sign > 0 else record.low)}
    if record.kind:
        return record.kind != "parameter" and signs == {-1}
    if not record.inputs and not record.scalars:
        return True  # a constant made from nothing, such as torch.tensor([-inf])
    allowed = {int(math.copysign(1, scalar)) for scalar in record.scalars if math.isinf(scalar)}
    for parent in (records[given.record] for given in record.inputs):
        if parent.finite:
            continue
        if not parent.intended:
            return False
        allowed |= {-1} if parent.low == -math.inf else set()
        allowed |= {1} if parent.high == math.inf else set()
    if allowed and record.short in SIGN_CHANGING:
        return True
    return signs <= allowed


def values_of(tensor: Tensor) -> Tensor | None:
    """The strided tensor that holds the values of a dense, sparse or nested one; None where there are none to read:
    meta, fake and opaque (mkldnn) tensors.
    """
    if type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta):
        return tensor  # most often, and at each step of a watched loop
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return None
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    if tensor.is_nested or tensor.layout in _COMPRESSED:
        return tensor.values()
    return tensor if tensor.layout is torch.strided else None


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory that holds the values of `tensor`; None where it has none of its own."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse and opaque tensors
        values = values_of(tensor)
        return None if values is None else values.untyped_storage()

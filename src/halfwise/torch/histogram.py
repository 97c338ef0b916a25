"""From a tensor to its exponent histogram, without a copy wherever the memory allows."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfwise.core.exponent_counts import ExponentCounts, counts_from_indices, has_numba
from halfwise.core.histogram import ExponentHistogram
from halfwise.errors import UsageError

__all__ = ["exponent_histogram"]

# Types that numpy lacks: the unsigned type of the same width to pass the bits on as, and their numpy type.
_BITS = {
    torch.bfloat16: (torch.uint16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fn)),
    torch.float8_e4m3fnuz: (torch.uint8, np.dtype(ml_dtypes.float8_e4m3fnuz)),
    torch.float8_e5m2: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2)),
    torch.float8_e5m2fnuz: (torch.uint8, np.dtype(ml_dtypes.float8_e5m2fnuz)),
}
_COUNTED = {torch.float16, torch.float32, torch.float64, *_BITS}
_CHUNK = 1 << 24  # values counted at once by tensor operations: bounds their temporaries to a few hundred MB
_CPU_CHUNK = 1 << 16  # keeps them in cache
_INFINITY = 0x7F800000
_MAGNITUDE = 0x7FFFFFFF


def exponent_histogram(tensor: Tensor, *, threads: int = 1) -> ExponentHistogram:
    """The exponent histogram of a tensor's values.

    CPU tensors that are dense in memory (transposed and channels-last ones too) are read in place; strided ones are
    copied. Tensors on other devices are counted there; the counts alone are brought back, which waits for the device.
    Of sparse tensors the stored values are counted, duplicates summed; of complex ones both parts. float64 values are
    taken as float32 would hold them.

    Args:
        tensor: a floating or complex tensor of any shape, layout and device; it may require gradients or be empty.
        threads: threads to count with, at most; small tensors use fewer. One (the default) is bound by arithmetic, so
            more pay only where they have cores of their own: not on two hyperthreads, nor beside torch's waiting ones.

    Raises:
        UsageError: the tensor is an integer, boolean or quantized one, or has no values ("meta" device).

    >>> exponent_histogram(torch.tensor([0.0, 1.0, 70000.0])).overflow("float16")
    Share(lower=0.5, upper=0.5)
    """
    values = _plain(tensor.detach())
    if values.dtype not in _COUNTED:
        raise UsageError(f"exponent_histogram got dtype {tensor.dtype}: give a floating or complex tensor")
    if values.device.type == "meta":
        raise UsageError('exponent_histogram got a tensor on the device "meta", which has no values: give a real one')
    if values.device.type != "cpu" or not has_numba():
        return ExponentHistogram.from_counts(_count_with_operations(values))
    return ExponentHistogram.of(_as_numpy(values), threads=threads)


def _plain(values: Tensor) -> Tensor:
    """`values` strided and real, its conjugation and negation carried out."""
    if values.layout is torch.sparse_coo:
        values = values.coalesce().values()
    elif values.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        values = values.values()
    elif values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values.resolve_neg()


def _as_numpy(values: Tensor) -> npt.NDArray[np.generic]:
    """A CPU tensor as an array on the same memory."""
    if values.dtype in _BITS:
        unsigned, dtype = _BITS[values.dtype]
        return values.view(unsigned).numpy().view(dtype)
    return values.numpy()


def _count_with_operations(values: Tensor) -> ExponentCounts:
    """The counts by tensor operations: for devices, and for the CPU without numba."""
    size = _CPU_CHUNK if values.device.type == "cpu" else _CHUNK
    flat = values.reshape(-1)
    indices = np.zeros(2048, np.int64)
    infinities = 0
    for chunk in torch.split(flat, size):
        magnitudes = _narrowed(chunk).view(torch.int32) & _MAGNITUDE
        # Signed: a zero gives -1 here, not 2047 as in unsigned arithmetic. bincount takes no negative numbers.
        counts = torch.bincount(((magnitudes - 1) >> 21) + 1, minlength=1025).cpu().numpy()
        indices[:1024] += counts[1:]
        indices[-1] += counts[0]
        if counts[1020]:  # the top bin, which inf shares with the values next to float32's largest
            infinities += int((magnitudes == _INFINITY).sum())
    return counts_from_indices(indices, infinities)


def _narrowed(values: Tensor) -> Tensor:
    """`values` in float32. float64 is rounded away from zero: bins are closed above, so each value keeps its bin."""
    if values.dtype is not torch.float64:
        return values.to(torch.float32)
    magnitudes = values.abs()
    narrow = magnitudes.to(torch.float32)
    return (narrow.view(torch.int32) + (narrow < magnitudes)).view(torch.float32)

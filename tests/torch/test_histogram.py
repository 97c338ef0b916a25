"""Tensors of every kind give the histogram of the same values as an array."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from halfwise.core.histogram import ExponentHistogram
from halfwise.errors import UsageError
from halfwise.torch import histogram as module
from halfwise.torch.histogram import exponent_histogram

DTYPES = [
    torch.float16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]


def values(size: int = 70_000) -> torch.Tensor:
    """Values over the range of float32, with zeros, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    result = torch.exp2(30 * torch.randn(size, generator=generator)) * torch.randn(size, generator=generator).sign()
    for position, special in enumerate((0.0, -0.0, float("inf"), -float("inf"), float("nan"), 448.0, 2.0**-149)):
        result[position :: 1000 + position] = special
    return result


def reference(tensor: torch.Tensor) -> ExponentHistogram:
    """By way of float64 in numpy, the slow and safe way."""
    return ExponentHistogram.of(tensor.detach().to(torch.float64).numpy().copy())


@pytest.mark.parametrize("size", [0, 100, 70_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: torch.dtype, size: int) -> None:
    tensor = values()[:size].to(dtype)
    found = exponent_histogram(tensor)
    assert found == reference(tensor)
    assert found.total == size


@pytest.mark.parametrize("size", [0, 100, 140_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_operations_count_the_same(dtype: torch.dtype, size: int) -> None:
    """What runs on other devices, here on the CPU."""
    tensor = values(140_000)[:size].to(dtype)
    assert ExponentHistogram.from_counts(module._count_with_operations(tensor)) == exponent_histogram(tensor)


def test_float64_keeps_its_bins_by_tensor_operations() -> None:
    edges = torch.tensor([448.0, 2.0**-25, 1.25, 1.1e-38, 3.4e38, 1e300, 1e-300], dtype=torch.float64)
    near = torch.cat((edges, torch.nextafter(edges, 0 * edges), torch.nextafter(edges, 2 * edges)))
    assert ExponentHistogram.from_counts(module._count_with_operations(near)) == exponent_histogram(near)


def test_dense_memory_is_read_in_place() -> None:
    images = torch.randn(4, 3, 8, 8)
    for dtype in DTYPES:
        typed = images.to(dtype)
        for dense in (
            typed,
            typed.to(memory_format=torch.channels_last),
            typed.permute(3, 0, 2, 1),
            typed[1],
            typed.mT,
        ):
            array = module._as_numpy(dense)
            assert array.ravel(order="K").ctypes.data == dense.data_ptr()
            assert exponent_histogram(dense) == reference(dense)


def test_strided_memory() -> None:
    grid = values(10_000).reshape(100, 100)
    for view in (grid[:, ::3], grid[5:, 7], grid[0].expand(5, 100), grid[0, 0], grid.diagonal(), grid[:, 10:20].T):
        assert exponent_histogram(view) == reference(view)
        half = view.to(torch.bfloat16)
        assert exponent_histogram(half) == reference(half)


def test_gradients_and_parameters() -> None:
    weight = torch.nn.Parameter(values(1000))
    assert exponent_histogram(weight) == reference(weight)
    assert exponent_histogram(weight * 2) == reference(weight * 2)
    assert weight.grad is None
    with torch.inference_mode():
        assert exponent_histogram(torch.ones(3)).total == 3


def test_complex_tensors_count_both_parts() -> None:
    real = values(1000)
    pairs = torch.view_as_complex(real.reshape(500, 2).contiguous())
    for tensor in (pairs, pairs.conj(), pairs.reshape(20, 25).T, pairs.to(torch.complex128)):
        assert exponent_histogram(tensor) == reference(real)
    imaginary = pairs.conj().imag  # carries a pending negation
    assert imaginary.is_neg()
    assert exponent_histogram(imaginary) == reference(real[1::2])


def test_sparse_tensors_count_stored_values() -> None:
    summed = torch.sparse_coo_tensor(
        torch.tensor([[0, 0, 2]]), torch.tensor([1.0, 2.0, 8.0]), (4,), check_invariants=True
    )
    assert exponent_histogram(summed) == reference(torch.tensor([3.0, 8.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says, once in a process, that the layout is in beta state
        compressed = torch.tensor([[0.0, 1.0], [5.0, 0.0]]).to_sparse_csr()
    assert exponent_histogram(compressed) == reference(torch.tensor([1.0, 5.0]))


def test_threads() -> None:
    tensor = values(3_000_001)
    for threads in (1, 2):
        assert exponent_histogram(tensor, threads=threads) == reference(tensor)


@pytest.mark.parametrize("tensor", [torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool)])
def test_other_dtypes_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="give a floating or complex tensor"):
        exponent_histogram(tensor)


def test_tensors_without_values_are_refused() -> None:
    with pytest.raises(UsageError, match='device "meta"'):
        exponent_histogram(torch.empty(3, device="meta"))


def test_the_tensor_is_left_alone() -> None:
    tensor = values(1000)
    before: Any = tensor.numpy().tobytes()
    exponent_histogram(tensor)
    assert tensor.numpy().tobytes() == before
    assert tensor._version == values(1000)._version


def test_without_numba_tensor_operations_take_over() -> None:
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "import torch; from halfwise.torch.histogram import exponent_histogram\n"
        "print(exponent_histogram(torch.arange(100_000) / 64).counts.tolist())"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = ExponentHistogram.of(np.arange(100_000, dtype=np.float32) / 64)
    assert output.stdout.strip() == str(expected.counts.tolist())

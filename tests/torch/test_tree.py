from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfwise.errors import DataError, UsageError
from halfwise.torch.tree import SAFETENSORS_DTYPES, decode, encode, stored


def round_trip(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode(value, tensors, "root"), allow_nan=False)
    return decode(json.loads(text), tensors)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        2**80,
        -0.0,
        0.1,
        5e-324,
        math.inf,
        -math.inf,
        "",
        "ünï\ncode",
        [],
        (),
        {},
        [1, (2, [3, ()])],
        {"a": {"b": (1, None)}},
        {0: "int key", "0": "text key", True: "becomes 1's twin"},
        {(1, "x"): 2, None: 3, 0.5: 4},
        {"$tensor": "a key that looks like a tag", "$dict": []},
    ],
    ids=repr,
)
def test_values_come_back_with_their_types(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert repr(back) == repr(value)  # == does not tell 1 from True, 0.0 from -0.0, (1,) from... [1] it does


def test_nan_comes_back() -> None:
    assert math.isnan(round_trip([math.nan])[0])


def test_mappings_and_numpy_floats_come_back_as_plain_ones() -> None:
    assert round_trip(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}
    assert round_trip(np.float64(0.1)) == 0.1


DTYPES = sorted(
    {*SAFETENSORS_DTYPES, torch.complex128, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu}, key=str
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)], ids=str)
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    size = torch.empty((), dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * size,), generator=generator)
    tensor = raw.to(torch.uint8).view(dtype).reshape(shape)
    back = round_trip({"x": [tensor]})["x"][0]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_stored_copies_are_contiguous_and_share_nothing() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    for view in (base, base.t(), base[:, ::2], base[1], base.requires_grad_()):
        copy = stored(view)
        assert torch.equal(copy, view)
        assert copy.is_contiguous()
        assert not copy.requires_grad
        assert copy.untyped_storage().data_ptr() != base.untyped_storage().data_ptr()
        assert copy.untyped_storage().nbytes() == copy.numel() * 4


def test_lazy_conjugates_are_resolved() -> None:
    value = torch.tensor([1 + 2j]).conj()
    assert torch.equal(round_trip(value), torch.tensor([1 - 2j]))


def test_names_that_collide_are_kept_apart() -> None:
    value = {1: torch.tensor(1.0), "1": torch.tensor(2.0)}
    back = round_trip(value)
    assert (float(back[1]), float(back["1"])) == (1.0, 2.0)


@pytest.mark.parametrize("value", [object(), {1, 2}, np.zeros(2), torch.float32, 1j], ids=repr)
def test_other_things_are_refused_with_their_place(value: object) -> None:
    with pytest.raises(UsageError, match="root/a/0"):
        encode({"a": [value]}, {}, "root")


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(UsageError, match=r"sparse_coo.*to_dense"):
        encode(torch.eye(2).to_sparse(), {}, "root")


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "missing"},
        {"$tensor": "there", "dtype": "no_such", "shape": [1]},
        {"$tensor": "there", "dtype": "float32", "shape": [5]},
        {"$dict": [1]},
        {"$dict": [[[], 1]]},
        {"$tuple": 1},
        {"$float": "huge"},
        {"$pickle": ""},
    ],
    ids=str,
)
def test_damaged_trees_are_refused(tree: Any) -> None:
    with pytest.raises(DataError):
        decode({"a": tree}, {"there": torch.zeros(4, dtype=torch.uint8)})

"""Conversion, against numpy's and ml_dtypes' casts, with an account of the losses."""

from __future__ import annotations

import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import halfwise.torch as hw
from halfwise.errors import PolicyError, UsageError

VALUES = torch.cat([torch.randn(500) * 2.0 ** torch.randint(-30, 12, (500,)), torch.tensor([0.0, -0.0, 448.0, 464.0])])
ORACLES: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("name", list(ORACLES))
def test_rounds_as_the_oracle_does(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # beyond-range values are part of the test
        expected = VALUES.numpy().astype(ORACLES[name]).astype(np.float32)
        found = hw.to_precision(VALUES, name)
    assert found.dtype is getattr(torch, name)
    assert np.array_equal(found.float().numpy(), expected, equal_nan=True)


def test_tensorfloat32_keeps_the_dtype_and_eleven_bits() -> None:
    rounded = hw.to_precision(torch.tensor([1.0 + 2.0**-10, 1.0 + 2.0**-12]), "tensorfloat32")
    assert rounded.dtype is torch.float32
    assert rounded.tolist() == [1.0 + 2.0**-10, 1.0]


@pytest.mark.parametrize(("name", "beyond"), [("float16", 1e5), ("float8_e4m3fn", 465.0), ("float8_e5m2", 1e5)])
def test_what_does_not_fit_is_never_clamped_in_silence(name: str, beyond: float) -> None:
    with pytest.warns(UserWarning, match=rf"do not fit {name}.*weight"):
        converted = hw.to_precision({"weight": torch.tensor([1.0, beyond])}, name)
    assert not torch.isfinite(converted["weight"].float()[1])


def test_modules_are_copied_and_ties_kept() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    half = hw.to_precision(model, "bfloat16")
    assert half is not model
    assert half[2].weight is half[0].weight
    assert half[0].weight.dtype is torch.bfloat16
    assert half[1].num_batches_tracked.dtype is torch.int64
    assert model[0].weight.dtype is torch.float32
    assert half[0].weight.requires_grad


def test_state_dicts_keep_what_is_no_float() -> None:
    state: dict[str, Any] = {
        "w": torch.ones(2),
        "steps": torch.tensor(3),
        "name": "x",
        "c": torch.ones(1, dtype=torch.complex64),
    }
    half = hw.to_precision(state, "float16")
    assert half["w"].dtype is torch.float16
    assert half["steps"] is state["steps"]
    assert half["c"] is state["c"]
    assert half["name"] == "x"
    assert state["w"].dtype is torch.float32


def test_account() -> None:
    account = hw.conversion_account(
        {"w": torch.tensor([1e5, 1e-9, 1.0, float("inf"), 0.0]), "n": torch.tensor(3)}, "float16"
    )
    assert set(account) == {"w"}
    loss = account["w"]
    assert (loss.elements, loss.overflowed, loss.underflowed) == (5, 1, 1)
    assert loss.relative_error == pytest.approx(1e-9, rel=1e-6)
    third = hw.conversion_account(torch.full((4,), 1 / 3), "bfloat16")[""]
    assert third.relative_error == pytest.approx(abs(float(torch.tensor(1 / 3).bfloat16()) * 3 - 1), rel=1e-3)
    assert set(hw.conversion_account(nn.Linear(2, 2), "bfloat16")) == {"weight", "bias"}
    assert hw.conversion_account(torch.zeros(3), "float16")[""].relative_error == 0.0


def test_bad_input() -> None:
    with pytest.raises(PolicyError, match="float64"):
        hw.to_precision(torch.ones(1), "float64")
    with pytest.raises(UsageError, match="cannot convert list"):
        hw.to_precision([1.0], "float16")  # type: ignore[type-var]

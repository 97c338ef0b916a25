"""Tensors and models in another format."""

from __future__ import annotations

from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
from tests.keras.models import batch, classifier

import halfwise.keras as hw
from halfwise.errors import PolicyError, UsageError


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
def test_tensors_variables_and_structures(name: str) -> None:
    tensor = keras.ops.convert_to_tensor(np.array([1.0, 3.14159], "float32"))
    variable = keras.Variable([2.5, 1.0])
    result = hw.to_precision({"a": tensor, "b": [variable, np.ones(2, "float32")], "n": np.array([1, 2])}, name)
    assert keras.backend.standardize_dtype(result["a"].dtype) == name
    assert keras.backend.standardize_dtype(result["b"][0].dtype) == name
    assert result["b"][1].dtype.name == name
    assert result["n"].dtype.kind == "i"
    assert keras.backend.standardize_dtype(tensor.dtype) == "float32"


def test_overflow_is_told_with_the_name() -> None:
    with pytest.warns(UserWarning, match=r"do not fit float16 and became inf or NaN: b\.0"):
        result = hw.to_precision({"a": np.ones(1, "float32"), "b": [np.array([1e5], "float32")]}, "float16")
    assert np.isinf(result["b"][0])


def test_a_model_is_cloned_and_computes_and_stores_in_the_format() -> None:
    model = classifier()
    x, y = batch()
    model.fit(x, y, verbose=0)
    half = hw.to_precision(model, "bfloat16")
    assert {keras.backend.standardize_dtype(w.dtype) for w in half.weights} == {"bfloat16"}
    assert {layer.compute_dtype for layer in half.layers} == {"bfloat16"}
    assert {keras.backend.standardize_dtype(w.dtype) for w in model.weights} == {"float32"}
    np.testing.assert_array_equal(
        np.asarray(hw.to_precision(model.get_weights(), "bfloat16")[0], np.float32),
        keras.ops.convert_to_numpy(keras.ops.cast(half.weights[0], "float32")),
    )
    mine, theirs = (np.asarray(m.predict(x, verbose=0), np.float32) for m in (half, model))
    np.testing.assert_allclose(mine, theirs, atol=0.05)
    assert keras.config.dtype_policy().name == "float32"


def test_the_account_names_the_variables() -> None:
    model = classifier()
    kernel, bias = model.get_layer("first").get_weights()
    kernel[0, 0] = 1e6
    model.get_layer("first").set_weights([kernel, bias])
    account = hw.conversion_account(model, "float16")
    assert [name for name, loss in account.items() if loss.overflowed] == ["sequential/first/kernel"] or [
        name for name, loss in account.items() if loss.overflowed
    ] == ["first/kernel"]
    assert hw.conversion_account(np.array([1e5, 1.0], "float32"), "float16")[""].overflowed == 1


def test_arrays_of_half_come_back_in_full() -> None:
    assert hw.to_precision(np.ones(2, ml_dtypes.bfloat16), "float32").dtype == np.float32


class InCode(keras.Model):
    """A model that Keras cannot clone: its constructor needs what its config does not have."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def test_what_cannot_be_converted_is_told() -> None:
    with pytest.raises(UsageError, match="cannot convert str"):
        hw.to_precision("model", "float16")
    with pytest.raises(PolicyError, match="float15"):
        hw.to_precision(np.ones(1), "float15")
    with pytest.raises(PolicyError, match="no Keras model can be in float8_e5m2"):
        hw.to_precision(classifier(), "float8_e5m2")
    model = InCode(3)
    with pytest.raises(UsageError, match="has no weights yet"):
        hw.to_precision(model, "float16")
    model(np.ones((1, 2), "float32"))
    with pytest.raises(UsageError, match="written in code"):
        hw.to_precision(model, "float16")

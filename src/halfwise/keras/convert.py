"""Tensors, weights and whole models in another format, with an account of what that loses."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from halfwise.core.conversion import Loss, converted, loss_of
from halfwise.core.formats import get_format
from halfwise.errors import PolicyError, UsageError
from halfwise.keras.probe import to_numpy

__all__ = ["conversion_account", "to_precision"]

_MODEL_FORMATS = ("float32", "bfloat16", "float16")


def to_precision(value: Any, format_name: str) -> Any:
    """A copy of tensors or of a model with floating values rounded to `format_name`.

    Integers and booleans stay as they are. A value beyond the format becomes inf (NaN in `float8_e4m3fn`), never the
    largest finite number, and a warning names the tensors in which that happens; `conversion_account` gives the
    numbers. `tensorfloat32` has no dtype: values are rounded, the dtype is float32.

    Args:
        value: a backend tensor, a variable, a numpy array (an array comes back), a list, tuple or dict of these such as
            `model.get_weights()`; or a model, of which a clone comes back that stores and computes in the format.
        format_name: one of `halfwise.FORMATS`; for a model float32, bfloat16 or float16.

    Raises:
        PolicyError: the format is unknown, or no model can be in it. UsageError: `value` is nothing that can be
            converted.

    Example:
        >>> import numpy as np, halfwise.keras as hw
        >>> hw.to_precision(np.array([1.0, 3.14159], "float32"), "bfloat16")
        array([1, 3.14062], dtype=bfloat16)
    """
    get_format(format_name)
    overflowed: list[str] = []

    def convert(name: str, array: NDArray[Any]) -> NDArray[Any]:
        result = converted(array, format_name)
        if loss_of(array, format_name).overflowed:
            overflowed.append(name)
        return result

    result = _model(value, format_name, convert) if isinstance(value, keras.Model) else _map(value, convert)
    if overflowed:
        names = ", ".join(overflowed[:5]) + (f" and {len(overflowed) - 5} more" if len(overflowed) > 5 else "")
        largest = get_format(format_name).largest
        warnings.warn(
            f"values beyond {largest:.6g} do not fit {format_name} and became inf or NaN: {names}", stacklevel=2
        )
    return result


def conversion_account(value: Any, format_name: str) -> dict[str, Loss]:
    """What each floating tensor would lose by `to_precision`, by name: a variable's path, a place such as `0.kernel`.

    Example:
        >>> import numpy as np, halfwise.keras as hw
        >>> hw.conversion_account(np.array([1e5, 1e-9, 1.0], "float32"), "float16")[""].overflowed
        1
    """
    get_format(format_name)
    account: dict[str, Loss] = {}

    def weigh(name: str, array: NDArray[Any]) -> NDArray[Any]:
        account[name] = loss_of(array, format_name)
        return array

    if isinstance(value, keras.Model):
        value = {variable.path: variable for variable in value.weights}
    _map(value, weigh)
    return account


def _model(model: keras.Model, format_name: str, convert: Callable[[str, NDArray[Any]], NDArray[Any]]) -> keras.Model:
    if format_name not in _MODEL_FORMATS:
        raise PolicyError(f"no Keras model can be in {format_name}; allowed: {', '.join(_MODEL_FORMATS)}")
    if not model.built:
        raise UsageError(f"the model {model.name!r} has no weights yet; build it, or call it on a batch")
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(format_name)
    try:
        clone = keras.models.clone_model(model, clone_function=lambda layer: _layer(layer, format_name))
    except (NotImplementedError, ValueError) as error:
        raise UsageError(
            f"the model {model.name!r} is written in code, and Keras cannot clone it: {error}. Convert its weights: "
            f"to_precision(model.get_weights(), {format_name!r})"
        ) from error
    finally:
        keras.config.set_dtype_policy(before)
    for mine, theirs in zip(clone.weights, model.weights, strict=True):
        mine.assign(convert(theirs.path, to_numpy(theirs)))
    return clone


def _layer(layer: keras.Layer, format_name: str) -> keras.Layer:
    config = layer.get_config()
    if keras.backend.is_float_dtype(layer.compute_dtype):
        config["dtype"] = format_name
    return type(layer).from_config(config)


def _map(value: Any, function: Callable[[str, NDArray[Any]], NDArray[Any]]) -> Any:
    found = False

    def one(path: tuple[Any, ...], leaf: Any) -> Any:
        nonlocal found
        name = ".".join(map(str, path))
        if isinstance(leaf, np.ndarray | np.generic):
            found = True
            array = np.asarray(leaf)
            return function(name, array) if _is_floating(array.dtype) else array
        if keras.ops.is_tensor(leaf) or isinstance(leaf, keras.Variable):
            found = True
            array = to_numpy(leaf)
            if not _is_floating(array.dtype):
                return leaf
            result = function(name, array)
            return keras.ops.convert_to_tensor(result, dtype=result.dtype.name)
        return leaf

    result = _mapped(value, one, ())
    if not found:
        raise UsageError(f"cannot convert {type(value).__name__}; give tensors, arrays, structures of them, or a model")
    return result


def _mapped(value: Any, function: Callable[[tuple[Any, ...], Any], Any], path: tuple[Any, ...]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(item, function, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, function, (*path, number)) for number, item in enumerate(value))
    return function(path, value)


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return keras.backend.is_float_dtype(dtype.name)

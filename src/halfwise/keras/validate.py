"""What the Keras adapter accepts: one clear error for each thing that it cannot use. See also `core/options.py`."""

from __future__ import annotations

from typing import Any

import keras

from halfwise.errors import UsageError
from halfwise.keras.names import named_layers

__all__ = ["check_batch", "check_model"]

_HALF = ("float16", "bfloat16")


def check_model(model: object) -> None:
    """Checks that `model` is a Keras model whose trainable variables are in float32.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(model, keras.Model):
        raise UsageError(f"model is {type(model).__name__}; give a keras.Model")
    half = [path for path, layer in named_layers(model).items() if layer.variable_dtype in _HALF]
    if half:
        dtype = named_layers(model)[half[0]].variable_dtype
        raise UsageError(
            f"the variables of {', '.join(map(repr, half[:3]))} are {dtype}. Small updates would be lost (a weight of "
            f"1.0 in bfloat16 ignores every update below 0.004). Build the model under the policy 'mixed_{dtype}': "
            "computation in half, variables in float32"
        )


def check_batch(name: str, x: Any, y: Any, sample_weight: Any) -> None:
    """Checks that `name(x, y, sample_weight)` was given arrays, all with the same number of rows, at least one.

    Raises:
        UsageError: it was not.
    """
    rows: dict[str, Any] = {}
    for argument, value in (("x", x), ("y", y), ("sample_weight", sample_weight)):
        for leaf in keras.tree.flatten(value):
            if leaf is None:
                continue
            shape = getattr(leaf, "shape", None)
            if shape is None or len(shape) == 0:
                raise UsageError(
                    f"{name}({argument}=...) holds {leaf!r}; give arrays or tensors whose first axis is the batch, or "
                    f"structures of them: np.asarray({argument})"
                )
            rows[argument] = shape[0]
            if shape[0] == 0:
                raise UsageError(f"{name}({argument}=...) is empty (shape {tuple(shape)}); give at least one row")
    if len({count for count in rows.values() if count is not None}) > 1:
        counts = ", ".join(f"{argument} has {count}" for argument, count in rows.items())
        raise UsageError(f"{name}() needs the same number of rows in all arrays: {counts}")

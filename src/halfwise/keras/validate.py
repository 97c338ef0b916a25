"""What the Keras adapter accepts: one clear error for each thing that it cannot use. See also `core/options.py`."""

from __future__ import annotations

import keras

from halfwise.errors import UsageError
from halfwise.keras.names import named_layers

__all__ = ["check_model"]

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

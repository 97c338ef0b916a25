"""Softmax heads that teach nothing: probabilities that round to 0 in half precision, and gradients with them.

Keras clips probabilities before it takes their logarithm, and a clipped value has the gradient 0. In float16 that
happens to every sample whose true class has a logit about 16 below the largest one, and those need teaching most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np
from numpy.typing import NDArray

from halfwise.core.diagnosis import Diagnosis, Suspect
from halfwise.keras.names import named_layers
from halfwise.keras.probe import Observer, probe, to_numpy

__all__ = ["vanished_gradients"]

_WRONG = 0.5  # a sample whose true class is less likely than this has something to learn


def vanished_gradients(
    model: keras.Model,
    data: tuple[Any, ...],
    heads: Sequence[str],
    *,
    half_format: str,
    step: Callable[..., Any] | None = None,
) -> Diagnosis | None:
    """The diagnosis where misclassified samples get a gradient of exactly 0 from a head; None where none does.

    Args:
        model: the model, in half precision.
        data: `(x, y, sample_weight)` or less; `y` are class numbers or one-hot rows.
        heads: paths of layers that compute a softmax in half precision.
        half_format: the format that they compute in.
        step: the training step. Default: `model.train_step`.
    """
    if not heads:
        return None
    layers = named_layers(model)
    seen = _Heads()
    probe(model, data, seen, layers={path: layers[path] for path in heads}, step=step)
    for path in heads:
        dead, rows = _dead_rows(seen.outputs.get(path), seen.gradients.get(path), data)
        if dead:
            name = type(layers[path]).__name__
            return Diagnosis(
                "gradient_vanishes",
                suspects=(Suspect(path, "softmax", "backward", "", half_format, "0", 0.0, name),),
                detail=f"{dead} of {rows} samples are misclassified and get a gradient of exactly 0: the probabilities "
                f"of the head {path!r} round to 0 in {half_format}",
                fix=_fix(path, name),
                evidence={"dead_samples": float(dead), "samples": float(rows)},
            )
    return None


class _Heads(Observer):
    """Keeps what heads give, and the gradient that comes back."""

    def __init__(self) -> None:
        self.outputs: dict[str, NDArray[Any]] = {}
        self.gradients: dict[str, NDArray[Any]] = {}

    def forward(self, path: str, call: int, inputs: list[Any], outputs: list[Any]) -> None:  # noqa: ARG002
        self.outputs[path] = to_numpy(outputs[0]).astype(np.float32)

    def backward(
        self,
        path: str,
        call: int,  # noqa: ARG002
        where: Literal["input", "output"],
        index: int,  # noqa: ARG002
        gradient: Any,
    ) -> None:
        if where == "output":
            self.gradients[path] = to_numpy(gradient).astype(np.float32)


def _dead_rows(output: NDArray[Any] | None, gradient: NDArray[Any] | None, data: tuple[Any, ...]) -> tuple[int, int]:
    """How many samples are misclassified, count in the loss, and get no gradient; and how many there are."""
    if output is None or gradient is None or output.ndim != 2 or gradient.shape != output.shape:
        return 0, 0
    likely = _of_true_class(output, data[1] if len(data) > 1 else None)
    if likely is None:
        return 0, 0
    counts: NDArray[Any] = np.ones(len(output), bool)
    if len(data) > 2 and data[2] is not None and not isinstance(data[2], dict | list | tuple):
        counts = np.asarray(to_numpy(data[2]).reshape(len(output), -1).any(axis=1))
    dead = (likely < _WRONG) & counts & ~gradient.any(axis=1)
    return int(dead.sum()), len(output)


def _of_true_class(output: NDArray[Any], y: Any) -> NDArray[Any] | None:
    """The probability of each sample's true class; None where the targets do not tell."""
    rows, classes = output.shape
    fitting = []
    for leaf in keras.tree.flatten(y):
        target = None if leaf is None else to_numpy(leaf)
        if target is None or target.shape[:1] != (rows,):
            continue
        if target.shape == output.shape:
            fitting.append((target.astype(np.float32) * output).sum(axis=1))
        elif target.size == rows and np.all((target == target.astype(int)) & (target >= 0) & (target < classes)):
            fitting.append(output[np.arange(rows), target.reshape(rows).astype(int)])
    return fitting[0] if len(fitting) == 1 else None


def _fix(path: str, name: str) -> tuple[str, ...]:
    lines = (
        "# the loss from logits: no probability has to be represented",
        f'{name}(...)  # for {path!r}, without activation="softmax"',
        "loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # or CategoricalCrossentropy",
    )
    if keras.backend.backend() != "tensorflow":  # there Keras clips the probabilities in float32 too
        return lines
    return (*lines, "# or keep the head in float32:", f'{name}(..., dtype="float32")')

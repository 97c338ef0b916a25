"""Verdicts on what was bad before the step began: weights, and the data that came in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from halfwise.core.diagnosis import Diagnosis, Suspect
from halfwise.keras.names import named_layers
from halfwise.keras.probe import to_numpy
from halfwise.keras.tracing.extents import Extent, extent_of

__all__ = ["from_data", "from_weights"]

_RELOAD = 'load weights from before the first non-finite loss: model.load_weights("checkpoint.weights.h5")'
_CLEAN = "drop or repair such samples before the model sees them: assert np.isfinite(x).all()"


def from_weights(
    model: keras.Model, weights: Sequence[tuple[keras.Variable, Any]], *, infinite_state: bool
) -> Diagnosis | None:
    """The verdict where trained weights are not finite, or anything else in the model is NaN.

    Args:
        model: names the weights.
        weights: each variable with its value.
        infinite_state: infinities in what is not trained count too. They may stand there on purpose ("the best loss so
            far", masks), so they do only where they reach the loss.
    """
    names = _names(model)
    broken = []
    for variable, value in weights:
        extent = extent_of(value)
        counts = extent is not None and not extent.finite
        if counts and extent is not None and (variable.trainable or infinite_state or extent.found == "nan"):
            broken.append((*names.get(id(variable), ("", variable.name)), extent, variable.trainable))
    if not broken:
        return None
    *_, extent, trained = broken[0]
    named = [f"{path}.{name}" if path else name for path, name, *_ in broken]
    also = f"; also {', '.join(named[1:3])}" if named[1:] else ""
    more = f" and {len(named) - 3} more" if named[3:] else ""
    return Diagnosis(
        "nonfinite_parameters",
        suspects=tuple(Suspect(path, "", "", "", extent.dtype, extent.found, 0.0) for path, _, extent, _ in broken),
        detail=f"{'weight' if trained else 'state'} {named[0]} holds {extent.found}{also}{more}",
        fix=(_RELOAD,),
        evidence={"tensors": float(len(broken))},
    )


def from_data(data: tuple[Any, ...], *, masks: bool) -> Diagnosis | None:
    """The verdict where the batch is not finite.

    Args:
        data: `(x, y, sample_weight)` or less.
        masks: arrays whose only infinities are -inf count too. As masks they are sound, so they do only where nothing
            else explains the failure.
    """
    for name, array in _arrays(data):
        extent = extent_of(array)
        if extent is None or extent.finite or (_may_be_mask(extent) and not masks):
            continue
        values = to_numpy(array).astype(np.float64)
        bad = ~np.isfinite(values)
        detail = f"{name!r} of the batch holds {extent.found}"
        evidence = {}
        if bad.ndim:
            first = int(np.nonzero(bad.reshape(len(bad), -1).any(1))[0][0])
            evidence = {"nonfinite_values": float(bad.sum()), "first_sample": float(first)}
            detail += f": {int(bad.sum())} of {bad.size} values, first in sample {first}"
        suspect = Suspect("", "", "", "", extent.dtype, extent.found, 0.0)
        return Diagnosis("nonfinite_input", suspects=(suspect,), detail=detail, fix=(_CLEAN,), evidence=evidence)
    return None


def _may_be_mask(extent: Extent) -> bool:
    return extent.low == -np.inf and extent.high < np.inf


def _arrays(data: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """The floating arrays of a batch, by name: `x`, `x[0]`, `x['image']`, `y`, `sample_weight`."""
    for part, structure in zip(("x", "y", "sample_weight"), data, strict=False):
        for path, array in keras.tree.flatten_with_path(structure):
            if array is not None:
                yield part + "".join(f"[{key!r}]" for key in path), array


def _names(model: keras.Model) -> dict[int, tuple[str, str]]:
    """`id -> (path of the layer, name)` of each variable of the model."""
    names: dict[int, tuple[str, str]] = {}
    for path, layer in named_layers(model).items():
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables):
            names.setdefault(id(variable), (path, variable.name))
    return names

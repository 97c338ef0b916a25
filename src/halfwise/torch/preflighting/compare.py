"""Weight gradients under the policy against those of float32, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from halfwise.core.formats import get_format
from halfwise.torch.preflighting.observe import Run, parameters_of

__all__ = ["Comparison", "compare_gradients"]

_WRONG = 0.5
"""Relative error of a layer's weight gradients from which on its training signal counts as wrong."""

_BESIDE_NOISE = 0.25
"""An error below this share of the gradient's own noise does not count, however small the gradient is. Where gradients
cancel out by construction (the bias of an attention's keys), hardly anything else is left."""

_NEGLIGIBLE = 1e-5
"""A gradient that is smaller than this beside its own noise is rounding, in float32 too."""


@dataclass(frozen=True)
class Comparison:
    """One layer's weight gradients, over all batches.

    Attributes:
        cosine: between both; None where one of them is zero or not finite.
        relative_error: norm of the difference relative to float32's.
        dead: zero under the policy and not in float32.
        wrong: off by more than rounding can explain.
    """

    cosine: float | None
    relative_error: float
    dead: bool
    wrong: bool


def compare_gradients(
    layers: Mapping[str, nn.Module], references: Sequence[Run], runs: Sequence[Run], format_name: str
) -> dict[str, Comparison]:
    """Path -> comparison, for the layers that have weight gradients in float32.

    Args:
        layers: by path.
        references: runs in float32, one per batch.
        runs: runs under the policy of the same batches.
        format_name: what a layer's products are rounded to under the policy.
    """
    eps = get_format(format_name).eps
    found: dict[str, Comparison] = {}
    for path, module in layers.items():
        dot = ours = theirs = apart = noise = 0.0
        for reference, run in zip(references, runs, strict=True):
            for parameter in parameters_of(module):
                kept = reference.gradients.get(id(parameter))
                if kept is None:
                    continue
                expected = kept.double()  # squares of tiny gradients vanish in float32
                gradient = run.gradients.get(id(parameter), torch.zeros_like(kept)).double()
                dot += float((gradient * expected).sum())
                ours += float(gradient.square().sum())
                theirs += float(expected.square().sum())
                apart += float((gradient - expected).square().sum())
            noise = math.hypot(noise, reference.layers.noise(path))
        if theirs == 0.0:
            continue
        if not math.isfinite(apart):
            found[path] = Comparison(None, math.inf, dead=False, wrong=True)
            continue
        error = math.sqrt(apart / theirs)
        dead = ours == 0.0 and math.sqrt(theirs) > max(_NEGLIGIBLE, eps) * noise
        found[path] = Comparison(
            cosine=dot / math.sqrt(ours * theirs) if ours > 0.0 else None,
            relative_error=error,
            dead=dead,
            wrong=dead or math.sqrt(apart) > max(_WRONG * math.sqrt(theirs), _BESIDE_NOISE * noise),
        )
    return found

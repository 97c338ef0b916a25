"""Hazards: the kinds of trouble that a preflight can find, each with its sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from halfwise.core.diagnosis import Direction

__all__ = ["HAZARDS", "Hazard", "HazardKind", "by_gravity"]

HazardKind = Literal[
    "custom_function",
    "dead_layer",
    "dead_output",
    "dead_updates",
    "epsilon",
    "half_head",
    "half_weights",
    "loss_scale",
    "mask",
    "not_native",
    "overflow",
    "precision",
    "unsound_in_float32",
    "unsupported",
    "vanishing",
]

HAZARDS: Mapping[HazardKind, str] = {
    "custom_function": "a custom autograd function does not know of mixed precision",
    "dead_layer": "its weight gradients are exactly 0, and not in float32",
    "dead_output": "an overflow is turned into finite, wrong values",
    "dead_updates": "updates are too small to move weights in half precision",
    "epsilon": "a protecting epsilon rounds to zero",
    "half_head": "a softmax head in half precision gives a gradient of exactly 0",
    "half_weights": "trainable weights are stored in half precision",
    "loss_scale": "gradients overflow at this loss scale",
    "mask": "a mask's constant does not fit the format",
    "not_native": "the target has no units for the format",
    "overflow": "values do not fit the format",
    "precision": "so many digits are lost that the training signal is wrong",
    "unsound_in_float32": "it fails in float32 too: not a precision problem",
    "unsupported": "an operation does not run in the format",
    "vanishing": "gradients round to zero at every loss scale that overflows nothing",
}
"""Kind -> what it means, as the start of a sentence about a place."""

_ONLY_FORETOLD: tuple[HazardKind, ...] = ("epsilon", "half_weights", "dead_updates")
_ABOUT_EVERYTHING: tuple[HazardKind, ...] = ("not_native", "unsound_in_float32")


@dataclass(frozen=True, kw_only=True)
class Hazard:
    """Something that would go wrong, or already does, under the policy on the target.

    Attributes:
        kind: a key of `HAZARDS`.
        module: dotted path of the layer that has it; `""` is the model itself where `module_class` is set, and else
            code outside all modules (usually the loss), or no place at all (the target).
        module_class: the layer's class name.
        operation: the operation's name, such as `"aten.addmm"`, or `""`.
        direction: `"forward"`, `"backward"`, or `""` where it was found without running anything.
        source: `"file.py:line"` of the user's code, or `""`.
        detail: one sentence with the numbers.
        fix: lines to paste, or advice, the smallest change first.

    >>> Hazard(kind="overflow", module="head").as_dict()["what"]
    'values do not fit the format'
    """

    kind: HazardKind
    module: str = ""
    module_class: str = ""
    operation: str = ""
    direction: Direction = ""
    source: str = ""
    detail: str = ""
    fix: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Where it is, in words; `""` where it is no place in the code."""
        if self.module:
            return f"{self.module} ({self.module_class})" if self.module_class else self.module
        if self.module_class:
            return f"the model's own code ({self.module_class})"
        return "" if self.kind in _ABOUT_EVERYTHING else "outside all modules (the loss?)"

    @property
    def what(self) -> str:
        """The kind in words."""
        return HAZARDS[self.kind]

    def as_dict(self) -> dict[str, Any]:
        """The fields, and the kind in words, as JSON-ready values."""
        return {"what": self.what, **vars(self), "fix": list(self.fix)}


def by_gravity(hazards: Iterable[Hazard]) -> tuple[Hazard, ...]:
    """Those that concern everything first, those that only may do harm last; else in the order given.

    >>> [hazard.kind for hazard in by_gravity([Hazard(kind="epsilon"), Hazard(kind="mask"), Hazard(kind="not_native")])]
    ['not_native', 'mask', 'epsilon']
    """
    ranks = {**dict.fromkeys(_ABOUT_EVERYTHING, 0), **dict.fromkeys(_ONLY_FORETOLD, 2)}
    return tuple(sorted(hazards, key=lambda hazard: ranks.get(hazard.kind, 1)))

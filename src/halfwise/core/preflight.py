"""Preflight: what a model would do under a policy on a target, as data.

Adapters fill in a `Preflight`; `report/preflight.py` draws it. What the verdict says follows from what was found.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from halfwise.core.hazards import Hazard
from halfwise.core.plan import Plan
from halfwise.core.policy import parse_policy
from halfwise.core.targets import HERE, get_target
from halfwise.errors import PolicyError

__all__ = [
    "PREFLIGHT_POLICIES",
    "LayerRow",
    "LossScaleRange",
    "Preflight",
    "native_format",
    "not_native",
    "preflight_policy",
]

PREFLIGHT_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "float32": "float32",
        "tensorfloat32": "tensorfloat32",
        "mixed_bfloat16": "bfloat16",
        "mixed_float16": "float16",
        "float8": "float8",
    }
)
"""Policy -> format that layers compute in. `"float8"` stands for both formats: e4m3 forward, e5m2 for gradients."""

_NATIVE = {"float8": "float8_e4m3fn"}


@dataclass(frozen=True, kw_only=True)
class LossScaleRange:
    """The loss scales that suit a model in float16, powers of two.

    Attributes:
        lowest: down to here, few more gradients of any layer round to zero (a twentieth of them) than at the highest.
        highest: the largest scale that leaves the gradients room to grow (a factor of 8), at least 1.
        largest: the largest scale at which nothing overflows on these batches.
        used: the scale at which gradients were compared with float32.
    """

    lowest: float
    highest: float
    largest: float
    used: float


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """What was seen of one layer.

    Attributes:
        path: dotted module path; `""` is the model itself.
        kind: the layer's class name.
        formats: the formats that its operations' results had under the policy, the most frequent first.
        largest_activation: largest magnitude that it reads or writes, in float32.
        largest_gradient: largest magnitude among the gradients of those, in float32, not scaled.
        overflow: share of its activations, and of its gradients at the loss scale used, that do not fit the format.
        underflow: share of its gradients that round to zero at the loss scale used.
        cosine: between its weight gradients under the policy and in float32; None where there is none to compare.
        relative_error: of its weight gradients (2-norms); None likewise.
        dead: its weight gradients are exactly 0 under the policy and not in float32.
        dead_updates: share of its weights that the optimizer's update does not move because it is too small for the
            format that they are stored in; None where that was not looked at.
    """

    path: str
    kind: str = ""
    formats: tuple[str, ...] = ()
    largest_activation: float = 0.0
    largest_gradient: float = 0.0
    overflow: float = 0.0
    underflow: float = 0.0
    cosine: float | None = None
    relative_error: float | None = None
    dead: bool = False
    dead_updates: float | None = None


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """What a model would do under a policy on a target.

    Attributes:
        policy: a key of `PREFLIGHT_POLICIES`.
        target: a target's name, such as `"cuda:ampere"`.
        framework: `"torch"` or `"keras"`.
        model: the model's class name.
        loss_float32: mean loss of the batches in float32.
        loss: the same under the policy; None where it did not run to the end.
        loss_scale: the scales that suit; None where the policy needs none, or nothing is known.
        layers: what was seen of each layer, in the order of the model.
        hazards: what would go wrong, the gravest first.
        plan: what to train with: the policy's own plan, or where layers have to be kept in higher precision, one that
            does so; None where no plan says it.
        cured: whether a second run under the plan was free of hazards; None where there was nothing to cure, or it was
            not tried.
        loss_in_float32: whether that run also computed what lies outside the model, usually the loss, in float32.
        alternative: another policy that the target has units for and that was tried without a hazard; `""` for none.
        notes: what a reader should know besides, one sentence each.
        batches: how many batches were looked at.

    >>> found = Preflight(policy="mixed_float16", target="cuda:ampere", framework="torch")
    >>> found.verdict, found.sentence
    ('ready', 'ready for mixed_float16 on cuda:ampere: nothing was found that would go wrong')
    """

    policy: str
    target: str
    framework: Literal["torch", "keras"]
    model: str = ""
    loss_float32: float = math.nan
    loss: float | None = None
    loss_scale: LossScaleRange | None = None
    layers: tuple[LayerRow, ...] = ()
    hazards: tuple[Hazard, ...] = ()
    plan: Plan | None = None
    cured: bool | None = None
    loss_in_float32: bool = False
    alternative: str = ""
    notes: tuple[str, ...] = ()
    batches: int = 1

    @property
    def verdict(self) -> Literal["ready", "hazards"]:
        """`"hazards"` where there is any."""
        return "hazards" if self.hazards else "ready"

    @property
    def ready(self) -> bool:
        """True where nothing was found that would go wrong."""
        return not self.hazards

    @property
    def loss_error(self) -> float | None:
        """Relative difference of the loss from float32; None where one of them is not known or not finite."""
        if self.loss is None or not (math.isfinite(self.loss) and math.isfinite(self.loss_float32)):
            return None
        return abs(self.loss - self.loss_float32) / max(abs(self.loss_float32), 1e-12)

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        where = f"{self.policy} on {self.target}"
        if self.ready:
            return f"ready for {where}: nothing was found that would go wrong"
        first, others = self.hazards[0], len(self.hazards) - 1
        more = f", and {others} more hazard{'s' if others > 1 else ''}" if others else ""
        place = f"{first.place}: " if first.place else ""
        return f"not ready for {where}: {place}{first.what}{more}"

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON-ready values but for floats that are not finite (`halfwise.core.record.json_ready`)."""
        from halfwise.core.plan_file import dumps  # TOML is needed here alone

        return {
            "verdict": self.verdict,
            "sentence": self.sentence,
            "policy": self.policy,
            "target": self.target,
            "framework": self.framework,
            "model": self.model,
            "batches": self.batches,
            "loss_float32": self.loss_float32,
            "loss": self.loss,
            "loss_error": self.loss_error,
            "loss_scale": None if self.loss_scale is None else dict(vars(self.loss_scale)),
            "hazards": [hazard.as_dict() for hazard in self.hazards],
            "layers": [{**vars(row), "formats": list(row.formats)} for row in self.layers],
            "plan": None if self.plan is None else tomllib.loads(dumps(self.plan)),
            "cured": self.cured,
            "loss_in_float32": self.loss_in_float32,
            "alternative": self.alternative,
            "notes": list(self.notes),
        }


def preflight_policy(policy: str) -> str:
    """The canonical name of a policy that a preflight accepts.

    Raises:
        PolicyError: it is another one.

    >>> preflight_policy("16-mixed")
    'mixed_float16'
    """
    if isinstance(policy, str) and policy in PREFLIGHT_POLICIES:
        return policy
    if policy == "auto" or not isinstance(policy, str):
        raise PolicyError(
            f"preflight(policy={policy!r}): give the precision to look at. "
            f"Allowed: {', '.join(map(repr, PREFLIGHT_POLICIES))}"
        )
    try:
        return parse_policy(policy)
    except PolicyError as error:
        raise PolicyError(
            f"preflight(policy={policy!r}): {error} Allowed in a preflight: {', '.join(map(repr, PREFLIGHT_POLICIES))}"
        ) from None


def native_format(policy: str) -> str:
    """The format that a target must have units for.

    >>> native_format("float8")
    'float8_e4m3fn'
    """
    compute = PREFLIGHT_POLICIES[policy]
    return _NATIVE.get(compute, compute)


def not_native(policy: str, target: str) -> Hazard | None:
    """The hazard that the target has no units for the policy's format; None where it has, or is this machine.

    Raises:
        PolicyError: there is no such target.

    >>> not_native("mixed_bfloat16", "cuda:volta").detail
    'cuda:volta has units for float16, not for bfloat16'
    """
    if target == HERE:
        return None
    hardware, name = get_target(target), native_format(policy)
    if name == "float32" or name in hardware.formats:
        return None
    has = f"has units for {', '.join(hardware.formats)}, not" if hardware.formats else "has no units"
    detail = f"{target} {has} for {name}"
    slower = hardware.emulated.get(name)
    if slower is not None:
        detail += f"; emulated, layers take about {slower:g} times their float32 time"
    known = [other for other, format_name in PREFLIGHT_POLICIES.items() if format_name in hardware.formats]
    fix = f'policy="{known[-1] if known else "float32"}"  # what {target} is fast in'
    return Hazard(kind="not_native", detail=detail, fix=(fix,))

"""How "auto" decides: range first, then measured time, then the loss scale. Arithmetic on evidence; no framework.

The order matters: rounding-error measures are blind to infinity, so a format that cannot hold a layer's
values is out before anything else is asked. What remains must be measurably faster here, or the answer is
float32, which is a good answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from halfwise.core.formats import get_format
from halfwise.core.histogram import ExponentHistogram
from halfwise.core.loss_scale import CEILING, LossScaleSettings
from halfwise.core.plan import Default, Plan, Reason, Rule
from halfwise.core.profile import Profile, Role
from halfwise.core.timing import TimingTable

__all__ = [
    "EVIDENCE_STEPS",
    "HEADROOM",
    "LARGEST_UNDERFLOW",
    "LEAST_GAIN",
    "Because",
    "RangeVerdict",
    "float32_plan",
    "loss_scale_for",
    "plan_from",
    "range_gate",
    "times",
]

EVIDENCE_STEPS = 3
"""Steps that train in float32 under "auto" while evidence for the plan is gathered."""

HEADROOM = 8.0
"""How much larger than seen a value may become in later training and must still fit."""

LARGEST_UNDERFLOW = 0.05
"""Share of a layer's non-zero gradient values that may round to zero at the loss scale."""

LEAST_GAIN = 0.03
"""Share of the step's time that half precision must save, measured, to be worth its trouble."""

Because = tuple[Reason, str]
"""A reason and its sentence."""

_LOSS_SCALES = tuple(2.0**k for k in range(25))  # 1 to 2^24, the loss scale's bounds

_FORWARD: tuple[tuple[Role, str], ...] = (("activation", "activation"), ("weight", "weight"))
_BACKWARD: tuple[tuple[Role, str], ...] = (
    ("activation_gradient", "activation gradient"),
    ("weight_gradient", "weight gradient"),
)


@dataclass(frozen=True)
class RangeVerdict:
    """Whether a format can hold what a layer computes.

    Attributes:
        fits: it can.
        largest: upper bound of the largest magnitude that decided.
        underflow: upper bound of the share of non-zero gradient values that round to zero at the loss scale.
        detail: one sentence with the numbers.
    """

    fits: bool
    largest: float
    underflow: float
    detail: str


def range_gate(profile: Profile, path: str, format_name: str, loss_scale: float = 1.0) -> RangeVerdict:
    """Whether activations, weights and (at the loss scale) gradients of the layer fit the format, with `HEADROOM`.

    Evidence that holds infinities or NaN never fits.
    """
    limit = get_format(format_name).largest
    largest = 0.0
    for role, what in _FORWARD:
        histogram = profile.get(path, role)
        if histogram is None:
            continue
        largest = max(largest, histogram.largest)
        if _nonfinite(histogram):
            return RangeVerdict(False, histogram.largest, 0.0, f"its {what}s hold inf or NaN in float32 already")
        if histogram.largest * HEADROOM > limit:
            detail = (
                f"largest {what} up to {histogram.largest:.3g}; "
                f"{format_name} holds {limit:.6g}, and {HEADROOM:g} times is kept free"
            )
            return RangeVerdict(False, histogram.largest, 0.0, detail)
    underflow = 0.0
    for role, what in _BACKWARD:
        histogram = profile.get(path, role)
        if histogram is None:
            continue
        if _nonfinite(histogram):
            return RangeVerdict(False, histogram.largest, 0.0, f"its {what}s hold inf or NaN in float32 already")
        if histogram.largest * loss_scale * HEADROOM > limit:
            detail = (
                f"largest {what} up to {histogram.largest:.3g} at loss scale {loss_scale:g}; "
                f"{format_name} holds {limit:.6g}, and {HEADROOM:g} times is kept free"
            )
            return RangeVerdict(False, histogram.largest, 0.0, detail)
        share = histogram.underflow(format_name, loss_scale).upper
        underflow = max(underflow, share)
        if share > LARGEST_UNDERFLOW:
            detail = (
                f"{share:.1%} of its {what}s round to zero in {format_name} at loss scale {loss_scale:g}; "
                f"allowed {LARGEST_UNDERFLOW:.0%}"
            )
            return RangeVerdict(False, histogram.largest, share, detail)
    return RangeVerdict(True, largest, underflow, "")


def loss_scale_for(profile: Profile, paths: Sequence[str], format_name: str, timing: TimingTable) -> float:
    """The loss scale at which the layers that fit the format save the most time; the middle one of several.

    1 for formats with float32's exponent range, which need no loss scale.
    """
    if get_format(format_name).exponent_bits == get_format("float32").exponent_bits:
        return 1.0

    def saved(scale: float) -> float:
        fitting = (p for p in paths if range_gate(profile, p, format_name, scale).fits)
        return sum(max(0.0, _gain(timing, p, format_name)) for p in fitting)

    gains = [saved(scale) for scale in _LOSS_SCALES]
    best = [scale for scale, gain in zip(_LOSS_SCALES, gains, strict=True) if gain >= max(gains) * (1.0 - 1e-9)]
    return best[len(best) // 2]


def plan_from(
    profile: Profile,
    timing: TimingTable,
    *,
    framework: str = "torch",
    model: str = "",
    kept: Mapping[str, Because] = {},
) -> Plan:
    """The plan for the layers of `timing`, from their ranges and times.

    Of the formats that `timing` has, the one that saves most time over the layers that it can hold is
    taken; between equals (within `LEAST_GAIN`) the one that needs no loss scale. Where less than
    `LEAST_GAIN` of the time is saved: float32.

    Args:
        profile: exponent histograms; a layer without any is kept in float32.
        timing: seconds per layer and format. Where it comes from is the caller's affair: measured here, or supplied.
        framework: `"torch"` or `"keras"`.
        model: the model's class name, for the reader of the plan.
        kept: layers that stay in float32 whatever their range and time, timed or not: path -> reason and sentence.
            What half precision would save in them counts for nothing.
    """
    paths = sorted(timing.seconds, key=_natural)
    free = [path for path in paths if path not in kept]
    everything = timing.total("float32")
    best: tuple[float, str, float] | None = None
    for name in sorted(timing.formats, key=lambda f: get_format(f).exponent_bits, reverse=True):
        scale = loss_scale_for(profile, free, name, timing)
        gain = sum(
            max(0.0, _gain(timing, p, name))
            for p in free
            if _known(profile, p) and range_gate(profile, p, name, scale).fits
        )
        if best is None or gain > best[0] + LEAST_GAIN * everything:
            best = (gain, name, scale)
    if best is None or best[0] < LEAST_GAIN * everything:
        return float32_plan(profile, timing, framework=framework, model=model, kept=kept)
    gain, name, scale = best
    layers = tuple(_decide(profile, timing, path, name, scale, kept) for path in paths)
    layers += tuple(_kept_besides(layers, kept))
    layers += tuple(_untimed(profile, timing, name, scale, kept))
    detail = f"all layers together take {times(1.0 - gain / everything)} times their float32 time"
    loss_scale = None
    if any(rule.compute == "float16" for rule in layers):
        loss_scale = LossScaleSettings(initial=min(scale, CEILING), hysteresis=2)
    return Plan(
        framework="keras" if framework == "keras" else "torch",
        model=model,
        default=Default(
            compute=name, reason="faster", detail=detail, evidence={"relative_time": 1.0 - gain / everything}
        ),
        loss_scale=loss_scale,
        layers=layers,
    )


def float32_plan(
    profile: Profile,
    timing: TimingTable,
    *,
    framework: str = "torch",
    model: str = "",
    kept: Mapping[str, Because] = {},
    because: Because | None = None,
) -> Plan:
    """The answer "float32", with the measured ratios as the reason; `because` replaces reason and sentence.

    In the ratios the layers that are `kept` take their float32 time.
    """
    paths = sorted(timing.seconds, key=_natural)
    free = [path for path in paths if path not in kept]
    ratios = {name: _relative_time(timing, name, free) for name in timing.formats}
    quickest = min(ratios, key=ratios.__getitem__, default=None)
    bounds = {name: any(timing.is_lower_bound(p, name) for p in free) for name in ratios}
    told = ", ".join(f"{name} {'at least ' if bounds[name] else ''}{times(ratio)}" for name, ratio in ratios.items())
    reason: Reason = "slower"
    sentence = f"time relative to float32 here: {told}" if told else "no half-precision format can be run here"
    layers: tuple[Rule, ...] = ()
    if quickest is not None:
        scale = loss_scale_for(profile, free, quickest, timing)
        layers = tuple(_float32_rule(_decide(profile, timing, path, quickest, scale, kept)) for path in paths)
        if ratios[quickest] < 1.0 - LEAST_GAIN and any(rule.reason == "range" for rule in layers):
            reason, sentence = "range", f"the layers that {quickest} would speed up do not fit its range; {sentence}"
    return Plan(
        framework="keras" if framework == "keras" else "torch",
        model=model,
        default=Default(
            compute="float32",
            reason=because[0] if because else reason,
            detail=because[1] if because else sentence,
            evidence={f"relative_time_{name}": ratio for name, ratio in ratios.items()},
        ),
        layers=(*layers, *_kept_besides(layers, kept)),
    )


def _float32_rule(decided: Rule) -> Rule:
    """What a layer's rule becomes where the plan as a whole answers float32."""
    if decided.compute == "float32":
        return decided
    detail = f"{decided.detail}, but too little is gained over the whole model"
    return replace(decided, compute="float32", reason="neighbours", detail=detail)


def _decide(
    profile: Profile, timing: TimingTable, path: str, name: str, scale: float, kept: Mapping[str, Because]
) -> Rule:
    seconds, full = timing.get(path, name), timing.seconds[path]["float32"]
    verdict = range_gate(profile, path, name, scale)
    evidence = {"largest": verdict.largest, "underflow": verdict.underflow, "seconds_float32": full}
    if seconds is not None:
        evidence["seconds"] = seconds
    if path in kept:
        reason, detail = kept[path]
        return Rule(path=path, compute="float32", reason=reason, detail=detail, evidence=evidence)
    if not _known(profile, path):
        return Rule(
            path=path,
            compute="float32",
            reason="range",
            detail="it never ran, so its range is unknown",
            evidence=evidence,
        )
    if not verdict.fits:
        return Rule(path=path, compute="float32", reason="range", detail=verdict.detail, evidence=evidence)
    if seconds is None or seconds >= full:
        return Rule(
            path=path, compute="float32", reason="slower", detail=_compared(timing, path, name), evidence=evidence
        )
    return Rule(path=path, compute=name, reason="faster", detail=_compared(timing, path, name), evidence=evidence)


def _kept_besides(layers: Sequence[Rule], kept: Mapping[str, Because]) -> Iterator[Rule]:
    """Rules for the layers that are kept and have none yet: they were not timed."""
    for path in sorted(set(kept) - {rule.path for rule in layers}, key=_natural):
        reason, detail = kept[path]
        yield Rule(path=path, compute="float32", reason=reason, detail=detail)


def _untimed(
    profile: Profile, timing: TimingTable, name: str, scale: float, kept: Mapping[str, Because]
) -> Iterator[Rule]:
    """Rules for what ran without being timed, by range alone.

    Such are containers with weights of their own, and modules without weights.
    """
    for path in sorted(set(profile.paths()) - set(timing.seconds) - set(kept), key=_natural):
        verdict = range_gate(profile, path, name, scale)
        if not verdict.fits:
            evidence = {"largest": verdict.largest, "underflow": verdict.underflow}
            yield Rule(path=path, compute="float32", reason="range", detail=verdict.detail, evidence=evidence)


def _compared(timing: TimingTable, path: str, name: str) -> str:
    seconds, full = timing.get(path, name), timing.seconds[path]["float32"]
    if seconds is None:
        return f"{name} was not measured"
    at_least = "at least " if timing.is_lower_bound(path, name) else ""
    return f"{name} takes {at_least}{times(seconds / full)} times the float32 time of {full * 1e3:.3g} ms"


def times(ratio: float) -> str:
    """A ratio of times as people read it: 0.62, 1.03, 18, 130.

    >>> times(1.032), times(131.4)
    ('1.03', '131')
    """
    return f"{ratio:.2f}" if ratio < 10.0 else f"{ratio:.0f}"


def _gain(timing: TimingTable, path: str, name: str) -> float:
    seconds = timing.get(path, name)
    return 0.0 if seconds is None else timing.seconds[path]["float32"] - seconds


def _relative_time(timing: TimingTable, name: str, free: Sequence[str]) -> float:
    """Time of all layers with those of `free` in the format, relative to float32; 1 where nothing was timed."""
    everything = timing.total("float32")
    kept = [path for path in timing.seconds if path not in set(free)]
    return (timing.total(name, free) + timing.total("float32", kept)) / everything if everything > 0.0 else 1.0


def _known(profile: Profile, path: str) -> bool:
    return profile.get(path, "activation") is not None


def _nonfinite(histogram: ExponentHistogram) -> bool:
    return histogram.infinities > 0 or histogram.nans > 0


def _natural(path: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts `layers.10` behind `layers.9`."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split("."))

"""How "auto" decides: from ranges, sensitivities and times to a plan. Arithmetic on evidence; no framework.

First each layer's formats are sifted (`sifting.py`): out goes what cannot hold the layer's values, and what disturbs
training more than its own noise does. Of what is left the assignment that costs least is taken (`choice.py`), within
what rounding may change the loss by over all layers together. Where little is gained, the answer is float32, which is
a good answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from halfwise.core.choice import Assignment, Question, choose
from halfwise.core.loss_scale import CEILING, LossScaleSettings
from halfwise.core.objective import Objective, cast_costs, relative_costs, spread_costs
from halfwise.core.plan import Default, Plan, Reason, Rule
from halfwise.core.profile import Profile
from halfwise.core.ranges import LOSS_SCALES, needs_loss_scale
from halfwise.core.reasoning import Decision, natural, rule_for, rules_of_kept, rules_of_untimed, times
from halfwise.core.sensitivity import Sensitivity
from halfwise.core.sifting import Because, Sieve
from halfwise.core.targets import HERE
from halfwise.core.timing import TimingTable

__all__ = ["EVIDENCE_STEPS", "LEAST_GAIN", "float32_plan", "plan_from"]

EVIDENCE_STEPS = 3
"""Steps that train in float32 under "auto" while evidence for the plan is gathered."""

LEAST_GAIN = 0.02
"""Share of the cost that a plan must save beside a simpler one: float32, or one that needs no loss scale."""


def plan_from(
    profile: Profile,
    timing: TimingTable,
    *,
    sensitivity: Sensitivity | None = None,
    tolerance: float = 0.1,
    objective: Objective = "time",
    target: str = HERE,
    framework: str = "torch",
    model: str = "",
    kept: Mapping[str, Because] = {},
    earlier: Plan | None = None,
) -> Plan:
    """The plan for the layers of `timing`.

    Between plans that cost the same (within `LEAST_GAIN`) the simpler one is taken: `earlier`, or else float32; then
    one that needs no loss scale.

    Args:
        profile: exponent histograms; a layer without any is kept in float32.
        timing: seconds per layer and format. Where it comes from is the caller's affair: measured here, estimated for
            another target, or supplied.
        sensitivity: what rounding would do; None decides by range and time alone.
        tolerance: share of training's own noise that rounding may add: of the loss's spread over batches for all layers
            together, and of the variance of each layer's gradients. Default a tenth.
        objective: what to save.
        target: the hardware that `timing` is for; all but `"here"` is told as an estimate.
        framework: `"torch"` or `"keras"`.
        model: the model's class name, for the reader of the plan.
        kept: layers that stay in float32 whatever their range and time, timed or not: path -> reason and sentence.
            What half precision would save in them counts for nothing.
        earlier: a plan that exists. A layer leaves the format that this gives it only where it gains more than the
            spread of its measurements.
    """
    sieve = Sieve(profile, timing, sensitivity, tolerance=tolerance, kept=kept)
    decision = _decide(sieve, objective, earlier)
    lowered = {path: name for path, name in decision.formats.items() if name != "float32"}
    if not lowered:
        return float32_plan(
            profile,
            timing,
            sensitivity=sensitivity,
            tolerance=tolerance,
            target=target,
            framework=framework,
            model=model,
            kept=kept,
        )
    main = max(set(lowered.values()), key=lambda name: (_float32_seconds(timing, lowered, name), name))
    layers = tuple(rule_for(sieve, decision, path, main, objective) for path in sorted(timing.seconds, key=natural))
    layers += tuple(rules_of_kept(layers, kept))
    layers += tuple(rules_of_untimed(sieve, main, decision.scale))
    uses_float16 = any(needs_loss_scale(name) for name in lowered.values())
    return Plan(
        framework="keras" if framework == "keras" else "torch",
        model=model,
        target=target,
        default=_default(timing, decision, main, objective, target),
        loss_scale=LossScaleSettings(initial=min(decision.scale, CEILING), hysteresis=2) if uses_float16 else None,
        layers=layers,
    )


def _decide(sieve: Sieve, objective: Objective, earlier: Plan | None) -> Decision:
    """The simplest assignment that costs at most `LEAST_GAIN` more than the best."""
    formats = sieve.timing.formats
    held = _held(sieve, earlier)
    free_of_scaling = [name for name in formats if not needs_loss_scale(name)]
    by_cost: list[tuple[float, Decision]] = []

    def consider(names: Sequence[str], scale: float, fixed: Assignment | None = None) -> None:
        question = _question(sieve, objective, names, scale, held)
        assignment = choose(question) if fixed is None else fixed
        if assignment is not None and question.score(assignment) <= question.budget:
            left = question.budget - question.score(assignment)
            common = sieve.common_loss_scale(assignment, near=scale)
            by_cost.append((question.cost(assignment), Decision(assignment, common, left)))

    full = dict.fromkeys(sieve.timing.seconds, "float32")
    scale_held = earlier.loss_scale.initial if earlier is not None and earlier.loss_scale is not None else 1.0
    held_scale = max((scale for scale in LOSS_SCALES if scale <= scale_held), default=1.0)
    if all(sieve.refusal(path, name, held_scale) is None for path, name in held.items() if name != "float32"):
        consider(formats, held_scale, held)
    if held != full:
        consider((), 1.0, full)
    consider(free_of_scaling, 1.0)
    if len(free_of_scaling) < len(formats):
        for scale in sieve.loss_scales():
            consider(formats, scale)
    least = min(cost for cost, _ in by_cost)
    return next(decision for cost, decision in by_cost if cost <= least * (1.0 + LEAST_GAIN))


def _question(
    sieve: Sieve, objective: Objective, formats: Sequence[str], scale: float, held: Mapping[str, str]
) -> Question:
    costs = relative_costs(sieve.timing, objective)
    spreads = spread_costs(sieve.timing, objective)
    allowed: dict[str, dict[str, float]] = {}
    for path, by_format in costs.items():
        names = ["float32", *(name for name in formats if name in by_format)]
        allowed[path] = {
            name: by_format[name] + (spreads.get(path, 0.0) if name != held[path] else 0.0)
            for name in names
            if name == "float32" or sieve.refusal(path, name, scale) is None
        }
    scores = {path: {name: sieve.score(path, name) for name in names} for path, names in allowed.items()}
    return Question(allowed, cast_costs(sieve.timing, objective), scores, sieve.budget)


def _held(sieve: Sieve, earlier: Plan | None) -> Assignment:
    """The formats that layers have before: those of an earlier plan, float32 without one."""
    if earlier is None:
        return dict.fromkeys(sieve.timing.seconds, "float32")
    before = {path: earlier.compute(path) for path in sieve.timing.seconds}
    return {path: name if sieve.timing.get(path, name) is not None else "float32" for path, name in before.items()}


def _default(timing: TimingTable, decision: Decision, main: str, objective: Objective, target: str) -> Default:
    ratio = _relative(timing, decision.formats, "time")
    detail = f"all layers together take {times(ratio)} times their float32 time"
    evidence = {"relative_time": ratio}
    reason: Reason = "faster"
    if objective != "time" and any(timing.saved.values()):
        kept = _relative(timing, decision.formats, "memory")
        evidence["relative_memory"] = kept
        detail = f"they keep {times(kept)} times the bytes of float32 for the backward pass; {detail}"
        reason = "memory" if objective == "memory" or ratio >= 1.0 else "faster"
    if target != HERE:
        detail = f"an estimate for {target}: {detail}"
    compute = "bfloat16" if main.startswith("float8") else main  # what lies between the layers has no scaling
    return Default(compute=compute, reason=reason, detail=detail, evidence=evidence)


def float32_plan(
    profile: Profile,
    timing: TimingTable,
    *,
    sensitivity: Sensitivity | None = None,
    tolerance: float = 0.1,
    target: str = HERE,
    framework: str = "torch",
    model: str = "",
    kept: Mapping[str, Because] = {},
    because: Because | None = None,
) -> Plan:
    """The answer "float32", with the ratios of times as the reason; `because` replaces reason and sentence.

    In the ratios the layers that are `kept` take their float32 time.
    """
    sieve = Sieve(profile, timing, sensitivity, tolerance=tolerance, kept=kept)
    free = [path for path in timing.seconds if path not in kept]
    ratios = {
        name: _relative(timing, {path: name if path in free else "float32" for path in timing.seconds}, "time")
        for name in timing.formats
    }
    quickest = min(ratios, key=ratios.__getitem__, default=None)
    bounds = {name: any(timing.is_lower_bound(p, name) for p in free) for name in ratios}
    told = ", ".join(f"{name} {'at least ' if bounds[name] else ''}{times(ratio)}" for name, ratio in ratios.items())
    where = "here" if target == HERE else f"on {target} (an estimate)"
    reason: Reason = "slower"
    sentence = f"time relative to float32 {where}: {told}" if told else f"no half-precision format can be run {where}"
    layers: tuple[Rule, ...] = ()
    if quickest is not None:
        nothing = dict.fromkeys(timing.seconds, "float32")
        scale = max(sieve.loss_scales(), key=lambda s: _allowed_gain(sieve, quickest, s), default=1.0)
        decision = Decision(nothing, scale, sieve.budget)
        paths = sorted(timing.seconds, key=natural)
        layers = tuple(_left_alone(rule_for(sieve, decision, path, quickest, "time")) for path in paths)
        reasons = {rule.reason for rule in layers if rule.path not in kept}
        if ratios[quickest] < 1.0 - LEAST_GAIN and (barred := reasons & {"range", "sensitivity"}):
            reason = "range" if "range" in barred else "sensitivity"
            what = "do not fit its range" if reason == "range" else "are too sensitive to its rounding"
            sentence = f"the layers that {quickest} would speed up {what}; {sentence}"
    return Plan(
        framework="keras" if framework == "keras" else "torch",
        model=model,
        target=target,
        default=Default(
            compute="float32",
            reason=because[0] if because else reason,
            detail=because[1] if because else sentence,
            evidence={f"relative_time_{name}": ratio for name, ratio in ratios.items()},
        ),
        layers=(*layers, *rules_of_kept(layers, kept)),
    )


def _allowed_gain(sieve: Sieve, name: str, scale: float) -> float:
    timing = sieve.timing
    fitting = (path for path in timing.seconds if sieve.refusal(path, name, scale) is None)
    return sum(max(0.0, timing.seconds[path]["float32"] - timing.seconds[path][name]) for path in fitting)


def _left_alone(rule: Rule) -> Rule:
    """A layer's rule where the plan as a whole answers float32."""
    if rule.reason != "neighbours":
        return rule
    compared = rule.detail.partition(", which")[0]
    return replace(rule, detail=f"{compared}, but too little is gained over the whole model")


def _float32_seconds(timing: TimingTable, lowered: Mapping[str, str], name: str) -> float:
    return sum(timing.seconds[path]["float32"] for path, chosen in lowered.items() if chosen == name)


def _relative(timing: TimingTable, formats: Mapping[str, str], objective: Objective) -> float:
    """Cost of the layers in these formats relative to float32; where one was not measured, in float32."""
    if not timing.seconds:
        return 1.0
    costs = relative_costs(timing, objective)
    known = {path: name if name in costs[path] else "float32" for path, name in formats.items()}
    return Question(costs, cast_costs(timing, objective)).cost(known)

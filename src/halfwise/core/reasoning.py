"""Why each layer gets the format that it gets: rules with a reason, a sentence and the numbers behind them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from halfwise.core.choice import Assignment
from halfwise.core.objective import Objective
from halfwise.core.plan import Rule
from halfwise.core.sifting import Because, Sieve
from halfwise.core.timing import TimingTable

__all__ = ["Decision", "natural", "rule_for", "rules_of_kept", "rules_of_untimed", "times"]


@dataclass(frozen=True)
class Decision:
    """Formats by path, the loss scale for them, and the budget of rounding error that is left."""

    formats: Assignment
    scale: float
    left: float


def rule_for(sieve: Sieve, decision: Decision, path: str, main: str, objective: Objective) -> Rule:
    """The layer's rule. Its numbers are those of its format, or, where that is float32, of the plan's main format."""
    timing, name = sieve.timing, decision.formats[path]
    other = main if name == "float32" else name
    because = (
        _why_lowered(timing, path, name, objective) if name != "float32" else _why_not(sieve, decision, path, other)
    )
    return Rule(
        path=path,
        compute=name,
        reason=because[0],
        detail=because[1],
        evidence=_numbers(sieve, path, other, decision.scale),
    )


def _why_lowered(timing: TimingTable, path: str, name: str, objective: Objective) -> Because:
    compared = _compared(timing, path, name)
    seconds = timing.get(path, name)
    if seconds is not None and seconds < timing.seconds[path]["float32"]:
        return "faster", compared
    if objective != "time":
        return "memory", compared
    return "neighbours", f"{compared}, but casts on its sides are saved"


def _why_not(sieve: Sieve, decision: Decision, path: str, name: str) -> Because:
    """Why a layer is left in float32 where the plan's main format is `name`."""
    refused = sieve.refusal(path, name, decision.scale)
    if refused is not None:
        return ("slower", _compared(sieve.timing, path, name)) if refused[0] == "slower" else refused
    seconds = sieve.timing.get(path, name)
    if seconds is None or seconds >= sieve.timing.seconds[path]["float32"]:
        return "slower", _compared(sieve.timing, path, name)
    if sieve.score(path, name) > decision.left:
        change, allowed = sieve.score(path, name) ** 0.5, sieve.budget**0.5
        told = f"rounding it to {name} changes the loss by {change:.2g} (predicted)"
        return "sensitivity", f"{told}; of the {allowed:.2g} that are allowed, layers that gain more use too much"
    return "neighbours", f"{_compared(sieve.timing, path, name)}, which casts or the spread of measurements eat up"


def _numbers(sieve: Sieve, path: str, name: str, scale: float) -> dict[str, float]:
    """The evidence behind a rule; of formats besides `name` and float32 what they would have cost."""
    timing, sensitivity = sieve.timing, sieve.sensitivity
    verdict = sieve.range_verdict(path, name, scale)
    found = {
        "largest": verdict.largest,
        "underflow": verdict.underflow,
        "seconds_float32": timing.seconds[path]["float32"],
    }
    if (seconds := timing.get(path, name)) is not None:
        found["seconds"] = seconds
    if sensitivity is not None and (one := sensitivity.get(path, name)) is not None:
        found |= {"score": one.score, "gradient_error": one.gradient_error}
    if path in timing.saved:
        found["saved_values"] = float(timing.saved[path])
    for other in timing.formats:
        if other == name:
            continue
        if (seconds := timing.get(path, other)) is not None:
            found[f"seconds_{other}"] = seconds
        if sensitivity is not None and (one := sensitivity.get(path, other)) is not None:
            found[f"score_{other}"] = one.score
    return found


def rules_of_kept(layers: Sequence[Rule], kept: Mapping[str, Because]) -> Iterator[Rule]:
    """Rules for the layers that are kept and have none yet: they were not timed."""
    for path in sorted(set(kept) - {rule.path for rule in layers}, key=natural):
        reason, detail = kept[path]
        yield Rule(path=path, compute="float32", reason=reason, detail=detail)


def rules_of_untimed(sieve: Sieve, name: str, scale: float) -> Iterator[Rule]:
    """Rules for what ran without being timed, by range alone.

    Such are containers with weights of their own, and modules without weights.
    """
    for path in sorted(set(sieve.profile.paths()) - set(sieve.timing.seconds) - set(sieve.kept), key=natural):
        verdict = sieve.range_verdict(path, name, scale)
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


def natural(path: str) -> tuple[tuple[int, int, str], ...]:
    """Sorts `layers.10` behind `layers.9`."""
    return tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.split("."))

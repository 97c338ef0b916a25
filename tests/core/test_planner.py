"""The planner's arithmetic on made-up evidence: range before time, time before anything else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfwise.core.histogram import ExponentHistogram
from halfwise.core.planner import LEAST_GAIN, float32_plan, plan_from
from halfwise.core.profile import Profile, Role
from halfwise.core.ranges import LARGEST_UNDERFLOW, loss_scale_window, range_gate
from halfwise.core.sensitivity import LayerSensitivity, Sensitivity
from halfwise.core.sifting import Because
from halfwise.core.timing import TimingTable


def profile(**layers: Mapping[str, list[float]]) -> Profile:
    """A profile from values by layer and role."""
    histograms: dict[tuple[str, Role], ExponentHistogram] = {}
    for path, roles in layers.items():
        for role, values in roles.items():
            histograms[path, role] = ExponentHistogram.of(np.array(values, np.float32))  # type: ignore[index]
    return Profile(histograms)


SOUND = {"activation": [1.0, 0.5], "weight": [0.1], "activation_gradient": [1e-3], "weight_gradient": [1e-2]}
TWICE = {"float16": 0.5}


def with_role(role: str, *values: float) -> dict[str, list[float]]:
    return {**SOUND, role: list(values)}


def test_loss_scale_is_the_middle_of_the_window() -> None:
    evidence = profile(layer=with_role("activation_gradient", *[2.0**-20] * 10, 2.0**-4))
    plan = plan_from(evidence, TimingTable.uniform(["layer"], relative=TWICE))
    window = [2.0**k for k in range(25) if range_gate(evidence, "layer", "float16", 2.0**k).fits]
    assert plan.loss_scale is not None
    assert plan.loss_scale.initial == window[len(window) // 2]
    assert plan_from(evidence, TimingTable.uniform(["layer"], relative={"bfloat16": 0.5})).loss_scale is None


def test_loss_scale_serves_the_layers_that_save_most() -> None:
    """Two layers without a common window: the one that takes longer decides."""
    evidence = profile(
        small=with_role("activation_gradient", 2.0**-40, 2.0**-39),
        large=with_role("activation_gradient", 2.0**10, 2.0**9),
    )
    timing = TimingTable({"small": {"float32": 3.0, "float16": 1.5}, "large": {"float32": 1.0, "float16": 0.5}})
    plan = plan_from(evidence, timing)
    assert plan.compute("small") == "float16"
    assert plan.compute("large") == "float32"
    assert plan.rule_for("large").reason == "range"
    swapped = TimingTable({"small": timing.seconds["large"], "large": timing.seconds["small"]})
    plan = plan_from(evidence, swapped)
    assert (plan.compute("small"), plan.compute("large")) == ("float32", "float16")


def test_layers_are_lowered_exactly_where_range_and_time_allow() -> None:
    evidence = profile(
        sound=SOUND, hot=with_role("activation", 1e5), slow=SOUND, unmeasured=SOUND, norm=with_role("activation", 2e5)
    )
    timing = TimingTable(
        {
            "sound": {"float32": 2.0, "float16": 1.0},
            "hot": {"float32": 2.0, "float16": 1.0},
            "slow": {"float32": 1.0, "float16": 1.5},
            "unmeasured": {"float32": 1.0},
            "never": {"float32": 1.0, "float16": 0.5},
        }
    )
    plan = plan_from(evidence, timing, model="Net")
    assert plan.model == "Net"
    assert {rule.path: (rule.compute, rule.reason) for rule in plan.layers} == {
        "sound": ("float16", "faster"),
        "hot": ("float32", "range"),
        "slow": ("float32", "slower"),
        "unmeasured": ("float32", "slower"),
        "never": ("float32", "range"),
        "norm": ("float32", "range"),
    }
    assert plan.loss_scale is not None
    assert plan.loss_scale.hysteresis == 2
    rule = plan.rule_for("hot")
    assert "up to 1.15e+05" in rule.detail
    assert rule.evidence["seconds"] == 1.0


def test_between_equals_the_format_without_a_loss_scale_wins() -> None:
    timing = TimingTable.uniform(["a"], relative={"float16": 0.5, "bfloat16": 0.5})
    plan = plan_from(profile(a=SOUND), timing)
    assert plan.compute("a") == "bfloat16"
    assert plan.loss_scale is None
    quicker = TimingTable.uniform(["a"], relative={"float16": 0.4, "bfloat16": 0.5})
    assert plan_from(profile(a=SOUND), quicker).compute("a") == "float16"


@pytest.mark.parametrize(
    "relative", [{}, {"float16": 1.0}, {"float16": 1.0 - LEAST_GAIN / 2}, {"bfloat16": 9.0, "float16": 20.0}]
)
def test_float32_where_nothing_is_gained(relative: dict[str, float]) -> None:
    plan = plan_from(profile(a=SOUND), TimingTable.uniform(["a"], relative=relative))
    assert plan.default.compute == "float32"
    assert plan.default.reason == "slower"
    assert plan.compute("a") == "float32"
    assert plan.loss_scale is None
    for name, ratio in relative.items():
        assert plan.default.evidence[f"relative_time_{name}"] == pytest.approx(ratio)


def test_float32_says_range_where_range_is_the_reason() -> None:
    plan = plan_from(profile(a=with_role("activation", 1e5)), TimingTable.uniform(["a"], relative=TWICE))
    assert plan.default.compute == "float32"
    assert plan.default.reason == "range"


def test_probes_that_were_cut_short_are_told_as_lower_bounds() -> None:
    timing = TimingTable({"a": {"float32": 1.0, "float16": 3.0}}, frozenset({("a", "float16")}))
    assert "at least 3" in float32_plan(profile(a=SOUND), timing).default.detail


def test_supplied_reason_replaces_the_sentence() -> None:
    plan = float32_plan(profile(), TimingTable({}), because=("sensitivity", "too noisy"))
    assert (plan.default.reason, plan.default.detail) == ("sensitivity", "too noisy")


KEPT: dict[str, Because] = {
    "head": ("hazard", "a softmax head"),
    "mine": ("manual", "dtype set by hand"),
    "pool": ("manual", "by hand"),
}


def test_kept_layers_stay_in_float32_whatever_range_and_time_say() -> None:
    evidence = profile(a=SOUND, head=SOUND, mine=SOUND, pool=with_role("activation", 1e5), norm=SOUND)
    timing = TimingTable.uniform(["a", "head", "mine"], relative=TWICE)
    plan = plan_from(evidence, timing, kept=KEPT)
    assert plan.default.compute == "float16"
    assert {rule.path: (rule.compute, rule.reason, rule.detail) for rule in plan.layers if rule.path != "a"} == {
        "head": ("float32", "hazard", "a softmax head"),
        "mine": ("float32", "manual", "dtype set by hand"),
        "pool": ("float32", "manual", "by hand"),  # was not timed, and its range would speak against it too
    }
    assert plan.compute("a") == "float16"
    assert plan.rule_for("head").evidence["seconds_float32"] == 1e-3
    assert plan.default.evidence["relative_time"] == pytest.approx((0.5 + 1 + 1) / 3)


def test_what_kept_layers_would_save_counts_for_nothing() -> None:
    timing = TimingTable({"a": {"float32": 1.0, "float16": 0.99}, "head": {"float32": 9.0, "float16": 1.0}})
    assert plan_from(profile(a=SOUND, head=SOUND), timing).default.compute == "float16"
    plan = plan_from(profile(a=SOUND, head=SOUND), timing, kept=KEPT)
    assert (plan.default.compute, plan.default.reason) == ("float32", "slower")
    assert plan.default.evidence["relative_time_float16"] == pytest.approx(0.999)
    assert {rule.path: rule.reason for rule in plan.layers} == {
        "a": "neighbours",
        "head": "hazard",
        "mine": "manual",
        "pool": "manual",
    }


def test_kept_layers_do_not_choose_the_format() -> None:
    timing = TimingTable(
        {
            "a": {"float32": 1.0, "bfloat16": 0.5, "float16": 0.6},
            "head": {"float32": 9.0, "bfloat16": 9.0, "float16": 1.0},
        }
    )
    free = plan_from(profile(a=SOUND, head=SOUND), timing)
    assert (free.compute("a"), free.compute("head"), free.default.compute) == ("bfloat16", "float16", "float16")
    kept = plan_from(profile(a=SOUND, head=SOUND), timing, kept=KEPT)
    assert (kept.compute("a"), kept.default.compute, kept.loss_scale) == ("bfloat16", "bfloat16", None)


def test_kept_layers_do_not_choose_the_loss_scale() -> None:
    evidence = profile(
        a=with_role("activation_gradient", 2.0**-40, 2.0**-39), head=with_role("activation_gradient", 2.0**10, 2.0**9)
    )
    timing = TimingTable({"a": {"float32": 1.0, "float16": 0.5}, "head": {"float32": 9.0, "float16": 1.0}})
    assert plan_from(evidence, timing).compute("a") == "float32"  # the head's scale, at which its gradients are zero
    assert plan_from(evidence, timing, kept=KEPT).compute("a") == "float16"


@pytest.mark.parametrize("timing", [TimingTable({}), TimingTable({"head": {"float32": 1.0}})])
def test_kept_layers_are_told_where_nothing_could_be_measured(timing: TimingTable) -> None:
    plan = float32_plan(profile(), timing, kept=KEPT)
    assert {rule.path: rule.reason for rule in plan.layers} == {"head": "hazard", "mine": "manual", "pool": "manual"}


def test_layers_are_listed_in_natural_order() -> None:
    paths = [f"layers.{number}" for number in (10, 9, 1)]
    plan = plan_from(profile(**dict.fromkeys(paths, SOUND)), TimingTable.uniform(paths, relative=TWICE))
    assert [rule.path for rule in plan.layers] == ["layers.1", "layers.9", "layers.10"]


@given(
    st.dictionaries(
        st.sampled_from("abcdef"),
        st.tuples(st.floats(2.0**-10, 2.0**20), st.floats(2.0**-30, 2.0**10), st.floats(0.1, 3.0)),
        min_size=1,
    )
)
def test_no_plan_ever_breaks_the_range_gate_or_takes_longer(layers: dict[str, tuple[float, float, float]]) -> None:
    evidence = profile(
        **{
            path: {"activation": [a], "weight": [0.1], "activation_gradient": [g], "weight_gradient": [g]}
            for path, (a, g, _) in layers.items()
        }
    )
    timing = TimingTable(
        {path: {"float32": 1.0, "float16": t, "bfloat16": t * 1.2} for path, (_, _, t) in layers.items()}
    )
    plan = plan_from(evidence, timing)
    scale = plan.loss_scale.initial if plan.loss_scale else 1.0
    for path in layers:
        compute = plan.compute(path)
        if compute != "float32":
            verdict = range_gate(evidence, path, compute, scale)
            assert verdict.fits
            assert verdict.underflow <= LARGEST_UNDERFLOW
            seconds = timing.get(path, compute)
            assert seconds is not None
            assert seconds < 1.0


def sensitive(**scores: Mapping[str, float]) -> Sensitivity:
    """Squared loss changes by layer and format, beside a loss of 1 with a spread of 0.5: 0.05 may be spent."""
    layers = {
        path: {name: LayerSensitivity(score) for name, score in by_format.items()} for path, by_format in scores.items()
    }
    return Sensitivity(layers, loss=1.0, loss_noise=0.5, gradient_noise={})


def test_a_layer_whose_rounding_changes_the_loss_too_much_is_kept() -> None:
    evidence, timing = profile(a=SOUND, b=SOUND), TimingTable.uniform("ab", relative={"bfloat16": 0.5})
    plan = plan_from(evidence, timing, sensitivity=sensitive(a={"bfloat16": 0.06**2}, b={"bfloat16": 0.01**2}))
    assert {rule.path: (rule.compute, rule.reason) for rule in plan.layers} == {
        "a": ("float32", "sensitivity"),
        "b": ("bfloat16", "faster"),
    }
    assert "changes the loss by 0.06 (predicted); allowed for all layers together: 0.05" in plan.rule_for("a").detail
    assert plan.rule_for("b").evidence["score"] == pytest.approx(1e-4)
    patient = plan_from(
        evidence, timing, tolerance=0.2, sensitivity=sensitive(a={"bfloat16": 0.06**2}, b={"bfloat16": 0.01**2})
    )
    assert patient.compute("a") == "bfloat16"


def test_the_budget_is_for_all_layers_together_and_goes_where_it_gains_most() -> None:
    evidence = profile(small=SOUND, large=SOUND)
    timing = TimingTable({"small": {"float32": 1.0, "bfloat16": 0.5}, "large": {"float32": 4.0, "bfloat16": 2.0}})
    each = {"bfloat16": 0.04**2}  # one fits into 0.05, both together do not
    plan = plan_from(evidence, timing, sensitivity=sensitive(small=each, large=each))
    assert (plan.compute("large"), plan.compute("small")) == ("bfloat16", "float32")
    rule = plan.rule_for("small")
    assert rule.reason == "sensitivity"
    assert "layers that gain more use too much" in rule.detail


def test_a_gradient_that_is_wrong_beyond_its_noise_keeps_a_layer() -> None:
    noisy = Sensitivity(
        {path: {"bfloat16": LayerSensitivity(0.0, gradient_error=0.1)} for path in "ab"},
        loss=1.0,
        gradient_noise={"a": 0.9, "b": 0.28},
    )
    plan = plan_from(
        profile(a=SOUND, b=SOUND), TimingTable.uniform("ab", relative={"bfloat16": 0.5}), sensitivity=noisy
    )
    assert (plan.compute("a"), plan.compute("b")) == ("bfloat16", "float32")
    assert (
        "error of 10.00% in its weight gradients; beside their own noise 8.85% is allowed" in plan.rule_for("b").detail
    )


def test_where_one_batch_shows_no_noise_a_twentieth_of_the_loss_is_taken_for_it() -> None:
    timing = TimingTable.uniform("a", relative={"bfloat16": 0.5})
    for change, compute in ((4.9e-3, "bfloat16"), (5.1e-3, "float32")):
        one = Sensitivity({"a": {"bfloat16": LayerSensitivity(change**2)}}, loss=1.0)
        assert plan_from(profile(a=SOUND), timing, sensitivity=one).compute("a") == compute


def test_float32_says_sensitivity_where_that_is_the_reason() -> None:
    timing = TimingTable.uniform("a", relative={"bfloat16": 0.5})
    plan = plan_from(profile(a=SOUND), timing, sensitivity=sensitive(a={"bfloat16": 1.0}))
    assert (plan.default.compute, plan.default.reason) == ("float32", "sensitivity")


def test_neighbours_are_merged_where_casts_would_cost_more() -> None:
    evidence, seconds = profile(a=SOUND, b=SOUND, c=SOUND), {"float32": 1.0, "bfloat16": 0.6}
    slow = {"float32": 0.2, "bfloat16": 0.26}
    casts = {"a": 0.05, "b": 0.05, "c": 0.05}
    merged = plan_from(evidence, TimingTable({"a": seconds, "b": slow, "c": seconds}, casts=casts))
    assert [merged.compute(path) for path in "abc"] == ["bfloat16"] * 3
    assert merged.rule_for("b").reason == "neighbours"
    assert "casts on its sides are saved" in merged.rule_for("b").detail
    slower = {"float32": 0.2, "bfloat16": 0.40}
    apart = plan_from(evidence, TimingTable({"a": seconds, "b": slower, "c": seconds}, casts=casts))
    assert [apart.compute(path) for path in "abc"] == ["bfloat16", "float32", "bfloat16"]


def test_a_layer_is_left_alone_where_casts_eat_up_what_it_gains() -> None:
    evidence = profile(a=SOUND, b=SOUND, c=SOUND)
    seconds = {
        "a": {"float32": 1.0, "bfloat16": 0.9},
        "b": {"float32": 1.0, "bfloat16": 3.0},
        "c": {"float32": 1.0, "bfloat16": 0.4},
    }
    plan = plan_from(evidence, TimingTable(seconds, casts={"b": 0.2}))
    assert [plan.compute(path) for path in "abc"] == ["float32", "float32", "bfloat16"]
    assert plan.rule_for("a").reason == "neighbours"
    assert "casts or the spread of measurements eat up" in plan.rule_for("a").detail
    assert plan_from(evidence, TimingTable(seconds)).compute("a") == "bfloat16"


def test_memory_is_saved_where_it_is_asked_for_even_if_it_takes_longer() -> None:
    evidence = profile(a=SOUND, b=SOUND)
    timing = TimingTable.uniform("ab", relative={"bfloat16": 3.0})
    timing = TimingTable(timing.seconds, saved={"a": 1000, "b": 10})
    assert plan_from(evidence, timing).default.compute == "float32"
    plan = plan_from(evidence, timing, objective="memory")
    assert (plan.compute("a"), plan.compute("b"), plan.default.reason) == ("bfloat16", "bfloat16", "memory")
    assert plan.default.evidence == {"relative_time": pytest.approx(3.0), "relative_memory": pytest.approx(0.5)}
    assert plan.rule_for("a").reason == "memory"
    both = TimingTable(
        {"a": {"float32": 1.0, "bfloat16": 1.2}, "b": {"float32": 1.0, "bfloat16": 1.2}}, saved={"a": 1000, "b": 10}
    )
    balanced = plan_from(evidence, both, objective="balanced")  # half of the bytes of `a` is worth a tenth of the time
    assert (balanced.compute("a"), balanced.compute("b")) == ("bfloat16", "float32")


def test_a_gain_within_the_spread_of_the_measurements_is_none() -> None:
    evidence, seconds = profile(a=SOUND, b=SOUND), {"float32": 1.0, "bfloat16": 0.9}
    assert plan_from(evidence, TimingTable({"a": seconds, "b": seconds}, spread={"a": 0.2, "b": 0.05})).compute(
        "a"
    ) == ("float32")
    plan = plan_from(evidence, TimingTable({"a": seconds, "b": seconds}, spread={"a": 0.2, "b": 0.01}))
    assert (plan.compute("a"), plan.compute("b")) == ("float32", "bfloat16")


def test_with_fresh_timings_a_layer_changes_only_when_it_gains_more_than_the_spread() -> None:
    evidence = profile(a=SOUND, b=SOUND)
    spread = {"a": 0.1, "b": 0.1}
    first = plan_from(evidence, TimingTable.uniform("ab", relative={"bfloat16": 0.5}, float32=1.0))
    fresh = {"a": {"float32": 1.0, "bfloat16": 1.05}, "b": {"float32": 1.0, "bfloat16": 0.5}}
    again = plan_from(evidence, TimingTable(fresh, spread=spread), earlier=first)
    assert (again.compute("a"), again.compute("b")) == ("bfloat16", "bfloat16")
    clear = {"a": {"float32": 1.0, "bfloat16": 1.25}, "b": {"float32": 1.0, "bfloat16": 0.5}}
    changed = plan_from(evidence, TimingTable(clear, spread=spread), earlier=first)
    assert (changed.compute("a"), changed.compute("b")) == ("float32", "bfloat16")


def test_an_earlier_plan_that_does_not_fit_any_more_is_left() -> None:
    first = plan_from(profile(a=SOUND), TimingTable.uniform("a", relative=TWICE))
    assert first.compute("a") == "float16"
    hot = profile(a=with_role("activation", 1e5))
    assert plan_from(hot, TimingTable.uniform("a", relative=TWICE), earlier=first).compute("a") == "float32"


def test_the_same_evidence_gives_the_same_plan() -> None:
    evidence = profile(a=SOUND, b=SOUND, c=SOUND)
    timing = TimingTable.uniform("abc", relative={"bfloat16": 0.5, "float16": 0.5})
    scores = sensitive(**{path: {"bfloat16": 0.03**2, "float16": 0.004**2} for path in "abc"})
    plans = [plan_from(evidence, timing, sensitivity=scores) for _ in range(3)]
    assert plans[0] == plans[1] == plans[2]


def test_another_target_is_told_as_an_estimate() -> None:
    timing = TimingTable.uniform("a", relative={"bfloat16": 0.5})
    plan = plan_from(profile(a=SOUND), timing, target="cuda:ampere")
    assert (plan.target, plan.default.detail[:28]) == ("cuda:ampere", "an estimate for cuda:ampere:")
    slow = plan_from(profile(a=SOUND), TimingTable.uniform("a", relative={"bfloat16": 2.0}), target="cpu:avx2")
    assert "on cpu:avx2 (an estimate)" in slow.default.detail


def test_float8_is_taken_only_where_its_rounding_is_known() -> None:
    timing = TimingTable.uniform("a", relative={"bfloat16": 0.5, "float8_e4m3fn": 0.3})
    assert plan_from(profile(a=SOUND), timing).compute("a") == "bfloat16"
    known = sensitive(a={"bfloat16": 0.0, "float8_e4m3fn": 0.01**2})
    plan = plan_from(profile(a=SOUND), timing, sensitivity=known)
    assert (plan.compute("a"), plan.default.compute, plan.loss_scale) == ("float8_e4m3fn", "bfloat16", None)


layer_of_a_problem = st.fixed_dictionaries(
    {
        "times": st.tuples(*[st.floats(0.05, 2.0)] * 3),
        "cast": st.floats(0.0, 0.04),
        "scores": st.tuples(*[st.floats(0.0, 1.0)] * 2),
        "largest": st.sampled_from([1.0, 1.0, 1e5]),
        "gradient": st.sampled_from([2.0**-3, 2.0**-30, 2.0**14]),
    }
)


@settings(deadline=None, max_examples=150)
@given(st.lists(layer_of_a_problem, min_size=1, max_size=6), st.floats(0.01, 2.0))
def test_the_plan_is_the_best_that_range_and_tolerance_allow(layers: list[dict[str, Any]], allowed: float) -> None:
    """Against all assignments at all loss scales, tried one by one."""
    check_optimum(layers, allowed)


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(st.lists(layer_of_a_problem, min_size=9, max_size=10), st.floats(0.01, 2.0))
def test_the_plan_is_the_best_for_ten_layers(layers: list[dict[str, Any]], allowed: float) -> None:
    check_optimum(layers, allowed)


def check_optimum(layers: list[dict[str, Any]], allowed: float) -> None:
    formats = ("float32", "bfloat16", "float16")
    paths = [f"l{number}" for number in range(len(layers))]
    seconds = {
        path: {
            name: t + (layer["cast"] if name != "float32" else 0.0)
            for name, t in zip(formats, layer["times"], strict=True)
        }
        for path, layer in zip(paths, layers, strict=True)
    }
    timing = TimingTable(seconds, casts={path: layer["cast"] for path, layer in zip(paths, layers, strict=True)})
    evidence = profile(
        **{
            path: {"activation": [layer["largest"]], "activation_gradient": [layer["gradient"]]}
            for path, layer in zip(paths, layers, strict=True)
        }
    )
    scores = {
        path: {name: LayerSensitivity(s) for name, s in zip(formats[1:], layer["scores"], strict=True)}
        for path, layer in zip(paths, layers, strict=True)
    }
    budget = allowed**2
    known = Sensitivity(scores, loss=0.0, loss_noise=allowed / 0.1)
    plan = plan_from(evidence, timing, sensitivity=known)
    chosen = {path: plan.compute(path) for path in paths}

    def cost(assignment: Mapping[str, str]) -> float:
        total, before = 0.0, "float32"
        for path, layer in zip(paths, layers, strict=True):
            name = assignment[path]
            total += layer["times"][formats.index(name)] + (layer["cast"] if name != before else 0.0)
            before = name
        return total

    def fits(assignment: Mapping[str, str], scale: float) -> bool:
        lowered = [(path, name) for path, name in assignment.items() if name != "float32"]
        if math.fsum(scores[path][name].score for path, name in lowered) > budget * (1 + 1e-12):
            return False
        return all(range_gate(evidence, path, name, scale if name == "float16" else 1.0).fits for path, name in lowered)

    scale = plan.loss_scale.initial if plan.loss_scale is not None else 1.0
    assert fits(chosen, scale)
    windows = {path: loss_scale_window(evidence, path, "float16") for path in paths}
    best = math.inf
    for names in itertools.product(formats, repeat=len(paths)):
        assignment = dict(zip(paths, names, strict=True))
        lowered = [windows[path] for path, name in assignment.items() if name == "float16"]
        if any(window is None for window in lowered):
            continue
        lowest = max((window[0] for window in lowered if window), default=1.0)
        if cost(assignment) < best and fits(assignment, lowest):
            best = cost(assignment)
    assert cost(chosen) <= best * 1.02 * (1 + 1e-9)

"""The planner's arithmetic on made-up evidence: range before time, time before anything else."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfwise.core.histogram import ExponentHistogram
from halfwise.core.planner import (
    HEADROOM,
    LARGEST_UNDERFLOW,
    LEAST_GAIN,
    Because,
    float32_plan,
    loss_scale_for,
    plan_from,
    range_gate,
)
from halfwise.core.profile import Profile, Role
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


@pytest.mark.parametrize(
    ("layer", "fits"),
    [
        (SOUND, True),
        (with_role("activation", 7000.0), True),
        (with_role("activation", 65504.0 / HEADROOM * 1.3), False),
        (with_role("weight", 9000.0 * 1.3), False),
        (with_role("activation", 1.0, math.inf), False),
        (with_role("weight_gradient", 1.0, math.nan), False),
        (with_role("activation_gradient", 10.0), False),  # times 1024 and the headroom: 81920
        (with_role("activation_gradient", 5.0), True),
        (with_role("weight_gradient", 1e-12, 1.0), False),
        ({**SOUND, "weight_gradient": [1.0] * 99 + [1e-12]}, True),
    ],
)
def test_range_gate_for_float16_at_loss_scale_1024(layer: dict[str, list[float]], fits: bool) -> None:
    verdict = range_gate(profile(layer=layer), "layer", "float16", 1024.0)
    assert verdict.fits is fits
    assert (verdict.detail == "") is fits


def test_bfloat16_holds_what_float16_cannot() -> None:
    evidence = profile(layer=with_role("activation", 1e6))
    assert range_gate(evidence, "layer", "bfloat16").fits
    assert "65504" in range_gate(evidence, "layer", "float16").detail


def test_loss_scale_is_the_middle_of_the_window() -> None:
    evidence = profile(layer=with_role("activation_gradient", *[2.0**-20] * 10, 2.0**-4))
    timing = TimingTable.uniform(["layer"], relative=TWICE)
    scale = loss_scale_for(evidence, ["layer"], "float16", timing)
    assert range_gate(evidence, "layer", "float16", scale).fits
    window = [2.0**k for k in range(25) if range_gate(evidence, "layer", "float16", 2.0**k).fits]
    assert scale == window[len(window) // 2]
    assert loss_scale_for(evidence, ["layer"], "bfloat16", timing) == 1.0


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
    assert plan_from(profile(a=SOUND, head=SOUND), timing).compute("a") == "float16"
    assert plan_from(profile(a=SOUND, head=SOUND), timing, kept=KEPT).compute("a") == "bfloat16"


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

"""Plans: matching, comparison, checks against a model's paths."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Change, Default, Plan, Rule
from halfwise.errors import PlanError


def plan(*rules: Rule, default: str = "bfloat16") -> Plan:
    return Plan(default=Default(compute=default), layers=rules)


def test_exact_path_comes_before_patterns() -> None:
    p = plan(Rule(pattern="encoder.*", compute="float16"), Rule(path="encoder.1", compute="float32"))
    assert p.compute("encoder.1") == "float32"
    assert p.compute("encoder.2") == "float16"


def test_one_star_stays_within_a_component_and_two_cross_dots() -> None:
    rule = Rule(pattern="encoder.*.norm", compute="float32")
    assert rule.matches("encoder.3.norm")
    assert not rule.matches("encoder.3.mlp.norm")
    assert Rule(pattern="encoder.**.norm", compute="float32").matches("encoder.3.mlp.norm")
    assert not Rule(pattern="a.b", compute="float32").matches("aXb")


def test_a_rule_holds_for_what_the_module_encloses() -> None:
    p = plan(Rule(path="encoder", compute="float32"), Rule(path="encoder.2", compute="float16"))
    assert p.compute("encoder.1.fc") == "float32"
    assert p.compute("encoder.2.fc") == "float16"
    assert p.compute("encoders") == "bfloat16"


def test_a_rule_for_the_whole_model() -> None:
    p = plan(Rule(path="", compute="float16"), default="float32")
    assert p.compute("any.module") == "float16"


def test_contradicting_patterns_are_an_error_and_agreeing_ones_are_not() -> None:
    p = plan(Rule(pattern="a.*", compute="float32"), Rule(pattern="*.norm", compute="float16"))
    with pytest.raises(PlanError, match=r"'a\.norm' is matched by the patterns 'a\.\*' and '\*\.norm'"):
        p.compute("a.norm")
    agreeing = plan(Rule(pattern="a.*", compute="float32"), Rule(pattern="*.norm", compute="float32", reason="range"))
    assert agreeing.compute("a.norm") == "float32"


def test_names_of_modules_that_do_not_exist_are_given() -> None:
    p = Plan(
        model="Big", layers=(Rule(path="encoder.fc3", compute="float32"), Rule(pattern="decoder.*", compute="float32"))
    )
    with pytest.raises(
        PlanError, match=r"'Big'.*'Small' does not have: 'encoder\.fc3', 'decoder\.\*'.*did you mean 'encoder\.fc'"
    ):
        p.check_paths(["", "encoder", "encoder.fc"], "Small")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rule(compute="float32"),
        lambda: Rule(path="a", pattern="a", compute="float32"),
        lambda: Rule(path="a", compute="float64"),
        lambda: Rule(path="a", compute="float32", reason="because"),  # type: ignore[arg-type]
        lambda: Rule(path="a", compute="float32", parameters="half"),
        lambda: Default(compute="half"),
        lambda: Default(compute=None),  # type: ignore[arg-type]
        lambda: Plan.manual(["a"]),  # type: ignore[arg-type]
        lambda: Plan.manual(default=None),  # type: ignore[arg-type]
        lambda: plan(Rule(path="a", compute="float32"), Rule(path="a", compute="float16")),
    ],
)
def test_wrong_entries_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(PlanError):
        make()


def test_manual_plan_gets_a_loss_scale_only_for_float16() -> None:
    assert Plan.manual({"a": "float16"}).loss_scale == LossScaleSettings()
    assert Plan.manual({"a": "float32"}, default="bfloat16").loss_scale is None
    assert Plan.manual({"a.*": "float32"}).layers[0].pattern == "a.*"


def test_diff_names_every_difference_and_nothing_else() -> None:
    before = Plan(
        default=Default(compute="float16"),
        loss_scale=LossScaleSettings(),
        layers=(Rule(path="a", compute="float32"), Rule(path="b", compute="float16", detail="x")),
    )
    after = Plan(
        target="cuda:ampere",
        default=Default(compute="bfloat16"),
        loss_scale=LossScaleSettings(hysteresis=2),
        layers=(Rule(path="b", compute="float16", detail="y"), Rule(path="c", compute="float32", reason="range")),
    )
    assert set(before.diff(after)) == {
        Change("plan", "target", "here", "cuda:ampere"),
        Change("default", "compute", "float16", "bfloat16"),
        Change("loss_scale", "hysteresis", 1, 2),
        Change("a", "compute", "float32", None),
        Change("a", "reason", "manual", None),
        Change("c", "compute", None, "float32"),
        Change("c", "reason", None, "range"),
    }
    assert before.diff(before) == ()
    assert str(Change("a", "compute", "float32", "float16")) == "a: compute float32 -> float16"


def test_with_rule_replaces_the_entry_of_the_same_name() -> None:
    p = plan(Rule(path="a", compute="float16"), Rule(path="b", compute="float16"))
    changed = p.with_rule(Rule(path="a", compute="float32"))
    assert [(r.name, r.compute) for r in changed.layers] == [("b", "float16"), ("a", "float32")]
    assert p.compute("a") == "float16"

"""The smallest change of a plan that takes a suspect out of half precision, on a tree that is written out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from halfwise.core.demotion import demoted, float32_everywhere
from halfwise.core.diagnosis import Suspect
from halfwise.core.plan import Default, Plan, Rule

HALF = Plan.manual(default="float16")


@dataclass
class Tree:
    """`inside`: module -> modules directly inside it; `also`: path -> all paths of its module."""

    inside: Mapping[str, list[str]]
    also: Mapping[str, list[str]] = field(default_factory=dict)

    def names(self, path: str) -> list[str]:
        known = path in self.inside or any(path in inside for inside in self.inside.values())
        return self.also.get(path, [path] if known else [])

    def children(self, path: str) -> list[str]:
        return self.inside.get(path, [])


TREE = Tree({"": ["block", "head"], "block": ["block.q", "block.k"]})


def suspect(module: str, module_class: str = "X") -> Suspect:
    return Suspect(module, "matmul", "forward", "a.py:1", "float16", "inf", 60.0, module_class)


def computes(plan: Plan) -> dict[str, str]:
    return {rule.name: rule.compute for rule in plan.layers}


def test_a_leaf_is_raised_alone_with_the_reason_and_its_numbers() -> None:
    plan = demoted(HALF, suspect("head"), TREE)
    (rule,) = plan.layers
    assert (rule.path, rule.compute, rule.reason) == ("head", "float32", "healed")
    assert rule.evidence == {"largest_input": 60.0}
    assert rule.detail == "matmul gave inf in float16 (forward); largest input 60"
    assert plan.default == HALF.default
    assert plan.loss_scale == HALF.loss_scale


def test_a_containers_own_operations_are_raised_and_its_children_stay() -> None:
    plan = demoted(HALF, suspect("block"), TREE)
    assert computes(plan) == {"block.q": "float16", "block.k": "float16", "block": "float32"}


def test_children_inherit_what_held_for_them_before() -> None:
    before = Plan.manual({"block": "bfloat16", "block.k": "float32"}, default="float16")
    after = demoted(before, suspect("block"), TREE)
    assert computes(after) == {"block": "float32", "block.k": "float32", "block.q": "bfloat16"}


def test_the_models_own_operations() -> None:
    plan = demoted(HALF, suspect("", "Net"), TREE)
    assert computes(plan) == {"block": "float16", "head": "float16", "": "float32"}
    assert plan.default.compute == "float16"


def test_code_outside_all_modules_is_raised_and_the_model_stays() -> None:
    before = replace(HALF, default=Default(compute="float16", reason="policy", parameters="bfloat16"))
    plan = demoted(before, suspect("", ""), TREE)
    assert (plan.default.compute, plan.default.reason, plan.default.parameters) == ("float32", "healed", "bfloat16")
    assert computes(plan) == {"": "float16"}
    assert plan.compute("block.q") == "float16"
    assert plan.rule_for("head").reason == "policy"


def test_a_models_own_rule_outlives_the_default() -> None:
    plan = demoted(HALF.with_rule(Rule(path="", compute="bfloat16")), suspect("", ""), TREE)
    assert computes(plan) == {"": "bfloat16"}


def test_all_rules_for_one_module_are_raised() -> None:
    shared = Tree({"": ["a", "b"]}, also={"a": ["a", "b"], "b": ["a", "b"]})
    plan = demoted(HALF.with_rule(Rule(pattern="b*", compute="bfloat16")), suspect("a"), shared)
    assert computes(plan) == {"b*": "bfloat16", "b": "float32", "a": "float32"}


def test_a_child_that_any_of_its_paths_has_a_rule_for_keeps_it() -> None:
    shared = Tree({"a": ["a.q"]}, also={"a.q": ["a.q", "b.q"]})
    plan = demoted(HALF.with_rule(Rule(path="b.q", compute="bfloat16")), suspect("a"), shared)
    assert computes(plan) == {"b.q": "bfloat16", "a": "float32"}


def test_everything() -> None:
    plan = float32_everywhere(HALF.with_rule(Rule(path="head", compute="float16")), "why")
    assert not plan.uses("float16")
    assert plan.loss_scale is None
    assert plan.layers == ()
    assert (plan.default.reason, plan.default.detail) == ("healed", "why")

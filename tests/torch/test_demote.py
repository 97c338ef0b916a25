"""The smallest change that takes a suspect out of half precision."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.core import demotion
from halfwise.core.diagnosis import Suspect
from halfwise.core.plan import Plan
from halfwise.torch.demote import ModuleTree

HALF = hw.Plan.manual(default="float16")


def suspect(module: str, module_class: str = "X") -> Suspect:
    return Suspect(module, "aten.mm", "forward", "a.py:1", "float16", "inf", 60.0, module_class)


def demoted(plan: Plan, model: nn.Module, culprit: Suspect) -> Plan:
    return demotion.demoted(plan, culprit, ModuleTree(model))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        scores = q @ k.mT
        self.seen = [q.dtype, scores.dtype]
        return scores


def test_a_leaf_is_raised_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    plan = demoted(HALF, model, suspect("1"))
    assert [(r.path, r.compute, r.reason) for r in plan.layers] == [("1", "float32", "healed")]
    assert plan.layers[0].evidence == {"largest_input": 60.0}


def test_a_containers_own_operations_are_raised_and_its_children_stay() -> None:
    block = Block()
    model = nn.Sequential(block)
    plan = demoted(HALF, model, suspect("0"))
    assert {r.path: r.compute for r in plan.layers} == {"0.q": "float16", "0.k": "float16", "0": "float32"}
    weights: list[torch.dtype] = []
    block.q.register_forward_hook(lambda m, a, out: weights.append(out.dtype))
    with hw.apply(model, plan), torch.autocast("cpu", dtype=torch.float16):
        model(torch.ones(2, 4))
        assert block.seen == [torch.float32, torch.float32]  # handed back in the caller's precision


def test_children_with_rules_of_their_own_keep_them() -> None:
    model = nn.Sequential(Block())
    plan = demoted(HALF.with_rule(hw.Rule(path="0.q", compute="bfloat16")), model, suspect("0"))
    assert {r.path: r.compute for r in plan.layers} == {"0.q": "bfloat16", "0.k": "float16", "0": "float32"}


def test_attention_is_raised_as_a_whole() -> None:
    model = nn.Sequential(nn.MultiheadAttention(4, 2))
    assert [r.path for r in demoted(HALF, model, suspect("0")).layers] == ["0"]


def test_code_outside_all_modules_is_raised_and_the_model_stays() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    plan = demoted(HALF, model, suspect("", module_class=""))
    assert plan.default.compute == "float32"
    assert plan.default.reason == "healed"
    assert plan.compute("0") == "float16"
    assert plan.uses("float16")


def test_the_root_modules_own_operations() -> None:
    plan = demoted(HALF, Block(), suspect("", module_class="Block"))
    assert plan.default.compute == "float16"
    assert {r.path: r.compute for r in plan.layers} == {"q": "float16", "k": "float16", "": "float32"}


def test_shared_modules_get_entries_that_agree() -> None:
    block = Block()
    block.k = block.q
    model = nn.Sequential(block, block)
    plan = HALF.with_rule(hw.Rule(pattern="1.*", compute="bfloat16"))
    within = demoted(plan, model, suspect("0"))
    assert {r.name: r.compute for r in within.layers} == {"1.*": "bfloat16", "0": "float32"}
    leaf = demoted(plan, model, suspect("0.q"))
    assert {r.name: r.compute for r in leaf.layers} == {
        "1.*": "bfloat16",
        "1.q": "float32",
        "1.k": "float32",
        "0.q": "float32",
    }
    for changed in (within, leaf):
        hw.apply(model, changed).remove()


def test_the_tree_names_each_module_by_all_its_paths() -> None:
    block = Block()
    block.k = block.q
    tree = ModuleTree(nn.Sequential(block, nn.MultiheadAttention(4, 2), block))
    assert list(tree.names("2")) == ["0", "2"]
    assert list(tree.names("2.k")) == ["0.q", "0.k", "2.q", "2.k"]
    assert list(tree.children("2")) == ["0.q"]
    assert list(tree.children("")) == ["0", "1"]
    assert list(tree.children("1")) == []  # attention computes its projections itself
    assert list(tree.names("3")) == list(tree.children("3")) == []

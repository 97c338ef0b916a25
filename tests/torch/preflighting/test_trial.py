"""Trials: which modules are moved, what stays, and what is in force around a run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfwise.core.plan import Plan
from halfwise.torch.apply import apply
from halfwise.torch.preflighting.regions import setting_of
from halfwise.torch.preflighting.trial import Trial, first_trial, without_plan

SETTING = setting_of("mixed_float16", "here", "cpu")


class Block(nn.Module):
    """A module with code of its own around two children, one in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.more = nn.ModuleList([nn.Linear(4, 4)])
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x) * x
        y: Tensor = self.more[0](h)
        self.seen = [h.dtype, self.fc(x).dtype, y.dtype]
        return y


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), Block(), nn.MultiheadAttention(4, 1))


def test_first_the_modules_own_code_then_all_of_it_then_nothing_is_left() -> None:
    model = _model()
    first = Trial().with_float32(model, "1", "float16")
    assert first is not None
    assert first.rules == {"1": "float32", "1.fc": "float16", "1.more.0": "float16"}
    second = first.with_float32(model, "1", "float16")
    assert second is not None
    assert second.rules == {"1": "float32"}
    assert second.with_float32(model, "1", "float16") is None


def test_a_layer_and_a_module_that_uses_its_childrens_weights_are_moved_at_once() -> None:
    model = _model()
    for path in ("0", "2"):
        moved = Trial().with_float32(model, path, "float16")
        assert moved is not None
        assert moved.rules == {path: "float32"}
        assert moved.with_float32(model, path, "float16") is None
    assert Trial().with_float32(model, "nowhere", "float16") is None


def test_rules_within_are_kept_when_the_own_code_is_moved() -> None:
    moved = Trial({"1.fc": "float32"}).with_float32(_model(), "1", "float16")
    assert moved is not None
    assert moved.rules == {"1": "float32", "1.fc": "float32", "1.more.0": "float16"}


def test_own_code_in_float32_around_children_in_half() -> None:
    block = Block()
    model = nn.Sequential(nn.Linear(4, 4), block)
    trial = Trial().with_float32(model, "1", "float16")
    assert trial is not None
    with trial.around(model, SETTING), trial.region(SETTING):
        model(torch.ones(2, 4))
    assert block.seen == [torch.float32, torch.float32, torch.float32]  # children in half hand back float32
    with trial.region(SETTING):
        model(torch.ones(2, 4))
    assert block.seen[1] is torch.float16


def test_the_loss_outside_the_region() -> None:
    model = nn.Linear(4, 4)
    inside: list[torch.dtype] = []
    model.register_forward_hook(lambda _module, _args, output: inside.append(output.dtype))
    trial = Trial(loss_outside=True)
    with trial.around(model, SETTING), trial.region(SETTING):
        output = model(torch.ones(2, 4))
        assert output.dtype is torch.float32
        assert (output @ output.t()).dtype is torch.float32
    assert torch.equal(output, output.half().float())  # it was computed in half


def test_the_plan_in_force_is_the_first_trial() -> None:
    model = _model()
    assert first_trial(model) == Trial()
    with apply(model, Plan.manual({"1.fc": "float32"}, default="bfloat16")):
        found = first_trial(model)
        assert found.rules == {"": "bfloat16", "1.fc": "float32"}
        assert found.in_force
        with without_plan(model) as removed:
            assert len(removed) == 2
            assert "forward" not in model[1].fc.__dict__
        assert "forward" in model[1].fc.__dict__
        moved = found.with_float32(model, "0", "float16")
        assert moved is not None
        assert not moved.in_force

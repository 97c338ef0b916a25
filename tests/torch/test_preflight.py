"""`hw.preflight`: nothing of the user's is changed, every way of calling it, and what it says of each kind of trouble.

Whether it flags and is silent where it should is `tests/torch/preflighting/test_cases.py`.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from halfwise.core.plan import Plan
from halfwise.errors import PolicyError, UsageError
from halfwise.torch.apply import apply
from halfwise.torch.preflight import preflight


class Net(nn.Module):
    """Layers that keep state of every kind; `hot` overflows float16 where it is made to."""

    def __init__(self, *, overflows: bool = False) -> None:
        super().__init__()
        self.stem, self.norm, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5)
        self.hot, self.head = nn.Linear(16, 16), nn.Linear(16, 4)
        if overflows:
            nn.init.normal_(self.hot.weight, std=1.5e4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.norm(self.stem(x))))
        y: Tensor = self.head(functional.layer_norm(self.hot(h), (16,)))
        return y


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def _closure(model: nn.Module, seed: int = 0) -> partial[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(32, 8, generator=generator), torch.randint(0, 4, (32,), generator=generator)
    return partial(_loss, model, x, y)


@pytest.mark.parametrize("overflows", [False, True])
def test_nothing_of_the_users_is_changed(overflows: bool) -> None:
    model = Net(overflows=overflows)
    model.drop.eval()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    _closure(model)().backward()
    optimizer.step()
    state, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    gradients = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    generator = torch.get_rng_state()

    def closure() -> Tensor:
        model.train()
        return _closure(model)()

    found = preflight(model, closure, optimizer=optimizer)
    assert found.ready is not overflows
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(moments)
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert all(g is None or torch.equal(g, v) for g, v in zip(gradients, values, strict=True) if v is not None)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert torch.equal(torch.get_rng_state(), generator)
    assert not model.drop.training
    assert not torch.is_autocast_enabled("cpu")


def test_numbers_of_a_sound_model() -> None:
    model = Net()
    found = preflight(model, [_closure(model), _closure(model, 1)])
    assert found.verdict == "ready"
    assert (found.model, found.framework, found.policy, found.target) == (
        "Net",
        "torch",
        "mixed_float16",
        "cuda:ampere",
    )
    assert found.batches == 2
    assert found.loss is not None
    assert found.loss_float32 == pytest.approx(found.loss, rel=1e-2)
    assert found.loss != found.loss_float32
    assert found.loss_scale is not None
    assert 1.0 <= found.loss_scale.lowest <= found.loss_scale.highest == found.loss_scale.used
    assert found.loss_scale.highest == found.loss_scale.largest / 8
    rows = {row.path: row for row in found.layers}
    assert list(rows) == ["stem", "norm", "drop", "hot", "head"]
    assert rows["stem"].formats == ("float16",)
    for name in ("stem", "norm", "hot", "head"):
        assert rows[name].cosine == pytest.approx(1.0, abs=1e-3)
        assert 0.0 < (rows[name].relative_error or 0.0) < 0.05
    assert rows["drop"].cosine is None
    assert (found.cured, found.alternative) == (None, "")
    assert found.plan is not None
    assert found.plan.default.compute == "float16"
    assert found.plan.loss_scale is not None
    assert found.plan.loss_scale.initial == found.loss_scale.highest
    assert not found.plan.layers


def test_the_cure_keeps_the_culprit_in_float32_and_is_verified() -> None:
    model = Net(overflows=True)
    found = preflight(model, _closure(model))
    assert [(h.kind, h.module, h.operation, h.direction) for h in found.hazards] == [
        ("overflow", "hot", "aten.addmm", "forward")
    ]
    assert found.hazards[0].source.startswith("test_preflight.py:")
    assert "float16 holds 65504" in found.hazards[0].detail
    assert found.cured is True
    assert found.alternative == "mixed_bfloat16"
    assert found.plan is not None
    assert [(rule.path, rule.compute, rule.reason) for rule in found.plan.layers] == [("hot", "float32", "range")]
    with apply(model, found.plan):
        assert preflight(model, _closure(model)).ready
        assert math.isfinite(_closure(model)().detach())


def test_a_plan_in_force_is_what_is_examined_and_stays_in_force() -> None:
    model = Net(overflows=True)
    full = preflight(model, _closure(model), policy="float32").loss_float32
    with apply(model, Plan.manual({"hot": "bfloat16"}, default="float16")) as applied:
        found = preflight(model, _closure(model))
        assert found.ready
        assert found.loss_float32 == full  # the plan is not in force in what it is compared with
        assert found.loss != full
        formats = {row.path: row.formats for row in found.layers}
        assert (formats["stem"], formats["hot"]) == (("float16",), ("bfloat16",))
        assert not applied.never_ran()
        assert applied._overrides["hot"] is model.hot.__dict__["forward"]
    assert "forward" not in model.hot.__dict__


def test_a_loss_scale_that_overflows() -> None:
    model = Net()
    suits = preflight(model, _closure(model)).loss_scale
    assert suits is not None
    found = preflight(model, _closure(model), loss_scale=suits.largest * 64)
    assert [hazard.kind for hazard in found.hazards] == ["loss_scale"]
    assert found.hazards[0].direction == "backward"
    assert found.cured is True
    assert preflight(model, _closure(model), loss_scale=suits.largest).ready


def test_other_policies() -> None:
    model = Net(overflows=True)
    for policy in ("mixed_bfloat16", "bf16-mixed", "tensorfloat32", "float32"):
        found = preflight(model, _closure(model), policy=policy)
        assert found.ready, found.hazards
        assert found.loss_scale is None
    rows = preflight(model, _closure(model), policy="tensorfloat32").layers
    assert rows[0].formats == ("tensorfloat32", "float32")
    found = preflight(model, _closure(model), policy="float8", target="cuda:hopper")
    assert found.ready
    assert found.layers[0].formats[0] == "float8"


def test_noise_that_a_model_adds_is_the_same_in_every_precision() -> None:
    class Noisy(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.stem(x)
            noise = torch.randn(217, dtype=h.dtype)  # torch draws others in half where the size is no multiple of 16
            y: Tensor = self.head(h + functional.pad(noise, (0, h.numel() - 217)).view_as(h))
            return y

    model = Noisy()
    for policy, target in (("mixed_float16", "cuda:ampere"), ("mixed_float16", "here"), ("mixed_bfloat16", "here")):
        found = preflight(model, _closure(model), policy=policy, target=target)
        assert found.ready
        assert max(row.relative_error or 0.0 for row in found.layers) < 0.05


def test_a_model_that_fails_in_float32_too() -> None:
    model = Net()
    x = torch.full((4, 8), 1e38)
    found = preflight(model, lambda: (model.stem(x) * 100).sum())
    assert [hazard.kind for hazard in found.hazards] == ["unsound_in_float32"]
    assert found.plan is None
    assert not found.ready
    with torch.no_grad():
        model.stem.bias[0] = math.nan
    found = preflight(model, _closure(model))
    assert (found.hazards[0].kind, found.hazards[0].module) == ("unsound_in_float32", "stem")


def test_what_raises_in_float32_is_raised() -> None:
    model = Net()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        preflight(model, lambda: model(torch.ones(4, 9)).sum())
    with pytest.raises(UsageError, match="must return the loss"):
        preflight(model, lambda: None)


def test_code_that_goes_to_half_itself_is_not_compared() -> None:
    class Half(Net):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(torch.relu(self.stem(x)).half())
            return y

    model = Half()
    found = preflight(model, _closure(model))
    assert found.ready
    assert "the code does not run in float32" in found.notes[0]
    assert all(row.cosine is None for row in found.layers)


def test_trainable_weights_in_half_and_what_their_optimizer_loses() -> None:
    model = Net()
    model.hot.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    found = preflight(model, _closure(model), policy="mixed_bfloat16", optimizer=optimizer)
    assert [(hazard.kind, hazard.module) for hazard in found.hazards] == [
        ("half_weights", "hot"),
        ("dead_updates", "hot"),
    ]
    rows = {row.path: row for row in found.layers}
    assert (rows["hot"].dead_updates or 0.0) > 0.9
    assert rows["head"].dead_updates is None
    assert not optimizer.state_dict()["state"]
    optimizer = torch.optim.SGD(model.parameters(), 1e3)
    found = preflight(model, _closure(model), policy="mixed_bfloat16", optimizer=optimizer)
    assert [hazard.kind for hazard in found.hazards] == ["half_weights"]


def test_an_optimizers_epsilon_that_float16_does_not_have() -> None:
    model = Net()
    model.hot.half()
    found = preflight(model, _closure(model), optimizer=torch.optim.Adam(model.parameters()))
    assert [hazard.kind for hazard in found.hazards][:2] == ["half_weights", "epsilon"]
    assert "Adam's eps 1e-08 is 0 in float16, which hot.weight is stored in" in found.hazards[1].detail
    found = preflight(model, _closure(model), optimizer=torch.optim.Adam(model.parameters(), eps=1e-4))
    assert "epsilon" not in [hazard.kind for hazard in found.hazards]
    sound = Net()
    assert preflight(sound, _closure(sound), optimizer=torch.optim.Adam(sound.parameters())).ready


def test_the_target_has_no_units_for_it() -> None:
    model = Net()
    found = preflight(model, _closure(model), policy="mixed_bfloat16", target="cuda:volta")
    assert [hazard.kind for hazard in found.hazards] == ["not_native"]
    assert found.loss is not None


def test_a_compiled_model_runs_eagerly() -> None:
    model = Net(overflows=True)
    compiled: Any = torch.compile(model, backend="eager")
    found = preflight(compiled, _closure(compiled))
    assert [(h.kind, h.module) for h in found.hazards] == [("overflow", "hot")]
    assert found.model == "Net"


def test_a_caller_in_a_region_and_without_gradients() -> None:
    model = Net()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found = preflight(model, _closure(model))
    assert found.ready
    assert found.layers[0].formats == ("float16",)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "auto"}, PolicyError, "mixed_bfloat16"),
        ({"policy": "float16"}, PolicyError, "mixed_float16"),
        ({"target": "cuda:pascal"}, PolicyError, "cuda:ampere"),
        ({"loss_scale": 1000.0}, UsageError, "power of two"),
        ({"loss_scale": -2.0}, UsageError, "power of two"),
        ({"loss_scale": True}, UsageError, "power of two"),
        ({"optimizer": "adam"}, UsageError, "optimizer"),
    ],
)
def test_arguments_that_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = Net()
    with pytest.raises(error, match=message):
        preflight(model, _closure(model), **arguments)
    with pytest.raises(UsageError, match="Module"):
        preflight(len, _closure(model))  # type: ignore[arg-type]

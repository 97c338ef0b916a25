"""Carrying out plans: what really ran is read from the tensors, and the model is restored exactly."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfwise.torch as hw
from halfwise.errors import PlanError, UsageError


class Spy(nn.Linear):
    """Remembers the dtypes that it computed in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen.append((x.dtype, y.dtype))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Spy(4, 8), nn.Tanh(), Spy(8, 8))
        self.head = Spy(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


def computed(model: Net) -> list[torch.dtype]:
    spies = [m for m in model.modules() if isinstance(m, Spy)]
    return [spy.seen[-1][1] for spy in spies]


X = torch.linspace(-1, 1, 12).reshape(3, 4)
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (hw.Plan.manual(), [F32, F32, F32]),
        (hw.Plan.manual(default="bfloat16"), [BF16, BF16, BF16]),
        (hw.Plan.manual({"body.2": "float32"}, default="float16"), [F16, F32, F16]),
        (hw.Plan.manual({"body": "float16"}), [F16, F16, F32]),
        (hw.Plan.manual({"body": "float32", "body.2": "bfloat16"}, default="float16"), [F32, BF16, F16]),
        (hw.Plan.manual({"*": "float32"}, default="bfloat16"), [F32, F32, F32]),
        (hw.Plan.manual({"body.*": "bfloat16"}), [BF16, BF16, F32]),
    ],
)
def test_modules_compute_in_the_planned_format(plan: hw.Plan, expected: list[torch.dtype]) -> None:
    model = Net()
    with hw.apply(model, plan):
        output = model(X)
    assert computed(model) == expected
    assert output.dtype is F32  # nobody outside asked for half


@pytest.mark.parametrize(
    "plan", [hw.Plan.manual({"head": "float32"}, default="bfloat16"), hw.Plan.manual({"body": "bfloat16"})]
)
def test_gradients_reach_all_float32_weights(plan: hw.Plan) -> None:
    model = Net()
    with hw.apply(model, plan):
        model(X).square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is F32 and bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_float32_module_within_half_computes_as_float32_does() -> None:
    model = Net()
    half_input = X.to(BF16)
    reference = model.head(model.body(X).tanh().to(BF16).float())
    with hw.apply(model, hw.Plan.manual({"head": "float32"}, default="float32")), torch.autocast("cpu", dtype=BF16):
        assert model.head(model.body[0](half_input)).dtype is F32
    with hw.apply(model, hw.Plan.manual({"head": "float32"})), torch.autocast("cpu", enabled=False):
        assert torch.equal(model.head(model.body(X).tanh().to(BF16)), reference)


def test_the_model_is_restored_exactly() -> None:
    model = Net()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    handle = hw.apply(model, hw.Plan.manual({"head": "float32"}, default="bfloat16"))
    assert list(model.state_dict()) == keys
    handle.remove()
    handle.remove()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_a_second_plan_replaces_the_first_until_it_is_removed() -> None:
    model = Net()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    first = hw.apply(model, hw.Plan.manual({"head": "float32"}, default="float16"))
    second = hw.apply(model, hw.Plan.manual({"body.0": "float32"}, default="bfloat16"))
    model(X)
    assert computed(model) == [F32, BF16, BF16]
    second.remove()
    model(X)
    assert computed(model) == [F16, F16, F32]
    first.remove()
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == before


def test_a_plan_that_was_removed_meanwhile_does_not_come_back() -> None:
    model = Net()
    first = hw.apply(model, hw.Plan.manual({"head": "bfloat16"}))
    second = hw.apply(model, hw.Plan.manual({"body.0": "bfloat16"}))
    first.remove()
    model(X)
    assert computed(model) == [BF16, F32, F32]  # the second stays in force
    second.remove()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_model_in_training_keeps_its_rules() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hw.MixedPrecision(model, optimizer, hw.Plan.manual({"head": "float32"}, default="bfloat16")) as mp:
        with hw.apply(model, hw.Plan.manual()):
            model(X)
            assert computed(model) == [F32, F32, F32]
        hw.plan(model, lambda: model(X).square().mean())
        with mp.autocast(), torch.no_grad():
            model(X)
        assert computed(model) == [BF16, BF16, F32]
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_training_that_was_dropped_leaves_nothing_to_the_next() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hw.MixedPrecision(model, optimizer, hw.Plan.manual({"head": "bfloat16"}))
    gc.collect()
    hw.MixedPrecision(model, optimizer, hw.Plan.manual({"body.0": "bfloat16"})).close()
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_forward_that_was_wrapped_after_the_plan_computes_plainly_once_that_is_removed() -> None:
    model = Net()
    handle = hw.apply(model, hw.Plan.manual({"head": "bfloat16"}))
    planned = model.head.forward
    model.head.forward = lambda x: planned(x)  # type: ignore[method-assign]
    model(X)
    assert computed(model) == [F32, F32, BF16]
    handle.remove()
    model(X)
    assert computed(model) == [F32, F32, F32]


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Spy(4, 4)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def test_a_shared_modules_second_name() -> None:
    model = Twice()
    with hw.apply(model, hw.Plan.manual({"b": "bfloat16"})) as handle:
        model(X)
        assert model.a.seen[-1][1] is BF16
        assert handle.never_ran() == ()
    with hw.apply(model, hw.Plan.manual({"a": "bfloat16", "b": "bfloat16"})):
        model(X)
    with pytest.raises(PlanError, match="'a' and 'b' are two names of one module"):
        hw.apply(model, hw.Plan.manual({"a": "float32", "b": "bfloat16"}))
    assert "forward" not in model.a.__dict__


def test_a_module_that_is_called_module() -> None:
    outer, inner = Spy(4, 4), Spy(4, 4)
    model = nn.ModuleDict({"fc": outer, "module": nn.ModuleDict({"fc": inner})})
    with hw.apply(model, hw.Plan.manual({"module.fc": "bfloat16"}, default="float32")):
        assert (outer(X).dtype, inner(X).dtype) == (F32, F32)
        assert [spy.seen[-1][1] for spy in (outer, inner)] == [F32, BF16]


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        (nn.Linear(1, 1), "mixed_float16", r"plan is 'mixed_float16'; give a Plan: .*hw\.Plan\.manual"),
        ("m", hw.Plan.manual(), "model is 'm'; give a torch.nn.Module"),
    ],
)
def test_misuse_is_one_clear_error(model: nn.Module, plan: hw.Plan, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hw.apply(model, plan)


def test_a_forward_that_someone_put_on_the_instance_is_kept() -> None:
    model = Net()
    calls: list[int] = []
    original = model.head.forward

    def logged(x: Tensor) -> Tensor:
        calls.append(1)
        return original(x)

    model.head.forward = logged  # type: ignore[method-assign]
    with hw.apply(model, hw.Plan.manual({"head": "float32"}, default="bfloat16")):
        model(X)
    assert calls == [1]
    assert computed(model)[-1] is F32
    assert model.head.__dict__["forward"] is logged


def test_copies_use_their_own_weights() -> None:
    model = Net()
    hw.apply(model, hw.Plan.manual({"head": "float32"}, default="bfloat16"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert bool(torch.isfinite(twin(X)).all())
    assert computed(twin) == [BF16, BF16, F32]


def test_pickling_keeps_the_plan() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    hw.apply(model, hw.Plan.manual({"1": "float32"}, default="bfloat16"))
    expected = model(X)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), expected)


@pytest.mark.parametrize("first_compiled", [True, False], ids=["compiled, run, then planned", "planned, then compiled"])
def test_compiled_models_take_a_plan_and_give_it_back(first_compiled: bool) -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    plan = hw.Plan.manual({"2": "float32"}, default="bfloat16")
    full = plain(X)
    with hw.apply(plain, plan):
        mixed = plain(X)
    assert not torch.equal(full, mixed)
    compiled: Callable[[Tensor], Tensor] = torch.compile(plain, backend="aot_eager", fullgraph=True)
    if first_compiled:
        assert torch.equal(compiled(X), full)
    assert isinstance(compiled, nn.Module)
    with hw.apply(compiled, plan):
        assert torch.equal(compiled(X), mixed)
    assert torch.equal(compiled(X), full)
    torch.compiler.reset()


def test_checkpointed_activations_are_recomputed_in_the_same_precision() -> None:
    torch.manual_seed(0)
    model = Net()
    plan = hw.Plan.manual({"body.2": "float32"}, default="bfloat16")

    def gradients(use_checkpoint: bool) -> list[Tensor]:
        model.zero_grad()
        hidden = checkpoint(model.body, X, use_reentrant=False) if use_checkpoint else model.body(X)
        model.head(hidden).square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with hw.apply(model, plan), torch.autocast("cpu", dtype=BF16):
        expected, found = gradients(False), gradients(True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_frozen_half_weights_are_raised_for_a_float32_module() -> None:
    frozen, head = nn.Linear(4, 8), nn.Linear(8, 2)
    model = nn.Sequential(frozen, head)
    frozen.to(BF16).requires_grad_(False)
    expected = head(torch.nn.functional.linear(X, frozen.weight.float(), frozen.bias.float()))
    with hw.apply(model, hw.Plan.manual({"0": "float32"}, default="float32")):
        assert torch.equal(model(X), expected)
    assert frozen.weight.dtype is BF16


def test_nested_outputs_come_back_in_float32() -> None:
    model = nn.Sequential(nn.LSTM(4, 8, batch_first=True))
    with hw.apply(model, hw.Plan.manual({"0": "bfloat16"})):
        output, (hidden, cell) = model(X.reshape(1, 3, 4))
    assert {output.dtype, hidden.dtype, cell.dtype} == {F32}


def test_a_rule_that_never_ran_is_told() -> None:
    layer = nn.MultiheadAttention(8, 2)
    with hw.apply(layer, hw.Plan.manual({"out_proj": "float32"})) as handle:
        layer(*[torch.ones(3, 1, 8)] * 3)
        assert handle.never_ran() == ("out_proj",)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (hw.Plan.manual({"tail": "float32"}), "'tail'.*did you mean|does not have: 'tail'"),
        (hw.Plan.manual({"head": "float8_e4m3fn"}), "'head' asks for compute = 'float8_e4m3fn'"),
        (hw.Plan.manual(default="tensorfloat32"), "'default' asks for compute"),
        (hw.Plan.manual(framework="keras"), "framework 'keras'"),
        (
            hw.Plan(layers=(hw.Rule(path="head", compute="float32", parameters="bfloat16"),)),
            "'head' asks for parameters",
        ),
    ],
)
def test_what_cannot_be_executed_is_refused_by_name(plan: hw.Plan, message: str) -> None:
    model = Net()
    with pytest.raises(PlanError, match=message):
        hw.apply(model, plan)
    assert "forward" not in model.head.__dict__


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFWISE_DISABLE", "1")
    model = Net()
    with hw.apply(model, hw.Plan.manual(default="bfloat16")):
        model(X)
    assert computed(model) == [F32, F32, F32]


@pytest.mark.parametrize("path", ["_orig_mod.head", "module.head", "_orig_mod.module.head"])
def test_paths_that_were_read_off_a_wrapped_model(path: str) -> None:
    model = Net()
    with hw.apply(model, hw.Plan.manual({path: "float32"}, default="bfloat16")) as handle:
        model(X)
        assert [rule.path for rule in handle.plan.layers] == ["head"]
    assert computed(model) == [BF16, BF16, F32]

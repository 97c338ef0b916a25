"""The front door: what it accepts, what it refuses, and that it leaves no trace."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.errors import PlanError, PolicyError, UsageError

X = torch.linspace(-1, 1, 12).reshape(3, 4)
Y = torch.tensor([0, 1, 0])


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def loss_of(model: Callable[[Tensor], Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(X), Y)


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("float32", torch.float32),
        ("mixed_bfloat16", torch.bfloat16),
        ("bf16-mixed", torch.bfloat16),
        ("mixed_float16", torch.float16),
        ("16-mixed", torch.float16),
        (hw.Plan.manual({"2": "float16"}, default="bfloat16"), torch.float16),
    ],
)
def test_the_closure_runs_in_the_policys_precision(policy: Any, dtype: torch.dtype) -> None:
    model = network()
    seen = []

    def closure() -> tuple[Tensor, str]:
        output = model(X)
        seen.append(output.dtype)
        return nn.functional.cross_entropy(output, Y), "more"

    with hw.MixedPrecision(model, sgd(model), policy) as mp:
        result = mp.step(closure)
    assert seen[-1] is dtype
    assert result.applied
    assert result.output == "more"
    assert result.loss.shape == ()
    assert not result.loss.requires_grad
    assert result.grad_norm > 0
    assert (result.loss_scale == 1.0) is (not (mp.plan is not None and mp.plan.uses("float16")))


def test_a_plan_file_is_a_policy(tmp_path: Path) -> None:
    model = network()
    file = tmp_path / "plan.toml"
    hw.Plan.manual({"2": "float32"}, default="bfloat16").save(file)
    for policy in (file, str(file)):
        with hw.MixedPrecision(model, sgd(model), policy) as mp:
            assert mp.policy == "plan"
            assert mp.plan == hw.Plan.load(file)


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ("fast", PolicyError, "unknown policy 'fast'"),
        ("float16", PolicyError, "mixed_float16"),
        (3, PolicyError, "policy is 3"),
        ("missing.toml", PlanError, "cannot read the plan 'missing.toml'"),
        (hw.Plan.manual({"9": "float32", "head": "float16"}), PlanError, r"'Sequential' does not have: '9', 'head'"),
    ],
)
def test_policies_that_cannot_be_used(policy: Any, error: type[Exception], message: str) -> None:
    model = network()
    with pytest.raises(error, match=message):
        hw.MixedPrecision(model, sgd(model), policy)
    assert all("forward" not in module.__dict__ for module in model.modules())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"guard": "yes"}, 'allowed: True, "report", False'),
        ({"guard": 1}, "guard is 1"),
        ({"tolerance": 0}, "tolerance is 0"),
        ({"tolerance": float("nan")}, "positive number"),
        ({"objective": "speed"}, "allowed: 'time', 'memory', 'balanced'"),
    ],
)
def test_options_out_of_range(arguments: dict[str, Any], message: str) -> None:
    model = network()
    with pytest.raises(UsageError, match=message):
        hw.MixedPrecision(model, sgd(model), "float32", **arguments)


def test_optimizers_that_cannot_be_used() -> None:
    model, other = network(), network()
    frozen = network().requires_grad_(False)
    cases: list[tuple[nn.Module, Any, str]] = [
        (model, None, "give a torch.optim.Optimizer"),
        (model, [], "non-empty list"),
        (model, [sgd(model), "adam"], "give a torch.optim.Optimizer"),
        (model, sgd(other), "no parameters of this model"),
        (frozen, sgd(frozen), "no trainable parameters"),
    ]
    for given, optimizer, message in cases:
        with pytest.raises(UsageError, match=message):
            hw.MixedPrecision(given, optimizer, "float32")
    with pytest.raises(UsageError, match="model is function"):
        hw.MixedPrecision(lambda x: x, sgd(model), "float32")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("closure", "message"),
    [
        (lambda model: 3.0, "returned float"),
        (lambda model: None, "returned NoneType"),
        (lambda model: (None, model(X)), "returned tuple"),
        (lambda model: model(X), r"loss of shape \(3, 2\)"),
        (lambda model: loss_of(model).detach(), "requires_grad is False"),
        (lambda model: loss_of(model).item(), "returned float"),
    ],
)
def test_closures_that_return_no_loss(closure: Callable[[nn.Module], Any], message: str) -> None:
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    with hw.MixedPrecision(model, sgd(model), "float32") as mp:
        with pytest.raises(UsageError, match=message):
            mp.step(lambda: closure(model))
        assert mp.steps == 0
        assert mp.step(lambda: loss_of(model)).applied
    assert not torch.equal(before[0], next(model.parameters()))


@pytest.mark.parametrize("given", [None, [], 3, ["x"]])
def test_what_is_no_closure(given: Any) -> None:
    model = network()
    with hw.MixedPrecision(model, sgd(model), "float32") as mp, pytest.raises(UsageError, match=r"step\(\) got"):
        mp.step(given)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16", "auto"])
def test_a_closure_that_draws_a_new_batch_each_time_is_noticed_before_anything_happens(policy: str) -> None:
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(0)

    def closure() -> Tensor:
        return nn.functional.cross_entropy(model(torch.randn(3, 4, generator=generator)), Y)

    with hw.MixedPrecision(model, sgd(model), policy) as mp:
        with pytest.raises(UsageError, match=r"draw a new batch at each call.*guard=False"):
            mp.step(closure)
        assert mp.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with hw.MixedPrecision(model, sgd(model), policy, guard=False) as mp:
        assert mp.step(closure).applied


def test_dropout_is_no_new_batch() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    with hw.MixedPrecision(model, sgd(model), "mixed_bfloat16") as mp:
        assert mp.step(lambda: loss_of(model)).applied


def test_an_exception_in_the_closure_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with hw.MixedPrecision(model, sgd(model), "mixed_float16") as mp:
        mp.step(lambda: model(X).square().mean())
        before = [t.clone() for t in [*model.parameters(), *model.buffers()]]
        random_state = torch.get_rng_state()

        def interrupted() -> Tensor:
            nn.functional.dropout(model(X) * float("inf"), 0.5)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            mp.step(interrupted)
        assert not torch.is_autocast_enabled("cpu")
        assert torch.equal(random_state, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(before, [*model.parameters(), *model.buffers()], strict=True))
        assert mp.steps == 1
        assert mp.step(lambda: model(X).square().mean()).applied


@pytest.mark.parametrize("how", ["close", "with", "interrupted", "wrapped again"])
def test_closing_restores_the_model(how: str) -> None:
    model = network()

    def state() -> list[tuple[list[str], int, int]]:
        return [
            (sorted(m.__dict__), len(m._forward_hooks), len(m._forward_pre_hooks) + len(m._backward_hooks))
            for m in model.modules()
        ]

    before = state()
    plan = hw.Plan.manual({"0": "float32"}, default="bfloat16")
    mp = hw.MixedPrecision(model, sgd(model), plan)
    mp.step(lambda: loss_of(model))
    assert state() != before
    if how == "close":
        mp.close()
        mp.close()
    elif how == "with":
        with mp:
            pass
    elif how == "interrupted":
        with pytest.raises(KeyboardInterrupt), mp:
            raise KeyboardInterrupt
    else:
        hw.MixedPrecision(model, sgd(model), "float32")
    assert state() == before
    with pytest.raises(UsageError, match="closed"):
        mp.step(lambda: loss_of(model))


def test_wrapping_again_keeps_the_new_plan_in_force() -> None:
    model = network()
    old = hw.MixedPrecision(model, sgd(model), hw.Plan.manual({"0": "float32"}, default="float16"))
    new = hw.MixedPrecision(model, sgd(model), hw.Plan.manual({"2": "float32"}, default="bfloat16"))
    old.close()  # too late: it is not in force any more
    with new.autocast():
        assert model[0](X).dtype is torch.bfloat16
        assert model(X).dtype is torch.float32
    new.close()


def test_auto_trains_in_float32_while_it_gathers_evidence_and_then_follows_the_plan() -> None:
    model = network()
    seen = []

    def closure() -> Tensor:
        output = model(X)
        seen.append(output.dtype)
        return nn.functional.cross_entropy(output, Y)

    timing = hw.TimingTable.uniform(["0", "2"], relative={"bfloat16": 0.5})
    with hw.MixedPrecision(model, sgd(model), "auto", timing=timing) as mp:
        plan_before = mp.plan
        assert plan_before is None
        results = [mp.step(closure) for _ in range(5)]
        assert mp.plan is not None
        assert {rule.path: rule.compute for rule in mp.plan.layers} == {"0": "bfloat16", "2": "bfloat16"}
        assert mp.profile is not None
        assert set(mp.profile.paths()) == {"0", "1", "2"}
    assert all(r.applied for r in results)
    assert seen[-2:] == [torch.bfloat16] * 2
    assert set(seen[:4]) == {torch.float32}  # one rehearsal and three steps
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("relative", [{"bfloat16": 1.0, "float16": 1.2}, {"bfloat16": 0.99}, {}])
def test_auto_answers_float32_where_nothing_is_gained(relative: dict[str, float]) -> None:
    model = network()
    with hw.MixedPrecision(
        model, sgd(model), "auto", timing=hw.TimingTable.uniform(["0", "2"], relative=relative)
    ) as mp:
        for _ in range(4):
            mp.step(lambda: loss_of(model))
        assert mp.plan is not None
        assert mp.plan.default.compute == "float32"
        assert not mp.plan.uses("bfloat16")
        assert mp.plan.default.reason == "slower"


def test_auto_measures_on_its_own_where_no_timing_is_given() -> None:
    model = network()
    with hw.MixedPrecision(model, sgd(model), "auto") as mp:
        for _ in range(4):
            mp.step(lambda: loss_of(model))
        assert mp.timing is not None
        assert set(mp.timing.seconds) == {"0", "2"}
        assert set(mp.timing.formats) == {"bfloat16", "float16"}


def test_auto_works_with_the_parts() -> None:
    model = network()
    timing = hw.TimingTable.uniform(["0", "2"], relative={"float16": 0.5})
    with hw.MixedPrecision(model, sgd(model), "auto", timing=timing) as mp:
        for _ in range(4):
            mp.zero_grad()
            with mp.autocast():
                loss = loss_of(model)
            mp.backward(loss)
            assert mp.optimizer_step().applied
        assert mp.plan is not None
        assert mp.plan.uses("float16")


def test_parts_out_of_order_are_refused() -> None:
    model = network()
    with hw.MixedPrecision(model, sgd(model), "mixed_float16") as mp:
        for call in (mp.optimizer_step, mp.unscale_, lambda: mp.clip_grad_norm_(1.0)):
            with pytest.raises(UsageError, match=r"call mp\.backward\(loss\) before"):
                call()
        with pytest.raises(UsageError, match="returned float"):
            mp.backward(3.0)  # type: ignore[arg-type]


def test_evaluation_inside_autocast_begins_no_step() -> None:
    model = network()
    with hw.MixedPrecision(model, sgd(model), "mixed_bfloat16") as mp:
        with torch.no_grad(), mp.autocast():
            assert model(X).dtype is torch.bfloat16
        with pytest.raises(UsageError):
            mp.optimizer_step()


def test_a_subset_of_parameters_frozen_and_tied_weights() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.middle, self.frozen = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight
            self.frozen.requires_grad_(False)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.frozen(torch.tanh(self.middle(self.embed(tokens)))))

    model = Tied()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with hw.MixedPrecision(model, torch.optim.SGD(model.embed.parameters(), 0.5), "mixed_float16") as mp:
        for _ in range(2):
            assert mp.step(
                lambda: nn.functional.cross_entropy(model(torch.tensor([1, 2])), torch.tensor([2, 3]))
            ).applied
    assert model.head.weight is model.embed.weight
    moved = {name for name, p in model.named_parameters() if not torch.equal(before[name], p)}
    assert moved == {"embed.weight"}


def test_sparse_and_complex_gradients() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4, sparse=True)
            self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, tokens: Tensor) -> Tensor:
            return (self.embed(tokens).float() * self.phase).abs().square().sum()

    model = Net()
    optimizers = [torch.optim.SparseAdam(model.embed.parameters()), torch.optim.SGD([model.phase], 0.1)]
    with torch.sparse.check_sparse_tensor_invariants(True), hw.MixedPrecision(model, optimizers, "mixed_float16") as mp:
        before = model.phase.detach().clone()
        assert mp.step(lambda: model(torch.tensor([1, 1, 3])), clip_grad_norm=1.0).applied
        bad = mp.step(lambda: model(torch.tensor([1, 1, 3])) * float("inf"))
        assert not bad.applied
        assert torch.isfinite(torch.view_as_real(model.phase)).all()
        assert not torch.equal(before, model.phase)


def test_compiled_models_train_and_heal() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 64), nn.Linear(64, 2)
            nn.init.constant_(self.a.weight, 3e4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.a(x)))

    plain = Net()
    model = cast(Net, torch.compile(plain, backend="aot_eager"))
    x = torch.ones(3, 4)
    with hw.MixedPrecision(model, sgd(plain), "mixed_float16", log=lambda _: None) as mp:
        result = mp.step(lambda: nn.functional.cross_entropy(model(x), Y))
        # tanh(inf) is 1, so that nothing fails; a gradient through it is 0 * inf
        for _ in range(18):
            result = mp.step(lambda: nn.functional.cross_entropy(model(x), Y) + model.a(x).float().sum() * 1e-9)
        assert result.applied
        assert mp.plan is not None
        assert [rule.path for rule in mp.plan.layers] == ["a"]
    torch.compiler.reset()


def test_auto_on_a_compiled_model_names_plain_paths() -> None:
    plain = network()
    model = cast(nn.Sequential, torch.compile(plain, backend="aot_eager"))
    timing = hw.TimingTable.uniform(["0", "2"], relative={"bfloat16": 0.5})
    with hw.MixedPrecision(model, sgd(plain), "auto", timing=timing) as mp:
        for _ in range(5):
            assert mp.step(lambda: loss_of(model)).applied
        assert mp.plan is not None
        assert [rule.path for rule in mp.plan.layers] == ["0", "2"]
    torch.compiler.reset()


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HALFWISE_DISABLE", "1")
    model = network()
    with hw.MixedPrecision(model, sgd(model), "mixed_float16") as mp:
        result = mp.step(lambda: (loss_of(model), model(X).dtype))
        assert result.output is torch.float32
        assert result.loss_scale == 1.0
        assert mp.policy == "float32"


def test_every_hundredth_step_looks_at_weights_and_gradients() -> None:
    model = network()
    with hw.MixedPrecision(model, sgd(model), "mixed_float16") as mp:
        for _ in range(99):
            mp.step(lambda: loss_of(model))
        profile_before = mp.profile
        assert profile_before is None
        mp.step(lambda: loss_of(model))
        assert mp.profile is not None
        histogram = mp.profile.get("0", "weight_gradient")
        assert histogram is not None
        assert histogram.total == 4 * 8 + 8


def test_auto_says_what_it_chose_once_and_why() -> None:
    model = network()
    said: list[str] = []
    timing = hw.TimingTable.uniform(["0", "2"], relative={"bfloat16": 0.5})
    with hw.MixedPrecision(model, sgd(model), "auto", timing=timing, log=said.append) as mp:
        assert "gathering evidence" in repr(mp)
        for _ in range(6):
            mp.step(lambda: loss_of(model))
        assert len(said) == 1
        assert '"auto" chose bfloat16, in 2 of 2 layers' in said[0]
        assert "all layers together take 0.50 times their float32 time" in said[0]
        assert repr(mp) == (
            "MixedPrecision(policy='auto', bfloat16, loss_scale=1, steps=6, skipped_steps=0, incidents=0)"
        )
        lines = str(mp.plan).splitlines()
    assert lines[0] == "Plan for Sequential (torch), target here"
    assert [line.split()[:2] for line in lines[1:]] == [["default", "bfloat16"], ["0", "bfloat16"], ["2", "bfloat16"]]


def test_disabled_means_plain_training_without_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFWISE_DISABLE", "1")
    model = network()
    with hw.MixedPrecision(model, sgd(model), "mixed_float16") as mp:
        assert mp.step(lambda: loss_of(model) * float("nan")).applied
    assert all(bool(torch.isnan(p).all()) for p in model.parameters())


def test_without_a_guard_endless_skips_are_told_once() -> None:
    model = network()
    said: list[str] = []
    with hw.MixedPrecision(model, sgd(model), "mixed_float16", guard=False, log=said.append) as mp:
        for _ in range(50):
            mp.step(lambda: loss_of(model) * float("nan"))
    assert len(said) == 1
    assert "20 steps in a row were skipped" in said[0]


def test_a_gradscalers_state_that_nobody_uses_is_told() -> None:
    model = network()
    said: list[str] = []
    state = torch.amp.GradScaler("cpu", init_scale=4.0).state_dict()
    with hw.MixedPrecision(model, sgd(model), "mixed_bfloat16", log=said.append) as mp:
        mp.load_state_dict(state)
    assert "not used" in said[0]


@pytest.mark.parametrize(
    ("guard", "advice"),
    [(True, 'mp.plan.save("plan.toml")'), ("report", 'policy=hw.Plan.manual({"hot": "float32"}')],
)
def test_advice_suits_somebody_who_trains_with_it_already(guard: Any, advice: str) -> None:
    class Hot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hot, self.norm = nn.Linear(4, 64), nn.LayerNorm(64)
            nn.init.normal_(self.hot.weight, 0.0, 1e5)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.hot(x))

    model = Hot()
    with hw.MixedPrecision(model, sgd(model), "mixed_float16", guard=guard, log=lambda _: None) as mp:
        incident = mp.step(lambda: model(X).float().square().mean()).incident
    assert incident is not None
    assert advice in incident.text
    assert "hw.apply" not in incident.text

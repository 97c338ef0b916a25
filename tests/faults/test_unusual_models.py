"""Models and loops that are unusual and sound: under every policy they train as they would without halfwise."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfwise.torch as hw
from halfwise.errors import UsageError

X = torch.linspace(-1, 1, 32).reshape(4, 8)


def wrap(model: nn.Module, policy: Any = "auto", optimizer: Any = None, **options: Any) -> hw.MixedPrecision:
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    return hw.MixedPrecision(model, optimizer, policy, **{"log": lambda _: None, **options})


class InPlaceBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(8))

    def forward(self, h: Tensor) -> Tensor:
        h += self.b
        return h


class InPlaceScale(nn.Module):
    """Writes into its input, which needs no gradient: a probe on shared memory would change the real data."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(8))

    def forward(self, h: Tensor) -> Tensor:
        h.mul_(2.0)
        return h * self.g


class IndexAdd(nn.Module):
    """An operation that refuses half precision's mixture of dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(8))

    def forward(self, h: Tensor) -> Tensor:
        return torch.zeros(4, 8).index_add_(0, torch.arange(4), h @ self.w)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)
        self.linear = nn.Linear(8, 8)

    def forward(self, h: Tensor) -> Tensor:
        y: Tensor = self.linear(h)
        return y @ self.q.to(y.dtype)


def old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return torch.nn.utils.weight_norm(nn.Linear(8, 8))


Case = tuple[Callable[[], nn.Module], Callable[[nn.Module], Tensor]]
CASES: dict[str, Case] = {
    "LSTM, which has no float16 kernel here": (
        lambda: nn.LSTM(8, 8, batch_first=True),
        lambda m: m(X.reshape(1, 4, 8))[0].square().mean(),
    ),
    "old weight norm": (old_weight_norm, lambda m: m(X).square().mean()),
    "spectral norm": (lambda: torch.nn.utils.spectral_norm(nn.Linear(8, 8)), lambda m: m(X).square().mean()),
    "new parametrization": (
        lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
        lambda m: m(X).square().mean(),
    ),
    "checkpoint": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        lambda m: checkpoint(m, X, use_reentrant=False).square().mean(),
    ),
    "in-place bias": (lambda: nn.Sequential(nn.Linear(8, 8), InPlaceBias()), lambda m: m(X).square().mean()),
    "in-place scale of the data": (
        lambda: nn.Sequential(InPlaceScale(), nn.Linear(8, 1)),
        lambda m: m(X.clone()).square().mean(),
    ),
    "index_add": (IndexAdd, lambda m: m(X).square().mean()),
    "integer weights": (Quantised, lambda m: m(X).float().square().mean()),
    "vmap": (lambda: nn.Linear(8, 8), lambda m: torch.func.vmap(m)(X).square().mean()),
}


@pytest.mark.parametrize("name", list(CASES))
def test_auto_trains_as_a_plain_loop_does(name: str) -> None:
    make, loss_of = CASES[name]

    torch.manual_seed(0)
    plain = make()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], 0.01)
    expected = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(plain)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())

    torch.manual_seed(0)
    model = make()
    with wrap(model) as mp:
        losses = [mp.step(lambda: loss_of(model)).loss.item() for _ in range(3)]
        assert losses == expected[:3]  # the evidence steps, the timed one among them
        assert mp.plan is not None
        last = mp.step(lambda: loss_of(model))
    assert last.applied
    assert last.loss.item() == pytest.approx(expected[3], rel=0.05)


def test_a_hundred_steps_with_integer_weights() -> None:
    model = Quantised()
    with wrap(model, "mixed_bfloat16") as mp:
        for _ in range(101):
            assert mp.step(lambda: model(X).float().square().mean()).applied


def test_one_bad_batch_among_the_evidence_is_no_evidence() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    timing = hw.TimingTable.uniform(["0", "1"], relative={"bfloat16": 0.5})
    with wrap(model, timing=timing) as mp:
        for factor in (1.0, float("nan"), 1.0, 1.0):
            mp.step(lambda factor=factor: model(X * factor).square().mean())  # type: ignore[misc]
        assert mp.plan is not None
        assert mp.plan.uses("bfloat16")


def test_evidence_is_taken_before_clipping_and_once() -> None:
    model = nn.Sequential(nn.Linear(8, 1, bias=False))
    timing = hw.TimingTable.uniform(["0"], relative={"bfloat16": 0.5})
    with wrap(model, timing=timing) as mp:

        def closure() -> Tensor:
            with mp.autocast():
                return model(X * 1000).mean()

        norms = [mp.step(closure, clip_grad_norm=0.1).grad_norm for _ in range(3)]
        assert mp.profile is not None
        gradients, activations = mp.profile.get("0", "weight_gradient"), mp.profile.get("0", "activation")
        assert gradients is not None
        assert activations is not None
        assert gradients.largest > min(norms) / 8
        assert activations.total == 3 * (4 * 8 + 4)


@pytest.mark.parametrize("norm", [float("nan"), -1.0, 0, True, "1"])
def test_norms_that_would_ruin_the_weights_are_refused(norm: Any) -> None:
    model = nn.Linear(8, 1)
    with wrap(model, "float32") as mp:
        with pytest.raises(UsageError, match="norm to clip to"):
            mp.step(lambda: model(X).mean(), clip_grad_norm=norm)
        with mp.autocast():
            loss = model(X).mean()
        mp.backward(loss)
        with pytest.raises(UsageError, match="norm to clip to"):
            mp.clip_grad_norm_(norm)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_lbfgs_that_is_interrupted_half_way_has_not_moved(error: type[BaseException]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    calls = []

    def closure() -> Tensor:
        calls.append(1)
        if len(calls) == 6:
            raise error
        return model(X).square().mean()

    with wrap(model, "float32", torch.optim.LBFGS(model.parameters())) as mp:
        before = [p.detach().clone() for p in model.parameters()]
        with pytest.raises(error):
            mp.step(closure)
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert mp.step(closure).applied


def test_lbfgs_notices_a_closure_that_draws_new_batches() -> None:
    model = nn.Linear(8, 1)
    with (
        wrap(model, "float32", torch.optim.LBFGS(model.parameters())) as mp,
        pytest.raises(UsageError, match="new batch"),
    ):
        mp.step(lambda: model(torch.randn(4, 8) * len(os.urandom(1)) + torch.rand(())).mean() + float(os.urandom(1)[0]))


def test_steps_inside_an_outer_region_do_train() -> None:
    """Autocast keeps casts of weights until its outermost region ends; those would be the weights before the step."""
    model = nn.Linear(8, 1)
    with wrap(model, "mixed_bfloat16") as mp, torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [mp.step(lambda: (model(X).float() - 3).square().mean()).loss.item() for _ in range(5)]
    assert len(set(losses)) == 5


def test_a_step_inside_a_step_is_refused() -> None:
    model = nn.Linear(8, 1)
    with wrap(model, "float32") as mp:

        def closure() -> Tensor:
            mp.step(lambda: model(X).mean())
            return model(X).mean()

        with pytest.raises(UsageError, match="inside a closure"):
            mp.step(closure)


def test_conjugated_complex_weights_double_default_and_shared_optimizers() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8, dtype=torch.complex64))

        def forward(self, h: Tensor) -> Tensor:
            return (h * self.w.conj()).abs().square().mean()

    model = Net()
    with wrap(model, "mixed_float16") as mp:
        assert mp.step(lambda: model(X)).applied

    linear = nn.Linear(8, 1, bias=False)
    half = hw.Plan.manual(default="float16", loss_scale=hw.LossScaleSettings(initial=256.0))
    optimizers = [torch.optim.SGD(linear.parameters(), 0.0), torch.optim.SGD(linear.parameters(), 0.0)]
    torch.set_default_dtype(torch.float64)
    try:
        with wrap(linear, half, optimizers) as mp:
            assert mp.step(lambda: linear(torch.ones(1, 8, dtype=torch.float32)).sum()).applied
    finally:
        torch.set_default_dtype(torch.float32)
    assert linear.weight.grad is not None
    assert linear.weight.grad.tolist() == [[1.0] * 8]  # unscaled once, though two optimizers hold it


def test_a_file_that_is_called_like_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "auto").write_text("nonsense")
    monkeypatch.chdir(tmp_path)
    with wrap(nn.Linear(8, 1), "auto") as mp:
        assert mp.policy == "auto"


def test_disabling_outlasts_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(8, 1)
    with wrap(model, "mixed_float16") as mp:
        mp.step(lambda: model(X).mean())
        saved = mp.state_dict()
    monkeypatch.setenv("HALFWISE_DISABLE", "1")
    with wrap(model, "mixed_float16") as mp:
        mp.load_state_dict(saved)
        assert mp.step(lambda: (model(X).mean(), model(X).dtype)).output is torch.float32


def test_a_resumed_policy_is_the_one_that_was_saved() -> None:
    model = nn.Linear(8, 1)
    with wrap(model, "mixed_float16") as mp:
        saved = mp.state_dict()
    with wrap(model, "float32") as mp:
        mp.load_state_dict(saved)
        assert mp.policy == "mixed_float16"
        assert mp.loss_scale == 65536.0


@pytest.mark.parametrize("state", [None, [], {"version": 1}])
def test_states_that_are_none(state: Any) -> None:
    with wrap(nn.Linear(8, 1), "float32") as mp, pytest.raises(UsageError, match="state"):
        mp.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timing": {"": {"float32": 1.0}}}, "give a TimingTable"),
        ({"timing": hw.TimingTable.uniform(["tail"], relative={})}, "'tail'"),
        ({"log": "file"}, "log is 'file'"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        wrap(nn.Linear(8, 1), "auto", **options)


def test_rules_without_effect_are_told() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    said: list[str] = []
    plan = hw.Plan.manual({"0.out_proj": "float32"}, default="bfloat16")
    with wrap(model, plan, log=said.append) as mp:
        for _ in range(2):
            mp.step(lambda: model[0](X, X, X)[0].float().square().mean())
    assert len(said) == 1
    assert "'0.out_proj' had no effect" in said[0]


def test_lazy_and_meta_models_are_refused() -> None:
    lazy = nn.LazyLinear(2)
    sgd = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with pytest.raises(UsageError, match="lazy parameters"):
        hw.MixedPrecision(lazy, sgd)
    with pytest.raises(UsageError, match="meta device"):
        hw.MixedPrecision(nn.Linear(1, 1, device="meta"), sgd)
    function: Any
    for function in (hw.profile, hw.plan):
        with pytest.raises(UsageError, match="model is str"):
            function("model", lambda: None)

"""What a rehearsal leaves behind: nothing."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import halfwise.torch as hw
from halfwise.torch.snapshot import BufferCopies, RandomState, rehearsal


class Counting(nn.Module):
    """Writes its buffers in every way there is: in place, by replacement, one of them not persistent."""

    calls: Tensor
    last: Tensor
    late: Tensor  # registered by a test

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.norm(nn.functional.dropout(self.linear(x)))
        self.last = y.detach().mean(0)
        return y


def state_of(model: nn.Module) -> list[Tensor]:
    return [t.clone() for t in [*model.parameters(), *model.buffers()]]


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_rehearsal_leaves_no_trace(error: type[BaseException] | None) -> None:
    model = Counting()
    model(torch.randn(5, 3)).square().sum().backward()
    before, gradients, last = state_of(model), [p.grad for p in model.parameters()], model.last
    generator = torch.get_rng_state()
    try:
        with rehearsal(model):
            assert all(p.grad is None for p in model.parameters())
            model(torch.randn(5, 3) * float("inf")).square().sum().backward()
            if error is not None:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model), strict=True))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert model.last is last
    assert torch.equal(generator, torch.get_rng_state())


def test_copies_follow_buffers_that_were_replaced_or_added() -> None:
    model = Counting()
    copies = BufferCopies(model)
    copies.save()
    model.last = torch.ones(3)
    model.register_buffer("late", torch.ones(2))
    copies.save()
    model.last += 5
    model.late += 5
    copies.restore()
    assert model.last.tolist() == [1.0] * 3
    assert model.late.tolist() == [1.0] * 2


def test_random_state_survives_a_round_trip() -> None:
    state = RandomState([torch.device("cpu")])
    first = torch.rand(3)
    RandomState.from_state_dict(state.state_dict()).restore()
    assert torch.equal(torch.rand(3), first)


def test_rehearsal_rewinds_pythons_and_numpys_generators() -> None:
    expected = (RandomState(()), random.random(), np.random.rand())
    expected[0].restore()
    with rehearsal(nn.Linear(1, 1)):
        random.random(), np.random.rand(5)
    assert (random.random(), np.random.rand()) == expected[1:]


def test_layers_dropped_by_pythons_generator_can_be_replayed() -> None:
    random.seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))

    def loss() -> Tensor:
        h = torch.ones(2, 4)
        for layer in layers:
            if random.random() < 0.5:
                h = h + layer(h).tanh()
        return h.square().mean()

    assert hw.MixedPrecision(layers, torch.optim.SGD(layers.parameters(), lr=0.1), "float32").step(loss).applied


def test_other_modules_that_are_called_in_a_rehearsal_are_put_back_too() -> None:
    model = nn.Linear(3, 3)
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    other[0].weight.grad = torch.ones(3, 3)
    gradient = other[0].weight.grad
    before = state_of(other)
    with rehearsal(model):
        for _ in range(2):
            other(model(torch.randn(4, 3))).mean().backward()
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(other), strict=True))
    assert other[0].weight.grad is gradient
    assert bool((gradient == 1).all())
    assert other[2].weight.grad is None


def test_plans_and_profiles_leave_no_gradients_in_a_criterion() -> None:
    model, criterion = nn.Linear(3, 1), nn.Linear(1, 1)
    loss: Callable[[], Tensor] = lambda: criterion(model(torch.ones(4, 3))).mean()  # noqa: E731
    hw.plan(model, loss)
    hw.profile(model, loss)
    assert [p.grad for p in criterion.parameters()] == [None, None]


def test_rehearsal_does_not_compile_a_compiled_model_twice() -> None:
    graphs: list[object] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = cast(nn.Module, torch.compile(Counting(), backend=backend, fullgraph=True))
    with rehearsal(compiled):
        compiled(torch.ones(4, 3))
    assert len(graphs) == 1
    compiled(torch.ones(4, 3))
    assert len(graphs) == 1
    torch.compiler.reset()


def test_other_modules_may_be_compiled() -> None:
    model, other = nn.Linear(3, 3), Counting()
    compiled = cast(nn.Module, torch.compile(other, backend="eager", fullgraph=True))
    before = state_of(other)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using `torch.compile")
        with rehearsal(model):
            compiled(model(torch.ones(4, 3)).detach())
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(other), strict=True))
    torch.compiler.reset()


class Late(nn.Module):
    """Makes its buffers when it is first called while it is `on`."""

    ema: Tensor | None
    cache: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.on = True
        self.register_buffer("ema", None)

    def forward(self, x: Tensor) -> Tensor:
        if not self.on:
            return x
        self.ema = x.mean(0) if self.ema is None else self.ema.mul_(0.9).add_(x.mean(0))
        if "cache" not in self._buffers:
            self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.cache += 1
        return x


def test_buffers_that_are_made_late() -> None:
    model = nn.Sequential(Late())
    late = cast(Late, model[0])
    copies = BufferCopies(model)
    copies.save()
    model(torch.ones(2, 3))
    copies.restore()
    assert late._buffers == {"ema": None}
    assert late._non_persistent_buffers_set == set()
    model(torch.ones(2, 3))
    copies.save()
    model(torch.full((2, 3), float("nan")))
    copies.restore()
    assert late.ema is not None
    assert (late.ema.tolist(), late.cache.tolist()) == ([1.0] * 3, [1.0] * 3)


def test_a_skipped_step_leaves_no_nan_in_a_buffer_that_was_made_late() -> None:
    model = nn.Sequential(Late(), nn.Linear(3, 1))
    mp = hw.MixedPrecision(model, torch.optim.SGD(model.parameters(), lr=0.1), "float32", log=lambda _: None)
    late = cast(Late, model[0])
    for late.on in (False, True):
        mp.step(lambda: model(torch.ones(2, 3)).mean())
    assert not mp.step(lambda: model(torch.full((2, 3), float("nan"))).mean()).applied
    assert late.ema is not None
    assert all(bool(torch.isfinite(buffer).all()) for buffer in model.buffers())


def test_submodules_that_were_added_keep_their_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    copies = BufferCopies(model)
    copies.save()
    model.append(nn.BatchNorm1d(3))
    model(torch.ones(2, 3))
    copies.restore()
    assert len(list(model.buffers())) == 3
    copies.save()
    expected = state_of(model)
    model(torch.ones(2, 3))
    copies.restore()
    assert all(torch.equal(a, b) for a, b in zip(expected, state_of(model), strict=True))


def inference_tensor() -> Tensor:
    with torch.inference_mode():
        return torch.ones(3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(4.0).view(4, 1).expand(4, 3),
        lambda: torch.arange(4.0).expand(2, 4),
        lambda: torch.arange(4.0).unfold(0, 3, 1),
        lambda: torch.arange(2000).expand(2, 2000),
        inference_tensor,
        lambda: torch.eye(3).to_sparse(),
        lambda: nn.Parameter(torch.ones(3), requires_grad=False),
        lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.empty(0, 3),
        lambda: torch.tensor(True),
    ],
    ids=["columns", "rows", "windows", "mask", "inference", "sparse", "parameter", "complex", "empty", "bool"],
)
def test_unusual_buffers(make: Callable[[], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_buffer("unusual", make())
    copies = BufferCopies(model)
    for _ in range(2):
        copies.save()
        assert torch.equal(model.get_buffer("unusual").to_dense(), make().to_dense())
        model.register_buffer("unusual", torch.full((2,), float("nan")))
        copies.restore()
    assert torch.equal(model.get_buffer("unusual").to_dense(), make().to_dense())


def test_an_expanded_buffer_whose_elements_are_written() -> None:
    model, base = nn.Linear(1, 1), torch.zeros(4, 1)
    model.register_buffer("pos", base.expand(4, 3))
    pos = model.get_buffer("pos")
    with rehearsal(model):
        base.fill_(1)
    assert model.get_buffer("pos") is pos
    assert base.tolist() == [[0.0]] * 4


def test_the_first_forward_of_a_lazy_module() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyBatchNorm1d())
    copies = BufferCopies(model)
    for steps in (0, 1):  # as if freshly made; then as after one step
        copies.save()
        model(torch.randn(8, 3))
        copies.restore()
        assert int(model.get_buffer("1.num_batches_tracked")) == steps
        assert (model.get_buffer("1.running_mean").abs().sum() > 0) == (steps > 0)
        if steps == 0:
            model(torch.randn(8, 3))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_scripted_children() -> None:
    model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.BatchNorm1d(3)))
    copies = BufferCopies(model)
    for _ in range(2):
        copies.save()
        expected = state_of(model)
        model(torch.randn(8, 3))
        copies.restore()
        assert all(torch.equal(a, b) for a, b in zip(expected, state_of(model), strict=True))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_large_buffers_are_put_back_whether_they_are_constant_or_not(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 1)
    model.register_buffer("mask", torch.zeros(40, 40, dtype=dtype))
    mask = model.get_buffer("mask")
    copies = BufferCopies(model)
    for row in range(3):
        copies.save()
        mask[row] = 1
        copies.restore()
        assert int(mask.sum()) == 40 * row
        mask[row] = 1
        copies.save()
        copies.restore()
        assert int(mask.sum()) == 40 * (row + 1)


def test_large_running_statistics_are_put_back_though_their_version_stands_still() -> None:
    model = nn.BatchNorm1d(2000)
    copies = BufferCopies(model)
    copies.save()
    copies.save()
    version = model.get_buffer("running_mean")._version
    model(torch.randn(4, 2000))
    assert model.get_buffer("running_mean")._version == version  # the reason why floats are always copied
    copies.restore()
    assert float(model.get_buffer("running_mean").abs().sum()) == 0.0

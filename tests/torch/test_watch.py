"""`hw.watch`: a loop watched is the loop unwatched, and a planted fault is named.

Over 500 lines because each kind of loop needs a loop of its own, and the comparers that all of them share stand here.
"""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from halfwise.core.diagnosis import VERDICTS
from halfwise.errors import UsageError
from halfwise.torch.watch import Watch, watch
from halfwise.torch.watching.vitals import squared_norm

Loss = Callable[[nn.Module, int], Tensor]


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    yield
    assert torch._C._len_torch_dispatch_stack() == 0


class Small(nn.Module):
    """A convolution, batch norm, dropout, layer norm: everything whose state a watch might disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))


def healthy() -> nn.Sequential:
    """Six layers without a fault."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(6)), nn.Linear(64, 4))


def planted() -> nn.Sequential:
    """Six layers; inputs of 60 meet weights of 40 in the fourth."""
    model = healthy()
    with torch.no_grad():
        model[2][1].weight.zero_()  # type: ignore[index]
        model[2][1].bias.fill_(60.0)  # type: ignore[index]
        model[3][0].weight.fill_(40.0)  # type: ignore[index]
    return model


def squares(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(8, 64, generator=generator)).float().square().mean()


def pictures(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    target = torch.randint(3, (8,), generator=generator)
    x = torch.randn(8, 1, 6, 6, generator=generator)
    return nn.functional.cross_entropy(model(x).float(), target) * (1e6 if step == 4 else 1.0)


def train(
    model: nn.Module,
    loss_of: Loss,
    steps: int,
    *,
    optimizer: Optimizer | None = None,
    scaler: GradScaler | None = None,
    dtype: torch.dtype = torch.float16,
    clip: bool = False,
) -> list[Tensor]:
    """A hand-written loop; returns the losses."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), 1e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_of(model, step)
        losses.append(loss.detach())
        if scaler is None:
            loss.backward()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return losses


def everything(model: nn.Module, optimizer: Optimizer, scaler: GradScaler | None, losses: list[Tensor]) -> list[Any]:
    """All that a loop leaves: losses, weights, buffers, moments, scale, the next random number."""
    moments = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    scale = torch.tensor(scaler.get_scale() if scaler else 0.0)
    return [*losses, *model.state_dict().values(), *moments, scale, torch.rand(1)]


@pytest.mark.parametrize(
    ("make", "loss_of", "scaled", "dtype"),
    [
        (Small, pictures, True, torch.float16),  # skips at the beginning (scale 2^24) and at step 4
        (Small, pictures, False, torch.bfloat16),
        (planted, squares, True, torch.float16),  # every step fails and one is recorded
        (planted, squares, False, torch.float16),  # NaN is written into the weights, as without a watch
    ],
    ids=["skips", "bfloat16", "planted", "nan"],
)
def test_results_are_the_same_bit_by_bit(
    make: Callable[[], nn.Module], loss_of: Loss, scaled: bool, dtype: torch.dtype
) -> None:
    results, watches = [], []
    for watched in (False, True):
        torch.manual_seed(3)
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        scaler = GradScaler("cpu", init_scale=2.0**24) if scaled else None
        if watched:
            watches.append(watch(model, optimizer, scaler, log=lambda text: None))
        losses = train(model, loss_of, 14, optimizer=optimizer, scaler=scaler, dtype=dtype, clip=scaled)
        results.append(everything(model, optimizer, scaler, losses))
    for plain, seen in zip(*results, strict=True):
        assert torch.equal(plain.nan_to_num(nan=7.5), seen.nan_to_num(nan=7.5))
        assert torch.equal(plain.isnan(), seen.isnan())
    assert watches[0].steps == 14
    if scaled:
        assert watches[0].skipped_steps > 0
    watches[0].close()


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
def test_a_planted_overflow_is_named_within_two_further_steps(clip: bool) -> None:
    model, scaler, texts = planted(), GradScaler("cpu"), []  # type: ignore[var-annotated]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, scaler, log=texts.append) as seen:
        train(model, squares, 2, optimizer=optimizer, scaler=scaler, clip=clip)
        (found,) = seen.diagnoses
        assert (found.verdict, found.module, found.operation) == ("overflow_at_every_scale", "3.0", "aten.addmm")
        assert found.source == f"test_watch.py:{squares.__code__.co_firstlineno + 2}"
        assert any('Plan.manual({"3.0": "float32"}' in line for line in found.fix)
        train(model, squares, 6, optimizer=optimizer, scaler=scaler, clip=clip)
        assert texts == [found.text()]  # said once
        assert (seen.applied_steps, seen.skipped_steps) == (0, 8)
        assert seen.loss_scale_history[0] == (0, 65536.0)
        assert seen.loss_scale_history[-1] == (8, 256.0)
        assert "8 skipped" in seen.summary()
        assert VERDICTS["overflow_at_every_scale"] in seen.summary()


def test_skips_while_the_scale_settles_are_healthy_and_not_printed() -> None:
    model, scaler = healthy(), GradScaler("cpu", init_scale=2.0**30)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    texts: list[str] = []
    with watch(model, optimizer, scaler, log=texts.append) as seen:
        train(model, squares, 20, optimizer=optimizer, scaler=scaler)
        assert seen.skipped_steps >= 4
        assert seen.applied_steps > 0
        assert (texts, seen.diagnoses) == ([], [])
        assert VERDICTS["loss_scale_settling"] in seen.summary()
        assert f"{seen.skipped_steps} ahead" in seen.summary()


class Steep(torch.autograd.Function):
    """The identity; its gradient is `factor` times too large, in half."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def test_gradients_that_overflow_after_the_scale_has_settled_are_named_after_four_skips() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return self.first(Steep.apply(self.second(x), self.factor))  # type: ignore[no-untyped-call]

    model, scaler = Model(), GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def loss(model: nn.Module, step: int) -> Any:
        return model(torch.ones(2, 4)).float().mean()

    texts: list[str] = []
    with watch(model, optimizer, scaler, log=texts.append) as seen:
        train(model, loss, 3, optimizer=optimizer, scaler=scaler)
        model.factor = 6e4
        train(model, loss, 4, optimizer=optimizer, scaler=scaler)
        assert seen.skipped_steps >= 4
        assert not texts
        train(model, loss, 1, optimizer=optimizer, scaler=scaler)
        (found,) = seen.diagnoses
        assert (found.verdict, found.module, found.direction) == ("loss_scale_too_high", "", "backward")
        assert found.suspects[0].module_class == "Model"
        assert found.source == f"test_watch.py:{Steep.backward.__code__.co_firstlineno + 2}"


def test_without_a_scaler_bad_gradients_and_what_they_did_are_told() -> None:
    model = healthy()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def loss(model: nn.Module, step: int) -> Any:
        return squares(model, step) * (math.inf if step == 2 else 1.0)

    with watch(model, optimizer, log=lambda text: None) as seen:
        train(model, loss, 5, optimizer=optimizer, dtype=torch.bfloat16)
        (found,) = seen.diagnoses
        assert found.verdict == "nonfinite_parameters"
        assert "step 2 was the first with bad gradients" in found.detail
        assert "MixedPrecision" in found.fix[-1]


def test_a_loss_that_is_not_finite_is_noticed_though_gradients_are() -> None:
    model, scaler = nn.Linear(4, 4), GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def loss(model: nn.Module, step: int) -> Any:
        return model(torch.ones(2, 4)).float().mean() + torch.ones(70_000, dtype=torch.float16).sum()

    with watch(model, optimizer, scaler, log=lambda text: None) as seen:
        train(model, loss, 2, optimizer=optimizer, scaler=scaler)
        assert seen.skipped_steps == 0
        (found,) = seen.diagnoses
        assert (found.verdict, found.operation) == ("overflow_at_every_scale", "aten.sum")
        assert found.source == f"test_watch.py:{loss.__code__.co_firstlineno + 1}"


def test_nan_in_a_batch_and_a_loop_that_skips_by_itself() -> None:
    model = healthy()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, log=lambda text: None) as seen:
        for step in range(5):
            x = torch.randn(8, 64)
            x[3, 0] = math.nan if step > 1 else 0.0
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if torch.isfinite(loss) or step == 4:
                optimizer.step()
        (found,) = seen.diagnoses
        assert found.verdict == "nonfinite_input"
        assert "'input'" in found.detail


def test_masked_logits_and_evaluation_raise_no_alarm() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": self.head(x).masked_fill(torch.tensor([False, False, True]), -math.inf)}

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(model: nn.Module, step: int) -> Any:
        return nn.functional.cross_entropy(model(torch.ones(2, 4))["logits"].float(), torch.tensor([0, 1]))

    with watch(model, optimizer, log=lambda text: None) as seen:
        train(model, loss, 3, optimizer=optimizer, dtype=torch.bfloat16)
        with torch.no_grad():
            model(torch.full((1, 4), math.nan))
        model.eval()
        model(torch.full((1, 4), math.nan))
        assert seen._tries == 0
        assert seen.diagnoses == []


def test_a_model_that_is_trained_in_evaluation_mode_is_traced_too() -> None:
    model, scaler = planted().eval(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, scaler, log=lambda text: None) as seen:
        train(model, squares, 2, optimizer=optimizer, scaler=scaler)
        assert [d.module for d in seen.diagnoses] == ["3.0"]  # noticed by its loss


def _is_untouched(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> bool:
    return not (
        model._forward_hooks
        or model._forward_pre_hooks
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or {"scale", "step", "update"} & set(vars(scaler))
    )


def test_closing_leaves_no_trace_even_after_an_interruption() -> None:
    model, scaler = planted(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def interrupted(model: nn.Module, step: int) -> Tensor:
        loss = squares(model, step)
        if step == 1:
            assert torch._C._len_torch_dispatch_stack() == 1  # it was being recorded
            raise KeyboardInterrupt
        return loss

    seen = watch(model, optimizer, scaler, log=lambda text: None)
    assert not _is_untouched(model, optimizer, scaler)
    with pytest.raises(KeyboardInterrupt):
        train(model, interrupted, 3, optimizer=optimizer, scaler=scaler)
    seen.close()
    seen.close()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._dynamo.eval_frame._stance.stance == "default"
    assert (
        torch.autograd._is_multithreading_enabled() if hasattr(torch.autograd, "_is_multithreading_enabled") else True
    )
    assert _is_untouched(model, optimizer, scaler)
    with pytest.raises(ZeroDivisionError), watch(model, optimizer, scaler):
        raise ZeroDivisionError
    assert _is_untouched(model, optimizer, scaler)


def test_a_wrapper_put_on_later_by_someone_else_survives() -> None:
    model, scaler = healthy(), GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = watch(model, optimizer, scaler)
    inner, calls = scaler.step, []

    def outer(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    scaler.step = outer  # type: ignore[method-assign]
    seen.close()
    train(model, squares, 2, optimizer=optimizer, scaler=scaler)
    assert (len(calls), seen.steps) == (2, 0)


def test_a_second_watch_replaces_the_first() -> None:
    model, scaler = healthy(), GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = watch(model, optimizer, scaler)
    second = watch(model, optimizer, scaler)
    train(model, squares, 2, optimizer=optimizer, scaler=scaler)
    assert (first.steps, second.steps) == (0, 2)
    first.close()  # does not disturb the second
    train(model, squares, 1, optimizer=optimizer, scaler=scaler)
    assert second.steps == 3
    second.close()
    assert _is_untouched(model, optimizer, scaler)


def test_copies_and_pickles_of_a_watched_model_are_not_watched() -> None:
    model = planted()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, log=lambda text: None) as seen:
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with torch.autocast("cpu", dtype=torch.float16):
                other(torch.randn(8, 64))
        assert seen._tries == 0


class Own(nn.Module):
    """A model with a forward of its own: torch compiles no frame of a bare `nn.Sequential` in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = planted()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("in_place", [False, True], ids=["wrapped", "in_place"])
def test_compiled_models(in_place: bool) -> None:
    model, scaler = Own(), GradScaler("cpu")
    run: Any = model
    if in_place:
        model.compile(backend="eager", fullgraph=True)
    else:
        run = torch.compile(model, backend="eager", fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(run, optimizer, scaler, log=lambda text: None) as seen:
        train(run, squares, 4, optimizer=optimizer, scaler=scaler)
        assert [d.module for d in seen.diagnoses] == ["layers.3.0"]
    assert torch._dynamo.eval_frame._stance.stance == "default"
    torch._dynamo.reset()


def test_fused_optimizers_decide_by_themselves() -> None:
    model, scaler = healthy(), GradScaler("cpu", init_scale=2.0**30)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    with watch(model, optimizer, scaler, log=lambda text: None) as seen:
        train(model, squares, 20, optimizer=optimizer, scaler=scaler)
        drops = sum(b < a for (_, a), (_, b) in zip(seen.loss_scale_history, seen.loss_scale_history[1:], strict=False))
        assert seen.skipped_steps == drops > 0
        assert seen.steps == 20


def test_growth_of_the_scale_is_in_the_history() -> None:
    model, scaler = healthy(), GradScaler("cpu", init_scale=4.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    with watch(model, optimizer, scaler) as seen:
        train(model, squares, 5, optimizer=optimizer, scaler=scaler)
        assert seen.loss_scale_history == [(0, 4.0), (2, 8.0), (4, 16.0)]


def test_accumulated_steps_are_recorded_as_one() -> None:
    model, scaler = planted(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, scaler, log=lambda text: None) as seen:
        for _ in range(2):
            optimizer.zero_grad()
            for micro in range(3):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = squares(model, micro)
                scaler.scale(loss / 3).backward()
            scaler.step(optimizer)
            scaler.update()
        assert [d.module for d in seen.diagnoses] == ["3.0"]
        assert seen.steps == 2


def test_lost_updates_and_weights_in_half() -> None:
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    texts: list[str] = []

    def loss(model: nn.Module, step: int) -> Any:
        return model(torch.ones(1, 4, dtype=torch.bfloat16)).sum()

    with watch(model, optimizer, log=texts.append) as seen:
        train(model, loss, 3, optimizer=optimizer, dtype=torch.bfloat16)
        assert seen.dead_updates == {"weight": 1.0}
        assert "weight 100%" in seen.summary()
        assert len(texts) == 1
        assert "weight in bfloat16" in texts[0]
        assert "float32 master weights" in texts[0]
    master = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(master.parameters(), 1e-3)
    with watch(master, optimizer) as seen:
        train(master, lambda m, _: m(torch.ones(1, 4)).sum(), 3, optimizer=optimizer, dtype=torch.bfloat16)
        assert seen.dead_updates == {"weight": 0.0}


def test_dead_updates_are_sampled_every_hundred_steps() -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 1.0]]))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with watch(model, optimizer) as seen:
        for step in range(101):
            for group in optimizer.param_groups:
                group["lr"] = 1e-12 if step >= 100 else 1e-3  # far below half an ulp of 1
            before = dict(seen.dead_updates)
            train(model, lambda m, _: m(torch.ones(1, 2)).sum(), 1, optimizer=optimizer, dtype=torch.bfloat16)
        assert before == {"weight": 0.0}
        assert seen.dead_updates == {"weight": 1.0}


def test_a_disabled_scaler_counts_as_none() -> None:
    model, scaler = healthy(), GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, scaler) as seen:
        train(model, squares, 2, optimizer=optimizer, scaler=scaler, dtype=torch.bfloat16)
        assert (seen.applied_steps, seen.loss_scale_history) == (2, [])


def _linear(log: Callable[[str], None] = lambda text: None) -> tuple[nn.Linear, Optimizer, Watch]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, optimizer, watch(model, optimizer, log=log)


def _fail(model: nn.Module, optimizer: Optimizer) -> None:
    """One step on a bad batch: the next one will be recorded."""
    model(torch.full((2, 4), math.nan)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()


def test_code_that_torch_only_looks_at_is_not_watched() -> None:
    model, _, seen = _linear()
    x = torch.full((2, 4), math.nan)
    with seen:
        assert torch.func.vmap(model)(x).shape == (2, 4)
        gradients = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(
            dict(model.named_parameters())
        )
        assert set(gradients) == {"weight", "bias"}
        compiled = torch.compile(lambda h: model(h).mean(), backend="eager", fullgraph=True)
        assert bool(compiled(x).isnan())
        exported = torch.export.export(model, (x,))
        assert exported.module()(x).shape == (2, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            assert torch.jit.trace(model, torch.ones(2, 4))(x).shape == (2, 4)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert model(torch.ones(2, 4)).shape == (2, 4)
        assert seen._tries == 0
        model(x)
        assert seen._tries > 0  # it is still there
    torch._dynamo.reset()


def test_a_step_that_is_compiled_around_the_model_is_diagnosed() -> None:
    model, scaler = Own(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = torch.compile(lambda x: model(x).float().square().mean(), backend="eager", fullgraph=True)
    with watch(model, optimizer, scaler, log=lambda text: None) as seen:
        for _ in range(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                value = loss(torch.randn(8, 64))
            scaler.scale(value).backward()
            scaler.step(optimizer)
            scaler.update()
        assert [d.module for d in seen.diagnoses] == ["layers.3.0"]
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", ["nested", "jagged", "csr", "mkldnn", "meta"])
def test_outputs_of_any_kind(kind: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.head(x)
            d = h.detach()
            odd = {
                "nested": lambda: torch.nested.as_nested_tensor([h[0], h[1, :2]]),
                "jagged": lambda: torch.nested.as_nested_tensor([h, h[:1]], layout=torch.jagged),
                "csr": lambda: d.to_sparse_csr(),
                "mkldnn": lambda: d.to_mkldnn(),
                "meta": lambda: d.to("meta"),
            }
            return h, odd[kind]()  # type: ignore[no-untyped-call]

    model, texts = Model(), []  # type: ignore[var-annotated]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested and CSR tensors are beta features
        with watch(model, optimizer, log=texts.append) as seen:
            for value in (0.0, math.nan, math.nan):
                optimizer.zero_grad()
                h, odd = model(torch.full((2, 4), value))
                (h.square().mean() + (torch.sum(odd.values()) if kind == "jagged" else 0.0)).backward()
                optimizer.step()
            assert seen.steps == 3
            assert [d.verdict for d in seen.diagnoses] == ["nonfinite_parameters"]
            assert texts == [seen.diagnoses[0].text()]


def test_gradients_of_any_kind() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    parameter.grad = torch.tensor([3.0 + 4.0j, 0.0]).conj()
    assert float(squared_norm([parameter])) == 25.0
    double = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    double.grad = torch.tensor([1e200, 0.0], dtype=torch.float64)
    assert squared_norm([double]) == math.inf
    meta = nn.Parameter(torch.zeros(2, device="meta"))
    meta.grad = torch.zeros(2, device="meta")
    assert squared_norm([meta]) == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CSR tensors are a beta feature
        sparse = nn.Parameter(torch.zeros(2, 2).to_sparse_csr())
        sparse.grad = torch.diag(torch.tensor([3.0, 4.0])).to_sparse_csr()
    assert float(squared_norm([sparse])) == 25.0


class Shy(Tensor):
    """A tensor that lets nobody look."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.aminmax:
            raise TypeError("not for such tensors")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def test_a_watch_that_fails_ends_and_says_so_once_and_the_loop_goes_on() -> None:
    model, scaler, texts = nn.Linear(4, 4), GradScaler("cpu", init_scale=4.0), []  # type: ignore[var-annotated]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = watch(model, optimizer, scaler, log=texts.append)
    model.register_forward_hook(lambda *_: None)  # the user's own stays
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4).as_subclass(Shy)).sum()
        scaler.scale(loss.as_subclass(Tensor)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert len(texts) == 1
    assert "TypeError: not for such tensors" in texts[0]
    assert len(model._forward_hooks) == 1
    model._forward_hooks.clear()
    assert _is_untouched(model, optimizer, scaler)
    assert seen.steps == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["inside", "after"])
@pytest.mark.parametrize("following", ["training", "evaluation"])
def test_an_exception_in_the_recorded_forward_pass_ends_the_recording(
    error: type[BaseException], where: str, following: str
) -> None:
    model, optimizer, seen = _linear()
    batches = [torch.ones(2, 4), torch.ones(2, 4), torch.full((2, 4), math.nan)]
    _fail(model, optimizer)

    def broken(*_: Any) -> None:
        raise error

    handle = model.register_forward_hook(broken) if where == "after" else model.register_forward_pre_hook(broken)
    with seen:
        with pytest.raises(error):
            model(batches[0])
        handle.remove()
        if where == "inside" and error is RuntimeError:
            assert torch._C._len_torch_dispatch_stack() == 0  # at once
        if following == "evaluation":
            with torch.no_grad():
                model(batches[1])
            assert torch._C._len_torch_dispatch_stack() == 0
        old = seen._armed
        model(batches[2]).sum().backward()
        assert seen._armed is not old or where == "after"  # what a hook raises after ours is not noticed
        optimizer.step()
        assert torch._C._len_torch_dispatch_stack() == 0
        assert [d.verdict for d in seen.diagnoses] == ["nonfinite_input"]


def test_a_forward_pass_without_gradients_that_belongs_to_the_step_costs_one_recording() -> None:
    model, optimizer, seen = _linear()
    with seen:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), math.nan)).sum().backward()
            with torch.no_grad():
                model(torch.ones(2, 4))
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
        assert [d.verdict for d in seen.diagnoses] == ["nonfinite_input"]


@pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
def test_a_model_that_is_checkpointed_as_a_whole(reentrant: bool) -> None:
    model, scaler = planted(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    with watch(model, optimizer, scaler, log=lambda text: None) as seen:
        for _ in range(8):
            optimizer.zero_grad()
            for x in (torch.randn(8, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = checkpoint(model, x, use_reentrant=reentrant).float().square().mean()
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert [d.module for d in seen.diagnoses] == ["3.0"]
        assert torch._C._len_torch_dispatch_stack() == 0


def test_a_watch_that_is_dropped_leaves_no_mode() -> None:
    model, optimizer, seen = _linear()
    _fail(model, optimizer)
    loss = model(torch.ones(2, 4)).sum()
    assert torch._C._len_torch_dispatch_stack() == 1
    del model, optimizer, seen, loss
    gc.collect()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_mode_of_the_users_around_the_optimizers_step() -> None:
    class Plain(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model, optimizer, seen = _linear()
    with seen:
        _fail(model, optimizer)
        model(torch.full((2, 4), math.nan)).sum().backward()
        with Plain() as mode:  # type: ignore[no-untyped-call]
            optimizer.step()
            assert _get_current_dispatch_mode_stack() == [mode]
        assert [d.verdict for d in seen.diagnoses] == ["nonfinite_input"]


@pytest.mark.parametrize("first", [0, 1])
def test_two_watches_of_one_scaler_closed_in_any_order(first: int) -> None:
    models, scaler = [nn.Linear(4, 4), nn.Linear(4, 4)], GradScaler("cpu", init_scale=4.0)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    watches = [watch(m, o, scaler) for m, o in zip(models, optimizers, strict=True)]
    watches[first].close()
    other = 1 - first

    def loss(model: nn.Module, step: int) -> Any:
        return model(torch.ones(2, 4)).float().mean()

    train(models[other], loss, 2, optimizer=optimizers[other], scaler=scaler)
    assert [watches[first].steps, watches[other].steps] == [0, 2]
    watches[other].close()
    assert _is_untouched(models[0], optimizers[0], scaler)
    assert _is_untouched(models[1], optimizers[1], scaler)


def test_copies_and_pickles_of_a_watched_scaler_work_and_are_not_watched() -> None:
    model, scaler = healthy(), GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, scaler) as seen:
        for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
            train(model, squares, 1, scaler=other)
            assert other.get_scale() == 4.0
            bound: Any = other.scale
            assert bound.__self__ is other
        assert seen.steps == 0
        train(model, squares, 1, optimizer=optimizer, scaler=scaler)
        assert seen.steps == 1


def test_the_default_log_is_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    model, scaler = planted(), GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch(model, optimizer, scaler):
        train(model, squares, 3, optimizer=optimizer, scaler=scaler)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("halfwise:") == 1


def test_bad_arguments() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UsageError, match="watch\\(model="):
        watch(optimizer, model)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="watch\\(optimizer="):
        Watch(model, 0.1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="GradScaler"):
        watch(model, optimizer, 65536.0)  # type: ignore[arg-type]


def test_single_bad_batches_are_told_and_not_taken_for_the_loss_scale() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    said: list[str] = []
    with watch(model, optimizer, scaler, log=said.append) as seen:
        for step in range(12):
            x = torch.ones(2, 4)
            if step in (3, 7):
                x[0, 0] = float("nan")
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert seen.nonfinite_steps == [3, 7]
    assert len(said) == 1
    assert "step 3 computed NaN or inf" in said[0]
    summary = seen.summary()
    assert "NaN or inf in the model's output or the loss in 2 steps: 3, 7" in summary
    assert "healthy" not in summary

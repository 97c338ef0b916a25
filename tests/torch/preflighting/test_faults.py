"""Where digits are lost, told from a traced run beside a float32 one; and that watching a run is no part of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from halfwise.core.formats import get_format
from halfwise.core.hazards import Hazard
from halfwise.torch.preflighting.faults import infinite_constants, lost_digits
from halfwise.torch.preflighting.observe import Run, observe
from halfwise.torch.preflighting.reference import reference_of
from halfwise.torch.preflighting.regions import setting_of
from halfwise.torch.preflighting.samples import errors_against
from halfwise.torch.profile import profiled_layers
from halfwise.torch.tracing.replay import replay

SETTING = setting_of("mixed_float16", "cuda:ampere", "cpu")


class Code(nn.Module):
    """A layer, and code behind it."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.fc(x))


def _runs(code: Callable[[Tensor], Tensor]) -> tuple[Run, Run]:
    torch.manual_seed(0)
    model, x = Code(code), torch.randn(16, 4)

    def closure() -> Tensor:
        found = model(x).float()
        return found if found.numel() == 1 else found.mean()

    run = observe(
        model, closure, SETTING.region, 1.0, {}, traced=True, around=SETTING.whole_run(), emulated=SETTING.emulated
    )
    reference = observe(model, closure, SETTING.full, 1.0, {}, traced=True)
    assert run.sound
    assert reference.sound
    return run, reference


def _lost(code: Callable[[Tensor], Tensor]) -> list[Hazard]:
    return lost_digits(*_runs(code), get_format("float16").eps)


def _chaos(y: Tensor) -> Tensor:
    """Doubles an error at each step."""
    y = torch.sigmoid(y)
    for _ in range(14):
        y = 3.9 * y * (1 - y)
    return y


def test_the_first_operation_that_makes_a_wrong_result_of_nearly_right_inputs() -> None:
    (found,) = _lost(lambda y: torch.tanh(torch.sin(4000 * y)))
    assert (found.kind, found.operation, found.direction) == ("precision", "aten.sin", "forward")
    assert found.source.startswith("test_faults.py:")
    assert "its inputs by 0.0" in found.detail
    assert _lost(lambda y: torch.tanh(torch.sin(y))) == []


def test_an_error_that_grows_slowly_is_no_operations_fault() -> None:
    run, reference = _runs(_chaos)
    assert run.trace is not None
    assert reference.trace is not None
    assert max(errors_against(run.trace, reference.trace).values()) > 0.3
    assert lost_digits(run, reference, get_format("float16").eps) == []


def test_a_scalar_that_is_near_0_by_chance_has_lost_nothing() -> None:
    def nearly_0(y: Tensor) -> Tensor:
        total = y.sum()
        return total - total.detach().half().float() * (1 - 1e-5)

    assert _lost(nearly_0) == []


def test_what_the_loss_does_not_depend_on_does_not_count() -> None:
    def with_a_side_issue(y: Tensor) -> Tensor:
        torch.sin(4000 * y)
        return y

    assert _lost(with_a_side_issue) == []


def test_a_constant_that_became_infinite_and_does_no_harm_is_a_note() -> None:
    run, _ = _runs(lambda y: torch.softmax(torch.where(y > 0, y, -1e9), -1))
    assert run.trace is not None
    (note,) = infinite_constants(run.trace)
    assert "-1e+09" in note
    assert "fine in a mask" in note
    run, _ = _runs(lambda y: torch.softmax(torch.where(y > 0, y, -float("inf")).nan_to_num(0.0), -1))
    assert run.trace is not None
    assert infinite_constants(run.trace) == []


def test_watching_is_no_part_of_what_is_traced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
    x = torch.randn(8, 4)

    def closure() -> Tensor:
        y: Tensor = model(x).mean()
        return y

    plain = replay(model, [closure], SETTING.full, 1.0, traced=True).trace
    reference = reference_of(model, (closure,), SETTING).runs[0].trace
    watched = observe(model, closure, SETTING.full, 1.0, profiled_layers(model), traced=True).trace
    assert plain is not None
    names = [record.operation for record in plain.records]
    for trace in (reference, watched):
        assert trace is not None
        assert [record.operation for record in trace.records] == names


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_gradients_are_kept_without_the_loss_scale(scale: float) -> None:
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    run = observe(model, lambda: model(x).mean(), SETTING.full, scale, {"": model}, traced=False)
    assert torch.allclose(run.gradients[id(model.weight)], x.mean(0, keepdim=True))
    assert model.weight.grad is None
    assert run.layers.gradients[""] == pytest.approx(scale**2 / 8)

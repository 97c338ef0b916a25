"""What code raises under a policy becomes a hazard with a place and a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from halfwise.core.hazards import Hazard
from halfwise.torch.preflighting.failures import hazard_of_failure
from halfwise.torch.preflighting.observe import observe
from halfwise.torch.preflighting.regions import setting_of

SETTING = setting_of("mixed_float16", "here", "cpu")


class Middle(nn.Module):
    """Runs some code between two layers."""

    def __init__(self, code: Any) -> None:
        super().__init__()
        self.code = code
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.code(x, self.weight)
        return y


def _hazard(code: Any, *, traced: bool = True) -> Hazard:
    model = nn.Sequential(nn.Linear(4, 4), Middle(code), nn.Linear(4, 1))
    run = observe(model, lambda: model(torch.ones(2, 4)).float().sum(), SETTING.region, 1.0, {}, traced=traced)
    assert run.error is not None
    assert not run.sound
    return hazard_of_failure(model, run, SETTING)


def _line(code: Any) -> int:
    return int(code.__code__.co_firstlineno)


def _masked(x: Tensor, _: Tensor) -> Tensor:
    return x.masked_fill(x > 0, -1e9)


def _mixed(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return x @ weight


class Forgetful(torch.autograd.Function):
    """Its backward multiplies half with float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return gradient @ weight.t(), None


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize(
    ("code", "kind", "operation", "remedy"),
    [
        (_masked, "mask", "aten.masked_fill", 'masked_fill(hidden, float("-inf"))'),
        (_mixed, "unsupported", "aten.mm", "cast both sides to one dtype"),
    ],
)
def test_forward(code: Any, kind: str, operation: str, remedy: str, traced: bool) -> None:
    found = _hazard(code, traced=traced)
    assert (found.kind, found.module, found.module_class, found.direction) == (kind, "1", "Middle", "forward")
    assert found.source.startswith("test_failures.py:")
    assert found.source.endswith(tuple(str(_line(code) + offset) for offset in (1, 2)))
    assert found.operation == (operation if traced else "")
    assert remedy in found.fix[0]


def test_a_custom_function_is_named_and_attributed_to_the_module_that_calls_it() -> None:
    found = _hazard(Forgetful.apply)
    assert (found.kind, found.module, found.direction) == ("custom_function", "1", "backward")
    assert found.operation == "aten.mm"
    assert "Forgetful.backward gets float16 beside float32" in found.detail
    assert "over Forgetful.forward" in found.fix[0]
    assert "custom_bwd" in found.fix[1]
    assert found.source == f"test_failures.py:{_line(Forgetful.backward) + 3}"


def test_what_halfwise_itself_refuses_is_not_caught() -> None:
    from halfwise.errors import UsageError

    model = nn.Linear(4, 1)
    with pytest.raises(UsageError, match="one element"):
        observe(model, lambda: model(torch.ones(2, 4)), SETTING.region, 1.0, {}, traced=True)

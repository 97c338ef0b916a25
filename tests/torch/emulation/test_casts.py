"""The cache of weights' casts, compared with autocast's own, which CPU and CUDA share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from halfwise.torch.emulation import emulated_region, emulation
from halfwise.torch.emulation.casts import eligible
from halfwise.torch.emulation.installation import _installation

Region = Callable[[], AbstractContextManager[Any]]
ONE = torch.ones(1, 1)


def native() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.float16)


def emulated() -> AbstractContextManager[Any]:
    return emulated_region("cuda", "float16")


def weight() -> Tensor:
    return torch.ones(1, 1, requires_grad=True)


def gradient_of_two_uses(make: Region, w: Tensor, *, keep: bool = True) -> float:
    with make(), torch.autocast("cpu", dtype=torch.float16, cache_enabled=keep):
        loss = (F.linear(ONE, w).float() + F.linear(ONE, w).float()) * 4e4
    loss.backward()
    assert w.grad is not None
    return float(w.grad)


def used_twice(make: Region) -> float:
    return gradient_of_two_uses(make, weight())


def used_twice_without_cache(make: Region) -> float:
    return gradient_of_two_uses(make, weight(), keep=False)


def views(make: Region) -> float:
    """A leaf that is a view, such as a slice of a flat buffer of weights."""
    return gradient_of_two_uses(make, torch.ones(2, 1)[:1].requires_grad_())


def changed_within(make: Region) -> tuple[float, float]:
    w = weight()
    with make():
        F.linear(ONE, w)
        with torch.no_grad():
            w.mul_(3.0)
        within = F.linear(ONE, w)
    with make():
        return float(within.detach()), float(F.linear(ONE, w).detach())


def nested_region_ended(make: Region) -> float:
    w = weight()
    with make():
        with make():
            F.linear(ONE, w)
        with torch.no_grad():
            w.mul_(3.0)
        return float(F.linear(ONE, w).detach())


def without_gradients_first(make: Region) -> tuple[bool, bool]:
    w = weight()
    with make():
        with torch.no_grad():
            first = F.linear(ONE, w)
        return first.requires_grad, F.linear(ONE, w).requires_grad


CASES: dict[Callable[[Region], Any], Any] = {
    used_twice: float("inf"),  # 4e4 and 4e4 add up in float16
    used_twice_without_cache: pytest.approx(8e4, rel=1e-3),
    views: pytest.approx(8e4, rel=1e-3),
    changed_within: (1.0, 3.0),
    nested_region_ended: 1.0,
    without_gradients_first: (False, True),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cache_is_as_autocasts_own(case: Callable[[Region], Any]) -> None:
    assert case(emulated) == case(native) == CASES[case]


def test_a_cast_to_another_format_is_a_mistake_that_shows() -> None:
    for make in (native, emulated):
        w = weight()
        with make():
            F.linear(ONE, w)
            with (
                pytest.raises(RuntimeError, match=r"expected .* dtype"),
                torch.autocast("cpu", dtype=torch.bfloat16),
            ):
                F.linear(ONE, w)


def test_tensors_of_other_devices_are_not_for_the_cpus_autocast() -> None:
    assert eligible(ONE)
    assert not eligible(ONE.to("meta"))
    assert not eligible(ONE.double())


def test_casts_are_forgotten_between_regions_of_one_emulation() -> None:
    w = weight()
    with emulation("float16"):
        for expected in (1.0, 2.0):
            with native():
                assert float(F.linear(ONE, w).detach()) == expected
            w.data.mul_(2.0)  # which no version counter tells of


def test_no_cast_outlives_the_emulation() -> None:
    w = weight()
    with native():
        with emulated():
            F.linear(ONE, w)
        assert not _installation._casts._casts


def test_autocasts_own_casts_are_forgotten_too() -> None:
    w = weight()
    with ExitStack() as outlives:
        with native():
            F.linear(ONE, w)
            outlives.enter_context(emulation("float16"))
        w.data.mul_(2.0)
    with native():
        assert float(F.linear(ONE, w).detach()) == 2.0

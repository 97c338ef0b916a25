"""The loss scale on tensors: never in half, and its state survives."""

from __future__ import annotations

import pytest
import torch

from halfwise.core.loss_scale import LossScaleSettings
from halfwise.errors import UsageError
from halfwise.torch.loss_scale import LossScale


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_loss_in_half_is_scaled_in_float32(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scaled = LossScale(LossScaleSettings(initial=2.0**20)).scaled(torch.ones(shape, dtype=dtype))
    assert scaled.dtype is torch.float32
    assert float(scaled) == 2.0**20


def test_the_tensor_follows_the_scale() -> None:
    scale = LossScale(LossScaleSettings(initial=8.0))
    assert float(scale.scaled(torch.ones(()))) == 8.0
    scale.update(True)
    assert scale.value == 4.0
    assert float(scale.scaled(torch.ones(()))) == 4.0


def test_at_floor() -> None:
    scale = LossScale(LossScaleSettings(initial=2.0))
    assert not scale.at_floor
    scale.update(True)
    assert scale.at_floor


def test_every_field_of_the_state_survives() -> None:
    settings = LossScaleSettings(
        initial=512.0,
        floor=0.5,
        ceiling=4096.0,
        growth_factor=4.0,
        backoff_factor=0.25,
        growth_interval=7,
        hysteresis=3,
        growth_delay=2,
    )
    scale = LossScale(settings)
    for flag in (False, True, False, True, True, True):
        scale.update(flag)
    twin = LossScale(LossScaleSettings())
    twin.load_state_dict(scale.state_dict())
    assert (twin.settings, twin.state) == (scale.settings, scale.state)
    assert twin.state.scale != settings.initial


def test_a_damaged_state_is_refused() -> None:
    with pytest.raises(UsageError, match="_growth_tracker"):
        LossScale(LossScaleSettings()).load_state_dict({"scale": 3.0, "growth_factor": 2.0})

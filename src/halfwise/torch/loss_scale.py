"""The loss scale of a PyTorch training.

Here the core's state machine meets the tensor that multiplies the loss, and GradScaler's keys.

The state lives on the host. A step in float16 reads one flag from the device anyway (as
`torch.amp.GradScaler` does), so a copy of the state machine in device operations would save nothing and would
have to be kept equal to the specification.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from halfwise.core.loss_scale import LossScaleSettings, LossScaleState, initial_state, update
from halfwise.errors import UsageError

__all__ = ["LossScale"]

_GRAD_SCALER_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class LossScale:
    """The loss scale of one training.

    Attributes:
        settings: how it moves.
        state: where it stands.
    """

    def __init__(self, settings: LossScaleSettings) -> None:
        self.settings = settings
        self.state = initial_state(settings)
        self._tensors: dict[torch.device, tuple[float, Tensor]] = {}

    @property
    def value(self) -> float:
        """The scale that multiplies the loss."""
        return self.state.scale

    @property
    def at_floor(self) -> bool:
        """True where the scale can go no lower."""
        return self.state.scale <= self.settings.floor

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss` times the scale, in float32 (a loss in half would overflow)."""
        value, tensor = self._tensors.get(loss.device, (None, None))
        if tensor is None or value != self.state.scale:
            tensor = torch.full((), self.state.scale, dtype=torch.float32, device=loss.device)
            self._tensors[loss.device] = (self.state.scale, tensor)
        return loss.float() * tensor

    def update(self, found_nonfinite: bool) -> None:
        """Moves the scale after a step."""
        self.state = update(self.settings, self.state, found_nonfinite)

    def state_dict(self) -> dict[str, Any]:
        """The state under `GradScaler`'s keys, and under `"halfwise"` what GradScaler does not have."""
        return {
            "scale": self.state.scale,
            "growth_factor": self.settings.growth_factor,
            "backoff_factor": self.settings.backoff_factor,
            "growth_interval": self.settings.growth_interval,
            "_growth_tracker": self.state.growth_tracker,
            "halfwise": {"settings": asdict(self.settings), "state": asdict(self.state)},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave, or the state dict of a `torch.amp.GradScaler`.

        A GradScaler's scale outside floor and ceiling is moved to the nearer of the two. `{}`, the state of a
        GradScaler that was not enabled, changes nothing.

        Raises:
            UsageError: keys are missing.
        """
        if not state:
            return
        if "halfwise" in state:
            self.settings = LossScaleSettings(**state["halfwise"]["settings"])
            self.state = LossScaleState(**state["halfwise"]["state"])
            return
        missing = [key for key in _GRAD_SCALER_KEYS if key not in state]
        if missing:
            raise UsageError(
                f"not the state of a loss scale: the keys {missing} are missing; "
                f"give mp.state_dict() or the state_dict() of a torch.amp.GradScaler ({', '.join(_GRAD_SCALER_KEYS)})"
            )
        if not 0.0 < float(state["scale"]) < math.inf:
            raise UsageError(f"the state's scale is {state['scale']!r}; a loss scale is positive and finite")
        bounded = min(max(float(state["scale"]), self.settings.floor), self.settings.ceiling)
        self.settings = replace(
            self.settings,
            growth_factor=float(state["growth_factor"]),
            backoff_factor=float(state["backoff_factor"]),
            growth_interval=int(state["growth_interval"]),
        )
        self.state = replace(self.state, scale=bounded, growth_tracker=int(state["_growth_tracker"]))

"""The states of all global random-number generators that a training loop may draw from: torch, CUDA, Python, numpy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["generator_states", "set_generator_states"]


def generator_states() -> dict[str, Any]:
    """The generators' states as tensors, numbers, strings and tuples. CUDA's are there once CUDA is in use."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if _cuda_in_use() else [],
        "python": random.getstate(),
        "numpy": (str(kind), torch.from_numpy(np.array(keys)), int(position), int(has_gauss), float(gauss)),
    }


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())


def set_generator_states(states: dict[str, Any]) -> None:
    """Puts the generators back to `states`. CUDA devices that are missing, then or now, are left alone."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
            torch.cuda.set_rng_state(state, device)
    random.setstate(states["python"])
    kind, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy(), position, has_gauss, gauss))

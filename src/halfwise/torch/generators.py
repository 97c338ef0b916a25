"""The states of all global random-number generators that a training loop may draw from: torch, CUDA, Python, numpy."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Self

import numpy as np
import torch

__all__ = ["HOSTS", "RandomState", "generator_states", "set_generator_states"]


HOSTS = ("python", "numpy")
"""The generators of the host besides torch's."""


class RandomState:
    """Where the generators stand: torch's on the CPU and the given CUDA devices, Python's `random`, numpy's global one.

    Made at every training step, so the states are kept as their owners give them, and taken apart in `state_dict` only.

    Args:
        devices: whose generators to keep besides torch's on the CPU; all but CUDA devices are passed over.
        hosts: which of Python's and numpy's generators to keep. Reading both takes 30 us, torch's 1 us.
    """

    def __init__(self, devices: Iterable[torch.device], hosts: Collection[str] = HOSTS) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = {str(d): torch.cuda.get_rng_state(d) for d in devices if d.type == "cuda"}
        self._python: tuple[Any, ...] | None = random.getstate() if "python" in hosts else None
        self._numpy: dict[str, Any] | None = np.random.get_state(legacy=False) if "numpy" in hosts else None

    def restore(self) -> None:
        """Rewinds the generators to where they were. CUDA devices that are missing here are left alone."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            if torch.cuda.is_available() and (torch.device(device).index or 0) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, device)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            np.random.set_state(self._numpy)

    def hosts_drawn_since(self) -> frozenset[str]:
        """Which of Python's and numpy's generators have moved since this state was taken."""
        now = RandomState((), self._kept())
        before, after = self.state_dict(), now.state_dict()
        return frozenset(name for name in HOSTS if before.get(name) != after.get(name))

    def _kept(self) -> tuple[str, ...]:
        return tuple(n for n, s in (("python", self._python), ("numpy", self._numpy)) if s is not None)

    def state_dict(self) -> dict[str, Any]:
        """The states: torch's as tensors on the CPU, the others' as numbers, strings, None, lists and dicts of them."""
        states: dict[str, Any] = {"cpu": self._cpu, **self._cuda}
        if self._python is not None:
            version, words, gauss = self._python
            states["python"] = {"version": version, "words": list(words), "gauss": gauss}
        if self._numpy is not None:
            states["numpy"] = _without_arrays(self._numpy)
        return states

    @classmethod
    def from_state_dict(cls, states: Mapping[str, Any]) -> Self:
        """The inverse of `state_dict`. Generators that it does not tell of stay where they stand."""
        found = cls(())
        found._cpu = states["cpu"].cpu()
        found._cuda = {name: state.cpu() for name, state in states.items() if name.startswith("cuda")}
        if "python" in states:
            python = states["python"]
            found._python = (python["version"], tuple(python["words"]), python["gauss"])
        if "numpy" in states:
            found._numpy = states["numpy"]
        return found


def generator_states() -> dict[str, Any]:
    """The state dict of all generators; CUDA's are there once CUDA is in use."""
    count = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
    return RandomState(torch.device("cuda", index) for index in range(count)).state_dict()


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Puts the generators back to `states`, which `generator_states` gave."""
    RandomState.from_state_dict(states).restore()


def _without_arrays(state: dict[str, Any]) -> dict[str, Any]:
    words = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in state["state"].items()}
    return {**state, "state": words}

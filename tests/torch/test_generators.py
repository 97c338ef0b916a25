from __future__ import annotations

import random

import numpy as np
import torch

from halfwise.torch.generators import generator_states, set_generator_states


def draw() -> tuple[object, ...]:
    normal = np.random.normal()  # keeps a second value back: part of numpy's state
    return random.random(), random.gauss(0, 1), normal, np.random.rand(), torch.rand(3).tolist()


def test_every_generator_goes_back() -> None:
    draw()
    states = generator_states()
    first = draw()
    assert draw() != first
    set_generator_states(states)
    assert draw() == first

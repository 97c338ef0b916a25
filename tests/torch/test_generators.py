from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from halfwise.torch.generators import RandomState, generator_states, set_generator_states
from halfwise.torch.tree import decode, encode


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


def through_json(states: dict[str, Any]) -> Any:
    tensors: dict[str, Tensor] = {}
    return decode(json.loads(json.dumps(encode(states, tensors, "random"))), tensors)


def through_torch(states: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("transport", [through_json, through_torch])
@pytest.mark.parametrize("warm_up", [0, 1])  # with and without a second normal value kept back
def test_states_survive_being_stored(transport: Callable[[dict[str, Any]], Any], warm_up: int) -> None:
    for _ in range(warm_up):
        draw()
    state = RandomState([torch.device("cpu")])
    first = draw()
    RandomState.from_state_dict(transport(state.state_dict())).restore()
    assert draw() == first


def test_another_bit_generator_of_numpys() -> None:
    np.random.mtrand.set_bit_generator(np.random.PCG64(1))
    try:
        states = through_json(generator_states())
        first = draw()
        set_generator_states(states)
        assert draw() == first
    finally:
        np.random.mtrand.set_bit_generator(np.random.MT19937())


def test_generators_that_a_state_does_not_tell_of_are_left_alone() -> None:
    states = RandomState(()).state_dict()
    first = draw()
    expected = random.getstate()
    set_generator_states({"cpu": states["cpu"]})
    assert random.getstate() == expected
    assert torch.rand(3).tolist() == first[-1]


def test_numpys_state_is_read_anew_whenever_it_changed() -> None:
    for use in (np.random.rand, np.random.normal, np.random.normal, lambda: np.random.seed(3), lambda: None):
        for _ in range(2):
            use()
            state = RandomState(())
            first = draw()
            state.restore()
            assert draw() == first
            state.restore()


def test_a_normal_value_kept_back_survives_a_look_in_between() -> None:
    np.random.seed(0)
    np.random.normal()
    outer = RandomState(())
    first = np.random.normal()
    inner = RandomState(())  # the same memory, but nothing kept back
    outer.restore()
    again = RandomState(())
    assert np.random.normal() == first
    again.restore()
    assert np.random.normal() == first
    inner.restore()
    assert np.random.normal() != first


def test_only_generators_that_were_drawn_from_are_found() -> None:
    before = RandomState(())
    assert before.hosts_drawn_since() == frozenset()
    torch.rand(1)
    assert before.hosts_drawn_since() == frozenset()
    random.random()
    assert before.hosts_drawn_since() == {"python"}
    np.random.rand()
    assert before.hosts_drawn_since() == {"python", "numpy"}
    before.restore()
    assert before.hosts_drawn_since() == frozenset()


def test_generators_that_are_not_kept_are_left_alone() -> None:
    state = RandomState((), ["numpy"])
    first = np.random.rand()
    moved = random.random()
    state.restore()
    assert np.random.rand() == first
    assert random.random() != moved
    assert set(state.state_dict()) == {"cpu", "numpy"}

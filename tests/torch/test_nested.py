"""Tensors inside nested containers."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import torch

from halfwise.torch.nested import floating_tensors, map_tensors

Pair = namedtuple("Pair", ["left", "right"])
ONE, TWO = torch.ones(1), torch.full((1,), 2.0)


def test_floating_tensors_are_found_wherever_they_are() -> None:
    value = [ONE, {"a": (TWO, torch.tensor(3), None)}, Pair(torch.empty(0), "text")]
    assert [float(t) for t in floating_tensors(value)] == [1.0, 2.0]


def test_mapping_keeps_types_and_changes_nothing_given() -> None:
    value = Pair(OrderedDict(a=ONE), [TWO, "text", (ONE,), {"b": TWO}])
    doubled = map_tensors(value, lambda tensor: tensor * 2)
    assert isinstance(doubled, Pair)
    assert isinstance(doubled.left, OrderedDict)
    assert float(doubled.left["a"]) == 2.0
    assert doubled.right[1] == "text"
    assert (float(doubled.right[2][0]), float(doubled.right[3]["b"])) == (2.0, 4.0)
    assert float(value.left["a"]) == 1.0

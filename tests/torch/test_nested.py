"""Tensors inside nested containers."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

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


@dataclass(frozen=True, slots=True)
class Output:
    logits: Tensor
    states: list[Tensor]
    note: str = ""
    extra: Tensor | None = field(default=None, init=False)


@dataclass
class Node:
    value: Tensor
    parent: Any = None
    children: list[Any] = field(default_factory=list)


def test_what_torch_returns_keeps_its_type() -> None:
    best = torch.tensor([1.0, 3.0, 2.0]).topk(2)
    doubled = map_tensors(best, lambda tensor: tensor * 2)
    assert type(doubled) is type(best)
    assert doubled.values.tolist() == [6.0, 4.0]
    packed = nn.utils.rnn.pack_sequence([ONE, TWO])
    assert map_tensors(packed, lambda tensor: tensor * 2).data.tolist() == [2.0, 4.0]
    assert type(map_tensors(torch.Size([2]), lambda tensor: tensor)) is torch.Size


def test_dataclasses() -> None:
    value = Output(ONE, [TWO], "text")
    assert [float(t) for t in floating_tensors([value])] == [1.0, 2.0]
    doubled = map_tensors(value, lambda tensor: tensor * 2)
    assert isinstance(doubled, Output)
    assert (float(doubled.logits), float(doubled.states[0]), doubled.note) == (2.0, 4.0, "text")
    assert (float(value.logits), float(value.states[0])) == (1.0, 2.0)
    assert map_tensors(value, lambda tensor: tensor) is value  # nothing changed
    assert map_tensors(Output, lambda tensor: tensor) is Output


def test_a_dataclass_that_leads_back_to_itself() -> None:
    root = Node(ONE)
    root.children.append(Node(TWO, parent=root))
    assert [float(t) for t in floating_tensors(root)] == [1.0, 2.0]
    doubled = map_tensors(root, lambda tensor: tensor * 2)
    assert (float(doubled.value), float(doubled.children[0].value)) == (2.0, 4.0)

"""Workloads by name, from files and from modules, and everything that can be wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from halfwise.errors import HalfwiseError, UsageError
from halfwise.workloads.load import BUILT_IN, load_workload

GOOD = """
import torch
import halfwise
from helper import ROWS

def workload():
    model = torch.nn.Linear(4, 1)
    return halfwise.Workload(
        model=model, batches=[torch.ones(ROWS, 4)], loss=lambda model, batch: model(batch).square().mean(), name="mine"
    )

def with_arguments(size):
    return workload()

def something_else():
    return 3

def raising():
    raise ZeroDivisionError("by zero")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train_mine.py").write_text(GOOD, encoding="utf-8")
    (tmp_path / "helper.py").write_text("ROWS = 8\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    return tmp_path


def test_a_function_in_a_file(folder: Path) -> None:
    before = list(sys.path)
    found = load_workload(f"{folder / 'train_mine.py'}:workload")
    assert (found.name, found.framework, len(found.batches[0])) == ("mine", "torch", 8)
    assert sys.path == before


def test_a_function_in_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load_workload("train_mine:workload").name == "mine"
    monkeypatch.delitem(sys.modules, "train_mine")


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_ones_train(name: str) -> None:
    found = load_workload(name)
    assert found.name == name
    assert len(found.batches) == 4
    losses = []
    for batch in (found.batches[0],) * 4:
        found.optimizer.zero_grad()
        loss = found.loss(found.model, batch)
        loss.backward()
        found.optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert all(p.grad is not None for p in found.model.parameters())


def test_the_seed_decides_weights_and_data() -> None:
    one, same, other = (load_workload("unet", seed=seed) for seed in (1, 1, 2))
    assert all(map(torch.equal, one.batches[0], same.batches[0]))
    assert not torch.equal(one.batches[0][0], other.batches[0][0])
    assert torch.equal(one.model.last.weight, same.model.last.weight)
    assert not torch.equal(one.model.last.weight, other.model.last.weight)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imagenet", "no workload 'imagenet'; built in are image, text, convnet"),
        ("{folder}/none.py:workload", "there is no file"),
        ("no_such_module:workload", "there is no module 'no_such_module'"),
        ("{folder}/train_mine.py:missing", "there is no function 'missing'; it has workload, with_arguments"),
        ("{folder}/train_mine.py:with_arguments", "needs arguments"),
        ("{folder}/train_mine.py:something_else", "returned int; it must return a halfwise.Workload"),
    ],
)
def test_what_is_no_workload_is_told(folder: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_workload(name.format(folder=folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{folder}/train_mine.py:raising", r"raised ZeroDivisionError: by zero \(.*train_mine.py:\d+\)"),
        ("{folder}/broken.py:workload", "raised ModuleNotFoundError"),
    ],
)
def test_what_the_users_code_raises_is_told_with_its_place(folder: Path, name: str, message: str) -> None:
    with pytest.raises(HalfwiseError, match=message) as caught:
        load_workload(name.format(folder=folder))
    assert not isinstance(caught.value, UsageError)
    assert caught.value.__cause__ is not None


def test_options_that_do_not_go_together(folder: Path) -> None:
    with pytest.raises(UsageError, match="goes with built-in workloads"):
        load_workload(f"{folder / 'train_mine.py'}:workload", framework="torch")
    with pytest.raises(UsageError, match="--seed 3 goes with built-in workloads"):
        load_workload(f"{folder / 'train_mine.py'}:workload", seed=3)
    with pytest.raises(UsageError, match="belongs to Keras"):
        load_workload("image", backend="jax")
    with pytest.raises(UsageError, match="allowed: 'torch', 'keras'"):
        load_workload("image", framework="mxnet")

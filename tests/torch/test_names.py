"""Module paths as plans spell them."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from halfwise.torch.names import clean_path, is_compiled, named_layers, unwrap


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("", ""),
        ("encoder.0", "encoder.0"),
        ("_orig_mod.encoder.0", "encoder.0"),
        ("module.encoder", "encoder"),
        ("_orig_mod.module.module.encoder", "encoder"),
        ("encoder._orig_mod.fc", "encoder.fc"),
        ("encoder.module.fc", "encoder.module.fc"),  # a module of the user's own that is called module
    ],
)
def test_wrappers_prefixes_go(path: str, clean: str) -> None:
    assert clean_path(path) == clean


def test_wrapped_models_have_the_plain_models_paths() -> None:
    plain = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    compiled = cast(nn.Module, torch.compile(plain, backend="eager"))
    parallel = nn.DataParallel(plain)
    expected = ["", "0", "1", "1.0"]
    for model in (plain, compiled, parallel):
        assert unwrap(model) is plain
        assert [path for path, _ in named_layers(model)] == expected


def test_a_compiled_part_of_a_model() -> None:
    model = nn.Sequential(nn.Linear(1, 1), cast(nn.Module, torch.compile(nn.Linear(1, 1), backend="eager")))
    assert [path for path, _ in named_layers(model)] == ["", "0", "1", "1"]


def test_a_users_own_module_that_is_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"fc": nn.Linear(1, 1), "module": nn.ModuleDict({"fc": nn.Linear(1, 1)})})
    expected = ["", "fc", "module", "module.fc"]
    assert [path for path, _ in named_layers(model)] == expected
    assert [path for path, _ in named_layers(nn.DataParallel(model))] == expected


def test_all_names_of_a_shared_module() -> None:
    part = nn.Linear(1, 1)
    model = nn.Sequential(part, part)
    assert [path for path, _ in named_layers(model)] == ["", "0"]
    assert [path for path, _ in named_layers(model, all_names=True)] == ["", "0", "1"]


def test_compiled_models_are_known() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    assert not is_compiled(model)
    assert is_compiled(cast(nn.Module, torch.compile(model, backend="eager")))
    model[0].compile(backend="eager")
    assert is_compiled(model)

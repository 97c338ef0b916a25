"""Module paths as plans spell them."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from halfwise.torch.names import clean_path, named_layers, unwrap


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

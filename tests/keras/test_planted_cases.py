"""A plan keeps exactly the layer that has a planted trouble: a fixed part of `benchmarks/planted.py`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import halfwise.keras as hw
from halfwise.keras.measure import timed_layers

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
try:
    CASES, FORMATS = (getattr(import_module("_planted_cases"), name) for name in ("CASES", "FORMATS"))
    planted = import_module("_planted_keras").planted
finally:
    del sys.path[0]

NUMBERS = (4, 6, 8, 10, 13, 17)  # each trouble once


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[number] for number in NUMBERS], ids=lambda case: case.name)
def test_exactly_the_layer_with_the_trouble_is_kept(case: Any) -> None:
    for name in FORMATS:
        workload, path = planted(case)
        layers = timed_layers(workload.model)
        timing = hw.TimingTable.uniform(layers, relative={name: 0.5})
        plan = hw.plan(workload.model, list(workload.batches), loss=workload.loss, timing=timing)
        kept = [layer for layer in layers if plan.compute(layer) == "float32"]
        assert kept == ([path] if name in case.barred else [])

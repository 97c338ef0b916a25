"""A preflight flags the right module and kind on every hazardous model, and is silent on every sound one.

The models are those of `benchmarks/preflight.py`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfwise.torch.preflight import preflight


def _cases() -> Any:
    file = Path(__file__).parents[3] / "benchmarks" / "_preflight_cases.py"
    spec = importlib.util.spec_from_file_location("_preflight_cases", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = _cases()

BY_HAND = {"squares in the loss", "binary cross entropy", "weights in bfloat16", "units that are missing"}
"""No plan puts layers into float32 for these."""


@pytest.mark.parametrize("case", CASES.HAZARDOUS, ids=lambda case: case.name)
def test_a_hazard_is_flagged_where_it_is(case: Any) -> None:
    model, closure = case.make()
    found = preflight(model, closure, policy=case.policy, target=case.target)
    assert [(hazard.kind, hazard.module) for hazard in found.hazards] == [(case.kind, case.module)]
    hazard = found.hazards[0]
    assert hazard.detail
    assert hazard.fix or hazard.kind in ("precision", "vanishing")
    if case.kind not in ("half_weights", "not_native"):
        assert hazard.source.startswith("_preflight_cases.py:")
        assert found.cured is True
    if case.name not in BY_HAND:
        assert found.plan is not None
        assert case.module in [rule.path for rule in found.plan.layers if rule.compute == "float32"]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "tensorfloat32", "float8"])
@pytest.mark.parametrize("case", CASES.SOUND, ids=lambda case: case.name)
def test_no_alarm_on_a_sound_model(case: Any, policy: str) -> None:
    torch.manual_seed(0)
    model, closure = case.make()
    found = preflight(model, closure, policy=policy, target="cuda:hopper")
    assert found.hazards == ()


def test_both_lists_are_long_and_of_many_kinds() -> None:
    assert len(CASES.HAZARDOUS) >= 12
    assert len(CASES.SOUND) >= 12
    assert len({case.kind for case in CASES.HAZARDOUS}) >= 9

"""Hazards: every kind has its sentence, and all fields come out as JSON-ready values."""

from __future__ import annotations

import json
from typing import get_args

from halfwise.core.hazards import HAZARDS, Hazard, HazardKind


def test_every_kind_has_a_sentence() -> None:
    assert set(HAZARDS) == set(get_args(HazardKind))
    assert all(sentence and not sentence.endswith(".") for sentence in HAZARDS.values())


def test_all_fields_as_a_dictionary() -> None:
    hazard = Hazard(
        kind="overflow",
        module="encoder.3.fc2",
        module_class="Linear",
        operation="aten.addmm",
        direction="forward",
        source="model.py:41",
        detail="it made inf",
        fix=("first", "second"),
    )
    assert json.loads(json.dumps(hazard.as_dict())) == {
        "kind": "overflow",
        "what": "values do not fit the format",
        "module": "encoder.3.fc2",
        "module_class": "Linear",
        "operation": "aten.addmm",
        "direction": "forward",
        "source": "model.py:41",
        "detail": "it made inf",
        "fix": ["first", "second"],
    }

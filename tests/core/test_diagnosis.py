"""Diagnoses as a person reads them, and incidents through their transport."""

from __future__ import annotations

import dataclasses
import json
from typing import get_args

from halfwise.core.diagnosis import VERDICTS, Diagnosis, Incident, Suspect, Verdict

SUSPECT = Suspect("layers.3", "aten.addmm", "forward", "model.py:41", "float16", "inf", 60.0, "Linear")


def test_every_verdict_has_words() -> None:
    assert set(VERDICTS) == set(get_args(Verdict))
    assert tuple(VERDICTS) == get_args(Verdict)


def test_a_full_screen() -> None:
    other = dataclasses.replace(SUSPECT, module="", operation="aten.log", source="train.py:7", module_class="")
    text = Diagnosis(
        "overflow_at_every_scale", suspects=(SUSPECT, other), detail="it overflows", fix=("first", "second")
    ).text()
    assert text.splitlines() == [
        "halfwise: overflow at every loss scale: the module needs float32",
        "module     layers.3 (Linear)",
        "operation  aten.addmm in float16, forward",
        "line       model.py:41",
        "range      output holds inf; largest input 60",
        "detail     it overflows",
        "also       (loss) aten.log at train.py:7",
        "fix        first",
        "           second",
    ]


def test_where_no_module_is_to_blame() -> None:
    loss = dataclasses.replace(SUSPECT, module="", module_class="", source="")
    assert "module     outside all modules (the loss?)" in Diagnosis("not_a_precision_problem", (loss,)).text()
    root = dataclasses.replace(SUSPECT, module="", module_class="Net")
    assert "module     the model's own code (Net)" in Diagnosis("not_a_precision_problem", (root,)).text()


def test_what_was_bad_from_the_start_has_no_operation_to_show() -> None:
    weight = Suspect("layers.3", "", "", "", "float32", "nan", 0.0, "Linear")
    found = Diagnosis("nonfinite_parameters", (weight,), detail="layers.3.weight holds nan")
    assert found.text().splitlines() == [
        f"halfwise: {VERDICTS['nonfinite_parameters']}",
        "detail     layers.3.weight holds nan",
    ]
    assert (found.module, found.operation, found.direction) == ("layers.3", "", "")


def test_many_other_suspects_are_counted() -> None:
    many = tuple(dataclasses.replace(SUSPECT, module=f"layers.{i}") for i in range(9))
    assert "and 3 more" in Diagnosis("overflow_at_every_scale", many).text()


def test_the_first_suspect_answers_for_the_diagnosis() -> None:
    found = Diagnosis("overflow_at_every_scale", (SUSPECT,))
    assert (found.module, found.operation, found.direction) == ("layers.3", "aten.addmm", "forward")
    assert (found.source, found.dtype) == ("model.py:41", "float16")
    assert not found.healthy
    empty = Diagnosis("healthy")
    assert (empty.module, empty.operation, empty.direction, empty.source, empty.dtype) == ("", "", "", "", "")
    assert empty.healthy
    assert Diagnosis("loss_scale_settling").healthy


def test_incidents_go_through_json_unchanged() -> None:
    found = Diagnosis("overflow_at_every_scale", (SUSPECT, dataclasses.replace(SUSPECT, module="head")), fix=("x",))
    incident = Incident.of(found, step=12, kind="healed", action="float32", rank=3)
    assert incident.suspects == ("layers.3", "head")
    assert Incident.from_dict(json.loads(json.dumps(incident.as_dict()))) == incident
    defaults = Incident(step=0, kind="stopped", verdict="healthy")
    changed = [f.name for f in dataclasses.fields(Incident) if getattr(incident, f.name) == getattr(defaults, f.name)]
    assert changed == []  # no field was compared at its default

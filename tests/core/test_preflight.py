"""A preflight as data: the verdict follows from the hazards, and everything is JSON-ready."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from halfwise.core.hazards import Hazard
from halfwise.core.plan import Plan
from halfwise.core.preflight import (
    PREFLIGHT_POLICIES,
    LayerRow,
    LossScaleRange,
    Preflight,
    native_format,
    not_native,
    preflight_policy,
)
from halfwise.core.record import json_ready
from halfwise.errors import PolicyError

READY = Preflight(policy="mixed_float16", target="cuda:ampere", framework="torch", loss_float32=2.0, loss=2.5)
OVERFLOW = Hazard(kind="overflow", module="fc", module_class="Linear")
IN_THE_LOSS = Hazard(kind="overflow")
OF_THE_TARGET = Hazard(kind="not_native")


@pytest.mark.parametrize(
    ("hazards", "verdict", "sentence"),
    [
        ((), "ready", "ready for mixed_float16 on cuda:ampere: nothing was found that would go wrong"),
        (
            (OVERFLOW,),
            "hazards",
            "not ready for mixed_float16 on cuda:ampere: fc (Linear): values do not fit the format",
        ),
        (
            (IN_THE_LOSS, OVERFLOW),
            "hazards",
            "not ready for mixed_float16 on cuda:ampere: outside all modules (the loss?): values do not fit the "
            "format, and 1 more hazard",
        ),
        (
            (Hazard(kind="mask", module_class="Net"), OVERFLOW, OVERFLOW),
            "hazards",
            "not ready for mixed_float16 on cuda:ampere: the model's own code (Net): a mask's constant does not "
            "fit the format, and 2 more hazards",
        ),
        (
            (OF_THE_TARGET,),
            "hazards",
            "not ready for mixed_float16 on cuda:ampere: the target has no units for the format",
        ),
    ],
)
def test_verdict(hazards: tuple[Hazard, ...], verdict: str, sentence: str) -> None:
    found = replace(READY, hazards=hazards)
    assert (found.verdict, found.ready, found.sentence) == (verdict, not hazards, sentence)


@pytest.mark.parametrize(
    ("loss", "full", "error"),
    [(2.5, 2.0, 0.25), (None, 2.0, None), (math.inf, 2.0, None), (2.0, math.nan, None), (-1.0, -2.0, 0.5)],
)
def test_loss_error(loss: float | None, full: float, error: float | None) -> None:
    assert replace(READY, loss=loss, loss_float32=full).loss_error == error


def test_all_of_it_as_json() -> None:
    found = replace(
        READY,
        model="Net",
        loss=math.inf,
        loss_scale=LossScaleRange(lowest=2.0, highest=8.0, largest=64.0, used=8.0),
        layers=(LayerRow(path="fc", kind="Linear", formats=("float16", "float32"), cosine=0.5, dead=True),),
        hazards=(OVERFLOW,),
        plan=Plan.manual({"fc": "float32"}, default="float16"),
        cured=True,
        loss_in_float32=True,
        alternative="mixed_bfloat16",
        notes=("a note",),
        batches=3,
    )
    data = json.loads(json.dumps(json_ready(found.as_dict()), allow_nan=False))
    assert (data["verdict"], data["loss"], data["loss_error"], data["batches"]) == ("hazards", "inf", None, 3)
    assert data["loss_scale"] == {"lowest": 2.0, "highest": 8.0, "largest": 64.0, "used": 8.0}
    assert data["layers"][0]["formats"] == ["float16", "float32"]
    assert (data["layers"][0]["cosine"], data["layers"][0]["dead_updates"]) == (0.5, None)
    assert data["hazards"][0]["kind"] == "overflow"
    assert data["plan"]["layers"][0]["path"] == "fc"
    assert (data["cured"], data["alternative"], data["notes"]) == (True, "mixed_bfloat16", ["a note"])
    assert data["loss_in_float32"] is True
    assert set(vars(found)) <= set(data)


def test_policies() -> None:
    assert [preflight_policy(name) for name in PREFLIGHT_POLICIES] == list(PREFLIGHT_POLICIES)
    assert preflight_policy("bf16-mixed") == "mixed_bfloat16"
    assert [native_format(name) for name in PREFLIGHT_POLICIES] == [
        "float32",
        "tensorfloat32",
        "bfloat16",
        "float16",
        "float8_e4m3fn",
    ]
    for unknown in ("auto", "float16", "fp16", 16, None):
        with pytest.raises(PolicyError, match="mixed_float16"):
            preflight_policy(unknown)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("policy", "target", "said"),
    [
        ("mixed_float16", "cuda:volta", None),
        ("mixed_bfloat16", "cuda:volta", "cuda:volta has units for float16, not for bfloat16"),
        ("tensorfloat32", "cuda:volta", "cuda:volta has units for float16, not for tensorfloat32"),
        ("float32", "cuda:volta", None),
        ("float8", "cuda:hopper", None),
        ("float8", "cuda:ampere", "for float8_e4m3fn"),
        ("mixed_float16", "tpu", "tpu has units for bfloat16, not for float16"),
        ("mixed_bfloat16", "cpu:avx2", "has no units for bfloat16; emulated, layers take about 10 times"),
        ("float8", "here", None),
    ],
)
def test_formats_that_a_target_lacks(policy: str, target: str, said: str | None) -> None:
    hazard = not_native(policy, target)
    if said is None:
        assert hazard is None
    else:
        assert hazard is not None
        assert hazard.kind == "not_native"
        assert said in hazard.detail
        assert hazard.fix


def test_what_a_target_is_fast_in_is_proposed() -> None:
    hazard = not_native("mixed_bfloat16", "cuda:volta")
    assert hazard is not None
    assert hazard.fix[0].startswith('policy="mixed_float16"')
    hazard = not_native("mixed_float16", "cpu:avx2")
    assert hazard is not None
    assert hazard.fix[0].startswith('policy="float32"')


def test_an_unknown_target() -> None:
    with pytest.raises(PolicyError, match="unknown target 'cuda:pascal'"):
        not_native("mixed_float16", "cuda:pascal")

"""The preflight's screen: verdict first, what is worth showing, the cure, within 80 columns."""

from __future__ import annotations

import math
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from halfwise.core.hazards import Hazard
from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Default, Plan, Rule
from halfwise.core.preflight import LayerRow, LossScaleRange, Preflight
from halfwise.report.preflight import preflight_screen

SOUND_ROWS = tuple(
    LayerRow(
        path=f"encoder.{number}.fc",
        kind="Linear",
        formats=("float16",),
        largest_activation=float(number),
        largest_gradient=1e-3,
        cosine=1.0,
        relative_error=1e-3 * (20 - number),
    )
    for number in range(20)
)
HOT = LayerRow(path="head", kind="Linear", formats=("float16",), largest_activation=2e5, overflow=0.25, underflow=0.01)
HAZARD = Hazard(
    kind="overflow",
    module="head",
    module_class="Linear",
    operation="aten.addmm",
    direction="forward",
    source="model.py:41",
    detail="aten.addmm made inf of inputs up to 60",
    fix=("first_line()", "second_line()"),
)
PLAN = Plan(
    target="cuda:ampere",
    default=Default(compute="float16", reason="policy"),
    loss_scale=LossScaleSettings(initial=1024.0),
    layers=(Rule(path="head", compute="float32", reason="range"), Rule(path="head.in", compute="float16")),
)
READY = Preflight(
    policy="mixed_float16",
    target="cuda:ampere",
    framework="torch",
    model="Net",
    loss_float32=1.25,
    loss=1.2501,
    loss_scale=LossScaleRange(lowest=2.0, highest=1024.0, largest=8192.0, used=1024.0),
    layers=SOUND_ROWS,
    plan=replace(PLAN, layers=()),
    notes=("it is a note",),
    batches=2,
)
HAZARDOUS = replace(READY, hazards=(HAZARD,), layers=(*SOUND_ROWS, HOT), plan=PLAN, cured=True)


def _lines(found: Preflight, *, command: str = "", width: int = 80) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(preflight_screen(found, command=command))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def _text(found: Preflight, *, command: str = "") -> str:
    return " ".join(" ".join(_lines(found, command=command)).split())


def test_the_verdict_stands_first() -> None:
    assert next(line for line in _lines(READY) if line) == " READY for mixed_float16 on cuda:ampere"
    assert next(line for line in _lines(HAZARDOUS) if line) == " NOT READY for mixed_float16 on cuda:ampere: 1 hazard"


def test_a_ready_model() -> None:
    text = _text(READY)
    assert "Net (torch), 2 batches" in text
    assert "1.25 in float32, 1.2501 under mixed_float16 (< 0.1% apart)" in text
    assert "start at 1,024; from 2 to 8,192 fits these batches (GradScaler starts at 65,536 and comes down)" in text
    assert "encoder.0.fc" in text  # the largest error
    assert "encoder.19.fc" in text  # the largest values
    assert "and 18 other layers, nothing to see in them" in text
    assert "GradScaler(init_scale=1024.0)" in text
    assert "Note it is a note" in text
    assert "Hazards" not in text
    assert "Cure" not in text


def test_a_hazard_with_its_cure() -> None:
    text = _text(HAZARDOUS, command="halfwise preflight train.py:workload")
    assert "1 head (Linear): values do not fit the format model.py:41, aten.addmm, forward" in text
    assert "first_line() second_line()" in text
    assert "head float16 2e+05 - 25.0% -" in text
    assert "and 20 other layers" in text
    assert "Cure compute in float32: head tried here: nothing goes wrong any more" in text
    assert "halfwise preflight train.py:workload -o plan.toml" in text
    assert "hw.MixedPrecision(model, optimizer, found.plan)" in _text(HAZARDOUS)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cured": False}, "tried here: it is not enough; change the lines that are named above"),
        ({"plan": None, "cured": False}, "no plan cures it: change the lines that are named above"),
        ({"plan": None, "loss_in_float32": True}, "Cure compute in float32: the loss (see the note)"),
        ({"loss_in_float32": True}, "Cure compute in float32: head and the loss (see the note)"),
        ({"alternative": "mixed_bfloat16"}, 'Or policy="mixed_bfloat16": tried here on the same batches, no hazard'),
        ({"loss": None}, "1.25 in float32; under mixed_float16 it is not reached"),
        ({"loss": math.inf}, "1.25 in float32, inf under mixed_float16"),
        ({"loss": 1.5}, "(20.0% apart)"),
        ({"batches": 1}, "Net (torch), 1 batch "),
        (
            {"loss_scale": LossScaleRange(lowest=1.0, highest=2.0, largest=16.0, used=65536.0)},
            "65,536 overflows; the largest that fits these batches is 16",
        ),
    ],
)
def test_variants(changes: dict[str, object], said: str) -> None:
    assert said in _text(replace(HAZARDOUS, **changes))  # type: ignore[arg-type]


def test_the_same_line_in_repeated_blocks_is_told_once() -> None:
    again = tuple(replace(HAZARD, module=f"blocks.{number}.norm") for number in range(12))
    text = _text(replace(HAZARDOUS, hazards=again))
    assert "12 hazards" in text
    assert "1 blocks.0.norm (Linear) and 11 more: values do not fit the format" in text
    assert "blocks.1.norm" not in text
    apart = tuple(replace(HAZARD, source=f"model.py:{number}") for number in range(11))
    assert "... and 3 more" in _text(replace(HAZARDOUS, hazards=apart))


def test_places() -> None:
    nowhere = Hazard(kind="not_native", detail="it has no units")
    text = _text(replace(HAZARDOUS, hazards=(nowhere, Hazard(kind="mask"), Hazard(kind="mask", module_class="Net"))))
    assert "1 the target has no units for the format" in text
    assert "2 outside all modules (the loss?): a mask's constant" in text
    assert "3 the model's own code (Net): a mask's constant" in text


def test_long_names_and_many_rows_fit_80_columns() -> None:
    path = "model.language_model.layers.17.self_attention.query_key_value_projection"
    rows = tuple(replace(HOT, path=f"{path}.{number}", relative_error=0.9, dead=number == 3) for number in range(30))
    found = replace(HAZARDOUS, hazards=(replace(HAZARD, module=path),), layers=rows, notes=("word " * 60,))
    lines = _lines(found, command=f"halfwise preflight {path}.py:workload")
    assert max(map(len, lines)) <= 80
    assert "and 18 other layers" in " ".join(lines)


def test_nothing_in_the_code_can_steer_the_terminal() -> None:
    evil = replace(HAZARD, module="a[bold]b\x1b[2J", detail="[red]not markup[/red]", fix=("[link]",))
    text = _text(replace(HAZARDOUS, hazards=(evil,)))
    assert "\x1b" not in text
    assert "a[bold]b?[2J" in text
    assert "[red]not markup[/red]" in text

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from halfwise.core.explanation import Sources, explain_module, explain_plan
from halfwise.core.histogram import ExponentHistogram
from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Default, Plan, Rule
from halfwise.core.profile import Profile
from halfwise.report.explain import module_screen, plan_screen

EVIDENCE = {"largest": 1.1e5, "seconds": 2e-3}
PLAN = Plan(
    model="Net",
    default=Default(compute="float16", reason="faster", detail="takes 0.50 of the float32 time"),
    loss_scale=LossScaleSettings(initial=1024.0),
    layers=(
        Rule(
            path="head",
            compute="float32",
            reason="range",
            detail="largest 1e5",
            evidence={"largest": 1.1e5, "seconds": 2e-3},
        ),
        Rule(pattern="blocks.*.norm", compute="float32", reason="slower"),
    ),
)
PROFILE = Profile(
    {
        ("head", "activation"): ExponentHistogram.of(np.array([0.0, 1.0, 1e5, 1e-9], np.float32)),
        ("head", "weight_gradient"): ExponentHistogram.of(np.array([2e-8, 1.0, 1.0, np.nan], np.float32)),
    }
)
SOURCES = Sources(origin=Path("runs/a"), plan=PLAN, modules={"head": "Linear"}, profile=PROFILE)


def shown(renderable: RenderableType, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(renderable)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


def words(text: str) -> str:
    return " ".join(text.split())


def test_the_plan() -> None:
    text = words(shown(plan_screen(explain_plan(SOURCES))))
    for part in (
        "Plan runs/a (torch for Net, target: here)",
        "Default float16, because the format is faster here, and range and tolerance allow it: takes 0.50 of",
        "Loss scale starts at 1,024, stays between 1 and 16,777,216",
        "head float32 its values would not fit the format: largest 1e5",
        "blocks.*.norm float32 the format is not faster here",
        "halfwise explain runs/a head",
    ):
        assert part in text


def test_a_module() -> None:
    text = words(shown(module_screen(explain_module(SOURCES, "head"))))
    for part in (
        "Module head (Linear)",
        "Computes in float32",
        "Because its values would not fit the format",
        "largest value 1.1e+05",
        "time in the format 2 ms",
        "activation 1.15e+05 25.0% 66.7% none 0",
        "weight gradient 1 0.0% none none 1",
        "float16's gradients at the loss scale 1024",
    ):
        assert part in text


def test_a_module_that_a_pattern_names() -> None:
    text = words(shown(module_screen(explain_module(SOURCES, "blocks.7.norm"))))
    assert "Said by the entry blocks.*.norm" in text


@pytest.mark.parametrize("width", [80, 120])
def test_screens_fit(width: int) -> None:
    shown(plan_screen(explain_plan(SOURCES)), width)
    shown(module_screen(explain_module(SOURCES, "head")), width)

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from halfwise.core.diagnosis import Incident
from halfwise.report.train import TrainingView, training_screen
from halfwise.report.words import command_name

HEALED = Incident(
    step=12,
    kind="healed",
    verdict="overflow_at_every_scale",
    module="hidden",
    operation="aten.addmm",
    direction="forward",
    source="image.py:33",
    dtype="float16",
    action="float32",
    suspects=("hidden",),
)

SUMMARY: dict[str, Any] = {
    "workload": "image",
    "framework": "torch",
    "network": "convnet",
    "policy": "auto",
    "data": {"name": "digits", "train": 1438, "test": 359, "shape": [1, 8, 8], "classes": 10},
    "seed": 0,
    "epochs": 15,
    "test_loss": 0.05,
    "test_accuracy": 0.98329,
    "seconds": 75.2,
    "steps": 345,
    "format_times": {"bfloat16": {"ratio": 11.9, "at_least": True}, "float16": {"ratio": 8.25, "at_least": False}},
    "median_step_seconds": 0.00312,
    "step_time": None,
    "loss_scale": 1.0,
    "skipped_steps": 0,
    "incidents": [],
    "plan": {
        "default": {"compute": "float32", "reason": "slower", "detail": "time relative to float32 here: bfloat16 12"},
        "layers": [
            {
                "name": "conv",
                "compute": "float32",
                "reason": "slower",
                "detail": "bfloat16 takes 12 of its time",
            },
            {"name": "[bold]head", "compute": "float32", "reason": "range", "detail": "\x1b[31mlargest 1e5"},
        ],
    },
}

HALF: dict[str, Any] = {
    **SUMMARY,
    "policy": "mixed_float16",
    "format_times": {},
    "step_time": {"seconds": 2e-3, "seconds_float32": 4e-3, "ratio": 0.5, "low": 0.45, "high": 0.55, "pairs": 30},
    "loss_scale": 4096.0,
    "skipped_steps": 4,
    "incidents": [HEALED.as_dict()] * 7,
    "plan": {"default": {"compute": "float16", "reason": "policy", "detail": ""}, "layers": []},
}


def shown(summary: dict[str, Any], width: int = 80) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(training_screen(summary, "runs/image-auto-1"))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


def test_auto_that_chose_float32_gives_the_measured_ratios_and_reasons() -> None:
    text = words(shown(SUMMARY, 200))
    for part in (
        "Test accuracy 0.9833 on 359 images",
        "15 epochs, 345 steps, 1 min 15 s; convnet on digits, seed 0",
        'float32, chosen by "auto": the format is not faster here: time relative to float32 here: bfloat16 12',
        "3.12 ms in float32; its layers alone would take at least 12x in bfloat16, 8.25x in float16",
        "Skipped steps none",
        "Incidents none",
        "conv float32 the format is not faster here: bfloat16 takes 12 of its time",
        "Run directory runs/image-auto-1",
        f"Next {command_name()} explain runs/image-auto-1",
    ):
        assert part in text


def test_texts_are_called_so_and_keras_is_named_with_its_backend() -> None:
    data = {"name": "sotu", "train": 4800, "test": 1200, "words": 60, "vocabulary": 10_000, "classes": 2}
    keras = {"workload": "text", "framework": "keras", "backend": "jax", "network": "embedding_bag", "data": data}
    text = words(shown({**SUMMARY, **keras}, 200))
    assert "Test accuracy 0.9833 on 1,200 texts never trained on" in text
    assert "embedding_bag on sotu, Keras on jax, seed 0" in text


def test_auto_that_had_too_few_steps_says_so() -> None:
    text = words(shown({**SUMMARY, "plan": None, "format_times": {}}, 200))
    assert 'float32, too few steps for "auto" to gather its evidence' in text
    assert "3.12 ms in float32 Skipped" in text


def test_what_comes_from_a_plan_steers_nothing() -> None:
    text = shown(SUMMARY)
    assert "[bold]head" in text
    assert "?[31mlargest" in text
    assert "\x1b" not in text


def test_half_precision_gives_paired_times_skips_and_incidents() -> None:
    text = words(shown(HALF, 200))
    for part in (
        "float16, policy mixed_float16",
        "2 ms, float32 4 ms: 0.50x (middle half 0.45 to 0.55, 30 pairs)",
        "4 of 345; the loss scale ended at 4096",
        "step 12: overflow at every loss scale: the module needs float32; aten.addmm of hidden (image.py:33). Healed:",
        "and 2 more, in events.jsonl",
    ):
        assert part in text


@pytest.mark.parametrize("width", [80, 120])
def test_long_plans_are_cut_and_lines_fit(width: int) -> None:
    row = {"compute": "bfloat16", "reason": "faster"}
    layers = [{"name": f"encoder.layers.{i}.mlp.fc2", "detail": f"{i} ms", **row} for i in range(40)]
    summary = {**SUMMARY, "plan": {**SUMMARY["plan"], "layers": layers}}
    text = shown(summary, width)
    assert "... and 28 more" in text
    assert max(map(len, text.splitlines())) <= width


def a_row(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "loss": 0.5, "loss_scale": 1024.0, "applied": True, "seconds": 0.1, **more}


def test_without_a_terminal_there_is_a_line_per_epoch_and_no_bar() -> None:
    console = Console(file=StringIO(), width=100)
    with TrainingView(console) as view:
        view.start(epochs=12, steps_per_epoch=2, step=0)
        view.step(a_row(0), accuracy=0.25, skipped=0)
        end = {"train_loss": 0.4, "train_accuracy": 0.5, "test_loss": 1.0, "test_accuracy": 0.75}
        view.step(a_row(1, **end), accuracy=0.5, skipped=3)
        view.message("the [guard] speaks")
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue().splitlines() == [
        "epoch  1/12  loss 0.4000  accuracy 0.500  test accuracy 0.750  scale 1024  skipped 3",
        "the [guard] speaks",
    ]


def test_on_a_terminal_there_is_a_bar() -> None:
    console = Console(file=StringIO(), width=100, force_terminal=True)
    with TrainingView(console) as view:
        view.start(epochs=12, steps_per_epoch=2, step=3)
        view.step(a_row(3), accuracy=0.25, skipped=1)
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "going on at step 3, epoch 2 of 12" in text
    assert "4/24" in text
    assert "scale 1024  skipped 1" in text


READY = {"verdict": "ready", "sentence": "ready for it"}
ELSEWHERE = {"target": "cuda:hopper", "compute": "bfloat16", "relative_time": 0.0912}


@pytest.mark.parametrize(
    ("preflight", "change", "said"),
    [
        (
            {"mixed_float16": READY, "mixed_bfloat16": READY},
            {},
            "cuda:hopper mixed_float16 and mixed_bfloat16: ready; an estimated 0.09x float32's time, in bfloat16",
        ),
        (
            {"mixed_float16": {"verdict": "hazards", "sentence": "not ready: fc2: inf"}, "mixed_bfloat16": READY},
            {},
            "cuda:hopper mixed_bfloat16: ready; not ready: fc2: inf; an estimated",
        ),
        ({"mixed_float16": READY}, {"compute": "float32"}, "ready; its plan would stay in float32"),
    ],
)
def test_what_other_hardware_would_do_is_told(preflight: Any, change: dict[str, Any], said: str) -> None:
    text = shown({**SUMMARY, "elsewhere": {**ELSEWHERE, **change, "preflight": preflight}}, 100)
    assert said in " ".join(text.split())
    assert "On a GPU" not in shown({**SUMMARY, "elsewhere": None}, 100)

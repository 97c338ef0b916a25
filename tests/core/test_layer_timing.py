"""Timing a layer's formats against each other."""

from __future__ import annotations

from collections import Counter

from halfwise.core.layer_timing import time_formats


def test_minima_over_interleaved_rounds() -> None:
    order: list[str] = []

    def probe(name: str, limit: float) -> float:
        order.append(name)
        return {"float32": 2e-3, "bfloat16": 1e-3}[name] * (1.0 if len(order) % 3 else 5.0)

    seconds, bounds = time_formats("fc", ["bfloat16"], probe)
    assert seconds == {"float32": 2e-3, "bfloat16": 1e-3}
    assert not bounds
    assert order[-4:] == ["float32", "bfloat16"] * 2


def test_a_hopeless_format_is_tried_once_and_is_a_lower_bound() -> None:
    calls: Counter[str] = Counter()

    def probe(name: str, limit: float) -> float:
        calls[name] += 1
        return 1e-3 if name == "float32" else 1.0

    seconds, bounds = time_formats("fc", ["float16"], probe)
    assert seconds["float16"] == 1.0
    assert bounds == {"float16"}
    assert calls["float16"] == 1


def test_a_slow_first_call_is_a_warm_up() -> None:
    calls: Counter[str] = Counter()

    def probe(name: str, limit: float) -> float:
        calls[name] += 1
        return 1e-3 if name == "float32" else (0.03 if calls[name] == 1 else 5e-4)

    seconds, bounds = time_formats("fc", ["float16"], probe)
    assert seconds["float16"] == 5e-4
    assert not bounds


def test_a_format_that_cannot_run_is_left_out() -> None:
    def probe(name: str, limit: float) -> float:
        if name == "float16":
            raise RuntimeError("no such kernel")
        return 1e-3

    assert time_formats("fc", ["float16", "bfloat16"], probe)[0] == {"float32": 1e-3, "bfloat16": 1e-3}

"""Timing a layer's formats against each other."""

from __future__ import annotations

from collections import Counter

from halfwise.core.layer_timing import time_formats


def test_minima_over_interleaved_rounds() -> None:
    order: list[str] = []

    def probe(name: str, limit: float) -> float:
        order.append(name)
        return {"float32": 2e-3, "bfloat16": 1e-3}[name] * (5.0 if order.count(name) == 1 else 1.0)

    found = time_formats("fc", ["bfloat16"], probe)
    assert found.seconds == {"float32": 2e-3, "bfloat16": 1e-3}
    assert not found.cut_short
    assert order == ["float32", "float32", "bfloat16", "bfloat16", "float32", "bfloat16"]


def test_a_hopeless_format_is_tried_once_and_is_a_lower_bound() -> None:
    calls: Counter[str] = Counter()

    def probe(name: str, limit: float) -> float:
        calls[name] += 1
        return 1e-3 if name == "float32" else 1.0

    found = time_formats("fc", ["float16"], probe)
    assert found.seconds["float16"] == 1.0
    assert found.cut_short == {"float16"}
    assert calls["float16"] == 1


def test_a_slow_first_call_is_a_warm_up() -> None:
    calls: Counter[str] = Counter()

    def probe(name: str, limit: float) -> float:
        calls[name] += 1
        return 1e-3 if name == "float32" else (0.03 if calls[name] == 1 else 5e-4)

    found = time_formats("fc", ["float16"], probe)
    assert found.seconds["float16"] == 5e-4
    assert not found.cut_short


def test_a_format_that_cannot_run_is_left_out() -> None:
    def probe(name: str, limit: float) -> float:
        if name == "float16":
            raise RuntimeError("no such kernel")
        return 1e-3

    assert time_formats("fc", ["float16", "bfloat16"], probe).seconds == {"float32": 1e-3, "bfloat16": 1e-3}


def test_without_time_the_fewest_rounds_are_measured() -> None:
    calls: Counter[str] = Counter()

    def probe(name: str, limit: float) -> float:
        calls[name] += 1
        return 1e-5

    time_formats("fc", ["bfloat16"], probe, go_on=lambda: False)
    few = calls["float32"]
    calls.clear()
    time_formats("fc", ["bfloat16"], probe)
    assert few == 3  # two first ones, a round
    assert calls["float32"] > few


def test_spread_is_how_far_the_middle_lies_above_the_shortest() -> None:
    steady = time_formats("fc", ["bfloat16"], lambda name, limit: 1e-3)
    assert steady.spread == 0.0
    numbers = iter([2.0, 1.0, 1.0, 3.0, 1.0])  # two, one try; then a round
    noisy = time_formats("fc", ["bfloat16"], lambda name, limit: next(numbers), go_on=lambda: False)
    assert noisy.spread == 1.0  # of float32's 2, 1, 3 the median is 2; bfloat16's are 1 and 1

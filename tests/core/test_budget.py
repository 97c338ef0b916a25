"""What is left for planning, in seconds of float32 steps."""

from __future__ import annotations

from halfwise.core.budget import PLANNING_STEPS, Budget


def test_nothing_is_limited_until_a_step_was_seen() -> None:
    budget = Budget()
    budget.spent["ranges"] = 1e9
    assert budget.left(reserved=100.0) == float("inf")


def test_the_shortest_step_is_the_unit() -> None:
    budget = Budget()
    for seconds in (3.0, 1.0, 2.0):
        budget.saw_step(seconds)
    assert budget.left() == PLANNING_STEPS


def test_all_phases_count_and_later_ones_are_provided_for() -> None:
    budget = Budget(steps=10.0)
    budget.saw_step(2.0)
    budget.spent |= {"ranges": 3.0, "times": 4.0}
    assert budget.left() == 13.0
    assert budget.left(reserved=5.0) == 3.0
    assert budget.left(reserved=8.0) == 0.0

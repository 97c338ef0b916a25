"""Costs of layers under each objective."""

from __future__ import annotations

import pytest

from halfwise.core.objective import OBJECTIVES, Objective, cast_costs, relative_costs, spread_costs
from halfwise.core.timing import TimingTable

TABLE = TimingTable(
    {
        "a": {"float32": 3.0, "bfloat16": 2.0, "tensorfloat32": 1.5},
        "b": {"float32": 1.0, "bfloat16": 0.5, "float8_e4m3fn": 0.25},
    },
    casts={"a": 0.4},
    spread={"b": 0.2},
    saved={"a": 10, "b": 30},
)


@pytest.mark.parametrize(
    ("objective", "a", "b"),
    [
        ("time", {"bfloat16": 1.6 / 4, "tensorfloat32": 1.1 / 4}, {"bfloat16": 0.5 / 4, "float8_e4m3fn": 0.25 / 4}),
        ("memory", {"bfloat16": 5 / 40, "tensorfloat32": 10 / 40}, {"bfloat16": 15 / 40, "float8_e4m3fn": 7.5 / 40}),
        ("balanced", {"bfloat16": 0.2 + 2.5 / 40}, {"bfloat16": 0.0625 + 7.5 / 40}),
    ],
)
def test_costs(objective: Objective, a: dict[str, float], b: dict[str, float]) -> None:
    found = relative_costs(TABLE, objective)
    for path, expected in (("a", a), ("b", b)):
        for name, cost in expected.items():
            assert found[path][name] == pytest.approx(cost)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_float32_costs_one_in_all(objective: Objective) -> None:
    assert sum(costs["float32"] for costs in relative_costs(TABLE, objective).values()) == pytest.approx(1.0)


def test_casts_and_spread_are_times() -> None:
    assert cast_costs(TABLE, "time") == {"a": pytest.approx(0.1)}
    assert cast_costs(TABLE, "memory") == {"a": 0.0}
    assert spread_costs(TABLE, "balanced") == {"b": pytest.approx(0.025)}


def test_a_table_without_sizes_knows_of_time_only() -> None:
    timing = TimingTable({"a": {"float32": 1.0, "bfloat16": 0.5}})
    assert relative_costs(timing, "memory") == {"a": {"float32": 1.0, "bfloat16": 0.5}}

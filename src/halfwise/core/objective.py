"""What a plan is to save: time, memory, or both, as one cost for each layer and format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from halfwise.core.formats import get_format
from halfwise.core.timing import TimingTable

__all__ = ["OBJECTIVES", "Objective", "cast_costs", "relative_costs", "spread_costs"]

Objective = Literal["time", "memory", "balanced"]
"""`"time"`: seconds of a step. `"memory"`: bytes kept for the backward pass. `"balanced"`: the mean of both, each
relative to float32."""

OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


def relative_costs(timing: TimingTable, objective: Objective) -> dict[str, dict[str, float]]:
    """Path -> format -> cost, casts left out. In float32 all layers together cost 1.

    >>> table = TimingTable({"fc": {"float32": 2e-3, "bfloat16": 1.5e-3}}, casts={"fc": 5e-4}, saved={"fc": 100})
    >>> [relative_costs(table, goal)["fc"]["bfloat16"] for goal in OBJECTIVES]
    [0.5, 0.5, 0.5]
    """
    weight_of_time = _weight_of_time(timing, objective)
    seconds_in_all = timing.total("float32")
    values_in_all = sum(timing.saved.values())
    found: dict[str, dict[str, float]] = {}
    for path, by_format in timing.seconds.items():
        found[path] = {}
        for name, seconds in by_format.items():
            cast = timing.casts.get(path, 0.0) if name != "float32" else 0.0
            cost = weight_of_time * max(0.0, seconds - cast) / seconds_in_all
            if weight_of_time < 1.0:
                cost += (1.0 - weight_of_time) * timing.saved.get(path, 0) * _bytes(name) / 4.0 / values_in_all
            found[path][name] = cost
    return found


def cast_costs(timing: TimingTable, objective: Objective) -> Mapping[str, float]:
    """Path -> cost of a cast before the layer, in the same unit."""
    weight, everything = _weight_of_time(timing, objective), timing.total("float32")
    return {path: weight * seconds / everything for path, seconds in timing.casts.items() if everything > 0.0}


def spread_costs(timing: TimingTable, objective: Objective) -> Mapping[str, float]:
    """Path -> what a layer must save before it leaves the format that it has, in the same unit."""
    weight, everything = _weight_of_time(timing, objective), timing.total("float32")
    return {path: weight * seconds / everything for path, seconds in timing.spread.items() if everything > 0.0}


def _weight_of_time(timing: TimingTable, objective: Objective) -> float:
    """A table without sizes knows of time only."""
    if not any(timing.saved.values()):
        return 1.0
    return {"time": 1.0, "memory": 0.0, "balanced": 0.5}[objective]


def _bytes(format_name: str) -> float:
    """Of a value that is kept: tensorfloat32 lies in 32 bits."""
    return 4.0 if format_name == "tensorfloat32" else get_format(format_name).bits / 8.0

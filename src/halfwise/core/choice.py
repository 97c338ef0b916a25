"""Which format each layer gets: the cheapest assignment that a budget of rounding error allows.

Layers stand in the order in which they run. Where two neighbours compute in different formats a cast lies between them,
so that a layer may be lowered, or left alone, for its neighbours' sake. Where the budget does not bind, a pass over the
layers finds the optimum; where it does, `scipy.optimize.milp` does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Assignment", "Question", "choose"]

Assignment = dict[str, str]
"""Path -> format."""

_START = "float32"  # what the first layer is given
_GAP = 1e-4  # relative: how far from the optimum the solver may stop
_LONGEST = 5.0  # seconds
_TRIES = 20


@dataclass(frozen=True)
class Question:
    """What is to be decided.

    Attributes:
        costs: path -> format -> cost, in the layers' order; casts left out. Formats that are absent are not allowed; a
            layer with one format is fixed to it.
        casts: path -> cost of a cast before the layer, paid where the layer before it computes in another format.
        scores: path -> format -> rounding error, which adds up; absent means none.
        budget: how much error all layers together may have. Default: any.
    """

    costs: Mapping[str, Mapping[str, float]]
    casts: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    budget: float = math.inf

    def cost(self, assignment: Mapping[str, str]) -> float:
        """What the assignment costs, casts included."""
        total, before = 0.0, _START
        for path, costs in self.costs.items():
            name = assignment[path]
            total += costs[name] + (self.casts.get(path, 0.0) if name != before else 0.0)
            before = name
        return total

    def score(self, assignment: Mapping[str, str]) -> float:
        """The rounding error of the assignment."""
        return math.fsum(self.scores.get(path, {}).get(name, 0.0) for path, name in assignment.items())


def choose(question: Question) -> Assignment | None:
    """The cheapest assignment within the budget, to one part in 10,000; None where none is within it.

    Between equals the earlier of a layer's formats, as `costs` lists them, is taken.

    >>> costs = {"a": {"float32": 3.0, "float16": 1.0}, "b": {"float32": 2.0, "float16": 1.0}}
    >>> scores = {"a": {"float16": 4.0}, "b": {"float16": 4.0}}
    >>> choose(Question(costs, scores=scores, budget=5.0))
    {'a': 'float16', 'b': 'float32'}
    """
    if not question.costs:
        return {}
    cheapest = _cheapest(question)
    if question.score(cheapest) <= question.budget:
        return cheapest
    return _within_budget(question)


def _cheapest(question: Question) -> Assignment:
    """The optimum without a budget: the shortest path through the layers' formats."""
    reached: dict[str, tuple[float, list[str]]] = {_START: (0.0, [])}
    for path, costs in question.costs.items():
        cast, ahead = question.casts.get(path, 0.0), {}
        for name, cost in costs.items():
            so_far = {before: total + (cast if before != name else 0.0) for before, (total, _) in reached.items()}
            best = min(so_far, key=so_far.__getitem__)
            ahead[name] = (so_far[best] + cost, [*reached[best][1], name])
        reached = ahead
    _, names = min(reached.values(), key=lambda found: found[0])
    return dict(zip(question.costs, names, strict=True))


def _within_budget(question: Question) -> Assignment | None:
    """The optimum within the budget. A solver's constraints hold up to a tolerance, so what it finds is checked.

    An assignment that is over the budget by less than the tolerance is forbidden, and the solver asked again.
    """
    if _least_error(question) is None:
        return None
    programme = _Programme(question)
    for _ in range(_TRIES):
        found = programme.solve()
        if found is None:
            break
        if question.score(found) <= question.budget:
            return found
        programme.forbid(found)
    return _least_error(question)


class _Programme:
    """An integer programme: one 0-1 variable for each layer and format, and one for the cast before each layer.

    Costs and errors are brought to about 1, for the solver's tolerances are absolute.
    """

    def __init__(self, question: Question) -> None:
        self._layers = list(question.costs)
        places = [(path, name) for path in self._layers for name in question.costs[path]]
        self._question = question
        self._column = {place: index for index, place in enumerate(places)}
        self._rows: list[tuple[dict[int, float], float, float]] = []  # coefficients by column, lowest, highest
        for index, path in enumerate(self._layers):
            self._rows.append(({self._column[path, name]: 1.0 for name in question.costs[path]}, 1.0, 1.0))
            if question.casts.get(path, 0.0) > 0.0:
                self._add_cast(index, path)
        unit = question.budget or 1.0
        errors = {place: question.scores.get(place[0], {}).get(place[1], 0.0) / unit for place in places}
        row = {self._column[place]: error for place, error in errors.items() if error}
        self._rows.append((row, -math.inf, question.budget / unit))

    def _add_cast(self, index: int, path: str) -> None:
        """The cast is at least x[path, name] - x[the layer before, name], for each format."""
        before = self._layers[index - 1] if index else None
        for name in self._question.costs[path]:
            row = {len(self._column) + index: 1.0, self._column[path, name]: -1.0}
            given = 1.0 if before is None and name == _START else 0.0
            if before is not None and (before, name) in self._column:
                row[self._column[before, name]] = 1.0
            self._rows.append((row, -given, math.inf))

    def forbid(self, assignment: Assignment) -> None:
        """Leaves the assignment out of what may be found."""
        row = {self._column[place]: 1.0 for place in assignment.items()}
        self._rows.append((row, -math.inf, len(assignment) - 1.0))

    def solve(self) -> Assignment | None:
        """What the solver finds, or None."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        question = self._question
        entries = [(r, c, value) for r, (row, _, _) in enumerate(self._rows) for c, value in row.items()]
        rows, columns, values = zip(*entries, strict=True)
        shape = (len(self._rows), len(self._column) + len(self._layers))
        matrix = csr_array((values, (rows, columns)), shape=shape)
        costs = [question.costs[path][name] for path, name in self._column]
        casts = [question.casts.get(path, 0.0) for path in self._layers]
        size = math.fsum(max(question.costs[path].values()) for path in self._layers) or 1.0
        solved = milp(
            np.array(costs + casts) / size,
            constraints=LinearConstraint(matrix, [low for _, low, _ in self._rows], [high for *_, high in self._rows]),
            integrality=np.array([1] * len(costs) + [0] * len(casts)),
            bounds=Bounds(0.0, 1.0),
            options={"mip_rel_gap": _GAP, "time_limit": _LONGEST},
        )
        if solved.x is None:
            return None
        chosen: Assignment = {}
        for (path, name), index in self._column.items():
            if solved.x[index] > 0.5:
                chosen[path] = name
        return chosen


def _least_error(question: Question) -> Assignment | None:
    """What is always within the budget where anything is: for a solver that ran out of time."""
    errors = question.scores
    found = {p: min(names, key=lambda n: errors.get(p, {}).get(n, 0.0)) for p, names in question.costs.items()}
    return found if question.score(found) <= question.budget else None

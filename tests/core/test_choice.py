"""The cheapest assignment within a budget, against all assignments tried one by one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfwise.core.choice import Assignment, Question, choose

FORMATS = ("float32", "bfloat16", "float16")

layer = st.fixed_dictionaries(
    {
        "costs": st.dictionaries(st.sampled_from(FORMATS[1:]), st.floats(1e-6, 1.0)),
        "float32": st.floats(1e-6, 1.0),
        "cast": st.floats(0.0, 0.1),
        "scores": st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    }
)


def brute_force(question: Question) -> Assignment | None:
    assignments = (
        dict(zip(question.costs, names, strict=True)) for names in itertools.product(*question.costs.values())
    )
    within = [found for found in assignments if question.score(found) <= question.budget]
    return min(within, key=question.cost, default=None)


@settings(deadline=None, max_examples=200)
@given(st.lists(layer, min_size=1, max_size=6), st.floats(1e-9, 6.0) | st.just(math.inf))
def test_it_is_the_best_within_the_budget(layers: list[dict], budget: float) -> None:  # type: ignore[type-arg]
    question = Question(
        {str(i): {"float32": one["float32"], **one["costs"]} for i, one in enumerate(layers)},
        {str(i): one["cast"] for i, one in enumerate(layers)},
        {str(i): dict(zip(FORMATS[1:], one["scores"], strict=True)) for i, one in enumerate(layers)},
        budget,
    )
    found, best = choose(question), brute_force(question)
    assert found is not None
    assert best is not None
    assert question.score(found) <= budget
    assert question.cost(found) <= question.cost(best) * 1.001 + 1e-12


def test_nothing_within_the_budget_and_nothing_to_decide() -> None:
    costs = {"a": {"float16": 1.0}}
    assert choose(Question(costs, scores={"a": {"float16": 2.0}}, budget=1.0)) is None
    assert choose(Question({})) == {}


def test_between_equals_the_format_that_is_named_first_is_taken() -> None:
    assert choose(Question({"a": {"float32": 1.0, "float16": 1.0}})) == {"a": "float32"}


@pytest.mark.parametrize(("cast", "expected"), [(0.0, "float32"), (0.2, "float16")])
def test_casts_between_neighbours_count(cast: float, expected: str) -> None:
    quick, slow = {"float32": 3.0, "float16": 1.0}, {"float32": 1.0, "float16": 1.1}
    question = Question({"a": quick, "b": slow, "c": quick}, dict.fromkeys("abc", cast))
    assert choose(question) == {"a": "float16", "b": expected, "c": "float16"}
    assert question.cost({"a": "float16", "b": "float32", "c": "float16"}) == pytest.approx(3.0 + 3 * cast)


def test_hundreds_of_layers_with_a_budget_that_binds() -> None:
    """So large that nobody can try all: the linear relaxation bounds how good any assignment can be."""
    import numpy as np
    from scipy.optimize import linprog

    random = np.random.default_rng(0)
    full, half, errors = random.uniform(1, 2, 300), random.uniform(0.3, 1, 300), random.uniform(0, 1, 300)
    costs = {str(i): {"float32": float(full[i]), "float16": float(half[i])} for i in range(300)}
    scores = {str(i): {"float16": float(errors[i])} for i in range(300)}
    question = Question(costs, scores=scores, budget=30.0)
    found = choose(question)
    assert found is not None
    assert question.score(found) <= 30.0
    relaxed = linprog(half - full, A_ub=errors[None, :], b_ub=[30.0], bounds=(0, 1))
    assert question.cost(found) <= (full.sum() + relaxed.fun) * 1.005

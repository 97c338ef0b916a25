"""What only TensorFlow's backend has: a branch that costs nothing when it is not taken."""

from __future__ import annotations

from typing import Any

import keras
import pytest

if keras.config.backend() != "tensorflow":
    pytest.skip("of TensorFlow's backend", allow_module_level=True)

import tensorflow as tf

from halfwise.keras.backends.tensorflow import run_if


def add_if(variable: Any) -> Any:
    """A function of the condition that adds 1 and a captured tensor to the variable."""

    def add(condition: Any) -> Any:
        captured = tf.constant(10.0) * 2.0
        run_if(condition, lambda: variable.assign_add(captured + 1.0))
        return variable.read_value()

    return add


@pytest.mark.parametrize("jit", [None, False, True])
def test_the_branch_is_taken_where_the_condition_is_true(jit: bool | None) -> None:
    variable = tf.Variable(0.0)
    function: Any = add_if(variable)
    if jit is not None:
        function = tf.function(function, jit_compile=jit, autograph=False)
    assert [float(function(tf.constant(flag))) for flag in (False, True, False, True)] == [0.0, 21.0, 21.0, 42.0]


def test_it_becomes_one_operation_and_no_switches() -> None:
    variable = tf.Variable(0.0)
    graph = tf.function(add_if(variable), autograph=False).get_concrete_function(tf.TensorSpec((), tf.bool)).graph
    kinds = {operation.type for operation in graph.get_operations()}
    assert "If" in kinds
    assert not kinds & {"Switch", "Merge"}

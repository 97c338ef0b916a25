"""A plan before training: the evidence of a few rehearsed steps instead of the first real ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import keras

from halfwise.core.objective import Objective
from halfwise.core.options import check_options
from halfwise.core.plan import Plan
from halfwise.core.planner import EVIDENCE_STEPS
from halfwise.core.targets import HERE
from halfwise.core.timing import TimingTable
from halfwise.errors import UsageError
from halfwise.keras.apply import AppliedPlan
from halfwise.keras.evidence import Evidence, set_by_hand
from halfwise.keras.guarded_step import Step
from halfwise.keras.names import named_layers
from halfwise.keras.policy import undecided_layers
from halfwise.keras.probe import as_in_fit
from halfwise.keras.training_step import OwnStep
from halfwise.keras.validate import check_batch, check_model

__all__ = ["plan"]


def plan(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    loss: Any = None,
    timing: TimingTable | None = None,
    tolerance: float = 0.1,
    objective: Objective = "time",
    target: str = HERE,
    earlier: Plan | None = None,
    batch_size: int = 32,
) -> Plan:
    """What `"auto"` would choose for `model` on this device, or on other hardware.

    Nothing is changed: weights, statistics, metrics, seeds.

    Args:
        model: compiled, or with `loss` given; variables in float32. It is built if it is not.
        x, y, sample_weight: arrays, or structures of arrays, whose first rows are used as batches; or `x` alone: a data
            set that yields batches `(x, y)` or `(x, y, sample_weight)`.
        loss: what `model.compile` takes as a loss; default the compiled one.
        timing: seconds per layer and format; None measures them here.
        tolerance: share of training's own noise that rounding may add: of the loss's spread over batches for all layers
            together, of the variance of each layer's gradients. Default a tenth.
        objective: what to save: `"time"`, `"memory"` (what is kept for the backward pass), or `"balanced"`.
        target: `"here"`, or other hardware, such as `"cuda:ampere"` (`halfwise.core.targets`). Its times are estimates.
        earlier: a plan that exists: a layer changes only where it gains more than its measurements are spread.
        batch_size: rows of a batch where arrays are given; default 32. Give that of the training: times depend on it.

    Raises:
        UsageError: something cannot be used as given.

    Example:
        >>> import keras, numpy as np, halfwise.keras as hw
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> timing = hw.TimingTable({"dense": {"float32": 2e-3, "bfloat16": 1e-3}})
        >>> hw.plan(model, np.ones((8, 8)), np.zeros((8, 4)), loss="mse", timing=timing).compute("dense")
        'bfloat16'
    """
    check_model(model)
    check_options(guard=True, tolerance=tolerance, objective=objective, timing=timing)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"plan(batch_size={batch_size!r}): give a positive whole number, such as 32")
    if loss is None and not model.compiled:
        raise UsageError("plan() needs a loss: compile the model before, or give loss=...")
    batches = [keras.tree.map_structure(as_in_fit, batch) for batch in _batches(x, y, sample_weight, batch_size)]
    if not batches:
        raise UsageError("plan() got no data; give at least one batch")
    step: Step = model.train_step if loss is None else OwnStep(model, loss)
    if isinstance(step, OwnStep):
        step.build(batches[0])
    else:
        model._symbolic_build(data_batch=batches[0])
    if timing is not None:
        timing.check_paths(named_layers(model), type(model).__name__)
    by_hand = set_by_hand(model, undecided_layers(model))
    in_float32 = Plan.manual(by_hand, framework="keras")
    with AppliedPlan(model, in_float32, settle=False):
        evidence = Evidence(
            model,
            step,
            tolerance=tolerance,
            timing=timing,
            by_hand=by_hand,
            objective=objective,
            target=target,
            earlier=earlier,
        )
        for number in range(max(EVIDENCE_STEPS, len(batches))):
            evidence.observe(batches[number % len(batches)])
            evidence.keep_step()
        return evidence.plan(batches[-1])


def _batches(x: Any, y: Any, sample_weight: Any, size: int) -> Iterator[tuple[Any, ...]]:
    """The first batches, `EVIDENCE_STEPS` of them at most."""
    if y is None and sample_weight is None and not _is_rows(x):
        yield from (batch if isinstance(batch, tuple) else (batch,) for batch in islice(x, EVIDENCE_STEPS))
        return
    check_batch("plan", x, y, sample_weight)
    data = (x, y, sample_weight)
    rows = min((len(array) for array in keras.tree.flatten(data) if array is not None), default=0)
    for start in range(0, min(rows, EVIDENCE_STEPS * size), size):
        yield keras.tree.map_structure(lambda array, at=start: None if array is None else array[at : at + size], data)


def _is_rows(x: Any) -> bool:
    """True for arrays and structures of arrays, False for data sets that yield batches."""
    if isinstance(x, list) and x and all(isinstance(batch, tuple) for batch in x):
        return False
    return all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in keras.tree.flatten(x))

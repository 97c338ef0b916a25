"""halfwise for Keras 3, on TensorFlow, JAX and torch.

    import halfwise.keras as hw

    hw.set_global_policy("auto")
    model = keras.Sequential([...])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, callbacks=[hw.PrecisionGuard()])

    result = hw.step(model, x, y)  # or in a loop of your own
    hw.watch(model)                # or only look at a training that exists

Files: `policy.py` and `apply.py` say what layers compute in; `guard.py` and `step.py` are the front doors and
`engine.py` the machinery behind them, `execution.py` and `guarded_step.py` what is compiled; `probe.py` looks at one
step without leaving a trace, on which `profile.py`, `measure.py`, `localise.py` and `diagnose.py` stand.
"""

from __future__ import annotations

try:
    import keras as _keras  # noqa: F401
except ModuleNotFoundError as error:
    from halfwise.errors import MissingDependencyError

    name = error.name or "keras"
    if name not in ("keras", "tensorflow", "jax", "torch"):
        raise
    raise MissingDependencyError(name, name, "halfwise.keras") from error

from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Plan, Rule
from halfwise.core.timing import TimingTable
from halfwise.errors import TrainingStopped
from halfwise.keras.apply import AppliedPlan, apply
from halfwise.keras.convert import conversion_account, to_precision
from halfwise.keras.diagnose import diagnose
from halfwise.keras.guard import PrecisionGuard
from halfwise.keras.loss_scale import LossScaleOptimizer
from halfwise.keras.names import named_layers
from halfwise.keras.plan import plan
from halfwise.keras.policy import global_policy, set_global_policy
from halfwise.keras.preflight import preflight
from halfwise.keras.profile import profile
from halfwise.keras.result import StepResult
from halfwise.keras.save import load_model, save_model
from halfwise.keras.step import step
from halfwise.keras.watch import Watch, watch

__all__ = [
    "AppliedPlan",
    "LossScaleOptimizer",
    "LossScaleSettings",
    "Plan",
    "PrecisionGuard",
    "Rule",
    "StepResult",
    "TimingTable",
    "TrainingStopped",
    "Watch",
    "apply",
    "conversion_account",
    "diagnose",
    "global_policy",
    "load_model",
    "named_layers",
    "plan",
    "preflight",
    "profile",
    "save_model",
    "set_global_policy",
    "step",
    "to_precision",
    "watch",
]

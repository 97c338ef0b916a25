"""halfwise for PyTorch.

    import halfwise.torch as hw

    mp = hw.MixedPrecision(model, optimizer, policy="auto")
    for x, y in loader:
        result = mp.step(lambda: criterion(model(x), y), clip_grad_norm=1.0)

    hw.watch(model, optimizer, scaler=scaler)  # or only look at a loop that exists
    hw.preflight(model, closure, target="cuda:ampere")  # or find out before a GPU is rented

Files: `mixed_precision.py` is the front door and `engine.py` the machinery behind it; `healing.py`,
`localise.py` and `demote.py` are the guard's hands; `evidence.py`, `profile.py` and `measure.py` feed the
planner; `apply.py` carries plans out; `preflight.py` foretells, by `preflighting/`.
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    from halfwise.errors import MissingDependencyError

    raise MissingDependencyError("torch", "torch", "halfwise.torch") from error

from halfwise.core.loss_scale import LossScaleSettings
from halfwise.core.plan import Plan, Rule
from halfwise.core.timing import TimingTable
from halfwise.errors import TrainingStopped
from halfwise.torch.apply import AppliedPlan, apply
from halfwise.torch.convert import conversion_account, to_precision
from halfwise.torch.diagnose import diagnose
from halfwise.torch.histogram import exponent_histogram
from halfwise.torch.mixed_precision import MixedPrecision
from halfwise.torch.plan import plan
from halfwise.torch.preflight import preflight
from halfwise.torch.profile import profile
from halfwise.torch.result import StepResult
from halfwise.torch.watch import Watch, watch

__all__ = [
    "AppliedPlan",
    "LossScaleSettings",
    "MixedPrecision",
    "Plan",
    "Rule",
    "StepResult",
    "TimingTable",
    "TrainingStopped",
    "Watch",
    "apply",
    "conversion_account",
    "diagnose",
    "exponent_histogram",
    "plan",
    "preflight",
    "profile",
    "to_precision",
    "watch",
]

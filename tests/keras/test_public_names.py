"""Public names of the adapter, and what a missing framework is told as."""

from __future__ import annotations

import subprocess
import sys

import halfwise.keras as hw


def test_public_names() -> None:
    assert hw.__all__ == [
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
    assert all(getattr(hw, name).__doc__ for name in hw.__all__)


def test_a_missing_framework_is_told_with_the_pip_command() -> None:
    code = (
        "import sys\nsys.modules['keras'] = None\n"
        "try: import halfwise.keras\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == (
        "MissingDependencyError halfwise.keras needs the package 'keras': pip install \"halfwise[keras]\""
    )


def test_the_adapter_does_not_load_the_other_one() -> None:
    code = "import sys, halfwise.keras; print([m for m in sys.modules if m.startswith('halfwise.torch')])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"

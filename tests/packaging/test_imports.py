"""What importing loads, who may import whom, and which names are public."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import halfwise
import halfwise.torch as hw

ROOT = Path(__file__).parents[2]


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


HEAVY = ("numpy", "ml_dtypes", "torch", "numba", "keras", "tensorflow", "jax", "rich", "typer")
FORBIDDEN = f"[m for m in {HEAVY} if m in sys.modules]"


def test_importing_halfwise_loads_nothing_heavy() -> None:
    assert in_a_new_process(f"import sys, halfwise; print({FORBIDDEN})") == "[]"


def test_help_loads_neither_numpy_nor_a_framework() -> None:
    code = (
        "import sys\nfrom halfwise.__main__ import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('numpy', 'torch', 'numba', 'ml_dtypes') if m in sys.modules])"
    )
    assert in_a_new_process(code).splitlines()[-1] == "[]"


def test_core_and_reports_load_no_framework() -> None:
    code = (
        "import importlib, pkgutil, sys, halfwise.core, halfwise.report\n"
        "for package in (halfwise.core, halfwise.report):\n"
        "    for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(module.name)\n"
        "print([m for m in ('torch', 'keras', 'tensorflow', 'jax', 'halfwise.torch') if m in sys.modules])"
    )
    assert in_a_new_process(code) == "[]"


def test_importing_the_adapter_loads_no_slow_extras() -> None:
    code = (
        "import sys, halfwise.torch\n"
        "print([m for m in ('numba', 'torch._dynamo', 'sklearn', 'safetensors') if m in sys.modules])"
    )
    assert in_a_new_process(code) == "[]"


def test_layers_import_downwards_only() -> None:
    contracts = subprocess.run(
        [Path(sys.executable).with_name("lint-imports"), "--no-cache"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert contracts.returncode == 0, contracts.stdout


def test_public_names_of_the_package() -> None:
    assert set(halfwise.__all__) == {
        "Diagnosis",
        "ExponentHistogram",
        "FORMATS",
        "Format",
        "HalfwiseError",
        "Incident",
        "LossScaleSettings",
        "Plan",
        "Profile",
        "Rule",
        "TimingTable",
        "TrainingStopped",
        "UsageError",
        "Workload",
    }
    assert all(getattr(halfwise, name) is not None for name in halfwise.__all__)
    assert set(halfwise.__all__) <= set(dir(halfwise))


def test_public_names_of_the_adapter() -> None:
    assert hw.__all__ == [
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
    assert all(getattr(hw, name).__doc__ for name in hw.__all__)


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Plam'; it has: .*Plan"):
        halfwise.Plam  # noqa: B018


def test_a_missing_framework_is_told_with_the_pip_command() -> None:
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        "try: import halfwise.torch\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    assert in_a_new_process(code) == (
        "MissingDependencyError halfwise.torch needs the package 'torch': pip install \"halfwise[torch]\""
    )

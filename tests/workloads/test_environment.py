from __future__ import annotations

import platform

import torch

from halfwise.workloads.environment import describe_environment, environment_changes


def test_environment_changes_are_named() -> None:
    now = {**describe_environment(torch), "device": "cpu", "threads": 1}
    assert now["versions"]["torch"] == torch.__version__
    assert now["versions"].keys() == {"python", "halfwise", "numpy", "torch"}
    assert now["versions"]["python"] == platform.python_version()
    assert environment_changes(now, now) == []
    before = {**now, "threads": 99, "versions": {**now["versions"], "torch": "1.0"}, "cpus": -1}
    assert environment_changes(before, now) == [
        "threads: 99 before, 1 now",
        f"torch: 1.0 before, {torch.__version__} now",
    ]
    assert "threads: None before" in environment_changes({}, now)[1]

from __future__ import annotations

import platform

import torch

from halfwise.workloads.environment import describe_environment, environment_changes


def test_environment_changes_are_named() -> None:
    now = {**describe_environment(["torch"]), "device": "cpu", "threads": 1}
    assert now["versions"]["torch"] == torch.__version__
    assert now["versions"]["python"] == platform.python_version()
    assert environment_changes(now, now) == []
    before = {**now, "threads": 99, "versions": {**now["versions"], "torch": "1.0"}, "cpus": -1}
    assert environment_changes(before, now) == [
        "threads: 99 before, 1 now",
        f"torch: 1.0 before, {torch.__version__} now",
    ]
    assert "threads: None before" in environment_changes({}, now)[1]


def test_a_package_that_is_not_installed_has_no_known_version() -> None:
    assert describe_environment(["no-such-package"])["versions"]["no-such-package"] == "unknown"

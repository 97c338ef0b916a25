from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import pytest

from halfwise.errors import MissingDependencyError, UsageError
from halfwise.workloads.frameworks import BACKENDS, choose_backend
from halfwise.workloads.settings import Settings


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    for name in ("keras", *BACKENDS):
        monkeypatch.setitem(sys.modules, name, sys)  # anything that is there, and is put back
        monkeypatch.delitem(sys.modules, name)


def keras(**given: Any) -> Settings:
    return Settings.of("text", framework="keras", **given)


def test_torch_needs_no_choice() -> None:
    assert choose_backend(Settings.of("text")) == Settings.of("text")
    assert os.environ["KERAS_BACKEND"] == ""
    for given in ({"backend": "torch"}, {"loop": "custom"}):
        with pytest.raises(UsageError, match="cannot be used with --framework 'torch': it belongs to Keras"):
            choose_backend(Settings.of("text", **given))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_given_backend_counts_before_that_of_the_environment(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", backend)
    assert choose_backend(keras()).backend == backend
    monkeypatch.setenv("KERAS_BACKEND", "jax" if backend != "jax" else "torch")
    chosen = choose_backend(keras(backend=backend))
    assert (chosen.backend, chosen.loop) == (backend, "fit")
    assert os.environ["KERAS_BACKEND"] == backend
    assert choose_backend(keras(loop="custom", checkpoint_every=3)).loop == "custom"


def test_without_a_word_the_first_backend_that_is_installed_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    for number, backend in enumerate(BACKENDS):
        assert importlib.util.find_spec(backend) is not None, "the test needs all of them"
        monkeypatch.setenv("KERAS_BACKEND", "")
        for missing in BACKENDS[:number]:
            monkeypatch.setitem(sys.modules, missing, None)
        assert choose_backend(keras()).backend == backend


def test_what_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for settings, message in (
        (keras(backend="numpy"), "--backend 'numpy' cannot be used; allowed: 'tensorflow', 'jax', 'torch'"),
        (keras(loop="for"), "--loop 'for' cannot be used; allowed: 'fit', 'custom'"),
        (Settings.of("text", framework="mxnet"), "--framework 'mxnet' cannot be used; allowed: 'torch', 'keras'"),
        (keras(checkpoint_every=3), "--checkpoint-every cannot be used with --loop 'fit'"),
    ):
        with pytest.raises(UsageError, match=message):
            choose_backend(settings)
    monkeypatch.setenv("KERAS_BACKEND", "openvino")
    with pytest.raises(UsageError, match="--backend 'openvino' cannot be used"):
        choose_backend(keras())
    assert os.environ["KERAS_BACKEND"] == "openvino"


def test_a_missing_package_is_named_with_what_it_is_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(MissingDependencyError, match=r"Keras with --backend jax needs .*\[jax\]"):
        choose_backend(keras(backend="jax"))
    assert os.environ["KERAS_BACKEND"] == ""

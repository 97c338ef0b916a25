from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

import halfwise.keras as hw
from halfwise.errors import DataError
from halfwise.workloads.keras.checkpoint import load_checkpoint, save_checkpoint

X, Y = np.random.RandomState(0).rand(32, 4).astype(np.float32), np.arange(32) % 3


def trained(policy: str) -> tuple[keras.Model, hw.PrecisionGuard]:
    hw.set_global_policy(policy)
    head = keras.layers.Dense(3, activation="softmax", dtype="float32", name="head")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), head])
    hw.set_global_policy("float32")
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy")
    guard = hw.PrecisionGuard()
    model.fit(X, Y, batch_size=8, callbacks=[guard], verbose=0)
    return model, guard


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, guard = trained("float32")
    hw.apply(model, hw.Plan.manual({"head": "float32"}, default="bfloat16", framework="keras"))
    target = tmp_path_factory.mktemp("saved") / "checkpoint"
    save_checkpoint(target, model=model, guard=guard, progress={"step": 4})
    return target


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run" / "checkpoint"))


def test_everything_comes_back(tmp_path: Path) -> None:
    model, guard = trained("mixed_float16")
    target = tmp_path / "run" / "checkpoint"
    save_checkpoint(target, model=model, guard=guard, progress={"step": 4})
    found = load_checkpoint(target)
    assert found is not None
    again, state, progress = found
    assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), again.get_weights(), strict=True))
    slots = [[keras.ops.convert_to_numpy(v) for v in m.optimizer.variables] for m in (model, again)]
    assert all(np.array_equal(a, b) for a, b in zip(*slots, strict=True))
    assert any(np.any(slot != 0) for slot in slots[0])
    assert again.layers[0].compute_dtype == "float16"
    assert again.layers[-1].compute_dtype == "float32"
    assert state == guard.state_dict()
    assert progress == {"step": 4}
    assert sorted(path.name for path in target.parent.iterdir()) == ["checkpoint"]


def _killed_while_writing(target: Path) -> None:
    shutil.copytree(target, target.with_name("checkpoint.new"))
    target.with_name("checkpoint.new").joinpath("state.json").unlink()


def _killed_between_the_renames(target: Path) -> None:
    shutil.copytree(target, target.with_name("checkpoint.new"))
    target.rename(target.with_name("checkpoint.old"))


def _killed_before_the_old_one_was_removed(target: Path) -> None:
    shutil.copytree(target, target.with_name("checkpoint.old"))


@pytest.mark.parametrize(
    "kill", [_killed_while_writing, _killed_between_the_renames, _killed_before_the_old_one_was_removed]
)
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(checkpoint: Path, kill: Callable[[Path], None]) -> None:
    kill(checkpoint)
    found = load_checkpoint(checkpoint)
    assert found is not None
    assert found[2]["step"] == 4
    assert sorted(path.name for path in checkpoint.parent.iterdir()) == ["checkpoint"]


def test_there_may_be_none(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "checkpoint") is None
    (tmp_path / "checkpoint.new").mkdir()  # a first one that a kill cut short
    assert load_checkpoint(tmp_path / "checkpoint") is None
    assert list(tmp_path.iterdir()) == []


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "no JSON": ("state.json", lambda data: data[:-1]),
    "no state": ("state.json", lambda _: b"[]"),
    "another version": ("state.json", lambda data: data.replace(b'"version":1', b'"version":7', 1)),
    "zeros": ("model.keras", lambda data: bytes(len(data))),
    "cut": ("model.keras", lambda data: data[: len(data) // 2]),
    "flipped": ("model.keras", lambda data: data.replace(b"kernel", b"kernol")[:-1] + b"x"),
    "no plan": ("model.plan.toml", lambda _: b"compute"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_clear_error(checkpoint: Path, damage: str) -> None:
    name, change = DAMAGE[damage]
    path = checkpoint / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match="use another checkpoint"):
        load_checkpoint(checkpoint)

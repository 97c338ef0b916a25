from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from halfwise.errors import DataError, UsageError
from halfwise.torch.checkpoint import find_checkpoint, load_checkpoint, save_checkpoint, tidy_checkpoint


class Net(nn.Module):
    """Dropout, batch norm, tied weights, a transposed parameter, buffers of odd dtypes, extra state."""

    count: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.transposed = nn.Parameter(torch.randn(3, 6).t())
        self.register_buffer("count", torch.tensor(3, dtype=torch.int16))
        self.register_buffer("table", torch.randn(2, 2, dtype=torch.complex128))
        self.note: Any = {"seen": (1, 2), 3: math.inf}

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        result: Tensor = self.second(hidden) @ self.transposed
        return result

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


class Scale:
    """Stands where a MixedPrecision stands: something with a nested state."""

    def __init__(self) -> None:
        self.state: Any = {"scale": 65536.0}

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "lr": 0.1}, {"params": p[2:], "lr": 0.01}], weight_decay=0.1
    ),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p[1:], max_iter=2),  # it refuses the transposed one, the first
}


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for _ in range(steps):
        x = torch.randn(5, 6)

        def closure(x: Tensor = x) -> float:
            model.zero_grad()
            loss: Tensor = model(x).square().mean()
            torch.autograd.backward(loss)
            return loss.item()

        closure()
        for optimizer in optimizers:
            optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)


def same(left: Any, right: Any) -> bool:
    """Equal in type and to the bit, all the way down."""
    if isinstance(left, Tensor):
        return (
            isinstance(right, Tensor)
            and (left.dtype, left.shape) == (right.dtype, right.shape)
            and torch.equal(bits(left), bits(right))
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and type(left) is type(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or (left != left and right != right))


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def test_same_is_no_rubber_stamp() -> None:
    x = torch.tensor([1.0, math.nan])
    assert same({"a": [x, (1,)]}, {"a": [x.clone(), (1,)]})
    for other in (
        {"a": [x + 1, (1,)]},
        {"a": [x, [1]]},
        {"a": [x, (1.0,)]},
        {"a": [x.double(), (1,)]},
        {"b": [x, (1,)]},
    ):
        assert not same({"a": [x, (1,)]}, other)
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    model, scale = Net(), Scale()
    optimizer = OPTIMIZERS[kind](list(model.parameters()))
    train(model, [optimizer], 3)
    scale.state = {
        "scale": 2.0,
        "incidents": [("overflow", 3)],
        4: torch.tensor(1.5, dtype=torch.bfloat16),
        "nan": math.nan,
    }
    save_checkpoint(tmp_path / "c", model=model, optimizer=optimizer, mp=scale, progress={"epoch": 2, "order": (3, 1)})
    kept = (model.state_dict(), optimizer.state_dict(), scale.state)
    snapshot = [{k: v.clone() if isinstance(v, Tensor) else v for k, v in kept[0].items()}, json.dumps(str(kept[1]))]
    train(model, [optimizer], 3)
    drawn = (random.random(), np.random.rand(), torch.rand(()).item())

    torch.manual_seed(99)
    other, other_scale = Net(), Scale()
    other_optimizer = OPTIMIZERS[kind](list(other.parameters()))
    progress = load_checkpoint(tmp_path / "c", model=other, optimizer=other_optimizer, mp=other_scale)
    assert same(progress, {"epoch": 2, "order": (3, 1)})
    assert same(other_scale.state, scale.state)
    assert same(dict(other.state_dict()), snapshot[0])
    assert json.dumps(str(other_optimizer.state_dict())) == snapshot[1]
    assert other.second.weight is other.first.weight
    train(other, [other_optimizer], 3)
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    assert same(other_optimizer.state_dict(), optimizer.state_dict())
    assert drawn == (random.random(), np.random.rand(), torch.rand(()).item())


def test_several_optimizers(tmp_path: Path) -> None:
    model = Net()
    optimizers = [torch.optim.SGD(model.first.parameters(), momentum=0.9), torch.optim.Adam(model.norm.parameters())]
    train(model, optimizers, 2)
    save_checkpoint(tmp_path / "c", model=model, optimizer=optimizers, progress={})
    other = Net()
    others = [torch.optim.SGD(other.first.parameters()), torch.optim.Adam(other.norm.parameters())]
    load_checkpoint(tmp_path / "c", model=other, optimizer=others)
    assert [same(a.state_dict(), b.state_dict()) for a, b in zip(optimizers, others, strict=True)] == [True, True]


def test_weights_are_plain_safetensors_and_tied_ones_stored_once(tmp_path: Path) -> None:
    model = Net()
    save_checkpoint(tmp_path / "c", model=model, optimizer=torch.optim.SGD(model.parameters()), progress={})
    weights = load_file(tmp_path / "c" / "model.safetensors")
    assert "first.weight" in weights
    assert "second.weight" not in weights
    assert torch.equal(weights["transposed"], model.transposed)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        "model.safetensors",
        "state.json",
        "state.safetensors",
    ]


def test_names_ignore_wrappers(tmp_path: Path) -> None:
    model = Net()
    wrapped = nn.DataParallel(model)
    save_checkpoint(tmp_path / "c", model=wrapped, optimizer=torch.optim.SGD(model.parameters()), progress={})
    other = Net()
    compiled = torch.compile(other, backend="eager")
    assert isinstance(compiled, nn.Module)
    load_checkpoint(tmp_path / "c", model=compiled, optimizer=torch.optim.SGD(other.parameters()))
    assert same(dict(other.state_dict()), dict(model.state_dict()))


def test_a_compiled_part_loads_into_a_plain_model(tmp_path: Path) -> None:
    first, other = nn.Linear(2, 2), nn.Linear(2, 2)
    compiled = torch.compile(first, backend="eager")
    assert isinstance(compiled, nn.Module)
    part, whole = nn.Sequential(compiled, nn.ReLU()), nn.Sequential(other, nn.ReLU())
    save_checkpoint(tmp_path / "c", model=part, optimizer=torch.optim.SGD(part.parameters()), progress={})
    load_checkpoint(tmp_path / "c", model=whole, optimizer=torch.optim.SGD(whole.parameters()))
    assert torch.equal(other.weight, first.weight)


def test_another_model_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    saved = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    save_checkpoint(tmp_path / "c", model=saved, optimizer=torch.optim.SGD(saved.parameters()), progress={})
    other = nn.Sequential(nn.Linear(4, 9), nn.BatchNorm1d(9))
    before = {name: value.clone() for name, value in other.state_dict().items()}
    random_state = torch.get_rng_state()
    with pytest.raises(UsageError) as caught:
        load_checkpoint(tmp_path / "c", model=other, optimizer=torch.optim.SGD(other.parameters()))
    message = str(caught.value)
    parts = (
        "missing in the checkpoint: 1.bias",
        "unknown to the model: 2.bias, 2.weight",
        "0.weight ((8, 4) saved, (9, 4) here)",
    )
    for part in parts:
        assert part in message
    assert same(before, dict(other.state_dict()))
    assert torch.equal(random_state, torch.get_rng_state())


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    model = Net()
    parameters = list(model.parameters())
    save_checkpoint(tmp_path / "c", model=model, optimizer=torch.optim.SGD(parameters), progress={})
    with pytest.raises(UsageError, match="holds SGD; here is Adam"):
        load_checkpoint(tmp_path / "c", model=model, optimizer=torch.optim.Adam(parameters))
    with pytest.raises(UsageError, match="does not fit the SGD"):
        load_checkpoint(tmp_path / "c", model=model, optimizer=torch.optim.SGD(parameters[:2]))
    with pytest.raises(UsageError, match="saved without a MixedPrecision"):
        load_checkpoint(tmp_path / "c", model=model, optimizer=torch.optim.SGD(parameters), mp=Scale())


def test_a_state_that_cannot_be_saved_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    save_checkpoint(tmp_path / "c", model=model, optimizer=optimizer, progress={"epoch": 1})
    with pytest.raises(UsageError, match="progress/epoch"):
        save_checkpoint(tmp_path / "c", model=model, optimizer=optimizer, progress={"epoch": object()})
    assert load_checkpoint(tmp_path / "c", model=model, optimizer=optimizer) == {"epoch": 1}


def test_no_checkpoint_and_damaged_ones(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    path = tmp_path / "c"
    assert find_checkpoint(path) is None
    with pytest.raises(DataError, match="there is no checkpoint"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    for name, data in [
        ("state.json", b"{"),
        ("state.json", b"[]"),
        ("state.json", b'{"format_version":2}'),
        ("state.json", b'{"format_version":1}'),
        ("state.safetensors", b"\xff" * 100),
        ("model.safetensors", b""),
    ]:
        save_checkpoint(path, model=model, optimizer=optimizer, progress={})
        (path / name).write_bytes(data)
        with pytest.raises(DataError, match=name):
            load_checkpoint(path, model=model, optimizer=optimizer)


KILL_AT_EVERY_FILE_OPERATION = """
    import os, shutil, signal, sys
    from pathlib import Path
    import torch
    from halfwise.torch.checkpoint import load_checkpoint, save_checkpoint

    torch.set_num_threads(1)
    target = Path(sys.argv[1]) / "checkpoint"

    def build(value):
        model = torch.nn.Linear(3, 3)
        torch.nn.init.constant_(model.weight, value)
        return model, torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)

    def save(value):
        model, optimizer = build(value)
        save_checkpoint(target, model=model, optimizer=optimizer, progress={"value": value})

    def load():
        model, optimizer = build(0.0)
        value = load_checkpoint(target, model=model, optimizer=optimizer)["value"]
        assert float(model.weight[0, 0]) == optimizer.param_groups[0]["lr"] == value
        return value

    save(0.5)
    load()
    kills, found = 0, []
    while True:
        shutil.rmtree(sys.argv[1])
        save(1.0)
        child = os.fork()
        if child == 0:
            left = kills
            def count(event, arguments):
                global left
                if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
                    left -= 1
                    if left < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
            sys.addaudithook(count)
            save(2.0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        value = load()
        found.append(value)
        save(3.0)
        assert load() == 3.0
        assert [p.name for p in Path(sys.argv[1]).iterdir()] == ["checkpoint"]
        if os.WIFEXITED(status):
            break
        kills += 1
    print(kills, *found)
"""


def test_a_kill_before_any_file_operation_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    program = textwrap.dedent(KILL_AT_EVERY_FILE_OPERATION)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    kills, *found = done.stdout.split()
    assert int(kills) > 10
    assert set(found) == {"1.0", "2.0"}
    assert found == sorted(found)  # once the new one stands, it stays
    assert found[-1] == "2.0"


SAVE_FOR_EVER = """
    import itertools, sys
    from pathlib import Path
    import torch
    from halfwise.torch.checkpoint import save_checkpoint

    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in itertools.count():
        torch.nn.init.constant_(model.weight, step)
        save_checkpoint(Path(sys.argv[1]), model=model, optimizer=optimizer, progress={"step": step})
        if step == 2:
            print("saving", flush=True)
"""


def test_kills_at_random_moments(tmp_path: Path) -> None:
    seen = []
    for attempt in range(3):
        target = tmp_path / str(attempt) / "checkpoint"
        saver = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(SAVE_FOR_EVER), str(target)], stdout=subprocess.PIPE, text=True
        )
        assert saver.stdout is not None
        assert saver.stdout.readline() == "saving\n"
        time.sleep(random.uniform(0.0, 0.05))
        os.kill(saver.pid, signal.SIGKILL)
        saver.wait()
        saver.stdout.close()
        model = nn.Linear(300, 300)
        step = load_checkpoint(target, model=model, optimizer=torch.optim.SGD(model.parameters()))["step"]
        assert torch.equal(model.weight, torch.full((300, 300), float(step)))
        seen.append(step)
    assert min(seen) >= 2


@pytest.mark.parametrize(
    "killed_after", ["the new one was renamed", "the old one was renamed", "the new one was begun"]
)
def test_what_a_kill_left_is_tidied(tmp_path: Path, killed_after: str) -> None:
    target, old, new = (tmp_path / name for name in ("checkpoint", "checkpoint.old", "checkpoint.new"))
    complete = {
        "the new one was renamed": (target, old),
        "the old one was renamed": (old, new),
        "the new one was begun": (target,),
    }[killed_after]
    for directory in complete:
        directory.mkdir()
        (directory / "state.json").write_text(directory.name)
    if not new.exists():
        new.mkdir()
    tidy_checkpoint(target)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert (target / "state.json").read_text() == complete[0].name
    tidy_checkpoint(tmp_path / "none")

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from halfwise.core.profile import Profile
from halfwise.core.record import RunRecord
from halfwise.torch.checkpoint import find_checkpoint
from halfwise.workloads.compare import compare_with_float32
from halfwise.workloads.image_data import ImageData, load_images
from halfwise.workloads.runs import finish, new_run, resumed_run
from halfwise.workloads.settings import Settings
from halfwise.workloads.text_data import TextData, load_texts
from halfwise.workloads.torch.networks import build_network
from halfwise.workloads.torch.training import TorchTraining


class Quiet:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.messages: list[str] = []
        self.began_at = -1

    def start(self, *, epochs: int, steps_per_epoch: int, step: int) -> None:
        self.began_at = step

    def step(self, row: Mapping[str, Any], *, accuracy: float, skipped: int) -> None:
        self.rows.append(row)

    def measuring(self) -> None:
        pass

    def message(self, text: str) -> None:
        self.messages.append(text)


def start(settings: Settings, directory: Path, view: Quiet | None = None) -> tuple[TorchTraining, RunRecord]:
    training, record = new_run(settings, directory, view or Quiet())
    assert isinstance(training, TorchTraining)
    return training, record


def resume(directory: Path, view: Quiet, **given: Any) -> tuple[TorchTraining, RunRecord]:
    training, record = resumed_run("image", directory, given, view)
    assert isinstance(training, TorchTraining)
    return training, record


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("workload", "promised"), [("image", 0.97), ("text", 0.92)])
def test_default_settings_reach_the_accuracy_that_is_promised(tmp_path: Path, workload: str, promised: float) -> None:
    accuracies = []
    for seed in range(3):
        training, record = start(Settings.of(workload, policy="float32", seed=seed), tmp_path / str(seed))
        accuracies.append(training.run(record)["test_accuracy"])
    assert statistics.mean(accuracies) >= promised


@pytest.mark.parametrize("workload", ["image", "text"])
def test_float32_is_the_loop_without_halfwise_bit_for_bit(tmp_path: Path, workload: str) -> None:
    settings = Settings.of(workload, policy="float32", seed=3, limit=100, batch_size=32, epochs=2)
    training, record = start(settings, tmp_path / "run")
    training.run(record)

    data: ImageData | TextData = load_images("digits") if workload == "image" else load_texts("sotu")
    torch.manual_seed(3)
    model = build_network(settings.network, data)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3 if workload == "image" else 3e-3)
    losses = []
    for epoch in range(2):
        order = np.random.default_rng((3, epoch)).permutation(100)
        for begin in range(0, 100, 32):
            inputs, labels = (torch.from_numpy(array[order[begin : begin + 32]]) for array in data.train)
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), labels)
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
    assert [row["loss"] for row in record.metrics()] == losses
    theirs = model.state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in training.model.state_dict().items())


def test_batches_cover_the_data_once_and_go_on_anywhere() -> None:
    settings = Settings.of("image", policy="float32", limit=100, batch_size=32)
    training = TorchTraining(settings, load_images("digits").first(100), view=Quiet())
    whole = list(training.batches(0))
    assert [len(labels) for _, labels in whole] == [32, 32, 32, 4]
    assert training.steps_per_epoch == 4
    seen = sorted(image.numpy().tobytes() for images, _ in whole for image in images)
    assert seen == sorted(image.tobytes() for image in training.data.train[0])
    rest = list(training.batches(0, start=2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[2:], rest, strict=True))
    assert not torch.equal(whole[0][0], next(training.batches(1))[0])


def test_evaluation_counts_every_test_image_and_leaves_no_trace() -> None:
    settings = Settings.of("image", policy="float32")
    training = TorchTraining(settings, load_images("digits"), view=Quiet())
    before = torch.get_rng_state()
    found = training.evaluate()
    with torch.no_grad():
        logits = training.model(torch.from_numpy(training.data.test[0]))
        labels = torch.from_numpy(training.data.test[1])
        assert found["test_accuracy"] == float((logits.argmax(1) == labels).double().mean())
        assert found["test_loss"] == pytest.approx(float(cross_entropy(logits, labels)), rel=1e-6)
    assert training.model.training
    assert torch.equal(before, torch.get_rng_state())


def test_comparison_leaves_the_training_alone(tmp_path: Path) -> None:
    settings = Settings.of("image", policy="mixed_float16", limit=64, epochs=1, network="small")
    training, record = start(settings, tmp_path / "run")
    training.run(record)
    weights = {name: value.clone() for name, value in training.model.state_dict().items()}
    state, random_state = training.mp.state_dict(), torch.get_rng_state()
    pair = compare_with_float32(training, pairs=4)
    assert pair.pairs == 4
    assert 0.0 < pair.low <= pair.ratio <= pair.high
    assert min(pair.seconds, pair.seconds_float32) > 0.0
    assert all(torch.equal(value, weights[name]) for name, value in training.model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    assert training.mp.state_dict()["scale"] == state["scale"]
    assert training.mp.steps == state["steps"]


def test_auto_keeps_its_evidence_over_a_resume(tmp_path: Path) -> None:
    settings = Settings.of("image", policy="auto", limit=64, epochs=2, batch_size=16)
    training, record = start(settings, tmp_path / "run")
    first = finish(training, record, training.run(record))
    evidence = Profile.load(record.profile_path)
    view = Quiet()
    training, record = resume(tmp_path / "run", view, epochs=30)  # beyond step 100: weights are looked at anew
    second = finish(training, record, training.run(record))
    assert view.began_at == 8
    assert len(record.metrics()) == 120
    assert first["format_times"].keys() == {"bfloat16", "float16"}
    assert second["format_times"] == first["format_times"]
    assert second["plan"] == first["plan"]
    later = Profile.load(record.profile_path)
    assert set(later.paths()) >= set(evidence.paths())
    assert later.get("conv", "activation") == evidence.get("conv", "activation")


def test_no_checkpoint_is_written_while_evidence_is_gathered(tmp_path: Path) -> None:
    settings = Settings.of("image", policy="auto", limit=64, epochs=1, batch_size=16, checkpoint_every=1)

    class StopError(Exception):
        pass

    class Stopping(Quiet):
        def step(self, row: Mapping[str, Any], *, accuracy: float, skipped: int) -> None:
            super().step(row, accuracy=accuracy, skipped=skipped)
            if len(self.rows) == 2:
                raise StopError

    training, record = start(settings, tmp_path / "run", Stopping())
    with pytest.raises(StopError):
        training.run(record)
    assert training.mp.plan is None
    assert len(record.metrics()) == 2
    assert find_checkpoint(record.checkpoint_path) is not None
    view = Quiet()
    training, record = resume(tmp_path / "run", view)
    training.run(record)
    assert view.began_at == 0
    assert [row["step"] for row in RunRecord.open(tmp_path / "run").metrics()] == [0, 1, 2, 3]

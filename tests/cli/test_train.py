from __future__ import annotations

import gzip
import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from halfwise.__main__ import main
from halfwise.core.plan import Plan
from halfwise.core.record import RunRecord

QUICK = ["--limit", "96", "--epochs", "2", "--batch-size", "32"]  # 6 steps


@pytest.fixture(autouse=True)
def _in_an_empty_directory_with_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


Halfwise = Callable[..., tuple[int, str, str]]


@pytest.fixture
def halfwise(capsys: pytest.CaptureFixture[str]) -> Halfwise:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        printed = capsys.readouterr()
        return code, " ".join(printed.out.split()), " ".join(printed.err.split())

    return call


def without_seconds(record: RunRecord) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in record.metrics()]


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def test_a_run_leaves_a_whole_record_and_a_readable_summary(halfwise: Halfwise) -> None:
    code, out, err = halfwise("train", "image", *QUICK, "--policy", "float32")
    assert (code, err) == (0, "")
    parts = (
        "epoch 2/2 loss",
        "Test accuracy 0.",
        "2 epochs, 6 steps",
        "float32, as asked",
        "halfwise explain runs/image",
    )
    assert all(part in out for part in parts), out
    directory = Path("runs/image-float32-1")
    names = {path.name for path in directory.iterdir()}
    assert names >= {"environment.json", "metrics.jsonl", "plan.toml", "checkpoint", "summary.json"}
    record = RunRecord.open(directory)
    rows = record.metrics()
    assert [(row["step"], row["epoch"]) for row in rows] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)]
    assert all(row.keys() >= {"loss", "loss_scale", "applied", "seconds"} for row in rows)
    summary = record.summary()
    assert summary is not None
    assert summary["test_accuracy"] == rows[-1]["test_accuracy"]
    assert (summary["skipped_steps"], summary["incidents"], summary["step_time"]) == (0, [], None)
    assert record.environment()["threads"] == 1
    assert record.environment()["modules"]["hidden"] == "Linear"
    assert Plan.load(record.plan_path).default.compute == "float32"
    assert load_file(record.checkpoint_path / "model.safetensors").keys() == {
        f"{layer}.{name}" for layer in ("conv", "hidden", "head") for name in ("weight", "bias")
    }
    halfwise("train", "image", *QUICK, "--policy", "float32")
    assert sorted(path.name for path in Path("runs").iterdir()) == ["image-float32-1", "image-float32-2"]
    assert without_seconds(RunRecord.open("runs/image-float32-2")) == without_seconds(record)


@pytest.mark.parametrize("policy", ["mixed_float16", "bf16-mixed", "auto"])
def test_json_is_the_summary_and_alone_on_stdout(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "image", *QUICK, "--policy", policy, "--network", "small", "--out", "run", "--json"]) == 0
    printed = capsys.readouterr()
    summary = json.loads(printed.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert "epoch 2/2" in printed.err
    assert summary.pop("run") == "run"
    assert summary == RunRecord.open("run").summary()
    assert summary["network"] == "small"
    if policy == "auto":
        assert set(summary["format_times"]) == {"bfloat16", "float16"}
        assert [layer["name"] for layer in summary["plan"]["layers"]] == ["conv", "head"]
        assert Path("run/profile.npz").is_file()
    else:
        assert summary["policy"] == {"bf16-mixed": "mixed_bfloat16"}.get(policy, policy)
        assert summary["step_time"]["ratio"] > 0.0
        assert summary["plan"]["default"]["compute"] == summary["policy"].removeprefix("mixed_")


BAD = {
    "policy": (["--policy", "float8"], "unknown policy 'float8'. Allowed: 'auto', 'float32'"),
    "bare half": (["--policy", "float16"], "Use 'mixed_float16'"),
    "plan": (["--policy", "none.toml"], "cannot read the plan 'none.toml'"),
    "framework": (["--framework", "mxnet"], "--framework 'mxnet' cannot be used; allowed: 'torch', 'keras'"),
    "backend": (["--framework", "keras", "--backend", "mxnet"], "allowed: 'tensorflow', 'jax', 'torch'"),
    "loop": (["--framework", "keras", "--loop", "for"], "--loop 'for' cannot be used; allowed: 'fit', 'custom'"),
    "backend of torch": (["--backend", "jax"], "--backend 'jax' cannot be used with --framework 'torch'"),
    "loop of torch": (["--loop", "custom"], "Add --framework keras, or leave --loop out"),
    "checkpoints in fit": (["--framework", "keras", "--checkpoint-every", "3"], "Add --loop custom, or leave it out"),
    "network": (["--network", "resnet"], "unknown network 'resnet'; choose one of 'convnet', 'small'"),
    "data": (["--data", "mnist"], "no data called 'mnist': give 'digits'"),
    "learning rate": (["--learning-rate", "-1"], "--learning-rate -1.0 cannot be used; give a positive number"),
    "learning rate nan": (["--learning-rate", "nan"], "--learning-rate nan cannot be used"),
    "epochs": (["--epochs", "0"], "Invalid value for '--epochs'"),
    "resume what": (["--resume"], "--resume needs the run to go on with: add --out DIR"),
    "resume nothing": (["--resume", "--out", "none"], "'none' does not exist"),
    "resume no run": (["--resume", "--out", "full"], "'full' holds no run"),
    "out is full": (["--out", "full"], "'full' already holds files, and nothing is overwritten"),
    "malformed idx": (["--data", "full"], "no train-images-idx3-ubyte[.gz]"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_usage_is_one_clear_error_and_writes_nothing(halfwise: Halfwise, case: str) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    arguments, message = BAD[case]
    code, out, err = halfwise("train", "image", *QUICK[:2], *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("halfwise: ") <= 1
    assert "Traceback" not in err
    assert [path.name for path in Path().rglob("*")] == ["full", "notes.txt"]


BAD_TEXT = {
    "data": (["--data", "imdb"], "no data called 'imdb': give 'sotu'"),
    "directory": (["--data", "full"], "no train.jsonl[.gz]"),
    "malformed": (["--data", "full/notes.txt"], "line 1 of 'full/notes.txt' is not JSON"),
    "policy": (["--policy", "float8"], "unknown policy 'float8'"),
    "network": (["--network", "convnet"], "No such option"),
    "resume an image run": (["--resume", "--out", "image"], "one of `halfwise train image`, not text"),
}


@pytest.mark.parametrize("case", BAD_TEXT)
def test_bad_usage_of_text_is_one_clear_error(halfwise: Halfwise, case: str) -> None:
    Path("full").mkdir()
    Path("full/notes.txt").write_text("mine")
    if "image" in case:
        halfwise("train", "image", *QUICK, "--policy", "float32", "--out", "image")
    arguments, message = BAD_TEXT[case]
    code, out, err = halfwise("train", "text", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_text_leaves_the_same_record_and_goes_on_exactly(halfwise: Halfwise) -> None:
    base = ["train", "text", "--limit", "96", "--batch-size", "32", "--policy", "mixed_float16"]
    code, out, err = halfwise(*base, "--epochs", "3")
    assert (code, err) == (0, "")
    assert "on 96 texts never trained on" in out
    assert "3 epochs, 9 steps" in out
    assert "embedding_bag on sotu, seed 0" in out
    whole = RunRecord.open("runs/text-mixed_float16-1")
    names = {path.name for path in whole.directory.iterdir()}
    assert names >= {"environment.json", "metrics.jsonl", "plan.toml", "checkpoint", "summary.json"}
    assert whole.environment()["modules"] == {"": "EmbeddingBag", "embedding": "Embedding", "head": "Linear"}
    assert whole.environment()["settings"]["workload"] == "text"
    halfwise(*base, "--epochs", "1", "--out", "parts")
    assert halfwise("train", "text", "--out", "parts", "--resume", "--epochs", "3")[0] == 0
    assert without_seconds(RunRecord.open("parts")) == without_seconds(whole)


def test_texts_of_ones_own(halfwise: Halfwise) -> None:
    lines = [json.dumps({"text": f"{word} {n}", "label": word}) for n in range(20) for word in ("good", "bad")]
    Path("texts.jsonl").write_text("\n".join(lines))
    code, out, _ = halfwise("train", "text", "--data", "texts.jsonl", "--policy", "float32", "--epochs", "20")
    assert code == 0
    assert "Test accuracy 1.0000 on 8 texts" in out


MISSING = {
    "torch": (["torch"], [], "torch", "torch"),
    "keras, tensorflow": (["keras"], ["--framework", "keras", "--backend", "tensorflow"], "keras", "tensorflow"),
    "keras, jax": (["keras"], ["--framework", "keras", "--backend", "jax"], "keras", "jax"),
    "keras, torch": (["keras"], ["--framework", "keras", "--backend", "torch"], "keras", "keras"),
    "tensorflow": (["tensorflow"], ["--framework", "keras", "--backend", "tensorflow"], "tensorflow", "tensorflow"),
    "jax": (["jax"], ["--framework", "keras", "--backend", "jax"], "jax", "jax"),
    "Keras' torch": (["torch"], ["--framework", "keras", "--backend", "torch"], "torch", "torch"),
    "all backends": (["tensorflow", "jax", "torch"], ["--framework", "keras"], "tensorflow", "tensorflow"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_package_is_told_with_the_pip_command(case: str) -> None:
    missing, options, package, extra = MISSING[case]
    program = "\n".join(
        [
            "import sys",
            *(f"sys.modules[{name!r}] = None" for name in missing),
            "from halfwise.__main__ import main",
            f"sys.exit(main({['train', 'text', *options]!r}))",
        ]
    )
    environment = {name: value for name, value in os.environ.items() if name != "KERAS_BACKEND"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 1
    assert f"needs the package '{package}': pip install \"halfwise[{extra}]\"" in done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("runs").exists()


def test_a_malformed_idx_file_is_named(halfwise: Halfwise) -> None:
    images, labels = np.zeros((4, 8, 8), np.uint8), np.zeros(4, np.uint8)
    Path("data").mkdir()
    for stem in ("train", "t10k"):
        Path(f"data/{stem}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images)))
        Path(f"data/{stem}-labels-idx1-ubyte").write_bytes(idx(labels))
    Path("data/t10k-labels-idx1-ubyte").write_bytes(idx(labels)[:-1])
    code, _, err = halfwise("train", "image", "--data", "data")
    assert code == 2
    assert "'data/t10k-labels-idx1-ubyte' should hold 4 bytes of data, (4,), and holds only 3" in err
    Path("data/t10k-labels-idx1-ubyte").write_bytes(idx(labels))
    code, out, _ = halfwise("train", "image", "--data", "data", "--policy", "float32", "--epochs", "1")
    assert code == 0
    assert "1 epoch, 1 step" in out


def test_tiny_images_take_one_thread_unless_told(halfwise: Halfwise, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["train", "image", *QUICK, "--policy", "float32"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(2)
    halfwise(*arguments, "--out", "free")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    halfwise(*arguments, "--out", "told")
    assert [RunRecord.open(name).environment()["threads"] for name in ("free", "told")] == [1, 2]


def test_a_plan_is_followed_kept_and_not_needed_again(halfwise: Halfwise) -> None:
    Plan.manual({"head": "float32"}, default="bfloat16").save("mine.toml")
    code, out, _ = halfwise("train", "image", *QUICK, "--policy", "mine.toml")
    assert code == 0
    assert "bfloat16, policy mine.toml" in out
    record = RunRecord.open("runs/image-plan-1")
    assert Plan.load(record.plan_path).compute("head") == "float32"
    Path("mine.toml").unlink()
    code, out, _ = halfwise("train", "image", "--out", "runs/image-plan-1", "--resume", "--epochs", "3")
    assert code == 0
    assert "going on at step 6, epoch 3 of 3" in out
    assert len(record.metrics()) == 9


def test_a_plan_for_another_model_is_refused(halfwise: Halfwise) -> None:
    Plan.manual({"encoder.fc": "float32"}, default="bfloat16").save("other.toml")
    code, _, err = halfwise("train", "image", *QUICK, "--policy", "other.toml")
    assert code == 2
    assert "names modules that 'ConvNet' does not have: 'encoder.fc'" in err
    assert not Path("runs").exists()


def test_more_epochs_are_the_same_as_having_asked_for_them_at_once(halfwise: Halfwise) -> None:
    base = ["train", "image", "--limit", "96", "--batch-size", "32", "--policy", "float32", "--seed", "5"]
    halfwise(*base, "--epochs", "3", "--out", "whole")
    halfwise(*base, "--epochs", "1", "--out", "parts")
    code, _, _ = halfwise("train", "image", "--out", "parts", "--resume", "--epochs", "3", "--policy", "float32")
    assert code == 0
    whole, parts = RunRecord.open("whole"), RunRecord.open("parts")
    assert without_seconds(whole) == without_seconds(parts)
    weights = [record.checkpoint_path / "model.safetensors" for record in (whole, parts)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    code, _, err = halfwise("train", "image", "--out", "parts", "--resume", "--seed", "6")
    assert code == 2
    assert "started with --seed 5, not 6" in err


def test_a_finished_run_is_neither_repeated_nor_overwritten(halfwise: Halfwise) -> None:
    halfwise("train", "image", *QUICK, "--policy", "float32", "--out", "run")
    metrics = Path("run/metrics.jsonl").read_bytes()
    code, _, err = halfwise("train", "image", *QUICK, "--policy", "float32", "--out", "run")
    assert code == 2
    assert "already holds a run, and nothing is overwritten: continue it with --resume" in err
    code, out, _ = halfwise("train", "image", "--out", "run", "--resume")
    assert code == 0
    assert "Test accuracy" in out
    assert Path("run/metrics.jsonl").read_bytes() == metrics


def test_another_environment_is_said(halfwise: Halfwise) -> None:
    halfwise("train", "image", *QUICK, "--policy", "float32", "--out", "run")
    record = RunRecord.open("run")
    record.write_environment({**record.environment(), "threads": 64})
    code, out, _ = halfwise("train", "image", "--out", "run", "--resume")
    assert code == 0
    assert "threads: 64 before, 1 now" in out


def test_changed_data_and_another_plan_are_refused(halfwise: Halfwise) -> None:
    halfwise("train", "image", *QUICK, "--policy", "float32", "--out", "run")
    assert halfwise("train", "image", "--out", "run", "--resume", "--policy", "mine.toml")[0] == 2
    record = RunRecord.open("run")
    record.write_environment({**record.environment(), "data": {**record.environment()["data"], "train": 5}})
    code, _, err = halfwise("train", "image", "--out", "run", "--resume")
    assert code == 2
    assert "the data 'digits' are not those that the run in 'run' began with" in err


def test_auto_without_enough_steps_still_gives_a_summary(halfwise: Halfwise) -> None:
    code, out, _ = halfwise("train", "image", "--limit", "32", "--epochs", "2", "--out", "run")
    assert code == 0
    assert "too few steps" in out
    assert Path("run/checkpoint/model.safetensors").is_file()
    assert halfwise("explain", "run")[0] == 2


def test_a_damaged_record_is_one_clear_error(halfwise: Halfwise) -> None:
    halfwise("train", "image", *QUICK, "--policy", "float32", "--out", "run")
    kept = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    for name, data in [
        ("environment.json", b"{}"),
        ("checkpoint/state.json", b"{"),
        ("checkpoint/model.safetensors", b"\0" * 64),
        ("metrics.jsonl", b"no json\n{}\n"),
    ]:
        path = Path("run") / name
        path.write_bytes(data)
        code, _, err = halfwise("train", "image", "--out", "run", "--resume")
        assert code == 2, name
        assert err.startswith("halfwise: ")
        path.write_bytes(kept[path])
    assert halfwise("train", "image", "--out", "run", "--resume")[0] == 0


def test_a_run_that_the_guard_stops_keeps_its_record(halfwise: Halfwise) -> None:
    arguments = ["--policy", "float32", "--learning-rate", "1e30", "--out", "run"]
    code, out, err = halfwise("train", "image", "--limit", "320", "--batch-size", "32", *arguments)
    assert code == 1
    assert "look at this batch and at the learning rate" in out
    assert "training stopped: NaN or inf in float32 too: not a precision problem." in err
    assert "halfwise explain run" in err
    assert "Traceback" not in err
    record = RunRecord.open("run")
    assert record.events()[-1].kind == "stopped"
    assert record.summary() is None


KILLS = """
    import os, random, signal, sys, time
    from pathlib import Path
    import numba, sklearn.datasets, torch._dynamo  # the slow ones: children start with them
    import halfwise.report.train, halfwise.workloads.runs, halfwise.workloads.torch.training
    from halfwise.__main__ import main

    SETTINGS = ["--limit", "160", "--batch-size", "32", "--epochs", "4"]
    FILE_EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")

    def start(policy, target, files_left=None):
        arguments = ["train", "image", "--out", str(target), "--checkpoint-every", "2"]
        arguments += ["--resume"] if target.exists() else ["--policy", policy, *SETTINGS]
        child = os.fork()
        if child:
            return child
        for descriptor in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)

        def count(event, details):
            nonlocal files_left
            if files_left is not None and event in FILE_EVENTS and str(target) in str(details[0]):
                files_left -= 1
                if files_left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        os._exit(main(arguments))

    def end(child):
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status) and os.WEXITSTATUS(status):
            sys.exit(f"a run failed with {os.WEXITSTATUS(status)}")
        return os.WIFSIGNALED(status)

    for policy in sys.argv[2:]:
        here, dice, kills = Path(sys.argv[1]) / policy, random.Random(policy), 0
        end(start(policy, here / "whole"))
        for attempt in range(6):
            if attempt % 3 < 2:  # in the middle of writing files
                child = start(policy, here / "killed", files_left=dice.randrange(2, 60))
            else:  # anywhere
                child = start(policy, here / "killed")
                time.sleep(dice.uniform(0.05, 0.4))
                os.kill(child, signal.SIGKILL)
            kills += end(child)
        end(start(policy, here / "killed"))
        print(policy, kills)
"""
KILLED_POLICIES = ["auto", "mixed_bfloat16", "mixed_float16"]


@pytest.fixture(scope="module")
def killed_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each policy a run that was left alone, and one that was killed again and again."""
    directory = tmp_path_factory.mktemp("kills")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLS), str(directory), *KILLED_POLICIES],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    kills = dict(line.split() for line in done.stdout.splitlines())
    assert all(int(kills[policy]) >= 2 for policy in KILLED_POLICIES), kills
    return directory


@pytest.mark.parametrize("policy", KILLED_POLICIES)
def test_killed_runs_go_on_bit_for_bit(killed_runs: Path, policy: str) -> None:
    whole, killed = (RunRecord.open(killed_runs / policy / name) for name in ("whole", "killed"))
    assert [row["step"] for row in killed.metrics()] == list(range(20))
    assert without_seconds(killed) == without_seconds(whole)
    weights = [record.checkpoint_path / "model.safetensors" for record in (whole, killed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    states = [load_file(record.checkpoint_path / "state.safetensors") for record in (whole, killed)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert [path.name for path in killed.directory.glob("checkpoint*")] == ["checkpoint"]


def test_the_comparison_would_notice_another_seed(halfwise: Halfwise) -> None:
    for seed in ("0", "1"):
        halfwise("train", "image", *QUICK, "--policy", "float32", "--seed", seed, "--out", seed)
    assert without_seconds(RunRecord.open("0")) != without_seconds(RunRecord.open("1"))
    assert Path("0/checkpoint/model.safetensors").read_bytes() != Path("1/checkpoint/model.safetensors").read_bytes()


def test_interrupted_runs_say_how_to_go_on() -> None:
    command = [sys.executable, "-m", "halfwise", "train", "image", "--out", "run"]
    settings = ["--policy", "float32", "--epochs", "100000", "--checkpoint-every", "5"]
    run = subprocess.Popen(
        [*command, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore it
    )
    deadline = time.monotonic() + 60
    while not Path("run/metrics.jsonl").exists() or Path("run/metrics.jsonl").read_bytes().count(b"\n") < 30:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130, err
    assert "interrupted; the run is kept" in err
    assert "halfwise train image --out run --resume" in err
    assert "Traceback" not in err
    assert "Test accuracy" not in out
    assert Path("run/checkpoint/state.json").is_file()


@pytest.mark.debian
def test_fashion_mnist(halfwise: Halfwise) -> None:
    data = "/usr/share/datasets/fashion-mnist"
    code, out, err = halfwise("train", "image", "--data", data, "--limit", "3000", "--epochs", "2", "--out", "run")
    assert code == 0, err
    assert f"convnet on {data}" in out
    summary = RunRecord.open("run").summary()
    assert summary is not None
    assert summary["data"] == {"name": data, "train": 3000, "test": 3000, "shape": [1, 28, 28], "classes": 10}
    assert summary["test_accuracy"] > 0.7


def test_a_run_is_not_cut_short_by_a_resume(halfwise: Halfwise) -> None:
    halfwise("train", "image", *QUICK, "--policy", "float32", "--out", "run")
    code, _, err = halfwise("train", "image", "--resume", "--epochs", "1", "--out", "run")
    assert code == 2
    assert "--epochs 1 is less than the 2" in err

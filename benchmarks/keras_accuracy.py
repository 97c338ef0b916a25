"""Accuracy of both built-in workloads in Keras on each backend, and of the text one in torch, through the command.

Claims: over 3 seeds the mean test accuracy on digits is at least 0.97 and on State of the Union passages (split by
address) at least 0.90, in every policy, and within 1 point of float32.

    python benchmarks/keras_accuracy.py [--json] [--seeds 3] [--only image|text] [--backend tensorflow|jax|torch]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

from _harness import emit, table

BACKENDS = ("tensorflow", "jax", "torch")
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "auto")
LEAST = {"image": 0.97, "text": 0.90}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=sorted(LEAST))
    parser.add_argument("--backend", choices=BACKENDS)
    arguments = parser.parse_args()
    rows, data = [], {}
    for workload, where, options in _places(arguments.only, arguments.backend):
        seeds = range(arguments.seeds)
        found = {policy: [accuracy(workload, policy, seed, *options) for seed in seeds] for policy in POLICIES}
        for policy, accuracies in found.items():
            assert mean(accuracies) >= LEAST[workload], f"{workload} {where} {policy}: {accuracies}"
            difference = mean(accuracies) - mean(found["float32"])
            assert abs(difference) <= 0.01, f"{workload} {where} {policy}: {accuracies} against {found['float32']}"
            low, high = min(accuracies), max(accuracies)
            rows.append((workload, where, policy, f"{mean(accuracies):.4f}", f"{low:.4f}", f"{high:.4f}"))
        data[f"{workload} {where}"] = found
    emit(table(("workload", "where", "policy", "mean", "lowest", "highest"), rows), data, as_json=arguments.json)


def _places(only: str | None, backend: str | None) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for workload in LEAST:
        if only not in (None, workload):
            continue
        if workload == "text" and backend is None:
            yield workload, "torch", ("--framework", "torch")
        for name in BACKENDS:
            if backend in (None, name):
                yield workload, f"Keras on {name}", ("--framework", "keras", "--backend", name)


def accuracy(workload: str, policy: str, seed: int, *options: str) -> float:
    """Test accuracy of one run of `halfwise train`."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        command = [sys.executable, "-m", "halfwise", "train", workload, "--policy", policy, "--seed", str(seed)]
        quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
        done = subprocess.run(
            [*command, "--out", str(out), "--json", *options], check=False, capture_output=True, text=True, env=quiet
        )
        assert done.returncode == 0, done.stderr
        summary = json.loads((out / "summary.json").read_text())
    print(f"{workload} {' '.join(options)} {policy} seed {seed}: {summary['test_accuracy']:.4f}", file=sys.stderr)
    return float(summary["test_accuracy"])


if __name__ == "__main__":
    main()

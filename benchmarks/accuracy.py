"""Accuracy in each policy, through the command that users type.

Claims: on digits the mean test accuracy over 3 seeds is at least 0.97, and with both half policies within 1 point of
float32. On Fashion-MNIST (2 epochs, 5 seeds, paired by seed) float32 and mixed_float16 differ by at most half a point
on average.

    python benchmarks/accuracy.py [--json] [--fashion DIR] [--fashion-only]

DIR holds the four IDX files of Fashion-MNIST (Debian: the package dataset-fashion-mnist installs them in
/usr/share/datasets/fashion-mnist).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

from _harness import emit, table

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "auto")


def accuracy(policy: str, seed: int, *options: str) -> float:
    """Test accuracy of one run of `halfwise train image`."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        command = [sys.executable, "-m", "halfwise", "train", "image", "--policy", policy, "--seed", str(seed)]
        subprocess.run([*command, "--out", str(out), "--json", *options], check=True, capture_output=True)
        summary = json.loads((out / "summary.json").read_text())
    print(f"{' '.join(options)} {policy} seed {seed}: {summary['test_accuracy']:.4f}", file=sys.stderr)
    return float(summary["test_accuracy"])


def mean_and_range(found: list[float]) -> tuple[str, str, str]:
    """Mean, lowest and highest, as the table shows them."""
    return f"{mean(found):.4f}", f"{min(found):.4f}", f"{max(found):.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fashion", metavar="DIR", help="directory with Fashion-MNIST; left out where not given")
    parser.add_argument("--fashion-only", action="store_true")
    arguments = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    data: dict[str, object] = {}
    if not arguments.fashion_only:
        digits = {policy: [accuracy(policy, seed) for seed in range(3)] for policy in POLICIES}
        for policy, found in digits.items():
            assert mean(found) >= 0.97 or policy != "float32", f"{policy}: {found}"
            assert abs(mean(found) - mean(digits["float32"])) <= 0.01, f"{policy}: {found} against {digits['float32']}"
            rows.append(("digits, 20 epochs, 3 seeds", policy, *mean_and_range(found)))
        data["digits"] = digits
    if arguments.fashion:
        options = ("--data", arguments.fashion, "--epochs", "2")
        pairs = [[accuracy(policy, seed, *options) for policy in ("float32", "mixed_float16")] for seed in range(5)]
        difference = mean(half - full for full, half in pairs)
        assert abs(difference) <= 0.005, pairs
        for index, policy in enumerate(("float32", "mixed_float16")):
            found = [pair[index] for pair in pairs]
            rows.append(("Fashion-MNIST, 2 epochs, 5 seeds", policy, *mean_and_range(found)))
        rows.append(("Fashion-MNIST, mean difference of pairs", "", f"{difference:+.4f}", "", ""))
        data["fashion"] = {"pairs": pairs, "mean_difference": difference}
    emit(table(("data", "policy", "mean", "lowest", "highest"), rows), data, as_json=arguments.json)


if __name__ == "__main__":
    main()

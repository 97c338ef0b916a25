"""Claim: an exponent histogram of float32 values costs about what it costs to read them.

One thread: at most twice `tensor.sum()`. Two threads: no slower than `copy_` of the tensor with two threads. On 16.8
million values (64 MiB, more than the caches hold): normal, half zeros (as after ReLU), constant, and some that are hard on
histograms. Every count is compared with a plain numpy count before anything is timed.

    python benchmarks/histogram.py [--size N] [--rounds N] [--json]

Exit code 1 where a count is wrong. Missed targets are printed, not asserted: they depend on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from _harness import emit, interleave, medians, ratios, table

from halfwise.core.exponent_counts import counts_from_indices
from halfwise.core.histogram import ExponentHistogram
from halfwise.torch.histogram import exponent_histogram

TARGETS = {1: ("sum", 2.0), 2: ("copy_", 1.0)}  # threads: what to compare with, largest ratio
CLAIMED = ("normal", "half zeros", "constant")


def main() -> int:
    """Check, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=1 << 24, help="values in each tensor (default: 16777216)")
    parser.add_argument("--rounds", type=int, default=25, help="measured rounds (default: 25)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()

    tensors = make_tensors(options.size)
    for name, tensor in tensors.items():
        expected = count_plainly(tensor)
        for threads in TARGETS:
            if exponent_histogram(tensor, threads=threads) != expected:
                print(f"wrong counts: {name}, {threads} threads")
                return 1

    results = []
    for threads, (reference, limit) in TARGETS.items():
        torch.set_num_threads(threads)
        for name, tensor in tensors.items():
            target = torch.empty_like(tensor)
            candidates: dict[str, Callable[[], object]] = {
                "sum": tensor.sum,
                "copy_": partial(target.copy_, tensor),
                "histogram": partial(exponent_histogram, tensor, threads=threads),
            }
            seconds = interleave(candidates, options.rounds)
            ratio = ratios(seconds, reference)["histogram"]
            results.append(
                {
                    "threads": threads,
                    "data": name,
                    "seconds": medians(seconds),
                    "reference": reference,
                    "ratio": ratio,
                    "target": limit if name in CLAIMED else None,
                    "met": ratio <= limit if name in CLAIMED else None,
                }
            )
    emit(render(results), {"size": options.size, "results": results}, as_json=options.json)
    return 0


def make_tensors(size: int) -> dict[str, torch.Tensor]:
    """Float32 tensors of `size` values by what they are like."""
    torch.manual_seed(0)
    normal = torch.randn(size)
    tensors = {
        "normal": normal,
        "half zeros": normal.relu(),
        "constant": torch.full((size,), 0.75),
        "zeros": torch.zeros(size),
        "9 of 10 zeros": normal * (torch.rand(size) < 0.1),
        "log-normal, 8 binades": torch.exp2(8 * normal),
        "log-uniform, 80 binades": torch.exp2(80 * torch.rand(size) - 40),
        "1 of 1000 outside": torch.where(torch.rand(size) < 1e-3, 1e-30, normal),
    }
    with_nonfinite = normal.clone()
    with_nonfinite[::1000] = torch.inf
    with_nonfinite[1::1000] = torch.nan
    return {**tensors, "1 of 500 not finite": with_nonfinite}


def count_plainly(tensor: torch.Tensor) -> ExponentHistogram:
    """The histogram by `numpy.bincount`, in blocks."""
    bits = tensor.numpy().view(np.uint32)
    magnitudes = np.uint32(0x7FFFFFFF)
    counts = np.zeros(2048, np.int64)
    infinities = 0
    for start in range(0, bits.size, 1 << 16):
        block = bits[start : start + (1 << 16)] & magnitudes
        counts += np.bincount((block - np.uint32(1)) >> np.uint32(21), minlength=2048)
        infinities += int((block == np.uint32(0x7F800000)).sum())
    return ExponentHistogram.from_counts(counts_from_indices(counts, infinities))


def render(results: list[dict[str, object]]) -> str:
    """The results as a table."""
    rows = []
    for result in results:
        seconds = result["seconds"]
        assert isinstance(seconds, dict)
        verdict = "" if result["met"] is None else f"{'met' if result['met'] else 'MISSED'} (<= {result['target']:g})"
        times = [f"{1e3 * seconds[name]:.2f}" for name in ("sum", "copy_", "histogram")]
        rows.append(
            [result["data"], result["threads"], *times, f"{result['ratio']:.2f} x {result['reference']}", verdict]
        )
    return table(["data", "threads", "sum ms", "copy_ ms", "histogram ms", "ratio", "target"], rows)


if __name__ == "__main__":
    raise SystemExit(main())

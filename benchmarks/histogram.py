"""Claim: an exponent histogram of float32 values costs about what it costs to read them.

At most twice `tensor.sum()` with one thread; no slower than `copy_` with two (the histogram keeps to one). On 16.8
million values (64 MiB, more than the caches hold): normal, half zeros (as after ReLU), constant; others, which are hard
on histograms, are shown beside. Every count is compared with a plain numpy count before anything is timed.

    python benchmarks/histogram.py [--size N] [--rounds N] [--json]

Exit code 1 where a count is wrong. Missed targets are printed, not asserted: they depend on the machine and on what
else it does; the ratio of the shortest times is less disturbed than that of the medians.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from _harness import emit, interleave, medians, minima, ratios, table
from halfwise.core.exponent_counts import counts_from_indices
from halfwise.core.histogram import ExponentHistogram
from halfwise.torch.histogram import exponent_histogram

TARGETS = {1: ("sum", 2.0), 2: ("copy_", 1.0)}  # threads: what to compare with, largest ratio
CLAIMED = ("normal", "half zeros", "constant")


@dataclass(frozen=True)
class Result:
    """One row: `seconds` are medians, `shortest` minima, by candidate; ratios are the histogram's to `reference`."""

    data: str
    threads: int
    seconds: dict[str, float]
    shortest: dict[str, float]
    reference: str
    ratio: float
    ratio_of_shortest: float
    limit: float | None


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
                "histogram": partial(exponent_histogram, tensor),  # one thread, its default, beside torch's
            }
            seconds = interleave(candidates, options.rounds)
            shortest = minima(seconds)
            results.append(
                Result(
                    data=name,
                    threads=threads,
                    seconds=medians(seconds),
                    shortest=shortest,
                    reference=reference,
                    ratio=ratios(seconds, reference)["histogram"],
                    ratio_of_shortest=shortest["histogram"] / shortest[reference],
                    limit=limit if name in CLAIMED else None,
                )
            )
    emit(render(results), {"size": options.size, "results": [vars(r) for r in results]}, as_json=options.json)
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


def render(results: list[Result]) -> str:
    """The results as a table."""
    rows = []
    for r in results:
        verdict = "" if r.limit is None else f"{'met' if r.ratio <= r.limit else 'MISSED'} (at most {r.limit:g})"
        times = [f"{1e3 * r.seconds[name]:.2f}" for name in ("sum", "copy_", "histogram")]
        ratios_ = [f"{r.ratio:.2f} x {r.reference}", f"{r.ratio_of_shortest:.2f}"]
        rows.append([r.data, r.threads, *times, *ratios_, verdict])
    headers = ["data", "threads", "sum ms", "copy_ ms", "histogram ms", "ratio", "of shortest", "target"]
    return table(headers, rows)


if __name__ == "__main__":
    raise SystemExit(main())

"""Makes `data/sotu.jsonl.gz` from the whole addresses: the same bytes every time.

    python src/halfwise/workloads/_make_sotu.py sotu.jsonl.gz src/halfwise/workloads/data/sotu.jsonl.gz

The source holds one JSON object a line, with the fields `year` and `text`. Every address is cut into passages of 60
words. Every fifth year's addresses are for testing, so that no address is in both parts; from each class and part so
many passages are drawn that the classes are equally frequent. What a passage says is kept as it is.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["make"]

_WORDS = 60
_BOUNDARY = 1920
_CLASSES = (f"before {_BOUNDARY}", f"since {_BOUNDARY}")
_PASSAGES = {"train": 2400, "test": 600}  # of each class


def make(source: Path, target: Path, passages: dict[str, int] | None = None) -> None:
    """Writes `target`.

    Args:
        source: gzip file of the addresses, one JSON object a line.
        target: gzip file of the passages, one JSON object with `text`, `label`, `split` and `year` a line.
        passages: part -> passages of each class; default 2,400 for training and 600 for testing.
    """
    with gzip.open(source, "rt", encoding="utf-8") as file:
        addresses = sorted((json.loads(line) for line in file), key=lambda address: address["year"])
    # numpy froze RandomState's streams: the same passages with every version, unlike those of newer generators.
    random = np.random.RandomState(0)
    chosen: list[dict[str, Any]] = []
    for part, count in (passages or _PASSAGES).items():
        of_part: list[dict[str, Any]] = []
        for label in _CLASSES:
            pool = _passages(addresses, label, part)
            of_part += [pool[index] for index in random.permutation(len(pool))[:count]]
        chosen += [of_part[index] for index in random.permutation(len(of_part))]
    lines = "".join(json.dumps(passage, separators=(",", ":")) + "\n" for passage in chosen)
    target.write_bytes(gzip.compress(lines.encode(), 9, mtime=0))


def _passages(addresses: list[dict[str, Any]], label: str, part: str) -> list[dict[str, Any]]:
    of_class = [a for a in addresses if _CLASSES[a["year"] >= _BOUNDARY] == label]
    years = sorted({a["year"] for a in of_class})
    found = []
    for address in of_class:
        if ("test" if years.index(address["year"]) % 5 == 2 else "train") == part:
            words = address["text"].split()
            found += [
                {"text": " ".join(words[at : at + _WORDS]), "label": label, "split": part, "year": address["year"]}
                for at in range(0, len(words) - _WORDS + 1, _WORDS)
            ]
    return found


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))

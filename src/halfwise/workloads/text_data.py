"""Text classification data by name or from JSON lines: words as numbers, with a vocabulary of the training texts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halfwise.errors import DataError, UsageError
from halfwise.workloads.datasets import Arrays
from halfwise.workloads.jsonl import LabelledText, read_texts

__all__ = ["LENGTH", "PADDING", "UNKNOWN", "VOCABULARY", "TextData", "load_texts", "words_of"]

PADDING = 0
UNKNOWN = 1
LENGTH = 60
"""Words that are kept of each text."""
VOCABULARY = 10_000
"""The largest number of different words that are told apart."""

_SOTU = Path(__file__).parent / "data" / "sotu.jsonl.gz"
_TEST_SHARE = 0.2
_WORD = re.compile(r"[^\W_]+(?:['\u2019][^\W_]+)*")


@dataclass(frozen=True, eq=False)
class TextData:
    """Texts with labels, split for training and testing.

    Attributes:
        name: a built-in name, or the path.
        train_words, test_words: int32, shape (texts, 60): a word of `vocabulary` is its position there plus 2,
            any other word is 1, and 0 fills up the end.
        train_labels, test_labels: int64 in [0, classes), shape (texts,).
        vocabulary: the words that are told apart, the most frequent first.
        labels: what the numbers in the labels stand for.
    """

    name: str
    train_words: NDArray[np.int32]
    train_labels: NDArray[np.int64]
    test_words: NDArray[np.int32]
    test_labels: NDArray[np.int64]
    vocabulary: tuple[str, ...]
    labels: tuple[str, ...]

    @property
    def train(self) -> Arrays:
        """Words and labels for training."""
        return self.train_words, self.train_labels

    @property
    def test(self) -> Arrays:
        """Words and labels for testing."""
        return self.test_words, self.test_labels

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.labels)

    @property
    def word_numbers(self) -> int:
        """How many numbers a word can have: the vocabulary, the unknown word, the padding."""
        return len(self.vocabulary) + 2

    def first(self, limit: int) -> TextData:
        """The data with at most `limit` texts for training and `limit` for testing; the vocabulary stays."""
        return replace(
            self,
            train_words=self.train_words[:limit],
            train_labels=self.train_labels[:limit],
            test_words=self.test_words[:limit],
            test_labels=self.test_labels[:limit],
        )

    def describe(self) -> dict[str, Any]:
        """What a run record keeps of the data: name, counts, words per text, sizes."""
        counts = {"train": len(self.train_labels), "test": len(self.test_labels)}
        return {
            "name": self.name,
            **counts,
            "words": LENGTH,
            "vocabulary": len(self.vocabulary),
            "classes": self.classes,
        }


def load_texts(source: str | Path) -> TextData:
    """`"sotu"`, a file of JSON lines, or a directory with `train.jsonl` and `test.jsonl`; each may end in `.gz`.

    A line is an object with `"text"` and `"label"`, a string or an integer. In a file `"split"` may say `"train"` or
    `"test"`; where no line does, a fifth of each class is for testing. `"sotu"` are 6,000 passages from the State of
    the Union addresses, before 1920 or since.

    Raises:
        DataError: a file is missing or malformed, has a single class, or nothing for training or testing.
        UsageError: `source` is neither a built-in name nor a path.
    """
    if str(source) == "sotu":
        return _data("sotu", *_split(read_texts(_SOTU), _SOTU))
    path = Path(source).expanduser()
    if path.is_dir():
        return _data(str(source), read_texts(_find(path, "train")), read_texts(_find(path, "test")))
    if path.is_file():
        return _data(str(source), *_split(read_texts(path), path))
    raise UsageError(
        f"no data called {str(source)!r}: give 'sotu' (6,000 passages from the State of the Union addresses, which "
        'come with halfwise), or an existing file of JSON lines, {"text": ..., "label": ...}, or a directory with '
        "train.jsonl and test.jsonl."
    )


def words_of(text: str) -> list[str]:
    """The words of a text, in lower case and without punctuation.

    >>> words_of("It's well-known.")
    ["it's", 'well', 'known']
    """
    return _WORD.findall(text.lower())


def _find(directory: Path, part: str) -> Path:
    for name in (f"{part}.jsonl", f"{part}.jsonl.gz"):
        if (directory / name).is_file():
            return directory / name
    there = sorted(entry.name for entry in directory.iterdir())[:6]
    raise DataError(
        f"{str(directory)!r} has no {part}.jsonl[.gz]; it should hold train.jsonl and test.jsonl. "
        f"It holds: {', '.join(there) or 'nothing'}."
    )


def _split(texts: Sequence[LabelledText], path: Path) -> tuple[list[LabelledText], list[LabelledText]]:
    """The texts for training and for testing, as the lines say; else a fifth of each class is for testing."""
    told = sum(text.split is not None for text in texts)
    if not told:
        texts = _split_by_class(texts)
    elif told < len(texts):
        raise DataError(
            f'{str(path)!r} says "split" in {told} of its {len(texts)} lines; say "train" or "test" in all, or in none.'
        )
    return [text for text in texts if text.split == "train"], [text for text in texts if text.split == "test"]


def _split_by_class(texts: Sequence[LabelledText]) -> list[LabelledText]:
    """All texts in mixed order, the same one every time; the first fifth of each class is for testing."""
    mixed = [texts[index] for index in np.random.RandomState(0).permutation(len(texts))]
    left = {label: round(count * _TEST_SHARE) for label, count in Counter(text.label for text in texts).items()}
    told = []
    for text in mixed:
        told.append(replace(text, split="test" if left[text.label] > 0 else "train"))
        left[text.label] -= 1
    return told


def _data(name: str, train: Sequence[LabelledText], test: Sequence[LabelledText]) -> TextData:
    if not train or not test:
        raise DataError(
            f"{name!r} has {len(train)} texts for training and {len(test)} for testing; there must be some of both."
        )
    labels = sorted({text.label for text in train}, key=lambda label: (isinstance(label, str), label))
    if len(labels) < 2:
        raise DataError(f"all texts for training in {name!r} have the label {labels[0]!r}; give at least two classes.")
    if unknown := {text.label for text in test} - set(labels):
        raise DataError(
            f"{name!r} has the label {min(unknown, key=str)!r} for testing and not for training; "
            f"for training there are: {', '.join(map(repr, labels[:6]))}."
        )
    number = {label: index for index, label in enumerate(labels)}
    frequency = Counter(word for text in train for word in words_of(text.text))
    vocabulary = tuple(sorted(frequency, key=lambda word: (-frequency[word], word))[:VOCABULARY])
    words = {word: index + 2 for index, word in enumerate(vocabulary)}
    return TextData(
        name=name,
        train_words=_encoded(train, words),
        train_labels=np.array([number[text.label] for text in train], dtype=np.int64),
        test_words=_encoded(test, words),
        test_labels=np.array([number[text.label] for text in test], dtype=np.int64),
        vocabulary=vocabulary,
        labels=tuple(map(str, labels)),
    )


def _encoded(texts: Iterable[LabelledText], words: Mapping[str, int]) -> NDArray[np.int32]:
    rows = []
    for text in texts:
        # A text without a word counts as one unknown word: a mean over nothing would be NaN.
        row = [words.get(word, UNKNOWN) for word in words_of(text.text)[:LENGTH]] or [UNKNOWN]
        rows.append(row + [PADDING] * (LENGTH - len(row)))
    return np.array(rows, dtype=np.int32)

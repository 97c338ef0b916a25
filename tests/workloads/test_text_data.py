from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import halfwise.workloads
from halfwise.errors import DataError, UsageError
from halfwise.workloads import text_data
from halfwise.workloads._make_sotu import make
from halfwise.workloads.text_data import LENGTH, PADDING, UNKNOWN, load_texts, words_of

SOTU = Path(halfwise.workloads.__file__).parent / "data" / "sotu.jsonl.gz"


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(text: str, label: object, **more: Any) -> dict[str, Any]:
    return {"text": text, "label": label, **more}


def test_sotu_is_what_its_readme_says() -> None:
    assert SOTU.stat().st_size < 1_000_000
    with gzip.open(SOTU, "rt", encoding="utf-8") as file:
        passages = [json.loads(text) for text in file]
    assert Counter((p["split"], p["label"]) for p in passages) == {
        ("train", "before 1920"): 2400,
        ("train", "since 1920"): 2400,
        ("test", "before 1920"): 600,
        ("test", "since 1920"): 600,
    }
    assert all(len(p["text"].split()) == 60 for p in passages)
    assert all((p["label"] == "since 1920") == (p["year"] >= 1920) for p in passages)
    years = {part: {p["year"] for p in passages if p["split"] == part} for part in ("train", "test")}
    assert not years["train"] & years["test"]  # split by address, not by passage
    assert min(years["train"]) == 1790
    assert max(years["train"]) == 2021
    assert len({p["text"] for p in passages}) == len(passages)


def test_sotu_as_numbers() -> None:
    data = load_texts("sotu")
    assert data.describe() == {
        "name": "sotu",
        "train": 4800,
        "test": 1200,
        "words": 60,
        "vocabulary": 10_000,
        "classes": 2,
    }
    assert data.labels == ("before 1920", "since 1920")
    for (words, labels), count in ((data.train, 4800), (data.test, 1200)):
        assert words.shape == (count, LENGTH)
        assert words.dtype == np.int32
        assert labels.dtype == np.int64
        assert words.min() >= 0
        assert words.max() < data.word_numbers == 10_002
        assert np.mean(labels) == 0.5
        assert (words == UNKNOWN).any()
    for limit in (100, 1000):  # balanced enough in every beginning, so that --limit is of use
        assert abs(np.mean(data.first(limit).train_labels) - 0.5) < 0.1
    # Pinned: with other passages results of different versions could not be compared.
    assert data.vocabulary[:6] == ("the", "of", "and", "to", "in", "a")
    assert data.train_words[0, :8].tolist() == [2, 75, 291, 11, 1589, 32, 2, 345]


def test_sotu_is_made_from_the_addresses_the_same_way_every_time(tmp_path: Path) -> None:
    addresses = [
        {"year": year, "text": " ".join(f"{year}w{number}" for number in range(60 * 4 + 59))}
        for year in [*range(1900, 1940), 1925]
    ]
    source = tmp_path / "addresses.jsonl.gz"
    source.write_bytes(gzip.compress("".join(json.dumps(a) + "\n" for a in addresses).encode()))
    for name in ("one.jsonl.gz", "two.jsonl.gz"):
        make(source, tmp_path / name, {"train": 40, "test": 10})
    assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes()
    with gzip.open(tmp_path / "one.jsonl.gz", "rt") as file:
        passages = [json.loads(text) for text in file]
    assert Counter((p["split"], p["label"]) for p in passages) == {
        (part, label): count for part, count in (("train", 40), ("test", 10)) for label in ("before 1920", "since 1920")
    }
    assert {p["year"] for p in passages if p["split"] == "test"} <= {1902, 1907, 1912, 1917, 1922, 1927, 1932, 1937}
    assert all({word[:4] for word in p["text"].split()} == {str(p["year"])} for p in passages)
    assert all(int(p["text"].split()[0][5:]) % 60 == 0 for p in passages)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's the GOVERNMENT; of the people.", ["it's", "the", "government", "of", "the", "people"]),
        ("fifty-two 1,000 snake_case", ["fifty", "two", "1", "000", "snake", "case"]),
        ("Été à Zürich", ["été", "à", "zürich"]),
        ("'quoted' -- ... ", ["quoted"]),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_a_directory(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", line("b a a", "yes"), line("a c", "no"))
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(json.dumps(line("c new a", "no")).encode()))
    data = load_texts(tmp_path)
    assert (data.name, data.vocabulary, data.labels) == (str(tmp_path), ("a", "b", "c"), ("no", "yes"))
    assert data.train_words[:, :4].tolist() == [[3, 2, 2, 0], [2, 4, 0, 0]]
    assert data.test_words[0, :4].tolist() == [4, UNKNOWN, 2, PADDING]  # the test's words are not looked at
    assert (data.train_labels.tolist(), data.test_labels.tolist()) == ([1, 0], [0])


def test_long_and_empty_texts(tmp_path: Path) -> None:
    texts = [line("w " * 100, 0), line("?!", 1)]
    data = load_texts(write(tmp_path / "texts.jsonl", *(line(**t, split=s) for t in texts for s in ("train", "test"))))
    assert data.train_words[0].tolist() == [2] * LENGTH
    assert data.train_words[1].tolist() == [UNKNOWN] + [PADDING] * (LENGTH - 1)  # a mean over nothing would be NaN


def test_the_most_frequent_words_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_data, "VOCABULARY", 2)
    write(tmp_path / "train.jsonl", line("rare z z a a", 10), line("once", 9))
    write(tmp_path / "test.jsonl", line("a", 9))
    data = load_texts(tmp_path)
    assert data.vocabulary == ("a", "z")
    assert data.train_words[0, :5].tolist() == [UNKNOWN, 3, 3, 2, 2]
    assert data.labels == ("9", "10")  # by number


def test_a_file_without_a_split_gives_a_fifth_of_each_class_to_testing(tmp_path: Path) -> None:
    lines = [line(f"t{number}", number % 10 == 0) | {"label": int(number % 10 == 0)} for number in range(100)]
    path = write(tmp_path / "texts.jsonl", *lines)
    data = load_texts(path)
    assert (len(data.train_labels), len(data.test_labels)) == (80, 20)
    assert (data.train_labels.sum(), data.test_labels.sum()) == (8, 2)
    assert len(set(data.train_words[:, 0].tolist())) == 80  # each text once
    again = load_texts(path)
    assert np.array_equal(data.train_words, again.train_words)
    assert data.train_labels[:20].sum() < 20  # mixed
    assert data.train_words[:, 0].tolist() != sorted(data.train_words[:, 0].tolist())


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ([], [line("a", 1)], "has 0 texts for training and 1 for testing"),
        ([line("a", 1), line("b", 2)], [], "has 2 texts for training and 0 for testing"),
        ([line("a", 1), line("b", 1)], [line("b", 1)], "all texts for training in .* have the label 1"),
        ([line("a", 1), line("b", 2)], [line("b", "2")], "has the label '2' for testing and not for training"),
    ],
)
def test_parts_must_fit_each_other(
    tmp_path: Path, train: list[dict[str, Any]], test: list[dict[str, Any]], message: str
) -> None:
    write(tmp_path / "train.jsonl", *train)
    write(tmp_path / "test.jsonl", *test)
    with pytest.raises(DataError, match=message):
        load_texts(tmp_path)


def test_what_is_no_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no data called 'imdb': give 'sotu'"):
        load_texts("imdb")
    write(tmp_path / "train.jsonl", line("a", 1))
    with pytest.raises(DataError, match=re.escape("has no test.jsonl[.gz]") + ".*It holds: train.jsonl"):
        load_texts(tmp_path)
    with pytest.raises(DataError, match=r"has 1 texts for training and 0 for testing"):
        load_texts(tmp_path / "train.jsonl")
    mixed = write(tmp_path / "mixed.jsonl", line("a", 1, split="train"), line("b", 2))
    with pytest.raises(DataError, match='says "split" in 1 of its 2 lines'):
        load_texts(mixed)

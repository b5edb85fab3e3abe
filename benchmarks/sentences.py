"""Sentence splitting: boundary F1 on the hand-written cases of the tests, and MB/s on given texts.

    python -m benchmarks.sentences wikipedia-en.txt wikipedia-ko.txt ratings_test.txt

Of NSMC's reviews (`ratings…`), it also counts how often the sentence is split where a digit follows `다.` at once.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from benchmarks.record import record
from bertsmith.text.sentences import split_sentences
from tests.text.test_sentences import read_cases, score

MEGABYTES = 10


def speed(path: Path) -> float:
    """MB of UTF-8 in a second of processor time, on the first ten megabytes."""
    data = path.read_bytes()[: MEGABYTES * 1_000_000]
    lines = data.decode("utf-8", "ignore").split("\n")
    began = time.process_time()
    for line in lines:
        split_sentences(line)
    return len(data) / 1e6 / (time.process_time() - began)


def glued(path: Path) -> dict[str, int]:
    """How often `다.` has a digit after it, and how often a sentence ends there."""
    lines = path.read_text(encoding="utf-8").splitlines()
    reviews = [line.split("\t")[1] for line in lines if line.count("\t") == 2]
    found = [review for review in reviews if re.search(r"다\.\d", review)]
    split = sum(bool(re.search(r"다\.$", "\n".join(split_sentences(review)[:-1]), re.M)) for review in found)
    return {"reviews": len(reviews), "with_digit_after_da": len(found), "split": split}


def main() -> None:
    """Measure, print, write."""
    results = {}
    for language in ("english", "korean"):
        precision, recall, f1 = score(language)
        results[language] = {"cases": len(read_cases(language)), "precision": precision, "recall": recall, "f1": f1}
    speeds = {path.stem: speed(path) for path in map(Path, sys.argv[1:])}
    digits = {path.stem: glued(path) for path in map(Path, sys.argv[1:]) if path.stem.startswith("ratings")}
    print(results, speeds, digits)
    record("sentences", {"boundaries": results, "mb_per_second": speeds, "digits": digits})


if __name__ == "__main__":
    main()

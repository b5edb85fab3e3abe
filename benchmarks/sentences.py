"""Sentence splitting: boundary F1 on the hand-written cases of the tests, and MB/s on given texts.

python -m benchmarks.sentences wikipedia-en.txt wikipedia-ko.txt
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.record import record
from bertsmith.text.sentences import split_sentences
from tests.text.test_sentences import read_cases, score

MEGABYTES = 10


def speed(path: Path) -> float:
    """MB of UTF-8 a second on one core, on the first ten megabytes."""
    lines = path.read_bytes()[: MEGABYTES * 1_000_000].decode("utf-8", "ignore").split("\n")
    began = time.perf_counter()
    for line in lines:
        split_sentences(line)
    return MEGABYTES / (time.perf_counter() - began)


def main() -> None:
    """Measure, print, write."""
    results = {}
    for language in ("english", "korean"):
        precision, recall, f1 = score(language)
        results[language] = {"cases": len(read_cases(language)), "precision": precision, "recall": recall, "f1": f1}
    speeds = {path.stem: speed(path) for path in map(Path, sys.argv[1:])}
    print(results, speeds)
    record("sentences", {"boundaries": results, "mb_per_second": speeds})


if __name__ == "__main__":
    main()

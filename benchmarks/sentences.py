"""Sentence splitting: boundary F1 on the hand-written cases of the tests, and MB/s on given texts.

    python -m benchmarks.sentences wikipedia-en.txt wikipedia-ko.txt ratings_test.txt [--beside COMMIT …]

The versions of other commits take turns with this one. Of every few lines the best of several times counts, because
other programs disturb single ones. Of NSMC's reviews (`ratings…`), it also counts how often the sentence is split
where a digit follows `다.` at once.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from benchmarks.record import RESULTS, record
from bertsmith.text.sentences import split_sentences
from tests.text.test_sentences import read_cases, score

BYTES, LINES, REPEATS = 1_000_000, 50, 15
MODULES = ("unmarked", "sentences")  # of `bertsmith.text`, in the order in which they import each other

Split = Callable[[str], list[str]]


def version(commit: str) -> Split:
    """The function of another commit; its modules are not those that `import` finds."""
    names = {name: f"bertsmith.text.{name}" for name in MODULES}
    kept = {name: sys.modules.pop(name) for name in names.values()}
    try:
        for name, whole in names.items():
            git = ["git", "-C", str(RESULTS), "show", f"{commit}:bertsmith/text/{name}.py"]
            found = subprocess.run(git, capture_output=True, text=True)
            if found.returncode == 0:
                module = sys.modules[whole] = ModuleType(whole)
                exec(compile(found.stdout, whole, "exec"), module.__dict__)
        return module.split_sentences  # type: ignore[no-any-return]
    finally:
        sys.modules.update(kept)


def speeds(path: Path, versions: dict[str, Split]) -> dict[str, float]:
    """MB of UTF-8 in a second of each version, on the beginning of a file."""
    data = path.read_bytes()[:BYTES]
    lines = data.decode("utf-8", "ignore").split("\n")
    seconds = dict.fromkeys(versions, 0.0)
    for begin in range(0, len(lines), LINES):
        part = lines[begin : begin + LINES]
        turns = [{name: timed(split, part) for name, split in versions.items()} for _ in range(REPEATS)]
        for name in versions:
            seconds[name] += min(turn[name] for turn in turns)
    return {name: round(len(data) / 1e6 / taken, 2) for name, taken in seconds.items()}


def timed(split: Split, lines: list[str]) -> float:
    """The seconds that the lines take."""
    began = time.perf_counter()
    for line in lines:
        split(line)
    return time.perf_counter() - began


def glued(path: Path) -> dict[str, int]:
    """How often `다.` has a digit after it, and how often a sentence ends there."""
    lines = path.read_text(encoding="utf-8").splitlines()
    reviews = [line.split("\t")[1] for line in lines if line.count("\t") == 2]
    found = [review for review in reviews if re.search(r"다\.\d", review)]
    split = sum(bool(re.search(r"다\.$", "\n".join(split_sentences(review)[:-1]), re.M)) for review in found)
    return {"reviews": len(reviews), "with_digit_after_da": len(found), "split": split}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="*", type=Path)
    parser.add_argument("--beside", action="append", default=[], metavar="COMMIT")
    given = parser.parse_args()
    versions = {"this": split_sentences, **{commit: version(commit) for commit in given.beside}}
    results = {}
    for language in ("english", "korean"):
        precision, recall, f1 = score(language)
        results[language] = {"cases": len(read_cases(language)), "precision": precision, "recall": recall, "f1": f1}
    found = {path.stem: speeds(path, versions) for path in given.texts}
    digits = {path.stem: glued(path) for path in given.texts if path.stem.startswith("ratings")}
    print(results, found, digits)
    record("sentences", {"boundaries": results, "mb_per_second": found, "digits": digits})


if __name__ == "__main__":
    main()

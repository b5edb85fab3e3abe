"""The BERT paper's scores, from 0 to 100, for its tables and for reports; and the sizes of its data sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Pair = tuple[float | None, float | None]  # BERT-Base, BERT-Large
NONE: Pair = (None, None)
BASE, LARGE = 0, 1  # the places in a pair


@dataclass(frozen=True)
class PaperScore:
    """One score of the paper: on the dev set, and on the test set, where most scores are those of the server."""

    key: str  # the name of the metric in our scores
    name: str
    dev: Pair = NONE
    test: Pair = NONE
    tables: str = ""


# Dev: tables 2 to 8 (single models, without TriviaQA; of the ablations the full models). Test: table 1, for CoNLL 7.
PAPER: dict[str, tuple[PaperScore, ...]] = {
    "mnli": (
        PaperScore("accuracy", "accuracy, matched", (84.4, 86.6), (84.6, 86.7), "6, 1"),
        PaperScore("mismatched_accuracy", "accuracy, mismatched", NONE, (83.4, 85.9), "1"),
    ),
    "qqp": (PaperScore("f1", "F1", NONE, (71.2, 72.1), "1"), PaperScore("accuracy", "accuracy")),
    "qnli": (PaperScore("accuracy", "accuracy", (88.4, None), (90.5, 92.7), "5, 1"),),
    "sst2": (PaperScore("accuracy", "accuracy", (92.9, 93.7), (93.5, 94.9), "6, 1"),),
    "cola": (PaperScore("matthews", "Matthews", NONE, (52.1, 60.5), "1"),),
    "stsb": (PaperScore("spearman", "Spearman", NONE, (85.8, 86.5), "1"), PaperScore("pearson", "Pearson")),
    "mrpc": (
        PaperScore("f1", "F1", NONE, (88.9, 89.3), "1"),
        PaperScore("accuracy", "accuracy", (86.7, 87.8), NONE, "6"),
    ),
    "rte": (PaperScore("accuracy", "accuracy", NONE, (66.4, 70.1), "1"),),
    "squad1": (
        PaperScore("exact_match", "exact match", (80.8, 84.1), NONE, "2"),
        PaperScore("f1", "F1", (88.5, 90.9), NONE, "2"),
    ),
    "squad2": (
        PaperScore("exact_match", "exact match", (None, 78.7), (None, 80.0), "3"),
        PaperScore("f1", "F1", (None, 81.9), (None, 83.1), "3"),
    ),
    "swag": (PaperScore("accuracy", "accuracy", (81.6, 86.6), (None, 86.3), "4"),),
    "conll2003": (PaperScore("f1", "entity F1", (96.4, 96.6), (92.4, 92.8), "7"),),
}
AVERAGES: Pair = (79.6, 82.1)  # of table 1, over `glue_average.PAPER_COLUMNS`
# The number of training rows of each whole data set, and of the rows of its dev files.
SIZES: dict[str, tuple[int, dict[str, int]]] = {
    "mnli": (392_702, {"": 9_815, "mismatched": 9_832}),
    "qqp": (363_846, {"": 40_430}),
    "qnli": (104_743, {"": 5_463}),
    "sst2": (67_349, {"": 872}),
    "cola": (8_551, {"": 1_043}),
    "stsb": (5_749, {"": 1_500}),
    "mrpc": (3_668, {"": 408}),
    "rte": (2_490, {"": 277}),
    "wnli": (635, {"": 71}),
    "squad1": (87_599, {"": 10_570}),
    "squad2": (130_319, {"": 11_873}),
    "swag": (73_546, {"": 20_006}),
    "conll2003": (14_041, {"": 3_250}),
    "nsmc": (150_000, {"": 50_000}),
    "korsts": (5_749, {"": 1_500}),
    "korquad": (60_407, {"": 5_774}),
    "kornli": (942_854, {"": 2_490}),
    "klue-tc": (45_678, {"": 9_107}),
    "klue-sts": (11_668, {"": 519}),
    "klue-nli": (24_998, {"": 3_000}),
    "klue-ner": (21_008, {"": 5_000}),
    "klue-mrc": (17_554, {"": 5_841}),
}
TOLERANCE = 0.02  # of the rows, since a few are skipped or counted in another way


def paper_scores(columns: Sequence[tuple[str, str]], size: int, split: Literal["dev", "test"]) -> list[float | None]:
    """The paper's score of BERT-Base or BERT-Large for each task and metric."""
    found = [next(score for score in PAPER[task] if score.key == key) for task, key in columns]
    return [getattr(score, split)[size] for score in found]


def shortfall(task: str, rows: int | None, dev: dict[str, int]) -> list[str]:
    """Why scores on this data cannot be compared with the paper's: how it differs from the whole data set."""
    if task not in SIZES:
        return []
    whole, files = SIZES[task]
    found = []
    if rows is not None and abs(rows - whole) > TOLERANCE * whole:
        found.append(f"trained on {rows:,} rows, where the data set has {whole:,}")
    for name, count in dev.items():
        expected = files.get(name, count)
        if abs(count - expected) > TOLERANCE * expected:
            found.append(f"scored on {count:,} rows, where the dev set has {expected:,}")
    return found

"""Scores from 0 to 100, as the field prints them, by scikit-learn and scipy. Imports without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Entities = Sequence[Sequence[tuple[str, list[int]]]]  # of each sentence: the type and the words of its entities


def accuracy(gold: Sequence[Any], predicted: Sequence[Any]) -> float:
    """The share of rows whose label is right."""
    return 100.0 * float(np.mean([g == p for g, p in zip(gold, predicted, strict=True)]))


def f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """F1 of the label `1`, as GLUE scores paraphrases."""
    from sklearn.metrics import f1_score

    return 100.0 * float(f1_score([g == "1" for g in gold], [p == "1" for p in predicted], zero_division=0.0))


def f1_at_3(gold: Sequence[float], predicted: Sequence[float]) -> float:
    """F1 of pairs with a number of at least 3, as KLUE scores similar sentences."""
    return f1(*([str(int(value >= 3)) for value in side] for side in (gold, predicted)))


def macro_f1(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """F1 of each label, averaged over the labels that occur."""
    from sklearn.metrics import f1_score

    return 100.0 * float(f1_score(list(gold), list(predicted), average="macro", zero_division=0.0))


def micro_f1(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """F1 over all labels of rows that may have several."""
    hits = sum(len(set(g) & set(p)) for g, p in zip(gold, predicted, strict=True))
    total = sum(len(set(g)) + len(set(p)) for g, p in zip(gold, predicted, strict=True))
    return 100.0 * 2 * hits / total if total else 100.0


def matthews(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """Matthews' correlation."""
    from sklearn.metrics import matthews_corrcoef

    return 100.0 * float(matthews_corrcoef(list(gold), list(predicted)))


def pearson(gold: Sequence[float], predicted: Sequence[float]) -> float:
    """Pearson's correlation; 0 where a side is constant."""
    from scipy.stats import pearsonr

    return 0.0 if _constant(gold) or _constant(predicted) else 100.0 * float(pearsonr(gold, predicted)[0])


def spearman(gold: Sequence[float], predicted: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 where a side is constant."""
    from scipy.stats import spearmanr

    return 0.0 if _constant(gold) or _constant(predicted) else 100.0 * float(spearmanr(gold, predicted)[0])


def entities(gold: Entities, predicted: Entities) -> dict[str, float]:
    """Precision, recall and F1 of whole entities, as conlleval and seqeval compute them."""
    sides = _whole(gold), _whole(predicted)
    right = len(sides[0] & sides[1])
    recall, precision = (right / len(side) if side else 0.0 for side in sides)
    f1 = 2.0 * precision * recall / (precision + recall) if right else 0.0
    return {"f1": 100.0 * f1, "precision": 100.0 * precision, "recall": 100.0 * recall}


def entity_macro_f1(gold: Entities, predicted: Entities) -> float:
    """F1 of each type of entity, averaged over the types that occur: KLUE-NER's entity F1 (seqeval, strict IOB2)."""
    sides = _whole(gold), _whole(predicted)
    right, total = Counter(kind for *_, kind in sides[0] & sides[1]), Counter(kind for s in sides for *_, kind in s)
    return float(np.mean([200.0 * right[kind] / count for kind, count in total.items()])) if total else 0.0


def _whole(sentences: Entities) -> set[tuple[int, int, int, str]]:
    """Entities by their sentence, their first and last word and their type."""
    return {(number, words[0], words[-1], kind) for number, found in enumerate(sentences) for kind, words in found}


def character_f1(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]) -> float:
    """F1 of each tag over all characters, averaged over the tags, `O` included: KLUE-NER's character F1.

    As in KLUE's code, a tag that occurs neither in the data nor in the predictions counts as 100.
    """
    from sklearn.metrics import f1_score

    sides = [[tag for tags in side for tag in tags] for side in (gold, predicted)]
    return 100.0 * float(f1_score(*sides, labels=list(labels), average="macro", zero_division=1.0)) if sides[0] else 0.0


def _constant(values: Sequence[float]) -> bool:
    return len(set(values)) < 2


METRICS: dict[str, Callable[..., float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "f1_at_3": f1_at_3,
    "macro_f1": macro_f1,
    "micro_f1": micro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
}

"""Scores from 0 to 100, as the field prints them, by scikit-learn and scipy. Imports without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bertsmith.errors import UserError


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


def entities(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of whole entities, as conlleval (by seqeval)."""
    metrics = seqeval_metrics()
    sides = [list(map(list, gold)), list(map(list, predicted))]
    return {
        name: 100.0 * float(function(*sides, zero_division=0))
        for name, function in (
            ("f1", metrics.f1_score),
            ("precision", metrics.precision_score),
            ("recall", metrics.recall_score),
        )
    }


def entity_macro_f1(
    gold: Sequence[Sequence[tuple[str, list[int]]]], predicted: Sequence[Sequence[tuple[str, list[int]]]]
) -> float:
    """F1 of each type of entity, averaged over the types that occur: KLUE-NER's entity F1 (seqeval, strict IOB2)."""
    sides = [
        {(number, words[0], words[-1], kind) for number, found in enumerate(side) for kind, words in found}
        for side in (gold, predicted)
    ]
    right, total = Counter(kind for *_, kind in sides[0] & sides[1]), Counter(kind for s in sides for *_, kind in s)
    return float(np.mean([200.0 * right[kind] / count for kind, count in total.items()])) if total else 0.0


def character_f1(gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]], labels: Sequence[str]) -> float:
    """F1 of each tag over all characters, averaged over the tags, `O` included: KLUE-NER's character F1.

    As in KLUE's code, a tag that occurs neither in the data nor in the predictions counts as 100.
    """
    from sklearn.metrics import f1_score

    sides = [[tag for tags in side for tag in tags] for side in (gold, predicted)]
    return 100.0 * float(f1_score(*sides, labels=list(labels), average="macro", zero_division=1.0)) if sides[0] else 0.0


def seqeval_metrics() -> Any:
    """The library of the entity scores, or an error that says how to get it."""
    try:
        import seqeval.metrics
    except ImportError:
        raise UserError("scores of entities need seqeval: pip install 'bertsmith[tag]'") from None
    return seqeval.metrics


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

"""SQuAD's scores, as its official scripts define them (v1.1 and v2.0), KorQuAD's and KLUE-MRC's. Imports without torch.

Exact match and F1 compare normalised answers, each with the gold answer that it agrees with best; scores are per cent.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

Golds = Mapping[str, Sequence[str]]  # the answers of each question, by its id, in the order of the file
PUNCTUATION = str.maketrans("", "", string.punctuation)
BRACKETS = str.maketrans(dict.fromkeys("'\"《》<>〈〉()‘’", " "))


def normalise(text: str) -> str:
    """Lower case, without punctuation, articles and surplus space."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def normalise_korean(text: str) -> str:
    """Lower case, without quotation marks, brackets, punctuation and surplus space (KorQuAD has no articles)."""
    return " ".join(text.translate(BRACKETS).lower().translate(PUNCTUATION).split())


def words(text: str) -> list[str]:
    """The words of a normalised answer."""
    return normalise(text).split()


def letters(text: str) -> list[str]:
    """The characters of a normalised Korean answer, without spaces."""
    return list("".join(normalise_korean(text).split()))


def overlap(gold: Sequence[str], predicted: Sequence[str]) -> float:
    """F1 of two bags of words or letters; 0 where nothing is shared."""
    shared = sum((Counter(gold) & Counter(predicted)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(gold)
    return (2 * precision * recall) / (precision + recall)


def squad1_scores(golds: Golds, predictions: Mapping[str, str], *, korean: bool = False) -> dict[str, float]:
    """Exact match and F1 as the v1.1 script; a question without a prediction scores 0."""
    normal, bag = (normalise_korean, letters) if korean else (normalise, words)
    exact = f1 = 0.0
    for key, answers in golds.items():
        if key in predictions and answers:
            predicted = predictions[key]
            exact += max(normal(a) == normal(predicted) for a in answers)
            f1 += max(overlap(bag(a), bag(predicted)) for a in answers)
    total = max(1, len(golds))
    return {"exact_match": 100.0 * exact / total, "f1": 100.0 * f1 / total}


def normalise_klue(text: str) -> str:
    """Lower case, without ASCII punctuation and surplus space; the brackets that KLUE's code means to replace stay."""
    return " ".join(text.lower().translate(PUNCTUATION).split())


def rouge_w(gold: str, predicted: str) -> float:
    """F1 of the longest run of characters that two normalised answers share, as KLUE-MRC's code computes it."""
    if not gold:
        return float(gold == predicted)
    matcher = SequenceMatcher(None, predicted, gold)  # with its heuristic for long texts, as in KLUE's code
    shared = matcher.find_longest_match(0, len(predicted), 0, len(gold)).size
    return 2 * shared / (len(predicted) + len(gold))


def klue_question(answers: Sequence[str], predicted: str) -> tuple[float, float]:
    """Exact match and ROUGE-W of one question, by the answer that agrees best; without an answer, nothing is right."""
    golds, predicted = [normalise_klue(answer) for answer in answers] or [""], normalise_klue(predicted)
    return max(float(gold == predicted) for gold in golds), max(rouge_w(gold, predicted) for gold in golds)


def klue_scores(golds: Golds, predictions: Mapping[str, str]) -> dict[str, float]:
    """Exact match and ROUGE-W as KLUE-MRC's code; a question without a prediction scores 0."""
    found = [klue_question(answers, predictions[key]) for key, answers in golds.items() if key in predictions]
    return {
        name: 100.0 * sum(scores[i] for scores in found) / max(1, len(golds))
        for i, name in enumerate(("exact_match", "rouge_w"))
    }


def squad2_scores(
    golds: Golds,
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None = None,
    threshold: float = 1.0,
) -> dict[str, float]:
    """The scores of the v2.0 script: all questions, those with an answer and those without.

    With `null_odds` (how likely it is that there is no answer) a prediction above `threshold` counts as none, and the
    thresholds with the best exact match and F1 are found. As in the script, questions that have no prediction are left
    out.
    """
    keys = [key for key in golds if key in predictions]
    raw = {key: _question2(golds[key], predictions[key]) for key in keys}
    odds = null_odds if null_odds is not None else dict.fromkeys(keys, 0.0)
    has_answer = {key: bool(golds[key]) for key in golds}
    kept = {k: (float(not has_answer[k]),) * 2 if odds[k] > threshold else raw[k] for k in keys}
    scores = {**_figures(kept, keys)}
    for prefix, wanted in (("HasAns", True), ("NoAns", False)):
        if any(value == wanted for value in has_answer.values()):
            figures = _figures(kept, [key for key in keys if has_answer[key] == wanted])
            scores.update({f"{prefix}_{name}": value for name, value in figures.items()})
    if null_odds is not None and keys:
        for number, name in enumerate(("exact", "f1")):
            each = {key: raw[key][number] for key in keys}
            best, found = best_threshold(each, predictions, odds, has_answer)
            scores[f"best_{name}"], scores[f"best_{name}_thresh"] = best, found
    return scores


def _question2(answers: Sequence[str], predicted: str) -> tuple[float, float]:
    golds = [answer for answer in answers if normalise(answer)] or [""]
    exact = max(float(normalise(gold) == normalise(predicted)) for gold in golds)
    return exact, max(_overlap2(words(gold), words(predicted)) for gold in golds)


def _overlap2(gold: list[str], predicted: list[str]) -> float:
    """If one answer is empty, v2.0 scores whether both are."""
    return overlap(gold, predicted) if gold and predicted else float(gold == predicted)


def _figures(scores: Mapping[str, tuple[float, float]], keys: Sequence[str]) -> dict[str, float]:
    total = max(1, len(keys))
    exact, f1 = (100.0 * sum(scores[key][i] for key in keys) / total for i in range(2))
    return {"exact": exact, "f1": f1, "total": len(keys)}


def best_threshold(
    scores: Mapping[str, float],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
    has_answer: Mapping[str, bool],
) -> tuple[float, float]:
    """The best score that a threshold on `null_odds` can give, in per cent of the questions, and that threshold.

    The search starts with all questions unanswered and answers them one by one, the surest first.
    """
    current = best = float(sum(not answered for answered in has_answer.values()))
    threshold = 0.0
    for key in sorted((key for key in null_odds if key in scores), key=lambda k: null_odds[k]):
        if has_answer[key]:
            current += scores[key]
        elif predictions[key]:
            current -= 1
        if current > best:
            best, threshold = current, null_odds[key]
    return 100.0 * best / len(scores), threshold

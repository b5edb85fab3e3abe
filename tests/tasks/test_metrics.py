"""Scores equal values computed by hand and those of the reference libraries."""

import math
import random
import re
import string
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as reference
from sklearn.preprocessing import MultiLabelBinarizer

from bertsmith.tasks import metrics
from bertsmith.tasks.squad_scores import best_threshold, letters, normalise, squad1_scores, squad2_scores
from bertsmith.tasks.tagging import entity_words


def test_scores_of_labels_and_numbers_by_hand() -> None:
    gold, predicted = ["1", "1", "0", "0", "1"], ["1", "0", "0", "1", "1"]
    assert metrics.accuracy(gold, predicted) == pytest.approx(100 * 3 / 5)
    assert metrics.f1(gold, predicted) == pytest.approx(100 * 2 * 2 / (3 + 3))  # 2 correct, 3 predicted, 3 gold
    assert metrics.matthews(gold, predicted) == pytest.approx(100 * (2 * 1 - 1 * 1) / math.sqrt(3 * 3 * 2 * 2))
    assert metrics.f1(["0", "0"], ["0", "0"]) == 0.0
    assert metrics.pearson([1.0, 2.0, 3.0], [2.0, 4.0, 7.0]) == pytest.approx(100 * 5 / math.sqrt(2 * 38 / 3))
    assert metrics.spearman([1.0, 2.0, 3.0], [2.0, 4.0, 70.0]) == pytest.approx(100.0)
    assert metrics.pearson([1.0, 2.0], [3.0, 3.0]) == 0.0


def entity_scores(gold: list[list[str]], predicted: list[list[str]]) -> dict[str, float]:
    return metrics.entities(*([entity_words(tags) for tags in side] for side in (gold, predicted)))


def test_an_entity_must_match_as_a_whole() -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-ORG", "B-ORG"]]
    scores = entity_scores(gold, predicted)
    assert scores["precision"] == pytest.approx(100 * 2 / 4)
    assert scores["recall"] == pytest.approx(100 * 2 / 3)
    assert scores["f1"] == pytest.approx(100 * 4 / 7)


def test_answers_are_normalised() -> None:
    assert normalise("The  U.S. Army, an 'army'!") == "us army army"
    assert normalise("theatre a-the") == "theatre athe"
    assert normalise("The") == ""
    assert letters("《홍길동》 (전) 2.") == list("홍길동전2")


def test_squad1_by_hand() -> None:
    golds = {"a": ["the cat", "black cat"], "b": ["Paris"], "c": ["1999", "in 1999"], "d": ["never"]}
    predictions = {"a": "a big black cat", "b": "paris.", "c": "2000"}  # d has no prediction
    scores = squad1_scores(golds, predictions)
    assert scores["exact_match"] == 100 * 1 / 4
    first = 2 * (2 / 3) * 1 / (2 / 3 + 1)  # big black cat: two of its three words are gold, and all of the gold's two
    assert scores["f1"] == pytest.approx(100 * (first + 1) / 4)


def test_squad2_by_hand() -> None:
    golds = {"a": ["red fox"], "b": [], "c": ["blue"], "d": []}
    predictions = {"a": "fox", "b": "", "c": "", "d": "green"}
    scores = squad2_scores(golds, predictions)
    assert (scores["exact"], scores["total"]) == (25.0, 4)
    assert scores["f1"] == pytest.approx(100 * (2 / 3 + 1) / 4)
    assert (scores["HasAns_exact"], scores["NoAns_exact"]) == (0.0, 50.0)
    assert scores["HasAns_f1"] == pytest.approx(100 * (2 / 3) / 2)
    odds = {"a": -3.0, "b": 4.0, "c": 1.0, "d": 2.0}
    with_odds = squad2_scores(golds, predictions, odds, 1.5)
    assert with_odds["f1"] == pytest.approx(100 * (2 / 3 + 1 + 0 + 1) / 4)
    assert with_odds["best_f1"] == pytest.approx(100 * (2 / 3 + 2) / 4)
    assert with_odds["best_f1_thresh"] == -3.0
    assert (with_odds["best_exact"], with_odds["best_exact_thresh"]) == (50.0, 0.0)


def test_no_other_threshold_beats_the_best_threshold() -> None:
    rng = random.Random(1)
    for _ in range(50):
        keys = [str(i) for i in range(12)]
        has = {key: rng.random() < 0.6 for key in keys}
        predictions = {key: rng.choice(["", "word"]) for key in keys}
        scores = {k: rng.random() if has[k] else float(not predictions[k]) for k in keys}
        odds = {key: rng.gauss(0, 2) for key in keys}
        best, threshold = best_threshold(scores, predictions, odds, has)

        def at(limit: float, has=has, scores=scores, odds=odds, keys=keys) -> float:
            return 100 * sum(scores[k] if odds[k] <= limit else float(not has[k]) for k in keys) / len(keys)

        assert best == pytest.approx(max(at(limit) for limit in [-99.0, *odds.values()]))
        if any(abs(best - at(limit)) < 1e-9 for limit in odds.values()):
            assert at(threshold) == pytest.approx(best) or best == pytest.approx(at(-99.0))


def test_korean_answers_are_compared_by_character() -> None:
    golds = {"a": ["서울 특별시"], "b": ["1989년 2월"]}
    scores = squad1_scores(golds, {"a": "서울특별시청", "b": "1989년 2월"}, korean=True)
    assert scores["exact_match"] == 50.0
    assert scores["f1"] == pytest.approx(100 * (2 * (5 / 6) / (5 / 6 + 1) + 1) / 2)


# Made-up rows with ties, a class that is never predicted and one without gold rows, scored by reference libraries.

SCALE = 100  # a perfect score
SEEDS = pytest.mark.parametrize("seed", range(5))


@SEEDS
def test_scores_of_labels_equal_those_of_scikit_learn(seed: int) -> None:
    rng = random.Random(seed)
    gold = rng.choices(["0", "1", "2", "rare"], [5, 3, 1, 0.3], k=60) + ["never predicted"]
    predicted = [g if rng.random() < 0.6 else rng.choice(["0", "1", "2"]) for g in gold[:-1]] + ["never gold"]
    assert metrics.accuracy(gold, predicted) == pytest.approx(SCALE * reference.accuracy_score(gold, predicted))
    each = []
    for name in {*gold, *predicted}:
        right = sum(g == p == name for g, p in zip(gold, predicted, strict=True))
        each.append(2 * right / (gold.count(name) + predicted.count(name)))
    assert metrics.macro_f1(gold, predicted) == pytest.approx(SCALE * sum(each) / len(each))
    weighted = reference.f1_score(gold, predicted, average="weighted", zero_division=0.0)
    assert abs(metrics.macro_f1(gold, predicted) / SCALE - weighted) > 0.02
    assert metrics.matthews(gold, predicted) == pytest.approx(SCALE * reference.matthews_corrcoef(gold, predicted))
    binary = [["1" if x == "1" else "0" for x in side] for side in (gold, predicted)]
    assert metrics.f1(*binary) == pytest.approx(SCALE * reference.f1_score(*binary, pos_label="1"))
    assert metrics.f1(gold, predicted) == metrics.f1(*binary)  # F1 of the label 1, whatever the other labels


@SEEDS
def test_multi_label_scores_equal_those_of_scikit_learn(seed: int) -> None:
    rng = random.Random(seed)
    draw = lambda names: [sorted(n for n in names if rng.random() < 0.4) for _ in range(30)]  # noqa: E731
    gold, predicted = [*draw("abcd"), []], [*draw("abce"), []]
    matrix = MultiLabelBinarizer(classes=list("abcde")).fit([list("abcde")])
    sides = [matrix.transform(side) for side in (gold, predicted)]
    assert metrics.micro_f1(gold, predicted) == pytest.approx(SCALE * reference.f1_score(*sides, average="micro"))
    assert metrics.accuracy(gold, predicted) == pytest.approx(SCALE * reference.accuracy_score(*sides))


@SEEDS
def test_correlations_average_the_ranks_of_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    gold = rng.integers(0, 6, 40).astype(float)  # from 0 to 5, with many ties
    predicted = np.round(gold + rng.normal(0, 1.5, 40), 0 if seed % 2 else 2)
    ranks = [stats.rankdata(side, method="average") for side in (gold, predicted)]
    expected = np.corrcoef(*ranks)[0, 1]
    assert expected == pytest.approx(stats.spearmanr(gold, predicted).statistic)
    assert metrics.spearman(gold.tolist(), predicted.tolist()) == pytest.approx(SCALE * expected)
    without_ties = np.corrcoef(*(np.argsort(np.argsort(side)) for side in (gold, predicted)))[0, 1]
    assert abs(expected - without_ties) > 1e-3
    pearson = np.corrcoef(gold, predicted)[0, 1]
    assert metrics.pearson(gold.tolist(), predicted.tolist()) == pytest.approx(SCALE * pearson)


def chunks(tags: list[str]) -> set[tuple[str, int, int]]:
    """Entities as conlleval finds them: one begins at `B-`, or at `I-` after another type."""
    found, padded = [], [*tags, "O"]
    for i, (before, tag) in enumerate(pairwise(["O", *padded])):
        inside = tag.startswith("I-") and before[2:] == tag[2:]
        if not inside and tag != "O":
            end = next(j for j in range(i + 1, len(padded)) if padded[j] != f"I-{tag[2:]}")
            found.append((tag[2:], i, end))
    return set(found)


@SEEDS
def test_scores_of_entities_equal_those_of_conlleval(seed: int) -> None:
    rng = random.Random(seed)
    names = ["O", "O", "O", "B-PER", "I-PER", "I-PER", "B-LOC", "I-LOC"]
    gold = [[rng.choice(names) for _ in range(rng.randint(1, 12))] for _ in range(25)]
    predicted = [[tag if rng.random() < 0.8 else rng.choice([*names, "B-MISC"]) for tag in row] for row in gold]
    gold_chunks, predicted_chunks = ([chunks(row) for row in side] for side in (gold, predicted))
    right = sum(len(a & b) for a, b in zip(gold_chunks, predicted_chunks, strict=True))
    precision, recall = right / sum(map(len, predicted_chunks)), right / sum(map(len, gold_chunks))
    scores = entity_scores(gold, predicted)
    assert scores["precision"] == pytest.approx(SCALE * precision)
    assert scores["recall"] == pytest.approx(SCALE * recall)
    assert scores["f1"] == pytest.approx(SCALE * 2 * precision * recall / (precision + recall))
    seqeval = pytest.importorskip("seqeval.metrics")
    for name in ("f1", "precision", "recall"):
        assert scores[name] == SCALE * getattr(seqeval, f"{name}_score")(gold, predicted)  # to the last bit


def test_scores_without_entities_are_zero() -> None:
    outside, named = [["O", "O"]], [["O", "B-PER"]]
    for sides in ((outside, outside), (outside, named), (named, outside), (named, [["B-PER", "O"]])):
        assert entity_scores(*sides) == {"f1": 0.0, "precision": 0.0, "recall": 0.0}


def official_tokens(text: str) -> list[str]:
    """`normalize_answer` of the script: lower case, punctuation, articles, white space, in this order."""
    text = "".join(character for character in text.lower() if character not in set(string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def official_f1(gold: str, predicted: str) -> float:
    """`compute_f1` of the v2.0 script."""
    gold_tokens, predicted_tokens = official_tokens(gold), official_tokens(predicted)
    shared = sum((Counter(gold_tokens) & Counter(predicted_tokens)).values())
    if not gold_tokens or not predicted_tokens:
        return float(gold_tokens == predicted_tokens)
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted_tokens), shared / len(gold_tokens)
    return 2 * precision * recall / (precision + recall)


@SEEDS
def test_scores_of_answers_equal_those_of_the_official_scripts(seed: int) -> None:
    rng = random.Random(seed)
    words = ["The", "a", "cat,", "cat", "Dog", "dog's", "in", "1999", "-", "an", "U.S."]
    phrase = lambda: " ".join(rng.choices(words, k=rng.randint(1, 4)))  # noqa: E731
    golds = {str(i): [phrase() for _ in range(rng.randint(0, 3))] for i in range(40)}
    predictions = {key: rng.choice([phrase(), *answers, ""]) for key, answers in golds.items()}
    exact, f1 = {}, {}
    for key, answers in golds.items():
        kept = [answer for answer in answers if official_tokens(answer)] or [""]
        exact[key] = max(float(official_tokens(a) == official_tokens(predictions[key])) for a in kept)
        f1[key] = max(official_f1(a, predictions[key]) for a in kept)
    scores = squad2_scores(golds, predictions)
    for prefix, keys in (("", list(golds)), *((n, [k for k in golds if bool(golds[k]) == h]) for n, h in SPLIT)):
        assert scores[f"{prefix}exact"] == pytest.approx(100 * sum(exact[k] for k in keys) / len(keys))
        assert scores[f"{prefix}f1"] == pytest.approx(100 * sum(f1[k] for k in keys) / len(keys))
        assert scores[f"{prefix}total"] == len(keys)
    answered = {key: answers for key, answers in golds.items() if answers}
    old = squad1_scores(answered, predictions)
    norm = lambda text: " ".join(official_tokens(text))  # noqa: E731
    wanted = [max(norm(a) == norm(predictions[k]) for a in answers) for k, answers in answered.items()]
    assert old["exact_match"] == pytest.approx(100 * sum(wanted) / len(answered))


SPLIT = (("HasAns_", True), ("NoAns_", False))

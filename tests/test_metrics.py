"""Scores against values worked out by hand, and against the libraries' definitions."""

import math
import random

import pytest

from bertsmith.tasks import metrics
from bertsmith.tasks.squad_scores import best_threshold, letters, normalise, squad1_scores, squad2_scores


def test_labels_and_numbers() -> None:
    gold, predicted = ["1", "1", "0", "0", "1"], ["1", "0", "0", "1", "1"]
    assert metrics.accuracy(gold, predicted) == pytest.approx(100 * 3 / 5)
    assert metrics.f1(gold, predicted) == pytest.approx(100 * 2 * 2 / (3 + 3))  # two hits, three said, three there
    assert metrics.matthews(gold, predicted) == pytest.approx(100 * (2 * 1 - 1 * 1) / math.sqrt(3 * 3 * 2 * 2))
    assert metrics.f1(["0", "0"], ["0", "0"]) == 0.0
    assert metrics.pearson([1.0, 2.0, 3.0], [2.0, 4.0, 7.0]) == pytest.approx(100 * 5 / math.sqrt(2 * 38 / 3))
    assert metrics.spearman([1.0, 2.0, 3.0], [2.0, 4.0, 70.0]) == pytest.approx(100.0)
    assert metrics.pearson([1.0, 2.0], [3.0, 3.0]) == 0.0


def test_entities_are_whole_or_wrong() -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"]]
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-ORG", "B-ORG"]]
    scores = metrics.entities(gold, predicted)
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
    first = 2 * (2 / 3) * 1 / (2 / 3 + 1)  # big black cat: two of three words, both of the gold's
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


def test_the_best_threshold_is_the_best_of_all() -> None:
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


def test_korean_answers_are_compared_letter_by_letter() -> None:
    golds = {"a": ["서울 특별시"], "b": ["1989년 2월"]}
    scores = squad1_scores(golds, {"a": "서울특별시청", "b": "1989년 2월"}, korean=True)
    assert scores["exact_match"] == 50.0
    assert scores["f1"] == pytest.approx(100 * (2 * (5 / 6) / (5 / 6 + 1) + 1) / 2)

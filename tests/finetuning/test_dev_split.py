"""Without dev rows a share of the training rows is held out: stratified, without leaks, the same in every run."""

from collections import Counter
from pathlib import Path

import pytest

from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.dev_split import hold_out
from bertsmith.finetuning.protocols import finetune_many
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.dev_predictions import read_dev_predictions
from bertsmith.training.run import facts_of

SINGLE = HeadConfig("single", ("a", "b", "c"))


def rows_of(*labels: object) -> list[Row]:
    return [Row(f"text {i}", None, label, f"row {i}") for i, label in enumerate(labels)]


def test_held_out_rows_are_stratified_by_label() -> None:
    rows = rows_of(*["a"] * 700, *["b"] * 290, *["c"] * 10)
    train, dev, line = hold_out(rows, SINGLE, 0.1)
    assert Counter(row.label for row in dev[""]) == {"a": 70, "b": 29, "c": 1}
    assert sorted([*train, *dev[""]], key=rows.index) == rows
    assert train == [row for row in rows if row not in dev[""]]
    assert "100 of the 1000 training rows are held out" in line
    assert hold_out(rows, SINGLE, 0.1)[1] == dev
    places = sorted(rows.index(row) for row in dev[""] if row.label == "a")
    assert places != list(range(places[0], places[0] + 70 * 10, 10))  # drawn at random, not every tenth


def test_every_label_keeps_a_text_for_training() -> None:
    rows = rows_of(*(f"label {i // 2}" for i in range(40)), "alone", "single")
    head = HeadConfig("single", tuple(sorted({row.label for row in rows})))
    train, dev, _ = hold_out(rows, head, 0.5)
    assert {row.label for row in train} == set(head.labels)
    assert len(dev[""]) == 20


def test_all_rows_of_a_text_are_on_one_side() -> None:
    rows = [Row(f"text {i % 50}", f"second {i}", "ab"[i % 2], "") for i in range(200)]
    train, dev, _ = hold_out(rows, SINGLE, 0.2)
    assert len(dev[""]) == 40
    assert not {row.text for row in train} & {row.text for row in dev[""]}
    questions = [Row(f"question {i}", f"context {i // 4}", [], "") for i in range(200)]
    train, dev, _ = hold_out(questions, HeadConfig("span"), 0.1)
    assert not {row.pair for row in train} & {row.pair for row in dev[""]}
    assert len(dev[""]) == 20


def test_held_out_rows_cover_the_range_of_a_regression() -> None:
    _, dev, _ = hold_out(rows_of(*(i / 10 for i in range(100))), HeadConfig("regression"), 0.1)
    values = [row.label for row in dev[""]]
    assert [sum(low <= value < low + 1 for value in values) for low in range(10)] == [1] * 10


@pytest.mark.parametrize(("count", "held"), [(19, 0), (20, 5), (60, 6)])
def test_at_least_five_rows_are_held_out_of_twenty_or_more(count: int, held: int) -> None:
    train, dev, line = hold_out(rows_of(*("ab"[i % 2] for i in range(count))), SINGLE, 0.1)
    assert (len(train), len(dev.get("", []))) == (count - held, held)
    assert ("too few" in line) == (held == 0)


CHANGES = ["train.steps=2", "train.batch_size=8", "data.max_length=32", "restarts=0"]


def test_runs_are_scored_on_the_same_held_out_rows(world: Path, tmp_path: Path, capfd) -> None:
    """The held-out rows do not depend on the seed and are reported; `data.dev_share=0` trains on all rows."""
    config = override(FinetuneConfig("classify"), CHANGES)
    for seed in (1, 2):
        run = tmp_path / f"{seed}"
        scores = finetune(config, world / "run", world / "train.csv", run, seed=seed, device="cpu")
        assert scores["rows"] == 35
        assert "accuracy" in scores
    assert "5 of the 40 training rows are held out to score on" in " ".join(capfd.readouterr().err.split())
    assert facts_of(tmp_path / "1")["dev_rows_hash"] == facts_of(tmp_path / "2")["dev_rows_hash"]
    assert len(read_dev_predictions(tmp_path / "1")[1]) == 5
    whole = override(config, ["data.dev_share=0"])
    scores = finetune(whole, world / "run", world / "train.csv", tmp_path / "whole", device="cpu")
    assert (scores["rows"], "accuracy" in scores) == (40, False)
    given = finetune(config, world / "run", world / "train.csv", tmp_path / "dev", dev=world / "dev.csv", device="cpu")
    assert given["rows"] == 40
    with pytest.raises(UserError, match=r"data.dev_share must be at least 0 and at most 0.5, not 0.9"):
        override(config, ["data.dev_share=0.9"])


def test_seeds_are_compared_on_held_out_rows(world: Path, tmp_path: Path) -> None:
    config = override(FinetuneConfig("classify"), CHANGES)
    summary = finetune_many(config, world / "run", world / "train.csv", tmp_path / "many", seeds=2, device="cpu")
    assert summary["settings"][0]["seeds"] == 2
    whole = override(config, ["data.dev_share=0"])
    with pytest.raises(UserError, match="compare scores on dev rows, and there are none"):
        finetune_many(whole, world / "run", world / "train.csv", tmp_path / "none", seeds=2, device="cpu")

"""A run that is no better than a constant prediction is detected, reported and restarted with another seed."""

import math
from pathlib import Path

import pytest

from bertsmith.config import override, read_json
from bertsmith.errors import UserError
from bertsmith.finetuning import restarts
from bertsmith.finetuning.collapse import collapse
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.kinds import KINDS
from bertsmith.training import runlog

BROKEN = ["train.steps=60", "train.batch_size=8", "train.learning_rate=0.3", "train.clip_norm=0", "data.max_length=16"]
SINGLE = HeadConfig("single", ("a", "b", "c"))


def rows(*labels) -> list[Row]:
    return [Row("text", None, label, "row") for label in labels]


def constant_loss(rows, head, weights=None) -> float | None:
    return KINDS[head.kind].constant_loss(rows, head, weights)


def constant(rows, predictions, head) -> str:
    return KINDS[head.kind].constant(rows, predictions, head)


def tune(world: Path, out: Path, changes: list[str], **options):
    config = override(FinetuneConfig("classify"), changes)
    return finetune(config, world / "run", world / "train.csv", out, dev=world / "dev.csv", device="cpu", **options)


def test_loss_of_the_best_constant_prediction_is_the_entropy_of_the_labels() -> None:
    assert constant_loss(rows("a", "b", "c"), SINGLE) == pytest.approx(math.log(3))
    quarter = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert constant_loss(rows("a", "a", "a", "b"), SINGLE) == pytest.approx(quarter)
    # with these weights both labels are equally likely; the weighted losses are summed and divided by the rows
    assert constant_loss(rows("a", "a", "a", "b"), SINGLE, [1, 3, 1]) == pytest.approx(6 * math.log(2) / 4)
    assert constant_loss(rows(1.0, 3.0), HeadConfig("regression")) == 1.0
    assert constant_loss(rows(["a"], []), HeadConfig("multi", ("a", "b"))) == pytest.approx(math.log(2) / 2)
    words = [Row("x y", None, ["O", "B-X"], "row", parts=("x", "y"))]
    assert constant_loss(words, HeadConfig("tags", ("O", "B-X"))) == pytest.approx(math.log(2))
    assert constant_loss([], HeadConfig("choice", num_choices=4)) == pytest.approx(math.log(4))
    assert constant_loss([], HeadConfig("span")) is None


def test_constant_prediction_is_detected_unless_all_rows_have_one_label() -> None:
    one, two = [{"label": "a"}] * 2, [{"label": "a"}, {"label": "b"}]
    assert "'a'" in constant(rows("a", "b"), one, SINGLE)
    assert not constant(rows("a", "a"), one, SINGLE)
    assert not constant(rows("a", "b"), two, SINGLE)
    regression = HeadConfig("regression")
    assert "2.5" in constant(rows(1, 4), [{"value": 2.5}, {"value": 2.51}], regression)
    assert not constant(rows(1, 4), [{"value": 2.0}, {"value": 2.51}], regression)
    assert not constant(rows(2, 2), [{"value": 2.5}] * 2, regression)
    several = HeadConfig("multi", ("a", "b"))
    assert "none" in constant(rows(["a"], ["b"]), [{"labels": []}] * 2, several)
    words = [Row("x y", None, ["O", "B-X"], "row", parts=("x", "y"))]
    assert "'O'" in constant(words, [{"tags": ["O", "O"]}], HeadConfig("tags", ("O", "B-X")))


def test_model_with_a_low_training_loss_has_not_collapsed() -> None:
    assert collapse(0.69, 0.693, "every dev row gets the label 'a'")
    assert collapse(0.70, 0.693, "")
    assert not collapse(0.69, 0.693, "")
    assert not collapse(0.3, 0.693, "every dev row gets the label 'a'")
    assert not collapse(9.0, None, "")
    assert not collapse(math.nan, 0.693, "")


@pytest.fixture(scope="module")
def collapsed(world, tmp_path_factory) -> Path:
    """A run with an absurd learning rate and one restart."""
    out = tmp_path_factory.mktemp("collapsed") / "run"
    tune(world, out, [*BROKEN, "restarts=1", "train.save_every=20"])
    return out


def test_collapsed_run_is_restarted_with_another_seed_and_reported(world, collapsed, capsys) -> None:
    tried = read_json(collapsed / "run.json")["collapsed"]
    assert [entry["seed"] for entry in tried] == [1, 1001]
    assert all("guess" in entry["why"] for entry in tried)
    assert len(runlog.read(collapsed)) == len((collapsed / "collapsed-1.jsonl").read_text().splitlines())
    first, second = (collapsed / name for name in ("collapsed-1.jsonl", "metrics.jsonl"))
    assert first.read_text() != second.read_text()
    assert (collapsed / "model" / "config.json").exists()
    assert read_json(collapsed / "config.json")["train"]["seed"] == 1
    # the second attempt equals a run with the other seed
    tune(world, collapsed.parent / "alone", [*BROKEN, "restarts=0", "train.seed=1001"])
    losses = [[r["loss"] for r in runlog.read(run) if "loss" in r] for run in (collapsed, collapsed.parent / "alone")]
    assert losses[0] == losses[1]
    assert "collapsed" in capsys.readouterr().err


@pytest.mark.slow
def test_run_killed_between_two_attempts_resumes_with_identical_bytes(world, collapsed, tmp_path, monkeypatch) -> None:
    def killed(*arguments: object, **facts: object) -> None:
        raise KeyboardInterrupt

    changes = [*BROKEN, "restarts=1", "train.save_every=20"]
    with monkeypatch.context() as patch:
        patch.setattr(restarts, "add_facts", killed)
        with pytest.raises(KeyboardInterrupt):
            tune(world, tmp_path / "run", changes)
    tune(world, tmp_path / "run", changes, resume=True)
    assert read_json(tmp_path / "run" / "run.json")["collapsed"] == read_json(collapsed / "run.json")["collapsed"]
    weights = [run / "model" / "model.safetensors" for run in (tmp_path / "run", collapsed)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_runs_that_learn_and_short_runs_are_not_restarted(world, tmp_path, capsys) -> None:
    good = ["train.steps=60", "train.batch_size=8", "train.learning_rate=3e-3", "data.max_length=16"]
    assert tune(world, tmp_path / "good", good)["accuracy"] == 100.0
    assert "collapsed" not in read_json(tmp_path / "good" / "run.json")
    tune(world, tmp_path / "short", [*BROKEN, "train.steps=8"])
    assert "collapsed" not in read_json(tmp_path / "short" / "run.json")
    assert "8 steps are few" in capsys.readouterr().err
    with pytest.raises(UserError, match="restarts"):
        override(FinetuneConfig("classify"), ["restarts=-1"])

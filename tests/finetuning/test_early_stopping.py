"""A run ends early when its scores stop rising, and its model can be the best one instead of the last."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import TINY
from safetensors.torch import load_file

from bertsmith.config import override, read_json
from bertsmith.errors import UserError
from bertsmith.finetuning import run
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.finetuning.scoring import DevScores
from bertsmith.inference.predictor import Predictor
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.tasks.dev_predictions import read_dev_predictions
from bertsmith.training import runlog

QUICK = ["train.steps=20", "train.batch_size=8", "train.learning_rate=1e-3", "data.max_length=16"]
EVERY = "train.evaluate_every=2"


def tune(world: Path, out: Path, *changes: str, **options):
    config = override(FinetuneConfig("classify"), [*QUICK, *changes])
    options = {"dev": world / "dev.csv", **options}
    return finetune(config, world / "run", world / "train.csv", out, device="cpu", **options)


@pytest.fixture
def scored(monkeypatch):
    """Replaces the real scores by the given ones, the n-th for step 2n."""

    def put(*scores: float) -> None:
        real = run.fit

        def fit(*arguments, **options):
            run = arguments[4]

            def evaluate():
                options_evaluate()
                done = [r for r in runlog.read(run) if "loss" in r]
                return {"accuracy": scores[len(done) // 2 - 1]}

            options_evaluate = options["evaluate"]
            return real(*arguments, **{**options, "evaluate": evaluate})

        monkeypatch.setattr(run, "fit", fit)

    return put


def steps(run: Path) -> list[int]:
    return [r["step"] for r in runlog.read(run) if "dev_accuracy" in r]


def model(folder: Path):
    return load_file(folder / "model.safetensors")


def test_run_stops_after_patience_evaluations_without_improvement(world, tmp_path, scored) -> None:
    scored(0.5, 0.6, 0.6, 0.55, 0.7, 0.7, 0.7, 0.7, 0.9, 0.9)
    found = tune(world, tmp_path / "out", EVERY, "train.patience=3")
    assert steps(tmp_path / "out") == [2, 4, 6, 8, 10, 12, 14, 16]
    assert found["steps"] == 16
    assert found["accuracy"] == 0.7
    tune(world, tmp_path / "two", EVERY, "train.patience=2")
    assert steps(tmp_path / "two") == [2, 4, 6, 8]


def test_run_that_stops_early_has_not_collapsed(world, tmp_path, scored, capfd) -> None:
    scored(*[0.5] * 30)
    found = tune(world, tmp_path / "out", EVERY, "train.patience=2", "train.steps=60", "train.learning_rate=0")
    assert found["steps"] == 6
    assert "collapsed" not in read_json(tmp_path / "out" / "run.json")
    assert "6 steps are few to learn from" in " ".join(capfd.readouterr().err.split())


def test_patience_is_restored_by_resume(world, tmp_path, scored) -> None:
    scored(0.5, 0.4, 0.4, 0.4, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9)
    settings = [EVERY, "train.patience=3", "train.save_every=1", "train.keep=9"]
    tune(world, tmp_path / "whole", *settings)
    assert steps(tmp_path / "whole")[-1] == 8
    for last in (6, 8):  # before the end, and at the end without a written model
        resumed = shutil.copytree(tmp_path / "whole", tmp_path / f"resumed-{last}")
        shutil.rmtree(resumed / "model")
        for folder in (resumed / "checkpoints").iterdir():
            if int(folder.name.removeprefix("step-")) > last:
                shutil.rmtree(folder)
        tune(world, resumed, *settings, resume=True)
        assert runlog.read(resumed)[-1]["step"] == 8
        weights = [run / "model" / "model.safetensors" for run in (tmp_path / "whole", resumed)]
        assert weights[0].read_bytes() == weights[1].read_bytes()


def test_best_checkpoint_becomes_the_model(world, tmp_path, scored) -> None:
    scored(0.5, 0.6, 0.8, 0.6, 0.7, 0.8, 0.6, 0.5, 0.5, 0.5)
    out = tmp_path / "out"
    settings = [EVERY, "train.keep_best=true", "train.keep=1"]
    found = tune(world, out, *settings)
    assert found["best_step"] == 6
    assert found["accuracy"] == 0.8
    best = model(out / "checkpoints" / "step-00000006")
    assert all((value == best[name]).all() for name, value in model(out / "model").items())
    last = model(out / "checkpoints" / "step-00000020")
    assert any((value != last[name]).any() for name, value in model(out / "model").items())
    assert read_json(out / "run.json")["best_step"] == 6
    assert tune(world, out, *settings, resume=True)["accuracy"] == 0.8  # also for a finished run
    plain = tune(world, tmp_path / "plain", EVERY)
    assert plain["accuracy"] == 0.5


def test_last_model_is_kept_if_it_is_the_best(world, tmp_path, scored) -> None:
    scored(0.5, 0.6, 0.8, 0.6, 0.7, 0.8, 0.6, 0.5, 0.5, 0.9)
    found = tune(world, tmp_path / "out", EVERY, "train.keep_best=true")
    assert "best_step" not in found
    assert found["accuracy"] == 0.9


@pytest.mark.slow
def test_best_model_does_not_depend_on_when_checkpoints_are_written(world, tmp_path, monkeypatch) -> None:
    """The highest scores are at steps without an evaluation, and the two best evaluations are equal."""
    real = run.fit
    course = {3: 0.95, 6: 0.8, 7: 0.9, 12: 0.8, 19: 0.99}

    def fit(*arguments, **options):
        def evaluate():
            options["evaluate"]()
            return {"accuracy": course.get(len([r for r in runlog.read(arguments[4]) if "loss" in r]), 0.5)}

        return real(*arguments, **{**options, "evaluate": evaluate})

    monkeypatch.setattr(run, "fit", fit)
    found = {}
    for name, changes in {
        "seldom": [],
        "clock": ["train.save_minutes=1e-9", "train.keep=20"],
        "steps": ["train.save_every=3"],
    }.items():
        scores = tune(world, tmp_path / name, EVERY, "train.keep_best=true", *changes)
        weights = (tmp_path / name / "model" / "model.safetensors").read_bytes()
        found[name] = (scores["best_step"], scores["accuracy"], steps(tmp_path / name), weights)
    assert found["seldom"] == found["clock"] == found["steps"]
    assert found["clock"][:2] == (6, 0.8)  # the earlier of the two, although step 12 has a checkpoint too
    assert (tmp_path / "clock" / "checkpoints" / "step-00000012").is_dir()


def test_threshold_is_restored_with_its_model(world, tmp_path, monkeypatch) -> None:
    answers = [{"text": [], "answer_start": []}, {"text": ["a file"], "answer_start": [6]}]
    asked = [{"question": "what is it", "context": f"it is a file of {n} numbers", "id": str(n)} for n in range(16)]
    rows = [json.dumps({**row, "answers": answers[n % 2]}) for n, row in enumerate(asked)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    settings = ["train.steps=20", "train.batch_size=8", "train.learning_rate=3e-3", "data.max_length=32"]
    config = override(FinetuneConfig("answer"), [*settings, EVERY, "train.keep_best=true", "train.keep=20"])
    real, scores = DevScores.evaluate, iter([0.5, 0.9, *[0.1] * 8])

    def evaluate(*arguments):
        real(*arguments)
        return {"f1": next(scores)}

    monkeypatch.setattr(DevScores, "evaluate", evaluate)
    data = tmp_path / "rows.jsonl"
    found = finetune(config, world / "run", data, tmp_path / "out", dev=data, device="cpu")
    assert found["best_step"] == 4
    kept, best = (read_json(tmp_path / "out" / n / "bertsmith.json") for n in ("model", "checkpoints/step-00000004"))
    assert kept == best
    last = read_json(tmp_path / "out" / "checkpoints/step-00000020" / "bertsmith.json")
    assert last["limits"]["threshold"] != best["limits"]["threshold"]


def test_pretraining_keeps_its_best_model(world, tmp_path) -> None:
    changes = [*TINY, "train.steps=12", "train.batch_size=8", "data.max_length=32", "train.learning_rate=1"]
    changes += [
        "train.warmup=1",
        "train.evaluate_every=2",
        "train.keep_best=true",
        "train.keep=20",
        "data.held_out=0.3",
    ]
    found = pretrain(override(recipe("bert-tiny"), changes), world / "shards", tmp_path / "run", device="cpu")
    losses = {r["step"]: r["dev_mlm_loss"] for r in runlog.read(tmp_path / "run") if "dev_mlm_loss" in r}
    best = min(losses, key=losses.__getitem__)
    assert found["mlm_loss"] == losses[best]
    assert found["best_step"] == best != 12


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["train.patience=2"], "train.evaluate_every"),
        (["train.keep_best=true"], "train.evaluate_every"),
        (["train.patience=0", EVERY], "at least 1"),
        (["train.patience=2", EVERY, "data.dev_share=0"], "--dev"),
        (["train.keep_best=true", EVERY, "data.dev_share=0"], "--dev"),
    ],
)
def test_early_stopping_without_scores_is_refused(world, tmp_path, changes: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        tune(world, tmp_path / "out", *changes, dev=None)
    assert not (tmp_path / "out").exists()


def test_dev_rows_are_predicted_once_by_the_model_that_is_kept(world, tmp_path, scored, monkeypatch) -> None:
    real, asked = Predictor.predict_rows, []

    def predict_rows(self, rows):
        asked.append(len(rows))
        return real(self, rows)

    monkeypatch.setattr(Predictor, "predict_rows", predict_rows)
    scores = tune(world, tmp_path / "last")
    assert asked == [10]  # the predictions of the evaluation are written
    _, lines = read_dev_predictions(tmp_path / "last")
    assert sum(line["gold"] == line["predicted"] for line in lines) * 10 == scores["accuracy"]
    asked.clear()
    scored(0.9, *[0.5] * 9)
    tune(world, tmp_path / "best", EVERY, "train.keep_best=true")
    assert asked == [10] * 11  # ten evaluations, and one more by the best model, which is not the last

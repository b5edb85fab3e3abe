"""Several seeds and grid search: the runs, the summary, and the model that is chosen on dev."""

import json
import shutil
from pathlib import Path
from statistics import mean, median, stdev

import numpy as np
import pytest
from safetensors.torch import load_file

from bertsmith.config import override
from bertsmith.errors import Diverged, UserError
from bertsmith.finetuning import protocols
from bertsmith.finetuning.protocols import find_grid, finetune_many, settings_of, summarise
from bertsmith.finetuning.run import FinetuneConfig
from bertsmith.inference.engines import TorchEngine
from bertsmith.inference.predictor import Predictor
from bertsmith.tasks.task import find_task
from bertsmith.training.run import read_checked

QUICK = ["train.steps=4", "train.batch_size=8", "train.learning_rate=1e-3", "data.max_length=16"]


def config(*changes: str, task: str = "classify") -> FinetuneConfig:
    return override(FinetuneConfig(task), [*QUICK, *changes])


def many(world: Path, out: Path, *changes: str, **options):
    data = {"model": world / "run", "data": world / "train.csv", "dev": world / "dev.csv"}
    return finetune_many(config(*changes), out=out, device="cpu", **{**data, **options})


def test_grids_of_the_paper() -> None:
    general = settings_of(find_grid("paper", "rte"))
    assert len(general) == 2 * 3 * 3
    assert {"train.batch_size": 16, "train.learning_rate": 3e-5, "train.epochs": 4} in general
    assert [s["train.learning_rate"] for s in settings_of(find_grid("glue", "rte"))] == [5e-5, 4e-5, 3e-5, 2e-5]
    (squad2,) = settings_of(find_grid("paper", "squad2"))
    assert squad2 == {"train.batch_size": 48, "train.learning_rate": 5e-5, "train.epochs": 2}
    assert settings_of(find_grid(None, "rte")) == [{}]
    assert len(settings_of(find_grid("train.batch_size=8,16 train.learning_rate=1e-3,1e-4,1e-3", "rte"))) == 4


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ("papper", "did you mean 'paper'"),
        ("train.batch_size=", "write paper, glue"),
        ("train.batch_size=8 train.batch_size=16", "twice"),
        ("train.seed=1,2", "--seeds"),
        ("train.batchsize=8", "--grid train.batchsize: unknown setting; did you mean 'train.batch_size'"),
        ("train.learning_rate=1e-3,0.001", "learning_rate=0.001 is a setting that it has already"),
        ("train.batch_size=8,many", "not a number"),
        ("paper", "leave that out"),
    ],
)
def test_bad_grid_is_refused_before_anything_is_written(world, tmp_path, grid: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        many(world, tmp_path / "out", grid=grid)
    assert not (tmp_path / "out").exists()


def test_several_seeds_give_mean_deviation_median_and_a_model_chosen_on_dev(world, tmp_path) -> None:
    out = tmp_path / "out"
    summary = many(world, out, seeds=3)
    assert summary == read_checked(out / "summary.json")
    (setting,) = summary["settings"]
    scores = [run["scores"]["accuracy"] for run in setting["runs"]]
    assert [run["folder"] for run in setting["runs"]] == ["seed-1", "seed-2", "seed-3"]
    assert len({str(load_file(out / f"seed-{n}/model/model.safetensors")["classifier.weight"]) for n in (1, 2, 3)}) == 3
    figures = (mean(scores), stdev(scores), median(scores), max(scores), 3)
    assert tuple(setting[name] for name in ("mean", "deviation", "median", "best", "seeds")) == figures
    assert summary["chosen_on"] == "dev"
    best = out / summary["best"]["folder"] / "model"
    assert (out / "model" / "model.safetensors").read_bytes() == (best / "model.safetensors").read_bytes()
    assert Predictor.load(out).task.name == "classify"


@pytest.mark.slow
def test_parallel_runs_give_the_same_results(world, tmp_path, one_thread) -> None:
    assert many(world, tmp_path / "a", seeds=2) == many(world, tmp_path / "b", seeds=2, jobs=2)
    weights = [(tmp_path / n / "model" / "model.safetensors").read_bytes() for n in ("a", "b")]
    assert weights[0] == weights[1]
    with pytest.raises(UserError, match="--jobs must be at least 1"):
        many(world, tmp_path / "c", seeds=2, jobs=0)


def test_resumed_grid_skips_finished_runs_and_accepts_more_seeds(world, tmp_path, monkeypatch) -> None:
    out, grid = tmp_path / "out", "train.learning_rate=1e-3,1e-5"
    done = []

    def finetune(config, *arguments, **options):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append((config.train.learning_rate, config.train.seed))
        return protocols_finetune(config, *arguments, **options)

    protocols_finetune = protocols.finetune
    monkeypatch.setattr(protocols, "finetune", finetune)
    with pytest.raises(KeyboardInterrupt):
        many(world, out, seeds=2, grid=grid)
    assert not (out / "model").exists()
    with pytest.raises(UserError, match="--resume"):
        many(world, out, seeds=2, grid=grid)
    with pytest.raises(UserError, match=r"config.train.warmup"):
        many(world, out, "train.warmup=0.5", seeds=2, grid=grid, resume=True)
    first = done.copy()
    done.clear()
    summary = many(world, out, seeds=2, grid=grid, resume=True)
    assert [*first, *done] == [(1e-3, 1), (1e-3, 2), (1e-5, 1), (1e-5, 2)]
    assert [s["name"] for s in summary["settings"]] == ["learning_rate=1e-3", "learning_rate=1e-5"]
    done.clear()
    summary = many(world, out, seeds=3, grid=grid, resume=True)
    assert done == [(1e-3, 3), (1e-5, 3)]
    assert [s["seeds"] for s in summary["settings"]] == [3, 3]
    done.clear()
    shutil.rmtree(out / "model")
    assert many(world, out, seeds=3, grid=grid, resume=True) == summary
    assert not done
    assert (out / "model" / "config.json").exists()


def test_diverged_run_is_reported_and_excluded_from_the_mean(world, tmp_path, monkeypatch) -> None:
    real = protocols.finetune

    def finetune(config, *arguments, **options):
        if config.train.seed in failing:
            raise Diverged("the loss was bad")
        return real(config, *arguments, **options)

    monkeypatch.setattr(protocols, "finetune", finetune)
    failing = {2}
    summary = many(world, tmp_path / "out", seeds=3)
    assert summary["failed"] == [{"folder": "seed-2", "why": "the loss was bad"}]
    assert summary["settings"][0]["seeds"] == 2
    failing = {1, 2}
    with pytest.raises(UserError, match="no run has reached its end; seed-2: the loss was bad"):
        many(world, tmp_path / "none", seeds=2)


def test_dev_scores_that_are_not_finite_fail_only_their_run(world, tmp_path, monkeypatch) -> None:
    real, tuned = TorchEngine.run, []

    def run(self, examples):
        scores = real(self, examples)
        return [np.full_like(each, np.nan) for each in scores] if len(tuned) == 1 else scores

    def finetune(config, *arguments, **options):
        tuned.append(config.train.seed)
        return real_finetune(config, *arguments, **options)

    real_finetune = protocols.finetune
    monkeypatch.setattr(TorchEngine, "run", run)
    monkeypatch.setattr(protocols, "finetune", finetune)
    summary = many(world, tmp_path / "out", seeds=2)
    assert tuned == [1, 2]
    assert [failed["folder"] for failed in summary["failed"]] == ["seed-1"]
    assert "not finite numbers: training has diverged" in summary["failed"][0]["why"]
    assert summary["best"]["folder"] == "seed-2"


def test_model_of_the_same_task_keeps_its_output_layer(world, tmp_path) -> None:
    """Fine-tuning twice, as the paper does on TriviaQA and then SQuAD, passes the first run as `--model`."""
    many(world, tmp_path / "first")
    many(world, tmp_path / "second", "train.learning_rate=0", model=tmp_path / "first")
    first, second = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("first", "second"))
    assert all((first[name] == second[name]).all() for name in first)


def test_setting_is_chosen_by_its_mean_and_then_its_best_run() -> None:
    def runs(*values):
        return [{"seed": n, "folder": f"seed-{n}", "scores": {"accuracy": v}} for n, v in enumerate(values, 1)]

    rows = [{"setting": {"train.x": 1}, "runs": runs(0.9, 0.1)}, {"setting": {"train.x": 2}, "runs": runs(0.7, 0.8)}]
    summary = summarise(find_task("rte"), rows)
    assert summary["best"] == {"setting": "x=2", "seed": 2, "folder": "seed-2", "accuracy": 0.8, "of_runs": 4}
    assert summary["settings"][0]["best"] == 0.9
    alone = summarise(find_task("rte"), [{"setting": {}, "runs": runs(0.5)}])
    assert alone["settings"][0]["deviation"] is None


def test_settings_that_cannot_work_are_refused_before_anything_is_written(world, tmp_path) -> None:
    with pytest.raises(UserError, match="--dev"):
        many(world, tmp_path / "out", "data.dev_share=0", seeds=2, dev=None)
    with pytest.raises(UserError, match="at least 1"):
        many(world, tmp_path / "out", seeds=0)
    with pytest.raises(UserError, match="the model has 2 layers"):
        many(world, tmp_path / "out", "frozen_layers=3", seeds=2)
    assert not (tmp_path / "out").exists()


def test_too_few_rows_to_choose_by_are_refused_before_anything_is_written(world, tmp_path) -> None:
    """Two texts, however often they occur, leave none to hold out: the runs would have no scores."""
    rows = [("a good film", "+"), ("a bad film", "-")] * 12
    with pytest.raises(UserError, match="too few rows to hold some out; give --dev"):
        many(world, tmp_path / "out", data=rows, dev=None, seeds=2)
    assert not (tmp_path / "out").exists()


def test_command_prints_that_the_choice_was_made_on_dev(world, tmp_path, run_command) -> None:
    flags = [part for change in QUICK for part in ("--set", change)]
    data = ["--model", world / "run", "--data", world / "train.csv", "--dev", world / "dev.csv", "--device", "cpu"]
    arguments = ["finetune", "classify", *data, "--out", tmp_path / "out", "--seeds", 2, *flags]
    printed = " ".join(run_command(*arguments)[1].split())
    assert "chosen on dev" in printed
    assert "deviation" in printed
    found = json.loads(run_command(*arguments, "--resume", "--json")[1])
    assert found["settings"][0]["seeds"] == 2
    code, _, errors = run_command(*arguments, "--grid", "train.steps=1,2")
    assert (code, "leave one of them out" in errors) == (2, True)

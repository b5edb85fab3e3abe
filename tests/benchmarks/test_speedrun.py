"""The experiments of the speedrun run through with tiny shapes, and their tables are written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.testing import assert_close

from benchmarks import speedrun, tuning
from benchmarks.corpora import train_tokenizers
from benchmarks.family_toy import write_toy_data
from benchmarks.record import RESULTS, earlier
from benchmarks.speedrun_pages import PAGE, minutes_of, result_of, tables, write_page
from benchmarks.speedrun_table import EXPERIMENTS, WORDPIECE, chain, lacking, pretraining_config
from benchmarks.speedrun_variants import VARIANTS
from benchmarks.tuning import Variation, disagreement, varied
from bertsmith.errors import Interrupted, UserError
from bertsmith.finetuning.benchmark import protocol
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.finetuning.task_data import Data
from bertsmith.model.heads import TaskModel
from bertsmith.model.pooling import Pooler
from bertsmith.recipes import recipe

pytestmark = pytest.mark.usefixtures("one_thread")
RUNS = {name: experiment for name, experiment in EXPERIMENTS.items() if not lacking(name)}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_toy_data(tmp_path_factory.mktemp("speedrun") / "data")
    train_tokenizers(folder, [WORDPIECE], 150)
    return folder


def options(data: Path, folder: Path) -> list[str]:
    given = ["--data", str(data), "--work", str(folder / "work"), "--results", str(folder), "--smoke", "--seeds", "1"]
    return [*given, "--jobs", "1", "--device", "cpu", "--rows", "30"]


def results_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "speedrun.json").read_text())["results"]


def test_an_experiment_runs_and_its_encoder_is_fine_tuned_in_other_ways(data: Path, tmp_path: Path) -> None:
    given = options(data, tmp_path)
    speedrun.main(["run", "mask-30", "--minutes", "1", "--tasks", "sst2", "rte", "--resume", *given])
    speedrun.main(["tune", "mask-30", "mean-direct", "one-segment", "--minutes", "1", "--tasks", "rte", *given])
    speedrun.main(["tune", "mask-30", "one-segment", "--minutes", "1", "--tasks", "mrpc", *given])
    results = results_in(tmp_path)
    run, tuned = results["pretraining"]["mask-30 1 min"], results["tuning"]["mask-30 1 min: protocol, 30 rows"]
    assert (run["steps"], run["settings"]["data"]["masking"]["rate"]) == (3, 0.3)
    assert run["masked_words"]["bits_per_byte"] > 0
    assert (tuned["tasks"].keys(), tuned["rows"], tuned["runs_of_all"]) == ({"sst2", "rte"}, 30, 2)
    part = (tmp_path / "work" / "speedrun" / "tasks" / "sst2-30.tsv").read_text().splitlines()
    whole = (data / "glue" / "SST-2" / "train.tsv").read_text().splitlines()
    assert part == [whole[0], *(whole[1 + number * 40 // 30] for number in range(30))]
    assert results["tuning"].keys() >= {
        f"mask-30 1 min: {variant}, 30 rows" for variant in ("mean-direct", "one-segment")
    }
    assert results["tuning"]["mask-30 1 min: one-segment, 30 rows"]["tasks"].keys() == {"rte", "mrpc"}  # of two calls
    copied = load_file(tmp_path / "work/speedrun/mask-30-1-min/model-one-segment/model.safetensors")
    first, second = next(tensor for name, tensor in copied.items() if name.endswith(speedrun.SEGMENTS))
    assert first.equal(second)
    page = tmp_path / "experiments.md"
    page.write_text(PAGE.read_text())
    write_page(results, page)
    assert "| 30 % masked (`data.masking.rate=0.3`) | `run mask-30 --minutes 1` | 0 M tokens" in page.read_text()
    assert "`tune mask-30 mean-direct --minutes 1 --rows 30`" in page.read_text()


def test_a_stopped_call_keeps_the_tasks_whose_seeds_are_done(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["run", "mask-30", "--minutes", "1", "--tasks", "sst2", "rte", *options(data, tmp_path), "--seeds", "2"]
    once, done = tuning.tune, []

    def stopped(config: FinetuneConfig, *others: Any) -> None:
        if len(done) == 3:
            raise Interrupted("stopped", 143)
        once(config, *others)
        done.append(config.task)

    with monkeypatch.context() as patched:
        patched.setattr(tuning, "tune", stopped)
        with pytest.raises(Interrupted):
            speedrun.main(given)
    assert done == ["sst2", "sst2", "rte"]  # the longest runs first
    kept = results_in(tmp_path)["tuning"]["mask-30 1 min: protocol, 30 rows"]
    assert kept["tasks"].keys() == {"sst2"}
    assert "runs_of_all" not in kept
    speedrun.main(given)
    kept = results_in(tmp_path)["tuning"]["mask-30 1 min: protocol, 30 rows"]
    assert (kept["tasks"].keys(), kept["runs_of_all"]) == ({"sst2", "rte"}, 4)


def test_tasks_of_earlier_calls_with_fewer_seeds_stay() -> None:
    scores = {"cola": {"values": [1.0]}, "rte": {"values": [1.0, 2.0]}, "mrpc": {"values": [1.0]}}
    assert tuning.whole(scores, ["rte", "mrpc"], 2).keys() == {"cola", "rte"}


def test_differences_are_those_from_the_base() -> None:
    facts = {"minutes": 2.0, "changed": [], "tokens": 1e8, "tokens_per_second": 8e5}
    words = {"base": 2.5, "mask-30": 2.4, "bytes": 2.7, "books": 2.9}
    runs = {
        f"{name} 2 min": {**facts, "experiment": name, "corpus_name": EXPERIMENTS[name].corpus,
                          "masked_words": {"loss": loss, "bits_per_byte": loss / 2, "of": "the model"}}
        for name, loss in words.items()
    }  # fmt: skip
    scores = {"base": 60.0, "mask-30": 58.5}
    tuned = {f"{name} 2 min: protocol": {"glue5": score, "tasks": {"rte": {"median": score, "failed": 0}}}
             for name, score in scores.items()}  # fmt: skip
    results = {"pretraining": runs, "tuning": tuned}
    expected = "100 M tokens (800 k/s), loss 2.400 (−0.100); **GLUE-5 58.5** (−1.5), RTE 58.5 (−1.5)"
    assert result_of("mask-30 2 min", results) == expected
    assert "(" not in result_of("base 2 min", results).split("loss")[1]
    assert result_of("bytes 2 min", results).endswith("bits per byte 1.350 (+0.100)")  # another vocabulary
    assert result_of("books 2 min", results).endswith("bits per byte 1.450")  # another text


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, experiment in RUNS.items() if experiment.corpus == WORDPIECE])
def test_every_experiment_trains(name: str, data: Path, tmp_path: Path) -> None:
    speedrun.main(["run", name, "--tasks", "rte", *options(data, tmp_path)])
    assert results_in(tmp_path)["tuning"][f"{name} 2 min: protocol, 30 rows"]["tasks"]["rte"]["values"]


@pytest.mark.slow
def test_an_encoder_is_fine_tuned_in_every_way(data: Path, tmp_path: Path) -> None:
    given = options(data, tmp_path)
    speedrun.main(["run", "base", "--tasks", "cola", *given])
    speedrun.main(["tune", "base", *VARIANTS, "--tasks", "cola", "rte", *given])
    assert {found["variant"] for found in results_in(tmp_path)["tuning"].values()} == set(VARIANTS)


def test_every_experiment_changes_what_it_says() -> None:
    assert len(RUNS) > 50
    configs = {name: pretraining_config(name, 2, [], smoke=False) for name in RUNS}
    for name, experiment in RUNS.items():
        config, base = configs[name], configs[experiment.base or name]
        assert config.train.hours == 2 / 60
        changed = replace(config, recipe="") != replace(base, recipe="")
        assert changed == bool(experiment.changes)
        assert changed or not experiment.base or experiment.corpus != WORDPIECE
    assert chain("electra-slow") == ["base", "post-norm", "electra", "electra-slow"]
    assert configs["electra-slow"].objective.kind == "replaced-token"
    assert pretraining_config("base", 2, ["train.seed=5"], smoke=False).train.seed == 5
    with pytest.raises(UserError, match="rotary cannot run yet: it needs a family that saves this alone"):
        pretraining_config("rotary", 2, [], smoke=False)


def test_the_recipe_is_an_experiment() -> None:
    """What is measured under its name is what `bertsmith pretrain speedrun` trains."""
    made, measured = recipe("speedrun"), pretraining_config("speedrun", 15, ["train.evaluate_every=0.1"], smoke=False)
    assert replace(measured, train=replace(measured.train, workers=made.train.workers)) == made


def test_a_setting_that_the_package_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERIMENTS, "new", replace(EXPERIMENTS["mask-30"], changes=("data.masking.newest=1",)))
    assert lacking("new") == "the setting data.masking.newest"
    assert lacking("mask-30") == ""


def test_every_variant_changes_the_protocol() -> None:
    usual = protocol("rte", Data(Path()))
    for name, variant in VARIANTS.items():
        changed = protocol("rte", Data(Path()), variant.settings) != usual or variant.variation != Variation()
        assert (changed or variant.one_segment) == (name != "protocol")


def test_another_state_is_classified_only_inside() -> None:
    usual = TaskModel._pooled, Pooler.forward, TaskModel.forward
    with varied(Variation("mean", dense=False, agreement=1.0)):
        assert TaskModel._pooled is not usual[0]
        assert Pooler.forward is not usual[1]
        assert TaskModel.forward is not usual[2]
    assert (TaskModel._pooled, Pooler.forward, TaskModel.forward) == usual


def test_two_passes_disagree_by_what_dropout_changes() -> None:
    logits = torch.tensor([[1.0, -1.0], [0.5, 2.0]])
    assert disagreement(logits, logits, "single") == 0
    ours, theirs = (F.log_softmax(x, -1) for x in (logits, logits.flip(-1)))
    expected = ((ours.exp() - theirs.exp()) * (ours - theirs)).sum() / 2  # half of both divergences
    assert_close(disagreement(logits, logits.flip(-1), "single"), expected)
    assert disagreement(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.5], [2.0]]), "regression") == 0.25


def test_the_page_is_honest_and_the_plan_learns(tmp_path: Path) -> None:
    page = tmp_path / "experiments.md"
    page.write_text(PAGE.read_text().replace("Not measured yet.", "…"))
    write_page({}, page)
    assert page.read_text().count("Not measured yet.") == 2
    measured = {"tuning": {"base": {"seconds_of_all": 60, "runs_of_all": 15}}}
    assert minutes_of(2, 3, measured) == pytest.approx(2 + 0.25 + 1)


def test_every_result_on_the_page_has_a_verdict() -> None:
    for name, (header, *rows) in tables(earlier(speedrun.NAME, RESULTS)).items():
        assert header[-1] == "verdict"
        assert rows
        assert [row[1] for row in rows if not row[-1]] == [], f"write a verdict ({name})"


def test_a_setting_that_is_given_twice_is_shown_once() -> None:
    run = {"experiment": "electra-small", "minutes": 4.0, "changed": [], "corpus_name": WORDPIECE, "tokens": 1e8,
           "tokens_per_second": 4e5, "masked_words": None}  # fmt: skip
    (asks, *_) = tables({"pretraining": {"electra-small 4 min": run}})["experiments"][1]
    assert "`objective.generator_layers=1`" in asks
    assert asks.count("objective.generator_layers=") == 1

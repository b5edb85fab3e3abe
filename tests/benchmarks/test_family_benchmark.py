"""The benchmark of the families runs through with tiny shapes, for every family that it measures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from benchmarks import families, family_cpu, family_quality
from benchmarks.family_pages import PAGE, write_page
from benchmarks.family_quality import EPOCHS, TASKS, best_teacher
from benchmarks.family_speed import MEASURED
from benchmarks.family_table import FAMILIES, quality_config
from benchmarks.family_toy import write_toy_data
from benchmarks.record import merged
from bertsmith.errors import Interrupted
from bertsmith.inference.engines import int8_backends
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.kinds import build_objective
from bertsmith.training.optim import make_optimizers


def results_in(folder: Path) -> dict:
    return json.loads((folder / "families.json").read_text())["results"]


@pytest.mark.slow
def test_speed_measures_every_family_beside_its_peer(tmp_path: Path) -> None:
    families.main(["speed", "--smoke", "--results", str(tmp_path)])
    measured = results_in(tmp_path)["speed"]  # beside what was measured before
    found = {name.removesuffix(", smoke"): entry for name, entry in measured.items() if name.endswith(", smoke")}
    assert list(found) == list(MEASURED)
    flops = {name: entry["bertsmith"]["mflop_per_token"] for name, entry in found.items()}
    assert flops["distilbert, no teacher"] < flops["bert"] < flops["electra"]  # a generator is counted
    assert flops["distilbert, no teacher"] < flops["distilbert"]  # and a teacher
    assert all(entry["ratio"] > 0 for entry in found.values())


QUICK = ["bert", "distilbert"]  # a student, and its teacher before it


SLOW = ["roberta", "albert", "electra", "deberta", "deberta-v3", "modern", "gpt"]
KIND_SIZES = {"wordpiece": "150", "bytes": "300", "unigram": "100"}


@pytest.mark.parametrize(
    ("names", "kinds", "tasks"), [(QUICK, 1, ["cola"]), pytest.param(SLOW, 3, list(TASKS), marks=pytest.mark.slow)]
)
def test_quality_pretrains_and_finetunes(names: list[str], kinds: int, tasks: list[str], tmp_path: Path) -> None:
    data = write_toy_data(tmp_path / "data")
    work = ["--data", str(data), "--work", str(tmp_path / "work"), "--smoke", "--results", str(tmp_path)]
    for kind, entries in list(KIND_SIZES.items())[:kinds]:
        families.main(["tokenizers", kind, "--vocabulary", entries, *work])
    families.main(["quality", *names, "--seeds", "1", "--jobs", "1", "--tasks", *tasks, "--device", "cpu", *work])
    quality = results_in(tmp_path)["quality"]
    for name in names:
        run, words = quality[name]["pretraining"], quality[name]["pretraining"]["masked_words"]
        assert run["steps"] == 3
        assert run["memory_gb"] > 0
        assert (words is None) == (name == "gpt")
        assert not words or words["bits_per_byte"] > 0
        assert not words or words["of"] == ("the generator" if name in ("electra", "deberta-v3") else "the model")
        assert {task: len(found["values"]) for task, found in quality[name]["tasks"].items()} == dict.fromkeys(tasks, 1)
    assert quality[names[-1]]["pretraining"].get("teacher") == ("bert" if names == QUICK else None)


def test_a_family_whose_fine_tuning_is_stopped_keeps_the_tasks_that_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, once, done = write_toy_data(tmp_path / "data"), family_quality.tune, []
    work = ["--data", str(data), "--work", str(tmp_path / "work"), "--smoke", "--results", str(tmp_path)]
    families.main(["tokenizers", "wordpiece", "--vocabulary", "150", *work])

    def stopped(*given: Any) -> None:
        if len(done) == 3:
            raise Interrupted("stopped", 143)
        once(*given)
        done.append(given[0].task)

    monkeypatch.setattr(family_quality, "tune", stopped)
    with pytest.raises(Interrupted):
        families.main(
            ["quality", "bert", "--seeds", "2", "--jobs", "1", "--tasks", "cola", "rte", "--device", "cpu", *work]
        )
    assert done == ["cola", "cola", "rte"]
    kept = results_in(tmp_path)["quality"]["bert"]
    assert kept["tasks"].keys() == {"cola"}
    assert "mean" not in kept


@pytest.mark.slow
def test_a_run_ends_after_a_number_of_tokens_and_has_its_own_place(tmp_path: Path) -> None:
    data = write_toy_data(tmp_path / "data")
    work = ["--data", str(data), "--work", str(tmp_path / "work"), "--smoke", "--results", str(tmp_path)]
    families.main(["tokenizers", "wordpiece", "--vocabulary", "150", *work])
    given = ["--seeds", "1", "--jobs", "1", "--tasks", "rte", "--device", "cpu", *work]
    families.main(["quality", "bert", "--tokens", "0.02", *given, "--seeds", "0"])
    assert results_in(tmp_path)["quality at equal tokens"]["bert"]["tasks"] == {}
    for name in QUICK:  # the teacher is the one with as many tokens
        families.main(["quality", name, "--tokens", "0.02", *given])
    found = results_in(tmp_path)["quality at equal tokens"]
    for name in QUICK:
        assert found[name]["pretraining"]["tokens"] == pytest.approx(20_000, rel=0.03)
        assert (tmp_path / "work/pretrained" / f"{name}-0.02M").is_dir()
    families.main(["quality", "bert", "--tokens", "0.02", *given, "--tasks", "mrpc"])
    tasks = results_in(tmp_path)["quality at equal tokens"]["bert"]["tasks"]
    assert tasks.keys() == {"rte", "mrpc"}
    assert {scores["rate"] for scores in tasks.values()} == {1e-4}


def test_all_families_get_the_same_shape() -> None:
    for name in FAMILIES:
        config = quality_config(name, 4, smoke=False, changes=[])
        model = config.model
        assert (model.hidden_size, model.num_layers) == (512, 4 if name == "distilbert" else 8)
        assert config.train.learning_rate == (0.02 if name == "modern" else 0.01)
        assert config.train.learning_rate * config.train.weight_decay == pytest.approx(0.002)
        layer = 3 * model.intermediate_size if model.gated else 2 * model.intermediate_size
        assert layer == pytest.approx(8 * 512, rel=0.02)
    assert quality_config("bert", 4, smoke=False, changes=[], steps=7).train.hours is None


def test_muon_trains_the_projections_of_distances_and_no_table() -> None:
    config = quality_config("deberta-v3", 4, smoke=True, changes=["model.relative_projections=true"])
    model = build_objective(Encoder(replace(config.model, vocab_size=90)), config.objective)
    muon, adamw = make_optimizers(model, config.train)
    names = {parameter: name for name, parameter in model.named_parameters()}
    by_muon, others = ({names[p] for group in o.param_groups for p in group["params"]} for o in (muon, adamw))
    assert {name for name in by_muon if "relative" in name} == {
        name for name in names.values() if name.endswith(("relative_keys.weight", "relative_queries.weight"))
    }
    tables = {name for name in names.values() if name.endswith(("delta", "table.weight", "positions.weight"))}
    assert len(tables) == 4  # two tables of distances, the mask decoder's positions, the discriminator's own tokens
    assert tables <= others


def test_predictions_of_every_family_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_cpu, "LENGTHS", (8, 16))
    monkeypatch.setattr(family_cpu, "BATCHES", (1, 2))
    families.main(["cpu", "--smoke", "--threads", "1", "--results", str(tmp_path)])
    found = results_in(tmp_path)["cpu"]
    precisions = ("float32", "int8") if int8_backends() else ("float32",)
    assert found.keys() >= {f"{name}, {precision}" for name in FAMILIES for precision in precisions}
    assert found["distilbert, float32"]["layers"] == 1


def test_results_of_several_calls_are_merged() -> None:
    old = {"speed": {"bert": {"ratio": 1}, "roberta": {"ratio": 2}}}
    new = {"speed": {"roberta": {"ratio": 3}}, "quality": {"bert": {}}}
    both = {"speed": {"bert": {"ratio": 1}, "roberta": {"ratio": 3}}, "quality": {"bert": {}}}
    assert merged(old, new) == both


def test_the_teacher_is_the_best_family_that_predicts_masked_words() -> None:
    scores = {"bert": 60.0, "roberta": 61.0, "electra": 70.0}
    assert best_teacher({name: {"mean": mean} for name, mean in scores.items()}) == "roberta"


def test_the_tables_are_written_into_the_page(tmp_path: Path) -> None:
    page = tmp_path / "families.md"
    page.write_text(PAGE.read_text())
    write_page({}, page)
    assert page.read_text().count("Not measured yet.") == 4
    ours = {"tokens_per_second": 800_000, "tflops": 400.0, "memory_gb": 9.5}
    theirs = {"tokens_per_second": 500_000, "memory_gb": 20.0}
    entry = {"bertsmith": ours, "transformers": theirs, "ratio": 1.6, "tflops_of_bert": 1.0}
    write_page({"speed": {"roberta, base": entry}}, page)
    assert "| roberta, base | 800,000 | 400 | 1.00 | 9.5 | 500,000 | 20 | 1.60 |" in page.read_text()
    assert page.read_text().count("Not measured yet.") == 3
    scores = {task: {"mean": 50.0, "deviation": 1.0} for task in EPOCHS}
    run = {
        "tokens": 4e8,
        "tokens_per_second": 1_900_000,
        "memory_gb": 3.25,
        "masked_words": {"loss": 2.5, "bits_per_byte": 0.8},
    }
    part = {"pretraining": {**run, "masked_words": None}, "tasks": {"rte": scores["rte"]}, "mean": 50.0}
    whole = {"pretraining": run, "tasks": {**scores, "conll2003": {"mean": 80.0, "deviation": 0.5}}, "mean": 50.0}
    times = {f"{batch} × {length}": length / 10 for batch in (1, 16) for length in (32, 128, 512)}
    cpu = {"bert, int8": {"parameters": 4.2e7, "milliseconds": times}}
    write_page({"quality": {"gpt": part, "bert": whole}, "cpu": cpu}, page)
    lines = page.read_text().splitlines()
    five = " | ".join(["50.0 ± 1.0"] * 5)
    number = lines.index(f"| bert | 400 | 1,900,000 | 3.2 | 2.50 | 0.80 | {five} | 50.00 | 80.0 ± 0.5 |")
    assert lines[number + 1] == "| gpt | 400 | 1,900,000 | 3.2 | – | – | – | – | – | – | 50.0 ± 1.0 | – | – |"
    assert "| bert, int8 | 42 | 3.2 | 12.8 | 51.2 | 5,000 | 1,250 | 312 |" in lines

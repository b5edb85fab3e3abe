"""The benchmark of the families runs through with tiny shapes, for every family that it measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import families
from benchmarks.family_pages import PAGE, write_page
from benchmarks.family_quality import best_teacher, task_scores
from benchmarks.family_speed import MEASURED
from benchmarks.family_toy import write_toy_data
from benchmarks.record import merged


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


@pytest.mark.parametrize(
    ("names", "kinds"), [(QUICK, 1), pytest.param(["roberta", "albert", "electra"], 3, marks=pytest.mark.slow)]
)
def test_quality_pretrains_and_finetunes(names: list[str], kinds: int, tmp_path: Path) -> None:
    data = write_toy_data(tmp_path / "data")
    work = ["--data", str(data), "--work", str(tmp_path / "work"), "--smoke", "--results", str(tmp_path)]
    for kind, entries in list({"wordpiece": "150", "bytes": "300", "unigram": "100"}.items())[:kinds]:
        families.main(["tokenizers", kind, "--vocabulary", entries, *work])
    families.main(["quality", *names, "--seeds", "1", "--jobs", "1", "--tasks", "cola", "--device", "cpu", *work])
    quality = results_in(tmp_path)["quality"]
    for name in names:
        run, tasks = quality[name]["pretraining"], quality[name]["tasks"]
        assert run["steps"] == 3
        assert run["masked_words"]["bits_per_byte"] > 0
        assert run["masked_words"]["of"] == ("the generator" if name == "electra" else "the model")
        assert len(tasks["cola"]["values"]) == 1
    assert quality[names[-1]]["pretraining"].get("teacher") == ("bert" if names == QUICK else None)


def test_results_of_several_calls_are_merged() -> None:
    old = {"speed": {"bert": {"ratio": 1}, "roberta": {"ratio": 2}}}
    new = {"speed": {"roberta": {"ratio": 3}}, "quality": {"bert": {}}}
    both = {"speed": {"bert": {"ratio": 1}, "roberta": {"ratio": 3}}, "quality": {"bert": {}}}
    assert merged(old, new) == both


def test_the_better_rate_counts(tmp_path: Path) -> None:
    for rate, values in (("0.0001", (50.0, 52.0)), ("0.0003", (60.0, 64.0))):
        for seed, value in enumerate(values, 1):
            (tmp_path / rate / str(seed)).mkdir(parents=True)
            (tmp_path / rate / str(seed) / "scores.json").write_text(json.dumps({"scores": {"accuracy": value}}))
    found = task_scores("rte", tmp_path)
    assert (found["rate"], found["mean"], found["values"]) == (3e-4, 62.0, [60.0, 64.0])
    assert found["rates"]["0.0001"] == [50.0, 52.0]


def test_the_teacher_is_the_best_family_that_predicts_masked_words() -> None:
    scores = {"bert": 60.0, "roberta": 61.0, "electra": 70.0}
    assert best_teacher({name: {"tasks": {"rte": {"mean": mean}}} for name, mean in scores.items()}) == "roberta"


def test_the_tables_are_written_into_the_page(tmp_path: Path) -> None:
    page = tmp_path / "families.md"
    page.write_text(PAGE.read_text())
    write_page({}, page)
    assert page.read_text().count("Not measured yet.") == 2
    ours = {"tokens_per_second": 800_000, "tflops": 400.0, "memory_gb": 9.5}
    theirs = {"tokens_per_second": 500_000, "memory_gb": 20.0}
    entry = {"bertsmith": ours, "transformers": theirs, "ratio": 1.6, "tflops_of_bert": 1.0}
    write_page({"speed": {"roberta, base": entry}}, page)
    assert "| roberta, base | 800,000 | 400 | 1.00 | 9.5 | 500,000 | 20 | 1.60 |" in page.read_text()
    assert page.read_text().count("Not measured yet.") == 1

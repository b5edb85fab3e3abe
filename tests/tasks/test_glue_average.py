"""GLUE's averages: published scores give the published averages; without all tasks there is no average."""

import json
import shutil
from pathlib import Path

import pytest

from bertsmith.config import override, read_json
from bertsmith.errors import UserError
from bertsmith.finetuning.protocols import glue
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.tasks.glue_average import GlueScore, average, averages, task_score

# The paper's table 1: MNLI m/mm, QQP, QNLI, SST-2, CoLA, STS-B, MRPC, RTE, and the average that it gives.
TABLE = {
    "OpenAI GPT": ((82.1, 81.4, 70.3, 87.4, 91.3, 45.4, 80.0, 82.3, 56.0), 75.1),
    "BERT-Base": ((84.6, 83.4, 71.2, 90.5, 93.5, 52.1, 85.8, 88.9, 66.4), 79.6),
    "BERT-Large": ((86.7, 85.9, 72.1, 92.7, 94.9, 60.5, 86.5, 89.3, 70.1), 82.1),
}


def scores(values) -> dict[str, dict[str, float]]:
    """A row of the table as scores; the second metric of a task, which the paper does not show, is the same."""
    m, mm, qqp, qnli, sst2, cola, stsb, mrpc, rte = values
    both = lambda value: {"f1": value, "accuracy": value}  # noqa: E731
    return {
        "mnli": {"accuracy": m, "mismatched_accuracy": mm},
        "qqp": both(qqp),
        "mrpc": both(mrpc),
        "stsb": {"spearman": stsb, "pearson": stsb},
        "cola": {"matthews": cola, "accuracy": 0.0},
        **{task: {"accuracy": value} for task, value in (("qnli", qnli), ("sst2", sst2), ("rte", rte))},
    }


@pytest.mark.parametrize("name", TABLE)
def test_the_papers_scores_give_its_average(name: str) -> None:
    values, expected = TABLE[name]
    found = average(scores(values))
    assert round(found["paper_average"], 1) == expected
    assert found["average"] == pytest.approx(((values[0] + values[1]) / 2 + sum(values[2:])) / 8)
    assert not found["absent"]


def test_the_score_of_a_task_is_the_mean_of_its_metrics() -> None:
    assert task_score("mrpc", {"f1": 90.0, "accuracy": 80.0}) == pytest.approx(85)
    assert task_score("stsb", {"pearson": 90.0, "spearman": 80.0}) == pytest.approx(85)
    assert task_score("cola", {"matthews": 50.0, "accuracy": 80.0}) == 50
    assert task_score("mnli", {"accuracy": 80.0, "mismatched_accuracy": 70.0}) == pytest.approx(75)
    assert task_score("mnli", {"accuracy": 80.0}) is None


def test_there_is_no_average_when_a_task_is_missing() -> None:
    values = scores(TABLE["BERT-Base"][0])
    del values["rte"], values["mnli"]["mismatched_accuracy"]
    found = average({**values, "wnli": {"accuracy": 10.0}})
    assert found["absent"] == ["mnli", "rte"]
    assert found["average"] is None
    assert found["paper_average"] is None
    assert "wnli" not in found["tasks"]


def test_small_tasks_are_averaged_by_their_starting_model() -> None:
    values = scores(TABLE["BERT-Base"][0])
    runs = [GlueScore(task, each, "pretrain") for task, each in values.items()]
    better = [GlueScore(task, dict.fromkeys(values[task], 95.0), "mnli") for task in ("rte", "mrpc", "stsb")]
    both = averages([*runs, *better])
    assert both["alone"] == average(values)
    assert both["from_mnli"]["average"] - both["alone"]["average"] == pytest.approx((3 * 95 - 66.4 - 88.9 - 85.8) / 8)
    assert averages(runs)["from_mnli"]["absent"] == ["mrpc", "stsb", "rte"]
    assert both["left_out"] == []
    strange = [GlueScore("sst2", {"accuracy": 10.0}, "mnli"), GlueScore("rte", {"accuracy": 10.0}, "qnli")]
    expected = {**both, "left_out": ["sst2 from mnli", "rte from qnli"]}
    assert averages([*runs, *better, *strange]) == expected


def fine_tune(world: Path, out: Path, task: str, labels: tuple[str, ...], start: Path) -> None:
    data = out.parent.parent / f"{task}-data"
    data.mkdir(exist_ok=True)
    lines = ["sentence1\tsentence2\tlabel", *(f"a file\tthe list {n}\t{labels[n % len(labels)]}" for n in range(12))]
    for name in ("train", "dev", "dev_matched", "dev_mismatched"):
        (data / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    settings = ["train.steps=2", "train.batch_size=8", "data.max_length=16"]
    finetune(override(FinetuneConfig(task), settings), start, data, out, device="cpu")


def test_runs_are_averaged_by_their_start_task(world, tmp_path, run_command) -> None:
    runs = tmp_path / "runs"
    fine_tune(world, runs / "mnli", "mnli", ("entailment", "neutral", "contradiction"), world / "run")
    fine_tune(world, runs / "rte", "rte", ("entailment", "not_entailment"), world / "run")
    fine_tune(world, runs / "rte-from-mnli", "rte", ("entailment", "not_entailment"), runs / "mnli")
    unnamed = shutil.copytree(runs / "mnli" / "model", tmp_path / "unnamed")
    (unnamed / "bertsmith.json").unlink()  # like a model of MNLI by another program
    fine_tune(world, runs / "rte-from-another", "rte", ("entailment", "not_entailment"), unnamed)
    names = ("mnli", "rte", "rte-from-mnli", "rte-from-another")
    starts = [read_json(runs / name / "run.json")["start_task"] for name in names]
    assert starts == ["pretrain", "pretrain", "mnli", "an unnamed task"]
    log = runs / "rte-from-mnli" / "metrics.jsonl"
    log.write_text(json.dumps({"step": 2, "dev_accuracy": 87.5, "scale": 100}) + "\n")
    found = glue([runs])
    assert found["left_out"] == ["rte from an unnamed task"]
    assert found["from_mnli"]["tasks"]["rte"] == 87.5
    assert found["alone"]["tasks"].keys() == {"mnli", "rte"}
    assert found["alone"]["tasks"]["rte"] != 87.5
    assert set(found["alone"]["absent"]) == {"cola", "sst2", "mrpc", "stsb", "qqp", "qnli"}
    assert glue([runs / "mnli", runs / "rte-from-mnli", runs / "rte"])["alone"] == found["alone"]
    shutil.copytree(runs / "rte", runs / "rte-again")
    with pytest.raises(UserError, match="are both rte"):
        glue([runs])
    with pytest.raises(UserError, match="no finished run of a GLUE task"):
        glue([world])

    code, printed, _ = run_command("glue", runs / "mnli", runs / "rte")
    assert not code
    assert "no average of 'each task alone': cola" in printed


def test_the_score_of_several_seeds_is_their_mean(tmp_path) -> None:
    folder = tmp_path / "sst2"
    values = {"seed-1": 0.8, "seed-2": 0.9}
    for name, value in values.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "dev_accuracy": value}) + "\n")
    (folder / "model").mkdir()
    settings = [{"name": "", "runs": [{"folder": name} for name in values]}]
    summary = {"task": "sst2", "best": {"setting": "", "folder": "seed-2"}, "settings": settings}
    (folder / "summary.json").write_text(json.dumps(summary))
    found = glue([folder])
    assert found["alone"]["tasks"]["sst2"] == pytest.approx(85)
    assert found["seeds"] == {str(folder): 2}

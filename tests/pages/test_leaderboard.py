"""The leaderboard compares fine-tuning runs with each other and with the paper, and shows their errors."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.protocols import _runs_in, name_of, summarise
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.model.heads import HeadConfig
from bertsmith.pages.report.groups import group_runs
from bertsmith.pages.report.mistakes import calibration_error, entity_counts
from bertsmith.pages.report.page_of_runs import report
from bertsmith.pages.report.runs import read_runs
from bertsmith.rows.columns import Row
from bertsmith.tasks.dev_predictions import FILE, compare, read_dev_predictions, write_dev_predictions
from bertsmith.tasks.glue_average import PAPER_COLUMNS
from bertsmith.tasks.published import AVERAGES, PAPER, SIZES
from bertsmith.tasks.task import TASKS, find_task

LABELS = ("0", "1")
SINGLE = HeadConfig("single", LABELS)


def answer(score: float) -> dict[str, Any]:
    """A prediction of `1` with this probability."""
    label = LABELS[score > 0.5]
    return {"label": label, "score": max(score, 1 - score), "scores": {"0": 1 - score, "1": score}}


def make(
    folder: Path,
    score: float,
    *,
    task: str = "mrpc",
    seed: int = 1,
    rate: float = 5e-5,
    rows: int = 3668,
    dev: int = 408,
    start: str = "/models/first/model",
    key: str = "f1",
    **data: Any,
) -> Path:
    """A finished run with one score on its dev rows."""
    (folder / "model").mkdir(parents=True)
    config = {"task": task, "train": {"seed": seed, "learning_rate": rate}, "data": data, "random_start": False}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "run.json").write_text(json.dumps({"start": start, "rows": rows, "labels": LABELS}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 9, f"dev_{key}": score, "dev_accuracy": 0.5}) + "\n")
    if dev:
        held = [Row(f"text {i}", f"pair {i}", LABELS[i % 2], "") for i in range(dev)]
        write_dev_predictions(
            folder, find_task("mrpc"), SINGLE, {"": held}, {"": [answer(i / dev) for i in range(dev)]}
        )
    return folder


def written(runs: list[Path], path: Path) -> str:
    report(runs, path)
    return path.read_text(encoding="utf-8")


def cells(html: str, *first: str) -> list[str]:
    """The cells of the table row that begins with the given cells."""
    rows = re.findall(r"<tr>(.*?)</tr>", html, re.S)
    found = [[re.sub("<.*?>", "", c) for c in re.findall(r"<td.*?>(.*?)</td>", row, re.S)] for row in rows]
    (row,) = [row for row in found if tuple(row[: len(first)]) == first][:1]
    return row[len(first) :]


def test_seeds_share_a_row_with_their_mean_and_deviation(tmp_path: Path) -> None:
    for seed, score in ((1, 0.80), (2, 0.84), (10, 0.88)):
        make(tmp_path / "out" / f"seed-{seed}", score, seed=seed)
    html = written([tmp_path / "out"], tmp_path / "page.html")
    assert cells(html, "mrpc", "F1")[0] == "84.0 ± 4.0, 3 runs"
    assert cells(html, "mrpc", "accuracy")[0] == "50.0 ± 0.0, 3 runs"
    assert "seed-1, seed-2, seed-10" in html
    assert "80.0, 84.0, 88.0" in html
    assert "seed-10, the best of 3, on 408 dev rows" in html
    assert "Fine-tuning: mrpc" in html


def test_runs_are_found_in_folders_of_folders(tmp_path: Path) -> None:
    for name in ("grid/b", "grid/a", "seeds/seed-2", "seeds/seed-10", "alone"):
        make(tmp_path / "out" / name, 0.8, dev=0)
    (tmp_path / "out" / ".hidden").mkdir()
    (tmp_path / "out" / "seeds" / "config.json").write_text("{}")
    (tmp_path / "out" / "seeds" / "run.json").write_text("{}")  # the summary of all seeds
    found = [run.folder.relative_to(tmp_path / "out").as_posix() for run in read_runs([tmp_path / "out"])]
    assert found == ["alone", "grid/a", "grid/b", "seeds/seed-2", "seeds/seed-10"]


def test_the_page_notes_that_the_model_was_chosen_on_dev(tmp_path: Path) -> None:
    out = tmp_path / "mrpc"
    for rate, scores in ((2e-5, (0.80, 0.84)), (5e-5, (0.9, 0.88))):
        for seed, score in enumerate(scores, 1):
            make(out / f"learning_rate={rate}" / f"seed-{seed}", score, seed=seed, rate=rate, dev=0)
    settings = [{"learning_rate": 2e-5}, {"learning_rate": 5e-5}]
    runs = [{"setting": s, "runs": _runs_in(out / name_of(s), out)} for s in settings]
    failed = [{"folder": "x", "why": "the loss is no number"}]
    (out / "summary.json").write_text(json.dumps({**summarise(find_task("mrpc"), runs), "failed": failed}))
    html = written([out], tmp_path / "page.html")
    row = cells(html[html.index("Chosen models") :], "mrpc")
    assert row[:4] == ["mrpc", "2", "4, 1 failed", "F1"]
    assert row[4:] == ["89.0 ± 1.4 (2 seeds)", "89.0", "seed 1, learning_rate=5e-05", "90.0, on dev"]
    assert "were chosen on dev" in html
    (out / "summary.json").write_text("{")
    assert "Chosen models" not in written([out], tmp_path / "again.html")
    (out / "summary.json").write_text(json.dumps({"settings": []}))  # a summary of other runs
    assert "Chosen models" not in written([out], tmp_path / "other.html")


def test_collapsed_attempts_are_shown(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 0.7, dev=0)
    facts = json.loads((run / "run.json").read_text())
    config = json.loads((run / "config.json").read_text())
    attempts = [
        {"seed": 1, "why": "its loss is that of a guess"},
        {"seed": 1001, "why": "all <b>answers</b> are the same"},
    ]
    (run / "run.json").write_text(json.dumps({**facts, "collapsed": attempts}))
    (run / "config.json").write_text(json.dumps({**config, "restarts": 1}))
    html = written([run], tmp_path / "page.html")
    assert "2 attempts collapsed" in html
    assert "all &lt;b&gt;answers" in html
    assert html.count("restarted with another seed") == html.count("kept, since no restart was left") == 1


def test_the_command_returns_a_summary_of_the_scores(tmp_path: Path) -> None:
    for seed, score in ((1, 0.80), (2, 0.84)):
        make(tmp_path / "out" / f"seed-{seed}", score, seed=seed)
    found = report([tmp_path / "out"], tmp_path / "page.html")
    assert found["scores"]["mrpc, F1, from first"] == "82.0 ± 2.8, 2 runs"
    assert "best_held_out_loss" not in found


def test_the_papers_scores_are_shown_and_test_scores_marked(tmp_path: Path) -> None:
    html = written(
        [make(tmp_path / "run", 0.8), make(tmp_path / "other", 0.7, task="rte", rows=2490, dev=0)], tmp_path / "p.html"
    )
    assert cells(html, "mrpc", "F1")[1:] == ["–", "–", "88.9*", "89.3*"]
    assert cells(html, "mrpc", "accuracy")[1:] == ["86.7", "87.8", "–", "–"]
    assert "the test server" in html
    assert "†" not in html
    alone = written([make(tmp_path / "own", 0.7, task="classify", dev=0)], tmp_path / "own.html")
    assert "paper" not in alone


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rows": 1000}, "† Trained on 1,000 rows, where the data set has 3,668."),
        ({"dev": 100}, "† Scored on 100 rows, where the dev set has 408."),
        ({"task": "classify", "partial": True}, "† Trained on a part of its data set."),
        ({"rows": 3660}, None),
    ],
)
def test_partial_data_is_marked(tmp_path: Path, changes: dict[str, Any], says: str | None) -> None:
    html = written([make(tmp_path / "run", 0.8, **changes)], tmp_path / "page.html")
    assert ("†" in html) == (says is not None)
    assert says is None or says in html


def test_the_best_configuration_of_each_start_is_shown(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / "a", 0.80, rate=1e-5),
        make(tmp_path / "b", 0.90, rate=2e-5),
        make(tmp_path / "c", 0.85, start="/models/second/model"),
    ]
    html = written(runs, tmp_path / "page.html")
    assert cells(html, "mrpc", "F1")[:2] == ["90.0", "85.0"]
    assert "<span class=right>90.0</span>" in html
    assert re.findall(r"<th.*?>(.*?)</th>", html)[:4] == ["task", "score", "first", "second"]
    assert "learning_rate 1e-05" in html
    assert "mrpc, from second" in html
    assert len(group_runs(read_runs(runs))) == 3


def test_the_average_is_computed_as_in_the_paper(tmp_path: Path) -> None:
    base = [next(s for s in PAPER[task] if s.key == key).test[0] for task, key in PAPER_COLUMNS]
    assert round(sum(base) / len(base), 1) == AVERAGES[0]
    runs = []
    for task, key in PAPER_COLUMNS[2:]:
        runs.append(make(tmp_path / task, 0.5, task=task, key=key, rows=SIZES[task][0], dev=0))
    assert "GLUE" not in written(runs, tmp_path / "part.html")
    mnli = make(tmp_path / "mnli", 0.5, task="mnli", key="mismatched_accuracy", rows=392_702, dev=0)
    assert cells(written([*runs, mnli], tmp_path / "whole.html"), "GLUE", "average without WNLI")[0] == "50.0"


def test_every_task_with_figures_is_known() -> None:
    assert set(PAPER) | set(SIZES) <= set(TASKS)


def test_confusion_calibration_and_the_worst_rows(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 0.8, dev=0)
    rows = [Row(t, None, g, "") for t, g in (("good", "1"), ("bad", "0"), ("<b>worst</b>", "0"), ("fine", "0"))]
    write_dev_predictions(run, find_task("sst2"), SINGLE, {"": rows}, {"": [answer(p) for p in (0.9, 0.6, 0.99, 0.2)]})
    html = written([run], tmp_path / "page.html")
    assert cells(html, "0") == ["1", "2", "3", "33.3\u00a0%"]
    assert cells(html, "1") == ["0", "1", "1", "100.0\u00a0%"]
    worst = [re.sub("<.*?>", " ", row) for row in re.findall(r"<tr>(.*?)</tr>", html.split("highest loss")[1], re.S)]
    assert worst[1].split() == ["&lt;b&gt;worst&lt;/b&gt;", "0", "1", "99.0", "%", "4.61"]
    assert "bad" in worst[2]
    assert "Calibration" in html
    assert "<b>worst" not in html


def test_the_calibration_error() -> None:
    assert calibration_error([0.8] * 10, [True] * 8 + [False] * 2)[0] == pytest.approx(0)
    assert calibration_error([1.0] * 4, [True, False, False, False])[0] == pytest.approx(0.75)
    error, bins = calibration_error([0.9, 0.9, 0.5, 0.5], [True, True, False, True])
    assert error == pytest.approx(0.5 * 0.1 + 0.5 * 0.0)
    assert np.allclose(bins, [(0.5, 0.5, 2), (0.9, 1.0, 2)])


def test_scores_by_entity_type_equal_those_of_seqeval() -> None:
    from seqeval.metrics import classification_report

    dice, tags = random.Random(1), ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
    pairs = [[[dice.choice(tags) for _ in range(8)] for _ in range(40)] for _ in range(2)]
    lines = [{"gold": gold, "predicted": said} for gold, said in zip(*pairs, strict=True)]
    expected = classification_report(*pairs, output_dict=True, zero_division=0)
    for kind, (gold, predicted, right) in entity_counts(lines).items():
        assert gold == expected[kind]["support"]
        assert right / gold == pytest.approx(expected[kind]["recall"])
        assert right / predicted == pytest.approx(expected[kind]["precision"])


def test_predictions_of_each_kind_are_judged() -> None:
    number = compare(find_task("stsb"), HeadConfig("regression"), Row("a", "b", "2.5", ""), {"value": 2.0})
    assert (number["loss"], number["gold"], number["scores"]) == (0.25, ["2.5"], [2.0])
    head = HeadConfig("multi", ("x", "y"))
    several = compare(
        find_task("classify"), head, Row("a", None, ["x"], ""), {"labels": [], "scores": {"x": 0.4, "y": 0.2}}
    )
    assert several["loss"] == pytest.approx(-(np.log(0.4) + np.log(0.8)) / 2)
    assert (several["gold"], several["predicted"]) == (["x"], [])
    chosen = {"choice": 1, "score": 0.7, "scores": [0.3, 0.7]}
    ending = compare(
        find_task("swag"), HeadConfig("choice", num_choices=2), Row("a", None, 0, "", parts=("p", "q")), chosen
    )
    assert (ending["gold"], ending["predicted"], ending["loss"]) == (["0"], ["1"], pytest.approx(-np.log(0.3)))
    given = {"text": "fox", "start": 4, "end": 7, "score": 0.5, "null_odds": 0.0, "nbest": []}
    row = Row("who?", "the fox ran", {"text": ["the fox"], "answer_start": [0]}, "")
    span = compare(find_task("squad2"), HeadConfig("span"), row, given)
    assert (span["scores"], span["probability"]) == ([100.0, 100.0], 0.25)
    silent = compare(find_task("squad2"), HeadConfig("span"), Row("who?", "a fox", [], ""), {**given, "text": ""})
    assert (silent["scores"], silent["probability"], silent["gold"]) == ([100.0, 100.0], 0.5, [])


ROWS = {
    "regress": ["text,score", *(f"the list {i},{i % 5}" for i in range(12))],
    "classify": ["text,label", *(f"the list {i},{'ab'[i % 2]}" for i in range(12))],
    "tag": [json.dumps({"tokens": ["the", "list"], "tags": ["O", "B-X" if i % 2 else "B-Y"]}) for i in range(12)],
    "choose": [json.dumps({"text": "a", "endings": ["x", f"y {i}"], "label": i % 2}) for i in range(12)],
    "answer": [json.dumps({"question": "a", "context": "the list", "answers": ["list"][: i % 2]}) for i in range(12)],
}


@pytest.mark.parametrize("task", [*ROWS, "several"])
def test_a_run_writes_the_predictions_that_its_page_shows(world: Path, tmp_path: Path, task: str) -> None:
    lines = ROWS.get(task) or [json.dumps({"text": f"it {i}", "labels": ["x", "y"][: i % 3]}) for i in range(12)]
    data = tmp_path / ("rows.csv" if task in ("regress", "classify") else "rows.jsonl")
    data.write_text("\n".join(lines) + "\n")
    config = override(
        FinetuneConfig("classify" if task == "several" else task), ["train.steps=2", "train.batch_size=4"]
    )
    scores = finetune(config, world / "run", data, tmp_path / "run", dev=data, device="cpu")
    _, judged = read_dev_predictions(tmp_path / "run")
    assert len(judged) == 12
    if "accuracy" in scores and task != "tag":
        right = np.mean([line["gold"] == line["predicted"] for line in judged])
        assert 100 * right == pytest.approx(scores["accuracy"])
    html = written([tmp_path / "run"], tmp_path / "page.html")
    assert "<h2>Mistakes</h2>" in html
    shown = {"regress": "Predicted over gold values", "classify": "Confusion matrix", "tag": "Entities by type"}
    shown |= {"choose": "Errors with the highest loss", "answer": "Worst answers", "several": "<figcaption>Labels"}
    assert shown[task] in html
    assert ("Calibration" in html) == (task != "regress")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 0.8)
    (run / FILE).write_bytes(b"no parquet")
    with pytest.raises(UserError, match=f"{FILE} cannot be read"):
        report([run], tmp_path / "page.html")


def test_runs_with_other_labels_are_listed_as_another_task(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / name, score, task="classify", key="macro_f1", dev=0) for name, score in (("a", 0.8), ("b", 0.6))
    ]
    facts = json.loads((runs[1] / "run.json").read_text())
    (runs[1] / "run.json").write_text(json.dumps({**facts, "labels": ["x", "y", "z", "w"]}))
    html = written(runs, tmp_path / "page.html")
    assert cells(html, "classify: 0, 1", "macro F1") == ["80.0"]
    assert cells(html, "classify: x, y, z, … (4)", "macro F1") == ["60.0"]

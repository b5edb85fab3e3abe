"""The experiments on left to right against both ways run through with tiny shapes, and their table is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import left_to_right
from benchmarks.corpora import train_tokenizers
from benchmarks.family_pages import put_tables
from benchmarks.family_toy import write_toy_data, write_toy_questions
from benchmarks.left_to_right import PAGE, rows_of
from benchmarks.left_to_right_table import EXPERIMENTS, TASKS, TUNINGS, pretraining_config, tuning_config
from bertsmith.paper.scales import SCALES

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_an_experiment_runs_and_is_fine_tuned_again(tmp_path: Path) -> None:
    data = write_toy_questions(write_toy_data(tmp_path / "data"))
    train_tokenizers(data, ["wordpiece"], 150)
    given = ["--data", str(data), "--work", str(tmp_path / "work"), "--results", str(tmp_path), "--smoke"]
    given += ["--seeds", "2", "--jobs", "1", "--device", "cpu"]
    left_to_right.main(["run", "masked-40", "left", "--tasks", "mrpc", "squad1", "--tunings", "usual", "mean", *given])
    left_to_right.main(["tune", "left", "--tasks", "mrpc", "--tunings", "first", "lm", "--at", "0.5", *given])
    results = json.loads((tmp_path / "left_to_right.json").read_text())["results"]
    masked, left = (results["pretraining"][name] for name in ("masked-40", "left"))
    assert [point["step"] for point in masked["checkpoints"]] == [2, 4, 6, 8]
    assert all(point["masked_words"]["loss"] > 0 for point in masked["checkpoints"])
    assert [list(point["held_out"]) for point in left["checkpoints"]] == [["lm_loss"]] * 4
    assert left["checkpoints"][0]["held_out"] != left["checkpoints"][-1]["held_out"]
    assert [record[0] for record in left["curve"]] == list(range(1, 9))
    assert masked["settings"]["data"]["masking"]["rate"] == 0.4
    expected = {"masked-40 usual", "masked-40 mean", "masked-40 usual at 0.5", "left usual", "left mean"}
    assert results["tuning"].keys() == {*expected, "left first at 0.5", "left lm at 0.5"}
    assert results["tuning"]["left mean"]["tasks"].keys() == {"mrpc"}  # spans are not pooled
    assert all(len(t["values"]) == 2 for found in results["tuning"].values() for t in found["tasks"].values())
    rows = rows_of(results)
    assert [row[0] for row in rows[1:3]] == ["left", "left"]
    assert "left, 50% of the run" in [row[0] for row in rows]
    page = tmp_path / "paper.md"
    page.write_text(PAGE.read_text())
    put_tables(page, {"left to right": rows})
    assert "| masked-40, 50% of the run | 1e-4, dropout 0.1 |" in page.read_text()


def test_every_experiment_changes_what_it_says() -> None:
    configs = {name: pretraining_config(name, None, smoke=False) for name in EXPERIMENTS}
    assert len({str(config.train.hours) for config in configs.values()}) == 4
    base = configs["masked"]
    for name, config in configs.items():
        assert config.model.norm_first
        assert name == "masked" or config != base
        assert config.model.direction == ("left-to-right" if name.startswith("left") else "both")
    assert configs["left"].data == base.data
    assert configs["left"].train == base.train
    assert (configs["masked-12x768"].model.num_layers, configs["masked-4x256"].model.hidden_size) == (12, 256)
    assert tuning_config(TUNINGS["long"], "mrpc", 1, False).train.epochs == 10
    assert tuning_config(TUNINGS["bilstm"], "mrpc", 1, False).bilstm_layers == 1
    for task in TASKS:  # as the rows of the tables are fine-tuned
        usual = tuning_config(TUNINGS["usual"], task, 1, False)
        assert replace(usual, train=replace(usual.train, workers=None)) == SCALES["hour"].finetuning(task)[0]

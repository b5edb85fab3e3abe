"""The curve of the speedrun is made of what `bertsmith benchmark` writes."""

import json

import pytest

from benchmarks import speedrun_curve

SCORES = {
    name: {"median": value, "mean": value, "values": [value]} for name, value in (("CoLA", 40.0), ("SST-2", 90.0))
}


def row(minutes, tokens, mean):
    held_out = {"mlm_loss": 2.5, "detection_loss": 0.2}
    return {"name": "run", "model": "runs/run/model", "layers": 12, "width": 512, "minutes": minutes, "tokens": tokens,
            "held_out": held_out, "scores": SCORES, "mean": mean}  # fmt: skip


def write(path, *rows, settings=()):
    table = {"settings": list(settings), "seeds": 5, "protocol": {"epochs": 5}, "partial": {}, "rows": list(rows)}
    path.write_text(json.dumps(table))
    return str(path)


def test_points_are_sorted_replaced_and_priced(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.record.RESULTS", tmp_path / "none")
    results = str(tmp_path / "results")
    for minutes, mean in ((15.01, 60.0), (4.0, 65.0), (15.0, 71.5)):  # the second run of 15 minutes replaces the first
        file = write(tmp_path / "benchmark.json", row(minutes, int(minutes * 40e6), mean))
        speedrun_curve.main(["add", file, "--name", "speedrun", "--results", results])
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- curve -->\nNot measured yet.\n<!-- end of curve -->\nafter\n")
    speedrun_curve.main(["page", "--results", results, "--page", str(page)])
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert [line.split(" | ")[:6] for line in lines[4:6]] == [
        ["| speedrun", "4", "0.27", "160", "2.50", "65.0"],
        ["| speedrun", "15", "1.00", "600", "2.50", "71.5"],
    ]
    assert lines[4].count("–") == 5  # tasks without data
    assert (tmp_path / "results" / "speedrun_curve.svg").read_text().count("speedrun") >= 1


def test_rows_that_are_no_points_are_refused(tmp_path) -> None:
    other = {key: value for key, value in row(1, 1, 1.0).items() if key != "minutes"}
    with pytest.raises(SystemExit, match="runs/run/model is not the end of a pre-training run"):
        speedrun_curve.main(["add", write(tmp_path / "b.json", other), "--results", str(tmp_path)])
    file = write(tmp_path / "b.json", row(1, 1, 1.0), settings=["train.epochs=10"])
    with pytest.raises(SystemExit, match=r"b\.json is not by the protocol: train\.epochs=10"):
        speedrun_curve.main(["add", file, "--results", str(tmp_path)])

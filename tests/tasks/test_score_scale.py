"""Scores range from 0 to 100 wherever they are read, whichever version wrote them."""

from __future__ import annotations

import json
from pathlib import Path

from bertsmith.commands.show import show
from bertsmith.pages.report.chosen import chosen
from bertsmith.pages.report.runs import Run
from bertsmith.training import runlog


def write_lines(run: Path, *records: dict[str, object]) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_records_of_older_versions_are_scaled_to_100(tmp_path: Path) -> None:
    old = {"step": 1, "loss": 0.5, "mlm_accuracy": 0.25}
    scores = {"step": 2, "dev_accuracy": 0.5, "dev_mismatched_accuracy": 0.75, "dev_macro_f1": 0.5}
    squad = {"step": 3, "dev_f1": 0.5, "dev_exact_match": 0.25, "dev_best_f1_thresh": 0.5}
    new = {"step": 4, "dev_accuracy": 0.5, "scale": 100}
    run = write_lines(tmp_path / "run", old, scores, squad, new)
    found = runlog.read(run)
    assert found[0] == {"step": 1, "loss": 0.5, "mlm_accuracy": 25.0}
    assert found[1] == {"step": 2, "dev_accuracy": 50.0, "dev_mismatched_accuracy": 75.0, "dev_macro_f1": 50.0}
    assert found[2] == squad  # older versions wrote these from 0 to 100, too
    assert found[3] == {"step": 4, "dev_accuracy": 0.5}  # half a percent
    runlog.open_log(run, 4)({"step": 5, "dev_accuracy": 62.5})  # a resumed run rewrites the records that it keeps
    assert runlog.read(run) == [*found, {"step": 5, "dev_accuracy": 62.5}]
    assert runlog.last_scores(run, 2)["accuracy"] == 50.0


def test_a_summary_of_an_older_version_is_scaled_to_100(tmp_path: Path) -> None:
    run = Run(tmp_path / "seed-1", "seed-1", {"task": "rte"}, {}, [], True)
    setting = {"name": "", "mean": 0.5, "deviation": None, "median": 0.5, "seeds": 1, "runs": [{"folder": "seed-1"}]}
    best = {"setting": "", "seed": 1, "folder": "seed-1", "accuracy": 0.5, "of_runs": 1}
    summary = {"task": "rte", "metric": "accuracy", "best": best, "settings": [setting]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert "50.0, on dev" in chosen([run])
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "scale": 100}))
    assert "0.5, on dev" in chosen([run])


def test_the_terminal_shows_one_decimal(capsys) -> None:
    values = {"accuracy": 54.0441, "mlm_loss": 0.54321, "spearman": -3.25, "recall": None}
    show(values, as_json=False)
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("54.0 ", "0.5432", "-3.2 ", "–"))
    show(values, as_json=True)
    assert json.loads(capsys.readouterr().out) == values

"""The benchmark of few rows: every way of fine-tuning is given the same rows, and is scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import few_rows
from benchmarks.family_toy import write_toy_data
from benchmarks.tuning import Variation, varied
from bertsmith.finetuning import run


def test_ways_are_scored_on_the_same_rows(tmp_path: Path) -> None:
    data = write_toy_data(tmp_path / "data")
    given = ["--data", str(data), "--work", str(tmp_path), "--results", str(tmp_path), "--device", "cpu", "--smoke"]
    for task in ("cola", "stsb"):
        chosen = ["--rows", "8", "--tasks", task, "--seeds", "1", "--jobs", "1"]
        few_rows.main(["run", "usual", "from-zero", *chosen, *given])
    found = json.loads((tmp_path / "few_rows.json").read_text())["results"]["ways"]
    usual, zero = (found[f"{name} 8 5e-05"]["tasks"]["stsb"]["values"] for name in ("usual", "from-zero"))
    assert len(usual) == 1
    assert found["usual 8 5e-05"]["tasks"].keys() == {"cola", "stsb"}
    assert usual != zero
    same = [found[f"{name} 8 5e-05"]["tasks"]["cola"]["values"] for name in ("usual", "from-zero")]
    assert same[0] == same[1]


def test_the_package_is_as_it_was_after_a_way() -> None:
    before = run.start_model, run.start_at_numbers
    with varied(Variation(identity=True, at_mean=False)):
        assert run.start_model != before[0]
        assert run.start_at_numbers(None, [1.0]) == ""
    assert (run.start_model, run.start_at_numbers) == before

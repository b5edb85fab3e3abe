"""The measurement of weights and attention, and the runs by weight decay, with a toy text and three steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file

from benchmarks import weight_growth
from benchmarks.corpora import corpus_folder
from benchmarks.family_toy import write_toy_data
from benchmarks.weights import weight_facts
from bertsmith.training.run import MODEL

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("weights")
    data = write_toy_data(folder / "data")
    return ["--data", str(data), "--work", str(folder / "work"), "--results", str(folder), "--steps", "3"]


def test_runs_are_measured_and_fine_tuned(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_growth, "VOCABULARY", 150)
    monkeypatch.setattr(torch, "set_flush_denormal", lambda value: True)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    weight_growth.main(["run", "modern-0.01", "prenorm-0.5", *given])
    weight_growth.main(["tune", "prenorm-0.5", "--rates", "1e-4", "--tasks", "rte", *given])
    results = json.loads((Path(given[5]) / "weight_growth.json").read_text())["results"]
    results = {
        part: {key: found for key, found in runs.items() if ", 3 steps" in key} for part, runs in results.items()
    }
    modern, prenorm = results["pretraining"].values()  # the recorded runs are beside them
    assert modern["settings"]["model"]["family"] == "modernbert"
    assert prenorm["settings"]["train"]["weight_decay"] == 0.5
    assert all(0 < value < 1 for value in modern["weights"]["largest_attention_weight"])
    rows = weight_growth.table(results)
    assert [row[0] for row in rows] == ["run", "modern-0.01, 3 steps", "prenorm-0.5, 3 steps"]
    assert rows[0][-1] == "RTE at 0.0001"
    assert rows[1][-1] == "–"
    assert 0 < float(rows[2][-1]) <= 100


def test_large_weights_are_seen_as_sharp_attention(given: list[str], tmp_path: Path) -> None:
    data, work = Path(given[1]), Path(given[3])
    model, corpus = work / "weight_growth" / "prenorm-0.5-3" / MODEL, corpus_folder(data, work, "wordpiece")
    found = weight_facts(model, corpus)
    (tmp_path / "model").mkdir()
    for path in model.iterdir():
        (tmp_path / "model" / path.name).write_bytes(path.read_bytes())
    tensors = load_file(model / "model.safetensors")
    larger = {name: 100 * value if ".self." in name else value for name, value in tensors.items()}
    assert larger.keys() == tensors.keys()
    save_file(larger, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    sharp = weight_facts(tmp_path / "model", corpus)
    assert sharp["qkv"] == pytest.approx([100 * value for value in found["qkv"]], rel=0.01)
    assert max(found["largest_attention_weight"]) < 0.4
    assert min(sharp["largest_attention_weight"]) > 0.9


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(SystemExit, match="write FORM-DECAY"):
        weight_growth.config_of("bert-0.1", 3)

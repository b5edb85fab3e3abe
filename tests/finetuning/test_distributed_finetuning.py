"""Fine-tuning on several ranks: the dev scores equal those of one rank, and rows are encoded once."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kind_rows import ROWS
from runs import on_ranks
from safetensors.torch import load_file

from bertsmith.config import override
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.tasks.kinds import KINDS, Kind
from bertsmith.training import runlog

SETTINGS = ["train.epochs=2", "train.batch_size=6", "train.micro_batch_size=2", "train.learning_rate=1e-3"]
SETTINGS += ["data.max_length=32", "data.stride=8", "data.max_query=8", "restarts=0"]
TASKS = {
    "answer": ["train.parallel=fsdp"],
    "choose": ["train.parallel=fsdp"],
    "tag": ["train.parallel=ddp", "train.layer_decay=0.8", "frozen_layers=1"],  # fsdp: test_layers
}


def tune(model: Path, folder: Path, settings: list[str]) -> None:
    """Every task on one of the ranks, which logs how many rows it encodes."""

    def logging_rows(kind: Kind) -> Kind:
        def encode(rows, *rest, labelled):
            with (folder / f"encoded-{os.environ['RANK']}").open("a") as file:
                file.write(f"{len(rows)}\n")
            return kind.encode(rows, *rest, labelled=labelled)

        return replace(kind, encode=encode)

    KINDS.update({name: logging_rows(kind) for name, kind in KINDS.items()})
    for task, more in TASKS.items():
        config, data = override(FinetuneConfig(task), [*settings, *more]), folder / f"{task}.jsonl"
        finetune(config, model, data, folder / "two" / task, dev=data, device="cpu")


@pytest.mark.slow
def test_two_ranks_give_the_scores_of_one_and_encode_once(world: Path, tmp_path: Path, monkeypatch) -> None:
    settings = [*SETTINGS, "train.evaluate_every=2", "train.keep_best=true"]
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "cache"))
    for task in TASKS:
        (tmp_path / f"{task}.jsonl").write_text("\n".join(map(json.dumps, ROWS[task])) + "\n")
    on_ranks(tune, world / "run", tmp_path, settings)
    encoded = (tmp_path / "encoded-0").read_text().split()
    assert len(encoded) == 2 * len(TASKS)  # training and dev rows, once each
    assert not (tmp_path / "encoded-1").exists()
    for task, more in TASKS.items():
        data, run = tmp_path / f"{task}.jsonl", tmp_path / "one" / task
        finetune(override(FinetuneConfig(task), [*settings, *more]), world / "run", data, run, dev=data, device="cpu")
        one, two = (runlog.read(path) for path in (run, tmp_path / "two" / task))
        assert [r["step"] for r in one] == [r["step"] for r in two]
        for first, second in zip(one, two, strict=True):
            for name in (n for n in first if n.startswith("dev_") or n == "loss"):
                assert first[name] == pytest.approx(second[name], abs=1e-5), name
    ends = [load_file(tmp_path / n / "tag" / "model" / "model.safetensors") for n in ("one", "two")]
    for name in (n for n in ends[0] if not n.endswith("key.bias")):  # its gradient is 0 apart from rounding
        assert torch.allclose(ends[0][name], ends[1][name], atol=1e-5), name

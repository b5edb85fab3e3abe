"""Fine-tuning on several ranks: the dev scores equal those of one rank, and rows are encoded once."""

import json
from pathlib import Path

import pytest
import torch
from kind_rows import ROWS
from runs import finish, torchrun
from safetensors.torch import load_file

from bertsmith.config import override
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.training import runlog

SETTINGS = ["train.epochs=2", "train.batch_size=6", "train.micro_batch_size=2", "train.learning_rate=1e-3"]
SETTINGS += ["data.max_length=32", "data.stride=8", "data.max_query=8", "restarts=0"]
# Runs every task; each rank logs how many rows it encodes.
PROGRAM = """
import json, os, sys, torch
from dataclasses import replace
from bertsmith.config import override
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.tasks.kinds import KINDS
from bertsmith.training.distributed import process_group

model, folder, tasks, settings = json.loads(sys.argv[1])

def logging_rows(kind):
    def encode(rows, *rest, labelled):
        with open(f"{folder}/encoded-{os.environ['RANK']}", "a") as file:
            file.write(f"{len(rows)}\\n")
        return kind.encode(rows, *rest, labelled=labelled)
    return replace(kind, encode=encode)

KINDS.update({name: logging_rows(kind) for name, kind in KINDS.items()})
with process_group(torch.device("cpu")):
    for task, more in tasks.items():
        config = override(FinetuneConfig(task), [*settings, *more])
        data = f"{folder}/{task}.jsonl"
        finetune(config, model, data, f"{folder}/two/{task}", dev=data, device="cpu")
"""


TASKS = {
    "answer": ["train.parallel=fsdp"],
    "choose": ["train.parallel=fsdp"],
    "tag": ["train.parallel=ddp", "train.layer_decay=0.8", "frozen_layers=1"],  # fsdp: test_layers
}


def test_two_ranks_give_the_scores_of_one_and_encode_once(world: Path, tmp_path: Path, monkeypatch) -> None:
    settings = [*SETTINGS, "train.evaluate_every=2", "train.keep_best=true"]
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "cache"))
    for task in TASKS:
        (tmp_path / f"{task}.jsonl").write_text("\n".join(map(json.dumps, ROWS[task])) + "\n")
    (tmp_path / "program.py").write_text(PROGRAM)
    given = json.dumps([str(world / "run"), str(tmp_path), TASKS, settings])
    finish(torchrun([given], program=(str(tmp_path / "program.py"),)))
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

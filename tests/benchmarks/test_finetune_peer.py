"""The benchmark's peer fine-tunes the same model on the same rows in the same order, with the same result."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from kind_rows import ROWS

from benchmarks.finetune_data import OURS, PADDED, PEER, TABLE, Measured, training_file
from benchmarks.finetune_peer import Peer, open_start, start_folder
from benchmarks.finetune_results import summary_of
from bertsmith.config import override
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.inference.predictor import Predictor
from bertsmith.rows.columns import Columns
from bertsmith.tasks.description import Limits
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.reading import training_rows
from bertsmith.tasks.task import find_task
from bertsmith.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def start(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without dropout, whose masks would differ between the two."""
    folder = tmp_path_factory.mktemp("start") / "model"
    shutil.copytree(world / "run" / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("name", "pad_to"), [("classify", 0), ("classify", 40), ("regress", 0), ("tag", 0), ("tag", 40), ("answer", 0)]
)
def test_the_peer_ends_with_the_same_logits(start: Path, tmp_path: Path, name: str, pad_to: int) -> None:
    data, task, limits = tmp_path / "rows.jsonl", find_task(name), Limits(32, 8, 8)
    given = ROWS[name]
    if name == "answer":  # of equal length, since the span loss of `transformers` includes padding
        given = [{**row, "context": given[0]["context"]} for row in given[:10]]
    data.write_text("\n".join(map(json.dumps, given)) + "\n")
    changes = ["train.epochs=2.5", "train.batch_size=4", "train.learning_rate=5e-3", "train.seed=3", "restarts=0"]
    changes += ["data.max_length=32", "data.stride=8", "data.max_query=8"]
    config = override(FinetuneConfig(name), changes)
    finetune(config, start, data, tmp_path / "ours", device="cpu")
    rows, _ = training_rows(task, [data], Columns())
    head = KINDS[task.head].head_for(task, rows)
    start_folder(start, head, rows, 3, tmp_path / "start")
    encode, tokenizer = KINDS[head.kind].encode, Tokenizer.load(start)
    examples = encode(rows, tokenizer, limits, head, labelled=True).examples
    peer = Peer(
        open_start(tmp_path / "start", head.kind, torch.device("cpu")), head.kind, examples, config.train, pad_to
    )
    asked = encode(rows, tokenizer, limits, head, labelled=False).examples
    before = np.concatenate([scores.ravel() for scores in peer.scores(asked)])
    peer.train()
    ours = np.concatenate([s.ravel() for s in Predictor.load(tmp_path / "ours", "cpu").engine.run(asked)])
    theirs = np.concatenate([scores.ravel() for scores in peer.scores(asked)])
    assert np.abs(theirs - before).max() > 0.02
    np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_files_in_the_squad_format_are_joined(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.json").write_text(json.dumps({"version": "1.1", "data": [{"title": str(number)}]}))
    joined = training_file(Measured("squad1", ("0.json", "1.json"), {}), tmp_path, tmp_path)
    assert [a["title"] for a in json.loads(joined.read_text())["data"]] == ["0", "1"]


def test_the_summary_compares_scores_and_speed_with_each_peer() -> None:
    def runs(values: list[float], seconds: float) -> dict:
        return {
            str(i): {"scores": {"dev": {"accuracy": v}}, "steps": 100, "training_seconds": seconds}
            for i, v in enumerate(values, 1)
        }

    found = summary_of(
        "sst2-epoch",
        {OURS: runs([0.90, 0.91, 0.92], 2), PEER: runs([0.91, 0.92, 0.93], 5), PADDED: runs([0.97, 0.98, 0.97], 8)},
    )
    assert found[OURS]["dev accuracy"] == {"mean": 0.91, "deviation": 0.01}
    assert found[OURS]["steps_per_second"] == 50
    near, far = found[f"beside {PEER}"], found[f"beside {PADDED}"]
    assert near["dev accuracy"]["not_lower"]
    assert not far["dev accuracy"]["not_lower"]
    assert (near["times_faster"], far["times_faster"]) == (2.5, 4.0)


def test_every_measured_task_is_in_the_table_of_tasks() -> None:
    for measured in TABLE.values():
        assert find_task(measured.task)
        assert measured.sides[0] == OURS
        assert measured.seeds >= 3

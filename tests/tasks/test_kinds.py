"""For every kind of task a resumed run is bit-identical; the multi-label loss equals that of `transformers`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import LABELS, reference
from kind_rows import ROWS

from bertsmith.config import override
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import load_folder
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Limits
from bertsmith.tasks.dev_predictions import FILE, read_dev_predictions
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.sequences import predict_labels
from bertsmith.tasks.spans import stride_note
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.tokenizer import Tokenizer


@pytest.mark.parametrize("task", ROWS)
def test_a_run_resumed_in_the_middle_is_bit_identical(world: Path, tmp_path: Path, task: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS[task])) + "\n")
    changes = ["train.epochs=2", "train.batch_size=4", "train.micro_batch_size=3", "train.save_every=4", "train.keep=9"]
    changes += ["train.learning_rate=1e-3", "data.max_length=32", "data.stride=8", "data.max_query=8"]
    config, whole, cut = override(FinetuneConfig(task), changes), tmp_path / "whole", tmp_path / "cut"
    scores = finetune(config, world / "run", data, whole, dev=data, device="cpu")
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "model")
    (cut / FILE).unlink()
    for folder in sorted((cut / "checkpoints").iterdir())[1:]:
        shutil.rmtree(folder)
    assert finetune(config, world / "run", data, cut, dev=data, device="cpu", resume=True) == scores
    files = [(run / "model" / "model.safetensors").read_bytes() for run in (whole, cut)]
    assert files[0] == files[1]
    assert read_dev_predictions(whole) == read_dev_predictions(cut)


def test_the_multi_label_loss_equals_that_of_transformers(world: Path, tmp_path: Path) -> None:
    tokenizer, labels = Tokenizer.load(world / "tok"), tuple(LABELS.values())
    theirs = reference("multi", tokenizer.vocab_size)
    theirs.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    model = load_folder(tmp_path).model.eval()
    chosen = [["red"], [], ["green", "none"], ["red", "green", "blue", "none"]]
    rows = [Row(f"the list of {'files ' * i}", None, names, "") for i, names in enumerate(chosen)]
    head = HeadConfig("multi", labels)
    batch = KINDS["multi"].encode(rows, tokenizer, Limits(24), head, labelled=True).examples.batch(np.arange(4))
    texts = tokenizer.encode([row.text for row in rows], special=True)
    longest = max(map(len, texts))
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids in texts])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in texts])
    wanted = torch.tensor([[float(name in names) for name in labels] for names in chosen])
    output = theirs(input_ids=tokens, attention_mask=mask, labels=wanted)
    loss = model(batch)["task"] / batch.counts["task"]
    assert loss.item() == pytest.approx(output.loss.item(), abs=1e-5)
    (loss - output.loss).backward()  # the gradients are compared at the head
    torch.testing.assert_close(model.head.output.weight.grad, -theirs.classifier.weight.grad, atol=1e-5, rtol=1e-4)
    for scores, row in zip(output.logits.detach().numpy(), rows, strict=True):
        above = [name for name, score in zip(labels, scores, strict=True) if 1 / (1 + np.exp(-score)) >= 0.5]
        assert predict_labels(scores, head)["labels"] == above, row


def test_windows_without_overlap_give_a_note() -> None:
    assert stride_note(Limits(384, 128, 64), WORDPIECE) is None
    assert stride_note(Limits(128, 60, 64), WORDPIECE) is None
    note = stride_note(Limits(128, 128, 64), WORDPIECE)
    assert note is not None
    assert "a question of 64 tokens a window has room for 61, and data.stride is 128" in note
    assert "data.stride=30 suits" in note
    assert stride_note(Limits(128, 61, 64), WORDPIECE) is not None
    assert stride_note(Limits(8, 128, 64), WORDPIECE) is not None

"""The same fine-tuning as a plain loop with `transformers`: the same start, rows, order, rate and schedule.

Its models get the examples that ours get, padded to the longest of a batch or to a fixed length; bfloat16 by autocast
on CUDA, fused AdamW, nothing read back on the way. One thing is not the same: where answers are looked for in a text,
its loss takes padding for places where an answer might stand.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from transformers import BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification

from bertsmith import draws
from bertsmith.batch import Batch, Padded, collate
from bertsmith.finetuning.batches import ORDER
from bertsmith.finetuning.model import HEAD_WEIGHTS, start_at_numbers
from bertsmith.formats.hf import load_folder, save_folder
from bertsmith.inference.engines import TOKENS, batches
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.examples import Examples
from bertsmith.tasks.kinds import KINDS
from bertsmith.training.schedule import learning_rate_factor
from bertsmith.training.settings import TrainConfig, autocast_dtype

CLASSES = {"tags": BertForTokenClassification, "span": BertForQuestionAnswering}


def start_folder(model: Path, head: HeadConfig, rows: Sequence[Row], seed: int, folder: Path) -> None:
    """The model that our run starts from, its output layer included, for `transformers` to open."""
    torch.manual_seed(draws.seed(seed, HEAD_WEIGHTS))
    loaded = load_folder(model, head)
    if numbers := KINDS[head.kind].numbers(rows, head):
        start_at_numbers(loaded, numbers)
    save_folder(folder, loaded.model, loaded.tokenizer, loaded.notes)


def open_start(folder: Path, kind: str, device: torch.device) -> Any:
    return CLASSES.get(kind, BertForSequenceClassification).from_pretrained(folder).to(device)


def inputs_of(batch: Batch, kind: str, pad_to: int = 0) -> dict[str, torch.Tensor]:
    """A padded batch under the names of `transformers`."""
    assert isinstance(batch.layout, Padded)
    more = max(0, pad_to - batch.tokens.shape[1])
    columns = {"input_ids": batch.tokens, "token_type_ids": batch.segments, "attention_mask": batch.layout.mask.long()}
    found = {name: F.pad(value, (0, more)) for name, value in columns.items()}
    if "tags" in batch.labels:
        found["labels"] = F.pad(batch.labels["tags"], (0, more), value=-100)
    elif "label" in batch.labels and kind == "span":
        found["start_positions"], found["end_positions"] = batch.labels["label"].unbind(-1)
    elif "label" in batch.labels:
        label = batch.labels["label"]
        found["labels"] = label.float() if kind == "regression" else label
    return found


def optimizer_of(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW as ours: biases and norms do not decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = config.beta1, config.beta2
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.adam_eps, fused=True)


class Peer:
    """A run of the peer, a step at a time."""

    def __init__(self, model: Any, kind: str, examples: Examples, config: TrainConfig, pad_to: int = 0) -> None:
        self.model, self.kind, self.examples, self.config, self.pad_to = model, kind, examples, config, pad_to
        self.device = next(model.parameters()).device
        self.dtype = autocast_dtype(config.precision, self.device)
        self.optimizer = optimizer_of(model, config)
        self.steps = config.num_steps(len(examples)) or 0

    def step(self, number: int) -> None:
        config, count = self.config, len(self.examples)
        last = int(config.epochs * count) if config.epochs and config.steps is None else 10**12
        begin = number * config.batch_size
        rows = draws.in_epochs(begin, min(begin + config.batch_size, last), count, config.seed, ORDER)
        batch = collate([self.examples[i] for i in rows.tolist()], packed=False)
        inputs = {n: v.to(self.device, non_blocking=True) for n, v in inputs_of(batch, self.kind, self.pad_to).items()}
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = self.model(**inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * learning_rate_factor(config, number, self.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def train(self) -> float:
        """All steps; the seconds that they took."""
        torch.manual_seed(self.config.seed)
        self.model.train()
        began = time.perf_counter()
        for number in range(self.steps):
            self.step(number)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    @torch.inference_mode()
    def scores(self, examples: Examples) -> list[NDArray[np.float32]]:
        """Scores of each example, in float32, as our decoders take them."""
        self.model.eval()
        found: list[Any] = [None] * len(examples)
        for chosen in batches(examples, TOKENS[self.device.type]):
            batch = collate([examples[i] for i in chosen], packed=False)
            inputs = {name: value.to(self.device) for name, value in inputs_of(batch, self.kind).items()}
            output = self.model(**inputs)
            if self.kind == "span":
                rows = torch.stack([output.start_logits, output.end_logits], -1)
            else:
                rows = output.logits
            for i, row in zip(chosen, rows.float().cpu().numpy(), strict=True):
                found[i] = row[: len(examples[i].tokens)] if self.kind in ("tags", "span") else row
        return found

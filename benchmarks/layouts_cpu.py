"""Packed against padded against `transformers` on a CPU: forward and backward of the same texts, unequal lengths."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertForSequenceClassification

from benchmarks.record import record
from bertsmith.batch import Example, Label, collate
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.sizes import encoder_config
from bertsmith.tasks.examples import TARGET

ROUNDS = 11
LENGTHS = {"equal (64)": (64, 65), "mixed (8 to 128)": (8, 129), "short (4 to 40)": (4, 41)}


def seconds(functions: dict[str, Callable[[], None]]) -> dict[str, float]:
    """The median time of each, measured in turns so that changes in the machine's load affect all alike."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(ROUNDS + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - began)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def measure(size: str, low: int, high: int) -> dict[str, float]:
    """Real tokens a second of forward and backward, 32 sequences."""
    config = dataclasses.replace(encoder_config(size), hidden_dropout=0.0, attention_dropout=0.0)
    ours = TaskModel(Encoder(config), HeadConfig("single", ("a", "b")))
    theirs = BertForSequenceClassification(
        BertConfig(
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            intermediate_size=config.intermediate_size,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    rng = np.random.default_rng(0)
    examples = [
        Example(
            rng.integers(1000, 30000, n), np.zeros(n, dtype=np.int64), {"label": Label(int(rng.integers(2)), TARGET)}
        )
        for n in rng.integers(low, high, 32)
    ]
    packed, padded = collate(examples, packed=True), collate(examples, packed=False)
    labels = padded.labels["label"]

    def peer() -> None:
        mask = padded.layout.mask.long()  # type: ignore[union-attr]
        theirs(input_ids=padded.tokens, attention_mask=mask, labels=labels).loss.backward()

    functions = {
        "packed": lambda: ours(packed)["task"].backward(),
        "padded": lambda: ours(padded)["task"].backward(),
        "transformers": peer,
    }
    tokens = sum(len(e.tokens) for e in examples)
    return {name: tokens / t for name, t in seconds(functions).items()}


def main() -> None:
    """Measure every size and distribution, print the table, write the results."""
    table = Table("model", "lengths", "packed", "padded", "transformers", "packed/padded", "packed/transformers")
    results = {}
    for size in ("tiny", "mini", "small"):
        for name, (low, high) in LENGTHS.items():
            speed = measure(size, low, high)
            ratios = speed["packed"] / speed["padded"], speed["packed"] / speed["transformers"]
            table.add_row(size, name, *(f"{v:,.0f}" for v in speed.values()), *(f"{r:.2f}" for r in ratios))
            results[f"{size}, {name}"] = {**speed, "packed/padded": ratios[0], "packed/transformers": ratios[1]}
    Console().print("Real tokens a second, forward and backward, 32 sequences, float32, dropout off", table)
    record("layouts_cpu", {"threads": torch.get_num_threads(), "tokens_per_second": results})


if __name__ == "__main__":
    main()

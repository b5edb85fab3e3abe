"""Predictions of every family on a CPU: a classifier in the shape of the comparison, with random weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.corpora import VOCABULARY
from benchmarks.family_table import FAMILIES, QUALITY, QUALITY_SMOKE
from bertsmith.batch import Example
from bertsmith.inference.engines import Engine, TorchEngine, int8_backends
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.recipes import recipe

LENGTHS, BATCHES = (32, 128, 512), (1, 16)
PRECISIONS = ("float32", "int8")
LEAST = 0.5  # seconds that a measurement takes at least: short predictions are repeated
ROUNDS = 3
Results = dict[str, Any]


def classifier(name: str, smoke: bool) -> TaskModel:
    """A family's encoder in the shape of the comparison, for sequences of up to 512 tokens, with a classifier on it."""
    torch.manual_seed(0)
    size = replace(QUALITY_SMOKE if smoke else QUALITY, length=max(LENGTHS))
    encoder = size.encoder(FAMILIES[name], recipe(FAMILIES[name].recipe).model, 0.0)
    encoder = replace(encoder, vocab_size=200 if smoke else VOCABULARY)
    return TaskModel(Encoder(encoder), HeadConfig("single", ("no", "yes"))).eval()


def some_examples(length: int, batch: int) -> list[Example]:
    """Random tokens in sequences of one length."""
    rng = np.random.default_rng(length)
    return [Example(rng.integers(5, 200, length), np.zeros(length, dtype=np.int64)) for _ in range(batch)]


def seconds_of(engine: Engine, examples: Sequence[Example], least: float) -> float:
    """The mean seconds of a prediction, repeated until they are long enough to be measured."""
    began, times = time.perf_counter(), 0
    while times == 0 or time.perf_counter() - began < least:
        engine.run(examples)
        times += 1
    return (time.perf_counter() - began) / times


def measure_cpu(names: Sequence[str], threads: int, smoke: bool) -> dict[str, Results]:
    """The times of all families' predictions, medians of several rounds; in a round the families take turns."""
    models = {name: classifier(name, smoke) for name in names}
    engines: dict[tuple[str, str], Engine] = {
        (name, precision): TorchEngine(model, torch.device("cpu"), threads, precision)  # type: ignore[arg-type]
        for name, model in models.items() for precision in PRECISIONS if precision != "int8" or int8_backends()
    }  # fmt: skip
    found: dict[str, Results] = {
        f"{name}, {precision}": {
            "parameters": sum(p.numel() for p in models[name].parameters()),
            "layers": models[name].encoder.config.num_layers,
            "threads": threads,
            "milliseconds": {},
        }
        for name, precision in engines
    }
    rounds, least = (1, 0.0) if smoke else (ROUNDS, LEAST)
    for batch in BATCHES:
        for length in LENGTHS:
            examples = some_examples(length, batch)
            times: dict[tuple[str, str], list[float]] = {key: [] for key in engines}
            for engine in engines.values():
                engine.run(examples[:1])  # to warm up
            for _ in range(rounds):
                for key, engine in engines.items():
                    times[key].append(seconds_of(engine, examples, least))
            for (name, precision), values in times.items():
                median = 1000 * statistics.median(values)
                found[f"{name}, {precision}"]["milliseconds"][f"{batch} × {length}"] = float(f"{median:.4g}")
    return found

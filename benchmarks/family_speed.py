"""The speed of pre-training steps of every family, beside `transformers` compiled, in one run.

Whole steps as in `pretrain_gpu.py`: forward, backward, clipping at 1, AdamW, on sequences of one length with dropout
0.1. TFLOP/s count the model's operations, those of ELECTRA's generator and of the teacher included, so that a family
that computes more for a token is not called slower for it. A peer's TFLOP/s are counted by the same operations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.family_peers import Shape, peer_seconds
from benchmarks.family_table import SIZES, speed_config
from benchmarks.peer_forms import DEVICE, TOKENS, free_memory, measure
from benchmarks.pretrain_gpu import full_batch, our_steps, plain_reason
from bertsmith.batch import Batch, Label, Packed
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.kinds import build_objective, objective_class
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.objective import ORIGINAL_LABEL, Objective
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.pretraining.loader import ORIGINAL
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.training.parts import freeze
from bertsmith.training.settings import TrainConfig
from bertsmith.training.speed import matrix_ceiling

ALONE = "distilbert, no teacher"  # the student alone, with masked words as its only loss
MEASURED = ("bert", "roberta", "albert", ALONE, "distilbert", "electra")
GOAL = 0.85  # of the TFLOP/s of a BERT of the same shape
VOCABULARY = 30522  # of every family, so that the shapes are the same
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
Results = dict[str, Any]


def family_batch(config: PretrainConfig, length: int, tokens: int) -> Batch:
    """Random tokens in sequences of one length, with the labels that the objective counts."""
    batch = full_batch(length, tokens, config.model.vocab_size, config.model.num_segments)
    losses = objective_class(config.objective).counts(config.objective)
    if ORIGINAL_LABEL in losses.values():
        batch = batch.with_labels({ORIGINAL_LABEL: Label(batch.tokens.numpy(), ORIGINAL)})
    wanted = {"masked", "targets", *losses.values()}
    labels = {name: values for name, values in batch.labels.items() if name in wanted}
    counts = {loss: len(labels[name]) if name in labels else batch.num_tokens for loss, name in losses.items()}
    return replace(batch, labels=labels, counts=counts)


def entry(objective: Objective, batch: Batch, measured: dict[str, float]) -> Results:
    """Tokens a second, TFLOP/s, memory and the time that compiling took."""
    assert isinstance(batch.layout, Packed)
    lengths, seconds = batch.layout.lengths.tolist(), measured["seconds"]
    flops = objective.flops(lengths, len(batch.labels["masked"]))
    found = {
        "tokens_per_second": round(batch.num_tokens / seconds),
        "tflops": float(f"{flops / seconds / 1e12:.4g}"),
        "mflop_per_token": round(flops / batch.num_tokens / 1e6, 3),
        "memory_gb": measured["memory_gb"],
        "compile_seconds": round(measured["extra"], 1),
    }
    if DEVICE.type == "cuda":
        found["share_of_ceiling"] = round(flops / seconds / matrix_ceiling(DEVICE, torch.bfloat16), 3)
    return found


def measured_config(name: str, size: str) -> PretrainConfig:
    """The configuration of a family in the shape of a size, with the vocabulary that all of them get."""
    config = speed_config(name.split(",")[0], size)
    config = replace(config, model=replace(config.model, vocab_size=VOCABULARY if size != "smoke" else 1200))
    return replace(config, objective=MaskedLMConfig(next_sentence=False)) if name == ALONE else config


def our_objective(name: str, config: PretrainConfig, size: str) -> Objective:
    """The module that is trained; DistilBERT's teacher is a BERT with random weights."""
    objective = build_objective(Encoder(config.model), config.objective)
    if name == "distilbert":
        objective.teacher = MaskedLM(Encoder(measured_config("bert", size).model), MaskedLMConfig(next_sentence=False))
        freeze(objective)
    return objective


def second_encoder(objective: Objective) -> EncoderConfig | None:
    """The encoder of ELECTRA's generator or of a teacher."""
    found = [part for name in ("generator", "teacher") if (part := getattr(objective, name, None)) is not None]
    return found[0].encoder.config if found else None


def shape_of(config: EncoderConfig) -> Shape:
    """An encoder's shape for the peer."""
    sizes = config.num_layers, config.hidden_size, config.num_heads, config.max_positions, config.vocab_size
    return Shape(*sizes, config.embedding_size, ACTIVATIONS[config.activation], config.hidden_dropout)


def measure_family(name: str, size: str, peer: bool) -> Results:
    """Our steps of a family, and those of its compiled peer."""
    tokens, steps, warm = (256, 1, 1) if size == "smoke" else (TOKENS, 10, 6)
    length = SIZES[size].length
    config = measured_config(name, size)
    objective, batch = our_objective(name, config, size), family_batch(config, length, tokens)
    free_memory()
    measured = measure(our_steps(objective.to(DEVICE), [batch], TrainConfig(steps=1)), steps, warm)
    found: Results = {"bertsmith": entry(objective, batch, measured), "shape": SIZES[size].words}
    found["kernels"] = plain_reason(objective) or "fused"
    if peer:
        other, own = second_encoder(objective), shape_of(config.model)
        objective.cpu()  # the peer is to have all memory
        given = full_batch(length, tokens, config.model.vocab_size)
        theirs = peer_seconds(name.split(",")[0], own, shape_of(other) if other else None, given, steps, warm)
        if theirs is None:
            return {**found, "transformers": "out of memory"}
        found["transformers"] = entry(objective, batch, theirs)
        speeds = [found[who]["tokens_per_second"] for who in ("bertsmith", "transformers")]
        found["ratio"] = round(speeds[0] / speeds[1], 3)
    return found


def beside_bert(found: Results, bert: Results) -> Results:
    """The TFLOP/s as a share of those of our BERT of the same shape in the same run, and whether that is enough."""
    share = found["bertsmith"]["tflops"] / max(1e-9, bert["bertsmith"]["tflops"])
    return {**found, "tflops_of_bert": round(share, 3), "reaches_goal": share >= GOAL}

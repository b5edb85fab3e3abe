"""Training on one GPU beside `transformers` (SDPA, bfloat16 autocast, torch.compile, fused AdamW), in the same run.

    python -m benchmarks.pretrain_gpu full documents muon finetune profile equal run \
        --short SHARDS --long SHARDS --rows SST-2/train.tsv

Whole steps: forward, backward, clipping at 1, AdamW. `full` has sequences of full length, `documents` real ones (short
and long documents, 512 tokens at most; `transformers` gets the same batches padded), each beside the forms of
`transformers` that its users choose from (`peer_forms.py`), `muon` compares two optimisers,
`finetune` takes Base through short texts in batches of 32, `profile`
says where the time goes on plain and on fused kernels, `equal` trains a small model on both and compares their held-out
losses, `run` is the command itself. Sections that are not run keep their last result.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import BertForSequenceClassification

from benchmarks.kernel_kinds import by_kind
from benchmarks.peer_forms import (
    DEVICE,
    TOKENS,
    Form,
    Step,
    against,
    best_form,
    free_memory,
    hf_config,
    measure,
    padded_to,
    peer_steps,
    pinned,
    rectangular,
    steps_per_second,
    theirs,
)
from benchmarks.pretrain_cpu import loader_of, peer_inputs
from benchmarks.record import commit, read_results, record
from bertsmith.batch import Batch, Example, Label, bucketed, collate, lay_out
from bertsmith.config import override
from bertsmith.corpus.shards import Corpus
from bertsmith.model.config import EncoderConfig
from bertsmith.model.cost import training_flops
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused_choice import choose, plain_kernels
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.sizes import encoder_config
from bertsmith.objectives.causal_lm import MASKED, TARGET
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.pretraining import held_out
from bertsmith.pretraining.loader import PAIR, split_documents
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe
from bertsmith.tasks.examples import TARGET as CLASS
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.cuda_graphs import GraphRunner
from bertsmith.training.optim import make_optimizers
from bertsmith.training.settings import TrainConfig
from bertsmith.training.speed import matrix_ceiling
from bertsmith.training.steps import gradients, update

NAME = "pretrain_gpu"
DYNAMIC, COMPILED = "transformers, dynamic padding", "transformers, compiled with CUDA graphs, one length"
SIZES = {"base": 128, "large": 512}  # and the length that each is measured at


def our_steps(model: torch.nn.Module, batches: list[Batch], train: TrainConfig) -> Step:
    """A function that takes the next batch through a whole step, as `fit` does."""
    optimizers = make_optimizers(model, train)
    fused, on_gpu = not plain_reason(model), DEVICE.type == "cuda"
    recorder = GraphRunner(model, optimizers, train, fused) if on_gpu else None
    batches = [bucketed(b).pin_memory() if on_gpu and not b.tokens.is_cuda else bucketed(b) for b in batches]
    turn = iter(range(10**9))

    def step() -> None:
        number = next(turn)
        batch = batches[number % len(batches)]
        gradients(model, [batch], {n: float(c) for n, c in batch.counts.items()}, train, number, recorder)
        update(optimizers, 1.0, recorder)

    return step


def plain_reason(model: torch.nn.Module) -> str:
    """The reason why an encoder of a model cannot run on the fused kernels; empty if all of them can."""
    encoders = [part for part in model.modules() if isinstance(part, Encoder)]
    reasons = (choose(encoder.config, DEVICE, torch.bfloat16).reason for encoder in encoders)
    return next((reason for reason in reasons if reason), "")


def with_dropout(size: str, dropout: float) -> EncoderConfig:
    return dataclasses.replace(encoder_config(size), hidden_dropout=dropout, attention_dropout=dropout)


def full_batch(length: int, tokens: int = TOKENS, vocabulary: int = 30522, segments: int = 2) -> Batch:
    """Random tokens in sequences of one length, 15 % masked; the second half of a sequence is a second segment."""
    rng = np.random.default_rng(0)
    rows = tokens // length
    ids = rng.integers(1000, vocabulary, tokens)
    second = np.tile(np.arange(length) >= length // 2, rows) & (segments > 1)
    batch = lay_out(ids, second, np.full(rows, length), packed=True)
    masked = np.sort(rng.choice(tokens, int(0.15 * tokens), replace=False))
    targets = Label(ids[masked], dataclasses.replace(TARGET, loss="mlm"))
    labels = {"masked": Label(masked, MASKED), "targets": targets, "next": Label(rng.integers(0, 2, rows), PAIR)}
    return batch.with_labels(labels)


def ours(config: EncoderConfig, batches: list[Batch], steps: int, train: TrainConfig | None = None) -> dict[str, float]:
    """Our steps on these batches."""
    free_memory()
    step = our_steps(MaskedLM(Encoder(config)).to(DEVICE), batches, train or TrainConfig(steps=1))
    return measure(step, steps, max(6, 2 * len(batches)))


def entry(config: EncoderConfig, batches: list[Batch], measured: dict[str, float]) -> dict[str, float]:
    """Real tokens a second, and the share of what a large matrix product reaches."""
    flops = statistics.mean(
        training_flops(config, b.layout.lengths.tolist(), b.counts["mlm"])  # type: ignore[union-attr]
        for b in batches
    )
    seconds, ceiling = measured["seconds"], matrix_ceiling(DEVICE, torch.bfloat16)
    return {
        "tokens_per_second": round(statistics.mean(b.num_tokens for b in batches) / seconds),
        "tflops": round(flops / seconds / 1e12, 1),
        "share_of_ceiling": round(flops / seconds / ceiling, 3),
        "memory_gb": measured["memory_gb"],
        "compile_seconds": round(measured["extra"], 1),
    }


def full(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sequences of one length; the peer's best form is looked for with dropout and clipping, and kept without them."""
    found = read_results(NAME).get("full", {})
    for size, length in SIZES.items():
        if arguments.size in (None, size):
            found.update({f"{size}, length {length}, {name}": f for name, f in full_size(size, length).items()})
    return found


def full_size(size: str, length: int) -> dict[str, Any]:
    batch = full_batch(length)

    def our(config: EncoderConfig, train: TrainConfig) -> dict[str, float]:
        return entry(config, [batch], ours(config, [batch], 10, train))

    def their(config: EncoderConfig, form: Form) -> dict[str, float] | None:
        given = full_batch(length, form.tokens)
        measured = theirs(config, form, [rectangular(given, form.mask)], 10)
        found = entry(config, [given], measured) if measured else None
        print(size, form, found, flush=True)
        return found

    config, clipping = with_dropout(size, 0.1), TrainConfig(steps=1)
    best, forms = best_form(lambda form: their(config, form))
    unclipped, plain = replace(best, clipping=False), with_dropout(size, 0.0)
    return {
        "dropout 0.1": against(our(config, clipping), forms),
        "dropout 0.1, no clipping": against(
            our(config, TrainConfig(steps=1, clip_norm=0.0)), {unclipped: their(config, unclipped)}
        ),
        "dropout 0.0": against(our(plain, clipping), {best: their(plain, best)}),
    }


def documents(arguments: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name, folder in (("short documents", arguments.short), ("long documents", arguments.long)):
        corpus, base = Corpus.open(folder), recipe("bert-base")
        config = dataclasses.replace(base, data=dataclasses.replace(base.data, max_length=512, long_length=None))
        packed, padded = (loader_of(corpus, config, p) for p in (True, False))
        rows, count = TOKENS // 512, 12
        batches = [packed.step(i, rows, rows)[0] for i in range(count)]
        inputs = [padded_to(512, peer_inputs(padded.step(i, rows, rows)[0])) for i in range(count)]
        fullness = sum(b.num_tokens for b in batches) / (count * rows * 512)
        model = with_dropout("base", 0.1)
        forms: dict[Form, Any] = {}
        for form in (Form(mask=True, tokens=rows * 512), Form(mask=True, rounded_vocabulary=True, tokens=rows * 512)):
            measured = theirs(model, form, inputs, 12)
            forms[form] = measured and entry(model, batches, measured)
        our = entry(model, batches, ours(model, batches, 12))
        found[name] = {"fullness": round(fullness, 3), **against(our, forms)}
        print(name, json.dumps(found[name]), flush=True)
    return found


def muon(arguments: argparse.Namespace) -> dict[str, Any]:
    base, batch = recipe("roberta-prenorm"), full_batch(128)
    found: dict[str, Any] = {}
    for name in ("adamw", "muon", "adamw", "muon"):
        # Rates that leave the weights as they are: products of wild numbers take another time.
        train = dataclasses.replace(base.train, optimizer=name, learning_rate=1e-6, rest_learning_rate=1e-6)
        model = MaskedLM(Encoder(base.model), MaskedLMConfig(next_sentence=False)).to(DEVICE)
        batch = dataclasses.replace(batch, counts={"mlm": batch.counts["mlm"]})
        milliseconds = 1000 * measure(our_steps(model, [batch], train), 20)["seconds"]
        found[name] = round(min(milliseconds, found.get(name, 1e9)), 2)
    return {"milliseconds": found, "tokens": TOKENS, "muon_over_adamw": round(found["muon"] / found["adamw"] - 1, 4)}


def finetune(arguments: argparse.Namespace) -> dict[str, Any]:
    tokenizer = Tokenizer.load(arguments.tokenizer)
    lines = [line.split("\t") for line in arguments.rows.read_text(encoding="utf-8").splitlines()[1:9601]]
    ids = [np.array(i) for i in tokenizer.encode([text for text, _ in lines], special=True)]
    examples = [
        Example(i, np.zeros_like(i), {"label": Label(int(label), CLASS)})
        for i, (_, label) in zip(ids, lines, strict=True)
    ]
    groups = [examples[i : i + 32] for i in range(0, len(examples), 32)]
    config = encoder_config("base")
    train = TrainConfig(steps=1, batch_size=32, learning_rate=2e-5)
    ours = TaskModel(Encoder(config), HeadConfig("single", ("0", "1"))).to(DEVICE)
    step = our_steps(ours, [collate(g, packed=True) for g in groups], train)
    began = time.perf_counter()
    for _ in range(60):
        step()
    warm = time.perf_counter() - began
    found = {"bertsmith": steps_per_second(step), "bertsmith_first_60_seconds": round(warm, 2)}
    padded = [collate(g, packed=False) for g in groups]
    inputs = [
        {
            "input_ids": b.tokens.pin_memory(),
            "attention_mask": b.layout.mask.long().pin_memory(),  # type: ignore[union-attr]
            "labels": b.labels["label"].pin_memory(),
        }
        for b in padded
    ]
    theirs = BertForSequenceClassification(hf_config(config)).to(DEVICE)
    peer = peer_steps(theirs, inputs, 2e-5)
    for _ in range(20):
        peer()
    found[DYNAMIC] = steps_per_second(peer)
    del theirs, peer
    torch._dynamo.reset()
    longest = max(len(i) for i in ids)
    compiled = torch.compile(BertForSequenceClassification(hf_config(config)).to(DEVICE), mode="reduce-overhead")
    peer = peer_steps(compiled, [pinned(padded_to(longest, i)) for i in inputs], 2e-5)
    for _ in range(20):
        peer()
    found[COMPILED] = steps_per_second(peer)
    return {
        "steps_per_second": found,
        "mean_length": round(statistics.mean(len(i) for i in ids), 1),
        "longest": longest,
        "ratio": round(found["bertsmith"] / max(found[DYNAMIC], found[COMPILED]), 2),
        "ratio_to_dynamic_padding": round(found["bertsmith"] / found[DYNAMIC], 2),
    }


def profiles(arguments: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for size, length in SIZES.items():
        for name, context in (("plain", plain_kernels()), ("fused", nullcontext())):
            with context:
                model = MaskedLM(Encoder(with_dropout(size, 0.0))).to(DEVICE)
                step = our_steps(model, [full_batch(length).to(DEVICE)], TrainConfig(steps=1))
                for _ in range(4):
                    step()
                kinds, top = by_kind(step)
            found[f"{size}, length {length}, {name}"] = {"milliseconds": kinds, "kernels": dict(top)}
            print(size, name, kinds, flush=True)
            del model, step
            torch.cuda.empty_cache()
    return found


def equal(arguments: argparse.Namespace) -> dict[str, Any]:
    """Held-out losses after some hundred steps of real training, on plain and on fused kernels, several seeds."""
    corpus, base = Corpus.open(arguments.long), recipe("bert-small")
    tokenizer = Tokenizer.load(corpus.folder)
    train = TrainConfig(steps=400, batch_size=256, learning_rate=5e-4, warmup=0.1)
    config: PretrainConfig = dataclasses.replace(base, train=train)
    _, kept = split_documents(corpus.manifest.documents, 0.01)
    samples = held_out.choose_samples(corpus, kept, tokenizer, config.model.max_positions)
    loader = loader_of(corpus, config, True)
    found: dict[str, Any] = {"plain": [], "fused": []}
    for seed in (1, 2, 3):
        for name, context in (("plain", plain_kernels()), ("fused", nullcontext())):
            torch.manual_seed(seed)
            model = MaskedLM(Encoder(config.model)).to(DEVICE)
            with context:
                for _ in train_on(loader, model, dataclasses.replace(train, seed=seed)):
                    pass
            scores = held_out.evaluate(model, loader_of(corpus, config, True), samples, torch.bfloat16)
            found[name].append(round(float(scores["mlm_loss"]), 4))
            print(name, seed, found[name][-1], flush=True)
    return {**found, "steps": train.steps, "model": "bert-small, length 128, dropout 0.1"}


def train_on(loader: Any, model: MaskedLM, train: TrainConfig) -> Iterator[int]:
    optimizers = make_optimizers(model, train)
    recorder = GraphRunner(model, optimizers, train, choose(model.encoder.config, DEVICE, torch.bfloat16).fused)
    for number in range(train.steps or 0):
        batch = bucketed(loader.step(number, train.batch_size, train.batch_size)[0])
        gradients(model, [batch], {n: float(c) for n, c in batch.counts.items()}, train, number, recorder)
        update(optimizers, min(1.0, number / 40), recorder)
        yield number


def whole_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """`pretrain` itself on real shards, both lengths: how long its GPU waits for data."""
    settings = ["train.steps=300", "train.batch_size=512", "train.evaluate_every=0"]
    with tempfile.TemporaryDirectory() as folder:
        pretrain(override(recipe("bert-base"), settings), arguments.long, Path(folder) / "run")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = [m for m in map(json.loads, lines) if "waiting_share" in m][1:]  # the workers start in the first
    return {
        "model": "bert-base, 512 sequences a step, 300 steps, lengths 128 and 512",
        "tokens_per_second": round(statistics.median(m["tokens_per_second"] for m in logged)),
        "waiting_share": round(statistics.mean(m["waiting_share"] for m in logged), 4),
        "worst_waiting_share": round(max(m["waiting_share"] for m in logged), 4),
        "compile_seconds": max(m.get("compile_seconds", 0.0) for m in logged),
    }


SECTIONS = {
    "full": full,
    "documents": documents,
    "muon": muon,
    "finetune": finetune,
    "profile": profiles,
    "equal": equal,
    "run": whole_run,
}


def show(results: dict[str, Any]) -> None:
    table = Table("what", "tokens/s", "× transformers", "TFLOP/s", "of the ceiling", "memory GB", "compile s")
    for section in ("full", "documents"):
        for name, found in results.get(section, {}).items():
            for who in ("bertsmith", "transformers"):
                values = found[who]
                table.add_row(
                    f"{name}: {who}",
                    f"{values['tokens_per_second']:,}",
                    f"{found['ratio']:.2f}" if who == "bertsmith" else "",
                    f"{values['tflops']:.0f}",
                    f"{100 * values['share_of_ceiling']:.0f} %",
                    f"{values['memory_gb']:.0f}",
                    f"{values['compile_seconds']:.0f}",
                )
    Console(width=130).print(table)
    for section in ("muon", "finetune", "equal", "run"):
        if section in results:
            print(section, json.dumps(results[section]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    parser.add_argument("--size", choices=SIZES, help="full: one size alone")
    parser.add_argument("--short", type=Path, help="shards of short documents")
    parser.add_argument("--long", type=Path, help="shards of long documents")
    parser.add_argument("--rows", type=Path, help="SST-2's train.tsv")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer folder for the rows")
    arguments = parser.parse_args()
    results = read_results(NAME)
    for section in arguments.sections:
        results[section] = SECTIONS[section](arguments)
        results.setdefault("taken", {})[section] = {"commit": commit(), "date": datetime.date.today().isoformat()}
        print(record(NAME, results), flush=True)
    show(results)


if __name__ == "__main__":
    main()

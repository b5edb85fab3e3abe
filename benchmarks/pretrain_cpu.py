"""Pre-training on a CPU beside `transformers`: whole steps (forward, backward, clipping, AdamW) on the same batches.

The batches are real pairs of the demo's text, as the tiny and mini recipes make them (dropout 0.1, MLM + NSP, 30,522
rows in the vocabulary); `transformers` gets them padded to the longest (BertForPreTraining, fused AdamW).
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import BertConfig, BertForPreTraining

from benchmarks.layouts_cpu import seconds
from benchmarks.record import record
from bertsmith.batch import Batch, Padded
from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.shards import Corpus
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.demo.run import write_text
from bertsmith.formats.saved_config import config_out
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.pretraining.loader import Loader
from bertsmith.pretraining.segments import segment_source
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.optim import make_optimizers
from bertsmith.training.steps import gradients, update

BATCH_SIZE, VOCABULARY = 32, 30522


def loader_of(corpus: Corpus, config: PretrainConfig, packed: bool) -> Loader:
    documents = np.arange(corpus.manifest.documents)
    source = segment_source("next", corpus, documents, config.data.max_length, config.data.short_share, 1)
    return Loader.of(source, Tokenizer.load(corpus.folder), config.data, packed)


def measure(name: str, corpus: Corpus) -> dict[str, float]:
    """Seconds of a step, ours and theirs."""
    config = recipe(name)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=VOCABULARY))
    ours = MaskedLM(Encoder(config.model))
    theirs = BertForPreTraining(BertConfig(**{k: v for k, v in config_out(ours).items() if k != "architectures"}))
    packed, padded = (loader_of(corpus, config, p).step(0, BATCH_SIZE, BATCH_SIZE) for p in (True, False))
    optimizers = make_optimizers(ours, config.train)
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def our_step() -> None:
        counts = {n: float(c) for n, c in packed[0].counts.items()}
        gradients(ours, packed, counts, config.train, 0)
        update(optimizers, 1.0)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)

    inputs = peer_inputs(padded[0])
    theirs.train()

    def peer_step() -> None:
        theirs(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adam.step()
        adam.zero_grad(set_to_none=True)

    times = seconds({"ours": our_step, "transformers": peer_step})
    tokens = packed[0].num_tokens
    return {
        "tokens": tokens,
        "ours_tokens_per_second": round(tokens / times["ours"]),
        "transformers_tokens_per_second": round(tokens / times["transformers"]),
        "ratio": round(times["transformers"] / times["ours"], 2),
    }


def peer_inputs(batch: Batch) -> dict[str, Any]:
    """A padded batch as `transformers` takes it: a label everywhere, -100 where nothing is to be predicted."""
    assert isinstance(batch.layout, Padded)
    labels = torch.full_like(batch.tokens, -100)
    labels.view(-1)[batch.labels["masked"]] = batch.labels["targets"].long()
    return {
        "input_ids": batch.tokens,
        "token_type_ids": batch.segments,
        "attention_mask": batch.layout.mask.long(),
        "labels": labels,
        "next_sentence_label": batch.labels["next"],
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_text(folder / "text")
        text = [folder / "text" / "text.txt"]
        train_tokenizer(text, folder / "tok", vocab_size=8000)
        corpus = build_corpus(text, folder / "tok", folder / "shards")
        results = {name: measure(name, corpus) for name in ("bert-tiny", "bert-mini")}
    table = Table("recipe", "ours tokens/s", "transformers tokens/s", "ratio")
    for name, found in results.items():
        table.add_row(
            name,
            f"{found['ours_tokens_per_second']:,}",
            f"{found['transformers_tokens_per_second']:,}",
            f"{found['ratio']:.2f}",
        )
    Console().print(table)
    print(record("pretrain_cpu", {"threads": torch.get_num_threads(), "batch_size": BATCH_SIZE, "recipes": results}))


if __name__ == "__main__":
    main()

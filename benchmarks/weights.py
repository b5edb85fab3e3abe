"""What a pre-training run does to the weights: how large the matrices of the layers are, and how sharp attention is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.batch import Example, collate
from bertsmith.corpus.shards import Corpus
from bertsmith.formats.hf import load_folder
from bertsmith.model.attention import Trace

TEXTS, LONGEST = 32, 128  # sequences, and the most tokens of one
MATRICES = ("qkv", "output", "inner", "outer")  # of a layer: of attention, then of the feed-forward part


def weight_facts(model: Path, corpus: Path) -> dict[str, Any]:
    """The root mean square of each matrix, layer by layer, beside `init_std`, and of attention its largest weights.

    `largest_attention_weight` is the mean over tokens and heads of the largest weight that a token gives, layer by
    layer: 1 where every token sees a single other one, and then nothing is left for fine-tuning to shift.
    """
    loaded = load_folder(model)
    encoder = loaded.model.eval().encoder  # type: ignore[union-attr]
    named = [*encoder.layers.named_parameters()]
    sizes = {
        name: [p.detach().square().mean().sqrt() for n, p in named if n.endswith(f"{name}.weight")] for name in MATRICES
    }
    found: dict[str, Any] = {"init_std": encoder.config.init_std}
    found |= {name: [round(float(size), 4) for size in each] for name, each in sizes.items() if each}
    if encoder.config.layer_type == "lstm":
        return found
    length = min(LONGEST, encoder.config.max_positions) - loaded.tokenizer.frame.size(1)
    texts = [loaded.tokenizer.joiner.join(part) for part in _parts(Corpus.open(corpus), length)]
    trace = Trace()
    with torch.no_grad():
        encoder(collate([Example(text.tokens, text.segments) for text in texts], packed=False), trace)
    largest = [float(weights.amax(-1).mean()) for weights in trace.attention]
    return {**found, "largest_attention_weight": [round(value, 3) for value in largest]}


def _parts(corpus: Corpus, length: int) -> NDArray[Any]:
    """The beginning of a corpus in parts of one length, so that no padding is among the tokens."""
    found: list[NDArray[Any]] = []
    for number in range(corpus.manifest.documents):
        found.append(corpus.document(number)[0])
        if sum(map(len, found)) >= TEXTS * length:
            break
    tokens = np.concatenate(found)[: TEXTS * length]
    return tokens[: len(tokens) // length * length].reshape(-1, length)

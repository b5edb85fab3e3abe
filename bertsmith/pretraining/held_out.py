"""Evaluation of a pre-training objective on held-out text: scores, and predictions for masks in sample sentences."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from bertsmith import draws
from bertsmith.batch import Example, collate
from bertsmith.corpus.shards import Corpus
from bertsmith.objectives.objective import Objective
from bertsmith.pretraining.loader import Loader
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.text.frame import SHOWN_MASK
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.runlog import SCALE, is_score

LONG = "long_"  # the prefix of scores on sequences of the second phase's length
SEQUENCES, TOKENS, AT_ONCE = 512, 65_536, 4096  # the evaluation ends at either limit; tokens of a batch
TEXTS, CANDIDATES = 4, 3  # sample sentences, and predictions for each mask
SHORTEST, LONGEST = 8, 32  # tokens of a sample sentence
TEXT, SAMPLING = 109, 110  # streams of draws


@dataclass(frozen=True)
class Sample:
    """A held-out sentence with masks."""

    example: Example
    masked: list[int]
    answers: list[str]


def settings_of(config: PretrainConfig) -> PretrainConfig:
    """The settings of a run for its held-out text: full sentences instead of varied ones, so that runs compare."""
    data = config.data
    return replace(config, data=replace(data, pairs="full")) if data.pairs == "varied" else config


@torch.inference_mode()
def evaluate(
    objective: Objective, loader: Loader, samples: list[Sample], dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """The objective's scores, the perplexity of the predicted tokens, and the samples with predictions.

    The numbers that an objective draws are the same in every evaluation.
    """
    objective.eval()
    torch.manual_seed(draws.seed(0, SAMPLING))  # training seeds its generator anew for every micro-batch
    device = next(objective.parameters()).device
    sums, counts = defaultdict[str, float](float), Counter[str]()
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        for indices in batches(loader):
            batch = loader.batch(np.zeros_like(indices), indices).to(device)
            for name, (total, count) in objective.measures(batch).items():
                sums[name] += total.item()
                counts[name] += int(count)
        filled = [_fill(objective, s, loader.tokenizer) for s in samples]
    result: dict[str, Any] = {}
    for name in sums:
        if counts[name]:
            result[name] = (SCALE if is_score(name) else 1) * sums[name] / counts[name]
        if name == f"{objective.token_loss}_loss":
            result[f"{objective.token_loss}_perplexity"] = float(np.exp(min(result[name], 700.0)))
    if objective.goal == "-loss":  # the weighted sum that training minimises
        weights = objective.loss_weights
        result["loss"] = sum(weights.get(n, 1.0) * result[f"{n}_loss"] for n in objective.counts(objective.config))
    return {**result, **({"samples": filled} if filled else {})}


def batches(loader: Loader) -> Iterator[np.ndarray[Any, Any]]:
    """The indices of the held-out sequences that are evaluated, batch by batch: the same ones every time."""
    length = loader.source.max_length
    count, at_once = min(len(loader.source), SEQUENCES, max(1, TOKENS // length)), max(1, AT_ONCE // length)
    for begin in range(0, count, at_once):
        yield draws.permute(np.arange(begin, min(begin + at_once, count)), len(loader.source), 0)


def choose_samples(
    corpus: Corpus, documents: np.ndarray[Any, Any], tokenizer: Tokenizer, positions: int
) -> list[Sample]:
    """A few held-out sentences, the same ones in every evaluation and every run on this corpus."""
    samples: list[Sample] = []
    longest = min(LONGEST, positions - tokenizer.frame.size(1))
    for attempt in range(40 * TEXTS):
        document = int(documents[int(draws.below(len(documents), attempt, TEXT))])
        tokens, starts = corpus.document(document)
        number = int(draws.below(len(starts) - 1, attempt, TEXT, 1))
        sentence = tokens[starts[number] : starts[number + 1]]
        if SHORTEST <= len(sentence) <= longest:
            samples.append(_sample(sentence, attempt, tokenizer))
        if len(samples) == TEXTS:
            break
    return samples


def _sample(sentence: np.ndarray[Any, Any], number: int, tokenizer: Tokenizer) -> Sample:
    joined = tokenizer.joiner.join(sentence)
    ids, continues = joined.tokens, tokenizer.continues(joined.tokens)
    order = joined.begins[0] + draws.permute(np.arange(len(sentence)), len(sentence), number, TEXT)
    whole = [i for i in order.tolist() if not continues[i + 1]]
    words = [i for i in whole if tokenizer.spellings[int(ids[i])].isalpha()] or order.tolist()
    masked = sorted(words[: max(1, len(sentence) // 8)])
    answers = [tokenizer.shown(int(ids[i])) for i in masked]
    ids[masked] = tokenizer.mask_id
    return Sample(Example(ids, joined.segments), masked, answers)


def _fill(objective: Objective, sample: Sample, tokenizer: Tokenizer) -> dict[str, Any]:
    batch = collate([sample.example], packed=True)
    batch.labels["masked"] = torch.tensor(sample.masked)
    scores = objective.token_logits(batch.to(next(objective.parameters()).device))
    best = scores.float().softmax(-1).topk(CANDIDATES)
    guesses = [
        [[tokenizer.shown(i), round(p, 4)] for p, i in zip(ps, ids, strict=True)]
        for ps, ids in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]
    return {"text": _text(sample, tokenizer), "answers": sample.answers, "guesses": guesses}


def _text(sample: Sample, tokenizer: Tokenizer) -> str:
    """The sentence with its masks written out."""
    tokens, frame = sample.example.tokens, tokenizer.frame
    begins = [len(frame.first), *(place + 1 for place in sample.masked)]
    ends = [*sample.masked, len(tokens) - len(frame.last)]
    parts = [tokenizer.decode(tokens[begin:end].tolist()) for begin, end in zip(begins, ends, strict=True)]
    return f" {SHOWN_MASK} ".join(parts).strip()

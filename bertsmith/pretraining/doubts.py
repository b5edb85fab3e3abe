"""Notes on text that is poor for what a run asks of it, and on a model that has learnt hardly anything from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith import draws
from bertsmith.corpus.shards import Corpus
from bertsmith.objectives.objective import Objective
from bertsmith.pretraining import held_out
from bertsmith.pretraining.loader import Loader
from bertsmith.pretraining.segments import ONE_SEGMENT
from bertsmith.pretraining.settings import PretrainConfig

FEW, ENOUGH = 10, 20  # held-out documents
LINES = 1.2  # sentences of a document, on average: less if every line is a document
MAIN = 0.5  # the share of the text from which on one document is the main part of it
COUNTED = 2_000_000  # tokens from which the frequencies of words are taken
COUNTING = 111  # a stream of draws
DETECTS = 2.0  # percent of the replaced tokens: a detector that finds fewer calls nearly every token original
LEARNT = 0.3  # nats: a model whose loss is not that far below the loss without context has learnt hardly more
BLANK_LINES = "separate documents, and nothing else, by a blank line and build the corpus again"


def doubts(config: PretrainConfig, corpus: Corpus, kept: NDArray[np.int64]) -> list[str]:
    """The notes on documents that are no documents, and on few of them held out (`kept`)."""
    notes = [_documents(config, corpus), _few_held_out(corpus, kept)]
    return [note for note in notes if note]


def _documents(config: PretrainConfig, corpus: Corpus) -> str:
    """A note if pairs are asked for, and every line is a document or most of the text is one."""
    if config.data.pairs in ONE_SEGMENT:
        return ""
    alone = "data.pairs=full with objective.next_sentence=false learns from text without documents"
    sentences = corpus.manifest.sentences / corpus.manifest.documents
    if sentences < LINES:
        return (
            f"a document has {sentences:.1f} sentences on average, so that the two segments of a pair are mostly parts "
            f"of one sentence: {BLANK_LINES}, or {alone}"
        )
    share = int(corpus.document_tokens.max()) / corpus.manifest.tokens
    if share > MAIN:
        return f"one document of {corpus.manifest.documents:,} holds {share:.1%} of the text: {BLANK_LINES}, or {alone}"
    return ""


def _few_held_out(corpus: Corpus, kept: NDArray[np.int64]) -> str:
    """A note on few held-out documents, of which each one decides the scores."""
    if not 0 < len(kept) < FEW:
        return ""
    documents = corpus.manifest.documents
    share = corpus.document_tokens[kept].sum() / corpus.manifest.tokens
    text = f"{len(kept)} of {documents:,} documents are held out ({share:.1%} of the text), so their scores are noisy: "
    more = min(0.1, ENOUGH / documents)
    if round(more * documents) > len(kept):
        return f"{text}data.held_out={more:.2g} holds out {round(float(f'{more:.2g}') * documents)}"
    return f"{text}more text, or more documents ({BLANK_LINES}), would make them steady"


def loss_without_context(corpus: Corpus, documents: NDArray[np.int64], loader: Loader) -> float | None:
    """The held-out loss of a model that ignores the context and predicts every word by its frequency in the text.

    The frequencies are those of some training documents, with one more of every word. None if no word is held out.
    """
    counts, size = np.ones(loader.tokenizer.vocab_size), 0
    for number in draws.permute(np.arange(len(documents)), len(documents), 0, COUNTING):
        tokens, _ = corpus.document(int(documents[number]))
        counts += np.bincount(loader.predictable(tokens), minlength=len(counts))[: len(counts)]
        size += len(tokens)
        if size >= COUNTED:
            break
    losses = -np.log(counts / counts.sum())
    batches = [loader.batch(np.zeros_like(indices), indices) for indices in held_out.batches(loader)]
    targets = np.concatenate([batch.labels["targets"].numpy() for batch in batches])
    return float(losses[targets].mean()) if len(targets) else None


def learnt_little(objective: Objective, scores: Mapping[str, Any], without_context: float | None) -> str:
    """A sentence if a model has learnt hardly anything, by its scores on held-out documents; else empty.

    A detector finds hardly any of the replaced tokens; the loss of another model is not clearly below that of a model
    which ignores the context.
    """
    if (found := scores.get("detection_recall", DETECTS)) < DETECTS:
        return f"it has hardly learnt to detect replaced tokens: of those held out it finds {found:.1f} %"
    name = f"{objective.token_loss}_loss"
    if without_context is None or objective.goal != f"-{name}" or name not in scores:
        return ""
    if scores[name] < without_context - LEARNT:
        return ""
    return (
        f"it has learnt hardly more than word frequencies: its held-out loss is {scores[name]:.2f}, and that of a "
        f"model which ignores the context {without_context:.2f}"
    )

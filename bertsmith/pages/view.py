"""A page on what a model computes for one text: attention, masked words, and the nearest words of each layer's states.

n tokens, L layers, A heads, H hidden size, V vocabulary.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.batch import Example, collate
from bertsmith.errors import UserError
from bertsmith.inference.engines import batch_tokens, batches, threads_of
from bertsmith.inference.predictor import Predictor
from bertsmith.model.attention import Trace
from bertsmith.model.heads import TaskModel
from bertsmith.objectives.discriminator import Discriminator
from bertsmith.objectives.objective import Objective
from bertsmith.pages.page import write_page
from bertsmith.pages.view_page import body, prediction_parts
from bertsmith.progress import progress_bar

MOST_TOKENS = 128  # attention grows with their square: a page of 3 MB for BERT-Base
CANDIDATES, NEIGHBOURS = 8, 6
Words = list[tuple[str, float]]


def view(
    model: str | Path | None,
    text: str,
    pair: str | None = None,
    out: str | Path = "view.html",
    *,
    device: str | None = None,
) -> dict[str, Any]:
    """Write a self-contained page on what a model does with a text or a pair.

    If `model` is None, it is the one in BERTSMITH_MODEL or the default model of the package.
    """
    predictor = Predictor.load(model, device)
    config = predictor.torch_engine.model.encoder.config
    example = sequence_of(predictor, text, pair)
    found = look(predictor, example)
    size = f"{config.num_layers} layers with {config.num_heads} heads, {config.hidden_size} wide"
    name = predictor.folder.parent.name if predictor.folder.name == "model" else predictor.folder.name
    answer = _prediction(predictor, text, pair)
    write_page(
        out, f"Inside {name}", f"{len(example.tokens)} tokens, {size}", [*prediction_parts(answer), *body(found)]
    )
    shown = {} if answer is None else {"answer": answer}
    return {"page": str(out), "tokens": len(example.tokens), "masked_words": bool(found["masked"]), **shown}


def _prediction(predictor: Predictor, text: str, pair: str | None) -> dict[str, Any] | None:
    """Return the prediction of a fine-tuned model; None without a head, or if its task needs another input."""
    model = predictor.torch_engine.model
    if not isinstance(model, TaskModel) or any(name.startswith("head.") for name in predictor.missing):
        return None
    kind = model.head_config.kind
    if kind == "choice" or (kind == "span" and pair is None) or (kind == "tags" and pair is not None):
        return None
    return next(predictor.predict([text if pair is None else (text, pair)]))


def sequence_of(predictor: Predictor, text: str, pair: str | None = None) -> Example:
    """Return the text or the pair as one sequence."""
    if predictor.config.layer_type == "lstm":
        raise UserError(
            f"{predictor.folder} has LSTM layers, and the page shows attention; `bertsmith features` writes states"
        )
    tokenizer = predictor.tokenizer
    joined = tokenizer.joiner.join(*tokenizer.encode([text] if pair is None else [text, pair]))
    limit = min(MOST_TOKENS, predictor.positions)
    if (count := len(joined.tokens)) > limit:
        raise UserError(f"the text has {count} tokens with special tokens, and a page shows {limit}; shorten it")
    return Example(joined.tokens, joined.segments)


@dataclass(frozen=True)
class Step:
    """A part of what is computed for a page: its size as a number of tokens in a forward pass, and its function."""

    tokens: int
    run: Callable[[], None]


class Look:
    """What a model computes for one sequence, in steps, between which a server can answer other requests."""

    def __init__(self, predictor: Predictor, example: Example) -> None:
        self.predictor, self.example = predictor, example
        self.engine, self.model = predictor.torch_engine, predictor.torch_engine.model.eval()
        self.why_not = _why_not(predictor)
        self.attention: NDArray[np.uint8] = np.zeros((0, 0, 0, 0), np.uint8)  # weights (L, A, n, n), 255 for 1
        self.hidden: list[Tensor] = []  # of each layer, the embeddings first: (n, H)
        self.nearest: list[list[Words]] = [[] for _ in range(predictor.config.num_layers + 1)]
        self.masked: list[dict[str, Any] | None] = [None] * len(example.tokens)

    @property
    def steps(self) -> list[Step]:
        """The steps in their order: the forward pass, the nearest words of each layer, batches of masked tokens."""
        count, config = len(self.example.tokens), self.predictor.config
        cosines = count * config.vocab_size // (12 * config.num_layers * config.hidden_size)  # a layer costs 12 H²
        found = [Step(count, self._trace)]
        found += [Step(max(1, cosines), partial(self._find_nearest, layer)) for layer in range(len(self.nearest))]
        if self.why_not:
            return found
        places = np.flatnonzero(~self.predictor.tokenizer.frames(self.example.tokens))
        examples = [self._with_mask(place) for place in places.tolist()]
        groups = batches(examples, batch_tokens(self.engine.device)) if examples else ()
        for chosen in groups:
            run = partial(self._fill, [examples[i] for i in chosen], places[chosen])
            found.append(Step(count * len(chosen), run))
        return found

    def _with_mask(self, place: int) -> Example:
        tokens = self.example.tokens.copy()
        tokens[place] = self.predictor.tokenizer.mask_id
        return Example(tokens, self.example.segments)

    def run(self, step: Step) -> None:
        """Compute one step; those before it have to be done."""
        with torch.inference_mode(), threads_of(self.engine.threads):
            step.run()

    def _trace(self) -> None:
        trace = Trace()
        self.model.encoder(collate([self.example], packed=True).to(self.engine.device), trace)
        attention = torch.cat(trace.attention).float()  # (L, A, n, n)
        self.attention = (attention * 255).round().to(torch.uint8).cpu().numpy()
        self.hidden = trace.hidden

    def _find_nearest(self, layer: int) -> None:
        """Find the words with the most similar embeddings (cosine) for every token of a layer."""
        embeddings = self.model.encoder.embeddings
        table = embeddings.projection(embeddings.tokens.weight).float()  # (V, H), also where embeddings are factorised
        norms = table.norm(dim=-1).clamp_min(1e-12)  # dividing by them is cheaper than a copy of the table
        cosines = F.normalize(self.hidden[layer].float(), dim=-1) @ table.T / norms  # (n, V)
        self.nearest[layer] = _top(cosines, self.predictor, NEIGHBOURS)

    def _fill(self, examples: Sequence[Example], places: NDArray[np.int64]) -> None:
        """Find, for tokens if they were masked: the likeliest words, the token's own probability, and its rank."""
        assert isinstance(self.model, Objective)
        batch = collate(examples, packed=True)
        batch.labels["masked"] = torch.from_numpy(np.arange(len(places)) * len(self.example.tokens) + places)
        chances = self.model.token_logits(batch.to(self.engine.device)).float().softmax(-1)  # (_, V)
        words = _top(chances, self.predictor, CANDIDATES)
        for row, place, likeliest in zip(chances, places.tolist(), words, strict=True):
            own = row[int(self.example.tokens[place])]
            self.masked[place] = {
                "words": likeliest,
                "own": round(float(own), 8),
                "rank": int((row > own).sum()) + 1,
            }

    @property
    def data(self) -> dict[str, Any]:
        """What the page shows, as JSON values."""
        tokenizer, tokens = self.predictor.tokenizer, self.example.tokens
        names = [tokenizer.shown(number) for number in tokens.tolist()]
        return {
            "tokens": names,
            "shown": [tokenizer.frame.word_marker.strip(name) or name for name in names],
            "continues": tokenizer.continues(tokens).tolist(),
            "segments": self.example.segments.tolist(),
            "special": tokenizer.frames(tokens).tolist(),
            "layers": self.attention.shape[0],
            "heads": self.attention.shape[1],
            "attention": base64.b64encode(self.attention.tobytes()).decode(),
            "masked": [] if self.why_not else self.masked,
            "why_not": self.why_not,
            "nearest": self.nearest,
        }


def _why_not(predictor: Predictor) -> str:
    """Return why a model cannot fill masks, or nothing if it can."""
    model = predictor.torch_engine.model
    if not isinstance(model, Objective):
        return "The model was fine-tuned and has no masked-word head any more; take the model it was started from."
    if isinstance(model, Discriminator) and not model.fills_masks:
        return "The model detects replaced tokens; the model in its folder generator fills masks."
    if not model.fills_masks:
        return "The model reads in one direction and was not trained to fill masks."
    if model.lacks_token_head(predictor.missing):
        return "The folder has no weights for a masked-word head."
    return ""


def look(predictor: Predictor, example: Example) -> dict[str, Any]:
    """Return the data of the page of a sequence."""
    found = Look(predictor, example)
    steps = found.steps
    with progress_bar("looking", len(steps)) as advance:
        for done, step in enumerate(steps, 1):
            found.run(step)
            advance(done, "")
    return found.data


def _top(values: Tensor, predictor: Predictor, count: int) -> list[Words]:
    """Return the words with the highest values (n, V) in each row."""
    best = values.topk(min(count, predictor.tokenizer.vocab_size, values.shape[-1]))
    shown = predictor.tokenizer.shown
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [[(shown(i), round(value, 4)) for i, value in zip(*row, strict=True)] for row in rows]

"""A page on what a model computes for one text: attention, masked words, and the nearest words of each layer's states.

n tokens, L layers, A heads, H hidden size, V vocabulary.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.batch import Example, collate
from bertsmith.errors import UserError
from bertsmith.inference.engines import batch_tokens, batches
from bertsmith.inference.predictor import Predictor
from bertsmith.model.attention import Trace
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import TaskModel
from bertsmith.objectives.objective import Objective
from bertsmith.objectives.replaced_token import Discriminator
from bertsmith.pages.page import write_page
from bertsmith.pages.view_page import body, prediction_parts
from bertsmith.progress import progress_bar

MOST_TOKENS = 128  # attention grows with their square: a page of 3 MB for BERT-Base
CANDIDATES, NEIGHBOURS = 8, 6
Words = list[tuple[str, float]]


def view(
    model: str | Path, text: str, pair: str | None = None, out: str | Path = "view.html", *, device: str | None = None
) -> dict[str, Any]:
    """Write a self-contained page on what a model does with a text or a pair."""
    predictor = Predictor.load(model, device)
    config = predictor.torch_engine.model.encoder.config
    example = _example(predictor, text, pair)
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


def _example(predictor: Predictor, text: str, pair: str | None) -> Example:
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


@torch.inference_mode()
def look(predictor: Predictor, example: Example) -> dict[str, Any]:
    """Return the data of the page as JSON values; attention weights are bytes (L, A, n, n), 255 for 1."""
    model, device, tokenizer = predictor.torch_engine.model.eval(), predictor.torch_engine.device, predictor.tokenizer
    trace = Trace()
    model.encoder(collate([example], packed=True).to(device), trace)
    attention = torch.cat(trace.attention).float()  # (L, A, n, n)
    weights = (attention * 255).round().to(torch.uint8).cpu().numpy()
    special = tokenizer.frames(example.tokens)
    names = [tokenizer.shown(number) for number in example.tokens.tolist()]
    continues = tokenizer.continues(example.tokens)
    why = ""
    if not isinstance(model, Objective):
        why = "The model was fine-tuned and has no masked-word head any more; take the model it was started from."
    elif isinstance(model, Discriminator):
        why = "The model detects replaced tokens; the model in its folder generator fills masks."
    elif not model.fills_masks:
        why = "The model reads in one direction and was not trained to fill masks."
    elif model.lacks_token_head(predictor.missing):
        why = "The folder has no weights for a masked-word head."
    return {
        "tokens": names,
        "shown": [tokenizer.frame.word_marker.strip(name) or name for name in names],
        "continues": continues.tolist(),
        "segments": example.segments.tolist(),
        "special": special.tolist(),
        "layers": attention.shape[0],
        "heads": attention.shape[1],
        "attention": base64.b64encode(weights.tobytes()).decode(),
        "masked": [] if why else _masked(predictor, example, np.flatnonzero(~special).tolist()),
        "why_not": why,
        "nearest": nearest(model.encoder, trace.hidden, predictor),
    }


def _masked(predictor: Predictor, example: Example, places: Sequence[int]) -> list[dict[str, Any] | None]:
    """Return, for each token if it were masked: the likeliest words, its own probability, and its rank."""
    model, device, tokenizer = predictor.torch_engine.model, predictor.torch_engine.device, predictor.tokenizer
    assert isinstance(model, Objective)
    examples = []
    for place in places:
        tokens = example.tokens.copy()
        tokens[place] = tokenizer.mask_id
        examples.append(Example(tokens, example.segments))
    found: list[dict[str, Any] | None] = [None] * len(example.tokens)
    with progress_bar("masking", len(places)) as advance:
        done = 0
        for chosen in batches(examples, batch_tokens(device)) if examples else ():
            batch = collate([examples[i] for i in chosen], packed=True)
            starts = np.arange(len(chosen)) * len(example.tokens)
            batch.labels["masked"] = torch.from_numpy(starts + np.array(places)[chosen])
            chances = model.logits(batch.to(device))[model.token_loss].float().softmax(-1)  # (chosen, V)
            for row, i in zip(chances, chosen, strict=True):
                own = row[int(example.tokens[places[i]])]
                rank = int((row > own).sum()) + 1
                found[places[i]] = {
                    "words": _top(row, predictor, CANDIDATES),
                    "own": round(float(own), 8),
                    "rank": rank,
                }
            done += len(chosen)
            advance(done, "")
    return found


def nearest(encoder: Encoder, hidden: Sequence[Tensor], predictor: Predictor) -> list[list[Words]]:
    """Return, for each layer (the embeddings first) and token, the words with the most similar embeddings (cosine)."""
    projected = encoder.embeddings.projection(encoder.embeddings.tokens.weight)  # where embeddings are factorised
    table = F.normalize(projected.float(), dim=-1)  # (V, H)
    found = []
    for states in hidden:
        cosines = F.normalize(states.float(), dim=-1) @ table.T  # (n, V)
        found.append([_top(row, predictor, NEIGHBOURS) for row in cosines])
    return found


def _top(values: Tensor, predictor: Predictor, count: int) -> Words:
    best = values.topk(min(count, predictor.tokenizer.vocab_size, len(values)))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [(predictor.tokenizer.shown(i), round(value, 4)) for i, value in pairs]

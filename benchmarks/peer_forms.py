"""The forms in which `transformers` can pre-train the same model, and the fastest of them.

A user may give an attention mask or leave it out, round the vocabulary up to a multiple of 64, choose the batch size,
and clip gradients or not. None of this changes what is learnt much, but together it changes the speed by up to a third,
so we compare ourselves with the best form and not with the first.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import BertForPreTraining

from bertsmith.batch import Batch, Packed

DEVICE = torch.device("cuda")
TOKENS = 65536  # of a step
ROUNDED = 64  # matrix products are fastest when their sizes are multiples of this
Step = Callable[[], None]


@dataclass(frozen=True)
class Form:
    """What users of the peer choose."""

    mask: bool = False
    rounded_vocabulary: bool = False
    tokens: int = TOKENS
    clipping: bool = True

    def __str__(self) -> str:
        parts = [
            "mask given" if self.mask else "no mask",
            "vocabulary rounded up" if self.rounded_vocabulary else "vocabulary as it is",
            f"{self.tokens:,} tokens a step",
            "clipping" if self.clipping else "no clipping",
        ]
        return ", ".join(parts)


PLAIN = Form()
CHANGES: tuple[dict[str, Any], ...] = (
    {"rounded_vocabulary": True},
    {"mask": True},
    {"tokens": TOKENS // 2},
    {"tokens": 2 * TOKENS},
)


def best_form(run: Callable[[Form], dict[str, Any] | None]) -> tuple[Form, dict[Form, dict[str, Any] | None]]:
    """Try one change after the other and keep what is faster; gives the best form and what was found for each."""
    best, tried = PLAIN, {PLAIN: run(PLAIN)}
    for change in CHANGES:
        form = replace(best, **change)
        tried[form] = run(form)
        best = max(best, form, key=lambda f: (tried[f] or {}).get("tokens_per_second", 0))
    return best, tried


def compiled_peer(config: Any, form: Form) -> Any:
    """`transformers`' model for pre-training, compiled; nothing of the one before is left on the device."""
    gc.collect()
    torch.cuda.empty_cache()
    torch._dynamo.reset()
    if form.rounded_vocabulary:
        config.vocab_size = -(-config.vocab_size // ROUNDED) * ROUNDED
    return torch.compile(BertForPreTraining(config).to(DEVICE))


def peer_steps(model: Any, inputs: list[dict[str, Any]], rate: float = 1e-4, clipping: bool = True) -> Step:
    """Whole steps as the trainer of `transformers` takes them: nothing is read from the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)
    turn = iter(range(10**9))
    model.train()

    def step() -> None:
        given = {n: v.to(DEVICE, non_blocking=True) for n, v in inputs[next(turn) % len(inputs)].items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**given).loss
        loss.backward()
        if clipping:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def rectangular(batch: Batch, mask: bool) -> dict[str, Any]:
    """A batch of equal lengths as `transformers` takes it; the mask is all ones, since there is no padding."""
    assert isinstance(batch.layout, Packed)
    length = batch.layout.max_length
    labels = torch.full_like(batch.tokens, -100)
    labels[batch.labels["masked"]] = batch.labels["targets"]
    given = {"input_ids": batch.tokens, "token_type_ids": batch.segments, "labels": labels}
    if mask:
        given["attention_mask"] = torch.ones_like(batch.tokens)
    return {**{n: v.view(-1, length) for n, v in given.items()}, "next_sentence_label": batch.labels["next"]}


def pinned(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same tensors in page-locked memory, from which copies to the device need no wait."""
    return {name: value.pin_memory() for name, value in inputs.items()}

"""The forms in which `transformers` can pre-train the same model, and the fastest of them.

A user may give an attention mask or leave it out, round the vocabulary up to a multiple of 64, choose the batch size,
and clip gradients or not. None of this changes what is learnt much, but together it changes the speed by up to a third,
so we compare ourselves with the best form and not with the first.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import BertConfig, BertForPreTraining

from bertsmith.batch import Batch, Packed
from bertsmith.formats.saved_config import config_out
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused_choice import compiled_kernels
from bertsmith.objectives.masked_lm import MaskedLM

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU is for trying a benchmark out
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
    free_memory()
    torch._dynamo.reset()
    if form.rounded_vocabulary:
        config.vocab_size = -(-config.vocab_size // ROUNDED) * ROUNDED
    return torch.compile(BertForPreTraining(config).to(DEVICE))


def free_memory() -> None:
    """Return the memory of models that are no longer used to the device."""
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def peer_steps(model: Any, inputs: list[dict[str, Any]], rate: float = 1e-4, clipping: bool = True) -> Step:
    """Whole steps as the trainer of `transformers` takes them: nothing is read from the device."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01, fused=True)
    turn = iter(range(10**9))
    model.train()

    def step() -> None:
        given = {n: v.to(DEVICE, non_blocking=True) for n, v in inputs[next(turn) % len(inputs)].items()}
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
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
    return {name: value.pin_memory() if DEVICE.type == "cuda" else value for name, value in inputs.items()}


def measure(step: Step, steps: int, warm: int = 6) -> dict[str, float]:
    """Measure the seconds of a step, what the first steps took beyond that, and the peak memory in GB.

    The host does not synchronise between two steps: each of three runs is timed as a whole, and the fastest counts.
    """
    on_gpu = DEVICE.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    first = seconds_of(step, warm)
    kernels = compiled_kernels() if on_gpu else 0
    seconds = min(seconds_of(step, steps) for _ in range(3)) / steps
    assert not on_gpu or compiled_kernels() == kernels, "a kernel was compiled after the first steps"
    memory = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0
    return {"seconds": seconds, "extra": first - warm * seconds, "memory_gb": round(memory, 1)}


def seconds_of(step: Step, steps: int) -> float:
    synchronize = torch.cuda.synchronize if DEVICE.type == "cuda" else torch.cpu.synchronize
    synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return time.perf_counter() - began


def steps_per_second(step: Step) -> float:
    return round(240 / seconds_of(step, 240), 1)


def hf_config(config: EncoderConfig) -> BertConfig:
    made = config_out(MaskedLM(Encoder(dataclasses.replace(config, num_layers=1))))
    made["num_hidden_layers"] = config.num_layers
    return BertConfig(**{k: v for k, v in made.items() if k != "architectures"}, attn_implementation="sdpa")


def theirs(config: EncoderConfig, form: Form, inputs: list[dict[str, Any]], steps: int) -> dict[str, float] | None:
    """The steps of `transformers` in one form; None where it does not fit on the device."""
    try:
        model = compiled_peer(hf_config(config), form)
        return measure(peer_steps(model, [pinned(i) for i in inputs], clipping=form.clipping), steps)
    except torch.OutOfMemoryError:
        return None


def against(our: dict[str, Any], forms: dict[Form, dict[str, Any] | None]) -> dict[str, Any]:
    """Our speed beside every form of the peer, with the ratio to the fastest one and to the first one."""
    speeds = {form: found["tokens_per_second"] for form, found in forms.items() if found}
    best, first = max(speeds, key=speeds.__getitem__), next(iter(speeds))
    return {
        "bertsmith": our,
        "transformers": {"form": str(best), **(forms[best] or {})},
        "forms": {str(form): speeds.get(form) for form in forms},  # None: it does not fit on the device
        "ratio": round(our["tokens_per_second"] / speeds[best], 3),
        "ratio_to_first_form": round(our["tokens_per_second"] / speeds[first], 3),
    }


def padded_to(length: int, inputs: dict[str, Any]) -> dict[str, Any]:
    """One shape for all batches, so that the compiled peer is never compiled again."""
    more = length - inputs["input_ids"].shape[1]
    fills = {"labels": -100}
    return {
        n: torch.nn.functional.pad(v, (0, more), value=fills.get(n, 0)) if v.dim() == 2 else v
        for n, v in inputs.items()
    }

"""Our models beside those of `transformers`: the same batches, and their outputs, losses and gradients."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from conftest import LABELS
from labels import of_pretraining, of_task
from torch.testing import assert_close
from variants import VARIANTS

from bertsmith.batch import IGNORE, Batch, Example, Padded, collate
from bertsmith.formats.hf import names_of

LENGTHS = (5, 31, 2, 17, 8, 30)
CHOICES = 3
VOCAB = 99


def same(ours, theirs, what: str = "") -> None:
    assert_close(ours, theirs, atol=1e-5, rtol=0, msg=lambda text: f"{what}: {text}")


def draw_batch(kind: str, packed: bool, lengths=LENGTHS, variant: str = "bert") -> Batch:
    """Random sequences with labels for a kind of head, the same in both layouts."""
    rng, segments = np.random.default_rng(1), VARIANTS[variant].segments
    batch = collate([draw_example(kind, size, rng, segments) for size in lengths], packed=packed)
    if kind == "choice":  # one label per question, not per ending
        return batch.with_labels(of_task(rng.integers(0, CHOICES, len(lengths) // CHOICES)))
    return mask(batch, rng) if kind in ("mlm", "mlm+nsp") else batch


def draw_example(kind: str, size: int, rng: np.random.Generator, segments: int = 2) -> Example:
    label = {
        "single": lambda: int(rng.integers(0, len(LABELS))),
        "multi": lambda: rng.integers(0, 2, len(LABELS)),
        "regression": lambda: float(rng.normal()),
        "span": lambda: np.sort(rng.integers(0, size, 2)),
    }.get(kind, lambda: None)()
    tags = np.where(rng.random(size) < 0.3, IGNORE, rng.integers(0, len(LABELS), size)) if kind == "tags" else None
    numbers = (np.arange(size) > size // 2).astype(np.int64) * (segments > 1)
    return Example(rng.integers(5, VOCAB, size), numbers, of_task(label, tags))


def mask(batch: Batch, rng: np.random.Generator) -> Batch:
    chosen = np.sort(rng.permutation(batch.num_tokens)[: batch.num_tokens // 4])
    targets, follows = rng.integers(5, VOCAB, len(chosen)), rng.integers(0, 2, num_sequences(batch))
    return batch.with_labels(of_pretraining(chosen, targets, follows))


def num_sequences(batch: Batch) -> int:
    return len(batch.layout.mask) if isinstance(batch.layout, Padded) else len(batch.layout.starts) - 1


def their_inputs(batch: Batch) -> dict[str, torch.Tensor]:
    return {"input_ids": batch.tokens, "token_type_ids": batch.segments, "attention_mask": batch.layout.mask.long()}


def run_theirs(theirs, kind: str, batch: Batch, variant: str = "bert"):
    """The output of their model for a padded batch, with its own loss."""
    inputs, labels = their_inputs(batch), batch.labels
    if kind in ("mlm", "mlm+nsp"):
        grid = torch.full_like(batch.tokens, IGNORE)
        grid.view(-1)[labels["masked"]] = labels["targets"]
        follows = {VARIANTS[variant].pair_label: labels["next"]} if kind == "mlm+nsp" else {}
        return theirs(**inputs, labels=grid, **follows)
    if kind == "span":
        starts, ends = labels["label"].unbind(-1)
        return theirs(**inputs, start_positions=starts, end_positions=ends)
    if kind == "choice":
        inputs = {name: values.unflatten(0, (-1, CHOICES)) for name, values in inputs.items()}
    target = labels["tags"] if kind == "tags" else labels["label"]
    return theirs(**inputs, labels=target.float() if kind in ("multi", "regression") else target)


def their_scores(output, kind: str, batch: Batch, variant: str = "bert") -> dict[str, torch.Tensor]:
    """Their logits in the shape of ours."""
    real = batch.layout.mask
    if kind == "mlm+nsp":
        masked = output.prediction_logits.flatten(0, 1)[batch.labels["masked"]]
        return {"mlm": masked, "nsp": output[VARIANTS[variant].pair_logits]}
    if kind == "mlm":
        return {"mlm": output.logits.flatten(0, 1)[batch.labels["masked"]]}
    if kind == "span":
        scores = torch.stack([output.start_logits, output.end_logits], -1)
        return {"task": scores.masked_fill(~real[..., None], float("-inf"))}
    return {"task": output.logits[real] if kind == "tags" else output.logits}


def our_scores(model, kind: str, batch: Batch) -> dict[str, torch.Tensor]:
    scores = model.logits(batch)
    if kind == "tags" and isinstance(batch.layout, Padded):
        scores = scores[batch.layout.mask]
    return scores if isinstance(scores, dict) else {"task": scores}


def their_loss(output, kind: str, batch: Batch) -> torch.Tensor:
    """Their loss; the span loss is recomputed without padding, which they include in the softmax."""
    if kind != "span":
        return output.loss
    scores = their_scores(output, kind, batch)["task"]
    return sum(F.cross_entropy(scores[..., i], batch.labels["label"][:, i]) for i in range(2)) / 2


def our_loss(model, batch: Batch) -> torch.Tensor:
    return sum(loss / batch.counts[name] for name, loss in model(batch).items() if name in batch.counts)


def same_gradients(model, theirs, layout: str = "") -> None:
    """Compare the gradients of all parameters; every parameter of theirs must have a counterpart."""
    names, expected = names_of(model), {name: p.grad for name, p in theirs.named_parameters()}
    ours = {name: p.grad for name, p in model.named_parameters()}
    assert sorted(part for stored in names.values() for part in stored.names) == sorted(expected)
    for name, gradient in ours.items():
        wanted = replace(names[name], pad_rows=False).joined([expected[part] for part in names[name].names], 0)
        same(gradient, wanted[-len(gradient) :], f"{name}, {layout}")  # their position table may start with unused rows
    assert ours["encoder.layers.0.attention.qkv.weight"].abs().max() > 1e-3

"""Soft targets: a student learns the probabilities that a teacher predicts (Hinton et al. 2015).

B sequences, L padded length, M masked positions, V vocabulary, K classes. Losses are sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.batch import IGNORE, Batch
from bertsmith.model.config import HeadKind

LOWEST = -1e4  # a logit of padding: its probability is 0, and the difference of two of them is a number
AT_ONCE = 512  # positions whose logits are float32 at the same time


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The KL divergence of each row's probabilities (…, K) from the teacher's, at a temperature (…).

    The square of the temperature keeps the size of the gradients, which shrink with it.
    """
    ours, theirs = (logits.float().div(temperature).log_softmax(-1) for logits in (student, teacher))
    return (theirs.exp() * (theirs - ours)).sum(-1) * temperature**2


@dataclass(frozen=True)
class SoftTargets:
    """How the loss of a teacher's predictions is added to that of the labels."""

    temperature: float
    soft_weight: float
    label_weight: float

    def loss(self, labels: Tensor, logits: Tensor, batch: Batch, kind: HeadKind) -> Tensor:
        """The weighted sum of the loss of the `labels` and of that of the teacher's logits in the batch (`soft`)."""
        return self.label_weight * labels + self.soft_weight * soft_loss(logits, batch, kind, self.temperature)


def soft_loss(logits: Tensor, batch: Batch, kind: HeadKind, temperature: float) -> Tensor:
    """The loss of a task's logits with those of a teacher, summed over what the loss of the labels is summed over."""
    taught = batch.labels["soft"]
    if kind == "regression":
        return F.mse_loss(logits, taught, reduction="sum")
    if kind == "multi":
        ours, theirs = logits / temperature, taught / temperature
        entropies = (F.binary_cross_entropy_with_logits(x, theirs.sigmoid(), reduction="none") for x in (ours, theirs))
        return (next(entropies) - next(entropies)).mean(-1).sum() * temperature**2
    if kind == "tags":
        each = divergence(logits, taught, temperature)
        return each.masked_fill(batch.labels["tags"] == IGNORE, 0.0).sum()
    if kind == "span":
        taught = batch.layout.valid(batch.layout.pad(taught, LOWEST))  # (B, L, 2)
        ours, theirs = (scores.clamp_min(LOWEST).transpose(-1, -2) for scores in (logits, taught))
        return divergence(ours, theirs, temperature).sum() / 2
    return divergence(logits, taught, temperature).sum()


def word_losses(student: Tensor, teacher: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The soft loss and the masked-word loss of a student's logits (M, V) with the teacher's and the right words (M,).

    Both are computed a few hundred positions at a time and once more in the backward pass, so that no float32 tensor of
    all logits is kept.
    """
    soft, hard = _WordLosses.apply(student, teacher, targets, temperature)  # type: ignore[no-untyped-call]
    return soft, hard


class _WordLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
        ctx.save_for_backward(student, teacher, targets)
        ctx.temperature = temperature
        soft, hard = (torch.zeros((), device=student.device) for _ in range(2))
        for ours, theirs, words in _parts(student, teacher, targets):
            soft += divergence(ours, theirs, temperature).masked_fill(words == IGNORE, 0.0).sum()
            hard += F.cross_entropy(ours, words, ignore_index=IGNORE, reduction="sum")
        return soft, hard

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (student, teacher, targets), (soft, hard) = ctx.saved_tensors, gradients
        found = torch.empty_like(student)
        for number, (ours, theirs, words) in enumerate(_parts(student, teacher, targets)):
            apart = (ours / ctx.temperature).softmax(-1) - (theirs / ctx.temperature).softmax(-1)
            right = words.clamp_min(0)[:, None]
            wrong = ours.softmax(-1).scatter_add(-1, right, -torch.ones_like(right, dtype=ours.dtype))
            gradient = soft * ctx.temperature * apart + hard * wrong
            rows = slice(number * AT_ONCE, number * AT_ONCE + len(words))
            found[rows] = gradient.masked_fill((words == IGNORE)[:, None], 0.0)
        return found, None, None, None


def _parts(student: Tensor, teacher: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A few hundred positions at a time: float32 logits of the student and of the teacher, and the right words."""
    for begin in range(0, len(targets), AT_ONCE):
        rows = slice(begin, begin + AT_ONCE)
        yield student[rows].float(), teacher[rows].float(), targets[rows]

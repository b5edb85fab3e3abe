"""Soft targets: a student learns the probabilities that a teacher predicts (Hinton et al. 2015).

M masked positions, V vocabulary. Losses are sums.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bertsmith.batch import IGNORE

AT_ONCE = 512  # positions whose logits are float32 at the same time


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """The KL divergence of each row's probabilities (…, K) from the teacher's, at a temperature (…).

    The square of the temperature keeps the size of the gradients, which shrink with it.
    """
    ours, theirs = (logits.float().div(temperature).log_softmax(-1) for logits in (student, teacher))
    return (theirs.exp() * (theirs - ours)).sum(-1) * temperature**2


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
        parts = []
        for ours, theirs, words in _parts(student, teacher, targets):
            apart = (ours / ctx.temperature).softmax(-1) - (theirs / ctx.temperature).softmax(-1)
            right = words.clamp_min(0)[:, None]
            wrong = ours.softmax(-1).scatter_add(-1, right, -torch.ones_like(right, dtype=ours.dtype))
            gradient = soft * ctx.temperature * apart + hard * wrong
            parts.append(gradient.masked_fill((words == IGNORE)[:, None], 0.0).to(student.dtype))
        return torch.cat(parts), None, None, None


def _parts(student: Tensor, teacher: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A few hundred positions at a time: float32 logits of the student and of the teacher, and the right words."""
    for begin in range(0, len(targets), AT_ONCE):
        rows = slice(begin, begin + AT_ONCE)
        yield student[rows].float(), teacher[rows].float(), targets[rows]

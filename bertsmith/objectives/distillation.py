"""Distillation: a student learns from a teacher's predictions and states, and from the text (DistilBERT, section 2).

N tokens with padding, H hidden size, M masked positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.batch import Batch, Layout
from bertsmith.errors import UserError
from bertsmith.model.config import EncoderConfig
from bertsmith.model.cost import forward_flops, forward_memory, training_flops
from bertsmith.model.encoder import SHARED, Encoder
from bertsmith.model.heads import MaskedLMHead
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.objective import EVERY_TOKEN, Objective
from bertsmith.objectives.settings import DistillationConfig, MaskedLMConfig

STUDENT = MaskedLMConfig(next_sentence=False)
# The settings in which a student may differ from the teacher whose layers it starts with.
MAY_DIFFER = frozenset(
    """vocab_size num_layers max_positions num_segments hidden_dropout attention_dropout norm_eps init_std pad_token_id
    family shared_layers head_activation pooler_activation pooler_input_dropout""".split()
)


class Distillation(MaskedLM):
    """A masked language model that also learns the probabilities and the last hidden states of its teacher.

    The teacher is set after the model is built. It is not trained, and it is not saved with the student.
    """

    config: DistillationConfig  # type: ignore[assignment]
    teacher: Objective | None

    def __init__(self, encoder: Encoder, config: DistillationConfig) -> None:
        super().__init__(encoder, STUDENT)
        self.config = config
        self.register_module("teacher", None)

    @staticmethod
    def counts(config: DistillationConfig) -> dict[str, str]:  # type: ignore[override]
        losses = {"mlm": "targets", "soft": "targets"}
        return {**losses, "cosine": EVERY_TOKEN} if config.cosine_weight else losses

    @property
    def loss_weights(self) -> Mapping[str, float]:
        config = self.config
        return {"mlm": config.mlm_weight, "soft": config.soft_weight, "cosine": config.cosine_weight}

    @property
    def untrained(self) -> list[nn.Module]:
        """The teacher, which keeps its weights."""
        return [] if self.teacher is None else [self.teacher]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """Summed losses: `mlm` and `soft` over the masked positions, `cosine` over all tokens; the correct words."""
        losses, right = self._losses(batch)
        return {**losses, "mlm_accuracy": right}

    def measures(self, batch: Batch) -> dict[str, tuple[Tensor, int | Tensor]]:
        losses, right = self._losses(batch)
        found: dict[str, tuple[Tensor, int | Tensor]] = {
            f"{name}_loss": (loss, batch.counts[name]) for name, loss in losses.items()
        }
        return {**found, "mlm_accuracy": (right, batch.counts["mlm"])}

    def _losses(self, batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """The summed losses without their weights, and the number of words that the student predicts correctly."""
        teacher, layout, targets = self.teacher, batch.layout, batch.labels["targets"]
        assert teacher is not None
        rows = None if self.config.cosine_weight else batch.labels["masked"]
        ours = self.encoder(batch, rows=rows)
        with torch.no_grad():
            theirs = teacher.encoder(batch, rows=rows)
        cosine = {}
        if rows is None:
            ours, theirs = layout.flat(ours), layout.flat(theirs)  # (N, H)
            cosine["cosine"] = cosine_loss(ours, theirs, layout)
            ours, theirs = (states.index_select(0, batch.labels["masked"]) for states in (ours, theirs))
        head = cast(MaskedLMHead, teacher.get_submodule(teacher.token_head))
        taught = head.taught(theirs, teacher.encoder.choice(batch).fused)  # (M, at least V)
        temperature, fused = self.config.temperature, self.encoder.choice(batch).fused
        soft, mlm, right = self.masked_lm.taught_losses(ours, taught, targets, temperature, fused)
        return {"mlm": mlm, "soft": soft, **cosine}, right

    def flops(self, lengths: Sequence[int], predicted: int) -> float:
        assert self.teacher is not None
        every = bool(self.config.cosine_weight)
        taught = forward_flops(self.teacher.encoder.config, lengths, predicted, every_state=every)
        return training_flops(self.encoder.config, lengths, predicted, every_state=every) + taught

    def memory(
        self, tokens: int, length: int, predicted: int, *, half: bool, checkpointing: bool, processes: int
    ) -> float:
        assert self.teacher is not None
        own = super().memory(tokens, length, predicted, half=half, checkpointing=checkpointing, processes=processes)
        return own + forward_memory(self.teacher.encoder.config, tokens, length, predicted, half=half)


def cosine_loss(student: Tensor, teacher: Tensor, layout: Layout) -> Tensor:
    """One minus the cosine of two models' states (N, H), summed over the tokens."""
    same = torch.ones(len(student), device=student.device)
    losses = F.cosine_embedding_loss(student.float(), teacher.float(), same, reduction="none")  # (N,)
    return losses.masked_fill(~layout.is_token(student), 0.0).sum()


def layers_to_copy(teacher: int, student: int) -> list[int]:
    """The layers of a teacher that a student starts with, evenly spaced: 0, 2, 4, 7, 9 and 11 for six of twelve."""
    return [round(i * (teacher - 1) / max(1, student - 1)) for i in range(student)]


def check_shapes(student: EncoderConfig, teacher: EncoderConfig) -> None:
    """Refuse a student that cannot start with the layers of its teacher."""
    fix = "the recipe distilbert (objective.half=true) makes half of any teacher, objective.init=random any student"
    names = [field.name for field in fields(EncoderConfig) if field.name not in MAY_DIFFER]
    for name in (*names, "masked_word_activation"):
        own, theirs = getattr(student, name), getattr(teacher, name)
        if own != theirs:
            raise UserError(f"model.{name} is {own}, and the teacher's is {theirs}: its layers do not fit; {fix}")
    if student.num_layers > teacher.num_layers:
        raise UserError(
            f"model.num_layers is {student.num_layers}, and the teacher has only {teacher.num_layers} layers; {fix}"
        )


@torch.no_grad()
def copy_layers(student: MaskedLM, teacher: Objective) -> None:
    """Start a student with its teacher's embeddings, evenly spaced layers, and masked-word head.

    A student without segments adds the teacher's first segment to its positions: every token of a single text has it.
    """
    ours, theirs = student.encoder, teacher.encoder
    tables = theirs.embeddings.state_dict()
    for name, parameter in ours.embeddings.named_parameters():
        table = tables.get(name, torch.zeros_like(parameter))  # of segments that the teacher does not have
        parameter[: len(table)] = table[: len(parameter)]
    segments, positions = theirs.embeddings.segments, ours.embeddings.positions
    if ours.embeddings.segments is None and segments is not None and positions is not None:
        positions.weight += segments.weight[0]
    numbers = layers_to_copy(theirs.config.num_layers, ours.config.num_layers)
    for own, number in zip(ours.layers, numbers, strict=True):
        for part in SHARED["all"]:
            getattr(own, part).load_state_dict(getattr(theirs.layers[number], part).state_dict())
    ours.final_norm.load_state_dict(theirs.final_norm.state_dict())
    head = teacher.get_submodule(teacher.token_head)
    for name, parameter in student.masked_lm.named_parameters():
        if name != "decoder.weight":  # the tokens' embeddings
            parameter.copy_(head.get_parameter(name)[: len(parameter)])

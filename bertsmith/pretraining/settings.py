"""The configuration of a pre-training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bertsmith.errors import UserError
from bertsmith.formats.families.table import family_of, output_named
from bertsmith.model.config import EncoderConfig
from bertsmith.objectives.kinds import objective_class
from bertsmith.objectives.objective import PAIR_LABEL
from bertsmith.objectives.settings import MASKED_LM, ObjectiveConfig
from bertsmith.pretraining.loader import DataConfig
from bertsmith.pretraining.segments import ONE_SEGMENT
from bertsmith.training.settings import TrainConfig


def upgrade(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The plain configuration of an older version in today's form: `next_sentence` became the section `objective`."""
    if "next_sentence" not in values or "objective" in values:
        return values
    model = values.get("model")
    direction = model.get("direction", "both") if isinstance(model, Mapping) else "both"
    masked_lm = {"kind": "masked-lm", "next_sentence": values["next_sentence"]}
    objective = masked_lm if direction == "both" else {"kind": "causal-lm"}
    return {**{key: value for key, value in values.items() if key != "next_sentence"}, "objective": objective}


@dataclass(frozen=True)
class PretrainConfig:
    """One complete pre-training run. The tokenizer decides `model.vocab_size`.

    The kind of `objective` and `model.direction` belong together: masked words need an encoder that sees both
    directions, next words one that sees a single direction.
    """

    recipe: str
    model: EncoderConfig
    data: DataConfig
    train: TrainConfig
    objective: ObjectiveConfig = MASKED_LM
    DECIDED = {"recipe": "the command names the recipe"}
    UPGRADE = staticmethod(upgrade)

    def __post_init__(self) -> None:
        kind = objective_class(self.objective)
        for encoder, output in kind.saved(self.model, self.objective):
            output_named(family_of(encoder), output)  # refuses what a family cannot express
        self._check_direction()
        if self.data.pairs not in ONE_SEGMENT and self.model.num_segments < 2:
            raise UserError(
                f"data.pairs={self.data.pairs} needs two segments, and model.num_segments is "
                f"{self.model.num_segments}; set it to 2, or data.pairs=full with objective.next_sentence=false"
            )
        if self.train.layer_decay != 1.0 and self.model.shared_layers != "none":
            decay = self.train.layer_decay
            raise UserError(
                f"train.layer_decay is {decay}, and the layers of the model share their parameters; leave it out"
            )
        if self.data.pairs in ONE_SEGMENT and PAIR_LABEL in kind.counts(self.objective).values():
            raise UserError(
                f"data.pairs={self.data.pairs} has no pairs to learn from: set objective.next_sentence=false, or "
                "data.pairs=next or order"
            )

    def _check_direction(self) -> None:
        direction, kind = self.model.direction, self.objective.kind
        if self.model.layer_type == "lstm":  # its directions do not see each other
            return
        if self.predicts_next and direction == "both":
            raise UserError(
                f"objective.kind={kind} predicts the next token, which an encoder with model.direction=both sees: "
                "set model.direction=left-to-right"
            )
        if not self.predicts_next and direction != "both":
            raise UserError(
                f"objective.kind={kind} predicts masked tokens from both sides, and model.direction is {direction}: "
                "set objective.kind=causal-lm, or model.direction=both"
            )

    @property
    def predicts_next(self) -> bool:
        """Whether every position predicts the next token, instead of masked positions the masked one."""
        return objective_class(self.objective).targets == "next"

    @property
    def predicted_share(self) -> float:
        """The share of the tokens that the vocabulary head is applied to."""
        return 1.0 if self.predicts_next else self.data.masking.rate

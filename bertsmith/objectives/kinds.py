"""The table of pre-training objectives: a kind is one row."""

from __future__ import annotations

from bertsmith.model.encoder import Encoder
from bertsmith.objectives.bidirectional_lm import BidirectionalLM
from bertsmith.objectives.causal_lm import CausalLM
from bertsmith.objectives.distillation import Distillation
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.objective import Objective
from bertsmith.objectives.replaced_token import ReplacedToken
from bertsmith.objectives.settings import ObjectiveConfig

OBJECTIVES: dict[str, type[Objective]] = {
    "masked-lm": MaskedLM,
    "causal-lm": CausalLM,
    "bidirectional-lm": BidirectionalLM,
    "distillation": Distillation,
    "replaced-token": ReplacedToken,
}


def objective_class(config: ObjectiveConfig) -> type[Objective]:
    """The module's class for a configured objective."""
    return OBJECTIVES[config.kind]


def build_objective(encoder: Encoder, config: ObjectiveConfig) -> Objective:
    """The module that trains an encoder as configured."""
    return objective_class(config)(encoder, config)

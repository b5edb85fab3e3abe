"""The `objective` section of a pre-training configuration: one class for each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MaskedLMConfig:
    """Masked words are predicted and, with `next_sentence`, the label of a segment pair as `data.pairs` makes it."""

    kind: Literal["masked-lm"] = "masked-lm"
    next_sentence: bool = True


@dataclass(frozen=True)
class CausalLMConfig:
    """Every position predicts the next token, or the previous one if the encoder reads right to left."""

    kind: Literal["causal-lm"] = "causal-lm"


ObjectiveConfig = MaskedLMConfig | CausalLMConfig
MASKED_LM, CAUSAL_LM = MaskedLMConfig(), CausalLMConfig()  # with the default settings of their kind

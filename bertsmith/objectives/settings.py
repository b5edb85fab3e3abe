"""The `objective` section of a pre-training configuration: one class for each kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from bertsmith.config import Bounds, check_bounds
from bertsmith.errors import UserError

Init = Literal["teacher", "random"]


@dataclass(frozen=True)
class MaskedLMConfig:
    """Masked words are predicted and, with `next_sentence`, the label of a segment pair as `data.pairs` makes it.

    With `mask_decoder` absolute positions come in before the words are predicted (DeBERTa, section 3.2); the encoder
    then has none in its input (`model.positions` is not learned).
    """

    kind: Literal["masked-lm"] = "masked-lm"
    next_sentence: bool = True
    mask_decoder: bool = False

    def __post_init__(self) -> None:
        if self.mask_decoder and self.next_sentence:
            raise UserError(
                "objective.mask_decoder=true predicts masked words alone; set objective.next_sentence=false"
            )


@dataclass(frozen=True)
class CausalLMConfig:
    """Every position predicts the next token, or the previous one if the encoder reads right to left."""

    kind: Literal["causal-lm"] = "causal-lm"


@dataclass(frozen=True)
class BidirectionalLMConfig:
    """Every position predicts the next token from what is before it, and the previous one from what is after it."""

    kind: Literal["bidirectional-lm"] = "bidirectional-lm"


@dataclass(frozen=True)
class DistillationConfig:
    """A student learns masked words from the text and from a teacher, a larger model with the same vocabulary.

    The loss is the sum of three (DistilBERT, section 2; the weights are those of its authors' code): `soft_weight`
    times the KL divergence of the student's probabilities from the teacher's at the masked positions, both at a
    `temperature`; `mlm_weight` times the masked-word loss; and `cosine_weight` times one minus the cosine of the two
    models' last hidden states at every token, which needs two models of the same width (0: no such loss).

    The student starts with layers of its `teacher` (`init`), or with random weights. With `half`, its sizes are those
    of the teacher and it has half of the layers; of `model` it keeps only the dropout.
    """

    kind: Literal["distillation"] = "distillation"
    teacher: str = ""
    temperature: float = 2.0
    soft_weight: float = 5.0
    mlm_weight: float = 2.0
    cosine_weight: float = 1.0
    init: Init = "teacher"
    half: bool = False
    BOUNDS = {
        "temperature": Bounds(0, 1000, "(]"),
        "soft_weight": Bounds(0, 10**6, "(]"),
        "mlm_weight": Bounds(0, 10**6),
        "cosine_weight": Bounds(0, 10**6),
    }

    def __post_init__(self) -> None:
        check_bounds(self, "objective.")
        if self.init not in get_args(Init):
            raise UserError(f"objective.init must be one of {', '.join(get_args(Init))}, not {self.init!r}")


@dataclass(frozen=True)
class ReplacedTokenConfig:
    """A generator fills in masked words, and every token is classified as original or replaced (ELECTRA).

    `generator_size` and `generator_layers` are the generator's hidden units and layers as shares of the
    discriminator's (Table 6). The loss is that of the generator and `detection_weight` times that of the discriminator.
    The generator's words are sampled at a `temperature` and, with `disallow_correct`, never equal the original. With
    `tied_embeddings` both networks have the same input tables and norm.

    With `disentangled` they have only the table of tokens in common, and it is trained by the generator alone: the
    discriminator adds a table of its own, which begins with zeros (DeBERTa v3, section 3.3). With `context` the
    detector adds the state of `[CLS]` to the state of every token and normalises the sum first (its authors' code).
    With `mask_decoder` the generator has one, as in `masked-lm`.

    With `fill_every` = n, every n-th chosen word stays masked in the discriminator's input too, and the discriminator
    predicts it (the loss `fill`). Then the model that is kept both detects and fills.

    With `next_sentence` the discriminator predicts the label of a segment pair as in `masked-lm`, a loss with the
    weight `pair_weight`.
    """

    kind: Literal["replaced-token"] = "replaced-token"
    generator_size: float = 0.25
    generator_layers: float = 1.0
    detection_weight: float = 50.0
    temperature: float = 1.0
    disallow_correct: bool = False
    tied_embeddings: bool = True
    disentangled: bool = False
    context: bool = False
    mask_decoder: bool = False
    fill_every: int = 0
    next_sentence: bool = False
    pair_weight: float = 1.0
    BOUNDS = {
        "generator_size": Bounds(0, 16, "(]"),
        "generator_layers": Bounds(0, 16, "(]"),
        "detection_weight": Bounds(0, 10**6),
        "temperature": Bounds(0, 10**3, "(]"),
        "fill_every": Bounds(0, 10**3),
        "pair_weight": Bounds(0, 10**6, "(]"),
    }

    def __post_init__(self) -> None:
        check_bounds(self, "objective.")
        if self.disentangled and not self.tied_embeddings:
            raise UserError(
                "objective.disentangled=true needs objective.tied_embeddings=true: it is a way to share them"
            )
        if self.pair_weight != type(self).pair_weight and not self.next_sentence:
            raise UserError(
                f"objective.pair_weight={self.pair_weight:g} is the weight of a loss that is switched off: set "
                "objective.next_sentence=true, or leave it out"
            )


ObjectiveConfig = MaskedLMConfig | CausalLMConfig | BidirectionalLMConfig | DistillationConfig | ReplacedTokenConfig
MASKED_LM, CAUSAL_LM, REPLACED_TOKEN = MaskedLMConfig(), CausalLMConfig(), ReplacedTokenConfig()  # with their defaults
BIDIRECTIONAL_LM = BidirectionalLMConfig()

"""The encoder's configuration and the published sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from bertsmith.config import Bounds, check_bounds
from bertsmith.errors import UserError, suggestion

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
HeadKind = Literal["single", "multi", "regression", "choice", "tags", "span"]  # of output layers
Direction = Literal["both", "left-to-right", "right-to-left"]


class Reach(NamedTuple):
    """How many tokens a token sees before and after itself, in its own sequence; None: all of them."""

    before: int | None = None
    after: int | None = None


REACHES: dict[Direction, Reach] = {
    "both": Reach(None, None),
    "left-to-right": Reach(None, 0),
    "right-to-left": Reach(0, None),
}


@dataclass(frozen=True)
class EncoderConfig:
    """Every fact of an encoder; BERT paper, section 3 and its released configurations.

    `norm_first` normalises what goes into each sublayer instead of what comes out, and once more at the end. Without
    `bias` the encoder's linear layers and norms only multiply; the heads keep theirs. `direction` says which tokens a
    token sees: all, those up to itself, or those from itself on (section 5.1: the left-to-right ablation). `family`
    names the table of `formats/families.py` that the model is saved by. Configurations from before families had names
    have none: they are `bert`, or `roberta-prelayernorm` where `norm_first` is set.
    """

    vocab_size: int = 30522
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    intermediate_size: int = 3072
    max_positions: int = 512
    num_segments: int = 2
    activation: Activation = "gelu"
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-12
    init_std: float = 0.02
    pad_token_id: int = 0
    norm_first: bool = False
    bias: bool = True
    direction: Direction = "both"
    family: str = ""
    DECIDED = {"vocab_size": "the tokenizer of the corpus decides it"}
    BOUNDS = {
        "vocab_size": Bounds(1, 2**26),
        "hidden_size": Bounds(1, 2**17),
        "num_layers": Bounds(1, 1000),
        "num_heads": Bounds(1, 2**17),
        "intermediate_size": Bounds(1, 2**20),
        "max_positions": Bounds(1, 2**24),
        "num_segments": Bounds(1, 2**16),
        "hidden_dropout": Bounds(0, 1, "[)"),
        "attention_dropout": Bounds(0, 1, "[)"),
        "norm_eps": Bounds(0, 1, "(]"),
        "init_std": Bounds(0, 10, "(]"),
        "pad_token_id": Bounds(0, 2**26),
    }

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.pad_token_id >= self.vocab_size:
            raise UserError(f"pad_token_id {self.pad_token_id} is not in a vocabulary of {self.vocab_size:,} entries")
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} cannot be divided among {self.num_heads} heads; "
                f"set num_heads to a divisor of {self.hidden_size}"
            )
        if self.direction not in get_args(Direction):
            near = suggestion(self.direction, get_args(Direction))
            raise UserError(f"direction {self.direction!r} is not one of {', '.join(get_args(Direction))}{near}")
        if not self.family:
            object.__setattr__(self, "family", "roberta-prelayernorm" if self.norm_first else "bert")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def reach(self) -> Reach:
        """Which tokens a token sees."""
        return REACHES[self.direction]

    @property
    def head_activation(self) -> Activation:
        """The activation in the masked-word head: the encoder's in BERT; the pre-norm family has GELU there always."""
        return "gelu" if self.norm_first else self.activation


SIZES = {  # layers, hidden size; a head has 64 dimensions, the feed-forward layer 4 times the hidden size
    "tiny": (2, 128),
    "mini": (4, 256),
    "small": (4, 512),
    "medium": (8, 512),
    "base": (12, 768),
    "large": (24, 1024),
}


def encoder_config(size: str) -> EncoderConfig:
    """The published configuration of a size: tiny, mini, small, medium, base or large."""
    if size not in SIZES:
        raise UserError(f"unknown size {size!r}{suggestion(size, SIZES) or '; one of: ' + ', '.join(SIZES)}")
    layers, hidden = SIZES[size]
    return EncoderConfig(hidden_size=hidden, num_layers=layers, num_heads=hidden // 64, intermediate_size=4 * hidden)

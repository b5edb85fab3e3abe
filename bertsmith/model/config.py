"""The configuration of an encoder and of its layers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal, NamedTuple, get_args

from bertsmith.config import Bounds, check_bounds
from bertsmith.errors import UserError, suggestion

Activation = Literal["gelu", "gelu_tanh", "relu", "silu"]
PoolerActivation = Literal["tanh", "gelu", "relu"]
HeadKind = Literal["single", "multi", "regression", "choice", "tags", "span"]  # of output layers
TagUnit = Literal["word", "spaced", "token"]  # what `tags` predicts a tag for
Direction = Literal["both", "left-to-right", "right-to-left"]
Positions = Literal["learned", "rotary", "none"]
Pooling = Literal["cls", "mean"]  # of a head on the whole text
PooledWindows = Literal["mean", "max"]  # of the logits of a document's windows
PoolingKind = Literal["mean", "cls", "max"]  # of sentence vectors
LayerType = Literal["transformer", "lstm"]
Sharing = Literal["none", "all", "attention", "feed-forward"]
RelativeTermNames = Literal["none", "both", "content-to-position", "position-to-content"]
ROTARY_BASE = 10_000.0  # of RoFormer, which introduced rotary positions
MOST_FILTERS = 16  # widths of character filters
CHOICES = {
    "direction": Direction,
    "positions": Positions,
    "layer_type": LayerType,
    "shared_layers": Sharing,
    "activation": Activation,
    "pooler_activation": PoolerActivation,
    "relative_terms": RelativeTermNames,
    "convolution_activation": PoolerActivation,
    "pooling": Pooling,
}


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
class LayerConfig:
    """Everything that one layer is built from; `EncoderConfig.layer` returns it.

    Without `attention_norm`, a pre-norm layer has no norm before its attention. Without a `rotary_base`, queries and
    keys are not rotated. `convolution` is the width of one beside the layer, None: there is none. An LSTM layer takes
    only its sizes, its dropout, and whether it adds its input (`residual`).
    """

    hidden_size: int
    num_heads: int
    intermediate_size: int
    activation: Activation
    gated: bool
    bias: bool
    norm_first: bool
    norm_eps: float
    attention_norm: bool
    hidden_dropout: float
    attention_dropout: float
    reach: Reach
    rotary_base: float | None
    layer_type: LayerType
    residual: bool
    relative_terms: RelativeTermNames
    relative_projections: bool
    key_bias: bool
    convolution: int | None
    convolution_activation: PoolerActivation

    @property
    def content_to_position(self) -> bool:
        """Whether scores have a term of the query and the distance."""
        return self.relative_terms in ("both", "content-to-position")

    @property
    def position_to_content(self) -> bool:
        """Whether scores have a term of the key and the distance."""
        return self.relative_terms in ("both", "position-to-content")


@dataclass(frozen=True)
class EncoderConfig:
    """Every fact of an encoder; BERT paper, section 3 and its released configurations.

    `norm_first` normalises the input of each sublayer instead of its output, and the states once more at the end.
    Without `bias` the encoder's linear layers and norms only multiply; the heads keep theirs. `direction` says which
    tokens a token sees: all, those up to itself, or those from itself on (section 5.1: the left-to-right ablation).
    `family` names the table of `formats/families/` that the model is saved by. Configurations from before families
    had names have none: they are `bert`, or `roberta-prelayernorm` where `norm_first` is set.

    The other fields are for other families (the defaults are BERT's):

    - `embedding_size`: the width of the embedding tables; a projection takes them to `hidden_size`, and the masked-word
      head works at this width (ALBERT, section 3.1). None: `hidden_size`, with no projection.
    - `embedding_norm`: whether the sum of the embeddings is normalised (OpenAI GPT does not).
    - `positions`: a learned table, or rotated queries and keys (RoFormer) with `rotary_base`; the layers with a window
      take `local_rotary_base` where it is set.
    - `window`: how many neighbours a token sees, half of them on each side, in all layers but every
      `global_every`-th, counted from the first (ModernBERT).
    - `gated`: the feed-forward layer multiplies its activation by a second projection (GeGLU: Shazeer 2020).
    - `first_attention_norm`: whether the first layer of a pre-norm encoder has a norm before its attention; after a
    norm of the embeddings it is not needed (ModernBERT).
    - `shared_layers`: which sublayers, with their norms, have the same parameters in all layers (ALBERT).
    - `head_transform`: whether the masked-word head has a dense layer, an activation and a norm before its scores.
      `head_activation` is that activation; None: the encoder's `activation`. With `head_bias` the scores have a bias
      for each word.
    - `pooler_activation`: the activation of the dense layer before the output of a head on the whole text (ELECTRA has
      GELU, DistilBERT ReLU). With `pooler_input_dropout` a classification or regression head applies its dropout before
      this layer, too (RoBERTa, ELECTRA). Without `pooler` there is no such layer, and the output of a classification or
      regression head is a matrix alone (OpenAI GPT).
    - `pooling`: a head on the whole text reads `[CLS]` (left to right: the last token), or the mean of all states.
    - `prediction_head`: every head has a dense layer, an activation and a norm, with the encoder's `bias` (ModernBERT).
    - `num_segments` 0: there is no table of segments.
    - `layer_type`: Transformer layers, or LSTMs of both directions, which do not see each other: the first half of the
      states is read from left to right, the second from right to left (ELMo). Each LSTM has `intermediate_size` cells.
    - `character_filters`: the (width, number) of the filters over the characters of a word, whose vector replaces the
      table of tokens; a character's embedding has `character_size`, and `num_highways` layers follow the filters. The
      tokenizer has `num_characters` and gives `max_characters` of a word.
    - `relative_terms`: which terms the distance of two tokens adds to their attention score (DeBERTa, section 3.1). A
      table has a vector for every distance up to `relative_reach`, in both directions (None: `max_positions`); with
      `relative_buckets` it has that many in each direction, for ranges of distances that grow as logarithms. With
      `relative_norm` these vectors are normalised. A layer projects them by matrices of its own or, without
      `relative_projections`, by those of its queries and keys.
    - `key_bias`: whether keys, those of distances as well, have a bias where the encoder has (the first DeBERTa: no).
    - `convolution`: the width of a convolution over the embeddings, whose result is added to the output of the first
      layer and normalised with it (DeBERTa v2); `convolution_activation` follows it.
    - `predicted_words`: so many entries of the vocabulary, from the first, are predicted, and the others as the unknown
      token: an encoder that reads characters learns from many more words than it predicts. None: all are predicted.
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
    embedding_size: int | None = None
    embedding_norm: bool = True
    positions: Positions = "learned"
    rotary_base: float = ROTARY_BASE
    local_rotary_base: float | None = None
    window: int | None = None
    global_every: int = 1
    gated: bool = False
    first_attention_norm: bool = True
    shared_layers: Sharing = "none"
    head_transform: bool = True
    head_activation: Activation | None = None
    head_bias: bool = True
    pooler: bool = True
    pooler_activation: PoolerActivation = "tanh"
    pooler_input_dropout: bool = False
    pooling: Pooling = "cls"
    prediction_head: bool = False
    layer_type: LayerType = "transformer"
    character_filters: tuple[tuple[int, int], ...] = ()
    character_size: int = 16
    num_characters: int = 261
    max_characters: int = 50
    num_highways: int = 2
    predicted_words: int | None = None
    relative_terms: RelativeTermNames = "none"
    relative_reach: int | None = None
    relative_buckets: int | None = None
    relative_norm: bool = False
    relative_projections: bool = True
    key_bias: bool = True
    convolution: int | None = None
    convolution_activation: PoolerActivation = "tanh"
    DECIDED = dict.fromkeys(
        ("vocab_size", "pad_token_id", "num_characters", "max_characters"), "the tokenizer of the corpus decides it"
    )
    BOUNDS = {
        "vocab_size": Bounds(1, 2**26),
        "hidden_size": Bounds(1, 2**17),
        "num_layers": Bounds(1, 1000),
        "num_heads": Bounds(1, 2**17),
        "intermediate_size": Bounds(1, 2**20),
        "max_positions": Bounds(1, 2**24),
        "num_segments": Bounds(0, 2**16),
        "hidden_dropout": Bounds(0, 1, "[)"),
        "attention_dropout": Bounds(0, 1, "[)"),
        "norm_eps": Bounds(0, 1, "(]"),
        "init_std": Bounds(0, 10, "(]"),
        "pad_token_id": Bounds(0, 2**26),
        "embedding_size": Bounds(1, 2**17),
        "rotary_base": Bounds(1, 1e12, "(]"),
        "local_rotary_base": Bounds(1, 1e12, "(]"),
        "window": Bounds(2, 2**24),
        "global_every": Bounds(1, 1000),
        "character_size": Bounds(1, 2**16),
        "num_characters": Bounds(1, 2**15),
        "max_characters": Bounds(1, 2**15),
        "num_highways": Bounds(0, 16),
        "predicted_words": Bounds(1, 2**26),
        "relative_reach": Bounds(2, 2**24),
        "relative_buckets": Bounds(4, 2**20),
        "convolution": Bounds(1, 2**10),
    }

    def __post_init__(self) -> None:
        check_bounds(self)
        for name, kind in CHOICES.items():
            if (value := getattr(self, name)) not in get_args(kind):
                near = suggestion(value, get_args(kind))
                raise UserError(f"{name} {value!r} is not one of {', '.join(get_args(kind))}{near}")
        if self.pad_token_id >= self.vocab_size:
            raise UserError(f"pad_token_id {self.pad_token_id} is not in a vocabulary of {self.vocab_size:,} entries")
        if self.hidden_size % self.num_heads:
            raise UserError(
                f"hidden_size {self.hidden_size} cannot be divided among {self.num_heads} heads; "
                f"set num_heads to a divisor of {self.hidden_size}"
            )
        self._check_attention()
        self._check_norms_and_head()
        self._check_lstm()
        self._check_relative()
        if not self.family:
            self._name_family()

    def _name_family(self) -> None:
        """Complete a configuration from before families had names, when pre-norm encoders had GELU in their heads."""
        object.__setattr__(self, "family", "roberta-prelayernorm" if self.norm_first else "bert")
        if self.norm_first and self.head_transform and self.activation != "gelu" and self.head_activation is None:
            object.__setattr__(self, "head_activation", "gelu")

    def _check_attention(self) -> None:
        """Refuse positions and windows that contradict each other."""
        if self.positions == "rotary" and self.head_size % 2:
            raise UserError(
                f"positions=rotary needs an even size of a head, and hidden_size / num_heads is {self.head_size}"
            )
        if self.positions != "rotary" and (self.rotary_base, self.local_rotary_base) != (ROTARY_BASE, None):
            raise UserError("rotary_base and local_rotary_base need positions=rotary; set it, or leave them out")
        if self.window is None and self.global_every > 1:
            raise UserError(f"global_every {self.global_every} needs a window for the other layers; set window")
        if self.window is not None and self.global_every == 1:
            raise UserError(
                f"window {self.window} is used by no layer while global_every is 1; set global_every to 2 or more"
            )
        if self.window is None and self.local_rotary_base is not None:
            raise UserError(f"local_rotary_base {self.local_rotary_base} needs layers with a window; set window")

    def _check_norms_and_head(self) -> None:
        """Refuse norms and heads that contradict each other."""
        if not self.first_attention_norm and not self.norm_first:
            raise UserError("first_attention_norm=false needs norm_first=true: a post-norm layer normalises its output")
        if not self.first_attention_norm and self.shared_layers in ("all", "attention"):
            raise UserError(
                f"first_attention_norm=false contradicts shared_layers={self.shared_layers}, which shares that norm"
            )
        if not self.pooler and self.pooler_input_dropout:
            raise UserError("pooler_input_dropout=true needs pooler=true: it is the dropout before the pooler")
        if self.pooling == "mean" and self.direction != "both":
            raise UserError(f"pooling=mean needs direction=both, not {self.direction}")
        if self.prediction_head and not (self.pooler and self.head_transform):
            raise UserError("prediction_head=true needs pooler=true and head_transform=true, the layers of every head")
        if self.head_transform:
            return
        if self.head_activation is not None:
            raise UserError(f"head_activation {self.head_activation} needs head_transform=true")
        if self.table_size != self.hidden_size:
            raise UserError(
                f"embedding_size {self.embedding_size} needs head_transform=true, which takes states of hidden_size "
                f"{self.hidden_size} to it"
            )

    def _check_lstm(self) -> None:
        """Refuse LSTM layers and character filters that contradict the other sizes."""
        if self.reads_characters != (self.layer_type == "lstm"):
            raise UserError("layer_type=lstm and character_filters belong together; set both, or leave both out")
        if self.layer_type == "lstm" and (self.hidden_size % 2 or 2 * self.intermediate_size <= self.hidden_size):
            raise UserError(
                f"layer_type=lstm projects intermediate_size {self.intermediate_size} cells to half of hidden_size "
                f"{self.hidden_size}; set an even hidden_size, and more cells than its half"
            )
        for pair in self.character_filters:
            if len(pair) != 2 or not 1 <= pair[0] <= self.max_characters or not 1 <= pair[1] <= 2**16:
                raise UserError(
                    f"character_filters: {list(pair)} is not a width of up to {self.max_characters} and a number"
                )
        if len(self.character_filters) > MOST_FILTERS:
            raise UserError(f"character_filters has {len(self.character_filters)} widths; at most {MOST_FILTERS}")

    def _check_relative(self) -> None:
        """Refuse relative positions and convolutions that contradict the other settings."""
        usual = {each.name: each.default for each in fields(self) if each.name.startswith("relative_")}
        changed = [name for name, value in usual.items() if getattr(self, name) != value]
        if self.relative_terms == "none" and changed:
            raise UserError(f"{changed[0]} needs relative positions; set relative_terms, or leave it out")
        if self.relative_terms != "none" and self.layer_type == "lstm":
            raise UserError(f"relative_terms={self.relative_terms} needs attention, which layer_type=lstm has not")
        furthest = self.relative_reach or self.max_positions
        if self.relative_buckets is not None and self.relative_buckets // 2 >= furthest - 1:
            raise UserError(
                f"relative_buckets {self.relative_buckets} is too many for distances under {furthest}: half of them "
                "have a distance each, and the others share the rest; set it to less, or to null"
            )
        if self.convolution is not None and self.convolution % 2 == 0:
            raise UserError(f"convolution {self.convolution} is even, so it has no middle; set an odd width")

    @property
    def relative_span(self) -> int:
        """The number of vectors for the distances in one direction."""
        return self.relative_buckets or self.relative_reach or self.max_positions

    @property
    def reads_characters(self) -> bool:
        """Whether the input is the characters of words."""
        return bool(self.character_filters)

    @property
    def num_predicted(self) -> int:
        """The number of entries of the vocabulary that are predicted."""
        return min(self.vocab_size, self.predicted_words or self.vocab_size)

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def table_size(self) -> int:
        """The width of the embedding tables."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @property
    def stored_layers(self) -> int:
        """The number of layers with parameters of their own."""
        return 1 if self.shared_layers == "all" else self.num_layers

    @property
    def masked_word_activation(self) -> Activation:
        """The activation in the masked-word head."""
        return self.head_activation or self.activation

    def layer(self, index: int) -> LayerConfig:
        """The configuration of the layer with this index, counted from 0."""
        is_local = index % self.global_every != 0
        return LayerConfig(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            activation=self.activation,
            gated=self.gated,
            bias=self.bias,
            norm_first=self.norm_first,
            norm_eps=self.norm_eps,
            attention_norm=self.first_attention_norm or index > 0,
            hidden_dropout=self.hidden_dropout,
            attention_dropout=self.attention_dropout,
            reach=self._reach(self.window if is_local else None),
            rotary_base=self._rotary_base(is_local),
            layer_type=self.layer_type,
            residual=index > 0 or self.layer_type == "transformer",
            relative_terms=self.relative_terms,
            relative_projections=self.relative_projections,
            key_bias=self.key_bias,
            convolution=self.convolution if index == 0 else None,
            convolution_activation=self.convolution_activation,
        )

    @cached_property
    def layers(self) -> tuple[LayerConfig, ...]:
        """The configurations of all layers, in order."""
        return tuple(self.layer(index) for index in range(self.num_layers))

    def _reach(self, window: int | None) -> Reach:
        """Which tokens a token sees: all in the direction or, with a window, half the window's size on each side."""
        before, after = REACHES[self.direction]
        side = None if window is None else window // 2
        return Reach(side if before is None else before, side if after is None else after)

    def _rotary_base(self, is_local: bool) -> float | None:
        if self.positions != "rotary":
            return None
        return self.local_rotary_base if is_local and self.local_rotary_base else self.rotary_base

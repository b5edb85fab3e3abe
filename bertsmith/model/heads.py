"""Heads: the output layers on top of an encoder, in pre-training and in fine-tuning.

B sequences, H hidden size, E embedding size, V vocabulary, K classes, M masked positions. Losses are sums; the training
loop divides them by the counts of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertsmith.batch import IGNORE, ROWS, Batch
from bertsmith.errors import UserError, suggestion
from bertsmith.model.activation import activate
from bertsmith.model.config import Direction, EncoderConfig, HeadKind, PooledWindows, TagUnit
from bertsmith.model.encoder import Encoder, init_weights, linear_weights, norm_weights
from bertsmith.model.fused.weights import Sampling, WordHead
from bertsmith.model.matching import MatchingHead
from bertsmith.model.pooling import Pooler, pool_windows, pooled_rows, pooled_states
from bertsmith.model.recurrent import FeatureConfig, RecurrentHead, RecurrentTop
from bertsmith.model.soft_targets import SoftTargets, word_losses

OPPOSITE: dict[Direction, Direction] = {"left-to-right": "right-to-left", "right-to-left": "left-to-right"}


def loss_and_correct(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The summed cross-entropy of logits (N, K), and the number of correct predictions."""
    return F.cross_entropy(logits, targets, reduction="sum"), (logits.detach().argmax(-1) == targets).sum()


def sample(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    """A word for each row of logits (M, V), drawn from their softmax; `targets` (M,) are the correct words.

    The word with the highest sum of logit and Gumbel noise is such a draw, and needs no normalised probabilities.
    """
    scores = logits.detach().float() / sampling.temperature
    if sampling.disallow_correct:
        scores = scores.scatter(1, targets.clamp_min(0)[:, None], -torch.inf)
    return (scores - torch.empty_like(scores).exponential_().log()).argmax(-1)


class MaskedLMHead(nn.Module):
    """The logits of all words at the masked positions; the decoder's matrix is tied to the token embeddings.

    With `head_transform` a dense layer, an activation and a norm come first. They have biases even if the encoder has
    none, unless all heads begin so (`prediction_head`); without `head_bias` the words have none (OpenAI GPT).
    """

    def __init__(self, config: EncoderConfig, embedding: nn.Embedding) -> None:
        super().__init__()
        size, transformed, bias = config.table_size, config.head_transform, config.bias or not config.prediction_head
        self.transform = nn.Linear(config.hidden_size, size, bias=bias) if transformed else None
        self.norm = nn.LayerNorm(size, eps=config.norm_eps, bias=bias) if transformed else None
        self.decoder = nn.Linear(size, config.vocab_size, bias=config.head_bias)
        self.activation = config.masked_word_activation
        init_weights(self, config.init_std)
        self.tie(embedding)

    def tie(self, embedding: nn.Embedding) -> None:
        """Share the matrix of the token embeddings."""
        self.decoder.weight = embedding.weight

    def forward(self, hidden: Tensor, table: Tensor | None = None) -> Tensor:
        """The logits (M, V); `table` (V, E) replaces the matrix of the token embeddings."""
        if self.transform is not None and self.norm is not None:
            hidden = self.norm(activate(self.transform(hidden), self.activation))  # (M, E)
        return self.decoder(hidden) if table is None else F.linear(hidden, table, self.decoder.bias)  # (M, V)

    def losses(
        self, hidden: Tensor, targets: Tensor, fused: bool, table: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of the masked words' states (M, H), and the number of correct predictions."""
        if not fused:
            return loss_and_correct(self(hidden, table).float(), targets)
        from bertsmith.model.fused.layer import masked_word_losses

        return masked_word_losses(hidden, targets, self._weights(table))[:2]

    def losses_and_samples(
        self, hidden: Tensor, targets: Tensor, fused: bool, sampling: Sampling
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `losses` returns, and a word drawn from the predictions at each masked position (M,)."""
        if not fused:
            logits = self(hidden).float()
            return *loss_and_correct(logits, targets), sample(logits, targets, sampling)
        from bertsmith.model.fused.layer import masked_word_losses

        loss, right, sampled = masked_word_losses(hidden, targets, self._weights(), sampling)
        assert sampled is not None
        return loss, right, sampled

    @torch.no_grad()
    def taught(self, hidden: Tensor, fused: bool) -> Tensor:
        """The logits that a student learns from (M, at least V), without gradients."""
        if not fused:
            return self(hidden)  # type: ignore[no-any-return]
        from bertsmith.model.fused.layer import masked_word_scores

        return masked_word_scores(hidden, self._weights())

    def taught_losses(
        self, hidden: Tensor, taught: Tensor, targets: Tensor, temperature: float, fused: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The summed soft loss with a teacher's logits (M, at least V), and what `losses` returns."""
        if not fused:
            logits = self(hidden)  # (M, V)
            losses = word_losses(logits, taught[:, : logits.shape[1]], targets, temperature)
            return *losses, (logits.detach().argmax(-1) == targets).sum()
        from bertsmith.model.fused.layer import taught_word_losses

        return taught_word_losses(hidden, taught, targets, self._weights(), temperature)

    def _weights(self, table: Tensor | None = None) -> WordHead:
        """What the fused operations take."""
        transform = None if self.transform is None else linear_weights(self.transform)
        norm = None if self.norm is None else norm_weights(self.norm)
        table = self.decoder.weight if table is None else table
        return WordHead(transform, self.activation, norm, table, self.decoder.bias)


class NextSentenceHead(nn.Module):
    """The logits of next sentence prediction: class 0 is IsNext, class 1 NotNext, as in the released code."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.pooler = Pooler(config)
        self.output = nn.Linear(config.hidden_size, 2)
        init_weights(self, config.init_std)

    def forward(self, first: Tensor) -> Tensor:
        return self.output(self.pooler(first))  # (B, 2)


@dataclass(frozen=True)
class HeadConfig:
    """The head of a fine-tuned model: its kind and the names of its classes.

    `single` predicts one label for a text or pair, `multi` any number of them, `regression` a number, `choice` one of
    `num_choices` endings (0: a batch is one question), `tags` a label for every token, `span` the start and the end of
    an answer. `dropout` is applied before the output layer; None: the encoder's `hidden_dropout`, or none for spans.
    With `features` a BiLSTM on a frozen encoder predicts, with attention unless it tags words. With `bilstm_layers` a
    BiLSTM between the encoder and the output layer is trained with both (Table 5). With `beside` a second encoder has
    the opposite direction, and the states of both are concatenated (section 5.1).

    With `language_model` the encoder, which reads in one direction, goes on predicting the next tokens of the texts:
    this is the weight of that loss beside the task's (OpenAI GPT, section 3.2). With `both_orders` a pair is two
    sequences, one in each order, whose logits are added: the output layer has no bias, so this is to add their states
    before it (section 3.3).

    `unit` is what `tags` predicts a tag for: words, at their first token, which a text is divided into by its letters
    and punctuation or only by its spaces (`spaced`); or every token, where the boundaries of entities may lie inside
    words.
    """

    kind: HeadKind
    labels: tuple[str, ...] = ()
    num_choices: int = 0
    dropout: float | None = None
    features: FeatureConfig | None = None
    bilstm_layers: int = 0
    beside: bool = False
    language_model: float = 0.0
    both_orders: bool = False
    unit: TagUnit = "word"

    @property
    def sequences(self) -> int:
        """The number of sequences of a row: one for each ending, two for a pair in both orders, else one."""
        return 2 if self.both_orders else max(1, self.num_choices)

    @property
    def is_of_sequence(self) -> bool:
        """Whether it predicts labels or a number for a whole text or pair."""
        return self.kind in ("single", "multi", "regression")

    def rate(self, config: EncoderConfig) -> float:
        """The dropout before the output layer on this encoder."""
        if self.dropout is not None:
            return self.dropout
        return 0.0 if self.kind == "span" else config.hidden_dropout

    @property
    def own_form(self) -> tuple[FeatureConfig | None, int, bool]:
        """The settings of the parts between encoder and output layer that `transformers` has no class for."""
        return self.features, self.bilstm_layers, self.beside

    @property
    def is_own(self) -> bool:
        return self.own_form != (None, 0, False)

    def same_classes(self, other: HeadConfig) -> bool:
        """Whether the weights of one output layer can be used in the other."""
        return (self.kind, self.labels, self.own_form) == (other.kind, other.labels, other.own_form)

    def label_index(self, name: str, where: str = "") -> int:
        """The index of a class, or an error that lists the classes."""
        try:
            return self.labels.index(name)
        except ValueError:
            near = suggestion(name, self.labels)
            raise UserError(
                f"{where}label {name!r} is not one of the model's labels: {', '.join(self.labels[:20])}"
                f"{', …' if len(self.labels) > 20 else ''}{near}"
            ) from None


class SequenceHead(nn.Module):
    """The logits of each sequence, from its pooled state; `input_dropout` is that before the pooler."""

    def __init__(
        self, config: EncoderConfig, outputs: int, dropout: float, input_dropout: float = 0.0, bias: bool = True
    ) -> None:
        super().__init__()
        self.input_dropout = nn.Dropout(input_dropout)
        self.pooler = Pooler(config) if config.pooler else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(config.hidden_size, outputs, bias=bias)
        init_weights(self, config.init_std)

    def forward(self, first: Tensor) -> Tensor:
        return self.output(self.dropout(self.pooler(self.input_dropout(first))))  # (B, K)


class TokenHead(nn.Module):
    """The logits of each token; only a `prediction_head` has a layer before them."""

    def __init__(self, config: EncoderConfig, outputs: int, dropout: float) -> None:
        super().__init__()
        self.pooler = Pooler(config) if config.prediction_head else None
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(config.hidden_size, outputs)
        init_weights(self, config.init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden if self.pooler is None else self.pooler(hidden)
        return self.output(self.dropout(hidden))  # (…, K)


def make_head(config: EncoderConfig, head: HeadConfig) -> nn.Module:
    """Make the head of this configuration."""
    dropout = head.rate(config)
    if head.features is not None:
        if head.kind == "tags":
            return RecurrentHead(config, head.features, len(head.labels), dropout)
        return MatchingHead(config, head.features, _outputs(head), dropout, of_tokens=head.kind == "span")
    if head.beside:
        config = replace(config, hidden_size=2 * config.hidden_size)
    top = _output_layer(config, head, dropout)
    return RecurrentTop(config, head.bilstm_layers, top, isinstance(top, SequenceHead)) if head.bilstm_layers else top


def _output_layer(config: EncoderConfig, head: HeadConfig, dropout: float) -> nn.Module:
    if head.kind in ("tags", "span"):
        return TokenHead(config, _outputs(head), dropout)
    input_dropout = dropout if config.pooler_input_dropout and head.kind != "choice" else 0.0
    bias = config.pooler or head.kind == "choice"
    return SequenceHead(config, _outputs(head), dropout, input_dropout, bias)


def _outputs(head: HeadConfig) -> int:
    """The number of logits of a sequence or, for tags and spans, of a token."""
    return {"regression": 1, "choice": 1, "span": 2}.get(head.kind, len(head.labels))


def _opposite(config: EncoderConfig) -> EncoderConfig:
    """The same encoder with the opposite direction."""
    if config.direction not in OPPOSITE:
        raise UserError("beside needs an encoder of one direction; this one sees both directions")
    return replace(config, direction=OPPOSITE[config.direction])


class TaskModel(nn.Module):
    """An encoder with one head, trained together (section 3.2)."""

    def __init__(self, encoder: Encoder, head: HeadConfig) -> None:
        super().__init__()
        self.encoder = encoder
        self.head_config = head
        self.class_weights: list[float] | None = None  # in the training loss; None: all classes have the same weight
        self.pooled_windows: PooledWindows = "mean"  # how the logits of a text's windows become its own in training
        self.soft_targets: SoftTargets | None = None  # how a teacher's logits are learnt; None: there is no teacher
        self._sent: tuple[list[float] | None, Tensor | None] = None, None  # these weights and their copy on the device
        self.head = make_head(encoder.config, head)
        self.beside = Encoder(_opposite(encoder.config)) if head.beside else None
        self.causal_lm = MaskedLMHead(encoder.config, encoder.embeddings.tokens) if head.language_model else None
        if head.features is not None:
            encoder.requires_grad_(False)

    @property
    def encoders(self) -> list[Encoder]:
        """The encoder, and the second one of the opposite direction where there is one."""
        return [self.encoder] if self.beside is None else [self.encoder, self.beside]

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weights of losses in the sum that is minimised; 1 for those that are not named."""
        return {"lm": self.head_config.language_model}

    def tie_weights(self) -> None:
        """Make the language model's output layer share the token embedding's matrix."""
        if self.causal_lm is not None:
            self.causal_lm.tie(self.encoder.embeddings.tokens)

    @property
    def untrained(self) -> list[Encoder]:
        """The encoder, where the output layer reads its states as features."""
        return [] if self.head_config.features is None else [self.encoder]

    def scores(self, batch: Batch) -> Tensor:
        """The output layer's logits: (B, K) for sequences and endings, (…, K) for tokens."""
        if isinstance(self.head, RecurrentHead | MatchingHead):
            return self.head.scores(self.encoder, batch).float()
        if isinstance(self.head, SequenceHead):
            return self.head(self._pooled(batch)).float()
        hidden = torch.cat([encoder(batch) for encoder in self.encoders], -1)
        return (self.head(hidden, batch.layout) if isinstance(self.head, RecurrentTop) else self.head(hidden)).float()

    def _pooled(self, batch: Batch) -> Tensor:
        """One state of each sequence from each encoder, concatenated (B, H or 2 H)."""
        return torch.cat([pooled_states(encoder, batch) for encoder in self.encoders], -1)

    def logits(self, batch: Batch) -> Tensor:
        """The logits: (B, K) for sequences, (B, choices) for endings, (…, K) for tags, (B, L, 2) for spans."""
        return self._shaped(self.scores(batch), batch)

    def _shaped(self, scores: Tensor, batch: Batch) -> Tensor:
        if self.head_config.kind == "choice":
            return scores.view(-1, self.head_config.num_choices or len(scores))
        if self.head_config.kind == "span":
            return batch.layout.valid(batch.layout.pad(scores, float("-inf")))
        return scores

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        """The summed loss, by the name `task`, and that of the language model, `lm`, where there is one."""
        scores, losses = self._scores_and_losses(batch)
        logits = self._shaped(scores, batch)
        if self.head_config.both_orders:
            logits = logits.unflatten(0, (-1, 2)).sum(1)
        if ROWS in batch.labels:
            logits = pool_windows(logits, batch.labels[ROWS], len(batch.labels["label"]), self.pooled_windows)
        loss = self.loss(logits, batch)
        if self.soft_targets is not None:
            loss = self.soft_targets.loss(loss, logits, batch, self.head_config.kind)
        return {"task": loss, **losses}

    def _scores_and_losses(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """The output layer's logits, and the language model's loss, from one pass through the encoder."""
        if self.causal_lm is None:
            return self.scores(batch), {}
        places, targets = batch.labels["masked"], batch.labels["targets"]
        if isinstance(self.head, SequenceHead):
            pooled = pooled_rows(batch.layout, self.encoder.config.direction)
            states = self.encoder(batch, rows=torch.cat([places, pooled]))
            scores, states = self.head(states[len(places) :]), states[: len(places)]
        else:
            hidden = self.encoder(batch)
            scores, states = self.head(hidden), batch.layout.flat(hidden).index_select(0, places)
        loss, _ = self.causal_lm.losses(states, targets, self.encoder.choice(batch).fused)
        return scores.float(), {"lm": loss}

    def _weights_on(self, device: torch.device) -> Tensor | None:
        """The class weights on a device, copied there once: a CUDA graph cannot capture a copy from the host."""
        if self.class_weights is None:
            return None
        sent, weights = self._sent
        if weights is None or sent is not self.class_weights or weights.device != device:
            weights = torch.tensor(self.class_weights, device=device)
            self._sent = self.class_weights, weights
        return weights

    def loss(self, logits: Tensor, batch: Batch) -> Tensor:
        """The loss of these logits, summed over the sequences or tokens that the batch counts."""
        kind, labels = self.head_config.kind, batch.labels
        weights = self._weights_on(logits.device)
        if kind == "regression":
            return F.mse_loss(logits.squeeze(-1), labels["label"].to(logits.dtype), reduction="sum")
        if kind == "multi":
            target = labels["label"].to(logits.dtype)
            return F.binary_cross_entropy_with_logits(logits, target, weights, reduction="none").mean(-1).sum()
        if kind == "tags":
            return F.cross_entropy(
                logits.flatten(0, -2), labels["tags"].flatten(), ignore_index=IGNORE, reduction="sum"
            )
        if kind == "span":
            starts, ends = labels["label"].unbind(-1)
            sums = [F.cross_entropy(logits[..., i], t, reduction="sum") for i, t in enumerate((starts, ends))]
            return (sums[0] + sums[1]) / 2
        return F.cross_entropy(logits, labels["label"].long(), weights, reduction="sum")

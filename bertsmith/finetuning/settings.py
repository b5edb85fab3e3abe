"""The settings of a fine-tuning run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import get_args

from bertsmith.config import Bounds, check_bounds
from bertsmith.errors import UserError
from bertsmith.model.config import PooledWindows
from bertsmith.model.recurrent import FeatureConfig
from bertsmith.rows.columns import Columns
from bertsmith.training.settings import TrainConfig

EPOCHS, LEAST_STEPS, MOST_EPOCHS = 3, 300, 20  # of a run whose length is not given


@dataclass(frozen=True)
class FinetuneData:
    """How rows are read and encoded; `max_length` is that of the task if it is not set.

    Contexts are read in windows that begin `stride` tokens apart; a question keeps `max_query` tokens, an answer has at
    most `max_answer`. A text to classify that is longer than `max_length` is read in up to `windows` windows, and its
    logits are theirs, `pooled` by the mean or the maximum; with 0 its end is cut. `class_weights` are factors of the
    loss by class; `balanced` gives all classes the same weight. `partial` marks the scores in reports, because the rows
    are only a part of their data set. With `skip_bad`, rows that cannot be used (an empty text, no label) are skipped
    and counted; else they end the run. If there are no dev rows, `dev_share` of the training rows are held out for
    evaluation (see `dev_split`); 0: none.
    """

    max_length: int | None = None
    columns: Columns = field(default_factory=Columns)
    stride: int = 128
    max_query: int = 64
    max_answer: int = 30
    windows: int = 0
    pooled: PooledWindows = "mean"
    class_weights: dict[str, float] = field(default_factory=dict)
    balanced: bool = False
    partial: bool = False
    skip_bad: bool = False
    dev_share: float = 0.1
    BOUNDS = {
        "max_length": Bounds(8, 2**24),
        "stride": Bounds(1, 2**24),
        "max_query": Bounds(1, 2**24),
        "max_answer": Bounds(1, 2**24),
        "windows": Bounds(0, 10**6),
        "class_weights": Bounds(0, 10**9),
        "dev_share": Bounds(0, 0.5),
    }

    def __post_init__(self) -> None:
        check_bounds(self, "data.")
        if self.pooled not in get_args(PooledWindows):
            raise UserError(f"data.pooled {self.pooled!r} is not one of {', '.join(get_args(PooledWindows))}")


@dataclass(frozen=True)
class TeacherConfig:
    """A `teacher`, a model that was fine-tuned for the same task; empty: there is none.

    The loss is `label_weight` times that of the labels and `soft_weight` times that of the teacher's predictions, both
    models' at a `temperature` (Hinton et al. 2015; the values are those that DistilBERT was distilled with on SQuAD).
    """

    teacher: str = ""
    temperature: float = 2.0
    soft_weight: float = 0.5
    label_weight: float = 0.5
    BOUNDS = {
        "temperature": Bounds(0, 1000, "(]"),
        "soft_weight": Bounds(0, 10**6, "(]"),
        "label_weight": Bounds(0, 10**6),
    }

    def __post_init__(self) -> None:
        check_bounds(self, "distillation.")


@dataclass(frozen=True)
class FinetuneConfig:
    """One complete fine-tuning run.

    A run whose length is not given has 3 epochs, as in the paper; on few rows of the user's own it has more, as many as
    make 300 steps but at most 20, because an output layer that starts at random learns nothing in a few steps.

    `random_start` keeps the model's shape and tokenizer but not its weights.

    A run that collapses starts again with another seed, at most `restarts` times. The top `reinit_layers` layers and
    the pooler are initialised again (Zhang et al. 2021); `frozen_layers` freezes the embeddings and as many of the
    lowest layers (0: the embeddings alone). With a variant of `features` the encoder is frozen, and a BiLSTM on its
    hidden states is trained (section 5.3). `bilstm_layers` puts a new BiLSTM between the encoder and the output layer,
    trained with them (Table 5); `beside` is a second model of the other direction, whose hidden states are concatenated
    with those of the first. `dropout` replaces the model's own: a model that was pre-trained without dropout may still
    need it here. With `distillation.teacher` the model also learns the predictions of a fine-tuned one.

    `language_model` is the weight of the language model's loss on the same texts, for an encoder that reads in one
    direction; `both_orders` reads every pair of texts in both orders, for an output layer without a bias. Unset, they
    are those of the model's family: OpenAI GPT has a weight of 0.5, and both orders for texts that are alike or not.
    """

    task: str
    data: FinetuneData = field(default_factory=FinetuneData)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(batch_size=32, learning_rate=5e-5, warmup=0.1))
    random_start: bool = False
    restarts: int = 2
    reinit_layers: int = 0
    frozen_layers: int | None = None
    features: FeatureConfig = field(default_factory=FeatureConfig)
    bilstm_layers: int = 0
    beside: str = ""
    dropout: float | None = None
    language_model: float | None = None
    both_orders: bool | None = None
    distillation: TeacherConfig = field(default_factory=TeacherConfig)
    BOUNDS = {
        "restarts": Bounds(0, 1000),
        "reinit_layers": Bounds(0, 1000),
        "frozen_layers": Bounds(0, 1000),
        "bilstm_layers": Bounds(0, 100),
        "dropout": Bounds(0, 1, "[)"),
        "language_model": Bounds(0, 10**6),
    }

    def with_length(self, rows: int, own: bool) -> FinetuneConfig:
        """With a length, if it has none, for so many training rows; they are the user's `own` or a data set's."""
        if any(getattr(self.train, name) is not None for name in TrainConfig.ONE_OF):
            return self
        epochs = math.ceil(LEAST_STEPS * self.train.batch_size / rows) if own else EPOCHS
        return replace(self, train=replace(self.train, epochs=float(min(max(epochs, EPOCHS), MOST_EPOCHS))))

    def __post_init__(self) -> None:
        check_bounds(self)
        trained_apart = {"features": self.features.variant, "bilstm_layers": self.bilstm_layers, "beside": self.beside}
        for name in (name for name, value in trained_apart.items() if value and self.language_model):
            raise UserError(f"language_model {self.language_model} trains the encoder alone; leave out {name}")
        if self.features.variant and (self.bilstm_layers or self.beside):
            name = "bilstm_layers" if self.bilstm_layers else "beside"
            raise UserError(f"--features trains a BiLSTM on a frozen encoder, and {name} is for one that is trained")
        if self.features.variant and self.distillation.teacher:
            raise UserError(
                "--teacher distils into an encoder that is trained, and --features freezes it; leave one out"
            )

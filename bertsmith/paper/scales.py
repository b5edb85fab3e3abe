"""The sizes and budgets at which the paper's tables are run; every row of a table has the same budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from bertsmith.errors import UserError, nearest_or_all
from bertsmith.finetuning.protocols import GLUE, SINGLE
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.model.config import EncoderConfig
from bertsmith.pretraining.loader import DataConfig
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import feature_based
from bertsmith.tasks.glue_average import LEADERBOARD
from bertsmith.training.settings import TrainConfig

BASE = EncoderConfig()  # the paper's Base, to which the sizes of a scale are relative
CHECKPOINTS = 5  # of a run that figure 5 evaluates during its training
# As in `roberta-prenorm`.
PRE_NORM: dict[str, Any] = {"family": "roberta-prelayernorm", "norm_first": True, "bias": False}


@dataclass(frozen=True)
class Scale:
    """The size of the model that replaces Base, and how it is pre-trained and fine-tuned.

    `layers`, `hidden` and `heads` describe the model that replaces Base; other sizes are scaled by the same ratios.
    With `pre_norm` BERT's encoders have their norms before the sublayers, and no biases, which Muon trains fastest; the
    rows differ as before. `rates` are the learning rates for GLUE tasks, from which the best on dev is chosen.
    `dropout` is that of the encoder in pre-training and, unless `tuning_dropout` is set, in fine-tuning. `long_share`
    is the share of pre-training with sequences of `long_length`, None for one length. `tuning_steps` is the number of
    steps of every fine-tuning, or None for the paper's epochs, which `tuning_epochs` changes for single tasks.
    `families` changes the training of other families, whose encoders Muon's rate does not suit; the budget is the same.
    """

    name: str
    what: str
    layers: int
    hidden: int
    heads: int
    max_length: int
    long_length: int | None
    train: TrainConfig
    rates: tuple[float, ...]
    task_rate: float | None = None  # of all other tasks; None: the paper's
    feature_epochs: int = 20
    restarts: int = 2
    dropout: float = BASE.hidden_dropout
    long_share: float = DataConfig().long_share
    tuning_steps: int | None = None
    pre_norm: bool = False
    tuning_dropout: float | None = None
    tuning_epochs: Mapping[str, float] = field(default_factory=dict)
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def trains_alone(self) -> bool:
        """Whether runs are pre-trained one at a time: one keeps a GPU busy, or has its minutes by the clock."""
        return self.hidden >= BASE.hidden_size or self.train.hours is not None

    def encoder(self, model: EncoderConfig) -> EncoderConfig:
        """Return an encoder of the paper at this scale, with the same ratios to Base in layers, width and head size.

        A narrower layer sums fewer products, so its weights are initialised larger to keep the paper's sums.
        """
        if model.reads_characters:
            return self._character_encoder(model)
        wide = max(1, round(model.hidden_size / BASE.hidden_size * self.heads))  # in heads of the usual size
        heads = max(1, round(wide * model.num_heads * BASE.head_size / model.hidden_size))
        hidden = wide * (self.hidden // self.heads)
        changes = PRE_NORM if self.pre_norm and model.family == BASE.family else {}
        return replace(
            model,
            **changes,
            num_layers=max(1, round(model.num_layers / BASE.num_layers * self.layers)),
            hidden_size=hidden,
            num_heads=heads if hidden % heads == 0 else wide,
            intermediate_size=4 * hidden,
            max_positions=self.long_length or self.max_length,
            init_std=round(model.init_std * (model.hidden_size / hidden) ** 0.5, 3),
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
        )

    def _character_encoder(self, model: EncoderConfig) -> EncoderConfig:
        """Return ELMo's encoder at this scale: widths, cells and filters with the same ratios to Base."""
        ratio = self.hidden / BASE.hidden_size
        filters = tuple((width, max(1, round(number * ratio))) for width, number in model.character_filters)
        return replace(
            model,
            hidden_size=2 * max(1, round(model.hidden_size * ratio / 2)),
            intermediate_size=max(1, round(model.intermediate_size * ratio)),
            character_filters=filters,
            hidden_dropout=self.dropout,
        )

    def pretraining(self, recipe: PretrainConfig) -> PretrainConfig:
        """Return a recipe of the paper with the size and budget of this scale, and its own seed."""
        short, long, share = self.max_length, self.long_length, self.long_share
        data: DataConfig = replace(recipe.data, max_length=short, long_length=long, long_share=share)
        train = replace(self.train, seed=recipe.train.seed, **self.families.get(recipe.model.family, {}))
        return replace(recipe, model=self.encoder(recipe.model), data=data, train=train)

    def finetuning(self, task: str, features: str = "") -> list[FinetuneConfig]:
        """Return the settings for fine-tuning a task; from several, the best on dev is chosen."""
        if features:
            config = feature_based(task, features)
            train = replace(config.train, epochs=self.tuning_epochs.get(task, self.feature_epochs))
            width = replace(config.features, hidden_size=self.hidden)
            return [replace(config, train=train, features=width, restarts=self.restarts, dropout=BASE.hidden_dropout)]
        grid = SINGLE.get(task, GLUE)
        settings = {name.split(".")[-1]: values[0] for name, values in grid.items()}
        base = TrainConfig(warmup=0.1, **settings)
        if self.tuning_steps is not None:
            base = replace(base, steps=self.tuning_steps, epochs=None)
        base = replace(base, epochs=self.tuning_epochs.get(task, base.epochs))
        rates = self.rates if task in LEADERBOARD else (self.task_rate or base.learning_rate,)
        trains = [replace(base, learning_rate=rate) for rate in rates]
        return [FinetuneConfig(task, train=t, restarts=self.restarts, dropout=self.tuning_dropout) for t in trains]


# As in `roberta-prenorm`. A checkpoint after every fifth, from which a killed run resumes.
MUON = TrainConfig(
    hours=3 / 60, batch_size=256, optimizer="muon", learning_rate=0.02, rest_learning_rate=1e-3, weight_decay=0.1,
    warmup=0.05, beta2=0.98, evaluate_every=0.1, save_every=0.2,
)  # fmt: skip
POST_NORM: dict[str, Any] = {"learning_rate": 0.01, "weight_decay": 0.2}  # of Muon
RECURRENT: dict[str, Any] = {  # as in the recipe `elmo`
    "optimizer": "adamw", "learning_rate": 1e-3, "rest_learning_rate": None, "weight_decay": 0.0, "batch_size": 128,
}  # fmt: skip


def _train(steps: int, batch_size: int, rate: float, **changes: float) -> TrainConfig:
    values = {"warmup": 0.05, "evaluate_every": 0.1, **changes}
    return TrainConfig(steps=steps, batch_size=batch_size, learning_rate=rate, **values)  # type: ignore[arg-type]


SMALL_TASKS = ("cola", "mrpc", "stsb", "rte", "swag")  # swag: where CODAH stands for it
GLUE_RATES = tuple(GLUE["train.learning_rate"])
SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "tiny", "pre-trained in a minute on two cores: shows that everything runs, not what the paper found",
            4, 64, 4, 32, 128, _train(100, 16, 2e-3, evaluate_every=0.0), (1e-3,), 1e-3, feature_epochs=3, restarts=0,
        ),
        Scale(
            "small", "4 layers, 256 wide, 12,000 steps: minutes per model on one fast GPU",
            4, 256, 4, 128, 512, _train(12_000, 128, 7e-4, beta2=0.98), (3e-4,), 3e-4, feature_epochs=5,
            dropout=0.0, long_share=0.3, tuning_steps=1500,
        ),
        Scale(
            "hour", "8 layers, 512 wide, pre-norm, Muon, equal minutes for every row (3 by default, see --minutes)",
            8, 512, 8, 256, None, MUON, (1e-4,), 1e-4, feature_epochs=5, restarts=0, dropout=0.0, pre_norm=True,
            families={"openai-gpt": POST_NORM, "elmo": RECURRENT}, tuning_dropout=0.1,
            tuning_epochs={"sst2": 1, "squad1": 2, **dict.fromkeys(SMALL_TASKS, 5)},
        ),
        Scale(
            "base", "the paper's sizes, a tenth of its budget",
            12, 768, 12, 128, 512, _train(100_000, 256, 1e-4), (5e-5,),
        ),
        Scale(
            "paper", "the paper's sizes, budget and choice of learning rates",
            12, 768, 12, 128, 512, _train(1_000_000, 256, 1e-4, warmup=0.01), GLUE_RATES,
        ),
    )
}  # fmt: skip


def find_scale(name: str) -> Scale:
    """Return a scale by its name."""
    if name not in SCALES:
        raise UserError(f"--scale: unknown scale {name!r}{nearest_or_all(name, SCALES)}")
    return SCALES[name]

"""The experiments on left to right against both ways: what each one changes, and how its encoders are fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bertsmith.config import override
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.paper.scales import SCALES
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe

TASKS = {"mnli": "MNLI-m", "sst2": "SST-2", "mrpc": "MRPC", "cola": "CoLA", "squad1": "SQuAD F1"}
MASKED, LEFT, PAIRS = "bert-base-no-nsp", "bert-base-left-to-right", "bert-base"
FULL = ("data.pairs=full",)
DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")
SIZES = {"": (8, 512, 8), "12x768": (12, 768, 12), "4x256": (4, 256, 4), "smoke": (1, 32, 2)}


@dataclass(frozen=True)
class Tuning:
    """A way of fine-tuning: the rate, how often the rows are seen, the state that is classified, the dropout.

    `pooled` is the token whose state is classified: the encoder's own (last for left to right, first for both ways),
    or the mean of all. `settings` are further ones.
    """

    what: str
    rate: float = 1e-4
    epochs: float = 1.0  # times the usual
    pooled: str = ""
    dropout: float = 0.1
    settings: tuple[str, ...] = ()

    @property
    def only_texts(self) -> bool:
        """Whether it changes nothing for spans."""
        return bool(self.pooled)


TUNINGS = {
    "usual": Tuning("1e-4, dropout 0.1"),
    "rate-5e-5": Tuning("half the rate", rate=5e-5),
    "rate-2e-4": Tuning("twice the rate", rate=2e-4),
    "long": Tuning("twice the epochs", epochs=2.0),
    "no-dropout": Tuning("no dropout", dropout=0.0),
    "mean": Tuning("classified from the mean of all tokens", pooled="mean"),
    "first": Tuning("classified from [CLS], which sees only itself if read left to right", pooled="first"),
    "last": Tuning("classified from the last token", pooled="last"),
    "bilstm": Tuning("a BiLSTM on top", settings=("bilstm_layers=1",)),
    "lm": Tuning("with half the language model's loss, as OpenAI GPT", settings=("language_model=0.5",)),
}


@dataclass(frozen=True)
class Experiment:
    """A pre-training run: the recipe, what is changed, its minutes and the shape; and how its encoder is fine-tuned.

    `at` are shares of the run whose checkpoints are fine-tuned as well.
    """

    asks: str
    recipe: str
    changes: tuple[str, ...] = ()
    minutes: float = 3.0
    size: str = ""
    tunings: tuple[str, ...] = ("usual",)
    at: tuple[float, ...] = ()


EXPERIMENTS = {
    "masked": Experiment(
        "the two to compare; does fine-tuning decide: rate, steps, the token that is classified?",
        MASKED, tunings=("usual", "rate-5e-5", "rate-2e-4", "long", "mean"),
    ),
    "left": Experiment(
        "the same, left to right",
        LEFT, tunings=("usual", "rate-5e-5", "rate-2e-4", "long", "mean", "lm", "bilstm"),
    ),
    "masked-full": Experiment("do pairs of segments decide? here full sentences", MASKED, FULL),
    "left-full": Experiment("the same, left to right", LEFT, FULL),
    "masked-40": Experiment("does the masking rate decide? 40 %", MASKED, ("data.masking.rate=0.4",), at=(0.5,)),
    "masked-6-minutes": Experiment("do tokens decide? twice as many", MASKED, minutes=6.0),
    "left-6-minutes": Experiment("the same, left to right", LEFT, minutes=6.0),
    "masked-12x768": Experiment("does the size decide? at its end, and at the loss of 8 × 512", MASKED, size="12x768",
                                minutes=4.0, at=(0.75,)),
    "left-12x768": Experiment("the same, left to right", LEFT, size="12x768", minutes=4.0, at=(0.75,)),
    "masked-dropout": Experiment("does dropout in pre-training decide? 0.1", MASKED, DROPOUT),
    "left-dropout": Experiment("the same, left to right", LEFT, DROPOUT),
    "nsp": Experiment("what does next sentence prediction add here?", PAIRS),
    "masked-30": Experiment("30 % masked", MASKED, ("data.masking.rate=0.3",)),
    "masked-20": Experiment("20 % masked", MASKED, ("data.masking.rate=0.2",)),
    "masked-1-minute": Experiment("a third of the tokens", MASKED, minutes=1.0),
    "left-1-minute": Experiment("the same, left to right", LEFT, minutes=1.0),
    "masked-4x256": Experiment("a small encoder, as at scale small", MASKED, size="4x256"),
    "left-4x256": Experiment("the same, left to right", LEFT, size="4x256"),
    "masked-seed-2": Experiment("how much does the seed of pre-training change?", MASKED, ("train.seed=2",)),
    "left-seed-2": Experiment("the same, left to right", LEFT, ("train.seed=2",)),
}  # fmt: skip


def pretraining_config(name: str, minutes: float | None, smoke: bool) -> PretrainConfig:
    """The recipe of scale `hour` in the shape and with the change of an experiment; checkpoints at every quarter."""
    experiment = EXPERIMENTS[name]
    layers, hidden, heads = SIZES["smoke" if smoke else experiment.size]
    scale = replace(SCALES["hour"], layers=layers, hidden=hidden, heads=heads, max_length=64 if smoke else 256)
    config = replace(scale.pretraining(recipe(experiment.recipe)), recipe=name)
    train = replace(config.train, hours=(minutes or experiment.minutes) / 60, workers=12)
    if smoke:
        train = replace(train, hours=None, steps=8, batch_size=8, workers=0)
    train = replace(train, save_every=0.25, keep=9, evaluate_every=0.125)
    return override(replace(config, train=train), experiment.changes)


def tuning_config(tuning: Tuning, task: str, seed: int, smoke: bool) -> FinetuneConfig:
    """The fine-tuning of a task: that of scale `hour`, with what this way changes."""
    config = SCALES["hour"].finetuning(task)[0]
    epochs = (config.train.epochs or 0.0) * tuning.epochs
    length: dict[str, Any] = {"epochs": None, "steps": 2} if smoke else {"epochs": epochs}
    train = replace(config.train, **length, learning_rate=tuning.rate, seed=seed, workers=0)
    data = replace(config.data, max_length=64, max_query=16) if smoke else config.data
    return override(replace(config, data=data, train=train, dropout=tuning.dropout), tuning.settings)

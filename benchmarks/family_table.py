"""The families that are measured: their recipes, tokenizers and learning rates, and the shapes that they get."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from bertsmith.config import override
from bertsmith.model.config import EncoderConfig
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe
from bertsmith.training.settings import TrainConfig


@dataclass(frozen=True)
class Family:
    """A family: its recipe, its kind of tokenizer, and what its paper trained it with."""

    recipe: str
    tokenizer: str
    published: str  # the learning rate and the batch of the paper, in words
    layers: float = 1.0  # of those of a BERT of the same shape
    changes: tuple[str, ...] = ()  # of the settings in the comparison of quality


FAMILIES = {
    "bert": Family("bert-base", "wordpiece", "1e-4 with Adam, 256 sequences of 512"),
    "roberta": Family("roberta-base", "bytes", "6e-4 with Adam, 8,192 sequences of 512"),
    "albert": Family("albert-base", "unigram", "1.76e-3 with LAMB, 4,096 sequences of 512"),
    "electra": Family(
        "electra-base",
        "wordpiece",
        "2e-4 with Adam, 256 sequences of 512; small: 5e-4, 128 of 128",
        changes=("objective.generator_size=0.25",),  # a third of 512 units would not divide into heads
    ),
    "distilbert": Family("distilbert-base", "wordpiece", "5e-4 with Adam, 4,000 sequences", layers=0.5),
    "deberta": Family("deberta-base", "bytes", "2e-4 with Adam, 2,048 sequences of 512"),
    "deberta-v3": Family("deberta-v3-base", "unigram", "6e-4 with Adam, 8,192 sequences of 512"),
    "modern": Family("modern-base", "bytes", "8e-4 with StableAdamW, 4,608 sequences of 1,024"),
    # Its own kind of vocabulary is "bpe"; here it shares the corpus of the others that keep upper case.
    "gpt": Family("gpt", "bytes", "2.5e-4 with Adam, 64 sequences of 512"),
}


@dataclass(frozen=True)
class Size:
    """The shape of the encoder that all families get, and the length of its sequences."""

    layers: int
    hidden: int
    heads: int
    length: int

    def encoder(self, family: Family, model: EncoderConfig, dropout: float) -> EncoderConfig:
        """A family's encoder in this shape; narrower layers start with larger weights, which keeps the paper's sums.

        Gated layers are as wide as gives them the parameters of plain ones. Ranges of distances stay those of the
        published model, which knows distances that no sequence of this length has.
        """
        shape: dict[str, Any] = {
            "num_layers": max(1, round(self.layers * family.layers)),
            "hidden_size": self.hidden,
            "num_heads": self.heads,
            "intermediate_size": round(8 / 3 * self.hidden / 64) * 64 if model.gated else 4 * self.hidden,
            "max_positions": self.length,
            "init_std": round(0.02 * (768 / self.hidden) ** 0.5, 4) if self.hidden < 768 else 0.02,
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
        }
        if model.embedding_size is not None:
            shape["embedding_size"] = min(model.embedding_size, self.hidden // 2)
        if model.relative_buckets is not None:
            shape["relative_reach"] = model.relative_reach or model.max_positions
        return replace(model, **shape)

    @property
    def words(self) -> str:
        return f"{self.layers} × {self.hidden}, length {self.length}"


SIZES = {"base": Size(12, 768, 12, 128), "large": Size(24, 1024, 16, 512), "smoke": Size(2, 32, 2, 64)}
QUALITY, QUALITY_SMOKE = Size(8, 512, 8, 128), Size(2, 32, 2, 64)
RATE_TIMES_DECAY = 0.002  # of Muon; chosen, not measured beside other values


def speed_config(name: str, size: str) -> PretrainConfig:
    """A family's recipe in the shape of a size, with dropout 0.1."""
    family = FAMILIES[name]
    found = recipe(family.recipe)
    return replace(found, model=SIZES[size].encoder(family, found.model, 0.1))


def quality_config(
    name: str, minutes: float, smoke: bool, changes: list[str], steps: int | None = None
) -> PretrainConfig:
    """A family's recipe in the shape and with the budget that all families get: minutes or, if given, steps.

    The encoder, the objective and the way of making sequences and masks are the family's own. The same for all are the
    shape, the length, 256 sequences a step, the budget, Muon with its settings, and no dropout. AdamW takes longer than
    these minutes to leave the plateau where every prediction is a frequent word. Pre-norm encoders have Muon's rate of
    the recipe `roberta-prenorm`, twice that of the others. Rate times weight decay is the same for all;
    docs/experiments.md says why there is more of it than in the recipes. Muon trains the matrices of the layers,
    DeBERTa's projections of distances among them; tables whose rows are tokens, positions or distances, the mask
    decoder's and the discriminator's own among them, are trained by AdamW.
    """
    family, size = FAMILIES[name], QUALITY_SMOKE if smoke else QUALITY
    found = recipe(family.recipe)
    data = replace(found.data, max_length=size.length, long_length=None, copies=0)
    length: dict[str, Any] = {"steps": 3} if smoke else {"hours": minutes / 60}
    batch_size = 8 if smoke else 256
    rate = 0.02 if found.model.norm_first else 0.01
    train = TrainConfig(
        **(length if steps is None else {"steps": steps}),
        batch_size=batch_size,
        micro_batch_size=batch_size,
        optimizer="muon",
        learning_rate=rate,
        rest_learning_rate=1e-3,
        weight_decay=RATE_TIMES_DECAY / rate,
        warmup=0.1,
        beta2=0.98,
        workers=0 if smoke else 12,
    )
    model = size.encoder(family, found.model, 0.0)
    return override(replace(found, recipe=name, model=model, data=data, train=train), [*family.changes, *changes])

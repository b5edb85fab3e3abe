"""The recipes: functions that return one complete configuration each; an ablation changes another recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bertsmith import config as configs
from bertsmith.errors import UserError, suggestion
from bertsmith.family_recipes import (
    albert,
    albert_tiny,
    deberta_tiny,
    deberta_v3_tiny,
    distilbert,
    distilbert_tiny,
    electra,
    electra_tiny,
    elmo,
    elmo_tiny,
    gpt,
    gpt_tiny,
    half_of_teacher,
    modern,
    modern_tiny,
    roberta,
    roberta_prenorm,
    roberta_tiny,
)
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.model.config import Direction
from bertsmith.model.recurrent import FeatureConfig
from bertsmith.model.sizes import ALBERT_SIZES, SIZES, encoder_config
from bertsmith.objectives.settings import CausalLMConfig, MaskedLMConfig
from bertsmith.pretraining.deberta import V3_OBJECTIVE, deberta, deberta_v3
from bertsmith.pretraining.loader import DataConfig
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.training.settings import TrainConfig


def bert(size: str) -> PretrainConfig:
    """BERT as in its paper: MLM + NSP, batch 256, Adam 1e-4, dropout 0.1, length 128 and 512 for the last tenth."""
    return PretrainConfig(
        recipe=f"bert-{size}",
        model=encoder_config(size),
        data=DataConfig(max_length=128, long_length=512, long_share=0.1),
        train=TrainConfig(steps=1_000_000, batch_size=256, learning_rate=1e-4, warmup=0.01, evaluate_every=0.1),
    )


def no_nsp(size: str) -> PretrainConfig:
    """Table 5, row 2: BERT without the next-sentence loss, on the same pairs."""
    return replace(bert(size), recipe=f"bert-{size}-no-nsp", objective=MaskedLMConfig(next_sentence=False))


def left_to_right(size: str) -> PretrainConfig:
    """Table 5, row 3: the same without NSP, left to right: a token sees those up to itself and predicts the next."""
    return _one_direction(size, "left-to-right")


def right_to_left(size: str) -> PretrainConfig:
    """The mirror image of left-to-right, to be fine-tuned together with it (section 5.1)."""
    return _one_direction(size, "right-to-left")


def _one_direction(size: str, direction: Direction) -> PretrainConfig:
    base = bert(size)
    model = replace(base.model, direction=direction)
    return replace(base, recipe=f"bert-{size}-{direction}", model=model, objective=CausalLMConfig())


def sized(layers: int, hidden: int, heads: int) -> PretrainConfig:
    """Table 6: BERT with other numbers of layers, hidden units and heads."""
    base = bert("base")
    model = replace(base.model, **_shape(layers, hidden, heads))
    return replace(base, recipe=f"bert-{layers}-{hidden}-{heads}", model=model)


def _shape(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """The settings of a shape, with feed-forward layers of four times the width."""
    return {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "intermediate_size": 4 * hidden}


def masked(mask: int, same: int, random: int, size: str = "base") -> PretrainConfig:
    """Table 8: other shares (per cent) of [MASK], the original token and a random token among the chosen tokens."""
    base = bert(size)
    if mask + same + random != 100:
        raise UserError(f"masking shares {mask}, {same} and {random} add up to {mask + same + random}, not to 100")
    policy = replace(base.data.masking, mask_share=mask / 100, random_share=random / 100)
    return replace(base, recipe=f"bert-{size}-mask-{mask}-{same}-{random}", data=replace(base.data, masking=policy))


def speedrun() -> PretrainConfig:
    """An encoder that learns much in minutes: a DeBERTa v3 of 12 × 512 that detects replaced tokens and fills masks.

    For a quarter of an hour on one GPU unless `--hours` says otherwise. Of the tokens, 15 % are replaced, as in v3, and
    5 % are left to be filled. It normalises after each sublayer, and has half of the rate of `roberta-prenorm` and
    twice its decay.
    """
    base, usual = deberta_v3("small"), roberta_prenorm().train
    shape, masking = _shape(12, 512, 8), replace(base.data.masking, rate=0.2)
    return replace(
        base,
        recipe="speedrun",
        model=replace(base.model, **shape, hidden_dropout=0.0, attention_dropout=0.0),
        data=replace(base.data, max_length=128, long_length=512, long_share=0.1, masking=masking),
        train=replace(
            usual, hours=1 / 4, batch_size=256, learning_rate=usual.learning_rate / 2,
            weight_decay=2 * usual.weight_decay, warmup=0.1, evaluate_every=0.1,
        ),
        objective=replace(V3_OBJECTIVE, fill_every=4),
    )  # fmt: skip


def speedrun_small() -> PretrainConfig:
    """`speedrun` in 10 × 256: 24 MB in half precision with a vocabulary of 14,336."""
    base = speedrun()
    return replace(
        base,
        recipe="speedrun-small",
        model=replace(base.model, **_shape(10, 256, 4), init_std=0.035),
        train=replace(base.train, hours=1 / 3, warmup=0.05),
    )


def quickstart() -> PretrainConfig:
    """A tiny encoder to try things with, in about a minute on two CPU cores: `roberta-prenorm` in short.

    With AdamW every prediction would still be a frequent word after these few steps, in which weights cannot grow much.
    """
    base, shape = roberta_prenorm(), bert("tiny").model
    plain = {"family": base.model.family, "norm_first": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    model = replace(shape, **plain, max_positions=128)  # type: ignore[arg-type]
    train = replace(base.train, hours=None, steps=700, batch_size=32, rest_learning_rate=4e-3, weight_decay=0.01)
    train = replace(train, evaluate_every=100)
    return replace(
        base,
        recipe="quickstart",
        model=model,
        data=DataConfig(max_length=64, pairs="full", copies=0),
        train=replace(train, beta2=TrainConfig().beta2, schedule="stable", decay=0.3),
    )


def demo() -> PretrainConfig:
    """A small encoder that learns in minutes on two CPU cores: short sequences, no dropout, a high learning rate."""
    base = bert("tiny")
    return replace(
        base,
        recipe="demo",
        model=replace(base.model, hidden_dropout=0.0, attention_dropout=0.0, max_positions=128),
        data=replace(base.data, max_length=64, long_length=None, copies=0),
        train=TrainConfig(
            steps=2000, batch_size=32, learning_rate=2e-3, warmup=0.05, schedule="stable", decay=0.3, evaluate_every=200
        ),
    )


def feature_based(task: str, variant: str) -> FinetuneConfig:
    """Table 7 of the BERT paper, feature-based: a BiLSTM with random weights on a frozen encoder."""
    train = TrainConfig(epochs=20, batch_size=32, learning_rate=1e-3, warmup=0.05)
    return FinetuneConfig(task, train=train, features=FeatureConfig(variant))


TABLE_6 = ((3, 768, 12), (6, 768, 3), (6, 768, 12), (12, 768, 12), (12, 1024, 16), (24, 1024, 16))
TABLE_8 = ((80, 10, 10), (100, 0, 0), (80, 0, 20), (80, 20, 0), (0, 20, 80), (0, 0, 100))
RECIPES: dict[str, Callable[[], PretrainConfig]] = {
    **{f"bert-{size}": partial(bert, size) for size in SIZES},
    **{f"bert-{size}-no-nsp": partial(no_nsp, size) for size in SIZES},
    **{f"bert-{size}-left-to-right": partial(left_to_right, size) for size in SIZES},
    **{f"bert-{size}-right-to-left": partial(right_to_left, size) for size in SIZES},
    **{f"bert-{layers}-{hidden}-{heads}": partial(sized, layers, hidden, heads) for layers, hidden, heads in TABLE_6},
    **{f"bert-base-mask-{'-'.join(map(str, shares))}": partial(masked, *shares) for shares in TABLE_8[1:]},
    **{f"roberta-{size}": partial(roberta, size) for size in ("base", "large")},
    "roberta-prenorm": roberta_prenorm,
    "roberta-tiny": roberta_tiny,
    **{f"albert-{size}": partial(albert, size) for size in list(ALBERT_SIZES)[1:]},
    "albert-tiny": albert_tiny,
    "distilbert-base": partial(distilbert, "base"),
    "distilbert": half_of_teacher,
    "distilbert-tiny": distilbert_tiny,
    **{f"electra-{size}": partial(electra, size) for size in ("small", "base", "large")},
    "electra-tiny": electra_tiny,
    **{f"deberta-{size}": partial(deberta, size) for size in ("base", "large")},
    "deberta-tiny": deberta_tiny,
    **{f"deberta-v3-{size}": partial(deberta_v3, size) for size in ("small", "base", "large")},
    "deberta-v3-tiny": deberta_v3_tiny,
    "elmo": partial(elmo, "base"),
    "elmo-tiny": elmo_tiny,
    "gpt": partial(gpt, "base"),
    "gpt-tiny": gpt_tiny,
    **{f"modern-{size}": partial(modern, size) for size in ("base", "large")},
    "modern-tiny": modern_tiny,
    "quickstart": quickstart,
    "speedrun": speedrun,
    "speedrun-small": speedrun_small,
    "demo": demo,
}


def recipe(name: str) -> PretrainConfig:
    """A recipe by its name, or the configuration in a JSON file (a run's `config.json`, say)."""
    if name.endswith(".json"):
        return configs.load(PretrainConfig, Path(name))
    if name not in RECIPES:
        near = suggestion(name, RECIPES)
        raise UserError(f"unknown recipe {name!r}{near or ';'} `bertsmith recipes` lists them all")
    return RECIPES[name]()

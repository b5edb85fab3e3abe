"""The variables of the released TensorFlow codes: how a model is described by its names there and in `transformers`.

TensorFlow stores the matrix of a dense layer (`kernel`) with the inputs first: it is transposed in `transformers`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from bertsmith.errors import UserError

Size = str | int  # a setting's name or a number
Shape = tuple[int, ...]
POOLER, MASKED_LM, NEXT_SENTENCE = "pooler", "masked language model head", "next sentence head"
CLASSIFIER, SPAN = "classifier", "span head"
TOKENS = "bert/embeddings/word_embeddings"
# Patterns of names in checkpoints of other models, the most specific first.
OTHERS = {
    r"_CHECKPOINTABLE_OBJECT_GRAPH$": "a TensorFlow 2 object checkpoint, whose variables do not have BERT's names",
    r"(generator|discriminator_predictions)/": "a part of an ELECTRA: electra/embeddings is missing",
    r"bert/.*/bottleneck/": "a MobileBERT checkpoint, which is not supported",
    r"model/transformer/": "an XLNet checkpoint, which is not supported",
}
OPTIMISERS = re.compile(r"(^|/)(adam\w*|lamb|momentum|rmsprop|adagrad|adadelta|ftrl|sgd)(_\w+)?(/|$)", re.I)


@dataclass(frozen=True)
class Variable:
    """A variable of the released code."""

    tf: str
    hf: str
    shape: tuple[Size, ...]  # as `transformers` lays it out
    transposed: bool = False  # the released code keeps it with the inputs first
    factor: str = ""  # a second variable: `transformers` has the product of the two


@dataclass(frozen=True)
class Release:
    """A model whose checkpoints were released: its variables, and its family and settings in `transformers`."""

    name: str
    sign: str  # the pattern of a variable that no earlier release of the table has
    model_type: str
    classes: str  # the first word of its classes in `transformers`
    embeddings: Sequence[Variable]
    layer: Sequence[Variable]
    layers: tuple[str, str]  # the prefix of layer {i} on both sides
    heads: Mapping[str, Sequence[Variable]]
    num_layers: str = "num_hidden_layers"  # the setting with the number of layers that have variables
    embeddings_are: Literal["whole", "projected", "a product"] = "whole"  # what `embedding_size` is the width of
    optional: Mapping[str, Any] = field(default_factory=dict)  # further settings that are kept, and their defaults
    fixed: Mapping[str, Any] = field(default_factory=dict)  # further settings with one supported value
    values: Mapping[str, Any] = field(default_factory=dict)  # of the `config.json`, for every model of the release
    gelu: str = "gelu"  # what `transformers` calls the activation that the released code calls gelu
    checkpoint: str = "bert_model.ckpt"  # the names of the released files
    settings: str = "bert_config.json"

    def parts(self, layers: int) -> dict[str, list[Variable]]:
        """Every variable of a model with a number of layers, by the part of the model."""
        prefixes = [tuple(side.replace("{i}", str(i)) for side in self.layers) for i in range(layers)]
        stacked = [replace(v, tf=tf + v.tf, hf=hf + v.hf) for tf, hf in prefixes for v in self.layer]
        return {"encoder": [*self.embeddings, *stacked], **{name: list(v) for name, v in self.heads.items()}}


def dense(tf: str, hf: str, outputs: Size, inputs: Size = "hidden_size") -> list[Variable]:
    """A linear layer."""
    weight = Variable(f"{tf}/kernel", f"{hf}.weight", (outputs, inputs), transposed=True)
    return [weight, Variable(f"{tf}/bias", f"{hf}.bias", (outputs,))]


def norm(tf: str, hf: str, size: Size = "hidden_size") -> list[Variable]:
    """A layer norm."""
    ends = {"gamma": "weight", "beta": "bias"}
    return [Variable(f"{tf}/{end}", f"{hf}.{ends[end]}", (size,)) for end in ends]


def output(tf: str, hf: str, classes: Size) -> list[Variable]:
    """An output layer: the released code multiplies by its transpose, so it is stored as in `transformers`."""
    weight = Variable(f"{tf}output_weights", f"{hf}.weight", (classes, "hidden_size"))
    return [weight, Variable(f"{tf}output_bias", f"{hf}.bias", (classes,))]


def embeddings(hf: str, size: Size, tf: str = "bert") -> list[Variable]:
    """The three tables and their norm."""
    rows = {"word": "vocab_size", "token_type": "type_vocab_size", "position": "max_position_embeddings"}
    tables = [
        Variable(f"{tf}/embeddings/{name}_embeddings", f"{hf}.embeddings.{name}_embeddings.weight", (count, size))
        for name, count in rows.items()
    ]
    return [*tables, *norm(f"{tf}/embeddings/LayerNorm", f"{hf}.embeddings.LayerNorm", size)]


def layer(tf: Sequence[str], hf: Sequence[str]) -> list[Variable]:
    """A layer: query, key, value and output of attention, their norm, the two linear layers and their norm."""
    hidden, inner = "hidden_size", "intermediate_size"
    sizes: list[tuple[Size, ...]] = [*[(hidden, hidden)] * 4, (hidden,), (inner, hidden), (hidden, inner), (hidden,)]
    made = [
        norm(theirs, ours) if len(size) == 1 else dense(theirs, ours, *size)
        for theirs, ours, size in zip(tf, hf, sizes, strict=True)
    ]
    return [variable for part in made for variable in part]


def heads(pooler: str, words: tuple[str, str, str], pairs: str, size: Size) -> dict[str, list[Variable]]:
    """The heads, given the names in `transformers` of the pooler, of the masked-word head's dense layer, norm and
    bias, and of the pair head; the masked-word head has the width of the embeddings."""
    return {
        POOLER: dense("bert/pooler/dense", pooler, "hidden_size"),
        MASKED_LM: [
            *dense("cls/predictions/transform/dense", words[0], size),
            *norm("cls/predictions/transform/LayerNorm", words[1], size),
            Variable("cls/predictions/output_bias", words[2], ("vocab_size",)),
        ],
        NEXT_SENTENCE: output("cls/seq_relationship/", pairs, 2),
        CLASSIFIER: output("", "classifier", "labels"),  # run_classifier.py
        SPAN: output("cls/squad/", "qa_outputs", 2),  # run_squad.py
    }


def select(
    release: Release, names: Collection[str], side: Literal["tf", "hf"], config: Mapping[str, Any], where: Path
) -> dict[str, list[Variable]]:
    """Return the parts that names of one side make up; an incomplete part is refused."""
    found = {}
    for part, variables in release.parts(min(config[release.num_layers], len(names))).items():
        asked = [getattr(v, side) for v in variables] + [v.factor for v in variables if v.factor and side == "tf"]
        missing = [name for name in asked if name not in names]
        if missing and (part == "encoder" or len(missing) < len(variables)):
            raise UserError(f"{where} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
        if not missing:
            found[part] = variables
    known = {name for variables in found.values() for v in variables for name in (getattr(v, side), v.factor)}
    start = "bert/" if side == "tf" else f"{release.model_type}."
    if strange := sorted(name for name in names if name.startswith(start) and name not in known):
        raise UserError(
            f"{where} has {strange[0]}, which {release.name} with {release.num_layers} = {config[release.num_layers]} "
            f"does not; mend {release.num_layers}, or it is another model"
        )
    return found


def check_shape(variable: Variable, shape: Shape, config: Mapping[str, Any], where: Path) -> None:
    """Refuse a shape, in the layout of `transformers`, that does not fit the settings."""
    asked = tuple(size if isinstance(size, int) else config.get(size) for size in variable.shape)
    if len(shape) != len(asked) or any(want not in (None, have) for have, want in zip(shape, asked, strict=True)):
        sizes = ", ".join(f"{size} = {config.get(str(size), 'any')}" for size in variable.shape)
        reason = ": the settings are those of another model, or the projection of factorised embeddings is missing"
        raise UserError(
            f"{where}: {variable.tf} ({variable.hf}) has shape {shape}, and the settings say {sizes}"
            + (reason if variable.tf == TOKENS else "")
        )


def refuse_others(names: Iterable[str], where: Path) -> None:
    """Refuse the checkpoint of another model, with the reason."""
    names = list(names)
    for pattern, reason in OTHERS.items():
        if found := next((name for name in names if re.match(pattern, name)), None):
            raise UserError(f"{where} has {found}: {reason}")
    if TOKENS not in names:
        scopes = [scope for scope, _ in Counter(name.split("/")[0] for name in names).most_common(4)]
        raise UserError(f"{where} holds no BERT: no {TOKENS}; its variables begin with {', '.join(scopes)}")


def kind_of_extra(name: str, names: Collection[str], shape: Shape) -> str:
    """Return what a variable is that is not a weight of BERT; empty if unknown."""
    if name.endswith("/ExponentialMovingAverage"):
        return "moving averages"
    if name.rpartition("/")[0] in names or OPTIMISERS.search(name):  # an optimiser names its slots under the variable
        return "optimiser slots"
    return "" if shape else "counters"

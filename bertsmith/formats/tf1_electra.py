"""The names of ELECTRA's variables in the released TensorFlow code (google-research/electra), and its settings.

A released folder has no file of settings: the sizes are those of the variables. One checkpoint holds two models, the
discriminator and the generator, which has the discriminator's embeddings unless it has its own.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.formats.tf1_names import Shape, Variable, dense, embeddings, norm
from bertsmith.formats.tf1_releases import BERT_LAYER
from bertsmith.formats.tf1_settings import ACTIVATIONS, DEFAULTS, SIZES

DISCRIMINATOR, GENERATOR = "electra", "generator"  # scopes of the two encoders
HEAD_SIZE = 64  # of an attention head, in every size of the released code
HEADS_NOTE = f"there is no file of settings: an attention head has {HEAD_SIZE} dimensions, as in the released code"
DETECTOR = [
    *dense("discriminator_predictions/dense", "discriminator_predictions.dense", "hidden_size"),
    *dense("discriminator_predictions/dense_1", "discriminator_predictions.dense_prediction", 1),
]
WORDS = [
    *dense("generator_predictions/dense", "generator_predictions.dense", "embedding_size"),
    *norm("generator_predictions/LayerNorm", "generator_predictions.LayerNorm", "embedding_size"),
    Variable("generator_predictions/output_bias", "generator_lm_head.bias", ("vocab_size",)),
]


@dataclass(frozen=True)
class Part:
    """A model of a checkpoint: the values of its `config.json`, and its variables."""

    settings: dict[str, Any]
    variables: list[Variable]


def is_electra(names: Collection[str]) -> bool:
    """Whether these are the variables of an ELECTRA."""
    return f"{DISCRIMINATOR}/embeddings/word_embeddings" in names


def electra_parts(shapes: Mapping[str, Shape], given: Mapping[str, Any], where: Path) -> dict[str, Part]:
    """Return the models of a checkpoint by the folder that each is written to: the discriminator's is the first.

    `given` are the settings of a file beside the checkpoint, which has no need of one.
    """
    has_generator = f"{GENERATOR}/encoder/layer_0/attention/self/query/kernel" in shapes
    head, architecture = (DETECTOR, "ElectraForPreTraining")
    if DETECTOR[0].tf not in shapes:  # a model that was trained on masked words alone, or a fine-tuned one
        words = not has_generator and WORDS[0].tf in shapes
        head, architecture = (WORDS, "ElectraForMaskedLM") if words else ([], "ElectraModel")
    found = {"": _part(DISCRIMINATOR, head, architecture, shapes, given, where)}
    if has_generator and WORDS[0].tf in shapes:
        taken = {name: given[name] for name in DEFAULTS if name in given}
        found[GENERATOR] = _part(GENERATOR, WORDS, "ElectraForMaskedLM", shapes, taken, where)
    return found


def _part(
    scope: str,
    head: list[Variable],
    architecture: str,
    shapes: Mapping[str, Shape],
    given: Mapping[str, Any],
    where: Path,
) -> Part:
    """Return the model of a scope."""
    tables = scope if f"{scope}/embeddings/word_embeddings" in shapes else DISCRIMINATOR
    numbers = [int(found[1]) for name in shapes if (found := re.match(rf"{scope}/encoder/layer_(\d+)/", name))]
    layers = 1 + max(numbers, default=0)
    variables = [*embeddings("electra", "embedding_size", tables), *_layers(scope, layers), *head]
    if f"{scope}/embeddings_project/kernel" in shapes:
        project = dense(f"{scope}/embeddings_project", "electra.embeddings_project", "hidden_size", "embedding_size")
        variables += project
    if missing := [variable.tf for variable in variables if variable.tf not in shapes]:
        raise UserError(f"{where} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
    settings = {"model_type": "electra", "architectures": [architecture], "num_hidden_layers": layers}
    return Part({**settings, **_settings(variables, shapes, settings, given, where)}, variables)


def _settings(
    variables: list[Variable],
    shapes: Mapping[str, Shape],
    known: Mapping[str, Any],
    given: Mapping[str, Any],
    where: Path,
) -> dict[str, Any]:
    """Return the sizes that the variables have, and the other settings; a size that is given has to agree with them."""
    sizes: dict[str, Any] = {}
    for variable in variables:
        shape = shapes[variable.tf][::-1] if variable.transposed else shapes[variable.tf]
        if len(shape) == len(variable.shape):
            sizes = {**{str(name): size for name, size in zip(variable.shape, shape, strict=True)}, **sizes}
    sizes = {name: size for name, size in sizes.items() if not name.isdigit()}
    heads = given.get("num_attention_heads", max(1, sizes["hidden_size"] // HEAD_SIZE))
    sizes |= {"num_attention_heads": heads, "num_hidden_layers": known["num_hidden_layers"]}
    for name in {*SIZES, "embedding_size"} & given.keys():
        if given[name] != sizes[name]:
            raise UserError(f"{where} has {name} = {sizes[name]}, and the settings beside it say {given[name]!r}")
    settings = sizes | {name: given.get(name, value) for name, value in DEFAULTS.items()}
    if settings["hidden_act"] not in ACTIVATIONS:
        raise UserError(f"{where}: hidden_act {settings['hidden_act']!r} is not one of {', '.join(ACTIVATIONS)}")
    return settings


def _layers(scope: str, layers: int) -> list[Variable]:
    prefixes = [(f"{scope}/encoder/layer_{i}/", f"electra.encoder.layer.{i}.") for i in range(layers)]
    return [replace(v, tf=tf + v.tf, hf=hf + v.hf) for tf, hf in prefixes for v in BERT_LAYER]

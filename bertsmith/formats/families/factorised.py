"""BERTs with factorised embeddings: folders whose names `transformers` has no class for, read as BERT or ALBERT.

Two models are in use. In one, a projection follows the normalised sum of all embeddings: ALBERT with a group for each
layer computes the same. In the other (albert_zh and albert_pytorch) the token embeddings alone are a product of two
tables, also in the masked-word head, and layers share their parameters: BERT with the product as its table does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bertsmith.errors import UserError
from bertsmith.formats.families.albert import ALBERT
from bertsmith.formats.families.bert import BERT
from bertsmith.formats.storage import expand

PROJECTIONS = ("bert.embeddings_project", "bert.encoder.embedding_hidden_mapping_in")
FACTORS = "bert.embeddings.word_embeddings.weight", "bert.embeddings.word_embeddings_2.weight"
TIED = ("cls.predictions.project_layer.weight", "cls.predictions.decoder.weight")  # some files hold untrained ones
SHARED = re.compile(r"bert\.encoder\.layer_shared\.(attention|intermediate|output)\.(?:(\d+)\.)?(.*)")
SHARE_TYPES = {"all": "all", "attention": "attention", "ffn": "feed-forward", "none": "none"}
OF_PRODUCT = ("embedding_size", "ln_type", "share_type")


def values_today(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return a `config.json` as that of BERT or ALBERT, if it is that of a BERT with factorised embeddings."""
    if values.get("model_type") is None and ALBERT.layer_groups in values:
        return {**values, "model_type": ALBERT.model_type}
    classes = values.get("architectures") or [BERT.encoder_class]
    of_bert = values.get("model_type", BERT.model_type) == BERT.model_type and str(classes[0]).startswith("Bert")
    if not of_bert or "embedding_size" not in values:
        return dict(values)
    if {"ln_type", "share_type"} & values.keys():
        return _values_of_product(values, where)
    if values["embedding_size"] == values.get("hidden_size"):
        return {name: value for name, value in values.items() if name != "embedding_size"}
    layers = values.get("num_hidden_layers", BERT.default("num_layers"))
    renamed = [str(name).replace("Bert", "Albert", 1) for name in values.get("architectures") or []]
    named = {"architectures": renamed} if renamed else {}
    return {**values, **named, "model_type": ALBERT.model_type, ALBERT.layer_groups: layers}


def _values_of_product(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    norm, sharing = values.get("ln_type", "postln"), values.get("share_type", "all")
    if norm != "postln":
        raise UserError(f"{where}: ln_type = {norm!r} is not supported; only 'postln' is")
    if sharing not in SHARE_TYPES:
        raise UserError(f"{where}: share_type {sharing!r} is not one of {', '.join(SHARE_TYPES)}")
    rest = {name: value for name, value in values.items() if name not in OF_PRODUCT}
    return {**rest, "model_type": BERT.model_type, "shared_layers": SHARE_TYPES[sharing]}


def weights_today(weights: Mapping[str, Tensor], model_type: str, layers: int) -> dict[str, Tensor]:
    """Return the tensors of a folder by the names of the family that it is read as."""
    alone = FACTORS[0].removeprefix(BERT.prefix) in weights  # a file of the encoder alone has no prefix
    full = {f"{BERT.prefix}{name}": value for name, value in weights.items()} if alone else dict(weights)
    if model_type == BERT.model_type and FACTORS[1] in full:
        return _multiplied(full, layers)
    if model_type == ALBERT.model_type and any(name.startswith("bert.encoder.layer.") for name in full):
        names = _albert_names(layers)
        return {names.get(name, name): value for name, value in full.items()}
    return dict(weights)


def _multiplied(weights: Mapping[str, Tensor], layers: int) -> dict[str, Tensor]:
    """The product of the two tables, and the shared sublayers under the names of all layers."""
    tokens, projection = (weights[name] for name in FACTORS)  # (V, E), (H, E)
    if tokens.dim() != 2 or projection.dim() != 2 or tokens.shape[1] != projection.shape[1]:
        shapes = f"{tuple(tokens.shape)} and {tuple(projection.shape)}"
        raise UserError(f"{FACTORS[0]} and {FACTORS[1]} cannot be multiplied: their shapes are {shapes}")
    found = {FACTORS[0]: tokens.float() @ projection.float().T}
    for name, value in weights.items():
        if match := SHARED.fullmatch(name):
            for layer in [int(match[2])] if match[2] else range(layers):
                found[f"bert.encoder.layer.{layer}.{match[1]}.{match[3]}"] = value
        elif name not in (*FACTORS, *TIED):
            found[name] = value
    return found


def _albert_names(layers: int) -> dict[str, str]:
    """The names of ALBERT for those of BERT, in every head, and for those of a projection."""
    names: dict[str, str] = {}
    outputs = ALBERT.outputs
    tables = [(BERT.outputs[kind].names, outputs[kind].names) for kind in outputs]
    for before, after in [(BERT.encoder, ALBERT.encoder), *tables]:
        albert = dict(expand(after, range(layers)))
        for ours, stored in expand(before, range(layers)):
            found = albert[ours]
            names |= dict(zip((*stored.names, *stored.tied), (*found.names, *found.tied), strict=True))
    for name in PROJECTIONS:
        names |= {f"{name}.{end}": f"albert.encoder.embedding_hidden_mapping_in.{end}" for end in ("weight", "bias")}
    return names

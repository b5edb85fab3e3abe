"""`bert_config.json` of the released TensorFlow codes, and `config.json` of `transformers`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError, suggestion
from bertsmith.formats.tf1_names import CLASSIFIER, MASKED_LM, NEXT_SENTENCE, SPAN, Release

# bert_config.json: sizes and their values in `transformers` where a config.json leaves them out, the other settings,
# and what some have added that changes nothing.
SIZES = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
DEFAULTS = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,  # the released code has no such setting: always this
}
LABELS = ["architectures", "id2label", "label2id", "problem_type", "num_choices"]
CLASSIFIERS = ["ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice"]
HARMLESS = [
    *["do_lower_case", "pad_token_id", "embedding_size", "model_type", "directionality", "pooler_fc_size"],
    *["net_structure_type", "gap_size", "num_memory_blocks", "down_scale_factor", "layers_to_keep"],
    *["pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"],
]
ACTIVATIONS = ["gelu", "relu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish"]


def settings_in(values: Mapping[str, Any], release: Release, where: Path) -> dict[str, Any]:
    """Return `bert_config.json` as the values of a `config.json`; unknown settings are refused by name."""
    known = [*SIZES, *DEFAULTS, *LABELS, *HARMLESS, *release.optional, *release.fixed]
    sizes = [*SIZES, "embedding_size"] if release.embeddings_are == "projected" else [*SIZES]
    for key in sizes:
        if key not in values:
            raise UserError(f"{where}: missing key {key!r}")
        if type(values[key]) is not int or values[key] < 1:
            raise UserError(f"{where}: {key} must be a whole number of at least 1, not {values[key]!r}")
    whole = release.embeddings_are == "whole"
    if whole and values.get("embedding_size", values["hidden_size"]) != values["hidden_size"]:
        raise UserError(f"{where}: embedding_size {values['embedding_size']}: the checkpoint has no projection from it")
    for key in values:
        if key not in known:
            fix = suggestion(key, known) or "; remove it if it does not change what the model computes"
            raise UserError(f"{where}: unknown key {key!r}{fix}")
    for key, value in release.fixed.items():
        if values.get(key, value) != value:
            raise UserError(f"{where}: {key} = {values[key]!r} is not supported; only {value!r} is")
    if values.get("model_type", "bert") not in ("bert", release.model_type):
        raise UserError(f"{where}: model_type {values['model_type']!r}, and the checkpoint is one of {release.name}")
    config = {"model_type": release.model_type, **{key: values[key] for key in sizes}}
    config |= {key: values.get(key, value) for key, value in {**DEFAULTS, **release.optional}.items()}
    if config["hidden_act"] not in ACTIVATIONS:
        raise UserError(f"{where}: hidden_act {config['hidden_act']!r} is not one of {', '.join(ACTIVATIONS)}")
    if config["hidden_act"] == "gelu":
        config["hidden_act"] = release.gelu
    return {**config, **_implied(release, config)}


def _implied(release: Release, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the release alone has; a name as a value stands for the setting of that name."""
    return {key: config.get(str(value), value) for key, value in release.values.items()}


def settings_out(config: Mapping[str, Any], release: Release) -> tuple[dict[str, Any], list[str]]:
    """Return a `config.json` as `bert_config.json`, and notes on settings that the released code does not support."""
    optional = {**DEFAULTS, **release.optional}
    sizes = [*SIZES, "embedding_size"] if release.embeddings_are == "projected" else [*SIZES]
    values = {key: config.get(key, value) for key, value in optional.items()} | {key: config[key] for key in sizes}
    notes = []
    if values["layer_norm_eps"] == DEFAULTS["layer_norm_eps"]:
        del values["layer_norm_eps"]
    else:
        notes.append(f"layer_norm_eps is {values['layer_norm_eps']}; the released code always takes 1e-12")
    if values["hidden_act"] == release.gelu:
        values["hidden_act"] = "gelu"
    elif values["hidden_act"] != "relu":
        notes.append(f"hidden_act is {values['hidden_act']!r}, which the released code does not know")
    if config.get("pad_token_id"):
        notes.append(f"pad_token_id is {config['pad_token_id']}; the released code always pads with 0")
    if (name := (config.get("architectures") or [""])[0]) in [f"{release.classes}{end}" for end in CLASSIFIERS[1:]]:
        notes.append(f"the released code has no {name}: its output layer goes by output_weights, as a classifier's")
    return dict(sorted(values.items())), notes


def head_settings(
    found: Collection[str], values: Mapping[str, Any], labels: int, classes: str, where: Path
) -> dict[str, Any]:
    """Return the class of `transformers` for a checkpoint, and its labels; the format has no names for labels.

    `classes` is the first word of its classes.
    """
    if SPAN in found:
        return {"architectures": [f"{classes}ForQuestionAnswering"]}
    if CLASSIFIER in found:
        named = {key: values[key] for key in LABELS if values.get(key)}
        if named.get("architectures") not in [[f"{classes}{end}"] for end in CLASSIFIERS]:
            named["architectures"] = [f"{classes}{CLASSIFIERS[0]}"]
        if named["architectures"] == [f"{classes}ForMultipleChoice"]:
            return named
        numbers = [str(i) for i in range(labels)]
        names = named.get("id2label", {number: f"LABEL_{number}" for number in numbers})
        if not isinstance(names, dict) or set(names) != set(numbers):
            raise UserError(f"{where}: id2label is to name the labels 0 to {labels - 1} of output_weights, not {names}")
        named["id2label"] = {number: str(names[number]) for number in numbers}
        return {**named, "label2id": {name: int(number) for number, name in named["id2label"].items()}}
    if MASKED_LM in found:
        return {"architectures": [f"{classes}For{'PreTraining' if NEXT_SENTENCE in found else 'MaskedLM'}"]}
    return {"architectures": [f"{classes}Model"]}

"""`config.json` of a model folder: the fields of `transformers` to our configurations and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

from bertsmith.config import from_dict, read_json
from bertsmith.errors import UserError, suggestion
from bertsmith.formats.families.factorised import values_today
from bertsmith.formats.families.table import (
    FAMILIES,
    FEATURE_CLASSES,
    OWN_CLASS,
    family_named,
    family_of,
    output_named,
)
from bertsmith.formats.family import CLASSIFIER_DROPOUT, Family, HeadDropout, Output
from bertsmith.model.config import EncoderConfig, HeadKind, TagUnit
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.recurrent import FeatureConfig
from bertsmith.objectives.objective import Objective

Model = Objective | TaskModel
CONFIG = "config.json"
OF_A_MODEL = {"model_type", "architectures", "vocab_size", "hidden_size"}  # fields that describe a model
LARGEST_COUNT = 1_000_000  # labels or layers of a head
PROBLEM_TYPES: dict[str, HeadKind] = {
    "single_label_classification": "single",
    "multi_label_classification": "multi",
    "regression": "regression",
}
NO_CLASS = "transformers has no class for this model: "
REMARKS = {
    "features": NO_CLASS + "a BiLSTM reads the states of an encoder that was not trained",
    "bilstm": NO_CLASS + "a BiLSTM stands between the encoder and its output layer",
    "two-encoders": NO_CLASS + "two encoders read in opposite directions, and their states stand side by side",
    "right-to-left": NO_CLASS + "the encoder reads from right to left",
    "elmo": NO_CLASS + "ELMo reads the characters of words by LSTMs",
    "tokens": NO_CLASS + "its family has none with an output layer of this kind",
    "last token": "the head differs in transformers: its class pools the first token, which sees itself alone when the "
    "encoder reads left to right; here the last token is pooled. The encoder's states are the same",
    "both orders": "every pair is read in both orders; in transformers, add the logits of (a, b) and of (b, a)",
}


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json` of a model folder."""
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no model: {CONFIG} is missing; give a model folder, a run or a hub name")
    values = read_json(folder / CONFIG)
    inside = [] if OF_A_MODEL & values.keys() else list(_described_inside(values))
    return values_today(inside[0] if len(inside) == 1 else values, folder / CONFIG)


def _described_inside(values: Mapping[str, Any], depth: int = 4) -> Iterator[dict[str, Any]]:
    """Yield the encoders that the configuration of a larger program describes, each as `transformers` would."""
    for value in values.values():
        if isinstance(value, dict) and value.get("model_type") in FAMILIES:
            yield value
        elif isinstance(value, dict) and depth:
            yield from _described_inside(value, depth - 1)


def config_in(values: Mapping[str, Any], folder: Path) -> EncoderConfig:
    """Return their configuration as ours; a field that we do not support is refused by name."""
    where = folder / CONFIG
    family = family_named(values, where)
    if family.older is not None:
        values = family.older(values, where)
    for key, value in family.fixed.items():
        if values.get(key, value) != value:
            raise UserError(f"{where}: {key} = {values[key]!r} is not supported; only {value!r} is")
    for key in values:
        if key not in family.config_keys:
            fix = suggestion(key, family.config_keys) or "; remove it if it does not change what the model computes"
            raise UserError(f"{where}: unknown key {key!r}{fix}")
    named = {name: field.read(values, where) for name, field in family.fields.items()}
    named |= {name: values[name] for name in family.own_fields if values.get(name) is not None}
    given = {name: value for name, value in named.items() if value is not None or family.fields[name].is_null(values)}
    if family.layer_groups:
        given["shared_layers"] = _sharing_in(family, given, values.get(family.layer_groups), where)
    given = {**family.defaults, **given, "family": family.model_type}
    _check_flags(family, given, values, where)
    given |= family.derived({**vars(EncoderConfig()), **given})
    given |= dict.fromkeys(family.equal_to_another(given))
    config = from_dict(EncoderConfig, given, str(where))
    if config.head_transform and family.head_activation not in (None, config.activation):
        config = replace(config, head_activation=family.head_activation)
    for key, ours in family.equals.items():
        if values.get(key, expected := getattr(config, ours)) != expected:
            raise UserError(f"{where}: {key} = {values[key]!r} is not supported; only {expected} is, as {ours}")
    return replace(config, max_positions=config.max_positions - family.unused_rows(config.pad_token_id))


def _check_flags(family: Family, given: Mapping[str, Any], values: Mapping[str, Any], where: Path) -> None:
    """Refuse a flag of theirs that contradicts the setting which it switches on."""
    for key, (name, off) in family.flags.items():
        is_on = given.get(name, family.default(name)) != off
        if bool(values.get(key)) != is_on:
            (field,) = family.fields[name].names
            raise UserError(
                f"{where}: {key} = {values.get(key)!r} contradicts {field} = {values.get(field)!r}; set {key} to "
                f"{str(is_on).lower()}, or change {field}"
            )


def _sharing_in(family: Family, given: Mapping[str, Any], groups: int | None, where: Path) -> str:
    """Which parameters the layers share, given the number of layers that have their own."""
    layers, said = given.get("num_layers", family.default("num_layers")), given.get("shared_layers")
    if groups in (None, 1) and said in (None, "all"):
        return "all"
    if groups == layers and said != "all":
        return said or "none"
    given_too = f" with shared_layers {said}" if said else ""
    raise UserError(
        f"{where}: {family.layer_groups} {groups!r}{given_too} is not supported; 1 is, where all layers share their "
        f"parameters, and {layers}, where each has its own"
    )


def config_out(model: Model) -> dict[str, Any]:
    """Return our configuration as theirs, with the names of the labels."""
    config = model.encoder.config
    family = family_of(config)
    values: dict[str, Any] = {"architectures": [architecture_of(model)], "model_type": family.model_type}
    if own := own_type(model):
        values["model_type"] = f"bertsmith-{own}-{family.model_type}"
    full = replace(config, max_positions=config.max_positions + family.unused_rows(config.pad_token_id))
    for name, field in family.fields.items():
        if name not in family.own_fields:
            value = getattr(full, name)
            values |= field.write(getattr(full, field.none_as) if value is None and field.none_as else value)
    for name in family.own_fields:
        theirs, value = family.fields.get(name), getattr(config, name)
        if value != family.default(name):
            values |= theirs.write(value) if theirs is not None and theirs.accepts(value) else {name: value}
    values |= {key: getattr(config, name) != off for key, (name, off) in family.flags.items()}
    values |= family.written
    if family.layer_groups:
        values[family.layer_groups] = config.stored_layers
    if pools_last(model):
        values["pooled"] = "last"
    return {**values, **head_out(model.head_config, config)} if isinstance(model, TaskModel) else values


def head_out(head: HeadConfig, config: EncoderConfig) -> dict[str, Any]:
    """Return the fields of their configuration that describe a head on an encoder."""
    values: dict[str, Any] = {}
    if head.labels:
        values["id2label"] = {str(i): name for i, name in enumerate(head.labels)}
        values["label2id"] = {name: i for i, name in enumerate(head.labels)}
    kinds = {kind: name for name, kind in PROBLEM_TYPES.items()}
    if head.kind in kinds:
        values["problem_type"] = kinds[head.kind]
    if head.kind == "regression":
        values["id2label"], values["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
    if head.kind == "choice":
        values["num_choices"] = head.num_choices
    setting = _dropout_of(family_of(config), head.kind)
    if setting.name and (head.dropout is not None or setting.default is not None):  # else theirs is ours
        values[setting.name] = head.rate(config)
    if head.features is not None:
        values["features"] = {name: value for name, value in asdict(head.features).items() if value is not None}
    if head.bilstm_layers:
        values["bilstm_layers"] = head.bilstm_layers
    own = {"beside": head.beside, "language_model": head.language_model, "both_orders": head.both_orders}
    if head.unit != "word":
        values["tag_unit"] = head.unit
    return {**values, **{name: value for name, value in own.items() if value}}


def head_in(values: Mapping[str, Any], folder: Path) -> HeadConfig | None:
    """Return the head that a saved configuration describes; None if it describes none."""
    saved, family = architecture(values), family_named(values, folder / CONFIG)
    kinds = {family.outputs[kind].class_name: kind for kind in get_args(HeadKind) if kind in family.outputs}
    on_features = {name: kind for kind, name in FEATURE_CLASSES.items()}
    if saved not in kinds and saved not in on_features:
        return None
    kind: HeadKind = kinds.get(saved) or on_features[saved]  # type: ignore[assignment]
    labels = _labels(values, folder / CONFIG)
    if kind == "single":
        problem = str(values.get("problem_type"))
        kind = PROBLEM_TYPES[problem] if problem in PROBLEM_TYPES else "regression" if len(labels) == 1 else "single"
    if kind not in ("tags", "span") and saved in kinds and values.get("pooled") != "last":
        _refuse_first_token(saved, family, values, folder / CONFIG)
    needs_labels = kind in ("single", "multi", "tags")
    choices = _whole(values, "num_choices", 0, folder / CONFIG)
    features = None
    if saved in on_features:
        features = from_dict(FeatureConfig, values.get("features", {}), f"{folder / CONFIG}: features")
    own = {
        "features": features,
        "bilstm_layers": _whole(values, "bilstm_layers", 0, folder / CONFIG),
        "beside": bool(values.get("beside")),
        "language_model": _weight(values, folder / CONFIG),
        "both_orders": bool(values.get("both_orders")),
        "unit": _tag_unit(values, folder / CONFIG),
    }
    dropout = dropout_in(values, kind, folder)
    return HeadConfig(kind, labels if needs_labels else (), choices, dropout, **own)  # type: ignore[arg-type]


def _refuse_first_token(saved: str, family: Family, values: Mapping[str, Any], where: Path) -> None:
    """Refuse a head on the first token of an encoder that reads left to right."""
    field = family.fields.get("direction")
    if field is not None and field.read(values, where) == "left-to-right":
        raise UserError(
            f"{where}: {saved} with {field.names[0]} = True pools the first token, which sees itself alone; that is "
            "not supported: a left-to-right encoder is classified from its last token"
        )


def _labels(values: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    """Return the names of the labels in the order of their ids."""
    names = values.get("id2label")
    if not names:
        return tuple(f"LABEL_{i}" for i in range(_whole(values, "num_labels", 2, where)))
    if not isinstance(names, dict) or not all(re.fullmatch(r"\d{1,9}", str(number)) for number in names):
        raise UserError(f"{where}: id2label is not an object of names by number: {str(names)[:80]}")
    return tuple(str(names[number]) for number in sorted(names, key=int))


def _tag_unit(values: Mapping[str, Any], where: Path) -> str:
    """Return what a tagger tags: words of either kind, or every token."""
    unit = values.get("tag_unit") or "word"
    if unit not in get_args(TagUnit):
        raise UserError(f"{where}: tag_unit must be one of {', '.join(get_args(TagUnit))}, not {unit!r}")
    return str(unit)


def _whole(values: Mapping[str, Any], name: str, default: int, where: Path) -> int:
    """Return a count; more than a million is refused, since each one would take memory."""
    value = default if values.get(name) is None else values[name]
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise UserError(f"{where}: {name} must be a whole number between 0 and {LARGEST_COUNT:,}, not {value!r}")
    return value


def _weight(values: Mapping[str, Any], where: Path) -> float:
    """Return the weight of the language model's loss."""
    value = values.get("language_model") or 0.0
    if type(value) not in (int, float) or not 0 <= value <= LARGEST_COUNT:
        raise UserError(f"{where}: language_model must be a number between 0 and {LARGEST_COUNT:,}, not {value!r}")
    return float(value)


def dropout_in(values: Mapping[str, Any], kind: HeadKind, folder: Path) -> float | None:
    """Return the dropout before the output layer; None if it is the usual one, the encoder's or none for spans."""
    family = family_named(values, folder / CONFIG)
    setting = _dropout_of(family, kind)
    dropout = values.get(setting.name, setting.default)
    if dropout is not None and not (isinstance(dropout, (int, float)) and 0 <= dropout < 1):
        raise UserError(f"{folder / CONFIG}: {setting.name} must be at least 0 and under 1, not {dropout!r}")
    if setting.default is None:
        return dropout
    states = family.fields["hidden_dropout"].read(values, folder / CONFIG)
    return None if dropout == (0.0 if kind == "span" else states) else dropout


def _dropout_of(family: Family, kind: HeadKind) -> HeadDropout:
    """Return the family's setting for the dropout of a head; a head of our own has that of a classifier."""
    output = family.outputs.get("single" if kind in PROBLEM_TYPES.values() else kind)
    return output.dropout if output else CLASSIFIER_DROPOUT


def architecture(values: Mapping[str, Any]) -> str:
    """Return the class that a saved configuration names, without the prefix of our own classes."""
    name = str((values.get("architectures") or [""])[0])
    return name if name in FEATURE_CLASSES.values() else name.removeprefix(OWN_CLASS)


def architecture_of(model: Model) -> str:
    """Return the class of `transformers` that opens a saved model, or our own where it has none."""
    prefix = OWN_CLASS if own_type(model) or family_of(model.encoder.config).is_own else ""
    if isinstance(model, TaskModel) and model.head_config.features is not None:
        return FEATURE_CLASSES[_kind_of_class(model)]
    return prefix + output_of(model).class_name


def output_of(model: Model) -> Output:
    """What the model's family calls its objective or its head."""
    if isinstance(model, Objective):
        kind = model.saved(model.encoder.config, model.config)[0][1]
    else:
        kind = _kind_of_class(model)
    return output_named(family_of(model.encoder.config), kind)


def _kind_of_class(model: TaskModel) -> str:
    """The kind of a head that its class is listed by: one class serves labels and numbers."""
    return "single" if model.head_config.kind in PROBLEM_TYPES.values() else model.head_config.kind


def own_type(model: Model) -> str:
    """Return the kind of a model that `transformers` has no class for; empty if it has one."""
    if isinstance(model, TaskModel) and model.head_config.is_own:
        head = model.head_config
        return "features" if head.features is not None else "two-encoders" if head.beside else "bilstm"
    if isinstance(model, TaskModel) and output_of(model).own:
        return "tokens"
    return "right-to-left" if model.encoder.config.direction == "right-to-left" else ""


def pools_last(model: Model) -> bool:
    """Whether a head pools the last token, while their class pools the first."""
    config = model.encoder.config
    if not isinstance(model, TaskModel) or model.head_config.features is not None:
        return False
    sequence = model.head_config.kind not in ("tags", "span")
    only_left = family_of(config).default("direction") == "left-to-right"  # then their class pools the last as well
    return sequence and config.direction == "left-to-right" and not only_left


def remark_on(model: Model) -> str:
    """What a reader of the folder has to know of how `transformers` opens it; empty if it computes the same."""
    family = family_of(model.encoder.config)
    if own := own_type(model) or (family.model_type if family.is_own else ""):
        return REMARKS.get(own, "")
    if pools_last(model):
        return REMARKS["last token"]
    return REMARKS["both orders"] if isinstance(model, TaskModel) and model.head_config.both_orders else ""

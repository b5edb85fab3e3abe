"""The saved format: what Hugging Face `transformers` opens as it is. Its names stand in `families.py`.

A folder holds `config.json`, `model.safetensors` and the tokenizer's files; `bertsmith.json` beside them says what
`transformers` has no field for (the task, its columns).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.config import from_dict, read_json
from bertsmith.errors import UserError, suggestion
from bertsmith.formats.families import (
    ACTIVATIONS,
    ACTIVATIONS_IN,
    FEATURE_TAGGER,
    KEPT,
    OWN_CLASS,
    OWN_FIELDS,
    Family,
    Names,
    expand,
    family_named,
    family_of,
)
from bertsmith.formats.weights import WEIGHTS, read_weights
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder, init_parameter
from bertsmith.model.heads import HeadConfig, HeadKind, TaskModel
from bertsmith.model.recurrent import FeatureConfig
from bertsmith.objectives.causal_lm import CausalLM
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.text.tokenizer import Tokenizer

Model = MaskedLM | CausalLM | TaskModel
CONFIG, NOTES = "config.json", "bertsmith.json"
POSITIONS = "encoder.embeddings.positions.weight"
HEAD_NAMES = ("head.output.", "head.lstm.", "head.mix", "head.top.")  # of an output layer
OWN_NAMES = ("head.", "beside.")  # of what `transformers` has no class for
POOLERS = ("next_sentence.pooler.dense.*", "head.pooler.dense.*")
NO_CLASS = "transformers has no class for this model: "
REMARKS = {
    "features": NO_CLASS + "a BiLSTM reads the states of an encoder that was not trained",
    "bilstm": NO_CLASS + "a BiLSTM stands between the encoder and its output layer",
    "two-encoders": NO_CLASS + "two encoders read in opposite directions, and their states stand side by side",
    "right-to-left": NO_CLASS + "the encoder reads from right to left",
    "last token": "the head differs in transformers: its class pools the first token, which sees itself alone when the "
    "encoder reads left to right; here the last token is pooled. The encoder's states are the same",
}
PROBLEM_TYPES: dict[str, HeadKind] = {
    "single_label_classification": "single",
    "multi_label_classification": "multi",
    "regression": "regression",
}


@dataclass(frozen=True)
class Notes:
    """What `bertsmith.json` adds to a folder: how the model's data was read, encoded (`limits`) and decoded.

    `kept` are the fields of `config.json` that change nothing for us; they are written back into it. `remark` is for
    people who open the folder.
    """

    task: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    max_length: int | None = None
    recipe: str = ""
    limits: dict[str, float] = field(default_factory=dict)
    kept: dict[str, object] = field(default_factory=dict)
    remark: str = ""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model folder in memory."""

    folder: Path
    model: Model
    tokenizer: Tokenizer
    notes: Notes
    missing: tuple[str, ...] = ()  # our parameters that the folder had no weights for; they are random


def save_folder(
    folder: Path, model: Model, tokenizer: Tokenizer, notes: Notes, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model folder; `tensors` is the state to write where it is not the model's own (gathered elsewhere)."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights_out(model, model.state_dict() if tensors is None else tensors)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / CONFIG, {**notes.kept, **config_out(model)})
    differs = own_type(model) or ("last token" if pools_last(model) else "")
    notes = replace(notes, remark=REMARKS.get(differs, ""))
    _write_json(folder / NOTES, {name: value for name, value in asdict(notes).items() if name != "kept"})
    tokenizer.save(folder, model.encoder.config.max_positions)


def load_folder(
    folder: str | Path,
    head: HeadConfig | None = None,
    *,
    next_sentence: bool | None = None,
    dropout: float | None = None,
) -> Loaded:
    """Open a model folder as what it was saved as, or with another head on its encoder.

    `head` puts a new output layer on the encoder; `next_sentence` opens the folder for pre-training; `dropout` is taken
    instead of what the folder says.
    """
    folder = Path(folder)
    values = read_config(folder)
    config, saved = config_in(values, folder), head_in(values, folder)
    if dropout is not None:
        config = replace(config, hidden_dropout=dropout, attention_dropout=dropout)
    weights = _read_weights(folder, family_of(config))
    names = dict(expand(_saved_names(family_of(config), values), range(config.num_layers)))
    if saved is not None and saved.is_own and (head is None or saved.own_form == head.own_form):
        names |= {name: (name,) for name in weights if name.startswith(OWN_NAMES)}
    if head is None:
        head = saved
    elif saved is None or not saved.same_classes(head):  # its output layer starts anew
        names = {ours: theirs for ours, theirs in names.items() if not ours.startswith(HEAD_NAMES)}
    has_pair_head = all(name in weights for name in names["next_sentence.output.weight"])
    with torch.device("meta"):  # no memory and no random numbers: the weights come from the folder
        encoder = Encoder(config)
        model: Model
        if head is not None and next_sentence is None:
            if head.dropout is None and dropout is None:
                head = replace(head, dropout=dropout_in(values, folder))
            model = TaskModel(encoder, head)
        elif config.direction != "both":
            model = CausalLM(encoder)
        else:
            model = MaskedLM(encoder, has_pair_head if next_sentence is None else next_sentence)
    missing = _fill(model, weights, names, folder)
    return Loaded(folder, model, Tokenizer.load(folder), _read_notes(folder, values), missing)


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder."""
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no model: {CONFIG} is missing; give a model folder, a run or a hub name")
    return read_json(folder / CONFIG)


def config_in(values: Mapping[str, Any], folder: Path) -> EncoderConfig:
    """Their configuration as ours; what we do not compute is refused by name."""
    where = folder / CONFIG
    family = family_named(values, where)
    for key, value in family.fixed.items():
        if values.get(key, value) != value:
            raise UserError(f"{where}: {key} = {values[key]!r} is not supported; only {value!r} is")
    for key in values:
        if key not in family.config_keys:
            fix = suggestion(key, family.config_keys) or "; remove it if it does not change what the model computes"
            raise UserError(f"{where}: unknown key {key!r}{fix}")
    names = {**family.config_names, **{name: name for name in OWN_FIELDS}}
    ours = {name: values[theirs] for name, theirs in names.items() if values.get(theirs) is not None}
    if values.get("is_decoder"):
        ours["direction"] = "left-to-right"
    activation = ours.get("activation", "gelu")
    if activation not in ACTIVATIONS_IN:
        raise UserError(f"{where}: hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS_IN)}")
    ours = {**family.defaults, **ours, **family.settles, "activation": ACTIVATIONS_IN[activation]}
    config = from_dict(EncoderConfig, ours, str(where))
    return replace(config, max_positions=config.max_positions - family.unused_positions(config.pad_token_id))


def config_out(model: Model) -> dict[str, Any]:
    """Our configuration as theirs, with the labels' names."""
    config = model.encoder.config
    family = family_of(config)
    values: dict[str, Any] = {"architectures": [architecture_of(model)], "model_type": family.model_type}
    if own := own_type(model):
        values["model_type"] = f"bertsmith-{own}-{family.model_type}"
    values.update({theirs: getattr(config, name) for name, theirs in family.config_names.items()})
    values[family.config_names["max_positions"]] += family.unused_positions(config.pad_token_id)
    values[family.config_names["activation"]] = ACTIVATIONS[config.activation]
    default = EncoderConfig()
    values.update({n: getattr(config, n) for n in OWN_FIELDS if getattr(config, n) != getattr(default, n)})
    if config.direction == "left-to-right":  # they have a name for it
        values["is_decoder"] = bool(values.pop("direction"))
    if pools_last(model):
        values["pooled"] = "last"
    return {**values, **head_out(model.head_config)} if isinstance(model, TaskModel) else values


def head_out(head: HeadConfig) -> dict[str, Any]:
    """The fields of their configuration that describe a head."""
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
    if head.dropout is not None:
        values["classifier_dropout"] = head.dropout
    if head.features is not None:
        values["features"] = asdict(head.features)
    if head.bilstm_layers:
        values["bilstm_layers"] = head.bilstm_layers
    if head.beside:
        values["beside"] = True
    return values


def head_in(values: Mapping[str, Any], folder: Path) -> HeadConfig | None:
    """The head that a saved configuration describes, where it describes one."""
    saved, heads = _architecture(values), family_named(values, folder / CONFIG).heads
    if saved not in heads and saved != FEATURE_TAGGER:
        return None
    kind, _ = heads.get(saved, ("tags", {}))
    names = values.get("id2label") or {str(i): f"LABEL_{i}" for i in range(values.get("num_labels", 2))}
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    if kind == "single":
        problem = values.get("problem_type")
        kind = PROBLEM_TYPES[problem] if problem in PROBLEM_TYPES else "regression" if len(labels) == 1 else "single"
    if values.get("is_decoder") and kind not in ("tags", "span") and values.get("pooled") != "last":
        raise UserError(
            f"{folder / CONFIG}: {saved} with is_decoder = True pools the first token, which sees itself alone; that "
            "is not supported: a left-to-right encoder is classified from its last token"
        )
    needs_labels = kind in ("single", "multi", "tags")
    choices = int(values.get("num_choices") or 0)
    features = None
    if saved == FEATURE_TAGGER:
        features = from_dict(FeatureConfig, values.get("features", {}), f"{folder / CONFIG}: features")
    own = {
        "features": features,
        "bilstm_layers": int(values.get("bilstm_layers", 0)),
        "beside": bool(values.get("beside")),
    }
    return HeadConfig(kind, labels if needs_labels else (), choices, dropout_in(values, folder), **own)  # type: ignore[arg-type]


def dropout_in(values: Mapping[str, Any], folder: Path) -> float | None:
    """The dropout before the output layer, where it is not the encoder's."""
    dropout = values.get("classifier_dropout")
    if dropout is not None and not (isinstance(dropout, (int, float)) and 0 <= dropout < 1):
        raise UserError(f"{folder / CONFIG}: classifier_dropout must be at least 0 and under 1, not {dropout!r}")
    return dropout


def architecture_of(model: Model) -> str:
    """The class of `transformers` that a model is saved for, or ours where it has none."""
    prefix = OWN_CLASS if own_type(model) else ""
    family = family_of(model.encoder.config)
    if isinstance(model, MaskedLM):
        return family.pretraining[model.next_sentence is not None]
    if isinstance(model, CausalLM):
        return prefix + family.causal
    if model.head_config.features is not None:
        return FEATURE_TAGGER
    kind = model.head_config.kind
    wanted = "single" if kind in PROBLEM_TYPES.values() else kind
    return prefix + next(name for name, (k, _) in family.heads.items() if k == wanted)


def own_type(model: Model) -> str:
    """What `transformers` has no class for, in a word; nothing where it has one."""
    if isinstance(model, TaskModel) and model.head_config.is_own:
        head = model.head_config
        return "features" if head.features is not None else "two-encoders" if head.beside else "bilstm"
    return "right-to-left" if model.encoder.config.direction == "right-to-left" else ""


def pools_last(model: Model) -> bool:
    """Whether a head takes the last token's state, where their classes take the first one's."""
    sequence = isinstance(model, TaskModel) and model.head_config.kind not in ("tags", "span")
    return sequence and model.encoder.config.direction == "left-to-right"


def names_of(model: Model) -> dict[str, tuple[str, ...]]:
    """Every parameter's name and what `transformers` calls it (several names: its parts).

    An encoder without biases has names for them all the same: `transformers` keeps them, at zero.
    """
    config = model.encoder.config
    family = family_of(config)
    has = model.state_dict().keys()
    own: Names = {name: name for name in has if name.startswith(OWN_NAMES)}  # where `transformers` has no name for it
    if isinstance(model, MaskedLM):
        own = family.masked_lm
    elif isinstance(model, CausalLM):
        own = family.causal_lm
    elif not model.head_config.is_own:
        own = family.heads[architecture_of(model).removeprefix(OWN_CLASS)][1]
    table = dict(expand({**family.encoder, **own}, range(config.num_layers)))
    return {name: theirs for name, theirs in table.items() if name in has or name.startswith("encoder.")}


def weights_out(model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors under their names, in their parts."""
    config, saved = model.encoder.config, {}
    unused = family_of(config).unused_positions(config.pad_token_id)
    for ours, theirs in names_of(model).items():
        if config.bias or ours in tensors:
            tensor = tensors[ours].detach().cpu()
        else:  # theirs always has it
            weight = tensors[ours.removesuffix("bias") + "weight"]
            tensor = torch.zeros(len(weight), dtype=weight.dtype)
        if ours == POSITIONS and unused:
            tensor = torch.cat([tensor.new_zeros(unused, tensor.shape[1]), tensor])
        saved.update({n: part.contiguous() for n, part in zip(theirs, tensor.chunk(len(theirs)), strict=True)})
    return saved


def _saved_names(family: Family, values: Mapping[str, Any]) -> Names:
    """What a folder's weights may hold: the encoder, the heads of pre-training, and the head that it was saved with."""
    _, head = family.heads.get(_architecture(values), ("", {}))
    pooler = head.get(POOLERS[1]) or family.masked_lm[POOLERS[0]]  # one layer, whatever stands on it
    return {**family.encoder, **family.masked_lm, **family.causal_lm, **head, **dict.fromkeys(POOLERS, pooler)}


def _fill(
    model: Model, weights: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]], folder: Path
) -> tuple[str, ...]:
    """Give a model without weights those of a folder; what the folder lacks starts at random, and is named."""
    _refuse_surplus_layers(model.encoder.config, weights, folder)
    parameters, tensors, missing = model.state_dict(), {}, []
    for ours, written in names_of(model).items():
        theirs = names.get(ours, ())
        if theirs and all(name in weights for name in theirs):
            value = torch.cat([_floating(weights[name], name, folder) for name in theirs])  # memory of its own
            if ours in parameters:
                tensors[ours] = _fitted(model.encoder.config, ours, parameters[ours], value, theirs[0], folder)
            elif value.any():
                raise UserError(f"{folder}: {theirs[0]} is not zero, and {CONFIG} says bias = false; set it to true")
        elif ours not in parameters:
            continue
        elif ours.startswith("encoder."):
            raise UserError(f"{folder}: the weights lack {written[0]}")
        else:
            tensors[ours] = torch.empty(parameters[ours].shape)
            init_parameter(ours, tensors[ours], model.encoder.config.init_std)
            missing.append(ours)
    model.load_state_dict(tensors, strict=False, assign=True)
    if isinstance(model, MaskedLM):
        model.masked_lm.tie(model.encoder.embeddings.tokens)
    elif isinstance(model, CausalLM):
        model.causal_lm.tie(model.encoder.embeddings.tokens)
    assert not any(parameter.is_meta for parameter in model.parameters())
    return tuple(missing)


def _fitted(config: EncoderConfig, ours: str, parameter: Tensor, value: Tensor, theirs: str, folder: Path) -> Tensor:
    """A tensor of theirs as our parameter; a shape that does not fit is an error."""
    unused = family_of(config).unused_positions(config.pad_token_id) if ours == POSITIONS else 0
    asked = (parameter.shape[0] + unused, *parameter.shape[1:])
    if value.shape != asked:
        raise UserError(f"{folder}: {theirs} has shape {tuple(value.shape)}, and {CONFIG} asks for {asked}")
    return value[unused:].clone() if unused else value


def _floating(value: Tensor, name: str, folder: Path) -> Tensor:
    if not value.is_floating_point():
        raise UserError(f"{folder}: {name} holds {value.dtype}, not floating-point numbers")
    return value.float()


def _refuse_surplus_layers(config: EncoderConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    extra = config.num_layers
    rows = {ours: theirs for ours, theirs in family_of(config).encoder.items() if "{i}" in ours}
    if any(name in weights for _, theirs in expand(rows, range(extra, extra + 1)) for name in theirs):
        raise UserError(f"{folder}: the weights have a layer {extra}, which {CONFIG} does not; mend num_hidden_layers")


def _read_weights(folder: Path, family: Family) -> dict[str, Tensor]:
    weights = read_weights(folder)
    bare = any(name.startswith("embeddings.") for name in weights)  # saved from the encoder alone
    return {f"{family.prefix}{name}": value for name, value in weights.items()} if bare else weights


def _read_notes(folder: Path, values: Mapping[str, Any]) -> Notes:
    path = folder / NOTES
    notes = from_dict(Notes, read_json(path), str(path)) if path.exists() else Notes()
    return replace(notes, kept={name: values[name] for name in sorted(KEPT & values.keys())})


def _architecture(values: Mapping[str, Any]) -> str:
    name = str((values.get("architectures") or [""])[0])
    return name if name == FEATURE_TAGGER else name.removeprefix(OWN_CLASS)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

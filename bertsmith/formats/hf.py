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
from torch import Tensor

from bertsmith.config import from_dict, read_json
from bertsmith.errors import UserError
from bertsmith.formats.families import (
    KEPT,
    OWN_CLASS,
    Family,
    Names,
    expand,
    family_of,
)
from bertsmith.formats.saved_config import (
    CONFIG,
    Model,
    architecture,
    architecture_of,
    config_in,
    config_out,
    dropout_in,
    head_in,
    own_type,
    pools_last,
    read_config,
)
from bertsmith.formats.weights import WEIGHTS, read_weights, write_weights
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder, init_parameter
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.causal_lm import CausalLM
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.progress import say
from bertsmith.text.tokenizer import Tokenizer

NOTES = "bertsmith.json"
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
    limits: dict[str, float | None] = field(default_factory=dict)
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
    write_weights(folder / WEIGHTS, weights)
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
    _refuse_other_sizes(config, weights, folder)
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
    if head == saved and pools_last(model) and "transformers_version" in values:  # which we do not write
        say(f"note: {folder} was saved by transformers, whose class pools the first token; here the last one is pooled")
    return Loaded(folder, model, fitting_tokenizer(folder, config), read_notes(folder, values), missing)


def fitting_tokenizer(folder: Path, config: EncoderConfig) -> Tokenizer:
    """The tokenizer of a folder, or an error where the model has no embeddings for all of its tokens."""
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has ids up to {tokenizer.vocab_size - 1:,}, and {CONFIG} has vocab_size = "
            f"{config.vocab_size:,}; it is the tokenizer of another model"
        )
    return tokenizer


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
    _, head = family.heads.get(architecture(values), ("", {}))
    pooler = head.get(POOLERS[1]) or family.masked_lm[POOLERS[0]]  # one layer, whatever stands on it
    return {**family.encoder, **family.masked_lm, **family.causal_lm, **head, **dict.fromkeys(POOLERS, pooler)}


def _fill(
    model: Model, weights: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]], folder: Path
) -> tuple[str, ...]:
    """Give a model without weights those of a folder; what the folder lacks starts at random, and is named."""
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
    value = value.float()
    if not value.sum().isfinite() and not value.isfinite().all():  # the sum alone is fast, and may overflow
        raise UserError(f"{folder}: {name} holds NaN or infinite values; the weights are damaged or training diverged")
    return value


def _refuse_other_sizes(config: EncoderConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse sizes that are not those of the weights before anything so large is built."""
    family, layers = family_of(config), config.num_layers
    rows = {ours: theirs for ours, theirs in family.encoder.items() if "{i}" in ours}
    if any(name in weights for _, theirs in expand(rows, range(layers, layers + 1)) for name in theirs):
        raise UserError(f"{folder}: the weights have a layer {layers}, which {CONFIG} does not; fix num_hidden_layers")
    last = [name for _, theirs in expand(rows, range(layers - 1, layers)) for name in theirs]
    if not any(name in weights for name in last):
        raise UserError(f"{folder}: the weights lack {last[0]}; fix num_hidden_layers in {CONFIG}")
    sizes = {
        "encoder.embeddings.tokens.weight": config.vocab_size,
        "encoder.embeddings.segments.weight": config.num_segments,
        POSITIONS: config.max_positions + family.unused_positions(config.pad_token_id),
        "encoder.layers.0.feed_forward.inner.weight": config.intermediate_size,
    }
    for ours, (theirs, *_) in expand(family.encoder, range(1)):
        asked = (sizes.get(ours), config.hidden_size)
        if ours in sizes and theirs in weights and weights[theirs].shape != asked:
            shape = tuple(weights[theirs].shape)
            raise UserError(f"{folder}: {theirs} has shape {shape}, and {CONFIG} asks for {asked}")


def _read_weights(folder: Path, family: Family) -> dict[str, Tensor]:
    weights = read_weights(folder)
    bare = any(name.startswith("embeddings.") for name in weights)  # saved from the encoder alone
    return {f"{family.prefix}{name}": value for name, value in weights.items()} if bare else weights


def read_notes(folder: Path, values: Mapping[str, Any]) -> Notes:
    """`bertsmith.json` of a folder, where it has one, with the fields of its `config.json` that are kept."""
    path = folder / NOTES
    notes = from_dict(Notes, read_json(path), str(path)) if path.exists() else Notes()
    return replace(notes, kept={name: values[name] for name in sorted(KEPT & values.keys())})


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

"""The saved format: model folders that Hugging Face `transformers` opens. Its names are in `families/`.

A folder holds `config.json`, `model.safetensors` and the tokenizer's files; `bertsmith.json` beside them holds what
`transformers` has no field for (the task, its columns).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from bertsmith.config import from_dict, read_json, write_json
from bertsmith.errors import UserError
from bertsmith.formats.families.factorised import weights_today
from bertsmith.formats.families.table import family_of, output_named
from bertsmith.formats.family import KEPT, Family
from bertsmith.formats.saved_config import (
    CONFIG,
    Model,
    architecture,
    config_in,
    config_out,
    dropout_in,
    head_in,
    output_of,
    pools_last,
    read_config,
    remark_on,
)
from bertsmith.formats.storage import Names, Stored, as_stored, expand
from bertsmith.formats.weights import WEIGHTS, read_weights, write_weights
from bertsmith.model.config import EncoderConfig, HeadKind
from bertsmith.model.encoder import SHARED, Encoder, init_parameter
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.matching import MatchingHead, init_matching
from bertsmith.objectives.discriminator import DELTA, Discriminator
from bertsmith.objectives.kinds import OBJECTIVES, build_objective
from bertsmith.objectives.objective import Objective
from bertsmith.objectives.settings import (
    BidirectionalLMConfig,
    CausalLMConfig,
    MaskedLMConfig,
    ObjectiveConfig,
    ReplacedTokenConfig,
)
from bertsmith.progress import say
from bertsmith.text.tokenizer import Tokenizer

NOTES = "bertsmith.json"
HEAD_NAMES = (  # the parameters of an output layer, and of what is trained with it
    *("head.output.", "head.lstm.", "head.mix", "head.scale", "head.standard.", "head.top."),
    *("head.compare.", "head.compose.", "head.dense."),
)
OWN_NAMES = ("head.", "beside.")  # the parameters of a model that `transformers` has no class for
POOLERS = ("next_sentence.pooler.dense.*", "head.pooler.dense.*")
PREDICTION_HEAD = {"head.pooler.dense.*": "masked_lm.transform.*", "head.pooler.norm.*": "masked_lm.norm.*"}


@dataclass(frozen=True)
class Notes:
    """The content of `bertsmith.json`: how the model's data was read, encoded (`limits`) and decoded.

    `kept` are fields of `config.json` that have no effect here; they are written back into it. `remark` is for readers
    of the folder; `caution` says that the model has learnt too little to be useful.
    """

    task: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    max_length: int | None = None
    recipe: str = ""
    limits: dict[str, object] = field(default_factory=dict)
    kept: dict[str, object] = field(default_factory=dict)
    remark: str = ""
    caution: str = ""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model folder in memory."""

    folder: Path
    model: Model
    tokenizer: Tokenizer
    notes: Notes
    missing: tuple[str, ...] = ()  # parameters that the folder has no weights for; they are random


def save_folder(
    folder: Path, model: Model, tokenizer: Tokenizer, notes: Notes, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write a model folder; `tensors` is a state that was gathered from all ranks, instead of the model's own."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights_out(model, model.state_dict() if tensors is None else tensors)
    write_weights(folder / WEIGHTS, weights)
    values = {**config_out(model), **_frame_ids(model, tokenizer)}
    kept = {name: value for name, value in notes.kept.items() if name not in values}
    write_json(folder / CONFIG, {**kept, **values})
    write_notes(folder, replace(notes, remark=remark_on(model)))
    config = model.encoder.config
    tokenizer.save(folder, config.max_positions, config.num_segments)


def _frame_ids(model: Model, tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of special tokens that the family's `config.json` has: those around a sequence."""
    ids = {"first": tokenizer.joiner.first, "last": tokenizer.joiner.last}
    fields = family_of(model.encoder.config).frame_ids
    return {name: int(ids[place][0]) for name, place in fields.items() if len(ids[place])}


def load_folder(
    folder: str | Path,
    head: HeadConfig | None = None,
    *,
    objective: ObjectiveConfig | None = None,
    dropout: float | None = None,
    detects: bool = False,
) -> Loaded:
    """Open a model folder as the model that was saved, or with another head on its encoder.

    `head` puts a new output layer on the encoder; `objective` opens the folder for pre-training; `dropout` replaces the
    value in the folder. With `detects` the folder is opened as the discriminator of replaced tokens.
    """
    folder = Path(folder)
    values = read_config(folder)
    config, saved = config_in(values, folder), head_in(values, folder)
    if dropout is not None:
        in_attention = dropout if config.layer_type == "transformer" else 0.0
        config = replace(config, hidden_dropout=dropout, attention_dropout=in_attention)
    weights = _read_weights(folder, family_of(config))
    _refuse_other_layers(config, weights, folder)
    names = _with_copies(dict(expand(_saved_names(family_of(config), values), range(config.num_layers))), config)
    if saved is not None and saved.is_own and (head is None or saved.own_form == head.own_form):
        names |= {name: Stored((name,)) for name in weights if name.startswith(OWN_NAMES)}
    if head is None:
        head = saved
    elif saved is None or not saved.same_classes(head):  # the output layer is initialised again
        names = {ours: theirs for ours, theirs in names.items() if not ours.startswith(HEAD_NAMES)}
    found = {ours for ours, stored in names.items() if stored.found_in(weights)}
    with torch.device("meta"):  # no memory and no random numbers: the weights come from the folder
        encoder = Encoder(config)
        model: Model
        if head is not None and objective is None:
            if head.dropout is None and dropout is None:
                head = replace(head, dropout=dropout_in(values, head.kind, folder))
            model = TaskModel(encoder, head)
        else:
            kind = architecture(values)
            model = (
                build_objective(encoder, objective) if objective else _saved_objective(encoder, found, detects, kind)
            )
    missing = _fill(model, weights, names, folder)
    if head == saved and pools_last(model) and "transformers_version" in values:  # a field that we do not write
        say(f"note: {folder} was saved by transformers, whose class pools the first token; here the last one is pooled")
    return Loaded(folder, model, fitting_tokenizer(folder, config), read_notes(folder, values), missing)


def _saved_objective(encoder: Encoder, found: Collection[str], detects: bool, class_name: str) -> Objective:
    """The objective that a folder was saved by, given its class and the names of the tensors that it holds.

    With `detects`, an encoder alone gets a detector, where the family's detector is saved as one.
    """
    family = family_of(encoder.config)
    is_encoder = "detector" in family.outputs and family.outputs["detector"].class_name == family.encoder_class
    is_alone = detects and is_encoder and "masked_lm.norm.weight" not in found
    learns_pairs = "next_sentence.output.weight" in found
    if "detector.output.weight" in found or is_alone:
        context = "detector.norm.weight" in found or "detector.output.weight" not in found
        # A folder that was trained to fill masks names this class; other detectors may hold tensors of such a head too.
        fills = "masked_lm.norm.weight" in found and class_name == family.outputs["detector+masked_lm"].class_name
        config = ReplacedTokenConfig(
            disentangled=DELTA in found, context=context, fill_every=int(fills), next_sentence=learns_pairs
        )
        return Discriminator(encoder, config)
    if encoder.config.layer_type == "lstm":
        return build_objective(encoder, BidirectionalLMConfig())
    if encoder.config.direction != "both":
        return build_objective(encoder, CausalLMConfig())
    decodes = encoder.config.positions != "learned" and "mask_decoder.positions.weight" in found
    return build_objective(encoder, MaskedLMConfig(next_sentence=learns_pairs and not decodes, mask_decoder=decodes))


def fitting_tokenizer(folder: Path, config: EncoderConfig) -> Tokenizer:
    """Return the tokenizer of a folder; one with more tokens than the model has embeddings is refused.

    A model with one segment gives it to both texts of a pair.
    """
    tokenizer = Tokenizer.load(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise UserError(
            f"{folder}: the tokenizer has ids up to {tokenizer.vocab_size - 1:,}, and {CONFIG} has vocab_size = "
            f"{config.vocab_size:,}; it is the tokenizer of another model; put the model's own "
            "tokenizer files into the folder"
        )
    if tokenizer.pad_id != config.pad_token_id:
        ids = f"{CONFIG} has pad_token_id = {config.pad_token_id}, and the tokenizer pads with {tokenizer.pad_id}"
        say(f"note: {folder}: {ids}; if its predictions are poor, it is the tokenizer of another model")
    if config.reads_characters:
        return replace(tokenizer, spells=True)
    if config.num_segments != 1:
        return tokenizer
    return replace(tokenizer, frame=replace(tokenizer.frame, segments=(0,)))  # a RoBERTa may have a WordPiece tokenizer


def names_of(model: Model) -> dict[str, Stored]:
    """Return how the files of its family keep every tensor of a model.

    Where `bias` is a field of our own, the classes of the family always have biases: those that the encoder lacks are
    included here, and are zeros in the files.
    """
    config = model.encoder.config
    family = family_of(config)
    has = model.state_dict().keys()
    if isinstance(model, TaskModel) and model.head_config.is_own:  # `transformers` has no names for such a head
        output: Names = {name: name for name in has if name.startswith(OWN_NAMES)}
    else:
        output = output_of(model).names
    if isinstance(model, TaskModel) and model.causal_lm is not None:
        output = {**output, **output_named(family, "causal_lm").names}
    lacking = not config.bias and "bias" in family.own_fields
    names = _with_copies(dict(expand({**family.encoder, **output}, range(config.num_layers))), config)
    return {name: stored for name, stored in names.items() if name in has or (lacking and _is_lacking_bias(name, has))}


def _with_copies(names: dict[str, Stored], config: EncoderConfig) -> dict[str, Stored]:
    """Fill in the number of heads, and the names in other layers of sublayers that several stored layers share."""
    names = {name: replace(each, heads=config.num_heads) if each.by_head else each for name, each in names.items()}
    copied, layers = dict(names), _layers_in_files(config)
    for name, stored in names.items():
        prefix, part = "encoder.layers.0.", name.removeprefix("encoder.layers.0.")
        if name.startswith(prefix) and part.split(".")[0] in SHARED[config.shared_layers]:
            others = [names[f"encoder.layers.{i}.{part}"].names for i in range(1, layers)]
            copied[name] = replace(stored, copies=tuple(other for other in others if other != stored.names))
    return copied


def _is_lacking_bias(name: str, has: Collection[str]) -> bool:
    return name.startswith("encoder.") and name.endswith("bias") and name.removesuffix("bias") + "weight" in has


def weights_out(model: Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model as its family stores them."""
    config, saved = model.encoder.config, dict[str, Tensor]()
    unused_rows = family_of(config).unused_rows(config.pad_token_id)
    for ours, stored in names_of(model).items():
        if config.bias or ours in tensors:
            tensor = tensors[ours].detach().cpu()
        else:  # their class always has this bias
            weight = tensors[ours.removesuffix("bias") + "weight"]
            tensor = torch.zeros(len(weight), dtype=weight.dtype)
        saved |= stored.parts(tensor, unused_rows)
    return saved


def _saved_names(family: Family, values: Mapping[str, Any]) -> Names:
    """Return the names that a folder may hold: of the encoder, the heads of pre-training, and the saved head."""
    pretraining = [output.names for kind, output in family.outputs.items() if kind not in get_args(HeadKind)]
    saved = architecture(values)
    heads = [output.names for kind, output in family.outputs.items() if output.class_name == saved]
    names = {ours: stored for table in (family.encoder, *pretraining, *heads) for ours, stored in table.items()}
    if family.default("prediction_head"):  # fine-tuning starts from the layers of the masked-word head
        names |= {ours: names[words] for ours, words in PREDICTION_HEAD.items()}
    pooler = names.get(POOLERS[1]) or names.get(POOLERS[0])  # one layer for next sentence and for a head on the text
    return {**names, **dict.fromkeys(POOLERS, pooler)} if pooler else names


def _fill(model: Model, weights: Mapping[str, Tensor], names: Mapping[str, Stored], folder: Path) -> tuple[str, ...]:
    """Load the weights of a folder into a model; return the names of parameters that it lacks, which are random."""
    config, parameters, tensors, missing = model.encoder.config, model.state_dict(), {}, []
    unused_rows = family_of(config).unused_rows(config.pad_token_id)
    for ours, written in names_of(model).items():
        stored = names.get(ours)
        if stored is not None and (found := stored.found_in(weights)):
            parts = {name: _floating(weights[name], name, folder) for name in found}
            if ours in parameters:
                _check_shapes(parts, stored.shape(parameters[ours].shape, unused_rows), folder)
                _check_copies(stored, weights, folder)
                tensors[ours] = stored.joined(list(parts.values()), unused_rows)
            elif any(part.any() for part in parts.values()):
                raise UserError(f"{folder}: {found[0]} is not zero, and {CONFIG} says bias = false; set it to true")
        elif ours not in parameters:
            continue
        elif ours.startswith("encoder."):
            raise UserError(f"{folder}: the weights lack {written.names[0]}")
        else:
            tensors[ours] = torch.empty(parameters[ours].shape)
            matches = ours.startswith("head.") and isinstance(model.head, MatchingHead)
            init_matching(ours, tensors[ours]) if matches else init_parameter(ours, tensors[ours], config.init_std)
            missing.append(ours)
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    assert not any(parameter.is_meta for parameter in model.parameters())
    return tuple(missing)


def _check_shapes(parts: Mapping[str, Tensor], expected: tuple[int, ...], folder: Path) -> None:
    """Refuse tensors whose shape does not agree with the configuration."""
    for name, part in parts.items():
        if part.shape != expected:
            raise UserError(f"{folder}: {name} has shape {tuple(part.shape)}, and {CONFIG} asks for {expected}")


def _check_copies(stored: Stored, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse layers that share a tensor and hold different ones."""
    for names in stored.copies:
        for copy, name in zip(names, stored.names, strict=True):
            if copy not in weights:
                raise UserError(f"{folder}: the weights lack {copy}")
            if not torch.equal(weights[copy], weights[name]):
                raise UserError(
                    f"{folder}: {copy} differs from {name}, and {CONFIG} says that the layers share it; if they were "
                    "trained apart, set shared_layers to none"
                )


def _floating(value: Tensor, name: str, folder: Path) -> Tensor:
    if not value.is_floating_point():
        raise UserError(f"{folder}: {name} holds {value.dtype}, not floating-point numbers")
    value = value.float()
    if not value.sum().isfinite() and not value.isfinite().all():  # the sum is a fast check, and may overflow
        raise UserError(f"{folder}: {name} holds NaN or infinite values; the weights are damaged or training diverged")
    return value


def _refuse_other_layers(config: EncoderConfig, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse a number of layers that differs from the weights, before the layers are built."""
    family, layers = family_of(config), _layers_in_files(config)
    after, last = ([n for n in _layer_names(family, i) if n in weights] for i in (layers, layers - 1))
    field, expected = family.layer_groups or family.fields["num_layers"].names[0], _layer_names(family, layers - 1)
    if after:
        raise UserError(f"{folder}: the weights have a layer {layers}, which {CONFIG} does not; fix {field}")
    if expected and not last:
        raise UserError(f"{folder}: the weights lack {expected[0]}; fix {field} in {CONFIG}")


def _layers_in_files(config: EncoderConfig) -> int:
    """The number of layers that files hold: one if all share their parameters and the family has groups of layers."""
    return config.stored_layers if family_of(config).layer_groups else config.num_layers


def _layer_names(family: Family, layer: int) -> list[str]:
    """The names of a layer's tensors in the files; none if all layers share their parameters."""
    rows = {ours: row for ours, row in family.encoder.items() if "{i}" in as_stored(row).names[0]}
    return [name for _, stored in expand(rows, range(layer, layer + 1)) for name in stored.names]


def own_weights(folder: Path, family: Family) -> dict[str, Tensor]:
    """Return the tensors of a folder; where the model is a part of a larger one, only its own."""
    return _own_part(folder, family)[0]


def _own_part(folder: Path, family: Family) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a model, and a note if it is a part of a larger one."""
    layers = config_in(read_config(folder), folder).num_layers
    weights = weights_today(read_weights(folder), family.model_type, layers)
    if not (outer := family.outer_prefix(weights)):
        return weights, ""
    others = sorted({name.split(".")[0] for name in weights if not name.startswith(outer)})
    without = f", without its {', '.join(others)}" if others else ""
    note = f"note: {folder} holds a larger model, of which {outer.removesuffix('.')} is read{without}"
    return {name.removeprefix(outer): weight for name, weight in weights.items() if name.startswith(outer)}, note


def _read_weights(folder: Path, family: Family) -> dict[str, Tensor]:
    weights, note = _own_part(folder, family)
    if note:
        say(note)
    bare = family.is_encoder_alone(weights)
    return {f"{family.prefix}{name}": value for name, value in weights.items()} if bare else weights


def inner_folders(folder: Path) -> list[str]:
    """Return the names of the model folders inside a model folder: ELECTRA's generator."""
    names = {name for kind in OBJECTIVES.values() for name in kind.folders if name}
    return sorted(name for name in names if (folder / name / CONFIG).exists())


def write_notes(folder: Path, notes: Notes) -> None:
    """Write `bertsmith.json`; the kept fields are in `config.json`."""
    write_json(folder / NOTES, {name: value for name, value in asdict(notes).items() if name != "kept"})


def read_notes(folder: Path, values: Mapping[str, Any]) -> Notes:
    """Read `bertsmith.json` of a folder, if it has one, and the fields of its `config.json` that are kept."""
    path = folder / NOTES
    notes = from_dict(Notes, read_json(path), str(path)) if path.exists() else Notes()
    return replace(notes, kept={name: values[name] for name in sorted(KEPT & values.keys())})

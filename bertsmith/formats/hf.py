"""The saved format: what Hugging Face `transformers` opens as it is. Foreign names live here and nowhere else.

A folder holds `config.json`, `model.safetensors` and the tokenizer's files; `bertsmith.json` beside them says what
`transformers` has no field for (the task, its columns). Nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bertsmith.config import from_dict, read_json
from bertsmith.errors import UserError, suggestion
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, HeadKind, TaskModel
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.text.tokenizer import Tokenizer

Model = MaskedLM | TaskModel
WEIGHTS, CONFIG, NOTES = "model.safetensors", "config.json", "bertsmith.json"

# Ours ↔ theirs. {i} is the layer; a list is one of our matrices that they keep in parts.
BERT_NAMES: list[tuple[str, str | list[str]]] = [
    ("encoder.embeddings.tokens.weight", "bert.embeddings.word_embeddings.weight"),
    ("encoder.embeddings.segments.weight", "bert.embeddings.token_type_embeddings.weight"),
    ("encoder.embeddings.positions.weight", "bert.embeddings.position_embeddings.weight"),
    ("encoder.embeddings.norm.*", "bert.embeddings.LayerNorm.*"),
    (
        "encoder.layers.{i}.attention.qkv.*",
        [f"bert.encoder.layer.{{i}}.attention.self.{part}.*" for part in ("query", "key", "value")],
    ),
    ("encoder.layers.{i}.attention.output.*", "bert.encoder.layer.{i}.attention.output.dense.*"),
    ("encoder.layers.{i}.attention_norm.*", "bert.encoder.layer.{i}.attention.output.LayerNorm.*"),
    ("encoder.layers.{i}.feed_forward.inner.*", "bert.encoder.layer.{i}.intermediate.dense.*"),
    ("encoder.layers.{i}.feed_forward.outer.*", "bert.encoder.layer.{i}.output.dense.*"),
    ("encoder.layers.{i}.feed_forward_norm.*", "bert.encoder.layer.{i}.output.LayerNorm.*"),
]
MASKED_LM_NAMES: list[tuple[str, str | list[str]]] = [
    ("masked_lm.transform.*", "cls.predictions.transform.dense.*"),
    ("masked_lm.norm.*", "cls.predictions.transform.LayerNorm.*"),
    ("masked_lm.decoder.bias", "cls.predictions.bias"),
    ("next_sentence.pooler.dense.*", "bert.pooler.dense.*"),
    ("next_sentence.output.*", "cls.seq_relationship.*"),
]
SEQUENCE_NAMES: list[tuple[str, str | list[str]]] = [
    ("head.pooler.dense.*", "bert.pooler.dense.*"),
    ("head.output.*", "classifier.*"),
]
TAG_NAMES: list[tuple[str, str | list[str]]] = [("head.output.*", "classifier.*")]
SPAN_NAMES: list[tuple[str, str | list[str]]] = [("head.output.*", "qa_outputs.*")]

ARCHITECTURES: dict[str, tuple[HeadKind, list[tuple[str, str | list[str]]]]] = {
    "BertForSequenceClassification": ("single", SEQUENCE_NAMES),
    "BertForMultipleChoice": ("choice", SEQUENCE_NAMES),
    "BertForTokenClassification": ("tags", TAG_NAMES),
    "BertForQuestionAnswering": ("span", SPAN_NAMES),
}
OUTPUT_LAYERS = ("classifier", "qa_outputs")
PROBLEM_TYPES: dict[str, HeadKind] = {
    "single_label_classification": "single",
    "multi_label_classification": "multi",
    "regression": "regression",
}
CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "num_segments": "type_vocab_size",
    "activation": "hidden_act",
    "hidden_dropout": "hidden_dropout_prob",
    "attention_dropout": "attention_probs_dropout_prob",
    "norm_eps": "layer_norm_eps",
    "init_std": "initializer_range",
    "pad_token_id": "pad_token_id",
}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu"}
ACTIVATIONS_IN = {
    **{theirs: ours for ours, theirs in ACTIVATIONS.items()},
    "gelu_pytorch_tanh": "gelu_tanh",
    "swish": "silu",
}
# Fields with one value that we compute; another value would change the mathematics.
FIXED = {
    "model_type": "bert",
    "position_embedding_type": "absolute",
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_encoder_decoder": False,
    "tie_word_embeddings": True,
}
# Fields that do not change what an encoder computes: kept aside, never refused.
HARMLESS = frozenset(
    """architectures id2label label2id num_labels problem_type classifier_dropout transformers_version torch_dtype dtype
    use_cache gradient_checkpointing _name_or_path name_or_path directionality pooler_fc_size pooler_type
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head output_past output_attentions
    output_hidden_states return_dict bos_token_id eos_token_id sep_token_id decoder_start_token_id finetuning_task
    _num_labels chunk_size_feed_forward tokenizer_class task_specific_params torchscript use_bfloat16 prefix
    pruned_heads attn_implementation _attn_implementation_autoset model_name language num_choices
    pooler_hidden_act keys_to_ignore_at_inference max_length min_length""".split()
)


@dataclass(frozen=True)
class Notes:
    """What `bertsmith.json` adds to a folder: how the model's data was read and encoded."""

    task: str = ""
    columns: dict[str, str] = field(default_factory=dict)
    max_length: int | None = None
    recipe: str = ""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model folder in memory."""

    folder: Path
    model: Model
    tokenizer: Tokenizer
    notes: Notes
    missing: tuple[str, ...] = ()  # our parameters that the folder had no weights for; they are random


def save_folder(folder: Path, model: Model, tokenizer: Tokenizer, notes: Notes, tensors_in=None) -> None:
    """Write a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    table = names_of(model)
    tensors: dict[str, Tensor] = {}
    for ours, tensor in (tensors_in or model.state_dict()).items():
        theirs = table.get(ours)
        if theirs is None:  # the decoder's matrix is the embedding's
            continue
        parts = tensor.detach().cpu().chunk(len(theirs))
        tensors.update({name: part.contiguous() for name, part in zip(theirs, parts, strict=True)})
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    _write_json(folder / CONFIG, config_out(model))
    _write_json(folder / NOTES, asdict(notes))
    tokenizer.save(folder)


def load_folder(folder: str | Path, head: HeadConfig | None = None, *, next_sentence: bool | None = None) -> Loaded:
    """Open a model folder as what it was saved as, or with another head on its encoder.

    `head` puts a new output layer on the encoder; `next_sentence` opens the folder for pre-training.
    """
    folder = Path(folder)
    values = read_config(folder)
    encoder = Encoder(config_in(values, folder))
    weights = _read_weights(folder)
    saved = (values.get("architectures") or [""])[0]
    model: Model
    if next_sentence is not None:
        model = MaskedLM(encoder, next_sentence)
    elif head is not None:
        model = TaskModel(encoder, head)
    elif saved in ARCHITECTURES:
        model = TaskModel(encoder, head_in(values))
    else:
        has_pair_head = any("seq_relationship" in name for name in weights)
        model = MaskedLM(encoder, next_sentence=has_pair_head)
    if head is not None and not (saved in ARCHITECTURES and head_in(values).same_classes(head)):  # it starts anew
        weights = {name: value for name, value in weights.items() if name.split(".")[0] not in OUTPUT_LAYERS}
    missing = _fill(model, weights, folder)
    notes = from_dict(Notes, read_json(folder / NOTES), str(folder / NOTES)) if (folder / NOTES).exists() else Notes()
    return Loaded(folder, model, Tokenizer.load(folder), notes, missing)


def read_config(folder: Path) -> dict[str, Any]:
    """`config.json` of a model folder."""
    if not (folder / CONFIG).exists():
        raise UserError(f"{folder} holds no model: {CONFIG} is missing; give a model folder, a run or a hub name")
    return read_json(folder / CONFIG)


def config_in(values: Mapping[str, Any], folder: Path) -> EncoderConfig:
    """Their configuration as ours; what we do not compute is refused by name."""
    where = folder / CONFIG
    for key, value in FIXED.items():
        if values.get(key, value) != value:
            raise UserError(f"{where}: {key} = {values[key]!r} is not supported; only {value!r} is")
    known = {*CONFIG_NAMES.values(), *FIXED, *HARMLESS}
    for key in values:
        if key not in known:
            fix = suggestion(key, known) or "; remove it if it does not change what the model computes"
            raise UserError(f"{where}: unknown key {key!r}{fix}")
    ours = {name: values[theirs] for name, theirs in CONFIG_NAMES.items() if values.get(theirs) is not None}
    activation = ours.get("activation", "gelu")
    if activation not in ACTIVATIONS_IN:
        raise UserError(f"{where}: hidden_act {activation!r} is not one of {', '.join(ACTIVATIONS_IN)}")
    return from_dict(EncoderConfig, {**ours, "activation": ACTIVATIONS_IN[activation]}, str(where))


def config_out(model: Model) -> dict[str, Any]:
    """Our configuration as theirs, with the labels' names."""
    ours = asdict(model.encoder.config)
    values: dict[str, Any] = {"architectures": [architecture_of(model)], "model_type": "bert"}
    values.update({theirs: ours[name] for name, theirs in CONFIG_NAMES.items()})
    values["hidden_act"] = ACTIVATIONS[ours["activation"]]
    if isinstance(model, TaskModel):
        head = model.head_config
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
    return values


def head_in(values: Mapping[str, Any]) -> HeadConfig:
    """The head that a saved configuration describes."""
    kind, _ = ARCHITECTURES[values["architectures"][0]]
    names = values.get("id2label") or {str(i): f"LABEL_{i}" for i in range(values.get("num_labels", 2))}
    labels = tuple(str(names[key]) for key in sorted(names, key=int))
    if kind == "single":
        problem = values.get("problem_type")
        kind = PROBLEM_TYPES[problem] if problem in PROBLEM_TYPES else "regression" if len(labels) == 1 else "single"
    needs_labels = kind in ("single", "multi", "tags")
    return HeadConfig(kind, labels if needs_labels else (), int(values.get("num_choices") or 0))


def architecture_of(model: Model) -> str:
    """The class of `transformers` that a model is saved for."""
    if isinstance(model, MaskedLM):
        return "BertForPreTraining" if model.next_sentence is not None else "BertForMaskedLM"
    kind = model.head_config.kind
    wanted = "single" if kind in PROBLEM_TYPES.values() else kind
    return next(name for name, (k, _) in ARCHITECTURES.items() if k == wanted)


def names_of(model: Model) -> dict[str, list[str]]:
    """Every parameter's name and what `transformers` calls it (several names: its parts)."""
    own = MASKED_LM_NAMES if isinstance(model, MaskedLM) else ARCHITECTURES[architecture_of(model)][1]
    table: dict[str, list[str]] = {}
    for ours, theirs in _expand([*BERT_NAMES, *own], model.encoder.config.num_layers):
        table[ours] = theirs
    return {name: table[name] for name in model.state_dict() if name in table}


def _expand(rows: Iterable[tuple[str, str | list[str]]], layers: int) -> Iterable[tuple[str, list[str]]]:
    for ours, theirs in rows:
        parts = [theirs] if isinstance(theirs, str) else theirs
        for layer in range(layers) if "{i}" in ours else [0]:
            for end in ("weight", "bias") if ours.endswith("*") else [""]:
                fill = lambda name: name.replace("{i}", str(layer)).replace("*", end)  # noqa: E731, B023
                yield fill(ours), [fill(part) for part in parts]


def _fill(model: nn.Module, weights: dict[str, Tensor], folder: Path) -> tuple[str, ...]:
    """Copy weights into a model; gives the names that had none. A shape that does not fit is an error."""
    missing = []
    parameters = model.state_dict()
    for ours, theirs in names_of(model).items():  # type: ignore[arg-type]
        if not all(name in weights for name in theirs):
            missing.append(ours)
            continue
        value = torch.cat([weights[name] for name in theirs])
        if value.shape != parameters[ours].shape:
            shapes = tuple(value.shape), tuple(parameters[ours].shape)
            raise UserError(f"{folder}: {theirs[0]} has shape {shapes[0]}, and {CONFIG} asks for {shapes[1]}")
        parameters[ours].copy_(value)
    layers = {int(n.split(".")[3]) for n in weights if n.startswith("bert.encoder.layer.")}
    if surplus := [n for n in layers if f"encoder.layers.{n}.attention.qkv.weight" not in parameters]:
        raise UserError(
            f"{folder}: the weights have a layer {min(surplus)}, which {CONFIG} does not; mend num_hidden_layers"
        )
    if lost := [name for name in missing if name.startswith("encoder.")]:
        raise UserError(f"{folder}: the weights lack {names_of(model)[lost[0]][0]}")  # type: ignore[arg-type]
    return tuple(missing)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.exists():
        raise UserError(f"{folder} holds no model: {WEIGHTS} is missing")
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    renamed = {_modern(name): value for name, value in weights.items()}
    if any(name.startswith("embeddings.") for name in renamed):  # saved from the bare encoder
        renamed = {f"bert.{name}": value for name, value in renamed.items()}
    return renamed


def _modern(name: str) -> str:
    """Old releases called a norm's parameters gamma and beta."""
    return re.sub(r"gamma$", "weight", re.sub(r"beta$", "bias", name))


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

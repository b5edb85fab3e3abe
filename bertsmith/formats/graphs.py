"""ONNX graphs, ours and those that other programs exported: their files, inputs and outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.model.heads import HeadConfig

FLOAT32, INT8 = "model.onnx", "model_int8.onnx"
INPUTS = ("input_ids", "attention_mask", "token_type_ids")
STATES = ("last_hidden_state", "token_embeddings")  # the second: sentence-transformers
SPAN = ("start_logits", "end_logits")
TYPES = {"tensor(int64)": "int64", "tensor(int32)": "int32"}
# The names of a model's sizes in other families.
OTHER_NAMES = {
    "hidden_size": ("dim", "d_model"),
    "num_hidden_layers": ("n_layers",),
    "num_attention_heads": ("n_heads",),
    "intermediate_size": ("hidden_dim",),
}


def graph_file(folder: Path, name: str = FLOAT32) -> Path:
    """Return the path of a graph: in the folder, or in its subfolder `onnx`, as on the hub."""
    inside = folder / "onnx" / name
    return inside if inside.exists() and not (folder / name).exists() else folder / name


def is_onnx(folder: Path) -> bool:
    """Whether a model folder holds an exported graph."""
    return graph_file(folder).exists()


def graph_inputs(session: Any, path: Path) -> dict[str, str]:
    """Return the types of a graph's inputs by name: tokens, mask and perhaps segments, one row per text."""
    found = session.get_inputs()
    for each in found:
        if each.name not in INPUTS:
            raise UserError(f"{path} wants the input {each.name!r}; graphs are run that take {', '.join(INPUTS)}")
        if len(each.shape) != 2 or each.type not in TYPES:
            raise UserError(f"{path} wants {each.name} as {each.type} of {len(each.shape)} dimensions, not int64 of 2")
    if INPUTS[0] not in [each.name for each in found]:
        raise UserError(f"{path} has no input {INPUTS[0]}: it does not take tokens")
    return {each.name: TYPES[each.type] for each in found}


def score_outputs(outputs: Sequence[str], head: HeadConfig | None) -> list[str]:
    """Return the names of the outputs that hold the logits."""
    if head is not None and head.kind == "span" and set(SPAN) <= set(outputs):
        return list(SPAN)
    return [next((name for name in ("logits", "mlm_logits") if name in outputs), outputs[0])]


def state_output(outputs: Sequence[str], path: Path) -> str:
    """Return the name of the output that holds the hidden states of the last layer."""
    if found := next((name for name in STATES if name in outputs), None):
        return found
    raise UserError(f"{path} gives {', '.join(outputs)} and not the states of the tokens; export the encoder alone")


def in_terms_of_bert(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration of any family as BERT's, as far as running its graph needs it: sizes, head, labels."""
    sizes = ("vocab_size", "max_position_embeddings", "pad_token_id", "type_vocab_size", *OTHER_NAMES)
    kept = {name: values[name] for name in (*sizes, "id2label", "num_labels", "problem_type") if name in values}
    for name, others in OTHER_NAMES.items():
        for other in others:
            if other in values:
                kept.setdefault(name, values[other])
    named = re.search(r"For\w+$", str((values.get("architectures") or [""])[0]))
    return {**kept, "model_type": "bert", "architectures": [f"Bert{named[0]}" if named else "BertModel"]}

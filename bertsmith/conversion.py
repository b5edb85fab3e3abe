"""`convert`: TensorFlow 1 checkpoints, model folders of `transformers`, `sentence-transformers` and ONNX.

Weights keep their names and values, including those that our own model does not use (a pooler without a head).
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from bertsmith.config import write_json
from bertsmith.errors import UserError, suggestion
from bertsmith.folders import new_folder, refuse_existing, writes
from bertsmith.formats.card import CARD, write_card
from bertsmith.formats.families.table import family_named, family_of, has_no_class
from bertsmith.formats.family import Family
from bertsmith.formats.hf import NOTES, inner_folders, load_folder, own_weights
from bertsmith.formats.hub import find_model
from bertsmith.formats.onnx import export_onnx
from bertsmith.formats.saved_config import CONFIG, config_in, read_config
from bertsmith.formats.sentence_folder import MODULES, Pooling, pooling_kind, read_pooling, write_pooling
from bertsmith.formats.tf1 import is_checkpoint
from bertsmith.formats.tf1_convert import hf_to_tf1, tf1_to_hf
from bertsmith.formats.weights import WEIGHTS, write_weights
from bertsmith.inference.predictor import Predictor, measure_int8
from bertsmith.progress import say
from bertsmith.tasks.reading import read_task
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.verify import need_transformers, onnx_parity, parity

Target = Literal["hf", "tf1", "onnx", "sentence-transformers"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
HEAD_FIELDS = ("id2label", "label2id", "num_labels", "problem_type", "num_choices")
ONLY_FOR: dict[str, tuple[str, ...]] = {  # options, and the targets that they apply to
    "dtype": ("hf", "sentence-transformers"),
    "int8": ("onnx",),
    "data": ("onnx",),
    "pooling": ("sentence-transformers",),
    "normalize": ("sentence-transformers",),
    "max_length": ("sentence-transformers",),
}
TENSORFLOW = ("cased", "config", "vocab")  # options for a TensorFlow checkpoint as the source


@dataclass(frozen=True)
class Options:
    """The options of a conversion; None is the default of each."""

    cased: bool | None = None
    config: Path | None = None
    vocab: Path | None = None
    dtype: str | None = None
    int8: bool | None = None
    pooling: str | None = None
    normalize: bool | None = None
    max_length: int | None = None
    data: Path | None = None  # labelled rows to measure the cost of int8 on


@writes("target", "DST")
def convert(
    source: str | Path,
    target: str | Path,
    to: str | None = None,
    options: Options | None = None,
    *,
    verify: bool = False,
) -> dict[str, Any]:
    """Convert a model and return a report; `verify` adds the difference from `transformers`."""
    target, options, released = Path(target), options or Options(), is_checkpoint(source)
    kind = _target(to, released)
    _check(options, kind, released)
    if options.data is not None and not options.int8:
        raise UserError("--data shows what int8 costs; add --int8")
    refuse_existing(target, option="DST")
    if verify:
        need_transformers()
    with tempfile.TemporaryDirectory(prefix="bertsmith-convert-") as scratch:
        report: dict[str, Any] = {}
        straight = released and kind == "hf" and options.dtype is None  # one weight at a time, in little memory
        if released:
            folder = target if straight else Path(scratch) / "source"
            report = tf1_to_hf(source, folder, cased=options.cased, config=options.config, vocab=options.vocab)
        else:
            folder = find_model(source)
            _refuse_own(folder, kind, verify)
        if not straight:
            report |= WRITERS[kind](folder, target, options)
        if verify:
            report["parity"] = _verify(folder, target, kind, options, Path(scratch))
    return {"from": "tf1" if released else "hf", "to": kind, "folder": str(target), **report}


def _refuse_own(folder: Path, kind: Target, verify: bool) -> None:
    """Refuse to convert a model that the other format cannot express."""
    values = read_config(folder)
    direction = config_in(values, folder).direction
    refused = {"both": (), "left-to-right": ("tf1",), "right-to-left": ("tf1", "onnx", "sentence-transformers")}
    if kind in refused[direction]:
        raise UserError(f"--to {kind}: {folder} reads in one direction, {direction}, which {kind} has no model for")
    if verify and kind == "onnx" and values.get("pooled") == "last":
        raise UserError(
            f"--verify: {folder} is classified from its last token, and the class of transformers from the first; "
            "leave out --verify"
        )
    of_tokens = str(values.get("model_type")).startswith("bertsmith-tokens-")  # the graph needs no class
    possible = ("hf", "onnx") if of_tokens else ("hf",)
    if has_no_class(values, folder / CONFIG) and (kind not in possible or verify):
        what = "--verify: transformers" if kind == "hf" else f"--to {kind}: it"
        own = family_named(values, folder / CONFIG).is_own
        fix = "bertsmith itself opens it" if own else "convert the model it started from"
        raise UserError(f"{what} has no model of the type {values['model_type']}, as {folder} is; {fix}")


def _target(to: str | None, released: bool) -> Target:
    if to is None and released:
        return "hf"
    for kind in get_args(Target):
        if to == kind:
            if released and kind == "tf1":
                raise UserError("--to tf1: the source is a TensorFlow 1 checkpoint already")
            return kind
    listed = ", ".join(get_args(Target))
    if to is None:
        raise UserError(f"--to is missing: the source is a model folder; one of {listed}")
    raise UserError(f"--to {to!r} is not one of {listed}{suggestion(to, get_args(Target))}")


def _check(options: Options, kind: Target, released: bool) -> None:
    """Refuse options that have no effect."""
    for name, targets in ONLY_FOR.items():
        if getattr(options, name) is not None and kind not in targets:
            raise UserError(f"--{name.replace('_', '-')} is for --to {' and '.join(targets)}, not for {kind}")
    for name in TENSORFLOW:
        if getattr(options, name) is not None and not released:
            option = "cased/--uncased" if name == "cased" else name
            raise UserError(f"--{option} is for TensorFlow 1 checkpoints; a model folder says it itself")
    if options.dtype is not None and options.dtype not in DTYPES:
        raise UserError(f"--dtype {options.dtype!r} is not one of {', '.join(DTYPES)}")


def _write_hf(folder: Path, target: Path, options: Options) -> dict[str, Any]:
    """Write a model folder with safetensors, and those inside it, in another precision if one is given."""
    with new_folder(target, "DST") as work:
        report = _write_folder(folder, work, options)
        for name in inner_folders(folder):
            (work / name).mkdir()
            _write_folder(folder / name, work / name, options)
    return report


def _write_folder(folder: Path, work: Path, options: Options) -> dict[str, Any]:
    loaded = load_folder(folder)  # only what can be opened again is written
    family = family_of(loaded.model.encoder.config)
    weights = _without_copies(own_weights(folder, family), family)
    report = _write_model(folder, work, read_config(folder), weights, options.dtype)
    if (folder / MODULES).exists():
        report |= _keep_pooling(folder, work, loaded.model.encoder.config.hidden_size)
    _write_card(folder, work)
    return report


def _write_card(folder: Path, work: Path) -> None:
    """Copy the card of the source, which may name a licence, or write a new one."""
    if (folder / CARD).is_file():
        shutil.copyfile(folder / CARD, work / CARD)
    else:
        write_card(work)


def _keep_pooling(folder: Path, work: Path, hidden_size: int) -> dict[str, Any]:
    """Write the modules of `sentence-transformers`, or print that they are dropped if we do not support them."""
    try:
        pooling = read_pooling(folder)
    except UserError as error:
        say(f"note: the encoder alone is written, without its modules for sentence-transformers: {error}")
        return {}
    assert pooling is not None
    write_pooling(work, pooling, hidden_size)
    return _facts(pooling)


def _facts(pooling: Pooling) -> dict[str, Any]:
    return {"pooling": pooling.kind, "normalize": pooling.normalize, "max_length": pooling.max_length}


def _write_sentence_folder(folder: Path, target: Path, options: Options) -> dict[str, Any]:
    """Write the encoder without a head, and the settings that pool its states to one vector per text."""
    loaded = load_folder(folder)
    positions = loaded.model.encoder.config.max_positions
    pooling = read_pooling(folder) or Pooling(max_length=loaded.notes.max_length or positions)
    if options.pooling is not None:
        pooling = replace(pooling, kind=pooling_kind(options.pooling))
    if options.normalize is not None:
        pooling = replace(pooling, normalize=options.normalize)
    if options.max_length is not None:
        if not 2 < options.max_length <= positions:
            raise UserError(f"--max-length {options.max_length} is not between 3 and the model's {positions}")
        pooling = replace(pooling, max_length=options.max_length)
    values = read_config(folder)
    family = family_named(values, folder / CONFIG)
    weights = _without_copies(own_weights(folder, family), family)
    if not family.is_encoder_alone(weights):
        weights = {n.removeprefix(family.prefix): w for n, w in weights.items() if n.startswith(family.prefix)}
    of_head = {*HEAD_FIELDS, *(output.dropout.name for output in family.outputs.values())}
    bare = {name: value for name, value in values.items() if name not in of_head}
    bare["architectures"] = [family.encoder_class]
    with new_folder(target, "DST") as work:
        report = _write_model(folder, work, bare, weights, options.dtype)
        write_pooling(work, pooling, loaded.model.encoder.config.hidden_size)
        write_card(work)
    return {**report, **_facts(pooling)}


def _write_model(
    folder: Path, work: Path, values: Mapping[str, Any], weights: Mapping[str, Tensor], dtype: str | None
) -> dict[str, Any]:
    """Write the files of a model folder, given the values of its `config.json` and its weights."""
    kept, values = dict(weights), dict(values)
    if dtype is not None:
        kept = {n: _rounded(w, n, dtype) if w.is_floating_point() else w for n, w in kept.items()}
        values = {**{n: v for n, v in values.items() if n not in ("dtype", "torch_dtype")}, "torch_dtype": dtype}
    write_weights(work / WEIGHTS, kept)
    write_json(work / CONFIG, values)
    if (folder / NOTES).exists():
        shutil.copy(folder / NOTES, work / NOTES)
    tokenizer, config = Tokenizer.load(folder), config_in(values, folder)
    tokenizer.save(work, tokenizer.length_within(config.max_positions), config.num_segments)
    types = sorted({str(w.dtype).removeprefix("torch.") for w in kept.values() if w.is_floating_point()})
    facts = {"architecture": (values.get("architectures") or [""])[0], "tensors": len(kept)}
    return {**facts, "parameters": sum(w.numel() for w in kept.values()), "dtype": ", ".join(types)}


def _rounded(weight: Tensor, name: str, dtype: str) -> Tensor:
    """Return a weight in another precision; one that is too large for it is refused."""
    rounded = weight.to(DTYPES[dtype])
    if weight.isfinite().all() and not rounded.isfinite().all():
        raise UserError(
            f"--dtype {dtype}: {name} has values up to {weight.abs().max():.3g}, and {dtype} ends at "
            f"{torch.finfo(DTYPES[dtype]).max:.3g}; bfloat16 holds them"
        )
    return rounded


def _without_copies(weights: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Drop what older files hold twice: tied weights (the decoder), and the numbers of the positions."""
    tied = {copy: name for copy, name in family.tied.items() if copy in weights and name in weights}
    copies = {copy for copy, name in tied.items() if weights[copy].equal(weights[name])}
    return {name: weight for name, weight in weights.items() if name not in copies and "position_ids" not in name}


def _write_tf1(folder: Path, target: Path, options: Options) -> dict[str, Any]:
    return hf_to_tf1(folder, target)


def _write_onnx(folder: Path, target: Path, options: Options) -> dict[str, Any]:
    report = export_onnx(load_folder(folder), target, int8=bool(options.int8))
    if options.data is None:
        return report
    predictor = Predictor.load(target)
    rows = list(read_task(predictor.task, options.data, predictor.columns, labelled=True))
    return measure_int8(target, rows)


WRITERS: dict[Target, Callable[[Path, Path, Options], dict[str, Any]]] = {
    "hf": _write_hf,
    "tf1": _write_tf1,
    "onnx": _write_onnx,
    "sentence-transformers": _write_sentence_folder,
}


def _verify(folder: Path, target: Path, kind: Target, options: Options, scratch: Path) -> dict[str, Any]:
    """Compare the written folder, opened here, with the source in `transformers`, in the same precision."""
    if kind == "tf1":
        tf1_to_hf(target, scratch / "back")
        return parity(scratch / "back", folder)
    if kind == "onnx":
        return onnx_parity(target, folder)
    return parity(target, folder, DTYPES[options.dtype] if options.dtype else None)

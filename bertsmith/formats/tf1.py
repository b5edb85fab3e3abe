"""Read and write the released BERT format of TensorFlow 1 without TensorFlow.

A folder holds `bert_config.json`, `vocab.txt` and the checkpoint `bert_model.ckpt` in two files. (The graph, a `.meta`
file, is not needed to load weights: none is read or written.) Weights are converted one by one, as float32: the
released code has no other variables, and a Saver restores no variable from another type.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.config import read_json, write_json
from bertsmith.errors import UserError
from bertsmith.formats.tensor_bundle import Entry, data_file, index_file, read_index, read_tensor, write_bundle
from bertsmith.formats.tf1_electra import HEADS_NOTE, Part, electra_parts, is_electra
from bertsmith.formats.tf1_names import (
    CLASSIFIER,
    MASKED_LM,
    NEXT_SENTENCE,
    POOLER,
    SPAN,
    Release,
    Shape,
    Variable,
    check_shape,
    kind_of_extra,
    refuse_others,
    select,
)
from bertsmith.formats.tf1_releases import BERT, release_of
from bertsmith.formats.tf1_settings import DEFAULTS, LABELS, SIZES, head_settings, settings_in, settings_out
from bertsmith.text.opening import PIECES

CHECKPOINT, SETTINGS, VOCAB = BERT.checkpoint, BERT.settings, "vocab.txt"
ALBERT_SETTINGS = "albert_config*.json"
HUB = "module/"  # a prefix of all variables in the checkpoints of TensorFlow Hub
FILE_ENDS = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, eq=False)
class Weights(Mapping[str, NDArray[np.float32]]):
    """Weights by the names of `transformers`, each read when it is accessed."""

    shapes: Mapping[str, Shape]
    read: Callable[[str], NDArray[np.float32]]

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        if name not in self.shapes:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint in the terms of `transformers`."""

    prefix: Path
    config: dict[str, Any]  # the values of a `config.json`
    weights: Weights
    lowercase: bool | None  # whether `bert_config.json` says so; the released files do not say
    report: dict[str, Any]
    beside: Mapping[str, Checkpoint] = field(default_factory=dict)  # further models, by the folder inside the first's


def is_checkpoint(path: str | Path) -> bool:
    """Whether a path is a TensorFlow checkpoint, or a folder that should hold one and is no model folder."""
    path = Path(path)
    if path.is_dir():
        return any(path.glob("*.index")) or ((path / SETTINGS).exists() and not (path / "config.json").exists())
    return bool(FILE_ENDS.search(path.name)) or index_file(path).is_file()


def find_settings(folder: Path) -> Path:
    """Return the settings of a released folder: `bert_config.json`, or `albert_config.json` and the like."""
    return next(
        (path for path in (folder / SETTINGS, *sorted(folder.glob(ALBERT_SETTINGS))) if path.is_file()),
        folder / SETTINGS,
    )


def find_checkpoint(path: str | Path) -> Path:
    """Return the prefix of a checkpoint's files, given a folder that holds one, the prefix, or one of the files."""
    path = Path(path)
    if path.is_dir():
        return _in_folder(path)
    name = FILE_ENDS.sub("", path.name)
    prefix = path.with_name(name)
    if index_file(prefix).is_file():
        return prefix
    if path.is_file() and name == path.name:
        raise UserError(f"{path} is not a checkpoint: it has no {name}.index beside it; give the folder that holds one")
    raise UserError(f"no such checkpoint: {path}; {index_file(prefix)} is missing")


def _in_folder(folder: Path) -> Path:
    """Return the released checkpoint, the newest of a training run, or the only one."""
    found = sorted(path.name.removesuffix(".index") for path in folder.glob("*.index"))
    if CHECKPOINT in found:
        return folder / CHECKPOINT
    steps = {int(match[1]): name for name in found if (match := re.search(r"\.ckpt-(\d+)$", name))}
    if steps:
        return folder / steps[max(steps)]
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise UserError(f"{folder} holds several checkpoints; name one: {', '.join(found)}")
    there = [name for name in (SETTINGS, VOCAB) if (folder / name).exists()]
    missing = [file(folder / CHECKPOINT).name for file in (index_file, data_file)]
    have = f"{' and '.join(there)} without the weights: " if there else ""
    raise UserError(f"{folder} holds no TensorFlow checkpoint: {have}{' and '.join(missing)} are missing")


def read_checkpoint(path: str | Path, *, config: str | Path | None = None) -> Checkpoint:
    """Open a checkpoint; `config` is its `bert_config.json` if that is elsewhere."""
    prefix = find_checkpoint(path)
    entries = {name.removeprefix(HUB): entry for name, entry in read_index(prefix).items()}
    file = Path(config) if config else find_settings(prefix.parent)
    if is_electra(entries):
        return _read_electra(prefix, entries, read_json(file) if config or file.is_file() else {})
    refuse_others(entries, prefix)
    release = release_of(entries)
    if not file.is_file():
        raise UserError(f"{file} is missing, without which {prefix.name} cannot be read; give the one it was made with")
    values = read_json(file)
    settings = settings_in(values, release, file)
    extras = {name: kind_of_extra(name, entries, entry.shape) for name, entry in entries.items()}
    found = select(release, [name for name in entries if not extras[name]], "tf", settings, prefix)
    variables = {variable.hf: variable for part in found.values() for variable in part}
    shapes = {hf: _check(variable, entries, settings, prefix) for hf, variable in variables.items()}
    settings |= head_settings(found, values, shapes.get("classifier.weight", (0,))[0], release.classes, file)
    weights = Weights(shapes, lambda name: _read(variables[name], entries))
    used = {name for v in variables.values() for name in (v.tf, v.factor) if name}
    types = {entries[name].dtype for name in used} - {"float32"}
    report = {
        "checkpoint": str(prefix),
        "architecture": settings["architectures"][0],
        **_count(shapes),
        "ignored": dict(Counter(kind for kind in extras.values() if kind)),
        "left_out": sorted(name for name, kind in extras.items() if not kind and name not in used),
        "missing": _missing(found),
        "notes": [f"weights of {name} are taken as float32" for name in sorted(types)],
    }
    lowercase = values.get("do_lower_case")
    return Checkpoint(prefix, settings, weights, lowercase if isinstance(lowercase, bool) else None, report)


def _read_electra(prefix: Path, entries: Mapping[str, Entry], given: Mapping[str, Any]) -> Checkpoint:
    """Open the discriminator of a checkpoint, and its generator beside it."""
    extras = {name: kind_of_extra(name, entries, entry.shape) for name, entry in entries.items()}
    parts = electra_parts({n: e.shape for n, e in entries.items() if not extras[n]}, given, prefix)
    used = {variable.tf for part in parts.values() for variable in part.variables}
    left_out = sorted(name for name, kind in extras.items() if not kind and name not in used)
    found = {folder: _part_of(part, prefix, entries) for folder, part in parts.items()}
    first, lowercase = found.pop(""), given.get("do_lower_case")
    report = {**first.report, "ignored": dict(Counter(filter(None, extras.values()))), "left_out": left_out}
    report["notes"] = [*report["notes"], *([] if given else [HEADS_NOTE])]
    return replace(first, report=report, beside=found, lowercase=lowercase if isinstance(lowercase, bool) else None)


def _part_of(part: Part, prefix: Path, entries: Mapping[str, Entry]) -> Checkpoint:
    """Open one of the models of a checkpoint."""
    variables = {variable.hf: variable for variable in part.variables}
    shapes = {hf: _check(variable, entries, part.settings, prefix) for hf, variable in variables.items()}
    weights = Weights(shapes, lambda name: _read(variables[name], entries))
    types = {entries[variable.tf].dtype for variable in part.variables} - {"float32"}
    report = {
        "checkpoint": str(prefix),
        "architecture": part.settings["architectures"][0],
        **_count(shapes),
        "missing": [],
        "notes": [f"weights of {name} are taken as float32" for name in sorted(types)],
    }
    return Checkpoint(prefix, part.settings, weights, None, report)


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, NDArray[Any]],
    vocab: Sequence[str],
    *,
    source: Path | None = None,
    release: Release = BERT,
    pieces: bytes = b"",
) -> dict[str, Any]:
    """Write the released format into a folder, given the values of a `config.json` and weights by their names there.

    `source` is their folder, for errors; `pieces` is SentencePiece's file, instead of `vocab`. Returns a report.
    """
    source = source or folder
    config = {**SIZES, **DEFAULTS, **release.optional, **config}
    values, notes = settings_out(config, release)
    found = select(release, weights, "hf", config, source)
    variables = sorted((v for part in found.values() for v in part), key=lambda variable: variable.tf)
    shapes: dict[str, Shape] = {}

    def arrays() -> Iterator[tuple[str, NDArray[np.float32]]]:
        for variable in variables:
            array = np.asarray(weights[variable.hf], np.float32)
            check_shape(variable, array.shape, config, source)
            shapes[variable.tf] = array.shape
            yield variable.tf, array.T if variable.transposed else array

    write_bundle(folder / release.checkpoint, arrays())
    if CLASSIFIER in found or SPAN in found:  # the released code ignores settings that it does not know
        values |= {key: config[key] for key in LABELS if config.get(key)}
    if "do_lower_case" in config:
        values["do_lower_case"] = config["do_lower_case"]
    write_json(folder / release.settings, values)
    lines = "".join(f"{token}\n" for token in vocab).encode("utf-8")
    (folder / (PIECES if pieces else VOCAB)).write_bytes(pieces or lines)
    known = {variable.hf for variable in variables}
    return {
        "checkpoint": str(folder / release.checkpoint),
        "architecture": (config.get("architectures") or [""])[0],
        **_count(shapes),
        "left_out": sorted(name for name in weights if name not in known),
        "missing": _missing(found),
        "notes": [*notes, "no .meta file: the graph is not needed to load the weights"],
    }


def _check(variable: Variable, entries: Mapping[str, Entry], settings: Mapping[str, Any], prefix: Path) -> Shape:
    """Return the shape of a variable in `transformers`; one that does not fit is refused."""
    entry = entries[variable.tf]
    if entry.dtype not in FLOATS:
        raise UserError(f"{prefix}: {variable.tf} is of {entry.dtype}, not of floating point")
    shape = entry.shape[::-1] if variable.transposed else entry.shape
    if variable.factor:
        other = entries[variable.factor].shape
        if len(shape) != 2 or len(other) != 2 or shape[1] != other[0]:
            raise UserError(f"{prefix}: {variable.tf} {shape} cannot be multiplied by {variable.factor} {other}")
        shape = (shape[0], other[1])
    check_shape(variable, shape, settings, prefix)
    return shape


def _read(variable: Variable, entries: Mapping[str, Entry]) -> NDArray[np.float32]:
    array = read_tensor(variable.tf, entries[variable.tf]).astype(np.float32, copy=False)
    if variable.factor:
        array = array @ read_tensor(variable.factor, entries[variable.factor]).astype(np.float32, copy=False)
    return np.ascontiguousarray(array.T) if variable.transposed else array


def _count(shapes: Mapping[str, Shape]) -> dict[str, int]:
    return {"tensors": len(shapes), "parameters": sum(int(np.prod(shape)) for shape in shapes.values())}


def _missing(found: Mapping[str, Any]) -> list[str]:
    return [part for part in (POOLER, MASKED_LM, NEXT_SENTENCE) if part not in found]

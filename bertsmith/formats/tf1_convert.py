"""Convert a TensorFlow 1 checkpoint to a model folder and back: weights, vocabulary, and whether it is cased."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import models

from bertsmith.config import read_json, write_json
from bertsmith.errors import UserError
from bertsmith.folders import new_folder
from bertsmith.formats.card import write_card
from bertsmith.formats.families.table import family_of
from bertsmith.formats.family import Family
from bertsmith.formats.hf import NOTES
from bertsmith.formats.hub import find_model
from bertsmith.formats.saved_config import CONFIG, config_in, read_config
from bertsmith.formats.tf1 import (
    SETTINGS,
    VOCAB,
    Checkpoint,
    Weights,
    read_checkpoint,
    write_checkpoint,
)
from bertsmith.formats.tf1_names import Release
from bertsmith.formats.tf1_releases import ALBERT, WRITTEN
from bertsmith.formats.weights import WEIGHTS, current_name, write_safetensors
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.opening import PIECES
from bertsmith.text.spiece import read_spiece
from bertsmith.text.tokenizer import SETTINGS as TOKENIZER_SETTINGS
from bertsmith.text.tokenizer import Tokenizer

CAPITALS = 1 / 100  # a vocabulary with at least this share of capitalised entries is cased


def tf1_to_hf(
    source: str | Path,
    target: str | Path,
    *,
    cased: bool | None = None,
    config: str | Path | None = None,
    vocab: str | Path | None = None,
) -> dict[str, Any]:
    """Convert a TensorFlow checkpoint to a model folder and return a report.

    `config` and `vocab` are for a checkpoint without `bert_config.json` and `vocab.txt` beside it, such as that of a
    fine-tuning run.
    """
    checkpoint = read_checkpoint(source, config=config)
    folder, settings = checkpoint.prefix.parent, checkpoint.config
    file = Path(vocab) if vocab else _find_vocab(folder)
    tokens = _read_vocab(file, settings["vocab_size"])
    lowercase, reason = guess_lowercase(folder.resolve().name, tokens, cased, checkpoint.lowercase)
    saved = {"": checkpoint, **checkpoint.beside}
    for each in saved.values():
        config_in(each.config, folder)  # only what can be opened again is written
    with new_folder(target) as work:
        for name, each in saved.items():
            (work / name).mkdir(exist_ok=True)
            _write_vocab(work / name, file, tokens)
            _write_model(work / name, each, lowercase)
            _write_vocab(work / name, file, tokens)  # a tokenizer writes no empty and no duplicate lines
    notes = [*checkpoint.report["notes"], f"do_lower_case is {str(lowercase).lower()}: {reason}"]
    beside = {name: {**each.report, "checkpoint": ""} for name, each in checkpoint.beside.items()}
    return {**checkpoint.report, "do_lower_case": lowercase, "notes": notes, **({"beside": beside} if beside else {})}


def _write_model(folder: Path, checkpoint: Checkpoint, lowercase: bool) -> None:
    """Write a model of a checkpoint as a model folder, which holds the vocabulary."""
    settings, weights = checkpoint.config, checkpoint.weights
    write_json(folder / TOKENIZER_SETTINGS, {"do_lower_case": lowercase})
    tokenizer = Tokenizer.load(folder)
    tokenizer.save(folder, settings["max_position_embeddings"])
    write_json(folder / CONFIG, {**settings, "pad_token_id": tokenizer.pad_id})
    forms = {name: ("float32", list(shape)) for name, shape in weights.shapes.items()}
    write_safetensors(folder / WEIGHTS, forms, lambda name: weights[name].astype("<f4", copy=False).data)
    write_card(folder)


def hf_to_tf1(source: str | Path, target: str | Path) -> dict[str, Any]:
    """Convert a model folder, a run or a hub name to the released TensorFlow format and return a report."""
    folder = find_model(source)
    settings = read_config(folder)
    family = family_of(config_in(settings, folder))
    release = WRITTEN.get(family.model_type)
    if release is None:
        raise UserError(
            f"{folder}: a model of the family {family.model_type}; --to tf1 writes the released formats of "
            f"{' and '.join(WRITTEN)}"
        )
    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"{folder} has no {WEIGHTS}; write its weights into one file first: bertsmith convert {folder} DST --to hf"
        )
    tokenizer = Tokenizer.load(folder)
    tokens = _vocab_of(tokenizer, folder, release)
    lowercase, notes = _clean_up(tokenizer)
    if len(tokens) > settings.get("vocab_size", len(tokens)):
        raise UserError(f"{folder}: {len(tokens)} tokens, and {CONFIG} has vocab_size = {settings['vocab_size']}")
    if (folder / NOTES).exists() and read_json(folder / NOTES).get("task"):
        notes.append(f"{NOTES}, the task and its columns, has no place in the released format")
    values = {**settings, "do_lower_case": lowercase}
    with new_folder(target) as work:
        weights = _open_safetensors(folder / WEIGHTS, family)
        report = write_checkpoint(
            work, values, weights, tokens, source=folder, release=release, pieces=tokenizer.pieces.get(PIECES, b"")
        )
    return {**report, "checkpoint": str(Path(target) / release.checkpoint), "notes": [*report["notes"], *notes]}


def guess_lowercase(name: str, vocab: list[str], cased: bool | None, saved: bool | None) -> tuple[bool, str]:
    """Return whether texts are lower-cased, and the reason: the format has no field for it."""
    if cased is not None:
        return not cased, "as asked"
    if saved is not None:
        return saved, f"{SETTINGS} says so"
    if match := re.search("uncased|cased", name):
        return match[0] == "uncased", f"the folder is called {name}; --cased or --uncased says otherwise"
    words = [token for token in vocab if not re.fullmatch(r"\[.*\]", token)]
    capitals = sum(token != token.lower() for token in words)
    share = f"{capitals} of {len(words)} entries of the vocabulary have capital letters"
    return capitals < CAPITALS * len(words), f"{share}; --cased or --uncased says otherwise"


def _find_vocab(folder: Path) -> Path:
    """Return the vocabulary of a released folder: `vocab.txt`, `vocab_chinese.txt`, or SentencePiece's `*.model`."""
    found = [folder / VOCAB, *sorted(folder.glob("vocab*.txt")), *sorted(folder.glob("*.model"))]
    return next((path for path in found if path.is_file()), folder / VOCAB)


def _read_vocab(path: Path, vocab_size: int) -> list[str]:
    """Return the entries of a vocabulary in the order of their ids.

    Those of `vocab.txt` are stripped, as the released code reads them.
    """
    if not path.is_file():
        raise UserError(
            f"{path} is missing, so the tokens of the model are not known; give the {VOCAB} it was made with"
        )
    pieces = path.suffix == ".model"
    tokens = [piece.text for piece in read_spiece(path).pieces] if pieces else _lines(path)
    if len(tokens) > vocab_size:
        raise UserError(f"{path} has {len(tokens)} entries, and {SETTINGS} has vocab_size = {vocab_size}")
    special = () if pieces else WORDPIECE.special_tokens
    if missing := [token for token in special if token not in tokens]:
        raise UserError(f"{path} lacks {', '.join(missing)}, which BERT needs")
    return tokens


def _lines(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_bytes().decode("utf-8").removesuffix("\n").split("\n")]
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from None


def _write_vocab(folder: Path, source: Path, tokens: list[str]) -> None:
    """Write a vocabulary into a model folder; `vocab.txt` keeps empty and duplicate lines, which have ids."""
    if source.suffix == ".model":
        (folder / PIECES).write_bytes(source.read_bytes())
    else:
        (folder / VOCAB).write_bytes("".join(f"{token}\n" for token in tokens).encode("utf-8"))


def _vocab_of(tokenizer: Tokenizer, folder: Path, release: Release) -> list[str]:
    """Return the entries of a tokenizer in the order of their ids."""
    if tokenizer.pieces and release is ALBERT:
        return [tokenizer.token(number) for number in range(tokenizer.vocab_size)]
    if not isinstance(tokenizer.backend.model, models.WordPiece):
        if release is ALBERT:
            raise UserError(f"{folder} has no {PIECES}, which the released code reads; only released models have one")
        raise UserError(f"{folder}: the tokenizer is not WordPiece, and the released format has no other")
    file = folder / VOCAB
    lines = file.read_bytes().decode("utf-8", "replace").split("\n") if file.exists() else []
    by_id = dict(enumerate(lines))  # an empty or duplicate line has an id that the tokenizer does not use
    numbers = tokenizer.backend.get_vocab()
    by_id |= {number: token for token, number in numbers.items()}
    return [by_id.get(number, "") for number in range(max(numbers.values()) + 1)]


def _clean_up(tokenizer: Tokenizer) -> tuple[bool, list[str]]:
    """Return whether a tokenizer lower-cases texts, and notes on what the released code would do differently."""
    if tokenizer.pieces:  # the file holds its own clean-up
        return tokenizer.lowercase, []
    saved = json.loads(tokenizer.backend.to_str())["normalizer"] or {}
    steps = saved["normalizers"] if saved.get("type") == "Sequence" else [saved]
    bert = next((step for step in steps if step.get("type") == "BertNormalizer"), None)
    lowercase = bool(bert["lowercase"]) if bert else tokenizer.lowercase
    accents = {None, lowercase}
    released = bert and bert["clean_text"] and bert["handle_chinese_chars"] and bert["strip_accents"] in accents
    if released and len(steps) == 1:
        return lowercase, []
    names = ", ".join(str(step.get("type")) for step in steps)
    return lowercase, [f"texts are cleaned up otherwise than by the released code ({names}); vocab.txt cannot say so"]


def _open_safetensors(path: Path, family: Family) -> Weights:
    """Open the weights of a model folder as float32, by the names of today's releases."""
    if not path.is_file():
        raise UserError(f"{path.parent} holds no model: {path.name} is missing")
    try:
        file = safe_open(path, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    names = {current_name(name): name for name in file.keys()}  # noqa: SIM118
    if family.is_encoder_alone(names):
        names = {f"{family.prefix}{name}": theirs for name, theirs in names.items()}
    _refuse_untied(file, names, path, family)
    for copy, name in family.tied.items():
        if copy in names:
            names.setdefault(name, names.pop(copy))
    kept = {name: theirs for name, theirs in names.items() if not name.endswith("position_ids")}  # no weights
    shapes = {name: tuple(file.get_slice(theirs).get_shape()) for name, theirs in kept.items()}
    return Weights(shapes, lambda name: file.get_tensor(kept[name]).float().numpy())


def _refuse_untied(file: Any, names: dict[str, str], path: Path, family: Family) -> None:
    """Refuse two different tensors where the released code has one: the decoder and the token embeddings."""
    for copy, name in family.tied.items():
        if {copy, name} <= names.keys() and not file.get_tensor(names[copy]).equal(file.get_tensor(names[name])):
            raise UserError(
                f"{path}: {names[copy]} differs from {names[name]}, and the released format has one tensor for both"
            )

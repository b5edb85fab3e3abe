"""The special tokens of a tokenizer: their names in its settings, their places in a sequence, their registration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from tokenizers import AddedToken, models, processors
from tokenizers import Tokenizer as Backend

from bertsmith.errors import UserError
from bertsmith.text.frame import ALBERT, GPT_TEXT, ROBERTA, WORDPIECE, WORDS, Frame, WordMarker

# The fields of tokenizer_config.json that name special tokens, and may rename them.
TOKEN_FIELDS = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
FRAMES = {models.WordPiece: WORDPIECE, models.BPE: ROBERTA, models.Unigram: ALBERT, models.WordLevel: WORDS}
MARKERS = {"ByteLevel": ROBERTA.word_marker, "Metaspace": ALBERT.word_marker}  # by the pre-tokenizer
FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def frame_of(backend: Backend, settings: Mapping[str, Any]) -> Frame:
    """The frame of an opened tokenizer: its kind's, with the names of its settings and the places of its template.

    The template is the library's post-processor. Without one, the special tokens are placed as the kind has them.
    """
    marker = _word_marker(backend)
    frame = GPT_TEXT if marker == GPT_TEXT.word_marker else FRAMES.get(type(backend.model), WORDPIECE)
    given = {key: value for key, value in settings.items() if value is not None}
    frame = named(frame, {**_known_names(backend, frame), **given})
    frame = replace(frame, word_marker=marker or frame.word_marker)
    return _placed(frame, _state(backend.post_processor))


def named(frame: Frame, settings: Mapping[str, Any]) -> Frame:
    """A frame with the token names of a tokenizer's settings, where a token is a name or an object."""
    names = {old: _content(settings.get(key)) or old for key, old in _names(frame).items()}

    def new(*tokens: str) -> tuple[str, ...]:
        return tuple(names[token] for token in tokens)

    return replace(
        frame,
        first=new(*frame.first),
        between=new(*frame.between),
        last=new(*frame.last),
        unknown=names[frame.unknown],
        pad=frame.pad and names[frame.pad],
        mask=frame.mask and names[frame.mask],
    )


def _known_names(backend: Backend, frame: Frame) -> dict[str, str]:
    """The special tokens by their fields in the settings: under the kind's names or, if it lacks them, another's."""
    names = [pair for other in (*FRAMES.values(), frame) for pair in _names(other).items()]
    return {key: name for key, name in names if backend.token_to_id(name) is not None}


def _names(frame: Frame) -> dict[str, str]:
    """The special tokens of a frame by their fields in `tokenizer_config.json`."""
    first, between, last = (tokens[0] if tokens else None for tokens in (frame.first, frame.between, frame.last))
    placed = {"cls_token": first, "sep_token": last}
    if between != last:  # a text is classified from the token at its end (OpenAI GPT)
        placed = {"bos_token": first, "sep_token": between, "cls_token": last}
    names = {"pad_token": frame.pad, "unk_token": frame.unknown, **placed, "mask_token": frame.mask}
    return {key: token for key, token in names.items() if token}


def token_fields(frame: Frame, backend: Backend) -> dict[str, Any]:
    """The special tokens by their fields in `tokenizer_config.json`; objects, if they take the space before."""
    objects = {
        token.content: {"__type": "AddedToken", **token.__getstate__()}
        for token in backend.get_added_tokens_decoder().values()
        if token.lstrip
    }
    names = {"pad_token": frame.unknown, **_names(frame)}  # other programs need a token for padding
    return {key: objects.get(name, name) for key, name in names.items()}


def as_written(value: Any) -> Any:
    """A value of the settings for `tokenizer_config.json`, where an object names its type; older files do without."""
    if isinstance(value, list):
        return [as_written(entry) for entry in value]
    return {"__type": "AddedToken", **value} if isinstance(value, dict) and "content" in value else value


def register(backend: Backend, frame: Frame, settings: Mapping[str, Any] | None = None) -> None:
    """Register those special tokens that the vocabulary has, with the flags that objects in the settings give them.

    Where the first piece of a word carries its space (`Ġword`), a mask replaces that space as well as the word.
    """
    objects = [token for key in TOKEN_FIELDS if isinstance(token := (settings or {}).get(key), dict)]
    flags = {token["content"]: {name: token[name] for name in FLAGS if name in token} for token in objects}
    if frame.mask is not None and frame.word_marker.on == "first":
        flags.setdefault(frame.mask, {"lstrip": True})
    known = [name for name in frame.special_tokens if backend.token_to_id(name) is not None]
    backend.add_special_tokens([AddedToken(name, **{"normalized": False, **flags.get(name, {})}) for name in known])


def add_tokens(backend: Backend, added: Mapping[int, Mapping[str, Any]], folder: object) -> None:
    """Add the tokens that a folder lists beyond its vocabulary; each must get the id that the list gives it."""
    for number, token in sorted(added.items()):
        name = str(token.get("content"))
        special = bool(token.get("special", backend.token_to_id(name) is not None))
        flags = {flag: bool(token[flag]) for flag in FLAGS if flag in token}
        add = backend.add_special_tokens if special else backend.add_tokens
        add([AddedToken(name, **{"normalized": not special, **flags})])
        if (given := backend.token_to_id(name)) != number:
            raise UserError(f"{folder}: the added token {name!r} should have the id {number}, and it would get {given}")


def place(backend: Backend, frame: Frame) -> None:
    """Set the library's template for texts and pairs, if the vocabulary has the special tokens."""
    ids = {name: backend.token_to_id(name) for name in (*frame.first, *frame.between, *frame.last)}
    if None not in ids.values():
        single, pair = ([f"{name}:{i}" for name, i in frame.arrange(parts)] for parts in (["$A"], ["$A", "$B"]))
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=list(ids.items())
        )


def _content(token: Any) -> str | None:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _state(part: Any) -> dict[str, Any]:
    """A part of the library's tokenizer, as in `tokenizer.json`."""
    return json.loads(part.__getstate__()) if part is not None else {}  # type: ignore[no-any-return]


def _word_marker(backend: Backend) -> WordMarker | None:
    """How a tokenizer marks the pieces of words; None if neither its model nor its pre-tokenizer shows it."""
    if suffix := getattr(backend.model, "end_of_word_suffix", None):
        return WordMarker(suffix, "last")
    if prefix := getattr(backend.model, "continuing_subword_prefix", None):
        return WordMarker(prefix, "continuations")
    parts = str(backend.pre_tokenizer) + str(backend.decoder)
    return next((marker for part, marker in MARKERS.items() if part in parts), None)


def _placed(frame: Frame, template: dict[str, Any]) -> Frame:
    """A frame whose tokens are placed as in the library's template for pairs."""
    kind = template.get("type")
    if kind == "Sequence":
        for part in template["processors"]:
            frame = _placed(frame, part)
    elif kind in ("RobertaProcessing", "BertProcessing"):
        cls, sep = template["cls"][0], template["sep"][0]
        between, segments = ((sep, sep), (0,)) if kind == "RobertaProcessing" else ((sep,), (0, 1))
        return replace(frame, first=(cls,), between=between, last=(sep,), segments=segments)
    elif kind == "TemplateProcessing":
        groups = [(text, list(some)) for text, some in groupby(template["pair"], lambda piece: "Sequence" in piece)]
        names = [tuple(piece["SpecialToken"]["id"] for piece in some) for text, some in groups if not text]
        parts = [piece["Sequence"]["type_id"] for text, some in groups if text for piece in some]
        if len(names) == 3 and len(parts) == 2:
            segments = tuple(dict.fromkeys(parts))
            return replace(frame, first=names[0], between=names[1], last=names[2], segments=segments)
    return frame

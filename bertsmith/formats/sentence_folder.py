"""The files that `sentence-transformers` adds to a model folder: how hidden states are pooled to one vector per text.

They are written in the form of its early releases, which later releases read as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from bertsmith.config import read_json, read_json_value, write_json
from bertsmith.errors import UserError, suggestion
from bertsmith.model.config import PoolingKind

MODULES, ENCODER, FACTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
POOLING, NORMALIZE, TOKENIZER = "1_Pooling", "2_Normalize", "tokenizer_config.json"
UNLIMITED = 1_000_000  # tokens; `transformers` writes 1e30 for a tokenizer that cuts nothing
MODES: dict[str, PoolingKind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a text's tokens, special tokens included, are pooled to one vector."""

    kind: PoolingKind = "mean"
    normalize: bool = False
    max_length: int | None = None
    lowercase: bool = False  # the text, before tokenisation
    prompts: Mapping[str, str] = field(default_factory=dict)  # texts that are put in front of an input, by name
    default_prompt_name: str | None = None  # of the prompt that is used unless another is chosen
    include_prompt: bool = True  # whether the prompt's tokens are pooled as well

    @property
    def prompt(self) -> str:
        """The text that is put in front of every input unless another prompt is chosen."""
        return self.prompts[self.default_prompt_name] if self.default_prompt_name is not None else ""


def pooling_kind(name: str) -> PoolingKind:
    """Return a kind of pooling by its name."""
    for kind in get_args(PoolingKind):
        if name == kind:
            return kind
    near = suggestion(name, get_args(PoolingKind))
    raise UserError(f"--pooling {name!r} is not one of {', '.join(get_args(PoolingKind))}{near}")


def read_pooling(folder: Path) -> Pooling | None:
    """Read the pooling of a folder of `sentence-transformers`; None for a plain model folder."""
    if not (folder / MODULES).exists():
        return None
    modules = _modules(folder / MODULES)
    kinds = [name for name, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UserError(f"{folder / MODULES}: {', '.join(kinds)} is not Transformer, Pooling and perhaps Normalize")
    encoder = read_json(folder / ENCODER) if (folder / ENCODER).exists() else {}
    pooling, include_prompt = _kind(folder / modules[1][1] / "config.json")
    prompts, default = _prompts(folder / FACTS) if (folder / FACTS).exists() else ({}, None)
    lowercase = bool(encoder.get("do_lower_case"))
    return Pooling(pooling, len(kinds) == 3, _length(folder, encoder), lowercase, prompts, default, include_prompt)


def _length(folder: Path, encoder: Mapping[str, Any]) -> int | None:
    """Return the length at which texts are truncated; newer releases leave it to the tokenizer."""
    where, length = folder / ENCODER, encoder.get("max_seq_length")
    if length is None and (folder / TOKENIZER).exists():
        where, length = folder / TOKENIZER, read_json(folder / TOKENIZER).get("model_max_length")
        if isinstance(length, (int, float)) and length > UNLIMITED:
            return None
    if length is not None and (type(length) is not int or length < 3):
        raise UserError(f"{where}: the length {length!r} is not a whole number of at least 3")
    return length


def _prompts(path: Path) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default prompt."""
    values = read_json(path)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise UserError(f"{path}: prompts is not an object of texts by name: {prompts!r}")
    prompts = {name: text or "" for name, text in prompts.items()}
    if default is not None and default not in prompts:
        raise UserError(f"{path}: default_prompt_name {default!r} is not one of the prompts {', '.join(prompts)}")
    return prompts, default


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the modules' class names, without packages, which change between releases, and their folders."""
    listed = read_json_value(path)
    try:
        found = [(str(module["type"]).rsplit(".", 1)[-1], str(module["path"])) for module in listed]
    except (TypeError, KeyError):
        raise UserError(f"{path} is not a list of modules with type and path") from None
    if any(Path(place).name != place for _, place in found):
        raise UserError(f"{path}: a module's path is not a folder beside it")
    return found


def _kind(path: Path) -> tuple[PoolingKind, bool]:
    """Return the kind of pooling, and whether the tokens of a prompt are pooled as well."""
    values = read_json(path)
    mode = values.get("pooling_mode") or [name for name in values if name.startswith("pooling_mode_") and values[name]]
    modes = [mode] if isinstance(mode, str) else list(mode)
    known = [MODES.get(name, name) for name in modes]
    if len(known) != 1 or known[0] not in MODES.values():
        raise UserError(f"{path}: pooling by {', '.join(map(str, modes)) or 'nothing'} is not one of mean, cls, max")
    return pooling_kind(known[0]), bool(values.get("include_prompt", True))


def write_pooling(folder: Path, pooling: Pooling, hidden_size: int) -> None:
    """Write the files of the modules into the folder of an encoder."""
    modules = [("Transformer", ""), ("Pooling", POOLING), *([("Normalize", NORMALIZE)] if pooling.normalize else [])]
    for _, name in modules:
        (folder / name).mkdir(exist_ok=True)
    package = "sentence_transformers.models"
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{package}.{kind}"} for i, (kind, path) in enumerate(modules)
    ]
    write_json(folder / MODULES, listed)
    modes = {name: kind == pooling.kind for name, kind in MODES.items()}
    write_json(
        folder / POOLING / "config.json",
        {"word_embedding_dimension": hidden_size, **modes, "include_prompt": pooling.include_prompt},
    )
    write_json(folder / ENCODER, {"max_seq_length": pooling.max_length, "do_lower_case": pooling.lowercase})
    prompts = {"prompts": dict(pooling.prompts), "default_prompt_name": pooling.default_prompt_name}
    write_json(folder / FACTS, {**prompts, "similarity_fn_name": "cosine"})

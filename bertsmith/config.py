"""Configurations: frozen dataclasses with strict keys, JSON in and out, and dotted `--set` changes.

A section may have one of several forms: a union of dataclasses, told apart by a field `kind` with one allowed value.
A class may have an `UPGRADE`: a function from the plain values that an older version wrote to those of today.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from bertsmith.errors import UserError, nearest_or_all, suggestion
from bertsmith.folders import regular_file

LARGEST_JSON = 100_000_000  # bytes, far more than any configuration or index needs
Config = TypeVar("Config")
# Settings that have a command-line option of their own, and an argument in Python.
SHORT = {
    "learning_rate": "train.learning_rate",
    "epochs": "train.epochs",
    "steps": "train.steps",
    "hours": "train.hours",
    "batch_size": "train.batch_size",
    "seed": "train.seed",
    "max_length": "data.max_length",
    "windows": "data.windows",
    "text": "data.columns.text",
    "pair": "data.columns.pair",
    "label": "data.columns.label",
    "skip_bad": "data.skip_bad",
    "teacher": "distillation.teacher",
}
_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)  # which are compiled from text
LENGTHS = ("train.steps", "train.epochs", "train.hours")  # each sets the length of a run


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The allowed range of a number; `ends` are the brackets that include or exclude the ends, as in `[0, 1)`."""

    least: float
    most: float
    ends: str = "[]"

    def refusal(self, value: float) -> str:
        """The range in words, for an error about a number outside it; empty for a number inside."""
        if not math.isfinite(value):
            return "a finite number"
        low = f"at least {self.least:,}" if self.ends[0] == "[" else f"above {self.least:,}"
        high = f"at most {self.most:,}" if self.ends[1] == "]" else f"under {self.most:,}"
        too_low = value < self.least or (value == self.least and self.ends[0] == "(")
        too_high = value > self.most or (value == self.most and self.ends[1] == ")")
        if (too_low or too_high) and self.most <= 1:
            return f"{low} and {high}"
        return low if too_low else high if too_high else ""


def check_bounds(config: Any, section: str = "") -> None:
    """Refuse numbers of a configuration outside the `BOUNDS` of its class; errors put `section` before their names.

    Settings that are None are skipped; all numbers of a table have to lie in the range.
    """
    for name, bounds in type(config).BOUNDS.items():
        value = getattr(config, name)
        for number in value.values() if isinstance(value, Mapping) else () if value is None else (value,):
            if words := bounds.refusal(number):
                raise UserError(f"{section}{name} must be {words}, not {number}")


def to_dict(config: Any) -> dict[str, Any]:
    """A configuration as plain JSON values."""
    return typing.cast(dict[str, Any], json.loads(json.dumps(dataclasses.asdict(config))))


def from_dict(cls: type[Config], values: Mapping[str, Any], where: str = "config") -> Config:
    """Build a configuration from plain values; an unknown or missing key is an error that names it."""
    values = _upgraded(cls, values)
    hints = _hints(cls)
    for key in values:
        if key not in hints:
            raise UserError(f"{where}: unknown key {key!r}{suggestion(key, hints)}")
    required = {
        f.name
        for f in dataclasses.fields(cls)  # type: ignore[arg-type]
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    if missing := sorted(required - set(values)):
        raise UserError(f"{where}: missing key {missing[0]!r}")
    return cls(**{key: _convert(hints[key], value, f"{where}: {key}") for key, value in values.items()})


def _upgraded(cls: Any, values: Mapping[str, Any]) -> Mapping[str, Any]:
    upgrade = getattr(cls, "UPGRADE", None)
    return upgrade(values) if upgrade else values


def _kinds(hint: Any) -> dict[str, Any]:
    """The dataclasses of a union by their `kind`; none for any other hint."""
    union = typing.get_origin(hint) in (Union, types.UnionType)
    return {cls.kind: cls for cls in typing.get_args(hint) if hasattr(cls, "kind")} if union else {}


def _section(hint: Any, values: Any) -> Any:
    """The dataclass that a section's plain values belong to, or None."""
    kind = values.get("kind") if isinstance(values, Mapping) else None
    return hint if dataclasses.is_dataclass(hint) else _kinds(hint).get(kind) if isinstance(kind, str) else None


def load(cls: type[Config], path: str | Path) -> Config:
    """Read a configuration from a JSON file; an error names the file."""
    try:
        return from_dict(cls, read_json(path), str(path))
    except UserError as error:
        if str(path) in str(error):
            raise
        raise UserError(f"{path}: {error}") from None


def read_json(path: str | Path) -> dict[str, Any]:
    """A JSON object from a file, or an error that names the file and the line."""
    values = read_json_value(path)
    if not isinstance(values, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def read_json_value(path: str | Path) -> Any:
    """Any JSON value from a file, which may come from elsewhere."""
    file = regular_file(path)
    if file.stat().st_size > LARGEST_JSON:
        raise UserError(f"{path} has {file.stat().st_size:,} bytes; a JSON file here has at most {LARGEST_JSON:,}")
    try:
        text = file.read_text(encoding="utf-8")
        value = json.loads(text)
        if "\\u" in text:  # half of a surrogate pair can be escaped like this, and is not text
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise UserError(f"{path} is nested too deeply") from None
    except ValueError as error:  # of JSON, or of Unicode
        raise UserError(f"{path} is not valid JSON: {error}") from None
    return value


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file in the form that all of ours have: indented, in UTF-8, with a newline at the end."""
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def override(config: Config, changes: Iterable[str], option: str = "--set") -> Config:
    """Apply `key=value` changes with dotted keys, as `--set train.steps=200` gives them, all of them at once.

    Errors name `option` as the place where the changes were given. A class may name settings that exclude each other
    (`ONE_OF`: the last one given unsets the others) and settings that something else decides (`DECIDED`). A section's
    new `kind` counts before its other settings, which start at the defaults of that kind.
    """
    values = to_dict(config)
    for change in sorted(changes, key=lambda change: not change.partition("=")[0].strip().endswith(".kind")):
        key, equals, text = change.partition("=")
        if not equals:
            raise UserError(f"{option} {change!r}: write it as key=value, for example train.steps=200")
        _put(type(config), values, key.strip().split("."), text.strip(), f"{option} {key.strip()}")
    return from_dict(type(config), values)


def with_short(changes: Iterable[str], **short: Any) -> list[str]:
    """Add the given short forms to the changes for `override`; a setting that is given twice is an error."""
    changes = list(changes)
    given = {SHORT[name]: value for name, value in short.items() if value is not None}
    changed = {change.partition("=")[0].strip() for change in changes}
    for key in given:
        if key in changed:
            raise UserError(f"{key} is given twice, by --set and by an option of its own; leave one of them out")
        if key in LENGTHS and (other := sorted((changed | set(given)) & set(LENGTHS) - {key})):
            raise UserError(f"{key} and {other[0]} both say how long the run is; leave one of them out")
    return changes + [f"{key}={json.dumps(value)}" for key, value in given.items()]


def dotted_keys(cls: Any, prefix: str = "") -> list[str]:
    """Every key that `--set` accepts for a configuration class."""
    keys: list[str] = []
    for name, hint in _hints(cls).items():
        sections = [hint] if dataclasses.is_dataclass(hint) else _kinds(hint).values()
        keys += [key for section in sections for key in dotted_keys(section, f"{prefix}{name}.")] or [prefix + name]
    return [key for key in dict.fromkeys(keys) if key.removeprefix(prefix) not in getattr(cls, "DECIDED", {})]


def _put(cls: Any, values: dict[str, Any], path: list[str], text: str, where: str) -> None:
    """Set one value in the plain form of a configuration."""
    hints = _hints(cls)
    name, rest, whole = path[0], path[1:], where.split()[-1]
    if name not in hints:
        depth = whole.split(".")[: len(whole.split(".")) - len(path)]
        known = [".".join([*depth, key]) for key in dotted_keys(cls)]
        raise UserError(f"{where}: unknown setting{nearest_or_all(whole, known)}")
    if reason := getattr(cls, "DECIDED", {}).get(name):
        raise UserError(f"{where}: {reason}; leave it out")
    section = _section(hints[name], values.get(name))
    if bool(rest) != (section is not None):
        options = [f"{whole}.{key}" for key in dotted_keys(section)] if section else [".".join(whole.split(".")[:-1])]
        raise UserError(f"{where}: not a single setting; one of: {', '.join(options)}")
    if kinds := _kinds(hints[name]):
        if rest == ["kind"] and _kind_of(kinds, {"kind": _parse(text)}, where) is not section:
            values[name] = {"kind": _parse(text)}
            return
        _refuse_other_kinds(kinds, section, rest[0], where)
    if section is not None:
        _put(section, values[name], rest, text, where)
        return
    values[name] = _convert(hints[name], _parse(text), where)
    if values[name] is not None and name in (one_of := getattr(cls, "ONE_OF", ())):
        values |= dict.fromkeys(set(one_of) - {name})


def _kind_of(kinds: Mapping[str, Any], values: Mapping[str, Any], where: str) -> Any:
    """The dataclass for the kind that a section's plain values name."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"{where}: {kind!r} is not a kind; one of: {', '.join(kinds)}")
    return kinds[kind]


def _refuse_other_kinds(kinds: Mapping[str, Any], cls: Any, key: str, where: str) -> None:
    """Refuse a key that a section of this kind does not have, naming the keys of every kind."""
    if key not in _hints(cls):
        has = "; ".join(f"{kind} has {', '.join(dotted_keys(each))}" for kind, each in kinds.items())
        raise UserError(f"{where}: the kind {cls.kind} has no setting {key!r} ({has})")


def _parse(text: str) -> Any:
    """Parse a command-line value as JSON (`3`, `true`, `null`, `[1, 2]`), or keep the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Convert a value to the hinted type, or raise an error that names the place, the value and the type."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: expected an object, found {value!r}")
        return from_dict(typing.cast(type, hint), value, where)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        if kinds := _kinds(hint):
            if not isinstance(value, Mapping):
                raise UserError(f"{where}: expected an object, found {value!r}")
            section = _kind_of(kinds, value, where)
            for key in value:
                _refuse_other_kinds(kinds, section, key, where)
            return from_dict(section, value, where)
        return _convert(next(a for a in args if a is not type(None)), value, where)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where}: {value!r} is not one of {', '.join(map(repr, args))}")
        return value
    if origin is dict:
        if not isinstance(value, Mapping):
            raise UserError(f"{where}: expected an object, found {value!r}")
        return {str(key): _convert(args[1], item, f"{where}.{key}") for key, item in value.items()}
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise UserError(f"{where}: expected a list, found {value!r}")
        return tuple(_convert(args[0], item, where) for item in value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{where}: {value!r} is not {'a number' if hint in (int, float) else f'a {hint.__name__}'}")
    return value

"""Entities by their characters: reading and checking what files say about them. Imports without torch.

An entity is an object with `start`, `end` (exclusive) and `label`, as annotation tools export it, or a list of these
three. Offsets count characters (code points) from 0, as Python does.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from bertsmith.errors import UserError
from bertsmith.rows.columns import Row

LABELS = ("label", "type", "entity_group")  # keys of an entity's label: of annotation tools, ours, of `transformers`
# What is read or checked, and what predictions have beside it.
KEYS = ("start", "end", *LABELS, "text", "score", "word")
SPACE = " "
FORM = "an entity is an object with start, end and label"


class Entity(NamedTuple):
    """An entity of a text: its first character, the character after its last one, and its label."""

    start: int
    end: int
    label: str


def are_entities(value: Any) -> bool:
    """Whether a label is a list of entities (which may be empty), also as JSON in a text or as columns of a table."""
    value = _opened(value)
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, Mapping) or _is_triple(item) for item in value)
    return False


def entities_of(row: Row) -> list[Entity]:
    """The entities of a row in the order of its text, without spaces at their ends; one that cannot be is refused."""
    values = _opened(row.label)
    if not isinstance(values, (list, tuple)):
        raise UserError(f"{row.place}: the entities are {row.label!r}, not a list of start, end and label")
    found = sorted(_entity(value, row) for value in values)
    for one, other in pairwise(found):
        if other.start < one.end:
            raise UserError(
                f"{row.place}: the entities {_shown(one, row)} and {_shown(other, row)} overlap, and a character "
                "has one label: keep one of them, or train a second model for the other"
            )
    return found


def unread_keys(value: Any) -> list[str]:
    """The keys of a row's entities that are not read, each once."""
    values = _opened(value)
    objects = [item for item in values if isinstance(item, Mapping)] if isinstance(values, (list, tuple)) else []
    return list(dict.fromkeys(str(key) for item in objects for key in item if key not in KEYS))


def of_characters(characters: Sequence[str], tags: Iterable[str]) -> list[tuple[int, int, str]]:
    """The entities that tags of single characters mark, where every entity begins with B."""
    found: list[tuple[int, int, str]] = []
    for place, tag in enumerate(tags):
        head, dash, label = tag.partition("-")
        if dash and head == "B":
            found.append((place, place + 1, label))
        elif dash and head == "I":
            found[-1] = (found[-1][0], place + 1, label)
    return found


def are_characters(parts: Sequence[str]) -> bool:
    """Whether the words of a row are the characters of its text with its spaces, as KLUE-NER has them on the hub."""
    return SPACE in parts and all(len(part) == 1 for part in parts)


def _opened(value: Any) -> Any:
    """A label as a list: from JSON in a field of a text file, or from columns, as `datasets` stores objects."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return json.loads(value)
        except (json.JSONDecodeError, RecursionError):
            return value
    if isinstance(value, Mapping) and all(isinstance(each, (list, tuple)) for each in value.values()):
        return [dict(zip(value, each, strict=False)) for each in zip(*value.values(), strict=False)]
    return value


def _is_triple(item: Any) -> bool:
    return isinstance(item, (list, tuple)) and len(item) == 3 and all(type(place) is int for place in item[:2])


def _entity(value: Any, row: Row) -> Entity:
    if _is_triple(value):
        value = dict(zip(("start", "end", "label"), value, strict=True))
    if not isinstance(value, Mapping):
        raise UserError(f"{row.place}: the entity {value!r} is not an object with start, end and label")
    for name in ("start", "end"):
        if type(value.get(name)) is not int:
            given = f"the {name} {value[name]!r}, not a whole number" if name in value else f"no {name}"
            raise UserError(f"{row.place}: the entity {_cut(value)} has {given}; {FORM}")
    label = next((value[name] for name in LABELS if value.get(name) is not None), "")
    if not isinstance(label, (str, int)) or not str(label).strip():
        raise UserError(f"{row.place}: the entity {_cut(value)} has no label; {FORM}")
    entity = Entity(value["start"], value["end"], str(label).strip())
    _check_places(entity, row)
    _check_text(entity, value.get("text"), row)
    inside = row.text[entity.start : entity.end]
    if not inside.strip():
        raise UserError(f"{row.place}: the entity {_shown(entity, row)} holds only spaces; remove it")
    if "\n" in inside.strip() or "\r" in inside.strip():
        raise UserError(
            f"{row.place}: the entity {_shown(entity, row)} runs over a line break; give its lines as entities of "
            "their own, or write the text in one line"
        )
    start = entity.start + len(inside) - len(inside.lstrip())
    return Entity(start, start + len(inside.strip()), entity.label)


def _check_places(entity: Entity, row: Row) -> None:
    start, end, length = entity.start, entity.end, len(row.text)
    name = f"{row.place}: the entity {entity.label!r} from {start} to {end}"
    if start > end:
        raise UserError(f"{name} ends before it starts; exchange start and end")
    if start == end:
        raise UserError(f"{name} is empty; its end is the character after its last one, at least {start + 1}")
    if start < 0:
        raise UserError(f"{name} starts before the text; offsets count from 0")
    if end > length:
        raise UserError(f"{name} ends after the text, which has {length} characters{_other_unit(row.text, end)}")


def _other_unit(text: str, end: int) -> str:
    """The fix for an offset after the text's end: the unit that it seems to count."""
    for unit, size in (("UTF-16 units", len(text.encode("utf-16-le")) // 2), ("bytes", len(text.encode("utf-8")))):
        if len(text) < end <= size:
            return f"; the offsets seem to count {unit}: count characters"
    return "; offsets count characters from 0"


def _check_text(entity: Entity, text: Any, row: Row) -> None:
    """Refuse an entity whose own text is not that of its characters, and say what its offsets seem to count."""
    if not isinstance(text, str) or row.text[entity.start : entity.end].strip() == text.strip():
        return
    whole, encoded = row.text.encode("utf-16-le"), row.text.encode("utf-8")
    units = {
        "count UTF-16 units": whole[2 * entity.start : 2 * entity.end].decode("utf-16-le", "replace"),
        "count bytes": encoded[entity.start : entity.end].decode("utf-8", "replace"),
        "include the last character": row.text[entity.start : entity.end + 1],
    }
    meant = next((unit for unit, found in units.items() if found.strip() == text.strip()), "")
    why = f"its offsets seem to {meant}: count characters, with an exclusive end" if meant else "mend its offsets"
    raise UserError(f"{row.place}: the entity {text!r} is {_shown(entity, row)} in the text; {why}")


def _shown(entity: Entity, row: Row) -> str:
    return f"{_cut(row.text[entity.start : entity.end])} ({entity.label}, {entity.start} to {entity.end})"


def _cut(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"

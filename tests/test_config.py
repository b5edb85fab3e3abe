"""Configurations: sections of several kinds, and upgrades of the values that older versions wrote."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from bertsmith.config import dotted_keys, from_dict, load, override, to_dict
from bertsmith.errors import UserError
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe


@dataclass(frozen=True)
class Circle:
    kind: Literal["circle"] = "circle"
    radius: float = 1.0


@dataclass(frozen=True)
class Box:
    kind: Literal["box"] = "box"
    width: int = 2
    height: int = 3


@dataclass(frozen=True)
class Pen:
    colour: str = "black"
    dashes: tuple[int, ...] = (1, 2)


def radius_into_shape(values):
    if "radius" not in values:
        return values
    rest = {key: value for key, value in values.items() if key != "radius"}
    return {**rest, "shape": {"kind": "circle", "radius": values["radius"]}}


@dataclass(frozen=True)
class Drawing:
    name: str
    shape: Circle | Box = field(default_factory=Circle)
    pen: Pen = field(default_factory=Pen)
    UPGRADE = staticmethod(radius_into_shape)


def test_a_section_is_read_by_its_kind() -> None:
    for shape in (Circle(radius=2.0), Box(width=5)):
        drawing = Drawing("a", shape)
        assert from_dict(Drawing, to_dict(drawing)) == drawing
    assert from_dict(Drawing, {"name": "a", "shape": {"kind": "box", "height": 7}}).shape == Box(height=7)


def test_set_changes_a_field_or_the_kind() -> None:
    drawing = Drawing("a", Circle(radius=2.0))
    assert override(drawing, ["shape.radius=3"]).shape == Circle(radius=3.0)
    assert override(drawing, ["shape.kind=circle"]).shape == Circle(radius=2.0)  # the other fields are kept
    assert override(drawing, ["shape.kind=box"]).shape == Box()
    assert override(drawing, ["shape.width=9", "shape.kind=box"]).shape == Box(width=9)  # kinds are set before fields
    assert dotted_keys(Drawing) == [
        "name", "shape.kind", "shape.radius", "shape.width", "shape.height", "pen.colour", "pen.dashes"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape.kind=cone", "--set shape.kind: 'cone' is not a kind; one of: circle, box"),
        ("shape.kind=3", "3 is not a kind; one of: circle, box"),
        (
            "shape.width=3",
            "the kind circle has no setting 'width' .circle has kind, radius; box has kind, width, height",
        ),
        ("shape.radius=wide", "--set shape.radius: 'wide' is not a number"),
        ("shape=box", "--set shape: not a single setting; one of: shape.kind, shape.radius"),
        ("radius=3", "--set radius: unknown setting; did you mean 'shape.radius'"),
        ("shape.kind.x=3", "not a single setting"),
    ],
)
def test_errors_name_the_kinds_and_their_fields(change: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        override(Drawing("a"), [change])


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ({"radius": 1}, "shape: None is not a kind; one of: circle, box"),
        ({"kind": "cone"}, "shape: 'cone' is not a kind; one of: circle, box"),
        ({"kind": "box", "radius": 1}, "the kind box has no setting 'radius' .circle has kind, radius; box has"),
        ("box", "shape: expected an object, found 'box'"),
    ],
)
def test_sections_without_a_valid_kind_are_refused(shape: object, words: str) -> None:
    with pytest.raises(UserError, match=words):
        from_dict(Drawing, {"name": "a", "shape": shape})


def test_values_of_an_older_version_are_upgraded_in_one_place() -> None:
    old = {"name": "a", "radius": 4.0, "pen": {"colour": "red"}}
    assert from_dict(Drawing, old) == Drawing("a", Circle(radius=4.0), Pen("red"))
    with pytest.raises(UserError, match="unknown setting"):
        override(Drawing("a"), ["radius=3"])


def test_a_value_out_of_range_is_reported_with_its_file(tmp_path: Path) -> None:
    path, values = tmp_path / "config.json", to_dict(recipe("quickstart"))
    values["data"]["masking"]["random_share"] = 1.1
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}: data\.masking\.random_share must be at least 0"):
        load(PretrainConfig, path)

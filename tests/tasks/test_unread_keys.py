"""Keys of entities that are not read are named in a note, and what is read or written here is not."""

import json
from pathlib import Path

import pytest

from bertsmith.rows.columns import Columns
from bertsmith.tasks.reading import read_task
from bertsmith.tasks.task import find_task


def read(path: Path, *entities: object) -> int:
    path.write_text("\n".join(json.dumps({"text": "Ada met Bo.", "entities": [each]}) for each in entities))
    return len(list(read_task(find_task("tag"), path, Columns(), labelled=True)))


def test_unread_keys_are_named_once_with_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entity = {"start": 0, "end": 3, "label": "PER"}
    assert read(tmp_path / "t.jsonl", entity, {**entity, "lable": "ORG"}, {**entity, "lable": "ORG", "id": 7}) == 3
    printed = " ".join(capsys.readouterr().err.split())
    assert printed.count("note:") == 1
    assert f"'lable' ({tmp_path}/t.jsonl, line 2), 'id' ({tmp_path}/t.jsonl, line 3)" in printed


def test_keys_that_are_read_or_that_predictions_have_are_not_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = {"type": "PER", "text": "Ada", "start": 0, "end": 3, "score": 0.9}
    theirs = {"entity_group": "PER", "word": "ada", "start": 0, "end": 3, "score": 0.9}
    assert read(tmp_path / "t.jsonl", ours, theirs, [0, 3, "PER"]) == 3
    assert "note" not in capsys.readouterr().err

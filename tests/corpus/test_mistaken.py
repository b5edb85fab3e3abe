"""Tables and JSON lists are refused with a command that converts them; text that only resembles them is read."""

import bz2
import csv
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith.corpus.build import BuildConfig, build_corpus
from bertsmith.corpus.readers import Documents
from bertsmith.errors import UserError

ROWS = [{"id": str(n), "text": f'A text, "the {n}th", with a comma.\nA second line, 값.'} for n in range(30)]


def as_table(path: Path, delimiter: str) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ["id", "text"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(ROWS)


TABLES = {"a.csv": ",", "b.tsv": "\t", "c.txt": ",", "d": "\t", "e.md": ";"}


@pytest.mark.parametrize("name", [*TABLES, "f.json", "g.jsonl", "h.txt", "i j.json"])
def test_the_command_of_the_error_converts_the_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name in TABLES:
        as_table(path, TABLES[name])
    else:
        path.write_text(json.dumps(ROWS, indent=None if name == "h.txt" else 2), encoding="utf-8")
    with pytest.raises(UserError, match=r"is (a table|one JSON list), and a corpus is plain text") as error:
        list(Documents.of([path]))
    assert str(error.value).startswith(f"{path} is ")
    (command,) = re.findall("convert it: (python .*)", str(error.value))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(command, shell=True, check=True, env=environment)
    (lines,) = tmp_path.glob("*-lines.jsonl")
    assert list(Documents.of([lines])) == [row["text"].split("\n") for row in ROWS]


@pytest.mark.parametrize("name", ["a.csv.gz", "b.json.bz2"])
def test_compressed_tables_and_lists_have_advice_without_a_command(name: str, tmp_path: Path) -> None:
    packed = gzip.compress(b"id,text\n1,a\n") if name.endswith("gz") else bz2.compress(json.dumps(ROWS).encode())
    (tmp_path / name).write_bytes(packed)
    with pytest.raises(UserError, match=r"; write its rows as JSON objects, one a line, into a \.jsonl file"):
        list(Documents.of([tmp_path / name]))


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world.\nThis, that.\nMe, you.\nHere, there.\n",  # no names without spaces
        "red,green\nA line with one, two, three commas.\nAnother line.\nAnd one, more.\n",
        "red,green\nblue,yellow\n",  # too few lines
        "[1] A footnote.\n[2] Another one.\n",
        '{"text": "a row, as a text"}\n',
        "{ is a brace.\n",
        "{\n}\n",
        "BZh and PAR1 are letters.\n",
        "red,green\na\rb,c\nA line.\nAnother line.\n",
    ],
)
def test_text_that_resembles_a_table_or_a_list_is_read(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert list(Documents.of([tmp_path / "a.txt"])) == [text.strip().split("\n")]  # a paragraph a line


def test_they_are_skipped_with_skip_bad(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    as_table(tmp_path / "a.txt", ",")
    (tmp_path / "b.txt").write_text("A plain text.\n")
    (tmp_path / "c.txt.gz").write_text("A text that is not compressed.\n")
    config = BuildConfig(skip_bad=True)
    corpus = build_corpus([tmp_path], world / "tok", tmp_path / "out", workers=1, config=config)
    assert corpus.manifest.documents == 1
    found = f"skipped 2 bad record(s) or file(s), the first: {tmp_path / 'a.txt'} is a table"
    assert found in capsys.readouterr().err

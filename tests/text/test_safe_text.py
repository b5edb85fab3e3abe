"""NUL characters and lone surrogates of any input are replaced and counted with a note."""

import json
import os
from pathlib import Path

import pytest

from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.readers import Documents
from bertsmith.extend import extend
from bertsmith.inference.predictor import Predictor
from bertsmith.rows.columns import Columns, read_rows
from bertsmith.rows.conll import read_conll
from bertsmith.text.safe import SafeTexts, safe_text
from bertsmith.text.tokenizer import Tokenizer

BAD = "a\0list\ud83d of\udcff 😀 items"
GOOD = "a\ufffdlist\ufffd of\ufffd 😀 items"


def test_every_bad_character_is_replaced_in_place() -> None:
    assert safe_text(BAD) == GOOD
    for text in ("plain", "안녕 😀", ""):
        assert safe_text(text) is text or safe_text(text) == text


def test_nested_values_are_made_safe_and_counted(capfd) -> None:
    safe = SafeTexts()
    assert safe.value({"a\0": [BAD, 3, None, ("b\0",)]}, "row 7") == {"a\ufffd": [GOOD, 3, None, ("b\ufffd",)]}
    safe.text("c\0", "row 8")
    safe.say()
    assert "replaced 6 characters" in (stderr := capfd.readouterr().err)
    assert "the first in row 7" in stderr
    SafeTexts().say()
    assert not capfd.readouterr().err


def test_bad_characters_give_no_tokens(world: Path) -> None:
    tokenizer = Tokenizer.load(world / "tok")
    assert tokenizer.encode([BAD]) == tokenizer.encode(["alist of 😀 items"])
    assert [e.ids for e in tokenizer.encode_aligned([BAD])] == tokenizer.encode([GOOD])


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt"])
def test_rows_are_made_safe_with_a_note(tmp_path: Path, capfd, name: str) -> None:
    rows = [{"text": "first", "label": "x"}, {"text": BAD, "label": "y\0"}]
    content = {
        "rows.jsonl": "\n".join(map(json.dumps, rows)),
        "rows.json": json.dumps(rows),
        "rows.csv": "text,label\nfirst,x\na\0list,y\n",
        "rows.txt": "first\na\0list\n",
    }[name]
    (tmp_path / name).write_text(content, encoding="utf-8")
    found = [row.text for row in read_rows(tmp_path / name, Columns(), labelled=False)]
    assert found == ["first", GOOD if "json" in name else "a\ufffdlist"]
    assert f"replaced {4 if 'json' in name else 1} character" in (stderr := capfd.readouterr().err)
    assert f"the first in {tmp_path / name}, " in stderr


def test_words_with_tags_are_made_safe(tmp_path: Path, capfd) -> None:
    (tmp_path / "a.conll").write_text("first O\na\0b O\n\n", encoding="utf-8")
    assert [row.parts for row in read_conll(tmp_path / "a.conll", labelled=True)] == [("first", "a\ufffdb")]
    assert "replaced 1 character that" in capfd.readouterr().err


def test_a_corpus_is_made_safe_with_a_note(tmp_path: Path, world: Path, capfd) -> None:
    (tmp_path / "a.txt").write_bytes(b"a list\n\na\0list of items\n")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": BAD}) + "\n")
    documents = Documents.of([tmp_path])
    assert list(documents) == [["a list"], ["a\ufffdlist of items"], [GOOD]]
    assert documents.read_errors.replaced == 4
    build_corpus([tmp_path], world / "tok", tmp_path / "out", workers=1)
    assert "replaced 4 invalid character(s)" in (stderr := capfd.readouterr().err)
    assert f"the first in {tmp_path / 'a.txt'}" in stderr


def test_texts_given_from_python_are_made_safe(world: Path, capfd) -> None:
    predictor = Predictor.load(world / "run")
    masked = "the [MASK] of a\0 list"
    assert predictor.fill(masked) == predictor.fill("the [MASK] of a list")


@pytest.mark.parametrize("command", ["fill", "view"])
def test_arguments_that_are_not_utf8(world: Path, tmp_path: Path, run_command, command: str) -> None:
    text = os.fsdecode(b"the [MASK] of a \xff\xed\xa0\x80 list")
    out = ["--out", str(tmp_path / "page.html")] if command == "view" else []
    code, shown, stderr = run_command(command, world / "run", text, *out, "--json")
    assert not code
    assert "replaced 4 characters" in stderr
    assert command == "view" or json.loads(shown)["text"] == "the [MASK] of a \ufffd\ufffd\ufffd\ufffd list"


def test_a_path_that_is_not_utf8_is_named(run_command) -> None:
    code, _, stderr = run_command("corpus", "doctor", os.fsdecode(b"/\xff/nowhere"))
    assert (code, stderr) == (2, "error: no such file: /\\udcff/nowhere\n")


def test_words_for_a_vocabulary_are_made_safe(world: Path, tmp_path: Path, capfd) -> None:
    facts = extend(world / "tok", tmp_path / "out", words=["mono\ud83dtonic", "isoto\0pic"])
    assert facts["words"] == ["monotonic", "isotopic"]
    assert "replaced 2 characters" in (stderr := capfd.readouterr().err)
    assert "the first in the given words" in stderr

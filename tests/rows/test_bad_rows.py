"""Unusual labelled files are read where that is safe; bad ones are refused with file and line before training."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.rows.columns import Columns, Row, read_rows
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.prediction_files import score_file
from bertsmith.tasks.reading import guessed_columns, read_task, training_rows
from bertsmith.tasks.task import find_task

A, B = {"text": "a", "label": "x"}, {"text": "b", "label": "y"}
GUESS = Columns()
GOOD_QUESTION = {"question": "q", "context": "the fox", "answers": {"text": ["fox"], "answer_start": [4]}}


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


# task, file name, content, pattern of the error message
REFUSED = {
    "no label column": ("classify", "t.csv", "id,text\n1,a\n", "t.csv: which column is the label.* are: id, text"),
    "no second text": (
        "pair",
        "t.csv",
        "sentence1,label\na,x\n",
        "which column is the pair.* columns are: sentence1, label",
    ),
    "two columns of one name": (
        "classify",
        "t.csv",
        "text,text,label\na,b,x\n",
        "line 1: two columns are named 'text'",
    ),
    "no label in a row": ("classify", "t.csv", "text,label\na,x\nb,\n", "line 3: no label in column 'label'"),
    "null label": ("classify", "t.jsonl", lines(A, {"text": "b", "label": None}), "line 2: nothing in column 'label'"),
    "NaN label": ("classify", "t.jsonl", lines(A, {"text": "b", "label": float("nan")}), "line 2: no label"),
    "NaN target": ("regress", "t.csv", "text,label\na,1\nb,nan\n", "line 3: label 'nan' is not a finite number"),
    "infinite target": ("regress", "t.csv", "text,label\na,1\nb,inf\n", "line 3: label 'inf' is not a finite number"),
    "word as target": ("regress", "t.csv", "text,label\na,1\nb,two\n", "line 3: label 'two' is not a number"),
    "list as target": ("regress", "t.jsonl", lines({"text": "a", "label": [1]}), "line 1: label .* is not a number"),
    "empty text": ("classify", "t.csv", "text,label\na,x\n  ,y\n", "line 3: the text in column 'text' is empty"),
    "mixed types": (
        "classify",
        "t.jsonl",
        lines(A, {"text": "b", "label": 1}),
        "line 2: the label 1 is of another type",
    ),
    "list and word": ("classify", "t.jsonl", lines(A, {"text": "b", "label": ["x"]}), "of another type than 'x'"),
    "one label": ("classify", "t.csv", "text,label\na,x\nb,x\n", "all rows have the label 'x'"),
    "numbers as labels": (
        "classify",
        "t.jsonl",
        lines(*({"text": "a", "label": i / 7} for i in range(1, 7))),
        "use the task regress",
    ),
    "too many fields": (
        "classify",
        "t.csv",
        "text,label\na,x\nb, c,y\n",
        "line 3: more fields .* 3 instead of 2; .* ',' in it",
    ),
    "a sheet": ("classify", "t.xlsx", "PK", "unknown kind of file '.xlsx'; .*; save the sheet as CSV UTF-8"),
    "decimal comma": (
        "regress",
        "t.csv",
        'text,label\na,1.5\nb,"2,5"\n',
        "line 3: .*; write the decimal point as a point",
    ),
    "words a line": ("classify", "t.conll", "a O\n", "unknown kind of file '.conll'; .* for the task tag"),
    "too few fields": ("classify", "t.tsv", "text\tlabel\na\tx\nb\n", "line 3: nothing in column 'label'"),
    "open quote": ("classify", "t.csv", 'text,label\na,x\n"b,y\nc,x\n', "line 3: unexpected end of data"),
    "not JSON": ("classify", "t.jsonl", lines(A) + "{text: b}\n", "line 2: not valid JSON"),
    "list instead of an object": ("classify", "t.jsonl", lines(A) + "[1]\n", "line 2: expected an object, found list"),
    "broken JSON file": ("answer", "t.json", '{"data": [\n{"a": 1},\n}', "line 3: not valid JSON"),
    "JSON without rows": ("answer", "t.json", '{"version": 1, "data": 3}', "expected a list of objects"),
    "text as parquet": ("classify", "t.parquet", "text", "is not a parquet file"),
    "unknown kind": ("classify", "t.xlsx", "text", "unknown kind of file '.xlsx'"),
    "empty": ("classify", "t.csv", "", "is empty"),
    "header alone": ("classify", "t.tsv", "text\tlabel\n", "is empty"),
    "answer not in the context": (
        "answer",
        "t.jsonl",
        lines(GOOD_QUESTION, {**GOOD_QUESTION, "answers": {"text": ["wolf"], "answer_start": [0]}}),
        "line 2: the answer 'wolf' is not in its context",
    ),
    "answers without places": (
        "answer",
        "t.jsonl",
        lines({**GOOD_QUESTION, "answers": {"text": ["fox"], "answer_start": []}}),
        "line 1: 1 answers and 0 places",
    ),
    "answer_start is not a number": (
        "answer",
        "t.jsonl",
        lines({**GOOD_QUESTION, "answers": [{"text": "fox", "answer_start": "four"}]}),
        "line 1: answer_start 'four' is not a number",
    ),
    "answers are a number": ("answer", "t.jsonl", lines({**GOOD_QUESTION, "answers": 4}), "line 1: the answers are 4"),
    "no context": ("answer", "t.jsonl", lines({"question": "q", "answers": []}), "which column is the pair"),
    "null context": (
        "answer",
        "t.jsonl",
        lines({**GOOD_QUESTION, "context": None}),
        "line 1: nothing in column 'context'",
    ),
    "an empty ending": ("choose", "t.csv", "text,ending0,ending1,label\na,b,,0\n", "line 2: an ending is empty"),
    "no endings": ("choose", "t.csv", "text,label\na,0\n", "which column is the endings"),
    "CP949": (
        "classify",
        "t.tsv",
        "text\tlabel\na\tx\n좋다\ty\n".encode("cp949"),
        "line 3: this is not UTF-8, .*; it looks like CP949; convert it: iconv -f CP949 -t UTF-8",
    ),
    "Latin-1": ("classify", "t.csv", "text,label\na café,x\n".encode("latin-1"), "line 2: .* looks like CP1252"),
    "CP949 in a column file": ("tag", "t.conll", "a O\n한국 B-X\n".encode("cp949"), "line 2: this is not UTF-8"),
    "CP949 in JSON lines": ("classify", "t.jsonl", '{"text": "좋다"}\n'.encode("cp949"), "line 1: this is not UTF-8"),
    "CP949 in JSON": ("answer", "t.json", '[\n{"question": "좋"}]'.encode("cp949"), "line 2: this is not UTF-8"),
    "UTF-16": ("classify", "t.csv", "text,label\na,x\n".encode("utf-16"), "line 1: this is not UTF-8"),
    "UTF-16 without a mark": (
        "classify",
        "t.csv",
        "text,label\na,x\n".encode("utf-16-le"),
        "line 1: this is not UTF-8",
    ),
    "compressed": (
        "classify",
        "t.tsv",
        gzip.compress(b"text\tlabel\na\tx\n"),
        "is a gzip file, whatever its name says; unpack it",
    ),
    "header twice": ("classify", "t.csv", "text,label\na,x\ntext,label\nb,y\n", "line 3: the header stands here again"),
    "empty second text": (
        "pair",
        "t.csv",
        "text1,text2,label\na,b,x\na,,y\n",
        "line 3: the text in column 'text2' is em",
    ),
    "object as text": ("classify", "t.jsonl", lines(A, {**B, "text": {"en": "b"}}), "line 2: .* 'text' is not a text"),
    "NaN as text": (
        "classify",
        "t.jsonl",
        lines(A, {**B, "text": float("nan")}),
        "line 2: nan in column 'text' is not",
    ),
    "object as ending": (
        "choose",
        "t.jsonl",
        lines({"text": "a", "endings": ["x", {"b": 1}], "label": 0}),
        "line 1: .* in column 'endings' is not a text",
    ),
    "null among labels": (
        "classify",
        "t.jsonl",
        lines({"text": "a", "label": ["x", None]}),
        "line 1: None is not a label",
    ),
    "list among labels": (
        "classify",
        "t.jsonl",
        lines({"text": "a", "label": [["x"]]}),
        "line 1: the label .* is not one",
    ),
    "null among tags": ("tag", "t.jsonl", lines({"words": ["a"], "tags": [None]}), "line 1: None is not a tag"),
    "target of 400 digits": (
        "regress",
        "t.jsonl",
        '{"text": "a", "label": 1' + "0" * 400 + "}",
        "line 1: .* not a finite number",
    ),
    "huge target": ("regress", "t.csv", "text,label\na,1\nb,1e30\n", "line 3: label '1e30' is too large to learn"),
    "infinite answer_start": (
        "answer",
        "t.jsonl",
        lines({**GOOD_QUESTION, "answers": [{"text": "fox", "answer_start": float("inf")}]}),
        "line 1: answer_start inf is not a number",
    ),
    "paragraphs are words": (
        "answer",
        "t.json",
        '{"data": [{"paragraphs": ["a"]}]}',
        "item 1: 'paragraphs' is not a list",
    ),
    "no list of questions": (
        "answer",
        "t.json",
        '{"data": [{"paragraphs": [{"qas": null}]}]}',
        "item 1: 'qas' is not a list of objects",
    ),
    "deep JSON": ("answer", "t.json", "[" * 99999, "not valid JSON: too deep"),
    "deep JSON lines": ("classify", "t.jsonl", lines(A) + "[" * 99999, "line 2: not valid JSON: too deep"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_files_are_refused_with_file_and_line(tmp_path: Path, case: str) -> None:
    name, file, content, says = REFUSED[case]
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    with pytest.raises(UserError, match=says) as caught:
        learn(find_task(name), tmp_path / file)
    if "all rows" not in says:
        assert file in str(caught.value)


def test_one_column_for_two_roles_is_refused_with_another_one(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label\na,x\nb,y\n")
    with pytest.raises(UserError, match=r"cannot be both text and label; .* --text text --label label$"):
        learn(find_task("classify"), tmp_path / "t.csv", Columns(text="text", label="text"))


def learn(task, path: Path, columns: Columns = GUESS) -> list[Row]:
    """Read and check training rows, up to encoding."""
    columns = guessed_columns(task, path, columns)
    rows, _ = training_rows(task, [path], columns)
    head = KINDS[task.head].head_for(task, rows)
    for row in rows:
        KINDS[head.kind].target(row, head)
    return rows


@pytest.mark.parametrize(
    ("names", "values", "says"),
    [
        (["text", "label", "label"], [["a", "b"], ["x", "y"], ["y", "x"]], "two columns are named 'label'"),
        (["text", "label"], [[b"a", b"b"], ["x", "y"]], "row 1: b'a' in column 'text' is not a text"),
        (["text", "label"], [["a", "b"], [b"x", b"y"]], "row 1: the label b'x' is not one value"),
    ],
)
def test_bad_parquet_files_are_refused(tmp_path: Path, names, values, says: str) -> None:
    pq.write_table(pa.table([pa.array(column) for column in values], names=names), tmp_path / "t.parquet")
    with pytest.raises(UserError, match=says):
        learn(find_task("classify"), tmp_path / "t.parquet")


def test_damaged_parquet_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    texts = [f"a text of some length {i}" for i in range(500)]
    pq.write_table(pa.table({"text": texts, "label": ["x", "y"] * 250}), path, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[60:400] = b"\xff" * 340
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"t\.parquet, after row 0: the file is damaged"):
        learn(find_task("classify"), path)


def test_an_empty_answer_means_no_answer(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(lines({**GOOD_QUESTION, "answers": {"text": [""], "answer_start": [0]}}))
    assert [row.label for row in learn(find_task("answer"), tmp_path / "t.jsonl")] == [[]]


def test_duplicate_question_ids_are_refused_before_training(world: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(lines({**GOOD_QUESTION, "id": "1"}, {**GOOD_QUESTION, "id": "1"}))
    files = {"data": tmp_path / "t.jsonl", "dev": tmp_path / "t.jsonl"}
    with pytest.raises(UserError, match="line 2: a second question has the id '1'"):
        finetune(FinetuneConfig("answer"), world / "run", **files, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_null_odds_must_be_numbers(tmp_path: Path) -> None:
    (tmp_path / "dev.jsonl").write_text(lines({**GOOD_QUESTION, "id": "1"}))
    (tmp_path / "answers.json").write_text('{"1": "fox"}')
    (tmp_path / "odds.json").write_text('{"1": "low"}')
    with pytest.raises(UserError, match="null odds has 'low' for '1', not a number"):
        score_file(tmp_path / "answers.json", "squad2", tmp_path / "dev.jsonl", null_odds=tmp_path / "odds.json")


def test_misspelt_column_is_an_error_instead_of_a_guess(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label\na,x\n")
    with pytest.raises(UserError, match=r"no column 'txet'; did you mean 'text'\?; the columns are: text, label"):
        learn(find_task("classify"), tmp_path / "t.csv", Columns(text="txet"))
    with pytest.raises(UserError, match="column 'text' cannot be both text and label"):
        learn(find_task("classify"), tmp_path / "t.csv", Columns(label="text"))


# name, content, the texts and labels that are read
READ = {
    "byte order mark": ("t.csv", "\ufefftext,label\na,x\n", [("a", "x")]),
    "Windows line ends": ("t.tsv", "text\tlabel\r\na\tx\r\nb\ty\r\n", [("a", "x"), ("b", "y")]),
    "Windows line ends in CSV": ("t.csv", 'text,label\r\n"a\r\nb",x\r\n', [("a\r\nb", "x")]),
    "blank lines": ("t.tsv", "text\tlabel\n\na\tx\n\n", [("a", "x")]),
    "a stray quote in TSV": ("t.tsv", 'text\tlabel\n"a b\tx\nc"\ty\n', [('"a b', "x"), ('c"', "y")]),
    "inner quotes in TSV": ("t.tsv", 'text\tlabel\nhe "said" so\tx\n', [('he "said" so', "x")]),
    "a quoted field in TSV": ("t.tsv", 'text\tlabel\n"he ""said"" so"\tx\n', [('he "said" so', "x")]),
    "a tab in quotes": ("t.tsv", 'text\tlabel\n"a\tb"\tx\nc\ty\n', [("a\tb", "x"), ("c", "y")]),
    "a line break in quotes": ("t.tsv", 'text\tlabel\n"a\nb"\tx\nc\ty\n', [("a\nb", "x"), ("c", "y")]),
    "a line break in the last field": ("t.tsv", 'label\ttext\nx\t"a\nb"\ny\tc\n', [("a\nb", "x"), ("c", "y")]),
    "two quoted texts in TSV": ("t.tsv", 'text\tlabel\n"a" or "b"\tx\n', [('"a" or "b"', "x")]),
    "commas in quotes": ("t.csv", 'text,label\n"a, b",x\n', [("a, b", "x")]),
    "guessed names": ("t.csv", "id,review,sentiment\n1,a,x\n", [("a", "x")]),
    "a list in JSON": ("t.json", json.dumps([A, B], indent=2), [("a", "x"), ("b", "y")]),
    "JSON lines as .json": ("t.json", lines(A, B), [("a", "x"), ("b", "y")]),
}


@pytest.mark.parametrize("case", READ)
def test_unusual_files_are_read(tmp_path: Path, case: str) -> None:
    file, content, expected = READ[case]
    (tmp_path / file).write_bytes(content.encode("utf-8"))
    rows = list(read_task(find_task("classify"), tmp_path / file, Columns(), labelled=True))
    assert [(row.text, row.label) for row in rows] == expected


def test_line_numbers_are_right_after_multi_line_fields(tmp_path: Path) -> None:
    for name, tab in (("t.csv", ","), ("t.tsv", "\t")):
        (tmp_path / name).write_text(f'text{tab}label\n"a\nb"{tab}x\nc{tab}y\n')
        places = [row.place for row in read_rows(tmp_path / name, Columns(), labelled=True)]
        assert [place.rsplit(" ", 1)[1] for place in places] == ["2", "4"]


def test_guessed_columns_are_printed(tmp_path: Path, capfd) -> None:
    (tmp_path / "t.csv").write_text("review,sentiment\na,x\n")
    guessed_columns(find_task("classify"), tmp_path / "t.csv", Columns())
    assert "columns: text = 'review', label = 'sentiment'" in capfd.readouterr().err


def test_empty_texts_are_read_for_prediction(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,label\n,x\na,\n")
    rows = list(read_task(find_task("classify"), tmp_path / "t.csv", Columns(), labelled=False))
    assert [row.text for row in rows] == ["", "a"]


def test_long_texts_are_truncated_and_counted(world: Path, tmp_path: Path, capfd) -> None:
    (tmp_path / "t.csv").write_text("text,label\n" + f"{'word ' * 99},x\nshort,y\n")
    config = override(FinetuneConfig("classify"), ["train.steps=1", "data.max_length=16"])
    finetune(config, world / "run", tmp_path / "t.csv", tmp_path / "run", dev=tmp_path / "t.csv", device="cpu")
    err = " ".join(capfd.readouterr().err.split())
    assert "1 of 2 texts did not fit whole into 16 tokens" in err
    assert "1 dev and test texts did not fit whole into 16 tokens" in err


@pytest.mark.parametrize(
    ("name", "train", "dev", "says"),
    [
        ("classify", lines(A, B), lines({"text": "a", "label": "z"}), "dev.jsonl, line 1: label 'z' is not one of"),
        (
            "regress",
            lines({"text": "a", "label": 1}),
            lines({"text": "a", "label": "z"}),
            "dev.jsonl, line 1: label 'z'",
        ),
        (
            "tag",
            lines({"words": ["a", "b"], "tags": ["O", "B-X"]}),
            lines({"words": ["a"], "tags": ["B-Y"]}),
            "dev.jsonl, line 1: label 'B-Y' is not one of",
        ),
        (
            "choose",
            lines({"text": "a", "endings": ["x", "y"], "label": 0}),
            lines({"text": "a", "endings": ["x", "y", "z"], "label": 0}),
            "dev.jsonl, line 1: 3 endings, where the others have 2",
        ),
    ],
)
def test_dev_rows_are_checked_before_training(world, tmp_path: Path, name, train, dev, says) -> None:
    (tmp_path / "train.jsonl").write_text(train)
    (tmp_path / "dev.jsonl").write_text(dev)
    files = {"data": tmp_path / "train.jsonl", "dev": tmp_path / "dev.jsonl"}
    with pytest.raises(UserError, match=says):
        finetune(FinetuneConfig(name), world / "run", **files, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        ("a text of five words\nand another\n", ["a text of five words", "and another"]),
        ("one line alone\n", ["one line alone"]),
        ("EU NNP B-ORG\nrejects VBZ O\n\nPeter NNP B-PER\n", ["EU rejects", "Peter"]),
        ("EU\nrejects\n\nPeter\n", ["EU rejects", "Peter"]),
    ],
)
def test_texts_to_tag_are_not_read_as_one_word_per_line(tmp_path: Path, content: str, texts: list[str]) -> None:
    """Otherwise all words but the first of each line would be dropped silently."""
    (tmp_path / "t.txt").write_text(content)
    rows = read_task(find_task("tag"), tmp_path / "t.txt", Columns(), labelled=False)
    assert [row.text for row in rows] == texts


@pytest.mark.parametrize("name", ["rows.json", "rows.conll"])
def test_file_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch, name: str) -> None:
    path, real = tmp_path / name, Path.open
    path.write_text('[{"text": "a", "label": "x"}]\n' if name == "rows.json" else "a B-X\n\nb O\n")
    task = find_task("classify" if name == "rows.json" else "tag")

    def rows() -> list[Row]:
        return list(read_task(task, path, Columns(), labelled=True))

    before = rows()

    def opened(self: Path, mode: str = "r", **options):
        if mode == "rb" and self == path:
            os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))
        return real(self, mode, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", opened)
        with pytest.raises(UserError, match=rf"{name} was changed while it was read"):
            rows()
    assert rows() == before

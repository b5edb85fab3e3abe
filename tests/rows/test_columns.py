"""Columns and separators are guessed from names and contents; one error asks for all that cannot be guessed."""

import json
from pathlib import Path

import pytest

from bertsmith.errors import UserError
from bertsmith.rows.columns import Columns, join_names, split_names
from bertsmith.tasks.kinds import KINDS
from bertsmith.tasks.reading import guessed_columns, read_task, training_rows
from bertsmith.tasks.task import find_task

WORDS = "a small file of words that people wrote".split()
N = 24


def text(i: int) -> str:
    return f"{WORDS[i % 8]} number {i} is in a sentence of some length"


def table(columns: dict[str, list], separator: str = ",") -> str:
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    return "".join(separator.join(map(str, row)) + "\n" for row in rows)


TEXTS = [text(i) for i in range(N)]
OTHERS = [f"another {text(i)} and more" for i in range(N)]
CLASSES = ["red", "green", "blue"] * (N // 3)
NUMBERS = [i / 7 for i in range(N)]
UNIQUE = [f"id-{i:04}" for i in range(N)]
# task, columns of the file, expected columns
GUESSED = {
    "question, category": (
        "classify",
        {"question": TEXTS, "category": CLASSES},
        {"text": "question", "label": "category"},
    ),
    "label recognised by a word": (
        "classify",
        {"plot": TEXTS, "main_genre": CLASSES},
        {"text": "plot", "label": "main_genre"},
    ),
    "camel case": ("classify", {"Body": TEXTS, "ticketType": CLASSES}, {"text": "Body", "label": "ticketType"}),
    "label with few values": (
        "classify",
        {"uid": UNIQUE, "message": TEXTS, "x": CLASSES},
        {"text": "message", "label": "x"},
    ),
    "the longest text": (
        "classify",
        {"headline": [f"news {i}" for i in range(N)], "body": TEXTS, "topic": CLASSES},
        {"text": "body", "label": "topic"},
    ),
    "long id": (
        "classify",
        {"code": [f"{i:060}x" for i in range(N)], "body": TEXTS, "topic": CLASSES},
        {"text": "body", "label": "topic"},
    ),
    "Korean names": ("classify", {"문장": TEXTS, "분류": CLASSES}, {"text": "문장", "label": "분류"}),
    "annotators' votes": (
        "pair",
        {"premise": TEXTS, "hypothesis": OTHERS, "label1": CLASSES, "gold_label": CLASSES[::-1], "label5": CLASSES},
        {"text": "premise", "pair": "hypothesis", "label": "gold_label"},
    ),
    "votes are not the label": (
        "pair",
        {"premise": TEXTS, "hypothesis": OTHERS, "label2": CLASSES, "consensus_label": CLASSES, "label5": CLASSES},
        {"text": "premise", "pair": "hypothesis", "label": "consensus_label"},
    ),
    "two texts": (
        "pair",
        {"claim": TEXTS, "evidence": OTHERS, "verdict": CLASSES},
        {"text": "claim", "pair": "evidence"},
    ),
    "a and b": (
        "regress",
        {"sentence_a": TEXTS, "sentence_b": OTHERS, "similarity": NUMBERS},
        {"text": "sentence_a", "pair": "sentence_b", "label": "similarity"},
    ),
    "q1 and q2": ("pair", {"q1": TEXTS, "q2": OTHERS, "same": CLASSES}, {"text": "q1", "pair": "q2", "label": "same"}),
    "the only numbers": (
        "regress",
        {"id": list(range(N)), "essay": TEXTS, "points": NUMBERS},
        {"text": "essay", "pair": "", "label": "points"},
    ),
    "lettered endings": (
        "choose",
        {"stem": TEXTS, "A": OTHERS, "B": OTHERS, "C": OTHERS, "D": OTHERS, "correct": list("ABCD") * 6},
        {"text": "stem", "endings": "A,B,C,D", "label": "correct"},
    ),
    "numbered endings": (
        "choose",
        {"stem": TEXTS, "op1": OTHERS, "op2": OTHERS, "cop": [0, 1] * 12},
        {"text": "stem", "endings": "op1,op2", "label": "cop"},
    ),
}


@pytest.mark.parametrize("case", GUESSED)
def test_columns_are_guessed(tmp_path: Path, case: str, capfd) -> None:
    task, columns, expected = GUESSED[case]
    path = tmp_path / "t.csv"
    path.write_text(table(columns))
    found = guessed_columns(find_task(task), path, Columns())
    assert {role: getattr(found, role) for role in expected} == expected
    err = capfd.readouterr().err
    assert all(f"{role} = {name!r}" in err for role, name in expected.items() if name)
    rows, _ = training_rows(find_task(task), [path], found)
    assert [row.text for row in rows] == columns[expected["text"]]
    KINDS[find_task(task).head].head_for(find_task(task), rows)


def records(tmp_path: Path, *rows: dict) -> Path:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_answers_tags_and_lists_are_guessed(tmp_path: Path) -> None:
    path = records(
        tmp_path,
        *({"asked": f"What is {i}?", "page": f"{i} is a number, {TEXTS[i]}", "reply": "a number"} for i in range(N)),
    )
    found = guessed_columns(find_task("answer"), path, Columns())
    assert (found.text, found.pair, found.label) == ("asked", "page", "reply")
    path = records(
        tmp_path, *({"n": i, "pieces": TEXTS[i].split(), "marks": ["O"] * len(TEXTS[i].split())} for i in range(N))
    )
    found = guessed_columns(find_task("tag"), path, Columns())
    assert (found.text, found.label) == ("pieces", "marks")
    path = records(tmp_path, *({"stem": TEXTS[i], "candidates": ["yes", "no"], "solution": "no"} for i in range(N)))
    found = guessed_columns(find_task("choose"), path, Columns())
    assert (found.text, found.endings, found.label) == ("stem", "candidates", "solution")
    path = records(tmp_path, *({"plot": TEXTS[i], "kinds": [CLASSES[i], "long"]} for i in range(N)))
    found = guessed_columns(find_task("classify"), path, Columns())
    assert (found.text, found.label) == ("plot", "kinds")


@pytest.mark.parametrize(("mark", "name"), [("|", "genre"), (";", "genre"), (", ", "genres")])
def test_several_labels_in_a_cell_are_split(tmp_path: Path, mark: str, name: str) -> None:
    labels = [f'"{mark.join(sorted({CLASSES[i], CLASSES[i // 3], CLASSES[i // 5]}))}"' for i in range(N)]
    (tmp_path / "t.csv").write_text(table({"plot": TEXTS, name: labels}))
    found = guessed_columns(find_task("classify"), tmp_path / "t.csv", Columns())
    assert found.separator == mark.strip()
    rows, _ = training_rows(find_task("classify"), [tmp_path / "t.csv"], found)
    head = KINDS["single"].head_for(find_task("classify"), rows)
    assert (head.kind, head.labels) == ("multi", ("blue", "green", "red"))


def test_comma_in_a_label_does_not_split_it(tmp_path: Path) -> None:
    labels = ['"food, drink"', '"arts, crafts"', "sport"] * (N // 3)
    (tmp_path / "t.csv").write_text(table({"text": TEXTS, "labels": labels}))
    assert guessed_columns(find_task("classify"), tmp_path / "t.csv", Columns()).separator == ""


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
@pytest.mark.parametrize("separator", [",", ";", "\t", "|", ", ", "; "])
def test_delimiters_are_detected(tmp_path: Path, name: str, separator: str) -> None:
    texts = [f'"{t}, or; not | \t so"' for t in TEXTS]
    (tmp_path / name).write_text(table({"text": texts, "label": CLASSES}, separator))
    rows = list(read_task(find_task("classify"), tmp_path / name, Columns(), labelled=True))
    assert [(row.text, str(row.label).strip()) for row in rows] == [
        (quoted.strip('"'), label) for quoted, label in zip(texts, CLASSES, strict=True)
    ]


def test_error_shows_the_whole_command(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(table({"my id": UNIQUE, "body": TEXTS, "left": CLASSES, "right": ["x", "y"] * (N // 2)}))
    with pytest.raises(UserError) as caught:
        guessed_columns(
            find_task("classify"), path, Columns(), f"bertsmith finetune classify --model m --data {path} --out o"
        )
    message = str(caught.value)
    assert message.startswith(
        f"{path}: which column is the label? The columns are: my id, body, left, right. For example: "
    )
    assert message.endswith(f"bertsmith finetune classify --model m --data {path} --out o --text body --label right")
    with pytest.raises(
        UserError, match=r"no column 'bodi'; did you mean 'body'\?, no column 'rigth'; did you mean 'right'\?"
    ):
        guessed_columns(find_task("classify"), path, Columns(text="bodi", label="rigth"))
    with pytest.raises(UserError, match=r"no column 'lefd'; .* --text body --label left$"):
        guessed_columns(find_task("classify"), path, Columns(label="lefd"))


def test_suggested_columns_match_whole_words_and_are_not_annotators_votes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("premise,hypothesis,label5,final_label\na,b,x,y\n")
    with pytest.raises(UserError, match=r"no column 'label'; did you mean 'final_label'\?"):
        list(read_task(find_task("pair"), tmp_path / "t.csv", Columns(label="label"), labelled=True))


def test_column_names_may_contain_commas(tmp_path: Path) -> None:
    names = ["yes, sure", "no"]
    assert split_names(join_names(names)) == names
    assert split_names(" a , b,,c") == ["a", "b", "c"]
    row = {"text": "a", "yes, sure": "one", "no": "two", "label": 0}
    found = guessed_columns(find_task("choose"), records(tmp_path, row), Columns(endings='"yes, sure",no'))
    (read,) = read_task(find_task("choose"), tmp_path / "t.jsonl", found, labelled=True)
    assert read.parts == ("one", "two")


BAD = {
    "classify": (["text", "label"], ["a,x", ",y", "b,", "c,x,too many", "d,y"], ["a", "d"]),
    "regress": (["text", "label"], ["a,1", "b,two", "c,nan", "d,2"], ["a", "d"]),
    "choose": (["text", "ending0", "ending1", "label"], ["a,x,y,0", "b,,y,0", "c,x,y,7", "d,x,y,B"], ["a", "d"]),
}


def check(name: str, path: Path) -> None:
    task = find_task(name)
    rows, _ = training_rows(task, [path], Columns())
    head = KINDS[task.head].head_for(task, rows)
    for row in rows:
        KINDS[head.kind].target(row, head)


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_skipped_and_counted(tmp_path: Path, name: str) -> None:
    header, lines, kept = BAD[name]
    (tmp_path / "t.csv").write_text("\n".join([",".join(header), *lines]) + "\n")
    with pytest.raises(UserError, match=r"t\.csv, line 3"):
        check(name, tmp_path / "t.csv")
    rows, notes = training_rows(find_task(name), [tmp_path / "t.csv"], Columns(), skip_bad=True)
    assert [row.text for row in rows] == kept
    assert notes == [
        f"{len(lines) - 2} rows were left out: they cannot be used; the first: {notes[0].partition('first: ')[2]}"
    ]
    assert "t.csv, line 3" in notes[0]


def test_invalid_json_lines_are_skipped_too(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": \n[1]\n{"text": "b", "label": "y"}\n')
    rows, (note,) = training_rows(find_task("classify"), [tmp_path / "t.jsonl"], Columns(), skip_bad=True)
    assert [row.text for row in rows] == ["a", "b"]
    assert note.startswith("2 rows were left out")
    with pytest.raises(UserError, match=r"line 2: not valid JSON.*--skip-bad"):
        training_rows(find_task("classify"), [tmp_path / "t.jsonl"], Columns())

"""Words and their tags: schemes, document context, first sub-tokens, and fine-tuning."""

import io
import json
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from variants import make

from bertsmith.batch import IGNORE
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.inference.files import evaluate
from bertsmith.inference.predictor import Predictor
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.recurrent import FeatureConfig
from bertsmith.rows.columns import Columns, Row
from bertsmith.rows.conll import read_conll, to_bio
from bertsmith.tasks import tagging
from bertsmith.tasks.description import Limits
from bertsmith.tasks.prediction_files import score_file
from bertsmith.tasks.reading import read_task
from bertsmith.tasks.task import find_task
from bertsmith.tasks.units import units_of, word_pattern
from bertsmith.text.tokenizer import Tokenizer

CONLL = """-DOCSTART- -X- -X- O

Ada NNP I-NP I-PER
Lovelace NNP I-NP I-PER
met VBD I-VP O
Bob NNP I-NP I-PER
Babbage NNP B-NP B-PER
. . O O

London NNP I-NP I-LOC
. . O O

-DOCSTART- -X- -X- O

Nothing NN I-NP O
"""


def nfd(word: str) -> str:
    return unicodedata.normalize("NFD", word)


def test_all_tagging_schemes_are_read_as_bio() -> None:
    iob1 = "I-PER I-PER O I-PER B-PER I-LOC O I-LOC".split()
    assert to_bio(iob1) == "B-PER I-PER O B-PER B-PER B-LOC O B-LOC".split()
    bio = "B-PER I-PER O B-PER B-PER B-LOC I-LOC".split()
    assert to_bio(bio) == bio
    assert to_bio("B-PER E-PER S-LOC O B-ORG I-ORG E-ORG".split()) == "B-PER I-PER B-LOC O B-ORG I-ORG I-ORG".split()
    assert to_bio(["NOUN", "B", "O"]) == ["NOUN", "B", "O"]
    assert to_bio("PER-B PER-I - ORG_B ORG_I O CVL-B I-PER".split()) == (
        "B-PER I-PER O B-ORG I-ORG O B-CVL B-PER".split()
    )


def test_rows_of_a_conll_file_hold_their_document(tmp_path: Path) -> None:
    for ends in ("\n", "\r\n"):
        (tmp_path / "train.txt").write_bytes(("\ufeff" + CONLL.replace("\n", ends)).encode())
        rows = list(read_conll(tmp_path / "train.txt", labelled=True))
        assert [row.parts[0] for row in rows] == ["Ada", "London", "Nothing"]
        assert rows[1].document == (*rows[0].parts, *rows[1].parts)
        assert [row.begin for row in rows] == [0, 6, 0]
        assert rows[0].place.endswith("train.txt, line 3")
        assert tagging.tags_of(rows[0]) == ["B-PER", "I-PER", "O", "B-PER", "B-PER", "O"]


def document_rows(lengths: list[int], stem: str = "word") -> list[Row]:
    words = [f"{stem}{i}" for i in range(sum(lengths))]
    rows, begin = [], 0
    for length in lengths:
        own = tuple(words[begin : begin + length])
        rows.append(Row(" ".join(own), None, ["O", *["B-X"] * (length - 1)], "", "", own, tuple(words), begin))
        begin += length
    return rows


@pytest.mark.parametrize("max_length", [14, 30, 512])
def test_every_word_is_labelled_once_at_its_first_sub_token(world, max_length) -> None:
    tokenizer, head = Tokenizer.load(world / "tok"), HeadConfig("tags", ("O", "B-X", "I-X"))
    rows = document_rows([3, 9, 1, 5])
    encoded = tagging.encode(rows, tokenizer, Limits(max_length), head, labelled=True)
    pieces = {word: tokenizer.encode([word])[0] for word in rows[0].document}
    sizes = sum(map(len, pieces.values()))
    learnt = []
    for example, owner, begins in zip(encoded.examples, encoded.owners, encoded.details, strict=True):
        tags = example.labels["tags"].values
        assert len(example.tokens) == len(tags) <= max_length
        assert len(example.tokens) >= min(sizes + 2, max_length - max(map(len, pieces.values())) - 2)
        assert np.flatnonzero(tags != IGNORE).tolist() == begins.tolist()
        learnt += [(owner, int(example.tokens[i]), head.labels[tags[i]]) for i in begins]
    expected = [(n, pieces[w][0], t) for n, row in enumerate(rows) for w, t in zip(row.parts, row.label, strict=True)]
    assert learnt == expected
    if max_length == 512:
        assert len(encoded.examples) == 4
        assert all(len(e.tokens) == sizes + 2 for e in encoded.examples)


@pytest.mark.parametrize("begin", [0, 1, 50])
@pytest.mark.parametrize("after", [0, 1, 50])
def test_words_of_a_text_in_several_parts_have_context_on_both_sides(tiny_tokenizer, begin, after) -> None:
    words = tuple(tiny_tokenizer.token(number) for number in range(20, 30)) * 10
    row = Row(" ".join(words), None, ["O"] * 100, "", "", words, words[:begin] + words + words[:after], begin)
    encoded = tagging.encode([row], tiny_tokenizer, Limits(66), HeadConfig("tags", ("O", "B-X")), labelled=True)
    assert sum(map(len, encoded.details)) == 100
    parts = list(zip(encoded.examples, encoded.details, strict=True))
    assert len(parts) == 2
    assert all(len(example.tokens) == 66 for example, _ in parts)
    (before, to_come), (gone, behind) = ((b[0] - 1, len(e.tokens) - 2 - b[-1]) for e, b in parts)
    assert min(to_come, gone) >= 4  # a sixteenth of the 64 tokens that fit
    assert (before >= min(begin, 4), behind >= min(after, 4)) == (True, True)


def test_a_word_that_needs_all_the_room_is_a_part_of_its_own(tiny_tokenizer) -> None:
    words = (*(tiny_tokenizer.token(number) for number in range(20, 50)), "a" * 90)
    row = Row(" ".join(words), None, ["O"] * 31, "", "", words)
    encoded = tagging.encode([row], tiny_tokenizer, Limits(26), HeadConfig("tags", ("O", "B-X")), labelled=True)
    assert [len(begins) for begins in encoded.details][-1] == 1
    assert sum(map(len, encoded.details)) == 31
    assert all(len(example.tokens) <= 26 for example in encoded.examples)


@pytest.mark.parametrize("features", [None, FeatureConfig("last", hidden_size=8)])
@pytest.mark.parametrize("max_length", [14, 30, 512])
def test_sentences_that_share_an_example_have_the_same_predictions(world, max_length, features) -> None:
    head, limits = HeadConfig("tags", ("O", "B-X", "I-X"), features=features), Limits(max_length)
    predictor = Predictor(load_folder(world / "run" / "model", head), "cpu")
    rows = [*document_rows([3, 9, 1, 5]), *document_rows([3, 9, 1, 5], "list"), Row("alone and free", None, None, "")]
    encoded = tagging.encode(rows, predictor.tokenizer, limits, head, labelled=False)
    separate = [tagging.encode([row], predictor.tokenizer, limits, head, labelled=False) for row in rows]
    assert len(encoded.owners) == sum(len(each.examples) for each in separate)
    if max_length == 512:
        assert len(encoded.examples) == 3  # two documents and a sentence
    found = tagging.decode(rows, encoded, predictor.engine.run(encoded.examples), head, limits)
    for row, each, answer in zip(rows, separate, found, strict=True):
        (expected,) = tagging.decode([row], each, predictor.engine.run(each.examples), head, limits)
        assert answer["tags"] == expected["tags"]
        assert answer["scores"] == pytest.approx(expected["scores"], abs=1e-6)
    assert all(len(r) == len(set(r.tolist())) for r in (e.labels["words"].values for e in encoded.examples))


def test_a_bilstm_reads_words_in_one_sentence_at_a_time(world) -> None:
    head, tokenizer = HeadConfig("tags", ("O", "B-X"), features=FeatureConfig("last")), Tokenizer.load(world / "tok")
    rows = document_rows([3, 4])
    encoded = tagging.encode(rows, tokenizer, Limits(64), head, labelled=False)
    (example,) = encoded.examples
    assert len(example.labels["words"].values) == 7
    assert example.labels["sentences"].values.tolist() == [begins[0] for begins in encoded.details]
    whole = replace(rows[0], text=" ".join(rows[0].document), parts=rows[0].document, label=())  # overlaps with both
    encoded = tagging.encode([*rows, whole, rows[1]], tokenizer, Limits(64), head, labelled=False)
    assert [len(example.labels["words"].values) for example in encoded.examples] == [7, 7, 4]
    assert [len(example.labels["sentences"].values) for example in encoded.examples] == [2, 1, 1]
    assert list(encoded.sources) == [0, 0, 1, 2]


def test_context_is_on_both_sides(world) -> None:
    tokenizer, head = Tokenizer.load(world / "tok"), HeadConfig("tags", ("O", "B-X"))
    words = tuple("abcdefghij")
    middle = Row("e f", None, None, "", "", words[4:6], words, 4)
    (example,) = tagging.encode([middle], tokenizer, Limits(8), head, labelled=False).examples
    assert example.tokens[1:-1].tolist() == [i for w in "cdefgh" for i in tokenizer.encode([w])[0]]
    for begin, around in ((0, "abcdef"), (8, "efghij")):  # context that one side lacks is added to the other
        edge = Row("", None, None, "", "", words[begin : begin + 2], words, begin)
        edge = replace(edge, text=" ".join(edge.parts))
        (example,) = tagging.encode([edge], tokenizer, Limits(8), head, labelled=False).examples
        assert example.tokens[1:-1].tolist() == [i for w in around for i in tokenizer.encode([w])[0]]


def test_entities_have_character_offsets() -> None:
    text = "Ada Lovelace met Bob."
    row = Row(text, None, None, "")
    tags = ["B-PER", "I-PER", "O", "I-PER", "O"]
    found = tagging.find_entities(text, tagging.words_of(row), tags)
    assert [(e["type"], e["text"]) for e in found] == [("PER", "Ada Lovelace"), ("PER", "Bob")]
    assert all(text[e["start"] : e["end"]] == e["text"] for e in found)
    given = Row("Ada Lovelace met Bob .", None, None, "", parts=("Ada", "Lovelace", "met", "Bob", "."))
    assert [given.text[a:b] for a, b in tagging.words_of(given)] == list(given.parts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("नई दिल्ली में, क्षत्रिय!", ["नई", "दिल्ली", "में", ",", "क्षत्रिय", "!"]),
        ("กรุงเทพฯ เป็นเมืองใหญ่", ["กรุงเทพฯ", "เป็นเมืองใหญ่"]),
        (nfd("한국어는 좋다."), [*map(nfd, ("한국어는", "좋다")), "."]),
        (nfd("Việt crème-brûlée"), [*map(nfd, ("Việt", "crème")), "-", nfd("brûlée")]),
        ("می\u200cخواهم بروم", ["می\u200cخواهم", "بروم"]),
        ("❤\ufe0f it's 3.14 x_1", ["❤\ufe0f", "it", "'", "s", "3", ".", "14", "x_1"]),
    ],
)
def test_combining_marks_do_not_split_words(text: str, words: list[str]) -> None:
    assert [text[begin:end] for begin, end in tagging.words_of(Row(text, None, None, ""))] == words


def test_the_pattern_has_all_combining_marks() -> None:
    marks = [chr(n) for n in range(sys.maxunicode + 1) if unicodedata.category(chr(n)).startswith("M")]
    assert word_pattern().fullmatch("a" + "".join(marks))


def test_the_format_of_the_hub_is_read(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = {"tokens": [["-DOCSTART-"], ["Ada", "ran"], ["In", "Rome"]], "ner_tags": [[0], [1, 0], [0, 5]]}
    pq.write_table(pa.table(table), tmp_path / "train-00000-of-00001.parquet")
    rows = list(read_task(find_task("conll2003"), tmp_path / "train-00000-of-00001.parquet", Columns(), labelled=True))
    assert [row.label for row in rows] == [["B-PER", "O"], ["O", "B-LOC"]]
    assert rows[1].document == ("Ada", "ran", "In", "Rome")


def test_a_model_learns_to_tag(world: Path, tmp_path: Path) -> None:
    names, places, verbs = ["object", "class", "method"], ["file", "list"], ["is", "has"]
    lines = ["-DOCSTART- O", ""]
    for i in range(60):
        lines += [f"the {'O'}", f"{names[i % 3]} I-PER", f"{verbs[i % 2]} O", f"{places[i % 2]} I-LOC", ". O", ""]
    for name in ("train.txt", "valid.txt", "test.txt"):
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    changes = ["train.epochs=8", "train.batch_size=8", "train.learning_rate=4e-3", "data.max_length=32"]
    config = override(FinetuneConfig("conll2003"), changes)
    scores = finetune(config, world / "run", tmp_path, tmp_path / "run", device="cpu")
    assert scores["f1"] > 90
    assert evaluate(tmp_path / "run", tmp_path / "valid.txt", device="cpu")["f1"] == pytest.approx(scores["f1"])
    official = score_file(tmp_path / "run/predictions/conll2003.txt", "conll2003", tmp_path / "test.txt")
    assert {name: official[name] for name in ("f1", "accuracy")} == pytest.approx(
        {name: scores[name] for name in ("f1", "accuracy")}
    )
    (answer,) = Predictor.load(tmp_path / "run", "cpu").predict(["the class is list ."])
    assert len(answer["tags"]) == 5
    assert [e["type"] for e in answer["entities"]] == ["PER", "LOC"]


def test_texts_are_divided_as_the_words_of_the_training_rows(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Eojeols have their punctuation attached; the words of CoNLL-2003 do not, but for U.S. and the like."""
    eojeols = [Row("", None, ["B-PS", "O"], "", parts=("김철수는", "갔다.")), Row("", None, ["O"], "", parts=("네!",))]
    words = [Row("", None, ["B-LOC", "O", "O"], "", parts=("U.S.", "won", ".")), Row("", None, ["O"], "", parts=("-",))]
    text = Row("김철수는  서울에 갔다.", None, None, "")
    for rows, unit, expected in ((eojeols, "spaced", ["서울에", "갔다."]), (words, "word", ["갔다", "."])):
        head = tagging.head_for(find_task("tag"), rows)
        assert head.unit == unit
        (units,) = units_of([text], tiny_tokenizer, head)
        assert [text.text[a:b] for a, b in units.places][-2:] == expected
        network = TaskModel(make("tags", tiny_tokenizer).model.encoder, head).eval()
        save_folder(tmp_path / unit, network, tiny_tokenizer, Notes("tag", {}, 32))
        (answer,) = Predictor.load(tmp_path / unit, "cpu")([text.text])
        assert answer["words"][-2:] == expected
        assert len(answer["words"]) == len(answer["tags"])


@pytest.mark.parametrize("name", ["t.tsv", "t.txt", "t.conll"])
def test_naver_s_format_is_scored_by_entities(tmp_path: Path, name: str) -> None:
    sentences = [
        ["1\t김철수\tPER_B", "2\t씨는\t-", "3\t서울\tLOC_B", "4\t시청\tLOC_I"],
        ["1\t네\t-", "2\t이순신\tPER_B"],
    ]
    (tmp_path / name).write_text("\n\n".join("\n".join(lines) for lines in sentences) + "\n")
    task = find_task("tag")
    rows = list(read_task(task, tmp_path / name, Columns(), labelled=True))
    assert [row.parts for row in rows] == [("김철수", "씨는", "서울", "시청"), ("네", "이순신")]
    head = tagging.head_for(task, rows)
    assert head.labels == ("O", "B-LOC", "B-PER", "I-LOC")
    answers = [{"tags": ["B-PER", "O", "B-LOC", "O"]}, {"tags": ["O", "B-PER"]}]
    scores = tagging.score(task, rows, answers, head, Limits())
    # Two of three entities and five of six words are right.
    assert scores["f1"] / scores["accuracy"] == pytest.approx((2 / 3) / (5 / 6))


def test_quotation_marks_in_a_tag_file_are_words(tmp_path: Path) -> None:
    (tmp_path / "lines.tsv").write_text('"\tO\nAda\tB-PER\n"\tO\n\n"\tO\nno\tO\n')
    (tmp_path / "table.tsv").write_text('text\ttags\n" Ada "\tO B-PER O\n" no\tO O\n')
    for name in ("lines.tsv", "table.tsv"):
        rows = list(read_task(find_task("tag"), tmp_path / name, Columns(), labelled=True))
        assert [row.parts for row in rows] == [('"', "Ada", '"'), ('"', "no")]
        assert [tagging.tags_of(row) for row in rows] == [["O", "B-PER", "O"], ["O", "O"]]


def test_tags_that_are_no_entities_are_scored_by_accuracy(world: Path, tmp_path: Path) -> None:
    rows = [{"words": ["the", "file", "is"], "tags": ["D", "N", "V"]}, {"words": ["a", "list"], "tags": ["D", "N"]}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows * 10)))
    config = override(FinetuneConfig("tag"), ["train.epochs=10", "train.batch_size=4", "train.learning_rate=5e-3"])
    data = tmp_path / "t.jsonl"
    scores = finetune(config, world / "run", data, tmp_path / "run", dev=data, device="cpu")
    assert scores["accuracy"] > 90
    assert "f1" not in scores


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"words": ["a", "b"], "tags": ["O"]}, "line 1: 2 words and 1 tags"),
        ({"words": ["a", "b"], "tags": 3}, "the tags are 3, not a list"),
        ({"words": ["a", "b"], "tags": ["O", "O"]}, "all words have the tag 'O'"),
    ],
)
def test_bad_tags_are_refused(tmp_path: Path, row: dict, says: str) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(row))
    rows = list(read_task(find_task("tag"), tmp_path / "t.jsonl", Columns(), labelled=True))
    with pytest.raises(UserError, match=says):
        tagging.head_for(find_task("tag"), rows)


def test_texts_to_tag_and_one_word_per_line_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(text: str) -> list[str]:
        (tmp_path / "t.txt").write_text(text)
        return [row.text for row in read_task(find_task("conll2003"), tmp_path / "t.txt", Columns(), labelled=False)]

    assert read("Ada met Bo\n") == ["Ada met Bo"]
    assert read("Ada met Bo\n\nIn Rome\n") == ["Ada met Bo", "", "In Rome"]
    assert read("Ada met Bo\nIn old Rome\n") == ["Ada met Bo", "In old Rome"]
    assert read("Ada B-PER\nran O\n\nRome B-LOC\n\n") == ["Ada ran", "Rome"]
    assert read("Ada\nran\n\nIn\nRome\n") == ["Ada ran", "In Rome"]
    assert read("-DOCSTART- -X- O\n\nAda NNP O\n") == ["Ada"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Ada met Bo\n")))
    assert [row.text for row in read_task(find_task("tag"), "-", Columns(), labelled=False)] == ["Ada met Bo"]


def test_columns_are_kept_beside_tags(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"id": 7, "tokens": ["Ada", "ran"]}))
    (row,) = read_task(find_task("tag"), tmp_path / "t.jsonl", Columns(), labelled=False, keep=["id"])
    assert row.kept == {"id": 7}
    (tmp_path / "t.conll").write_text("Ada O\n")
    with pytest.raises(UserError, match=r"t\.conll: a file with a word a line has no column 'id' to keep"):
        list(read_task(find_task("tag"), tmp_path / "t.conll", Columns(), labelled=False, keep=["id"]))


def test_bad_lines_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("Ada NNP B-PER\nmet O\n")
    with pytest.raises(UserError, match="line 2: 2 columns, where the lines before have 3"):
        list(read_conll(tmp_path / "t.txt", labelled=True))
    (tmp_path / "t.txt").write_text("Ada\n")
    with pytest.raises(UserError, match="line 1: a word without a tag: 'Ada'"):
        list(read_conll(tmp_path / "t.txt", labelled=True))
    (tmp_path / "t.txt").write_text("\n\n")
    with pytest.raises(UserError, match="is empty"):
        list(read_conll(tmp_path / "t.txt", labelled=True))


def test_a_tagger_saved_with_type_first_labels_is_scored_like_any_other(world, tmp_path) -> None:
    """Older versions saved the label names of Naver's files."""
    (tmp_path / "naver.txt").write_text("Ada PER-B\nLovelace PER-I\nmet -\nBob PER-B\n\nLondon LOC-B\n. -\n")
    (tmp_path / "bio.txt").write_text("Ada B-PER\nLovelace I-PER\nmet O\nBob B-PER\n\nLondon B-LOC\n. O\n")
    found = []
    for name, labels in {
        "new": ("O", "B-LOC", "B-PER", "I-PER"),
        "old": ("-", "LOC-B", "PER-B", "PER-I"),
    }.items():
        torch.manual_seed(1)
        loaded = load_folder(world / "run" / "model", HeadConfig("tags", labels))
        save_folder(tmp_path / name, loaded.model, loaded.tokenizer, Notes("tag", {}, 32))
        for gold in ("naver.txt", "bio.txt"):
            found.append(evaluate(tmp_path / name, tmp_path / gold, device="cpu"))
    assert found == [found[0]] * 4
    assert {"f1", "precision", "recall", "accuracy"} <= found[0].keys()
    assert list(found[0]["per_class"]) == ["LOC", "PER"]

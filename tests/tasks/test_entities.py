"""Entities by their characters: reading, sub-tokens as units, scores equal to KLUE's, and fine-tuning."""

import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from variants import make

from bertsmith.batch import IGNORE
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.frozen import stores_states
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.inference.files import evaluate
from bertsmith.inference.predictor import Predictor
from bertsmith.model.heads import HeadConfig
from bertsmith.model.recurrent import FeatureConfig
from bertsmith.pages.report import mistakes
from bertsmith.rows.columns import Columns, Row
from bertsmith.rows.entities import Entity, entities_of
from bertsmith.tasks import tagging, units
from bertsmith.tasks.description import Limits
from bertsmith.tasks.dev_predictions import read_dev_predictions
from bertsmith.tasks.prediction_files import score_file, write_predictions
from bertsmith.tasks.reading import guessed_columns, read_task
from bertsmith.tasks.task import find_task
from bertsmith.text.tokenizer import train_byte_bpe, train_unigram, train_wordpiece, train_words

KLUE = """## 토큰, 레이블 구분자 : \\t
## 컬럼명 : CHAR\tNE_TAG
## dev_00000-wikitree\t<경찰:OG>은 <박 씨:PS>의
경\tB-OG
찰\tI-OG
은\tO
 \tO
박\tB-PS
 \tI-PS
씨\tI-PS
의\tO

## dev_00001-nsmc\t <10년:DT>#
 \tO
1\tB-DT
0\tI-DT
년\tI-DT
#\tO
"""
PLACES, PEOPLE, PARTICLES = ["서울", "부산", "제주"], ["민수", "영희", "철수"], ["은", "에서", "이라도"]
LANGUAGES = {  # a text, the entities in it, each inside a word, and words that the vocabulary is trained on
    "Korean": (
        "서울에서 민수는 제주로 갔다",
        ["서울", "민수", "제주"],
        ["서울", "에서", "민수", "는", "제주", "로", "갔다"],
    ),
    "Japanese": ("東京都で田中さんが会った", ["東京都", "田中"], ["東京都", "で", "田中", "さん", "が", "会った"]),
    "Chinese": (
        "王小明在北京大学读书",
        ["王小明", "北京大学"],
        ["王", "小", "明", "在", "北", "京", "大", "学", "读", "书"],
    ),
    "Thai": ("ฉันอยู่ที่กรุงเทพและเชียงใหม่", ["กรุงเทพ", "เชียงใหม่"], ["ฉัน", "อยู่", "ที่", "กรุงเทพ", "และ", "เชียงใหม่"]),
    "German": (
        "Die Berlinreise und das Goethehaus",
        ["Berlin", "Goethe"],
        ["Die", "Berlin", "reise", "und", "das", "Goethe", "haus"],
    ),
}


def row_of(text: str, *entities: tuple[int, int, str]) -> Row:
    return Row(text, None, [*entities], "row 1")


def korean_rows(count: int) -> list[dict]:
    draw, rows = random.Random(1), []
    for _ in range(count):
        person, place = draw.choice(PEOPLE), draw.choice(PLACES)
        first, second = f"{person}{draw.choice(PARTICLES)}", f"{place}{draw.choice(PARTICLES)}"
        text = f"{first} {second} 간다"
        begin = len(first) + 1
        entities = [{"start": 0, "end": len(person), "label": "PS"}]
        rows.append({"text": text, "entities": [{"start": begin, "end": begin + len(place), "label": "LC"}, *entities]})
    return rows


@pytest.fixture(scope="module")
def korean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder whose vocabulary has the names and the particles as tokens."""
    folder = tmp_path_factory.mktemp("korean") / "model"
    words = [*PLACES, *PEOPLE, *PARTICLES, *(a + b for a in PLACES + PEOPLE for b in PARTICLES), "간다"]
    tokenizer = train_wordpiece([" ".join(words)] * 4, 47, cased=True)
    save_folder(folder, make("mlm", tokenizer).model, tokenizer, Notes())
    return folder


@pytest.fixture(scope="module")
def tagger(korean: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict]:
    """A tagger of these names, its dev rows and its scores."""
    root = tmp_path_factory.mktemp("tagger")
    data = root / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, korean_rows(60))))
    changes = ["train.epochs=6", "train.batch_size=8", "train.learning_rate=3e-3", "data.max_length=32"]
    scores = finetune(override(FinetuneConfig("tag"), changes), korean, data, root / "run", dev=data, device="cpu")
    return root / "run", data, scores


def test_klue_s_file_is_read_as_texts_with_entities(tmp_path: Path) -> None:
    for name in ("klue-ner-v1.1_dev.tsv", "dev.txt"):
        (tmp_path / name).write_text(KLUE, encoding="utf-8")
        one, other = read_task(find_task("tag"), tmp_path / name, Columns(), labelled=True)
        assert (one.text, one.key) == ("경찰은 박 씨의", "dev_00000-wikitree")
        assert entities_of(one) == [(0, 2, "OG"), (4, 7, "PS")]
        assert (other.text, entities_of(other)) == (" 10년#", [(1, 4, "DT")])
        assert tagging.tags_of(one) == "B-OG I-OG O B-PS I-PS O".split()  # without spaces, as KLUE scores them
        assert [row.text for row in read_task(find_task("tag"), tmp_path / name, Columns(), labelled=False)] == [
            "경찰은 박 씨의",
            " 10년#",
        ]
    hub = [
        {"sentence": "", "tokens": list(one.text), "ner_tags": ["B-OG", "I-OG", "O", "O", "B-PS", "I-PS", "I-PS", "O"]}
    ]
    (tmp_path / "t.json").write_text(json.dumps(hub))
    (row,) = read_task(find_task("tag"), tmp_path / "t.json", Columns(), labelled=True)
    assert (row.text, entities_of(row), row.parts) == (one.text, entities_of(one), ())
    (tmp_path / "dev.txt").write_text(KLUE + "\n가나\tO\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"dev\.txt, line 20: '가나' is not one character"):
        list(read_task(find_task("tag"), tmp_path / "dev.txt", Columns(), labelled=True))


def test_entities_are_read_in_the_forms_of_annotation_tools(tmp_path: Path) -> None:
    text, expected = "Ada met Bo.", [(0, 3, "PER"), (8, 10, "PER")]
    objects = [{"start": 8, "end": 10, "label": "PER"}, {"start": 0, "end": 3, "label": "PER", "text": "Ada"}]
    files = {
        "ours.jsonl": {"text": text, "entities": [{**e, "type": e["label"]} for e in objects]},
        "prodigy.jsonl": {"text": text, "tokens": [{"text": "Ada", "id": 0}], "spans": objects},
        "doccano.jsonl": {"id": 1, "text": text, "label": [[0, 3, "PER"], [8, 10, "PER"]]},
        "columns.jsonl": {"text": text, "entities": {"start": [8, 0], "end": [10, 3], "label": ["PER", "PER"]}},
        "named.jsonl": {"body": text, "marked": objects},
        "spaces.jsonl": {"text": text, "entities": [{"start": 7, "end": 10, "label": "PER"}, [0, 4, "PER"]]},
    }
    for name, record in files.items():
        (tmp_path / name).write_text("\n".join([json.dumps(record)] * 3))
        columns = guessed_columns(find_task("tag"), tmp_path / name, Columns())
        rows = list(read_task(find_task("tag"), tmp_path / name, columns, labelled=True))
        assert [(row.text, entities_of(row)) for row in rows] == [(text, expected)] * 3, name
        assert tagging.head_for(find_task("tag"), rows) == HeadConfig("tags", ("O", "B-PER", "I-PER"), unit="token")
    (tmp_path / "t.csv").write_text('text,entities\nAda met Bo.,"[[0, 3, ""PER""]]"\nNo one.,[]\n')
    rows = list(read_task(find_task("tag"), tmp_path / "t.csv", Columns(), labelled=True))
    assert [entities_of(row) for row in rows] == [[(0, 3, "PER")], []]


@pytest.mark.parametrize(
    ("text", "entities", "says"),
    [
        (
            "서울에 갔다",
            [[0, 2, "LC"], [1, 3, "PS"]],
            "'서울' (LC, 0 to 2) and '울에' (PS, 1 to 3) overlap, and a character",
        ),
        ("서울에 갔다", [[0, 3, "LC"], [0, 2, "OG"]], "'서울' (OG, 0 to 2) and '서울에' (LC, 0 to 3) overlap"),
        ("서울에 갔다", [[3, 1, "LC"]], "entity 'LC' from 3 to 1 ends before it starts; exchange start and end"),
        (
            "서울에 갔다",
            [[1, 1, "LC"]],
            "from 1 to 1 is empty; its end is the character after its last one, at least 2",
        ),
        ("서울에 갔다", [[-1, 1, "LC"]], "from -1 to 1 starts before the text"),
        (
            "서울에 갔다",
            [[4, 90, "LC"]],
            "ends after the text, which has 6 characters; offsets count characters from 0",
        ),
        ("서울에 갔다", [[10, 16, "LC"]], "6 characters; the offsets seem to count bytes: count characters"),
        ("😀서울😀", [[3, 6, "LC"]], "4 characters; the offsets seem to count UTF-16 units: count characters"),
        ("😀서울😀!", [{"start": 2, "end": 4, "label": "LC", "text": "서울"}], "seem to count UTF-16 units"),
        ("서울 부산 가자", [{"start": 0, "end": 6, "label": "LC", "text": "서울"}], "seem to count bytes"),
        ("서울 부산", [{"start": 0, "end": 1, "label": "LC", "text": "서울"}], "seem to include the last character"),
        (
            "서울 부산",
            [{"start": 1, "end": 3, "label": "LC", "text": "부산"}],
            "the entity '부산' is '울 ' (LC, 1 to 3)",
        ),
        ("서울\n부산", [[0, 5, "LC"]], "runs over a line break; give its lines as entities of their own"),
        ("서울  부산", [[2, 4, "LC"]], "holds only spaces; remove it"),
        ("서울", [{"start": 0, "end": "2", "label": "LC"}], "has the end '2', not a whole number"),
        ("서울", [{"start": 0, "label": "LC"}], "has no end; an entity is an object with start, end and label"),
        ("서울", [{"start": 0, "end": 2}], "has no label; an entity is an object with start, end and label"),
        ("서울", [{"start": 0, "end": 2, "label": "LC"}, "LC"], "2 words and 2 tags|1 words and 2 tags"),
    ],
)
def test_entities_that_cannot_be_are_refused_in_one_line(tmp_path: Path, text: str, entities: list, says: str) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": text, "entities": entities}))
    rows = list(read_task(find_task("tag"), tmp_path / "t.jsonl", Columns(), labelled=True))
    with pytest.raises(UserError) as error:
        tagging.head_for(find_task("tag"), rows)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 't.jsonl'}, line 1: ")
    assert any(part in message for part in says.split("|"))
    assert "\n" not in message
    skipped: list[str] = []
    good = json.dumps({"text": "서울", "entities": [[0, 2, "LC"]]})
    (tmp_path / "t.jsonl").write_text(f"{good}\n" + (tmp_path / "t.jsonl").read_text())
    task, options = find_task("tag"), {"labelled": True, "skip_bad": True, "errors": skipped}
    assert [row.text for row in read_task(task, tmp_path / "t.jsonl", Columns(), **options)] == ["서울"]
    assert len(skipped) == 1


def test_words_and_offsets_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps({"tokens": ["a", "b"], "entities": [[0, 1, "X"]]}))
    with pytest.raises(
        UserError, match="line 1: entities by their characters need a text, and there is a list of words"
    ):
        list(read_task(find_task("tag"), tmp_path / "t.jsonl", Columns(), labelled=True))


def predicted(rows: list[Row], tokenizer, head: HeadConfig, max_length: int) -> list[dict]:
    """The predictions of a model that has learnt the training labels of these rows by heart."""
    taught = tagging.encode(rows, tokenizer, Limits(max_length), head, labelled=True)
    encoded = tagging.encode(rows, tokenizer, Limits(max_length), head, labelled=False)
    logits = []
    for example in taught.examples:
        tags = example.labels["tags"].values
        logits.append(np.eye(len(head.labels), dtype=np.float32)[np.where(tags == IGNORE, 0, tags)] * 9)
    return tagging.decode(rows, encoded, logits, head, Limits(max_length))


@pytest.mark.parametrize("train", [train_wordpiece, train_unigram, train_byte_bpe])
@pytest.mark.parametrize("max_length", [6, 64])
@pytest.mark.parametrize("language", LANGUAGES)
def test_boundaries_inside_words_are_learnt_and_found(language: str, max_length: int, train) -> None:
    text, names, words = LANGUAGES[language]
    text = f" {text}. {text}"
    entities = [(begin, begin + len(n), "X") for n in names for begin in (text.index(n), text.rindex(n))]
    tokenizer = train([" ".join(words), *words] * 20, 500, cased=True)
    row, head = row_of(text, *entities), HeadConfig("tags", ("O", "B-X", "I-X"), unit="token")
    (answer,) = predicted([row], tokenizer, head, max_length)
    found = [(e["start"], e["end"], e["type"]) for e in answer["entities"]]
    exact = [e for e in sorted(entities) if e in found]
    if train is train_wordpiece:  # its vocabulary has the parts of these words as tokens
        assert found == sorted(entities)
        assert tagging.ceiling([row], tokenizer, head) == ""
    else:
        note = tagging.ceiling([row], tokenizer, head)
        assert bool(note) == (len(exact) < len(entities))
        assert not note or note.startswith(f"{len(entities) - len(exact)} of {len(entities)} entities do not begin")
    places = next(iter(units.units_of([row], tokenizer, head))).places
    assert [text[a:b] for a, b in places] == answer["words"]
    assert "".join(answer["words"]) == "".join(text.split())


def test_tokens_that_cross_a_boundary_are_marked_as_nearly_as_they_allow() -> None:
    places = [(0, 3), (3, 5), (6, 9), (9, 10)]
    assert units.unit_tags(places, [Entity(0, 2, "X")]) == ["B-X", "O", "O", "O"]  # two of three characters
    assert units.unit_tags(places, [Entity(2, 5, "X")]) == ["O", "B-X", "O", "O"]  # one of three
    assert units.unit_tags(places, [Entity(8, 9, "X")]) == ["O", "O", "B-X", "O"]  # nothing else would mark it
    assert units.unit_tags(places, [Entity(0, 5, "X"), Entity(6, 10, "X")]) == ["B-X", "I-X", "B-X", "I-X"]
    assert units.unit_tags(places, [Entity(6, 7, "X"), Entity(8, 9, "Y")]) == ["O", "O", "B-X", "O"]
    tokenizer = train_words(["서울에 갔다"] * 3, 20)
    rows = [row_of("서울에 갔다", (0, 2, "X"), (4, 6, "X")), row_of("갔다", (0, 2, "X"))]
    head = HeadConfig("tags", ("O", "B-X", "I-X"), unit="token")
    assert tagging.ceiling(rows, tokenizer, head) == (
        "1 of 3 entities do not begin and end with a token of this vocabulary; they are marked as nearly as its "
        "tokens allow, and F1 can reach 80.0 at most"
    )


def klue_scores(gold: list[list[str]], predicted: list[list[str]], labels: list[str]) -> tuple[float, float]:
    """KLUE-NER's two scores, written from their definition: F1 of strict IOB2 entities by type, and of every tag."""

    def strict(sentences: list[list[str]]) -> set[tuple[int, int, int, str]]:
        found = set()
        for number, tags in enumerate(sentences):
            for begin, tag in enumerate(tags):
                if tag[0] == "B":
                    end = begin + 1
                    while end < len(tags) and tags[end] == f"I-{tag[2:]}":
                        end += 1
                    found.add((number, begin, end, tag[2:]))
        return found

    def f1(one: set, other: set) -> float:
        return 2 * len(one & other) / (len(one) + len(other))

    sides = [strict(gold), strict(predicted)]
    types = {kind for side in sides for *_, kind in side}
    by_type = [f1(*({e for e in side if e[3] == kind} for side in sides)) for kind in types]
    places: list[dict[str, set]] = [defaultdict(set), defaultdict(set)]
    for side, sentences in zip(places, (gold, predicted), strict=True):
        for number, tags in enumerate(sentences):
            for place, tag in enumerate(tags):
                side[tag].add((number, place))
    by_tag = [f1(places[0][t], places[1][t]) if places[0][t] | places[1][t] else 1.0 for t in labels]
    return 100 * sum(by_type) / len(by_type), 100 * sum(by_tag) / len(by_tag)


def test_scores_equal_those_of_klue() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    from seqeval.scheme import IOB2

    draw, task = random.Random(7), find_task("tag")
    head = HeadConfig("tags", ("O", *(f"{p}-{t}" for t in ("LC", "PS", "QT", "TI") for p in "BI")), unit="token")

    def spans(text: str) -> list[tuple[int, int, str]]:
        found, end = [], 0
        while end < len(text) - 3:
            begin = end + draw.randrange(3)
            end = begin + draw.randrange(1, 4)
            if end <= len(text) and text[begin] != " " != text[end - 1]:
                found.append((begin, end, draw.choice(["LC", "PS", "QT"])))
        return found

    for _ in range(30):
        texts = ["".join(draw.choice("가나다 ") for _ in range(draw.randrange(6, 30))).strip() + "라" for _ in range(8)]
        rows = [Row(text, None, spans(text), "") for text in texts]
        rows[0] = Row("가나", None, [(0, 1, "LC")], "")
        guesses = [[*map(list, row.label)][: draw.randrange(1, 9)] for row in rows]
        guesses = [g if draw.random() < 0.6 else spans(row.text) for g, row in zip(guesses, rows, strict=True)]
        predictions = [{"entities": [{"start": a, "end": b, "type": t} for a, b, t in found]} for found in guesses]
        scores = tagging.score(task, rows, predictions, head, Limits())

        def tags(text: str, entities: list) -> list[str]:
            found = ["O"] * len(text)
            for begin, end, kind in entities:
                found[begin:end] = [f"B-{kind}", *[f"I-{kind}"] * (end - begin - 1)]
            return [tag for tag, sign in zip(found, text, strict=True) if sign != " "]

        gold = [tags(row.text, row.label) for row in rows]
        guessed = [tags(row.text, found) for row, found in zip(rows, guesses, strict=True)]
        expected = klue_scores(gold, guessed, list(head.labels))
        assert (scores["entity_macro_f1"], scores["char_macro_f1"]) == pytest.approx(expected)
        flat = [[tag for side in sentences for tag in ["O", *side, "O"]] for sentences in (gold, guessed)]
        strict = {"mode": "strict", "scheme": IOB2, "zero_division": 0}
        macro = seqeval.f1_score([flat[0]], [flat[1]], average="macro", **strict)
        assert scores["entity_macro_f1"] == pytest.approx(100 * macro)
        assert scores["f1"] == pytest.approx(100 * seqeval.f1_score([flat[0]], [flat[1]], **strict))


def test_a_tagger_learns_entities_inside_words(tagger: tuple[Path, Path, dict]) -> None:
    run, data, scores = tagger
    assert scores["f1"] > 90
    assert scores["char_macro_f1"] > 90
    assert json.loads((run / "model/config.json").read_text())["tag_unit"] == "token"
    again = evaluate(run, data, device="cpu")
    assert {name: again[name] for name in ("f1", "entity_macro_f1", "char_macro_f1", "accuracy")} == pytest.approx(
        {name: scores[name] for name in ("f1", "entity_macro_f1", "char_macro_f1", "accuracy")}
    )
    assert list(again["per_class"]) == ["LC", "PS"]
    predictor = Predictor.load(run, "cpu")
    found = predictor("영희이라도 부산에서 간다")["entities"]
    assert [(e["text"], e["start"], e["end"], e["type"]) for e in found] == [("영희", 0, 2, "PS"), ("부산", 6, 8, "LC")]
    (words,) = predictor([["영희이라도", "부산에서"]])
    assert [e["text"] for e in words["entities"]] == ["영희", "부산"]
    facts, lines = read_dev_predictions(run)  # type: ignore[misc]
    counts = mistakes.entity_counts(lines)
    assert {name: counts[name][0] for name in counts} == {"LC": 60, "PS": 60}
    assert "Entities by type" in "".join(mistakes._parts("tags", facts["labels"], lines))
    assert all("".join(line["parts"]) == line["text"].replace(" ", "") for line in lines)


def test_models_of_words_and_of_tokens_are_scored_on_both_kinds_of_rows(tagger, korean: Path, tmp_path: Path) -> None:
    run, data, _ = tagger
    lines = [f"{word} {tag}" for word, tag in zip("민수은 서울에서 간다".split(), ("B-PS", "B-LC", "O"), strict=True)]
    (tmp_path / "words.txt").write_text("\n".join([*lines, "", *lines]))
    assert evaluate(run, tmp_path / "words.txt", device="cpu")["f1"] == 100  # particles are attached to the words
    loaded = load_folder(korean, HeadConfig("tags", ("O", "B-LC", "B-PS")))
    save_folder(tmp_path / "words", loaded.model, loaded.tokenizer, Notes("tag", {}, 32))
    assert "tag_unit" not in json.loads((tmp_path / "words/config.json").read_text())
    by_words = evaluate(tmp_path / "words", data, device="cpu")
    assert by_words["f1"] < 20  # no word is a name without its particle
    assert "char_macro_f1" in by_words


def test_predictions_are_written_and_scored_in_klue_s_form(tagger, tmp_path: Path) -> None:
    run, data, scores = tagger
    rows = list(read_task(find_task("tag"), data, Columns(), labelled=True))
    predictions = list(Predictor.load(run, "cpu").predict_rows(rows))
    write_predictions(find_task("tag"), tmp_path, "ner", rows, predictions)
    assert (tmp_path / "ner.txt").read_text().startswith("## \n" + "\t".join([rows[0].text[0], "B-PS"]))
    official = score_file(tmp_path / "ner.txt", "tag", data)
    assert official["f1"] == pytest.approx(scores["f1"])
    assert official["char_macro_f1"] == pytest.approx(scores["char_macro_f1"])
    (tmp_path / "ner.jsonl").write_text("\n".join(map(json.dumps, predictions)))
    assert score_file(tmp_path / "ner.jsonl", "tag", data) == official


def test_a_bilstm_on_features_learns_from_the_tags_of_sub_tokens(korean: Path) -> None:
    head = HeadConfig("tags", ("O", "B-LC", "I-LC", "B-PS", "I-PS"), features=FeatureConfig("last", 8), unit="token")
    predictor = Predictor(load_folder(korean, head), "cpu")
    model = predictor.torch_engine.model.eval()
    rows = [Row(each["text"], None, each["entities"], "") for each in korean_rows(5)]
    taught = tagging.encode(rows, predictor.tokenizer, Limits(12), head, labelled=True)
    assert not stores_states(head)
    batch = replace(taught.examples, names_words=True).batch(np.arange(len(taught.examples)))
    encoded = tagging.encode(rows, predictor.tokenizer, Limits(12), head, labelled=False)
    loss = 0.0
    for example, logits in zip(taught.examples, predictor.logits(encoded.examples), strict=True):
        tags = torch.from_numpy(example.labels["tags"].values).long()
        loss += float(torch.nn.functional.cross_entropy(torch.from_numpy(logits), tags, reduction="sum"))
    assert model(batch)["task"].item() == pytest.approx(loss, rel=1e-4)

"""Offsets never split a grapheme of several characters: jamo, accents, vowel signs, emoji sequences."""

import json
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from bertsmith.batch import Example
from bertsmith.inference.features import passages
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks import spans
from bertsmith.tasks.description import Limits
from bertsmith.tasks.tagging import find_entities, words_of
from bertsmith.text.tokenizer import Tokenizer, train_wordpiece

TEXTS = {
    "korean": "연습 문제를 모두 풀었다 값",
    "accents": "le café d\u1eb9\u0301jà vu naïve",
    "hindi": "हिन्दी भाषा में लिखें",
    "thai": "ภาษาไทย ที่นี่ น้ำ",
    "emoji": "ok 👩\u200d👩\u200d👧 👍🏽 🇰🇷🇯🇵 ❤\ufe0f\u200d🔥 end",
}


@pytest.fixture(scope="module", params=["uncased", "cased", "jamo", "pieces"])
def tokenizer(request) -> Tokenizer:
    """Tokenizers with words, with jamo, and with single letters as entries."""
    options = {"cased": request.param == "cased", "jamo": request.param == "jamo"}
    return train_wordpiece([*TEXTS.values()] * 4, 120 if request.param == "pieces" else 500, **options)


def decomposed(text: str, places: list[tuple[int, int]]) -> list[str]:
    return [unicodedata.normalize("NFC", text[begin:end]) for begin, end in places]


@pytest.mark.parametrize("name", TEXTS)
def test_decomposed_text_has_the_same_letters_as_composed_text(tokenizer: Tokenizer, name: str) -> None:
    composed, apart = (unicodedata.normalize(form, TEXTS[name]) for form in ("NFC", "NFD"))
    one, other = tokenizer.encode_aligned([composed, apart])
    assert one.ids == other.ids
    assert decomposed(composed, one.offsets) == decomposed(apart, other.offsets)


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("name", TEXTS)
def test_no_token_boundary_is_inside_a_letter(tokenizer: Tokenizer, name: str, form: str) -> None:
    text = unicodedata.normalize(form, TEXTS[name])
    for begin, end in tokenizer.encode_aligned([text])[0].offsets:
        for place in (begin, end):
            after, before = text[place : place + 1], text[place - 1 : place] if place else ""
            assert not unicodedata.category(after or " ").startswith("M")
            assert not "\u1160" <= after <= "\u11ff"
            assert "\u200d" not in (after, before)
            assert not "\U0001f3fb" <= after <= "\U0001f3ff"


def test_emoji_are_not_split() -> None:
    tokenizer = train_wordpiece([*TEXTS.values()] * 4, 500)
    text = TEXTS["emoji"]
    whole = ["ok", "👩\u200d👩\u200d👧", "👍🏽", "🇰🇷🇯🇵", "❤\ufe0f\u200d🔥", "end"]
    aligned = tokenizer.encode_aligned([text])[0]
    words = {n: text[a:b] for n, (a, b) in zip(aligned.word_ids, aligned.offsets, strict=True)}
    assert [unicodedata.normalize("NFC", word) for word in words.values()][:3] == whole[:3]
    tagged = [text[a:b] for a, b in words_of(Row(text, None, None, ""))]
    assert tagged == ["ok", "👩\u200d👩\u200d👧", "👍🏽", "🇰🇷", "🇯🇵", "❤\ufe0f\u200d🔥", "end"]


def answer_of(tokenizer: Tokenizer, context: str, answer: str) -> str:
    """A gold answer mapped to tokens and back, through the task's own encoding and decoding."""
    row = Row("?", context, [{"text": answer, "answer_start": context.index(answer)}], "")
    limits, head = Limits(max_length=128), HeadConfig("span")
    labelled = spans.encode([row], tokenizer, limits, head, labelled=True)
    example: Example = labelled.examples[0]
    logits = np.zeros((len(example.tokens), 2), dtype=np.float32)
    begin, end = np.asarray(example.labels["label"].values)
    logits[begin, 0] = logits[end, 1] = 9
    found = spans.decode([row], spans.encode([row], tokenizer, limits, head, labelled=False), [logits], head, limits)
    return found[0]["text"]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize(
    ("name", "answer"),
    [("korean", "연습"), ("korean", "값"), ("accents", "café"), ("hindi", "में"), ("thai", "ที่นี่"), ("emoji", "👍🏽")],
)
def test_answers_are_not_cut_inside_letters(tokenizer: Tokenizer, name: str, answer: str, form: str) -> None:
    context, answer = unicodedata.normalize(form, TEXTS[name]), unicodedata.normalize(form, answer)
    assert answer_of(tokenizer, context, answer) == answer


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_words_of_features_and_entities_are_not_cut_inside_letters(tokenizer: Tokenizer, form: str) -> None:
    text = unicodedata.normalize(form, "연습 문제를 café में")
    row = Row(text, None, None, "")
    (passage,) = passages([row], tokenizer, "first")
    assert passage.words == text.split()
    places = words_of(row)
    (entity,) = find_entities(text, places, ["B-X", "O", "O", "O"])
    assert entity["text"] == text.split()[0]


def test_ascii_and_composed_text_keep_their_offsets(world: Path) -> None:
    tokenizer = Tokenizer.load(world / "tok")
    for text in ("The length of a list.", "연습 문제 (數學)"):
        aligned = tokenizer.encode_aligned([text])[0]
        assert aligned.offsets == aligned.encoding.offsets


def test_the_command_shows_pieces_ids_and_offsets(tmp_path: Path, run_command) -> None:
    tokenizer = train_wordpiece([*TEXTS.values()] * 4, 500)
    tokenizer.save(tmp_path / "tok")
    text = unicodedata.normalize("NFD", "연습 [MASK] 문제를")

    def shown(*options: str) -> str:
        code, printed, _ = run_command("tokenizer", "encode", tmp_path / "tok", text, *options)
        assert not code
        return printed

    found = json.loads(shown("--json"))
    assert found["tokens"] == ["연습", "[MASK]", "문제를"]
    assert found["ids"] == tokenizer.encode([text])[0]
    assert [text[begin:end] for begin, end in found["offsets"]] == text.split()
    table = shown()
    assert all(token in table for token in found["tokens"])
    assert all(str(number) in table for number in found["ids"])

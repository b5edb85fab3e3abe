"""Vocabularies whose entries end at the borders of Korean morphemes, and the ceiling of answers that they allow."""

import json
import random
import sys
import unicodedata
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from bertsmith.corpus.doctor.examination import examine
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.rows.columns import Row
from bertsmith.tasks.ceiling import span_ceiling
from bertsmith.tasks.task import find_task
from bertsmith.text import morphemes
from bertsmith.text.morphemes import BORDER, Bordered, bordered, borders, divided
from bertsmith.text.tokenizer import Tokenizer, train_byte_bpe, train_unigram, train_wordpiece

STEMS = ["학교", "서울", "사람", "바다", "나무", "하늘", "도시", "역사", "음악", "대학", "강물", "겨울", "친구", "마을"]
PARTICLES = ["에서", "은", "을", "이", "에", "의", "으로", "에게", "만", "도"]
TRAIN = {"wordpiece": train_wordpiece, "bytes": train_byte_bpe, "unigram": train_unigram}


def texts() -> list[str]:
    rng = random.Random(7)
    return [" ".join(rng.choice(STEMS) + rng.choice(PARTICLES) for _ in range(9)) + "." for _ in range(400)]


def places(words: list[str]) -> list[list[int]]:
    """The borders of the made-up words: where the particle begins."""
    return [[2] if word[:2] in STEMS and len(word) > 2 else [] for word in words]


@pytest.fixture(autouse=True)
def _made_up_analyser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kiwi" not in request.node.name:
        monkeypatch.setattr(morphemes, "open_analyser", lambda name: places)


def share_of_borders(tokenizer: Tokenizer) -> float:
    """How many words of a stem and a particle are divided between the two."""
    words = [stem + particle for stem in STEMS for particle in PARTICLES]
    offsets = [aligned.offsets for aligned in tokenizer.encode_aligned(words)]
    return sum(any(begin == 2 for begin, _ in found) for found in offsets) / len(words)


@pytest.mark.parametrize("kind", TRAIN)
def test_words_are_divided_at_morphemes(kind: str) -> None:
    lines = texts()
    plain, aware = TRAIN[kind](lines, 700), TRAIN[kind](lines, 700, morphemes=bordered(lines, "made up"))
    assert share_of_borders(aware) == 1.0
    assert share_of_borders(plain) < 0.7
    assert all(BORDER not in entry for entry in aware.backend.get_vocab())
    assert aware.encode(lines) != plain.encode(lines)
    text = "나무에서 친구에게"
    assert aware.decode(aware.encode([text])[0]).replace(" ", "") == text.replace(" ", "")


def test_wordpiece_marks_morphemes_inside_words_as_continuations() -> None:
    lines = texts()
    vocab = train_wordpiece(lines, 700, morphemes=bordered(lines, "made up")).backend.get_vocab()
    assert {*STEMS} <= {*vocab}
    assert {f"##{particle}" for particle in PARTICLES} <= {*vocab}
    longer = [entry for entry in vocab if entry.startswith("학교") and entry != "학교"]
    assert longer == []
    assert sorted(vocab.values()) == list(range(len(vocab)))


def test_the_same_text_gives_the_same_vocabulary_which_a_plain_tokenizer_opens(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    path = tmp_path / "text.txt"
    path.write_text("\n".join(texts()), encoding="utf-8")
    first, second = (
        train_tokenizer([path], tmp_path / name, vocab_size=700, morphemes="kiwi-stand-in").tokenizer for name in "ab"
    )
    assert first.hash == second.hash
    plain = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "a" / "tokenizer.json"))
    line = "학교에서 새로운 사람을 만났다."
    assert plain(line, add_special_tokens=False)["input_ids"] == first.encode([line])[0]


def test_borders_are_where_particles_and_endings_begin() -> None:
    def analysed(*parts: tuple[str, int, int]) -> list[int]:
        return borders(SimpleNamespace(tag=tag, start=start, end=end) for tag, start, end in parts)

    assert analysed(("NNP", 0, 5), ("JKB", 5, 7), ("JX", 7, 8)) == [5, 7]
    assert analysed(("NNG", 0, 2), ("XSV", 2, 3), ("EP", 2, 3), ("EF", 3, 4)) == [2, 3]  # 했 holds two morphemes
    assert analysed(("VV", 0, 2), ("ETM", 1, 2)) == []
    assert analysed(("JKS", 0, 1), ("NNG", 1, 3)) == []
    assert divided("서울에서는", [2, 4]) == f"서울{BORDER}에서{BORDER}는"


def test_words_that_were_not_analysed_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(morphemes, "MOST_CHARACTERS", 4)
    found = bordered(["학교에서 학교에서 바다로 ABC 1902"], "made up")
    assert list(found) == [f"학교{BORDER}에서 학교{BORDER}에서   ABC 1902"]
    assert isinstance(found, Bordered)


def test_text_of_decomposed_syllables_gives_the_same_vocabulary() -> None:
    lines = texts()
    decomposed = [unicodedata.normalize("NFD", line) if number % 2 else line for number, line in enumerate(lines)]
    one, other = (train_wordpiece(each, 700, morphemes=bordered(each, "made up")) for each in (lines, decomposed))
    assert one.hash == other.hash


def test_bad_choices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = tmp_path / "text.txt"
    path.write_text("\n".join(texts()[:20]), encoding="utf-8")
    with pytest.raises(UserError, match="--morphemes 'mecab' is not one of kiwi"):
        train_tokenizer([path], tmp_path / "tok", vocab_size=300, morphemes="mecab")
    with pytest.raises(UserError, match="--morphemes is for --kind wordpiece, bytes and unigram, without --jamo"):
        train_tokenizer([path], tmp_path / "tok", vocab_size=300, kind="bpe", morphemes="kiwi")
    monkeypatch.setitem(sys.modules, "kiwipiepy", None)
    with pytest.raises(UserError, match=r"needs kiwipiepy: pip install 'bertsmith\[korean\]'"):
        train_tokenizer([path], tmp_path / "tok", vocab_size=300, morphemes="kiwi")
    path.write_text("no Hangul here\n" * 9, encoding="utf-8")
    with pytest.raises(UserError, match="divides Korean words, and the text has none"):
        train_tokenizer([path], tmp_path / "tok", vocab_size=300, morphemes="kiwi")
    assert not (tmp_path / "tok").exists()


@pytest.mark.slow
def test_kiwi_finds_particles_and_endings() -> None:
    pytest.importorskip("kiwipiepy")
    words = ["서울대학교에서는", "참석했다", "학생들이", "가을"]
    found = morphemes.open_analyser("kiwi")(words)
    assert [divided(w, p).split(BORDER) for w, p in zip(words, found, strict=True)] == [
        ["서울대학교", "에서", "는"],
        ["참석", "했", "다"],
        ["학생", "들", "이"],
        ["가을"],
    ]


def questions(answers: list[tuple[str, int]], context: str) -> list[Row]:
    return [Row("질문", context, [{"text": text, "answer_start": start}], "a row") for text, start in answers]


def test_the_ceiling_counts_answers_that_end_at_tokens() -> None:
    lines, context = texts(), "서울에서 친구에게 음악을"
    rows = questions([("서울", 0), ("친구", 5), ("음악을", 10), ("서울에", 0)], context)
    task = find_task("korquad")
    aware = span_ceiling(rows, train_wordpiece(lines, 700, morphemes=bordered(lines, "made up")), task)
    assert (aware.questions, aware.on_borders, aware.exact_match) == (4, 75.0, 75.0)
    assert 90 < aware.f1 < 100  # of 서울에서, 서울에 has an F1 of 6/7
    assert aware.f1 == pytest.approx(100 * (3 + 6 / 7) / 4)
    whole = train_wordpiece([context] * 300, 700)
    assert [whole.token(number) for number in whole.encode([context])[0]] == context.split()
    assert span_ceiling(rows, whole, task).on_borders == 25.0
    assert span_ceiling(questions([("없음", 0)], context), whole, task) is None


def test_the_ceiling_is_the_best_of_all_spans_of_tokens() -> None:
    """It is compared with all spans of tokens, scored one by one."""
    from bertsmith.tasks.squad_scores import squad1_scores

    lines, context = texts(), "하늘의 강물은 (겨울) 바다로, 도시에만"
    tokenizer, task = train_wordpiece(lines, 300), find_task("korquad")
    offsets = tokenizer.encode_aligned([context])[0].offsets
    for begin, end in pairwise(range(0, len(context), 3)):
        answer = context[begin : end + 2]
        texts_of = {context[a:b] for i, (a, _) in enumerate(offsets) for _, b in offsets[i:]}
        exact = max(squad1_scores({"": [answer]}, {"": t}, korean=True)["exact_match"] for t in texts_of)
        found = span_ceiling(questions([(answer, begin)], context), tokenizer, task)
        assert found.exact_match <= exact


def test_the_doctor_reports_the_ceiling(tmp_path: Path) -> None:
    context = "서울에서 친구에게 음악을"
    whole = train_wordpiece([context] * 300, 700)
    whole.save(tmp_path / "tok")
    (tmp_path / "text.txt").write_text("\n\n".join(texts()), encoding="utf-8")
    paragraph = {
        "context": context,
        "qas": [{"id": "1", "question": "어디에서?", "answers": [{"text": "서울", "answer_start": 0}]}],
    }
    answers = tmp_path / "dev.json"
    answers.write_text(json.dumps({"data": [{"title": "", "paragraphs": [paragraph]}]}), encoding="utf-8")
    found = examine([tmp_path / "text.txt"], tokenizer=tmp_path / "tok", answers=answers)
    (finding,) = [finding for finding in found.findings if finding.name == "answers"]
    assert (finding.severity, finding.value) == ("warning", 0.0)
    assert finding.sentence.startswith("0.0 % of the answers begin and end at a border of tokens, so exact match can")
    assert "--morphemes kiwi" in finding.fix
    with pytest.raises(UserError, match="--answers needs --tokenizer"):
        examine([tmp_path / "text.txt"], answers=answers)

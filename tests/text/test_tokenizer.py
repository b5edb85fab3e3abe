"""Training is reproducible, Hangul is not decomposed, `transformers` gives the same tokens, sentences are split."""

import json
import os
import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from conftest import KOREAN
from tokenizers import normalizers

from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import Tokenizer, train_wordpiece
from bertsmith.text.wordpiece import normalizer

TEXTS = [
    "한국어는 좋다.",
    unicodedata.normalize("NFD", "한국어는 좋다."),
    "The length of a list is its number of items.",
    "Café Ünïcode naïve ÅNGSTRÖM",
    "漢字とかな, 中文字符",
    "emoji 😀 and 👩‍👩‍👧 here",
    "the [MASK] of a [MASK]",
    "tabs\tand\u00a0spaces\u200b, (brackets)[0]",
    "word" * 60,
    "",
]
JAMO = re.compile("[\u1100-\u11ff]")


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(i) for i in tokenizer.encode([text])[0]]


@pytest.fixture(scope="session")
def uncased(tokenizer_folder: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_folder)


@pytest.fixture(scope="session")
def cased(bilingual: list[str]) -> Tokenizer:
    return train_wordpiece([*bilingual, *["The Café of André, ÅNGSTRÖM."] * 50], 1200, cased=True)


TRAIN = """
import sys
from pydoc_data.topics import topics
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.tokenizer import train_wordpiece
texts = list(topics.values()) + [sys.stdin.read()] * 5
print(train_wordpiece(texts, 700, cased=sys.argv[1] == "cased").hash)
"""


@pytest.mark.parametrize("case", ["cased", "uncased"])
def test_training_is_deterministic(case):
    """The library's hash tables differ from process to process, and Python's with the seed."""
    text = KOREAN + unicodedata.normalize("NFD", KOREAN) + " ".join(TEXTS) + " e\u0301 x\u0302\u0303 ½ ﬁ … «» 123"
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1"}
        command = [sys.executable, "-c", TRAIN, case]
        root = Path(__file__).parent.parent.parent
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, check=True, env=environment, cwd=root, encoding="utf-8"
        )
        found.add(done.stdout.strip())
    assert len(found) == 1
    assert re.fullmatch("[0-9a-f]{16}", found.pop())


@pytest.mark.parametrize("size", [300, 1000, 1777])
def test_the_vocabulary_size_is_reached(bilingual, size):
    trained = train_wordpiece(bilingual, size)
    assert trained.vocab_size == size
    assert len(trained.backend.get_vocab()) == size


@pytest.mark.parametrize("size", [10, 11, 17, 40, 100, 513])
def test_the_vocabulary_size_is_never_exceeded(size):
    syllables = "".join(chr(c) for c in range(0xAC00, 0xAC00 + 2000))  # more characters than entries
    assert train_wordpiece([syllables, KOREAN, "some words and some more words"] * 3, size).vocab_size <= size


@pytest.mark.parametrize("cased", [False, True])
def test_special_tokens_come_first(bilingual, cased):
    trained = train_wordpiece(bilingual[:200], 200, cased=cased)
    assert trained.special_ids == (0, 1, 2, 3, 4)
    assert [trained.token(i) for i in range(5)] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def test_every_character_inside_a_word_has_a_piece(uncased):
    assert "[UNK]" not in tokens(uncased, "zyxwvutsrqponmlkjihgfedcba 9876543210")


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_uncased_does_not_decompose_hangul(uncased, form):
    found = tokens(uncased, unicodedata.normalize(form, "한국어는 좋다"))
    assert "".join(found).replace("##", "") == "한국어는좋다"
    assert not JAMO.search("".join(found))


def test_training_on_decomposed_hangul_gives_the_same_vocabulary(bilingual):
    decomposed = [unicodedata.normalize("NFD", t) for t in bilingual]
    assert train_wordpiece(decomposed, 600).hash == train_wordpiece(bilingual, 600).hash


@pytest.mark.parametrize("text", TEXTS)
def test_jamo_is_the_original_normalisation(text):
    plain = normalizers.BertNormalizer(clean_text=True, handle_chinese_chars=True, strip_accents=True, lowercase=True)
    assert normalizer(jamo=True).normalize_str(text) == plain.normalize_str(text)


def test_a_jamo_vocabulary_decomposes_hangul(bilingual):
    found = tokens(train_wordpiece(bilingual, 800, jamo=True), "한국어는 좋다")
    assert "".join(found).replace("##", "") == unicodedata.normalize("NFD", "한국어는좋다")


def test_uncased_drops_capitals_and_accents(uncased):
    assert "".join(tokens(uncased, "The Café of ANDRÉ")).replace("##", "") == "thecafeofandre"


@pytest.mark.parametrize("text", ["The Café of André", "ÅNGSTRÖM", "한국어는 좋다"])
def test_cased_keeps_capitals_and_accents(cased, text):
    assert "".join(tokens(cased, text)).replace("##", "") == text.replace(" ", "")
    assert cased.lowercase is False


@pytest.mark.parametrize("text", ["The Café of André", "한국어는 좋다"])
def test_cased_reads_decomposed_text_as_composed(cased, text):
    assert tokens(cased, unicodedata.normalize("NFD", text)) == tokens(cased, text)


def test_cased_training_on_decomposed_text_has_no_unknown_tokens():
    trained = train_wordpiece([unicodedata.normalize("NFD", KOREAN)] * 20, 400, cased=True)
    assert "[UNK]" not in tokens(trained, unicodedata.normalize("NFD", "우리는 오늘 학교에 간다."))


@pytest.mark.parametrize(("length", "known"), [(100, True), (101, False), (5000, False)])
def test_long_words_are_unknown(uncased, length, known):
    found = tokens(uncased, "a" * length)
    assert (found != ["[UNK]"]) == known
    assert not known or "".join(found).replace("##", "") == "a" * length


@pytest.mark.parametrize("character", ["☃", "꿹", "𝔘", "य"])
def test_unknown_characters_are_unknown(uncased, character):
    assert tokens(uncased, f"list {character} list") == ["list", "[UNK]", "list"]


def test_decode_restores_the_text(uncased):
    assert uncased.decode(uncased.encode(["the length of a list"], special=True)[0]) == "the length of a list"


def test_offsets_point_into_the_text(uncased):
    text = "The length of 한국어"
    found = uncased.encode_aligned([text])[0]
    assert [text[a:b].lower() for a, b in found.offsets] == [t.removeprefix("##") for t in found.tokens]


def test_saved_folder_loads_back(uncased, tmp_path):
    uncased.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert again.hash == uncased.hash
    assert again.encode(TEXTS) == uncased.encode(TEXTS)
    assert again.lowercase is True
    assert sorted(f.name for f in (tmp_path / "again").iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ]
    lines = (tmp_path / "again" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    assert lines == [again.token(i) for i in range(again.vocab_size)]


def test_vocabulary_and_normalisation_change_the_hash(bilingual):
    texts = bilingual[:300]
    others = [train_wordpiece(texts, 200), train_wordpiece(texts, 201), train_wordpiece(texts, 200, cased=True)]
    assert len({t.hash for t in others}) == 3


def test_vocab_txt_alone_is_read_as_the_released_format(uncased, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(uncased.token(i) for i in range(uncased.vocab_size)), "utf-8")
    released = Tokenizer.load(tmp_path)
    english = [t for t in TEXTS[2:] if "word" not in t]
    assert released.encode(english, special=True) == uncased.encode(english, special=True)
    assert JAMO.search(released.backend.normalizer.normalize_str("한국어"))
    assert len(tokens(released, "a" * 100)) > 1
    assert tokens(released, "a" * 101) == ["[UNK]"]
    assert tokens(released, "a" * 201) == ["[UNK]"]


@pytest.mark.parametrize("case", ["cased", "uncased"])
def test_lower_casing_is_decided_by_tokenizer_json(case, request, tmp_path):
    tokenizer = request.getfixturevalue(case)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": not tokenizer.lowercase}))
    assert Tokenizer.load(tmp_path).lowercase is (case == "uncased")
    (tmp_path / "tokenizer_config.json").unlink()
    assert Tokenizer.load(tmp_path).lowercase is (case == "uncased")


@pytest.fixture(scope="session")
def reference(tokenizer_folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.mark.parametrize("text", TEXTS)
def test_transformers_gives_the_same_ids(uncased, reference, text):
    assert reference(text)["input_ids"] == uncased.encode([text], special=True)[0]
    assert reference(text, add_special_tokens=False)["input_ids"] == uncased.encode([text])[0]


def test_transformers_gives_the_same_ids_cased(cased, tmp_path):
    from transformers import AutoTokenizer

    cased.save(tmp_path)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert [reference(t)["input_ids"] for t in TEXTS] == cased.encode(TEXTS, special=True)


@pytest.mark.parametrize(("a", "b"), [("", TEXTS[0]), *zip(TEXTS[:-1], TEXTS[-2::-1], strict=True)])
def test_transformers_gives_the_same_pairs(uncased, reference, a, b):
    first, second = uncased.encode([a, b])
    cls_id, sep_id = uncased.id("[CLS]"), uncased.id("[SEP]")
    pair = reference(a, b)
    assert pair["input_ids"] == [cls_id, *first, sep_id, *second, sep_id]
    assert pair["token_type_ids"] == [0] * (len(first) + 2) + [1] * (len(second) + 1)


def test_transformers_knows_the_special_tokens(reference):
    assert [
        reference.pad_token,
        reference.unk_token,
        reference.cls_token,
        reference.sep_token,
        reference.mask_token,
    ] == [*WORDPIECE.special_tokens]
    assert reference.model_max_length == 512


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no such folder: .*nowhere"):
        Tokenizer.load(tmp_path / "nowhere")


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no tokenizer\.json and no vocab\.txt"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", '{"model": 3}', "[]"])
def test_a_broken_tokenizer_json_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer file"):
        Tokenizer.load(tmp_path)


def test_a_broken_tokenizer_config_is_refused(uncased, tmp_path):
    uncased.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": tru')
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not valid JSON"):
        Tokenizer.load(tmp_path)


def test_a_vocab_txt_without_mask_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n")
    with pytest.raises(UserError, match=r"lacks \[MASK\]"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_json_without_mask_is_refused(uncased, tmp_path):
    values = json.loads(uncased.backend.to_str())
    values["added_tokens"] = [t for t in values["added_tokens"] if t["content"] != "[MASK]"]
    del values["model"]["vocab"]["[MASK]"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"lacks \[MASK\]"):
        Tokenizer.load(tmp_path)


def test_a_vocab_txt_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_bytes("\n".join(WORDPIECE.special_tokens).encode() + b"\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"vocab\.txt"):
        Tokenizer.load(tmp_path)


def test_the_id_of_a_missing_token_is_an_error(uncased):
    with pytest.raises(UserError, match="'nosuchtoken' is not in the vocabulary"):
        uncased.id("nosuchtoken")


@pytest.mark.parametrize("texts", [[], [""], [" \t\n"], ["\u200b\u0000\ufffd"]])
def test_training_on_text_without_words_is_refused(texts):
    with pytest.raises(UserError, match="no words"):
        train_wordpiece(texts, 100)


@pytest.mark.parametrize("size", [-1, 0, 5, 9])
def test_a_too_small_vocabulary_size_is_refused(size):
    with pytest.raises(UserError, match=f"--vocab-size {size} is too small"):
        train_wordpiece(["some words"], size)


def test_a_tokenizer_is_trained_from_files_to_a_folder(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(KOREAN, encoding="utf-8")
    made = train_tokenizer([tmp_path / "a.txt"], tmp_path / "tok", vocab_size=5000).tokenizer
    assert Tokenizer.load(tmp_path / "tok").hash == made.hash
    assert f"supports {made.vocab_size:,} entries, fewer than --vocab-size 5,000" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "size"), [(" \n\n", 100), ("some words\n", 3)])
def test_failed_training_leaves_no_files(tmp_path, content, size):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(UserError):
        train_tokenizer([tmp_path / "a.txt"], tmp_path / "tok", vocab_size=size)
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


# A bar marks the boundary between two sentences.
ENGLISH = [
    "The cat sat on the mat.",
    "The cat sat on the mat. |The dog ran.",
    "No full stop at the end",
    "Dr. Kim met Mr. and Mrs. Lee. |They talked.",
    "Prof. Smith lives on St. Mary's Street.",
    "She moved to the U.S. Army base in 1999. |It was cold.",
    "Fruit, e.g. Apples, is sweet. |Eat it.",
    "The second one, i.e. Paris, is larger.",
    "J. R. R. Tolkien wrote it. |Everybody read it.",
    "John F. Kennedy spoke.",
    "Pi is 3.14159. |It never ends.",
    "He paid $3.50. |She paid 4.",
    "Version 2.0.1 is out. |Get it.",
    "Is it true? |Yes. |Really! |Good.",
    "Is that so?! |Yes!!! |Fine.",
    '"Is it true?" he asked. |She nodded.',
    '"It is true." |She nodded.',
    "“It is true.” |She nodded.",
    '"Go!" they cried.',
    "He said “yes”. |Then he left.",
    "Well... maybe. |Who knows?",
    "He waited… |Nothing came.",
    "He left (quickly). |She stayed.",
    "He left. |(It was late.) |She stayed.",
    "See [1]. |It is proven.",
    "See Fig. 3 and Eq. 4 for details. |They are clear.",
    "Smith et al. Found nothing new.",
    "He came at 5 p.m. Monday.",
    "Germany vs. France ended 2:1. |Nobody cried.",
    "Is it 3 p.m.? |No.",
    "Visit example.com now. |Then call.",
    "In 1999 it rained. |In 2000 it snowed. |Then came the sun.",
    "1. Introduction",
    "12. Results of the work",
    "He got 5. |She got 6.",
    "The No. 5 bus came on Sat. 3 May.",
    "On Sept. 11 it happened. |On Oct. 7 too.",
    "Yes. |'Tis true.",
    "  Spaces   around.   |And between.  ",
    "A line.\u00a0|Another after a no-break space.",
]
EAST_ASIAN = [
    "한국어는 좋다.",
    "한국어는 좋다. |영어도 좋다.",
    "안녕하세요? |저는 김철수입니다. |반갑습니다!",
    "그는 갔다. |그녀는 왔다. |우리는 남았다. |끝이다.",
    "약 3.5km를 걸었다. |힘들었다.",
    "오늘은 3.1절이다. |쉬는 날이다.",
    '그는 "그래."라고 말했다. |나는 갔다.',
    "그는 “안녕.”이라고 말했다. |우리는 웃었다.",
    "정말?! |그렇군요.",
    "값은 1,000원이다. |비싸지 않다.",
    "Dr. 김은 서울에 산다. |그는 의사다.",
    "A사 vs. B사의 경기였다.",
    "1. 서론",
    "(그는 갔다.) |그녀는 왔다.",
    "삼성전자(주)는 회사이다. |크다.",
    "무엇을 할까요? |함께 가요! |좋습니다.",
    "그는 말했다: '좋다.' |그리고 갔다.",
    "비가 온다… |우산이 없다.",
    "2024년 5월 10일에 열렸다. |모두 왔다.",
    unicodedata.normalize("NFD", "한국어는 좋다. |영어도 좋다."),
    "今日は晴れ。|明日は雨。",
    "本当？|はい。",
    "今天很好。|明天呢？|不知道！",
    "彼は「行く。」|彼女は行かない。",
    "你好！ |再见。",
    "这是3.5公里。|很远。",
]


@pytest.mark.parametrize("marked", ENGLISH + EAST_ASIAN)
def test_sentences_are_split_at_the_bars(marked):
    assert split_sentences(marked.replace("|", "")) == [s.strip() for s in marked.split("|")]


@pytest.mark.parametrize("paragraph", ["", " ", "\n\t"])
def test_blank_paragraphs_have_no_sentences(paragraph):
    assert split_sentences(paragraph) == []


@pytest.mark.parametrize(
    "marked",
    [
        'He said "yes". |Then he left.',  # a straight quote before the full stop
        "They call it 'home'. |It is not.",
        "The cat sat . |The dog ran .",  # text that is already tokenised
        "He said no. |Then he left.",  # `no` is an abbreviation before a number only
        "We sat. |They lay in the sun. |It was modern art. |Nothing more.",  # words that are also abbreviations
        "J.K. Rowling and T.S. Eliot wrote. |We read.",  # initials without spaces
        "He came—Mr. Smith saw him.",
        "2024. 5. 10. 서울에서 열렸다. |모두 왔다.",  # a Korean date
        "가. 사업 개요",  # the letter of a list item
        "何！？|そうか。",  # two marks at one sentence end
    ],
)
def test_sentences_are_split_in_harder_cases(marked):
    assert split_sentences(marked.replace("|", "")) == [s.strip() for s in marked.split("|")]


def test_splitting_sentences_loses_no_text(bilingual):
    for paragraph in bilingual[::10]:
        assert "".join("".join(split_sentences(paragraph)).split()) == "".join(paragraph.split())


@pytest.mark.parametrize("unit", ["Dr. Kim and ", "word " * 5, "what? no! ", "x.", "1. 2. 3. ", ". . ", '"It." '])
def test_the_time_for_long_paragraphs_is_linear(unit):
    """A list of names or references on one line must not slow down a build."""
    began = time.process_time()
    split_sentences(unit * 4000)
    assert time.process_time() - began < 1.5

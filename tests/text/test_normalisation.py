"""The normalisation that users choose: its effect, kept in the saved tokenizer, with offsets into the original."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from conftest import KOREAN
from tokenizers import normalizers

from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.text.normalisation import Normalisation, character_map, widths
from bertsmith.text.tokenizer import Kind, Tokenizer
from bertsmith.text.training import train

CHAT = "재미있다ㅋㅋㅋㅋㅋ １２３점 ＡＢＣ!!!! 2024년 ﬁn ①②"
TEXTS = [KOREAN, CHAT, unicodedata.normalize("NFD", CHAT), "ABC fin 12 점 ㅋㅋ ㅠㅠ 값이 パ1"] * 3
KINDS = ("wordpiece", "bytes", "unigram", "bpe", "words")
CHOSEN = ["nfkc", "width", "repeats=2", "numbers"]
HARD = [
    "ㅋㅋㅋㅋㅋ",
    "영화ㅋㅋㅋㅋ재미있다!!!!!!",
    "１２３점 ＡＢＣ　ﾊﾟﾊﾟ ￦１００",
    unicodedata.normalize("NFD", "값이 많다ㅋㅋㅋ"),
    "ﬁn ﬂow ㎡ ①②③ ℃",
    "....ㅠㅠㅠㅠ♥♥♥♥ 가가가가 1000000 soooo",
]


def trained(kind: Kind, *chosen: str) -> Tokenizer:
    return train(TEXTS, 900, kind, cased=None, jamo=False, normalise=Normalisation.parse(chosen))


@pytest.fixture(scope="module", params=KINDS)
def chosen(request: pytest.FixtureRequest) -> Tokenizer:
    return trained(request.param, *CHOSEN)


@pytest.mark.parametrize(
    ("values", "text", "expected"),
    [
        ([], "１２ ㅋㅋㅋㅋ ①", "１２ ㅋㅋㅋㅋ ①"),
        (["nfc"], unicodedata.normalize("NFD", "값이"), "값이"),
        (["nfkc"], "１２ ﬁn ① ㎡", "12 fin 1 m2"),
        (["width"], "１２ ＡＢ　ﾊﾟ ﾡ ￦ ﬁ ①", "12 AB パ ㄱ ₩ ﬁ ①"),
        (["repeats=2"], "ㅋㅋㅋㅋㅋ!!!! ㅠㅠ ㅎ ♥♥♥ ... 1000 소소소소 aaaa", "ㅋㅋ!! ㅠㅠ ㅎ ♥♥ .. 1000 소소소소 aaaa"),
        (["repeats=1"], "ㅋㅋㅋㅎㅎㅎ!?!?", "ㅋㅎ!?!?"),
        (["nfkc", "repeats=3"], "ㅋㅋㅋㅋㅋ", unicodedata.normalize("NFKC", "ㅋㅋㅋ")),
        (["numbers"], "2024년 １２월 ٣", "0000년 00월 0"),
        (["numbers", "repeats=2"], "1234!!!", "0000!!"),
    ],
)
def test_each_choice(values: list[str], text: str, expected: str) -> None:
    assert Normalisation.parse(values).around([]).normalize_str(text) == expected


def test_widths_are_unicode_s_own() -> None:
    """The table changes exactly the characters that Unicode names wide or narrow, as NFKC does for all but jamo."""
    normal, table = normalizers.Precompiled(character_map(widths())), widths()
    characters = [chr(code) for code in range(1, 0x11000) if not 0xD800 <= code < 0xE000]
    assert [c for c in characters if normal.normalize_str(c) != table.get(c, c)] == []
    assert {c: unicodedata.normalize("NFKC", c) for c in table if not "ﾠ" <= c <= "ￜ" and c != "￣"} == {
        c: text for c, text in table.items() if not "ﾠ" <= c <= "ￜ" and c != "￣"
    }
    assert normal.normalize_str("".join(table)) == "".join(table.values())


def test_the_default_is_unchanged() -> None:
    """Without a choice, and with the kind's own form by name, the files are the same bytes."""
    for kind in KINDS:
        own = "nfkc" if kind == "unigram" else "nfc"
        assert trained(kind).files() == trained(kind, own).files()
    steps = json.loads(trained("wordpiece").files()["tokenizer.json"])["normalizer"]
    assert [step["type"] for step in steps["normalizers"]] == ["BertNormalizer", "NFC"]
    assert json.loads(trained("bytes").files()["tokenizer.json"])["normalizer"] == {"type": "NFC"}


def test_a_plain_fast_tokenizer_gives_the_same_ids(chosen: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    chosen.save(tmp_path)
    again, plain = Tokenizer.load(tmp_path), PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert again.hash == chosen.hash
    expected = chosen.encode(HARD)
    assert again.encode(HARD) == expected
    assert [plain(text, add_special_tokens=False)["input_ids"] for text in HARD] == expected
    auto = AutoTokenizer.from_pretrained(tmp_path)
    assert [auto(text, add_special_tokens=False)["input_ids"] for text in HARD] == expected


def test_texts_that_differ_in_what_is_chosen_have_the_same_ids(chosen: Tokenizer) -> None:
    pairs = [("ㅋㅋㅋㅋㅋㅋ 12점!!!!", "ㅋㅋ 34점!!"), ("１２３ ＡＢＣ", "123 ABC"), ("ﬁn ①", "fin 2")]
    for one, other in pairs:
        assert chosen.encode([one]) == chosen.encode([other])
        assert chosen.encode([unicodedata.normalize("NFD", one)]) == chosen.encode([other])


@pytest.mark.parametrize("text", HARD)
def test_offsets_cover_the_original(chosen: Tokenizer, text: str) -> None:
    """Every character but spaces is in a token; only a token of a space alone covers nothing."""
    aligned = chosen.encode_aligned([text])[0]
    covered = {place for begin, end in aligned.offsets for place in range(begin, end)}
    assert {place for place, character in enumerate(text) if not character.isspace()} <= covered
    alone = [token for token, (begin, end) in zip(aligned.tokens, aligned.offsets, strict=True) if begin == end]
    assert set(alone) <= {"Ġ"}
    starts = [begin for begin, _ in aligned.offsets]
    assert starts == sorted(starts)


def test_offsets_of_hard_strings() -> None:
    def pieces(text: str, *values: str) -> list[tuple[str, str]]:
        tokenizer = trained("wordpiece", *values)
        aligned = tokenizer.encode_aligned([text])[0]
        return [(token, text[a:b]) for token, (a, b) in zip(aligned.tokens, aligned.offsets, strict=True)]

    assert pieces("!!!!! ㅋㅋㅋㅋㅋ", "repeats=2")[:2] == [("!", "!!!!"), ("!", "!")]
    assert "".join(part for _, part in pieces("점ㅋㅋㅋㅋㅋ점", "repeats=2")) == "점ㅋㅋㅋㅋㅋ점"
    assert pieces("１２ ＡＢＣ", "width")[-1] == ("abc", "ＡＢＣ")
    assert pieces("ﾊﾟ１", "width") == [("ハ1", "ﾊﾟ１")]
    assert {part for _, part in pieces("ﾊﾟ", "nfkc")} == {"ﾊﾟ"}
    decomposed = unicodedata.normalize("NFD", "값이")
    assert "".join(part for _, part in pieces(decomposed, "nfkc")) == decomposed
    assert pieces("ﬁn", "nfkc") == [("fin", "ﬁn")]
    assert {part for _, part in pieces("㎡", "nfkc")} == {"㎡"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalise": ["nfd"]}, "--normalise 'nfd' is not one of nfc, nfkc, width, repeats=N, numbers"),
        ({"normalise": ["nfc", "nfkc"]}, "nfc and nfkc exclude each other"),
        ({"normalise": ["repeats=0"]}, "'repeats=0': N of repeats=N is a number from 1 to 100"),
        ({"normalise": ["repeats"]}, "'repeats': N of repeats=N is a number"),
        ({"normalise": ["width=2"]}, "--normalise 'width=2' is not one of"),
        ({"normalise": ["width"], "jamo": True}, "give only one of --jamo and --normalise"),
    ],
)
def test_bad_choices_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(KOREAN, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        train_tokenizer([tmp_path / "a.txt"], tmp_path / "tok", vocab_size=300, **options)
    assert not (tmp_path / "tok").exists()

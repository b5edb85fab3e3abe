"""The characters of a vocabulary: ASCII, the letters of the main scripts, and Hangul up to half the entries."""

import base64
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from bertsmith.errors import UserError
from bertsmith.text.frame import WORDPIECE
from bertsmith.text.long_words import MAX_WORD
from bertsmith.text.normalisation import Normalisation
from bertsmith.text.tokenizer import Tokenizer, train_unigram, train_wordpiece

SIGNS = "!\"#$%&'()*+,-./0123456789:;<=>?@[\\]^_`abcdefghijklmnopqrstuvwxyz{|}~"
SYLLABLES = [bytes((row, cell)).decode("euc_kr") for row in range(0xB0, 0xC9) for cell in range(0xA1, 0xFF)]
PLAIN = ["그는 학교에 갔다", "영화가 정말 좋았다"] * 3000


def pieces(tokenizer: Tokenizer) -> set[str]:
    return set(tokenizer.backend.get_vocab())


@pytest.mark.parametrize("texts", [["the cat sat"] * 50, PLAIN], ids=["english", "korean"])
def test_printable_ascii_is_always_in_the_vocabulary(texts: list[str]) -> None:
    entries = pieces(train_wordpiece(texts, 1000))
    assert set(SIGNS) <= entries
    assert {f"##{c}" for c in SIGNS if c.isalnum()} <= entries
    assert not any(c.isascii() and c.isupper() for c in entries - set(WORDPIECE.special_tokens))
    assert set(map(chr, range(33, 127))) <= pieces(train_wordpiece(texts, 1000, cased=True))


def test_a_korean_vocabulary_has_all_syllables_of_the_standard() -> None:
    assert len(SYLLABLES) == 2350
    tokenizer = train_wordpiece(PLAIN, 12_000)
    assert set(SYLLABLES) <= pieces(tokenizer)
    assert {f"##{c}" for c in SYLLABLES} <= pieces(tokenizer)
    assert tokenizer.token(1) not in [
        tokenizer.token(i) for i in tokenizer.encode(["걍 봤는데 쩜 ㅋㅋㅋ ㅠㅠ #펐음"])[0]
    ]
    assert not set(SYLLABLES) & pieces(train_wordpiece(["the cat sat"] * 50, 12_000))


@pytest.mark.parametrize("train", [train_wordpiece, train_unigram])
def test_single_jamo_are_known_in_every_unicode_form(train: Callable[..., Tokenizer]) -> None:
    tokenizer = train(PLAIN, 12_000, normalise=Normalisation(form="nfkc"))
    unknown = tokenizer.backend.token_to_id(tokenizer.frame.unknown)
    assert unknown not in tokenizer.encode(["갔다 ㅋㅋㅋ ㅠㅠ ㅇㅇ ㄳ"])[0]


def test_syllables_and_jamo_are_preferred_to_rare_ideographs() -> None:
    """Half of a small vocabulary cannot hold all characters: those that are parts of words come first."""
    hanja = [chr(0x4E00 + i) for i in range(1500)]
    texts = [*PLAIN * 4, *hanja, *SYLLABLES[:600], "“인용” 大學 大學" * 50]
    entries = pieces(train_wordpiece(texts, 3000))
    singles = {e for e in entries - set(WORDPIECE.special_tokens) if len(e.removeprefix("##")) == 1}
    assert len(singles) <= 1500
    assert set(SYLLABLES[:600]) <= entries
    assert set("ㅋㅎㅠㅜㅏ") | set(SIGNS) | set("“”大學") <= entries
    assert len(set(hanja) & entries) < 100


@pytest.mark.parametrize("size", [60, 200, 999])
def test_small_vocabularies_keep_the_characters_of_their_text(size: int) -> None:
    entries = pieces(train_wordpiece(["그는 학교에 갔다"] * 9, size))
    assert set("그는학교에갔다") <= entries
    assert "~" not in entries


# Long words


def test_training_with_long_words_takes_linear_time_and_keeps_other_words() -> None:
    blob = base64.b64encode(random.Random(1).randbytes(60_000)).decode().replace("+", "a").replace("/", "b")
    start = time.process_time()
    with_blob = train_wordpiece([*["some plain words here"] * 50, blob], 2000)
    assert time.process_time() - start < 3  # quadratic time in 80,000 characters would be longer
    assert {"some", "plain", "words", "here"} <= pieces(with_blob)


def test_words_up_to_the_maximum_length_are_not_cut() -> None:
    word = "".join(random.Random(2).choices("abcdefgh", k=MAX_WORD))
    assert pieces(train_wordpiece([word] * 5, 2000)) & {word, f"##{word[1:]}", word[:-1]}


@pytest.mark.parametrize("letter", ["a", "가", "\u1100\u1161", "é", "각"], ids=ascii)
@pytest.mark.parametrize("count", [33, 34, 49, 50, 51, 99, 100, 101, 199, 200, 201])
def test_long_words_are_unknown_as_in_transformers(tmp_path: Path, letter: str, count: int) -> None:
    entries = [*WORDPIECE.special_tokens, *(p + c for c in "aeㄱ가각\u1100\u1161\u11a8" for p in ("", "##"))]
    (tmp_path / "vocab.txt").write_text("\n".join(entries) + "\n", encoding="utf-8")
    for cased in (False, True):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"do_lower_case": not cased, "tokenizer_class": "BertTokenizer"})
        )
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
        ours = Tokenizer.load(tmp_path).encode([letter * count])[0]
        assert ours == theirs(letter * count, add_special_tokens=False)["input_ids"]


def test_cased_and_jamo_exclude_each_other() -> None:
    with pytest.raises(UserError, match="--jamo is for uncased vocabularies"):
        train_wordpiece(PLAIN, 1000, cased=True, jamo=True)

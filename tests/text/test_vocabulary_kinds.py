"""Both kinds of BPE vocabularies and Unigram ones: training, frames, saving, what `transformers` makes of them."""

import json
import os
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from itertools import product
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from conftest import KOREAN

from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.text.frame import ALBERT, GPT_TEXT, ROBERTA
from bertsmith.text.tokenizer import Tokenizer, train_byte_bpe, train_unigram, train_word_bpe
from bertsmith.text.unigram_entries import Lattice, choose_entries

ENGLISH = [topics[name] for name in sorted(topics)[:12]]
TEXTS = [*ENGLISH, *[KOREAN] * 3]
TRAIN = {"bytes": train_byte_bpe, "unigram": train_unigram, "bpe": train_word_bpe}
HARD = [
    "The length of a list is its number of items.",
    "한국어는 좋다. " + unicodedata.normalize("NFD", "한국어는 좋다."),
    "Café ÅNGSTRÖM 漢字とかな 👩‍👩‍👧 \u0627\u0644\u0639",
    "tabs\tand\u00a0runs  of   spaces\n(brackets)[0] ``quotes''",
    "word" * 60,
    " ",
    "",
]


@pytest.fixture(scope="module", params=sorted(TRAIN))
def trained(request: pytest.FixtureRequest) -> Tokenizer:
    return TRAIN[request.param](TEXTS, 700)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token(number) for number in tokenizer.encode([text])[0]]


PROGRAM = """
import sys
from bertsmith.text.tokenizer import train_byte_bpe, train_unigram, train_word_bpe
texts = sys.stdin.read().split("\\f")
print(train_byte_bpe(texts, 400).hash, train_unigram(texts, 400, cased=True).hash, train_word_bpe(texts, 400).hash)
"""


def test_training_is_deterministic() -> None:
    """The library's hash tables differ from process to process, and its sums with the number of threads."""
    found = set()
    for seed, threads in (("1", "1"), ("2", "3")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONUTF8": "1", "RAYON_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            input="\f".join([*ENGLISH[:4], KOREAN, KOREAN]),
            capture_output=True,
            text=True,
            check=True,
            env=environment,
            cwd=Path(__file__).parents[2],
            encoding="utf-8",
        )
        found.add(done.stdout.strip())
    assert len(found) == 1
    assert re.fullmatch("[0-9a-f]{16} [0-9a-f]{16} [0-9a-f]{16}", found.pop())


def test_special_tokens_have_the_ids_of_the_released_models() -> None:
    roberta, albert = train_byte_bpe(["some words"] * 9, 270), train_unigram(["some words"] * 9, 40)
    assert [roberta.token(i) for i in (0, 1, 2, 3)] == ["<s>", "<pad>", "</s>", "<unk>"]
    assert roberta.mask_id == roberta.vocab_size - 1
    assert [albert.token(i) for i in range(5)] == ["<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]"]
    gpt = train_word_bpe(["some words"] * 9, 60)
    assert gpt.token(0) == "<unk>"
    assert (roberta.frame, albert.frame, gpt.frame) == (ROBERTA, ALBERT, GPT_TEXT)
    assert [gpt.for_tasks().token(gpt.vocab_size + i) for i in range(4)] == ["_start_", "_delimiter_", "_classify_", ""]


@pytest.mark.parametrize(("kind", "size"), [*product(TRAIN, [300, 501]), ("unigram", 60)])
def test_vocabulary_has_the_size_that_is_asked_for(kind: str, size: int) -> None:
    trained = TRAIN[kind](ENGLISH[:3], size)
    assert trained.vocab_size == len(trained.backend.get_vocab()) == size


def test_bytes_write_every_text_and_know_every_character() -> None:
    trained = train_byte_bpe(["a word or two"] * 3, 270)
    text = "Ünïcode ☃ 한국어 \x00\x07 𝔘 😀"
    assert trained.decode(trained.encode([text])[0]) == text
    assert trained.unknown_id not in trained.encode([text])[0]


def test_case_and_accents() -> None:
    words = ["The Café of André is the Café."] * 5
    cased, uncased = "The Café of André", "the cafe of andre"
    assert "".join(tokens(train_unigram(words, 60), cased)).replace("▁", " ").strip() == uncased
    assert "".join(tokens(train_unigram(words, 60, cased=True), cased)).replace("▁", " ").strip() == cased
    assert tokens(train_word_bpe(words, 60), cased)[-1] == "andre</w>"
    assert (
        train_word_bpe(words, 60, cased=True).decode(train_word_bpe(words, 60, cased=True).encode([cased])[0]) == cased
    )
    for_bytes = train_byte_bpe(words, 300)
    assert for_bytes.decode(for_bytes.encode([cased])[0]) == cased
    lower = train_byte_bpe(words, 300, cased=False)
    assert (lower.decode(lower.encode([cased])[0]), lower.lowercase) == (cased.lower(), True)


def test_hangul_is_composed(trained: Tokenizer) -> None:
    decomposed = unicodedata.normalize("NFD", "한국어는 좋다")
    assert trained.encode([decomposed]) == trained.encode(["한국어는 좋다"])
    assert trained.decode(trained.encode([decomposed])[0]) == "한국어는 좋다"


def test_long_words_take_little_time_and_teach_nothing() -> None:
    noise = "".join(chr(97 + (i * i * 7 + i // 3) % 26) for i in range(40_000))
    for train in TRAIN.values():
        trained = train([noise, *["the words of the list"] * 500], 330)
        assert max(len(trained.frame.word_marker.strip(entry)) for entry in trained.backend.get_vocab()) <= 101
        assert len(tokens(trained, "the words")) <= 4


@pytest.mark.parametrize("kind", sorted(TRAIN))
@pytest.mark.parametrize("texts", [[], ["", " \n"]])
def test_text_without_words_is_refused(kind: str, texts: list[str]) -> None:
    with pytest.raises(UserError, match="the text has no words"):
        TRAIN[kind](texts, 300)


@pytest.mark.parametrize(
    ("kind", "size", "why"),
    [("bytes", 260, "alone are 261 entries"), ("unigram", 9, "too small"), ("bpe", 9, "too small")],
)
def test_too_small_sizes_are_refused(kind: str, size: int, why: str) -> None:
    with pytest.raises(UserError, match=f"--vocab-size {size} .*{why}"):
        TRAIN[kind](["some words"], size)


def test_bad_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(KOREAN, encoding="utf-8")
    with pytest.raises(UserError, match="--kind 'letters' is not one of wordpiece, bytes, unigram, bpe, words"):
        train_tokenizer([tmp_path / "a.txt"], tmp_path / "tok", kind="letters")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="--jamo is for --kind wordpiece, not bytes"):
        train_tokenizer([tmp_path / "a.txt"], tmp_path / "tok", kind="bytes", jamo=True)
    assert not (tmp_path / "tok").exists()


def test_saved_folder_is_opened_by_both(trained: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    trained.save(tmp_path)
    files = set() if trained.kind == "unigram" else {"vocab.json", "merges.txt"}
    assert {path.name for path in tmp_path.iterdir()} == {"tokenizer.json", "tokenizer_config.json", *files}
    again, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (again.hash, again.frame, again.kind) == (trained.hash, trained.frame, trained.kind)
    masked = [f"the {again.frame.mask} of{again.frame.mask}a list", *HARD]
    alone = [] if again.frame.size(1) else [again.unknown_id]  # a sequence has a token, without special tokens as well
    assert [theirs(text)["input_ids"] or alone for text in masked] == again.encode(masked, special=True)
    assert theirs.mask_token == again.frame.mask
    assert theirs.pad_token_id == again.pad_id
    pair = theirs(HARD[0], HARD[1])
    joined = again.joiner.join(*again.encode(HARD[:2]))
    assert pair["input_ids"] == joined.tokens.tolist()
    assert pair.get("token_type_ids", [0] * len(joined.tokens)) == joined.segments.tolist()
    assert ("token_type_ids" in pair) == (again.kind == "unigram")


def test_a_model_without_segments_gets_none(tmp_path: Path) -> None:
    train_unigram(["some words"] * 9, 40).save(tmp_path, num_segments=0)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["model_input_names"] == ["input_ids", "attention_mask"]


# The entries of a Unigram vocabulary, beside a calculation that goes through all divisions.


def divisions(word: str, known: dict[str, float]) -> list[list[str]]:
    """All ways to divide a word into known pieces."""
    if not word:
        return [[]]
    heads = [word[:i] for i in range(1, len(word) + 1) if word[:i] in known]
    return [[head, *rest] for head in heads for rest in divisions(word[len(head) :], known)]


def test_expected_counts_are_those_over_all_divisions() -> None:
    words = {"▁abab": 3, "▁ab": 5, "▁ba": 2, "▁b": 1}
    lattice = Lattice.of(words)
    names = [lattice.piece(number) for number in range(len(lattice.length))]
    assert {"▁ab", "▁", "ab", "▁abab"} < set(names)
    assert len(names) == len(set(names))
    scores = -np.arange(1.0, len(names) + 1) / 3
    known = dict(zip(names, scores, strict=True))
    expected: Counter[str] = Counter()
    for word, count in words.items():
        ways = divisions(word, known)
        chances = np.exp([sum(known[piece] for piece in way) for way in ways])
        for way, chance in zip(ways, chances / chances.sum(), strict=True):
            expected.update(dict.fromkeys(way, 0.0))  # type: ignore[dict-item]
            for piece in way:
                expected[piece] += count * chance
    np.testing.assert_allclose(lattice.expected(scores), [expected[name] for name in names], rtol=1e-12)


def test_worth_is_the_cost_of_the_best_other_division() -> None:
    words = {"▁abab": 3, "▁ab": 5, "▁ba": 2}
    lattice = Lattice.of(words)
    names = [lattice.piece(number) for number in range(len(lattice.length))]
    scores = -np.arange(1.0, len(names) + 1) / 3
    known, found = dict(zip(names, scores, strict=True)), lattice.worth(scores)
    for number, name in enumerate(names):
        others = [sum(known[piece] for piece in way) for way in divisions(name, known) if len(way) > 1]
        if others:
            expected = lattice.expected(scores)[number] * (scores[number] - max(others))
            assert found[number] == pytest.approx(expected, rel=1e-12)
    assert sum(len(name) > 1 for name in names) >= 5


def test_frequent_words_become_entries_and_all_letters_are_kept() -> None:
    words = {"▁there": 50, "▁where": 40, "▁here": 30, "▁qu": 1}
    entries = dict(choose_entries(words, "▁therewquz", 14))
    assert len(entries) <= 14
    assert set("▁therwquz") < set(entries)
    assert entries.keys() & {"▁there", "here", "▁where", "▁here", "there"}
    assert entries["z"] < min(score for entry, score in entries.items() if entry != "z")

"""Vocabularies of whole words, the characters of words, and words outside the vocabulary."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import transformers

from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.text.frame import WORDS
from bertsmith.text.spelling import BEGIN_TEXT, BEGIN_WORD, END_TEXT, END_WORD, PADDING, spell
from bertsmith.text.tokenizer import Tokenizer, train_words
from bertsmith.text.training import train

TEXT = ["The cat sat on the mat.", "A cat is a cat, the dog said.", "The mat is on the dog."]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_words(TEXT, 40)


def bytes_of(row: np.ndarray) -> bytes:
    """The bytes of a row of characters."""
    return bytes(int(n) for n in row if n < 256)


def test_the_most_frequent_words_come_first_and_capitals_are_kept(tokenizer: Tokenizer) -> None:
    known = [tokenizer.token(n) for n in range(tokenizer.vocab_size)]
    assert known[:5] == ["<PAD>", "<UNK>", "<S>", "</S>", "<MASK>"]
    counts = Counter(word for text in TEXT for word in text.replace(".", " .").replace(",", " ,").split())
    assert set(known[5:]) == {word for word, count in counts.items() if count > 1}
    assert all(counts[a] >= counts[b] for a, b in pairwise(known[5:]))
    assert {"The", "the"} <= set(known)
    assert train(TEXT, 40, "words", cased=False, jamo=False).encode(["THE"]) == [[5]]


def test_a_saved_vocabulary_gives_the_same_tokens_here_and_in_transformers(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(TEXT))
    trained = train_tokenizer([tmp_path / "text.txt"], tmp_path / "tok", vocab_size=40, kind="words").tokenizer
    opened, theirs = Tokenizer.load(tmp_path / "tok"), transformers.AutoTokenizer.from_pretrained(tmp_path / "tok")
    assert (opened.kind, opened.frame, opened.hash) == ("words", WORDS, trained.hash)
    pair = opened.joiner.join(*opened.encode(["The cat", "the zebra"]))
    assert opened.spell(pair.tokens) == "<S> The cat </S> the <UNK> </S>"
    assert pair.segments.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert theirs("The cat", "the zebra")["input_ids"] == pair.tokens.tolist()
    assert (tmp_path / "tok" / "vocab.txt").read_text().split() == [opened.token(n) for n in range(opened.vocab_size)]


def test_a_vocabulary_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="no word of the text occurs 2 times"):
        train_words(["every word once"], 40)
    with pytest.raises(UserError, match="--vocab-size 3 is too small"):
        train_words(TEXT, 3)


def test_words_are_spelt_as_bytes_between_a_begin_and_an_end() -> None:
    rows = spell(["cat", "é", "x" * 60, ""])
    assert rows.shape == (4, 50)
    assert rows[0].tolist() == [BEGIN_WORD, *b"cat", END_WORD, *[PADDING] * 45]
    assert rows[1, :4].tolist() == [BEGIN_WORD, *"é".encode(), END_WORD]
    assert (bytes_of(rows[2]), rows[2, -1]) == (b"x" * 48, END_WORD)
    assert rows[3, :3].tolist() == [BEGIN_WORD, END_WORD, PADDING]


def test_the_ends_of_a_text_have_characters_of_their_own(tokenizer: Tokenizer) -> None:
    rows = tokenizer.characters(np.array(tokenizer.encode(["cat"], special=True)[0]))
    assert rows[0, :4].tolist() == [BEGIN_WORD, BEGIN_TEXT, END_WORD, PADDING]
    assert bytes_of(rows[1]) == b"cat"
    assert rows[2, :4].tolist() == [BEGIN_WORD, END_TEXT, END_WORD, PADDING]
    assert (tokenizer.characters(np.array([tokenizer.pad_id])) == PADDING).all()


def test_new_words_keep_their_characters(tokenizer: Tokenizer) -> None:
    texts = ["The zebra sat, the yak and the zebra.", "<UNK> Zürich"]
    assert tokenizer.opened() is tokenizer
    opened = replace(tokenizer, spells=True).opened()
    (first, second), closed = (np.array(ids) for ids in opened.encode(texts)), tokenizer.encode(texts)
    assert [ids.tolist() for ids in map(opened.known, (first, second))] == closed
    assert first[1] == first[-2] != first[5]
    assert [
        bytes_of(row).decode() for row in opened.characters(first)
    ] == "The zebra sat , the yak and the zebra .".split()
    assert second[0] == tokenizer.unknown_id
    assert [bytes_of(row).decode() for row in opened.characters(second)] == ["<UNK>", "Zürich"]
    aligned = opened.encode_aligned(texts)[0]
    assert (aligned.ids, aligned.offsets[1]) == (first.tolist(), (4, 9))
    assert replace(tokenizer, spells=True).encode(texts) == closed

"""The characters that become entries of a vocabulary; a word with any other character is `[UNK]`."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from tokenizers import Tokenizer as Backend

from bertsmith.text.frame import WORDPIECE

ASCII = "".join(map(chr, range(33, 127)))
JAMO = "".join(map(chr, range(0x3131, 0x3164)))
RARE = 1 / 10_000  # the largest share of the text that characters outside the alphabet may have
COMMON = 1 / 100_000  # a character of at least this share is chosen before rare letters of the main scripts
MAIN_SCRIPT = 1 / 100  # a script of at least this share of the text is one of its main scripts
SMALL = 1000  # entries; a smaller vocabulary has no room for characters that do not occur


def alphabet(texts: Iterable[str], backend: Backend, vocab_size: int, room: int) -> list[str]:
    """Choose the characters of a vocabulary, sorted by code point; their entries take at most `room` ids.

    Characters are chosen in this order: printable ASCII, whether it occurs or not, and for Korean text the
    compatibility jamo; characters that are at least 1/100,000 of the text; the letters that occur of every script that
    is at least 1 % of the text, and all 2,350 syllables of KS X 1001, since a rare syllable makes a whole Korean word
    unknown (an unknown ideograph is a word by itself); the most frequent of the others, until the rest is less than
    1/10,000 of the text.
    """
    counts = _characters(texts, backend)
    ordered = sorted(counts, key=lambda c: (-counts[c], c))
    if not ordered:
        return []
    mains = _main_scripts(counts)
    jamo = map(backend.normalizer.normalize_str, JAMO)  # NFKC writes ㅋ as another character
    basic = [*ASCII, *(jamo if "HANGUL" in mains else "")]
    basic = [c for c in basic if c in counts or vocab_size >= SMALL]
    common = [c for c in ordered if counts[c] >= COMMON * counts.total()]
    letters = [c for c in ordered if _script(c) in mains and _joins(c, backend)]
    syllables = _syllables() if "HANGUL" in mains and vocab_size >= SMALL else []
    kept: list[str] = []
    for character in dict.fromkeys(chain(basic, common, letters, syllables, _until_rare(ordered, counts))):
        if character not in counts and backend.normalizer.normalize_str(character) != character:
            continue  # a capital, or a syllable if Hangul is decomposed
        room -= 1 + _joins(character, backend)
        if room < 0:
            break
        kept.append(character)
    return sorted(kept)


def inner_pieces(characters: Iterable[str], backend: Backend) -> list[str]:
    """The continuation entries (`##c`) of the characters that can occur inside a word."""
    return [f"{WORDPIECE.word_marker.text}{character}" for character in joining(characters, backend)]


def joining(characters: Iterable[str], backend: Backend) -> list[str]:
    """The characters that can be part of a longer word."""
    return [character for character in characters if _joins(character, backend)]


def _until_rare(ordered: list[str], counts: Counter[str]) -> Iterator[str]:
    """Yield the most frequent characters until the remaining ones are rare."""
    rest = total = counts.total()
    for character in ordered:
        if rest <= RARE * total:
            return
        yield character
        rest -= counts[character]


def _main_scripts(counts: Counter[str]) -> set[str]:
    scripts: Counter[str] = Counter()
    for character, count in counts.items():
        scripts[_script(character)] += count
    return {name for name, count in scripts.items() if name and count >= MAIN_SCRIPT * counts.total()}


def _syllables() -> list[str]:
    """The 2,350 syllables of KS X 1001, which nearly all Korean is written with."""
    return [bytes((row, cell)).decode("euc_kr") for row in range(0xB0, 0xC9) for cell in range(0xA1, 0xFF)]


def _characters(texts: Iterable[str], backend: Backend) -> Counter[str]:
    """Count each character after normalisation, without spaces."""
    raw: Counter[str] = Counter()
    for text in texts:
        raw.update(text if unicodedata.is_normalized("NFC", text) else unicodedata.normalize("NFC", text))
    counts: Counter[str] = Counter()
    for character, count in raw.items():
        for kept in backend.normalizer.normalize_str(character):
            if not kept.isspace():
                counts[kept] += count
    return counts


def _script(character: str) -> str:
    """The script of a letter, the first word of its Unicode name (LATIN, HANGUL, CJK); nothing for other characters."""
    return unicodedata.name(character, "").split(" ")[0] if character.isalpha() else ""


def _joins(character: str, backend: Backend) -> bool:
    """Whether a character can be part of a longer word; punctuation and CJK ideographs are words by themselves."""
    text = backend.normalizer.normalize_str("a" + character)
    return len(backend.pre_tokenizer.pre_tokenize_str(text)) == 1

"""The characters that get pieces of their own in a vocabulary: a word with any other character is `[UNK]`."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from tokenizers import Tokenizer as Backend

ASCII = "".join(map(chr, range(33, 127)))
JAMO = "".join(map(chr, range(0x3131, 0x3164)))
RARE = 1 / 10_000  # the share of the text that the characters outside the alphabet may make up
COMMON = 1 / 100_000  # from this share of the text on, a character comes before the rare letters of the main scripts
MAIN_SCRIPT = 1 / 100  # from this share of the text on, a script is one of its main ones
SMALL = 1000  # entries: a smaller vocabulary has no room for characters that do not occur


def alphabet(texts: Iterable[str], backend: Backend, vocab_size: int, room: int) -> list[str]:
    """The characters that get pieces of their own, in the order of their code points; the pieces fill at most `room`.

    In the order of their right to a place: printable ASCII, whether it occurs or not, and with Korean the compatibility
    jamo; the common characters; the letters that occur of the scripts that are at least 1 % of the text, and
    all 2,350 syllables of KS X 1001, since a rare syllable makes a whole Korean word unknown (an ideograph stands alone
    and costs only itself); the most frequent others, until those left make up less than 1/10,000 of the text.
    """
    counts = _characters(texts, backend)
    ordered = sorted(counts, key=lambda c: (-counts[c], c))
    if not ordered:
        return []
    mains = _main_scripts(counts)
    basic = [*ASCII, *(JAMO if "HANGUL" in mains else "")]
    basic = [c for c in basic if c in counts or vocab_size >= SMALL]
    common = [c for c in ordered if counts[c] >= COMMON * counts.total()]
    letters = [c for c in ordered if _script(c) in mains and _joins(c, backend)]
    syllables = _syllables() if "HANGUL" in mains and vocab_size >= SMALL else []
    kept: list[str] = []
    for character in dict.fromkeys(chain(basic, common, letters, syllables, _until_rare(ordered, counts))):
        if character not in counts and backend.normalizer.normalize_str(character) != character:
            continue  # a capital, or a syllable where Hangul is taken apart
        room -= 1 + _joins(character, backend)
        if room < 0:
            break
        kept.append(character)
    return sorted(kept)


def inner_pieces(characters: Iterable[str], backend: Backend) -> list[str]:
    """The pieces of characters that can stand inside a word."""
    return [f"##{c}" for c in characters if _joins(c, backend)]


def _until_rare(ordered: list[str], counts: Counter[str]) -> Iterator[str]:
    """The most frequent characters, until the others are rare."""
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
    """How often each character occurs after normalisation, spaces aside."""
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
    """Whether a character can stand inside a word (punctuation and CJK ideographs stand alone)."""
    text = backend.normalizer.normalize_str("a" + character)
    return len(backend.pre_tokenizer.pre_tokenize_str(text)) == 1

"""Sentences of a paragraph, by rules for English and Korean that do no harm to other languages."""

from __future__ import annotations

import re

ABBREVIATIONS = frozenset(
    """mr mrs ms dr prof rev hon sr jr st mt ft gen col maj capt lt sgt cmdr gov sen rep pres supt vs etc eg ie cf al
    ca no nos vol vols pp fig figs eq eqs sec ch art approx dept univ inc ltd co corp bros est jan feb mar apr jun jul
    aug sep sept oct nov dec mon tue tues wed thu thurs fri sat sun u.s u.k u.n e.g i.e a.m p.m ph.d m.d b.a m.a d.c
    viz ed eds trans op cit ibid v messrs mme mlle resp incl min max""".split()
)
# End marks, what may close after them, then white space; or an East Asian end mark, which needs no space.
_END = re.compile(r"""([.!?…]+)(["'”’»)\]]*)(\s+)|[。！？]["'”’」』）]*\s*""")
_OPENING = "\"'“‘«([「『"
_WORD_BEFORE = re.compile(r"[^\s(\[\"'“‘«]+$")


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, in order, without the white space between them."""
    sentences, start = [], 0
    for match in _END.finditer(paragraph):
        if _ends_sentence(paragraph, start, match):
            sentences.append(paragraph[start : match.end()].strip())
            start = match.end()
    if rest := paragraph[start:].strip():
        sentences.append(rest)
    return [s for s in sentences if s]


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    marks, follows = match.group(1), text[match.end() : match.end() + 4].lstrip(_OPENING)
    if marks is None:
        return True
    if not follows or follows[0].islower():  # the text goes on, as after an abbreviation or a quoted question
        return False
    if marks != ".":
        return True
    word = _WORD_BEFORE.search(text, start, match.start())
    if word is None:
        return False
    before = word.group()
    if len(before) == 1 and before.isalpha() and before.isascii():  # an initial: J. Smith
        return False
    if before.lower() in ABBREVIATIONS:
        return False
    return not (before.isdigit() and len(before) < 3 and word.start() == start)  # the number of a list item

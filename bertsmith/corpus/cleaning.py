"""Cleaning of documents before they are tokenised; every step can be switched on or off."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from bertsmith.config import Bounds, check_bounds
from bertsmith.errors import UserError, nearest_or_all
from bertsmith.text.sentences import unwrap

SCRIPTS = {  # ranges of letters
    "latin": r"A-Za-zÀ-ɏḀ-ỿ",
    "hangul": r"\uac00-\ud7a3\u1100-\u11ff\u3130-\u318f",
    "han": r"\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff",
    "kana": r"぀-ヿ",
    "cyrillic": r"Ѐ-ӿ",
    "greek": r"Ͱ-Ͽἀ-῿",
    "arabic": r"؀-ۿݐ-ݿ",
    "hebrew": r"֐-׿",
    "devanagari": r"ऀ-ॿ",
    "thai": r"฀-๿",
}
_LETTERS = {name: re.compile(f"[{ranges}]") for name, ranges in SCRIPTS.items()}
_SAMPLE = 2000  # characters from which the script is determined


@dataclass(frozen=True)
class CleanConfig:
    """The steps of cleaning.

    `unicode` is the normal form; `unwrap` joins the lines of hard-wrapped paragraphs; `duplicate_documents` and
    `duplicate_paragraphs` drop all but the first in input order (only paragraphs of at least `paragraph_length`
    characters, since headings may repeat); `boilerplate` drops every copy of a shorter paragraph that occurs at least
    that many times (0: off); documents under `min_length` characters are dropped, and those in which `script` has less
    than half of the letters. `near_duplicates` also drops documents of at least this Jaccard similarity of five-word
    shingles (0: off; 0.8 is usual), found by MinHash.
    """

    unicode: Literal["NFC", "NFKC", "none"] = "NFC"
    unwrap: bool = True
    duplicate_documents: bool = True
    duplicate_paragraphs: bool = True
    paragraph_length: int = 100
    boilerplate: int = 0
    min_length: int = 0
    script: str = ""
    near_duplicates: float = 0.0
    BOUNDS = {
        "paragraph_length": Bounds(0, 10**9),
        "boilerplate": Bounds(0, 10**9),
        "min_length": Bounds(0, 10**9),
        "near_duplicates": Bounds(0, 1),
    }

    def __post_init__(self) -> None:
        check_bounds(self, "clean.")
        if self.script and self.script not in SCRIPTS:
            raise UserError(f"clean.script: unknown script {self.script!r}{nearest_or_all(self.script, SCRIPTS)}")

    @property
    def compares(self) -> bool:
        """Whether documents have to be compared with each other, which takes another pass over the text."""
        return self.duplicate_documents or self.duplicate_paragraphs or self.boilerplate > 0 or self.near_duplicates > 0


def clean(document: list[str], config: CleanConfig) -> list[str]:
    """Clean a single document; the result is empty if the document is to be dropped."""
    if config.unicode != "none":
        document = [unicodedata.normalize(config.unicode, paragraph) for paragraph in document]
    if config.unwrap:
        document = unwrap(document)
    if config.min_length and sum(map(len, document)) < config.min_length:
        return []
    if config.script and script_share(document, config.script) < 0.5:
        return []
    return document


def script_share(document: list[str], script: str) -> float:
    """The share of a script among the letters at the beginning of a document."""
    counts = script_counts(document)
    return counts[script] / max(1, sum(counts.values()))


def script_counts(document: list[str]) -> Counter[str]:
    """Count the letters of each script at the beginning of a document."""
    sample = " ".join(document)[:_SAMPLE]
    return Counter({name: len(letters.findall(sample)) for name, letters in _LETTERS.items()})

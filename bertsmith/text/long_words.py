"""Long words (base64, DNA) in the text that a vocabulary is trained on."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

MAX_WORD = 100  # characters; WordPiece takes a longer word as unknown, as in `transformers`
_LONG_WORD = re.compile(rf"[^\s!-/:-@\[-`{{-~]{{{MAX_WORD + 1},}}")  # without spaces and ASCII punctuation


def short_words(texts: Iterable[str]) -> Iterator[str]:
    """Cut the longest words of texts: the time of training grows with the square of a word's length."""
    for text in texts:
        yield _LONG_WORD.sub(lambda found: " ".join(re.findall(f".{{1,{MAX_WORD}}}", found[0])), text)

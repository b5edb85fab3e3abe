"""The share of unknown tokens (`[UNK]`) in a text, and its likely cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from bertsmith.text.tokenizer import Tokenizer

WARN_FROM = 0.02  # share of the tokens; a vocabulary that fits its text stays below 0.1 %
FEW = 0.001  # share of the entries; with fewer capitals or syllables, a vocabulary counts as having none


@dataclass
class Unknowns:
    """Counts tokens and unknown tokens."""

    tokenizer: Tokenizer
    tokens: int = 0
    unknown: int = 0

    def add(self, tokens: NDArray[Any]) -> None:
        """Count the tokens of encoded examples, without the special tokens around and between their parts."""
        text = tokens[~self.tokenizer.frames(tokens)]
        self.tokens += len(text)
        self.unknown += int((text == self.tokenizer.unknown_id).sum())

    @property
    def share(self) -> float:
        """The share of unknown tokens, from 0 to 1."""
        return self.unknown / max(1, self.tokens)

    def warning(self, what: str) -> str | None:
        """A sentence with the likely cause if more than 2 % of the tokens of `what` are unknown, else None."""
        if self.share <= WARN_FROM or self.tokenizer.spells:  # the encoder reads the characters of any word
            return None
        share = f"{100 * self.share:.1f} % of the tokens of {what} are {self.tokenizer.frame.unknown}"
        return f"{share}: {likely_cause(self.tokenizer)}"


def likely_cause(tokenizer: Tokenizer) -> str:
    """Say why a tokenizer may not know the words of a text: its case, its form of Hangul, or another language."""
    other = "the vocabulary does not fit this text (another language or script?); train one on it, or a larger one: "
    if tokenizer.kind != "wordpiece":
        return f"{other}bertsmith tokenizer train --kind {tokenizer.kind}"
    entries = [token for token in tokenizer.backend.get_vocab() if token not in tokenizer.frame.special_tokens]
    cases = any(token.upper() != token for token in entries)  # Thai and Korean have no capitals
    capitals = sum(token != token.lower() and not token.startswith("[") for token in entries) > FEW * len(entries)
    syllables = sum(any("가" <= letter <= "힣" for letter in token) for token in entries) > FEW * len(entries)
    change = "in tokenizer_config.json (and remove tokenizer.json, which has the old setting)"
    if tokenizer.lowercase and capitals:
        return f'the tokenizer lower-cases, but its vocabulary is cased; set "do_lower_case": false {change}'
    if syllables and len(tokenizer.normalized("각")) > 1:
        return f'the tokenizer decomposes Hangul, but its vocabulary has syllables; set "strip_accents": false {change}'
    if not tokenizer.lowercase and cases and not capitals:
        return f'the tokenizer keeps capitals, but its vocabulary has none; set "do_lower_case": true {change}'
    return f"{other}bertsmith tokenizer train"

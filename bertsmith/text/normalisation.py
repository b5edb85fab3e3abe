"""The normalisation of text that users choose when they train a vocabulary; it is saved in `tokenizer.json`.

Every step is one of the `tokenizers` library's own, so that any program that opens the tokenizer gives the same ids.
"""

from __future__ import annotations

import struct
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from tokenizers import Regex, normalizers

from bertsmith.errors import UserError

Form = Literal["nfc", "nfkc"]
CHOICES = "nfc, nfkc, width, repeats=N, numbers"
REPEATED = r"[\p{P}\p{S}\x{1100}-\x{11FF}\x{3131}-\x{318E}]"  # punctuation, symbols and single jamo: !!!!, ♥♥♥, ㅋㅋㅋ
MOST_REPEATS = 100


@dataclass(frozen=True)
class Normalisation:
    """How text is normalised, beside the clean-up of the kind of vocabulary.

    `form` is the Unicode form, by default the kind's own: NFKC for Unigram (ALBERT), NFC for the others. `width` writes
    full-width and half-width characters in their usual width. Of a mark that is repeated more than `repeats` times, so
    many are kept; 0 keeps all. `numbers` writes every digit as 0.
    """

    form: Form | None = None
    width: bool = False
    repeats: int = 0
    numbers: bool = False

    @classmethod
    def parse(cls, values: Sequence[str]) -> Normalisation:
        """Read the values of `--normalise`."""
        found = cls()
        for value in values:
            name, _, number = value.partition("=")
            if value in get_args(Form):
                if found.form not in (None, value):
                    raise UserError("--normalise nfc and nfkc exclude each other; give only one of them")
                found = replace(found, form=cast(Form, value))
            elif value in ("width", "numbers"):
                found = replace(found, width=found.width or name == "width", numbers=found.numbers or name == "numbers")
            elif name == "repeats" and number.isdecimal() and 1 <= int(number) <= MOST_REPEATS:
                found = replace(found, repeats=int(number))
            elif name == "repeats":
                raise UserError(f"--normalise {value!r}: N of repeats=N is a number from 1 to {MOST_REPEATS}")
            else:
                raise UserError(f"--normalise {value!r} is not one of {CHOICES}")
        return found

    def around(
        self, steps: Sequence[normalizers.Normalizer], own: Form = "nfc", composed: bool = True
    ) -> normalizers.Normalizer:
        """The steps of a kind of vocabulary with the chosen ones around them, and if `composed`, the Unicode form.

        `own` is the kind's own form. NFKC comes before the other steps as well, since it makes new capitals (℃ is °C).
        """
        form = self.form or own
        before: list[normalizers.Normalizer] = [normalizers.Precompiled(character_map(widths()))] if self.width else []
        before += [normalizers.NFKC()] if self.form == "nfkc" != own else []
        after: list[normalizers.Normalizer] = []
        if composed:
            after.append(normalizers.NFC() if form == "nfc" else normalizers.NFKC())
        if self.repeats:
            after.append(normalizers.Replace(Regex(rf"({REPEATED})(?=\1{{{self.repeats}}})"), ""))
        if self.numbers:
            after.append(normalizers.Replace(Regex(r"\p{Nd}"), "0"))
        found = [*before, *steps, *after]
        return found[0] if len(found) == 1 else normalizers.Sequence(found)


OWN = Normalisation()


def folds_repeats(normal: normalizers.Normalizer | None) -> bool:
    """Whether a tokenizer drops repeated marks."""
    return normal is not None and any(len(normal.normalize_str(text)) < len(text) for text in ("ㅋ" * 101, "!" * 101))


def widths() -> dict[str, str]:
    """The full-width and half-width characters with their counterparts of the usual width."""
    found = {chr(code): unicodedata.decomposition(chr(code)).split() for code in range(0x3000, 0x10000)}
    return {c: chr(int(parts[1], 16)) for c, parts in found.items() if parts[:1] in (["<wide>"], ["<narrow>"])}


def character_map(replacements: Mapping[str, str]) -> bytes:
    """A table of characters and their replacements in SentencePiece's form (`precompiled_charsmap`).

    It is a double array (Aoe 1989; darts-clone's units of 32 bits) over the bytes of the characters, then the
    replacements, each with a NUL after it. A node has a block of 256 units, in which the unit of a byte leads to the
    next node; the unit of a character's last byte leads to its value, in a unit that is free.
    """
    blocks = {b"": 0}
    for key in sorted(character.encode() for character in replacements):
        for size in range(1, len(key)):
            blocks.setdefault(key[:size], len(blocks))
    units = [1 << 31] * (256 * (len(blocks) + 1))  # the highest bit marks units that no byte leads to
    units[0] = 256 << 10  # the root; the first block begins at 256
    texts, free = b"", 1  # the units before the first block are free, and so are all units without a label
    places = {prefix: 256 * (number + 1) for prefix, number in blocks.items()}
    for prefix, begin in places.items():
        if prefix:
            place = places[prefix[:-1]] + prefix[-1]
            units[place] = (place ^ begin) << 10 | prefix[-1]
    labelled = {places[key[:-1]] + key[-1] for key in map(str.encode, replacements)}
    for character, text in replacements.items():
        key = character.encode()
        while free in labelled or units[free] != 1 << 31:
            free += 1
        place = places[key[:-1]] + key[-1]
        units[place] = (place ^ free) << 10 | 1 << 8 | key[-1]
        units[free] = 1 << 31 | len(texts)
        labelled.add(free)
        texts += text.encode() + b"\0"
    return struct.pack("<I", 4 * len(units)) + struct.pack(f"<{len(units)}I", *units) + texts

"""Text that is not UTF-8: guess its encoding, and read it in an encoding that the user names."""

from __future__ import annotations

import codecs
import io
import re
from typing import IO

from bertsmith.errors import UserError

TOLERATED = 1 / 1000  # share of invalid characters; more of them mean another encoding, not damage
FEW = 8  # invalid characters that are tolerated in a text of any length
CHUNK = 1 << 16  # bytes that are read at a time, and from which an encoding is guessed
# The first bytes of files that are no text. Spreadsheets are zip files.
_STARTS = {
    b"\x1f\x8b": "a gzip file",
    b"\xfd7zXZ\0": "an xz file",
    b"BZh91AY&SY": "a bzip2 file",
    b"\x28\xb5\x2f\xfd": "a zstd file",
    b"PK\x03\x04": "a zip file",
    b"%PDF-": "a PDF",
    b"PAR1\x15": "a parquet file",
}
_MARKS = {codecs.BOM_UTF32_LE: "UTF-32LE", codecs.BOM_UTF16_LE: "UTF-16LE", codecs.BOM_UTF16_BE: "UTF-16BE"}
# For each encoding, the characters that most of the non-ASCII text must be made of; tried in this order.
_LETTERS = {
    "CP949": "[가-힣]",
    "SHIFT_JIS": "[\u3040-\u30ff\u4e00-\u9fff]",
    "EUC-JP": "[\u3040-\u30ff\u4e00-\u9fff]",
    "GB18030": "[\u4e00-\u9fff，。、]",
    "BIG5": "[\u4e00-\u9fff，。、]",
    "CP1251": "[а-яё]{3,}",  # in a row: Western European text has single letters between ASCII ones
    "CP1252": "[\u00c0-\u00ff‘’“”–—€]",
}


def is_other_encoding(invalid: int, characters: int) -> bool:
    """Whether a text has too many invalid characters to be damaged UTF-8."""
    return invalid > max(FEW, TOLERATED * characters)


def content_of(start: bytes) -> str:
    """What a file is that begins with these bytes, if it is no text: `a gzip file`; else empty."""
    return next((name for mark, name in _STARTS.items() if start.startswith(mark)), "")


def guess_encoding(data: bytes) -> str:
    """Guess the encoding of bytes that are not UTF-8, as a name that `iconv` knows; empty if none fits."""
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return name
    data = data[:CHUNK]
    zeros = data[0::2].count(0), data[1::2].count(0)
    if sum(zeros) > len(data) / 20:  # in UTF-16, spaces, digits and line ends have a zero byte in every script
        return "UTF-16LE" if zeros[1] > zeros[0] else "UTF-16BE"
    return next((name for name, letters in _LETTERS.items() if _fits(data, name, letters)), "")


def _fits(data: bytes, name: str, letters: str) -> bool:
    """Whether bytes can be decoded and most of their non-ASCII characters match the pattern `letters`."""
    try:
        text = codecs.getincrementaldecoder(name)().decode(data)  # incremental, since the last character may be cut off
    except UnicodeDecodeError:
        return False
    foreign = sum(not character.isascii() for character in text)
    known = sum(len(found[0]) for found in re.finditer(letters, text, re.I))
    return known >= 0.7 * max(1, foreign)


def other_encoding(url: str, encoding: str, data: bytes, invalid: int, characters: int) -> UserError:
    """The error for a file that is not in the encoding it was read in, with the command that converts it."""
    if encoding:
        return UserError(
            f"{url} is not {encoding}: {invalid:,} of {characters:,} characters are invalid; see --encoding"
        )
    name = guess_encoding(data)
    seems = f"it looks like {name}" if name else "it may be compressed, or not text"
    fix = f"; convert it: iconv -f {name} -t UTF-8 {url} > utf8.txt, or add --encoding {name}" if name else ""
    share = f"{invalid:,} of {characters:,} characters are invalid"
    return UserError(f"{url} is not UTF-8 ({share}); {seems}{fix}")


def check_encoding(name: str) -> str:
    """Return the name of an encoding if Python knows it; else raise an error."""
    try:
        codecs.lookup(name)
        "".encode(name)
    except (LookupError, UnicodeError):
        known = "cp949, euc-kr, utf-16, shift_jis, gb18030, latin-1"
        raise UserError(f"--encoding {name!r} is not a known text encoding; for example: {known}") from None
    return name


def _keep_invalid(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\udcff", error.end


codecs.register_error("bertsmith-invalid", _keep_invalid)


class _Recoded(io.RawIOBase):
    """A file of another encoding, read as UTF-8; invalid bytes stay invalid, so that the reader counts them."""

    def __init__(self, file: IO[bytes], encoding: str) -> None:
        self.file = file
        self.decoder = codecs.getincrementaldecoder(encoding)("bertsmith-invalid")
        self.rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self.rest:
            data = self.file.read(CHUNK)
            self.rest = self.decoder.decode(data, final=not data).encode("utf-8", "surrogateescape")
            if not data:
                break
        size = min(len(buffer), len(self.rest))
        buffer[:size], self.rest = self.rest[:size], self.rest[size:]
        return size


def recoded(file: IO[bytes], encoding: str) -> IO[bytes]:
    """Convert the bytes of a file to UTF-8 while they are read."""
    return io.BufferedReader(_Recoded(file, encoding))

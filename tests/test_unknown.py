"""The share of `[UNK]`, and the likely cause where it is high."""

import json
from pathlib import Path

import pytest

from bertsmith.text.tokenizer import Tokenizer, train_wordpiece
from bertsmith.text.unknown import Unknowns

TEXTS = ["Der Hund und die Katze sind in Berlin. 영화가 정말 재미있다", "Anna liest ein Buch 연기도 좋았다"] * 3


def reopened(tokenizer: Tokenizer, folder: Path, **settings: object) -> Tokenizer:
    """The vocabulary alone, opened with other settings."""
    tokenizer.save(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer.load(folder)


def warning(tokenizer: Tokenizer, texts: list[str]) -> str | None:
    unknowns = Unknowns(tokenizer)
    unknowns.add(tokenizer.encode(texts))
    return unknowns.warning("the rows")


def test_no_warning_where_the_vocabulary_fits() -> None:
    for cased in (True, False):
        assert warning(train_wordpiece(TEXTS, 300, cased=cased), TEXTS) is None


@pytest.mark.parametrize(
    ("cased", "settings", "cause"),
    [
        (True, {"do_lower_case": True}, "lower-cases, but its vocabulary is cased"),
        (False, {"do_lower_case": True}, "takes Hangul apart"),
        (False, {"do_lower_case": False}, "keeps capitals, but its vocabulary has none"),
    ],
)
def test_the_cause_is_named(tmp_path: Path, cased: bool, settings: dict, cause: str) -> None:
    said = warning(reopened(train_wordpiece(TEXTS, 300, cased=cased), tmp_path, **settings), TEXTS)
    assert said is not None
    assert cause in said


def test_another_script(tmp_path: Path) -> None:
    tokenizer = train_wordpiece(TEXTS, 300)
    unknowns = Unknowns(tokenizer)
    unknowns.add([[tokenizer.id("[UNK]")], [7, 8, 9]])
    assert unknowns.share == 0.25
    assert (unknowns.warning("the rows") or "").startswith("25.0 % of the tokens of the rows are [UNK]: the vocabulary")
    unknowns.add([[7] * 46])
    assert unknowns.share == 0.02
    assert unknowns.warning("the rows") is None

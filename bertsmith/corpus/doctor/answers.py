"""The doctor's finding on questions: whether their answers begin and end at borders of tokens."""

from __future__ import annotations

from pathlib import Path

from bertsmith.corpus.doctor.findings import Finding
from bertsmith.errors import UserError
from bertsmith.rows.columns import Columns
from bertsmith.tasks.ceiling import LOW, span_ceiling
from bertsmith.tasks.reading import read_task
from bertsmith.tasks.task import find_task
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.text.unmarked import HANGUL


def answer_finding(path: str | Path, tokenizer: Tokenizer) -> Finding:
    """The best exact match that a vocabulary allows on the questions of a file; Korean ones are scored as KorQuAD's."""
    rows = list(read_task(find_task("squad1"), Path(path), Columns(), labelled=True))
    korean = any(HANGUL.search(row.text) for row in rows[:20])
    ceiling = span_ceiling(rows, tokenizer, find_task("korquad" if korean else "squad1"))
    if ceiling is None:
        raise UserError(f"{path}: no question has an answer in its context")
    low = ceiling.exact_match < LOW
    fix = "train a vocabulary with `--morphemes kiwi`, or with more entries" if korean else "take a larger vocabulary"
    return Finding("answers", "warning" if low else "ok", ceiling.exact_match, f"{ceiling}.", fix if low else "")

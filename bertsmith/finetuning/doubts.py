"""Notes on labelled rows that are probably a mistake: labels with one row, dev texts that are trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.tasks.kinds import KINDS

NAMED = 5  # labels in a note


def doubts(rows: Sequence[Row], dev_rows: Mapping[str, Sequence[Row]], head: HeadConfig) -> list[str]:
    """The notes on the training rows and the dev rows of a run."""
    notes = [_single_labels(rows, head), _labels_by_case(head), *_trained_on(rows, dev_rows)]
    return [note for note in notes if note]


def _single_labels(rows: Sequence[Row], head: HeadConfig) -> str:
    """A note on labels with a single training row."""
    counts = KINDS[head.kind].class_counts
    found = zip(head.labels, [] if counts is None else counts(rows, head), strict=False)
    single = [name for name, count in found if count == 1]
    if not single:
        return ""
    have = "label has a single training row" if len(single) == 1 else "labels have a single training row each"
    return f"{len(single)} {have}, from which little is learnt: {_listed(single)}"


def _labels_by_case(head: HeadConfig) -> str:
    """A note on labels that differ only in the case of their letters."""
    if KINDS[head.kind].class_counts is None:
        return ""
    alike: dict[str, list[str]] = {}
    for name in head.labels:
        alike.setdefault(name.casefold(), []).append(name)
    double = [" and ".join(map(repr, names)) for names in alike.values() if len(names) > 1]
    return f"labels that differ only in their case are different labels: {'; '.join(double[:NAMED])}" if double else ""


def _trained_on(rows: Sequence[Row], dev_rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """A note on the rows of each dev file whose texts are trained on, too."""
    trained = set(map(_texts, rows))
    notes = []
    for name, part in dev_rows.items():
        both = [row for row in part if _texts(row) in trained]
        if both:
            which = f"{name}: " if name else ""
            line = f"{which}{len(both):,} of the {len(part):,} dev rows have the same text as a training row"
            notes.append(f"{line}, so that scores on them are too high; the first: {both[0].place}")
    return notes


def _texts(row: Row) -> tuple[object, ...]:
    return row.text, row.pair, row.parts


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:NAMED])) + (", …" if len(names) > NAMED else "")

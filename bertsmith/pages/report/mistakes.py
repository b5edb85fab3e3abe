"""The mistakes of a fine-tuned model: confusion matrix, calibration, the worst rows."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.pages import page
from bertsmith.pages.page import GREY, Html
from bertsmith.pages.report.groups import Group
from bertsmith.tasks.comparison import Comparison
from bertsmith.tasks.tagging import find_entities

WORST = 10  # rows that are shown
CLASSES = 40  # of a confusion matrix; rarer ones are merged
SIDE_BY_SIDE = 4  # classes of a matrix that leaves room for a chart beside it
BINS = 15  # of the calibration (Guo et al. 2017)
FEWEST = 5  # rows of a bin that is drawn; bins with fewer are left out
POINTS = 1500  # of a scatter plot
LONGEST = 260  # characters of a text that is shown
OTHERS = "others"
PERCENT = "\u00a0%"  # a non-breaking space keeps it with its number
Sure = tuple[list[float], list[bool]]  # the probability of each prediction, and whether it is right


def mistakes(group: Group) -> str:
    """Return the mistakes of the best run of a group."""
    if group.judged is None:
        return ""
    facts, lines = group.judged
    run = group.best_run
    kind, labels = str(facts["kind"]), [str(name) for name in facts["labels"]]  # type: ignore[attr-defined]
    chosen = f", the best of {len(group.runs)}" if len(group.runs) > 1 else ""
    words = f"{run.label}{chosen}, on {len(lines):,} dev rows; started from {group.system}."
    return "".join([page.paragraph(words, "note"), *(part for part in _parts(kind, labels, lines) if part)])


def _parts(kind: str, labels: Sequence[str], lines: Sequence[Comparison]) -> list[str]:
    if kind == "regression":
        return [page.figures([_scatter(lines)]), _worst_numbers(lines)]
    if kind == "tags":
        return [page.figures([_entities(lines), calibration(_sure_tags(lines))]), _worst_sentences(lines)]
    if kind == "span":
        return [page.figures([_no_answer(lines), calibration(_sure_answers(lines))]), _worst_answers(lines)]
    if kind == "multi":
        return [page.figures([_by_label(labels, lines), calibration(_sure_labels(labels, lines))]), _worst_texts(lines)]
    right = [line["gold"] == line["predicted"] for line in lines]
    sure = calibration(([line["probability"] for line in lines], right))
    if kind == "choice":
        return [page.figures([sure]), _worst_endings(lines)]
    matrix = confusion(labels, [(line["gold"][0], line["predicted"][0]) for line in lines])
    is_small = len(labels) <= SIDE_BY_SIDE
    return [*([page.figures([matrix, sure])] if is_small else [matrix, page.figures([sure])]), _worst_texts(lines)]


# Charts


def confusion(labels: Sequence[str], pairs: Sequence[tuple[str, str]]) -> str:
    """Return a confusion matrix: a row for each gold label, a column for each predicted one."""
    counts = Counter(gold for gold, _ in pairs) + Counter(predicted for _, predicted in pairs)
    kept = sorted(labels, key=lambda name: -counts[name])[:CLASSES] if len(labels) > CLASSES else list(labels)
    names = [name for name in labels if name in kept]
    cells = Counter((g if g in kept else OTHERS, p if p in kept else OTHERS) for g, p in pairs)
    names += [OTHERS] if len(labels) > CLASSES else []
    rows = []
    for gold in names:
        total = sum(cells[gold, predicted] for predicted in names)
        shares = [cells[gold, predicted] / max(1, total) for predicted in names]
        drawn = [
            _shaded(cells[gold, name], share, good=name == gold) for name, share in zip(names, shares, strict=True)
        ]
        rows.append([_label(gold), *drawn, f"{total:,}", f"{100 * cells[gold, gold] / max(1, total):.1f}{PERCENT}"])
    across = [Html(f"<span{page.lang(name)}>{html.escape(_cut(name, 20))}</span>") for name in names]
    header = ["gold ↓ predicted →", *across, "rows", "found"]
    return page.captioned("Confusion matrix", page.table(header, rows, "matrix"))


def _shaded(count: int, share: float, *, good: bool) -> Html:
    """Return a count on a background that is stronger for a larger share of the row."""
    colour = "34, 197, 94" if good else "234, 88, 12"
    return Html(f"<b style='background: rgba({colour}, {0.6 * share:.2f})'>{count:,}</b>")


def calibration(sure: Sure) -> str:
    """Return a chart of accuracy over confidence, with the expected calibration error (ECE)."""
    if not sure[0]:
        return ""
    error, bins = calibration_error(*sure)
    drawn = [(place, share) for place, share, count in bins if count >= FEWEST] or [bin[:2] for bin in bins]
    places, shares = zip(*drawn, strict=True)
    lines = [
        page.Line([0, 1], [0, 1], GREY, "perfect calibration", light=True),
        page.Line(places, shares, page.COLOURS[0], "model", dots=True),
    ]
    title = f"Calibration: expected error {100 * error:.1f}{PERCENT}"
    words = f"The mean probability is {100 * np.mean(sure[0]):.1f} %, the accuracy {100 * np.mean(sure[1]):.1f} %."
    words += f" Each point stands for at least {FEWEST} rows." if len(drawn) < len(bins) else ""
    chart = page.chart(title, lines, x_label="predicted probability", y_label="accuracy")
    return chart.replace("</figure>", f"<small>{words}</small></figure>")


def calibration_error(
    probabilities: Sequence[float], right: Sequence[bool]
) -> tuple[float, list[tuple[float, float, int]]]:
    """Return the expected calibration error, and the mean probability, accuracy and count of every bin with rows.

    Bins have equal width; the error is the mean over all rows of the difference between the two in their bin.
    """
    chances, hits = np.asarray(probabilities, float), np.asarray(right, float)
    bins = np.minimum((chances * BINS).astype(int), BINS - 1)
    found = []
    for number in np.unique(bins):
        inside = bins == number
        found.append((float(chances[inside].mean()), float(hits[inside].mean()), int(inside.sum())))
    return sum(abs(place - share) * count for place, share, count in found) / len(chances), found


def _scatter(lines: Sequence[Comparison]) -> str:
    gold, predicted = _numbers(lines)
    kept = np.linspace(0, len(gold) - 1, min(len(gold), POINTS)).astype(int)
    ends = [float(min(gold.min(), predicted.min())), float(max(gold.max(), predicted.max()))]
    points = page.Line(gold[kept].tolist(), predicted[kept].tolist(), page.COLOURS[0], "dev rows", joined=False)
    diagonal = page.Line(ends, ends, GREY, "equal", light=True)
    return page.chart("Predicted over gold values", [diagonal, points], x_label="gold", y_label="predicted")


def _numbers(lines: Sequence[Comparison]) -> tuple[NDArray[Any], NDArray[Any]]:
    return np.array([float(line["gold"][0]) for line in lines]), np.array([line["scores"][0] for line in lines])


# Confidence


def _sure_tags(lines: Sequence[Comparison]) -> Sure:
    right = [g == p for line in lines for g, p in zip(line["gold"], line["predicted"], strict=True)]
    return [score for line in lines for score in line["scores"]], right


def _sure_answers(lines: Sequence[Comparison]) -> Sure:
    return [line["probability"] for line in lines], [line["scores"][0] == 100.0 for line in lines]


def _sure_labels(labels: Sequence[str], lines: Sequence[Comparison]) -> Sure:
    """Return the confidence in each label of each row, which are separate decisions."""
    sure, right = [], []
    for line in lines:
        for name, score in zip(labels, line["scores"], strict=True):
            sure.append(max(score, 1 - score))
            right.append((score >= 0.5) == (name in line["gold"]))
    return sure, right


# Tables


def _entities(lines: Sequence[Comparison]) -> str:
    """Return precision, recall and F1 of each type of entity or, for tags without entities, of each tag."""
    rows = [(name, *counts_and_scores(*counts)) for name, counts in entity_counts(lines).items()]
    header = ["type", "gold", "predicted", "precision", "recall", "F1"]
    return page.captioned("Entities by type", page.table(header, rows)) if rows else ""


def entity_counts(lines: Sequence[Comparison]) -> dict[str, tuple[int, int, int]]:
    """Return the numbers of gold, predicted and right entities of each type."""
    gold, predicted = ([_found(line, side) for line in lines] for side in ("gold", "predicted"))
    golds = Counter(kind for row in gold for kind, *_ in row)
    guesses = Counter(kind for row in predicted for kind, *_ in row)
    hits = Counter(kind for one, other in zip(gold, predicted, strict=True) for kind, *_ in one & other)
    return {kind: (golds[kind], guesses[kind], hits[kind]) for kind in sorted({*golds, *guesses})}


def _found(line: Comparison, side: str) -> set[tuple[str, int, int]]:
    places = [(number, number + 1) for number in range(len(line[side]))]
    return {(e["type"], e["start"], e["end"]) for e in find_entities("", places, line[side])}


def counts_and_scores(gold: int, predicted: int, right: int) -> tuple[str, str, str, str, str]:
    """Return counts with precision, recall and F1 in percent."""
    shares = (right / max(1, predicted), right / max(1, gold), 2 * right / max(1, gold + predicted))
    return f"{gold:,}", f"{predicted:,}", *(f"{100 * share:.1f}" for share in shares)  # type: ignore[return-value]


def _by_label(labels: Sequence[str], lines: Sequence[Comparison]) -> str:
    rows = []
    for name in labels:
        gold, predicted = ([name in line[side] for line in lines] for side in ("gold", "predicted"))
        right = sum(g and p for g, p in zip(gold, predicted, strict=True))
        rows.append((_cut(name, 40), *counts_and_scores(sum(gold), sum(predicted), right)))
    header = ["label", "gold", "predicted", "precision", "recall", "F1"]
    return page.captioned("Labels", page.table(header, rows))


def _no_answer(lines: Sequence[Comparison]) -> str:
    """Return the confusion matrix of answer and no answer; nothing if every question has an answer."""
    if all(line["gold"] for line in lines):
        return ""
    names = ("an answer", "no answer")
    pairs = [(names[not line["gold"]], names[not line["predicted"][0]]) for line in lines]
    return confusion(names, pairs)


def _worst(
    title: str, header: Sequence[str], lines: Sequence[Comparison], row: Callable[[Comparison], Sequence[str]]
) -> str:
    if not lines:
        return page.section(title, 3) + page.paragraph("There are none.")
    return page.section(title, 3) + page.table(header, [row(line) for line in lines[:WORST]])


def _wrong(lines: Sequence[Comparison]) -> list[Comparison]:
    """Return the rows with a wrong label, the highest loss first."""
    return sorted((line for line in lines if line["gold"] != line["predicted"]), key=lambda line: -line["loss"])


def _worst_texts(lines: Sequence[Comparison]) -> str:
    header = ["text", "gold", "predicted", "probability of it", "loss"]

    def row(line: Comparison) -> list[str]:
        chance = f"{100 * line['probability']:.1f}{PERCENT}" if line["probability"] is not None else "–"
        return [
            _text(line),
            _label(_listed(line["gold"])),
            _label(_listed(line["predicted"])),
            chance,
            f"{line['loss']:.2f}",
        ]

    return _worst("Errors with the highest loss", header, _wrong(lines), row)


def _worst_endings(lines: Sequence[Comparison]) -> str:
    header = ["text", "gold ending", "chosen ending", "probability of it", "loss"]

    def row(line: Comparison) -> list[str]:
        gold, chosen = (line["parts"][int(line[side][0])] for side in ("gold", "predicted"))
        return [
            _text(line),
            _cut(gold),
            _cut(chosen),
            f"{100 * line['probability']:.1f}{PERCENT}",
            f"{line['loss']:.2f}",
        ]

    return _worst("Errors with the highest loss", header, _wrong(lines), row)


def _worst_numbers(lines: Sequence[Comparison]) -> str:
    furthest = sorted(lines, key=lambda line: -line["loss"])

    def row(line: Comparison) -> list[str]:
        return [_text(line), f"{float(line['gold'][0]):.2f}", f"{line['scores'][0]:.2f}", f"{line['loss'] ** 0.5:.2f}"]

    return _worst("Rows furthest from their number", ["text", "gold", "predicted", "distance"], furthest, row)


def _worst_sentences(lines: Sequence[Comparison]) -> str:
    """Return the sentences whose wrong tags have the highest probability."""

    def surest(line: Comparison) -> float:
        triples = zip(line["gold"], line["predicted"], line["scores"], strict=True)
        return max((score for gold, predicted, score in triples if gold != predicted), default=0.0)

    def row(line: Comparison) -> list[str]:
        words = []
        for word, gold, tag in zip(line["parts"], line["gold"], line["predicted"], strict=True):
            tags = f"<small>{html.escape(gold)} → {html.escape(tag)}</small>"
            words.append(f"<span class=mask>{html.escape(word)}</span> {tags}" if gold != tag else html.escape(word))
        return [Html(" ".join(words[:60])), f"{100 * surest(line):.1f}{PERCENT}"]

    wrong = sorted((line for line in lines if line["gold"] != line["predicted"]), key=lambda line: -surest(line))
    return _worst("Wrong tags with the highest probability", ["sentence: gold → predicted", "probability"], wrong, row)


def _worst_answers(lines: Sequence[Comparison]) -> str:
    """Return the questions with the lowest F1, the highest probability first."""
    wrong = [line for line in lines if line["scores"][1] < 100.0]
    wrong.sort(key=lambda line: (line["scores"][1], -line["probability"]))

    def row(line: Comparison) -> list[str]:
        gold, predicted = _listed(line["gold"]) or "no answer", line["predicted"][0] or "no answer"
        chance, f1 = f"{100 * line['probability']:.1f}{PERCENT}", f"{line['scores'][1]:.0f}"
        return [_cut(line["text"]), _cut(line["pair"] or "", 420), _cut(gold, 120), _cut(predicted, 120), chance, f1]

    return _worst("Worst answers", ["question", "context", "gold", "predicted", "probability", "F1"], wrong, row)


def _text(line: Comparison) -> str:
    both = html.escape(_cut(line["text"]))
    return Html(f"{both}<br><small>{html.escape(_cut(line['pair']))}</small>") if line["pair"] else _cut(line["text"])


def _label(name: str) -> str:
    """Return a name that stays on one line if it is short."""
    return Html(f"<span class=guess>{html.escape(name)}</span>") if len(name) <= 24 else name


def _listed(names: Sequence[str]) -> str:
    return _cut(", ".join(names), 120)


def _cut(text: str, most: int = LONGEST) -> str:
    return text if len(text) <= most else f"{text[: most - 1].rstrip()}…"

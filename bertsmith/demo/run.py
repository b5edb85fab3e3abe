"""The demo: a mask that the default model fills, then the whole path on text inside the Python installation.

The result of the path is the gain from pre-training.
"""

from __future__ import annotations

import csv
import json
import platform
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table

from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.demo.text import AREAS, DemoText, Description, collect, write_documents
from bertsmith.errors import Interrupted
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.folders import refuse_existing, writes
from bertsmith.formats.hub import default_model
from bertsmith.inference.predictor import Predictor
from bertsmith.pages import page
from bertsmith.pretraining.run import pretrain
from bertsmith.progress import clock, say
from bertsmith.recipes import recipe
from bertsmith.training import runlog
from bertsmith.training.settings import TrainConfig

SEEDS = (1, 2, 3)
ROWS_PER_AREA, HELD_OUT_PER_AREA = 25, 75
FINE_TUNING = TrainConfig(epochs=15, batch_size=16, learning_rate=5e-4, warmup=0.1)
WORDS = 500  # of held-out sentences; they are masked one at a time
SHOWN = 6  # right guesses that are shown, those with the highest probability
WIDEST = 8  # minutes at most, on two cores
MASKED = "Paris is the [MASK] of France."  # for the default model


@dataclass(frozen=True)
class Guess:
    """A held-out sentence with one masked word, that word, and the predictions of the model."""

    sentence: str
    word: str
    candidates: list[dict[str, Any]]

    @property
    def is_right(self) -> bool:
        return bool(self.candidates[0]["token"] == self.word)

    def __str__(self) -> str:
        return ", ".join(f"{c['token']} {100 * c['probability']:.0f} %" for c in self.candidates)


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo."""

    accuracy: dict[str, list[float]]  # start -> held-out accuracy for each seed, in percent
    scores: dict[str, Any]
    guesses: list[Guess]
    seconds: float

    @property
    def surest(self) -> list[Guess]:
        """The right guesses with the highest probability, each word once."""
        best: dict[str, Guess] = {}
        for guess in sorted(self.guesses, key=lambda g: -g.candidates[0]["probability"]):
            if guess.is_right:
                best.setdefault(guess.word, guess)
        return list(best.values())[:SHOWN]

    @property
    def guesses_in_words(self) -> str:
        right = sum(guess.is_right for guess in self.guesses)
        share = 100 * right / max(1, len(self.guesses))
        return (
            f"{len(self.guesses)} words of held-out sentences were masked, one at a time. The model guessed {right} of "
            f"them right ({share:.0f} %). These are the right guesses with the highest probability, each word once."
        )

    @property
    def gain(self) -> float:
        """The mean gain in accuracy from pre-training over the seeds, in points."""
        return mean(self.accuracy["pre-trained"]) - mean(self.accuracy["random"])


@writes()
def write_text(out: str | Path) -> DemoText:
    """Write the inputs of the demo: `text.txt`, and labelled rows in `train.csv` and `dev.csv`."""
    out = Path(out)
    refuse_existing(out)
    text = collect(ROWS_PER_AREA, HELD_OUT_PER_AREA)
    out.mkdir(parents=True, exist_ok=True)
    write_documents(out / "text.txt", text.documents)
    for name, rows in (("train.csv", text.train), ("dev.csv", text.held_out)):
        _write_rows(out / name, rows)
    size = (out / "text.txt").stat().st_size / 1e6
    say(f"{size:.1f} MB of text; {len(text.train)} labelled rows to train on, {len(text.held_out)} held out")
    return text


@writes()
def demo(out: str | Path, *, as_json: bool = False) -> DemoResult:
    """Fill a mask by the default model; then train a vocabulary, build a corpus, pre-train, fine-tune, write a page."""
    try:
        return _demo(Path(out), as_json)
    except Interrupted as stop:
        stop.advice = f"The demo cannot be resumed: remove {out}, and start it again"
        raise


def _demo(out: Path, as_json: bool) -> DemoResult:
    began = time.monotonic()
    show_default_model()
    say(f"The whole path on the documentation inside the Python installation; at most {WIDEST} minutes on two cores.")
    text = write_text(out)
    train_tokenizer([out / "text.txt"], out / "tokenizer", vocab_size=4000)
    corpus = build_corpus([out / "text.txt"], out / "tokenizer", out / "corpus")
    scores = pretrain(recipe("demo"), out / "corpus", out / "pretrained")
    accuracy = {start: [_accuracy(out, start, seed) for seed in SEEDS] for start in ("pre-trained", "random")}
    predictor = Predictor.load(out / "pretrained")
    guesses = guess_words(predictor, [row.text for row in text.held_out])
    result = DemoResult(accuracy, scores, guesses, time.monotonic() - began)
    _write_report(out, result, text, corpus.manifest.tokens)
    if as_json:
        print(json.dumps({"report": str(out / "report.html"), "gain": result.gain, "accuracy": accuracy, **scores}))
    else:
        _print(out, result)
    return result


def show_default_model() -> None:
    """Print the words that the default model fills in, where the package has it."""
    if folder := default_model():
        say(f'The default model of the package: bertsmith fill "{MASKED}"')
        for found in Predictor.load(folder, "cpu").fill(MASKED)[0]:
            say(f"  {found['token']:12} {100 * found['probability']:5.1f} %")


def guess_words(predictor: Predictor, texts: list[str]) -> list[Guess]:
    """Mask each word of the first sentences that is in the vocabulary, one at a time, and predict it."""
    guesses = []
    mask = str(predictor.tokenizer.frame.mask)
    for text in texts:
        words = re.split(r"(?<=\.)\s", text)[0].split()
        if not (6 <= len(words) <= 25 and re.fullmatch(r"[A-Z][A-Za-z, ]+\.", " ".join(words))):  # prose, not code
            continue
        for place, word in enumerate(words):
            if word.isalpha() and len(predictor.tokenizer.encode([word])[0]) == 1:
                sentence = " ".join([*words[:place], mask, *words[place + 1 :]])
                guesses.append(Guess(sentence, word.lower(), predictor.fill(sentence, top=3)[0]))
        if len(guesses) >= WORDS:
            break
    return guesses


def _write_rows(path: Path, rows: list[Description]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([row.text, row.area] for row in rows)


def _accuracy(out: Path, start: str, seed: int) -> float:
    """Return the held-out accuracy of a classifier from one start with one seed."""
    config = FinetuneConfig("classify", train=replace(FINE_TUNING, seed=seed), random_start=start == "random")
    run = out / f"classifier-{start}-{seed}"
    scores = finetune(config, out / "pretrained", out / "train.csv", run, dev=out / "dev.csv")
    return float(scores["accuracy"])


def _print(out: Path, result: DemoResult) -> None:
    console = Console()
    table = Table("start", *(f"seed {s}" for s in SEEDS), "mean", title="Held-out accuracy: which area is it about?")
    for start, values in result.accuracy.items():
        table.add_row(start, *(f"{v:.1f}" for v in values), f"{mean(values):.1f}")
    console.print(table)
    lowest = min(a - b for a, b in zip(result.accuracy["pre-trained"], result.accuracy["random"], strict=True))
    console.print(f"Pre-training brings {result.gain:.1f} points of accuracy (at least {lowest:.1f} with every seed).")
    console.print(result.guesses_in_words)
    for guess in result.surest:
        console.print(f"{guess.sentence}  →  {guess}", markup=False)
    console.print(f"Model: {out / 'pretrained' / 'model'}   Report: {out / 'report.html'}   ({clock(result.seconds)})")


def _write_report(out: Path, result: DemoResult, text: DemoText, tokens: int) -> None:
    records = runlog.read(out / "pretrained")
    points, held_out = [r for r in records if "loss" in r], [r for r in records if "dev_mlm_loss" in r]
    steps, measured = [r["step"] for r in points], [r["step"] for r in held_out]
    losses = {
        "masked words": (steps, [r["mlm_loss"] for r in points]),
        "held out": (measured, [r["dev_mlm_loss"] for r in held_out]),
    }
    accuracies = {
        "masked words": (measured, [r["dev_mlm_accuracy"] for r in held_out]),
        "next sentence": (measured, [r["dev_nsp_accuracy"] for r in held_out]),
    }
    starts = [
        (start, *(f"{v:.1f}" for v in values), f"{mean(values):.1f}") for start, values in result.accuracy.items()
    ]
    parts = [
        page.paragraph(f"+{result.gain:.1f} points of accuracy from pre-training", "number"),
        page.table(["start", *(f"seed {s}" for s in SEEDS), "mean"], starts),
        page.paragraph(
            f"A classifier of {len(AREAS)} areas of the standard library, {len(text.train)} labelled descriptions, "
            f"scored on {len(text.held_out)} that neither pre-training nor fine-tuning has seen."
        ),
        page.section("Pre-training"),
        page.figures(
            [
                page.plot("Loss of the masked words", losses),
                page.plot("Held-out accuracy", accuracies, y_label="%"),
                page.bars("Held-out accuracy by start", result.accuracy, [f"seed {s}" for s in SEEDS], "%"),
            ]
        ),
        page.section("Masked words"),
        page.paragraph(result.guesses_in_words),
        page.table(["sentence", "guesses, the right one first"], [(g.sentence, str(g)) for g in result.surest]),
        page.section("Facts"),
        page.table(
            ["", "value"],
            [
                ("tokens of the corpus", f"{tokens:,}"),
                *((name.replace("_", " "), f"{value:,.4g}") for name, value in result.scores.items()),
                ("time of the whole demo", clock(result.seconds)),
                ("Python", platform.python_version()),
            ],
        ),
    ]
    lead = "From the documentation of Python to a pre-trained encoder and a classifier, on this machine."
    page.write_page(out / "report.html", "bertsmith demo", lead, parts)

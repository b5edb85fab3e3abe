"""The default model of the package: train it on one GPU, score it, and pack it into the package's folder.

    python -m benchmarks.default_model tokenizer --data DATA
    python -m benchmarks.default_model train --data DATA --work WORK [--minutes 20]
    python -m benchmarks.default_model facts --data DATA --work WORK
    python -m benchmarks.default_model score --data DATA --work WORK [--rate 1e-4] [--tasks cola …]
    python -m benchmarks.default_model merge FILE …
    python -m benchmarks.default_model pack --work WORK [--out FOLDER]
    python -m benchmarks.default_model words --data DATA [--out FOLDER]

`DATA/text` holds text files, `tokenizer` puts `DATA/tokenizers` beside it, and the folders of the tasks are in DATA.
`train` runs the recipe `speedrun-small`, `facts` says what it has seen and learnt, and `score` runs `bertsmith
benchmark` on it. Every call adds to the results of earlier ones; `--results` writes them into another folder, from
which `merge` brings them back. `pack` writes the encoder with its masked-word head, in half precision, where the
package looks for it, beside the card that is there. `words` masks a word in each of many sentences that the packed
model has not read, counts how often it finds the word, and keeps its
answers to some sentences.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.corpora import corpus_folder, text_files, write_sizes
from benchmarks.family_quality import masked_words, run_facts
from benchmarks.record import RESULTS, earlier, keep, merge_files
from bertsmith.config import override
from bertsmith.conversion import Options, convert
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.finetuning.benchmark import COLUMNS, benchmark
from bertsmith.formats.card import CARD
from bertsmith.formats.hf import load_folder, save_folder
from bertsmith.formats.hub import DEFAULT
from bertsmith.inference.predictor import Predictor
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.text.sentences import split_sentences
from bertsmith.training.run import MODEL, is_finished

NAME, TOKENIZER, ENTRIES = "default_model", "wordpiece-14k", 14_336
RECIPE = "speedrun-small"
LARGEST = 25_000_000  # bytes of the packed folder
SENTENCES = (
    "Paris is the [MASK] of France.",
    "The cat sat on the [MASK].",
    "She opened the [MASK] and walked into the room.",
    "In winter the water of the lake turns into [MASK].",
    "He was born in [MASK] and died in 1923.",
    "The patient was taken to the [MASK] by an ambulance.",
    "Bees collect [MASK] from flowers.",
    "The [MASK] shines during the day.",
    "World War II ended in [MASK].",
    "A doctor works in a [MASK].",
    "The judge sentenced him to ten years in [MASK].",
    "Tokyo is the capital of [MASK].",
)


def tokenizer(arguments: argparse.Namespace) -> None:
    out = arguments.data / "tokenizers" / TOKENIZER
    if not out.exists():
        train_tokenizer(text_files(arguments.data), out, vocab_size=ENTRIES)
    write_sizes(arguments.data)


def train(arguments: argparse.Namespace) -> None:
    """A finished run is not trained again, and one that was stopped goes on."""
    corpus, run = corpus_folder(arguments.data, arguments.work, TOKENIZER), arguments.work / RECIPE
    made = recipe(RECIPE)
    made = replace(made, train=replace(made.train, hours=arguments.minutes / 60, workers=arguments.workers))
    if not is_finished(run):
        pretrain(override(made, arguments.set), corpus, run, device=arguments.device, resume=True)


def facts(arguments: argparse.Namespace) -> None:
    """What it has seen and learnt."""
    corpus, run = corpus_folder(arguments.data, arguments.work, TOKENIZER), arguments.work / RECIPE
    found = run_facts(run, corpus, text_files(arguments.data))
    with tempfile.TemporaryDirectory() as scratch:
        words = masked_word_model(run, Path(scratch) / "words")
        found["masked_words"] = masked_words(words, corpus, arguments)
    keep(NAME, arguments.results, "pretraining", RECIPE, found)


def masked_word_model(run: Path, out: Path) -> Path:
    """The encoder and its masked-word head, without what else it was trained with."""
    loaded = load_folder(run / MODEL, objective=MaskedLMConfig(next_sentence=False))
    assert not loaded.missing, loaded.missing
    save_folder(out, loaded.model, loaded.tokenizer, loaded.notes)
    return out


def filled(predictor: Predictor) -> dict[str, list[str]]:
    """What the model puts in place of the mask of each sentence, with the probability in percent."""
    found = {sentence: predictor.fill(sentence, top=5)[0] for sentence in SENTENCES}
    return {key: [f"{one['token']} {100 * one['probability']:.0f}" for one in words] for key, words in found.items()}


def score(arguments: argparse.Namespace) -> None:
    """Score it by the protocol of `bertsmith benchmark`, or at another rate."""
    settings = [f"train.learning_rate={arguments.rate}"] if arguments.rate else []
    table = benchmark(
        [arguments.work / RECIPE], arguments.data, arguments.work / f"benchmark-{arguments.rate or 'protocol'}",
        tasks=arguments.tasks, seeds=arguments.seeds, jobs=arguments.jobs, device=arguments.device, settings=settings,
    )  # fmt: skip
    (row,), part = table["rows"], f"scores at {table['protocol']['learning_rate']:g}"
    before = earlier(NAME, arguments.results).get(part, {}).get(RECIPE, {})
    found = {name: table[name] for name in ("protocol", "seeds", "partial")}
    found |= {"scores": {**before.get("scores", {}), **row["scores"]}, "mean": row.get("mean") or before.get("mean")}
    keep(NAME, arguments.results, part, RECIPE, found)
    print(settings, {name: each["median"] for name, each in row["scores"].items()}, row.get("mean"))


def pack(arguments: argparse.Namespace) -> None:
    """Write the model in half precision into the package, in place of an older one; a card that is there stays."""
    out: Path = arguments.out
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "model"
        words = masked_word_model(arguments.work / RECIPE, Path(scratch) / "words")
        report = convert(words, made, "hf", Options(dtype="float16"))
        if (out / CARD).exists():
            shutil.copyfile(out / CARD, made / CARD)
        if (size := folder_bytes(made)) > LARGEST:
            raise SystemExit(f"the model has {size:,} bytes, more than {LARGEST:,}; {out} is as it was")
        out.mkdir(parents=True, exist_ok=True)
        for old in out.iterdir():
            old.unlink()
        for file in sorted(made.iterdir()):
            shutil.copyfile(file, out / file.name)
    print(f"{out}: {report['parameters']:,} parameters, {size:,} bytes in {', '.join(f.name for f in out.iterdir())}")


def words(arguments: argparse.Namespace) -> None:
    """Mask one word in each sentence of news, alone and in its paragraph, and look for it among the likeliest words."""
    shifts = json.loads((arguments.data / "SQuADShifts" / "nyt_v1.0.json").read_text(encoding="utf-8"))
    texts = [paragraph["context"] for article in shifts["data"] for paragraph in article["paragraphs"]]
    predictor, chosen = Predictor.load(arguments.out, device=arguments.device), random.Random(1)
    entries = {predictor.tokenizer.token(number) for number in range(predictor.tokenizer.vocab_size)}
    ranks: dict[str, list[int]] = {"alone": [], "in its paragraph": []}
    for text in chosen.sample([text for text in texts if len(text) < 1500], 4 if arguments.smoke else 1000):
        sentence = chosen.choice(list(split_sentences(text)))
        places = [match for match in re.finditer(r"[A-Za-z]+", sentence) if match[0].lower() in entries]
        if len(places) < 5:
            continue
        place = chosen.choice(places)
        masked = f"{sentence[: place.start()]}[MASK]{sentence[place.end() :]}"
        for key, given in (("alone", masked), ("in its paragraph", text.replace(sentence, masked, 1))):
            answers = [word["token"] for word in predictor.fill(given, top=5)[0]]
            ranks[key].append([*answers, place[0].lower()].index(place[0].lower()))
    found: dict[str, Any] = {"sentences": len(ranks["alone"])}
    for key, places_found in ranks.items():
        share = {"first": [rank < 1 for rank in places_found], "among five": [rank < 5 for rank in places_found]}
        found[key] = {name: round(100 * sum(hits) / len(hits), 1) for name, hits in share.items()}
    found["answers"] = filled(predictor)
    print(found)
    model = arguments.names[0] if arguments.names else RECIPE
    keep(NAME, arguments.results, "masked words in sentences of news", model, found)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def main(given: list[str] | None = None) -> None:
    commands = {f.__name__: f for f in (tokenizer, train, facts, score, pack, words)}
    commands["merge"] = partial(merge_files, NAME)
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=commands)
    parser.add_argument("names", nargs="*", help="merge: files of results; words: the name of the model")
    parser.add_argument("--data", type=Path, help="the folder of the text and the tasks")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / NAME, help="the folder for runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of the results")
    parser.add_argument("--minutes", type=float, default=20.0, help="train: for so long")
    parser.add_argument("--workers", type=int, default=12, help="train: processes that prefetch batches")
    parser.add_argument("--set", action="append", default=[], help="train: a change of the settings")
    parser.add_argument("--rate", default="", help="score: another learning rate than that of the protocol")
    parser.add_argument("--tasks", nargs="+", choices=[column.task for column in COLUMNS], default=[])
    parser.add_argument("--seeds", type=int, default=5, help="score: runs for each score")
    parser.add_argument("--jobs", type=int, default=14, help="score: runs at a time")
    parser.add_argument("--out", type=Path, default=DEFAULT, help="pack, words: the folder of the model")
    parser.add_argument("--device")
    parser.add_argument("--smoke", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.command in ("tokenizer", "train", "facts", "score", "words") and arguments.data is None:
        parser.error("--data is needed")
    commands[arguments.command](arguments)


if __name__ == "__main__":
    main()

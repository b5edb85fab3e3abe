"""Korean vocabularies of one size on the same text: training, ceilings, pre-training for equal minutes, two tasks."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.corpora import FACTS, corpus_folder, text_files
from benchmarks.family_quality import run_facts
from benchmarks.tuning import figures, run_all, runs_in, tune
from bertsmith.config import override
from bertsmith.corpus.sources import Reading, find_sources, read_blocks
from bertsmith.finetuning.settings import FinetuneConfig, FinetuneData
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe
from bertsmith.rows.columns import Columns
from bertsmith.tasks.ceiling import span_ceiling
from bertsmith.tasks.reading import Splits, read_task
from bertsmith.tasks.task import find_task
from bertsmith.text.morphemes import BORDER, Bordered, bordered, divided, open_analyser
from bertsmith.text.tokenizer import Tokenizer, train_byte_bpe, train_unigram, train_wordpiece
from bertsmith.training.run import MODEL, is_finished
from bertsmith.training.settings import TrainConfig

TRAIN = {"wordpiece": train_wordpiece, "bytes": train_byte_bpe, "unigram": train_unigram}
NAMES = tuple(f"{kind}{suffix}" for kind in TRAIN for suffix in ("", "-kiwi"))
TEXT = 20_000_000  # bytes that the vocabularies are trained on; the same as in `unknown`
LENGTH = 256
WORDS = 20_000  # of the questions' contexts, whose morphemes are compared with tokens
TASKS = {"korquad": ("exact_match", "f1"), "nsmc": ("accuracy",)}
EPOCHS = {"korquad": 4.0, "nsmc": 1.0}
BATCHES = {"korquad": 32, "nsmc": 128}
RATE = 1e-4
Results = dict[str, Any]


def find_file(data: Path, name: str) -> Path:
    """A file, up to three levels down."""
    for depth in ("", "*/", "*/*/", "*/*/*/"):
        for found in sorted(data.glob(f"{depth}{name}")):
            return found
    raise SystemExit(f"{data} holds no {name}")


def first_text(data: Path) -> list[str]:
    """The lines of the first megabytes of the text."""
    blocks = read_blocks(find_sources(text_files(data)), "text", Reading())
    size, lines = 0, list[str]()
    for block in blocks:
        assert isinstance(block.data, bytes)
        lines += block.data.decode("utf-8", "ignore").split("\n")
        size += len(block.data)
        if size >= TEXT:
            break
    return lines


def train_all(arguments: Any) -> Iterator[tuple[str, float]]:
    """Train the vocabularies that are not there yet; their morphemes are found once."""
    out = arguments.data / "tokenizers"
    missing = [name for name in arguments.names or NAMES if not (out / name).exists()]
    lines = first_text(arguments.data) if missing else []
    morphemes: Bordered | None = None
    for name in missing:
        began = time.monotonic()
        if name.endswith("-kiwi"):
            morphemes = morphemes or bordered(lines, "kiwi")
        found = morphemes if name.endswith("-kiwi") else None
        TRAIN[name.removesuffix("-kiwi")](lines, arguments.vocabulary, morphemes=found).save(out / name)
        yield name, time.monotonic() - began
    sizes = {path.name: path.stat().st_size for path in text_files(arguments.data)}
    out.mkdir(exist_ok=True)
    (out / FACTS).write_text(json.dumps({"bytes": sizes}), encoding="utf-8")


def ceiling(name: str, data: Path) -> Results:
    """The best scores on KorQuAD's dev questions, the borders of morphemes that are borders of tokens, the lengths."""
    tokenizer, task = Tokenizer.load(data / "tokenizers" / name), find_task("korquad")
    rows = list(read_task(task, find_file(data, "KorQuAD_v1.0_dev.json"), Columns(), labelled=True))
    best = span_ceiling(rows, tokenizer, task)
    assert best is not None
    words = [word for row in rows for word in (row.pair or "").split()]
    words = random.Random(1).sample(sorted(set(words)), min(WORDS, len(set(words))))
    facts = {key: round(getattr(best, key), 2) for key in ("on_borders", "exact_match", "f1")}
    encoded = tokenizer.encode(words)
    facts["tokens_per_word"] = round(sum(map(len, encoded)) / len(words), 3)
    facts["entries"] = tokenizer.vocab_size
    return {**facts, **_borders(tokenizer, words), "questions": best.questions}


@cache
def morpheme_places(words: tuple[str, ...]) -> list[list[int]]:
    """The borders of words, which are the same for all vocabularies."""
    return list(open_analyser("kiwi")(list(words)))


def _borders(tokenizer: Tokenizer, words: list[str]) -> Results:
    """How many borders of morphemes tokens have, in per cent, if Kiwi is there; and if it divided words beforehand."""
    places = morpheme_places(tuple(words))
    wanted = found = 0
    for word_places, aligned in zip(places, tokenizer.encode_aligned(words), strict=True):
        begins = {begin for begin, _ in aligned.offsets}
        wanted, found = wanted + len(word_places), found + len(begins.intersection(word_places))
    parts = [divided(word, cuts).split(BORDER) for word, cuts in zip(words, places, strict=True)]
    apart = sum(len(ids) for ids in tokenizer.encode([part for each in parts for part in each])) / len(words)
    return {
        "morpheme_borders": round(100 * found / max(1, wanted), 2),
        "tokens_per_word_divided_by_kiwi": round(apart, 3),
    }


def pretraining_config(name: str, arguments: Any) -> PretrainConfig:
    """The recipe `speedrun` for some minutes, with sequences of 256 tokens, which hold more of a question's context."""
    found = recipe("quickstart" if arguments.smoke else "roberta-prenorm")
    length: Results = {"steps": 3, "batch_size": 8} if arguments.smoke else {"batch_size": 256}
    if not arguments.smoke:
        length |= {"hours": arguments.minutes / 60, "workers": min(12, os.cpu_count() or 1)}
    data = replace(found.data, max_length=64 if arguments.smoke else LENGTH)
    train = replace(found.train, **length, evaluate_every=3 if arguments.smoke else 0.25)
    return override(replace(found, recipe=f"korean-{name}", data=data, train=train), arguments.set)


def pretrained(name: str, arguments: Any) -> Results:
    """Pre-train an encoder unless that is done; a run that was killed begins again, so that its minutes are whole."""
    run, corpus = arguments.work / "pretrained" / name, corpus_folder(arguments.data, arguments.work, name)
    if not is_finished(run):
        shutil.rmtree(run, ignore_errors=True)
        pretrain(pretraining_config(name, arguments), corpus, run, device=arguments.device)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return run_facts(run, corpus, text_files(arguments.data))


def halves(arguments: Any) -> Splits:
    """KorQuAD's dev questions cut in two by article: every second article is for training."""
    folder = arguments.work / "korquad"
    if not (folder / "dev.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        whole = json.loads(find_file(arguments.data, "KorQuAD_v1.0_dev.json").read_text(encoding="utf-8"))
        articles = sorted(whole["data"], key=lambda article: article["title"])
        for name, part in (("train", articles[0::2]), ("dev", articles[1::2])):
            part = part[:2] if arguments.smoke else part
            (folder / f"{name}.json").write_text(json.dumps({**whole, "data": part}), encoding="utf-8")
    return Splits([folder / "train.json"], {"": [folder / "dev.json"]})


def reviews(arguments: Any) -> Splits:
    """NSMC's files; of a smoke test the first rows."""
    train, test = (find_file(arguments.data, f"ratings_{part}.txt") for part in ("train", "test"))
    if not arguments.smoke:
        return Splits([train], {"": [test]})
    folder = arguments.work / "nsmc"
    folder.mkdir(parents=True, exist_ok=True)
    for path in (train, test):
        with path.open(encoding="utf-8") as file:
            (folder / path.name).write_text("".join(islice(file, 65)), encoding="utf-8")
    return Splits([folder / train.name], {"": [folder / test.name]})


def tuning_config(task: str, seed: int, smoke: bool) -> FinetuneConfig:
    """The same fine-tuning for every vocabulary."""
    length: Results = {"steps": 2} if smoke else {"epochs": EPOCHS[task]}
    train = TrainConfig(**length, batch_size=BATCHES[task], learning_rate=RATE, warmup=0.1, seed=seed, workers=0)
    data = FinetuneData(max_length=64 if smoke else 128)
    if task == "korquad":
        data = replace(data, stride=16, max_query=24) if smoke else replace(data, max_length=LENGTH, stride=96)
    return FinetuneConfig(task, data, train, restarts=0, dropout=0.1)


def finetuned(name: str, arguments: Any) -> Results:
    """Fine-tune a pre-trained encoder on both tasks with several seeds; every metric's values, mean and deviation."""
    model, folder = arguments.work / "pretrained" / name / MODEL, arguments.work / "tuned" / name
    if not model.exists():
        raise SystemExit(f"{model} is missing: run `pretrain {name}` first, with the same --work")
    calls = []
    for task in arguments.tasks:
        splits = halves(arguments) if task == "korquad" else reviews(arguments)
        for seed in range(1, arguments.seeds + 1):
            config = tuning_config(task, seed, arguments.smoke)
            calls.append((config, model, splits, folder / task / str(seed), arguments.device))
    calls.sort(key=lambda call: call[0].task != "nsmc")  # the longest first
    run_all(arguments.jobs, f"fine-tuning {name}", tune, calls, arguments.device)
    return {task: task_scores(task, folder / task) for task in arguments.tasks}


def task_scores(task: str, folder: Path) -> Results:
    """The values of a task's metrics over the seeds, their means and deviations, and how many runs failed."""
    found = runs_in(folder)
    scores: Results = {"failed": sum("failed" in each for each in found)}
    for metric in TASKS[task]:
        values = [round(each["scores"][metric], 2) for each in found if metric in each["scores"]]
        scores[metric] = {"values": values, **figures(values)}
    return scores

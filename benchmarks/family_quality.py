"""What some minutes or tokens of pre-training give: every family on the same text, then six tasks, several seeds."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.corpora import corpus_folder, text_bytes, text_files
from benchmarks.family_table import FAMILIES, QUALITY, QUALITY_SMOKE, quality_config
from benchmarks.tuning import run_all, scores_in, task_data, tune, whole
from benchmarks.weights import weight_facts
from bertsmith.config import load, to_dict
from bertsmith.corpus.shards import Corpus
from bertsmith.errors import Interrupted
from bertsmith.finetuning.benchmark import LONGEST
from bertsmith.finetuning.settings import FinetuneConfig, FinetuneData
from bertsmith.formats.hf import load_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.objectives.objective import Objective
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.pretraining import held_out
from bertsmith.pretraining.loader import DataConfig, Loader, split_documents
from bertsmith.pretraining.phases import make_loader
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.segments import segment_source
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.tasks.task import find_task
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import runlog
from bertsmith.training.run import CONFIG, MODEL, final_scores, is_finished
from bertsmith.training.settings import TrainConfig, autocast_dtype, pick_device
from bertsmith.training.speed import release_memory

EPOCHS = {"cola": 5.0, "sst2": 1.0, "mrpc": 5.0, "stsb": 5.0, "rte": 5.0}  # of the five tasks of GLUE
TASKS = {**EPOCHS, "conll2003": 3.0}  # tagging is no part of the mean
TEACHERS = ("bert", "roberta", "albert", "modern")  # what predicts masked words from the last layer's own states
RATE = 1e-4  # of fine-tuning, the same for every family
SAMPLED = 4096  # sequences, to estimate how many tokens a step has
Results = dict[str, Any]


def section(arguments: Any) -> str:
    """The part of the results: a run of some tokens is not compared with one of some minutes."""
    return "quality" if arguments.tokens is None else "quality at equal tokens"


def run_name(name: str, arguments: Any) -> str:
    """The name of a family's run in WORK: runs with a number of tokens are other ones."""
    return name if arguments.tokens is None else f"{name}-{arguments.tokens:g}M"


def pretrained(name: str, arguments: Any, teacher: str) -> Results:
    """Pre-train a family unless that is done; what it saw and what it learnt."""
    run = arguments.work / "pretrained" / run_name(name, arguments)
    corpus = corpus_folder(arguments.data, arguments.work, FAMILIES[teacher or name].tokenizer)
    if not is_finished(run):
        shutil.rmtree(run, ignore_errors=True)  # a run that was killed begins again: its minutes are to be whole ones
        start_pretraining(name, corpus, run, arguments, teacher)
    return {
        **run_facts(run, corpus, text_files(arguments.data)),
        "masked_words": masked_words(run / MODEL, corpus, arguments),
        "published_rate": FAMILIES[name].published,
        **({"teacher": teacher} if teacher else {}),
    }


def run_facts(run: Path, corpus: Path, files: Sequence[Path]) -> Results:
    """What a pre-training run has seen and learnt, and its settings; `files` is the text of the corpus."""
    records = [record for record in runlog.read(run) if "tokens_per_second" in record]
    facts = json.loads((run / "run.json").read_text(encoding="utf-8"))
    speeds = sorted(record["tokens_per_second"] for record in records)
    manifest = Corpus.open(corpus).manifest
    return {
        "seconds": round(records[-1]["seconds"], 1),
        "steps": records[-1]["step"],
        "tokens": records[-1]["tokens"],
        "epochs": round(records[-1]["tokens"] / manifest.tokens, 2),
        "tokens_per_second": round(speeds[len(speeds) // 2]),
        "memory_gb": max(record["memory_gb"] for record in records),
        "waiting_share": round(sum(r.get("waiting_share", 0.0) for r in records) / len(records), 4),
        "parameters": facts["model"]["parameters"],
        "corpus": {"files": [path.name for path in files], "tokens": manifest.tokens},
        "course": course_of(records),
        "held_out": {k: round(v, 4) for k, v in final_scores(run).items() if isinstance(v, float)},
        "weights": weight_facts(run / MODEL, corpus),
        "settings": changed_settings(load(PretrainConfig, run / CONFIG)),
    }


def course_of(records: Sequence[Results]) -> list[Results]:
    """The means of the training losses at each tenth of a run, each since the record before."""
    ends = [records[round((len(records) - 1) * tenth / 10)] for tenth in range(1, 11)]
    kept = ("seconds", "tokens", "max_length")
    return [{k: round(v, 4) for k, v in end.items() if k in kept or k.endswith("_loss")} for end in ends]


def changed_settings(config: PretrainConfig) -> Results:
    """The settings of a run that differ from the defaults."""
    usual: Results = {"model": EncoderConfig(), "data": DataConfig(), "train": TrainConfig()}
    found: Results = {"objective": to_dict(config.objective)}
    for part, default in usual.items():
        values, known = to_dict(getattr(config, part)), to_dict(default)
        found[part] = {name: value for name, value in values.items() if value != known[name]}
    found["objective"].pop("teacher", None)  # its folder; the result names the family
    return found


def start_pretraining(name: str, corpus: Path, run: Path, arguments: Any, teacher: str) -> None:
    """One pre-training run; a student has a teacher that was pre-trained in the same work folder.

    A teacher that is not a BERT has a student of its own family, with half of its layers.
    """
    half = ["objective.half=true"] if teacher and teacher != "bert" else []
    given = name, arguments.minutes, arguments.smoke, [*half, *arguments.set]
    config = quality_config(*given)
    if arguments.tokens is not None:
        config = quality_config(*given, steps=steps_for(arguments.tokens * 1e6, config, corpus))
    folder = arguments.work / "pretrained" / run_name(teacher, arguments) / MODEL if teacher else None
    pretrain(config, corpus, run, teacher=folder, device=arguments.device)


def steps_for(tokens: float, config: PretrainConfig, corpus: Path) -> int:
    """The steps that read this many tokens, special ones included: sequences of pairs are often shorter than others."""
    opened, tokenizer = Corpus.open(corpus), Tokenizer.load(corpus)
    documents, _ = split_documents(opened.manifest.documents, config.data.held_out)
    loader = make_loader(config, opened, documents, tokenizer, config.data.max_length)
    some = np.linspace(0, len(loader.source) - 1, SAMPLED).astype(np.int64)
    mean = loader.batch(np.zeros_like(some), some).num_tokens / SAMPLED
    return max(1, round(tokens / (mean * config.train.batch_size)))


def masked_words(model: Path, corpus: Path, arguments: Any, files: Sequence[Path] = ()) -> Results | None:
    """The masked-word loss on held-out full sentences, 15 % of the tokens masked one by one, whatever was trained.

    ELECTRA's is its generator's. Families with one tokenizer compare by the loss; across tokenizers only bits per byte
    of text come near a comparison, and the byte-level one keeps the case that the other two drop. `files` is the
    text of the corpus; none: all of the data.
    """
    folder = model / "generator" if (model / "generator").is_dir() else model
    saved = load_folder(folder).model
    if saved.encoder.config.direction != "both":  # next words, which are another measure
        return None
    words = MaskedLMConfig(next_sentence=False, mask_decoder=getattr(saved, "mask_decoder", None) is not None)
    loaded = load_folder(folder, objective=words)
    assert isinstance(loaded.model, Objective)
    if loaded.model.lacks_token_head(loaded.missing):
        return None
    device = pick_device(arguments.device)
    length = (QUALITY_SMOKE if arguments.smoke else QUALITY).length
    opened, tokenizer = Corpus.open(corpus), Tokenizer.load(corpus)
    _, kept = split_documents(opened.manifest.documents, DataConfig().held_out)
    source = segment_source("full", opened, kept, length, 0.0, 1, tokenizer.frame)
    loader = Loader.of(source, tokenizer, DataConfig(pairs="full"), objective=MaskedLMConfig(next_sentence=False))
    dtype = autocast_dtype("auto", device)
    scores = held_out.evaluate(loaded.model.to(device), loader, [], dtype)
    found = {"loss": round(scores["mlm_loss"], 4), "accuracy": round(scores["mlm_accuracy"], 2)}
    bits = (
        scores["mlm_loss"]
        / math.log(2)
        * opened.manifest.tokens
        / text_bytes(arguments.data, files or text_files(arguments.data))
    )
    return {**found, "bits_per_byte": round(bits, 4), "of": "the generator" if folder != model else "the model"}


def tuning_config(task: str, seed: int, smoke: bool) -> FinetuneConfig:
    """The same fine-tuning for every family."""
    length: dict[str, Any] = {"steps": 2} if smoke else {"epochs": TASKS[task]}
    train = TrainConfig(**length, batch_size=32, learning_rate=RATE, warmup=0.1, seed=seed, workers=0)
    data = FinetuneData(max_length=(QUALITY_SMOKE if smoke else QUALITY).length)
    return FinetuneConfig(task, data, train, restarts=0, dropout=0.1)


def finetune_family(name: str, arguments: Any) -> None:
    """Fine-tune a pre-trained family on every task and seed."""
    run = run_name(name, arguments)
    model, folder = arguments.work / "pretrained" / run / MODEL, arguments.work / "tuned" / run
    calls = []
    for task in arguments.tasks:
        data = task_data(arguments.data, task)
        for seed in range(1, arguments.seeds + 1):
            config = tuning_config(task, seed, arguments.smoke)
            calls.append((config, model, data.train, folder / task / str(seed), arguments.device))
    calls.sort(key=lambda call: LONGEST.index(call[0].task))
    if calls:
        run_all(arguments.jobs, f"fine-tuning {name}", tune, calls, arguments.device)


def scores_of(name: str, arguments: Any) -> Results:
    """The scores of a family by the task, without those of this call's tasks whose seeds are not all done."""
    folder = arguments.work / "tuned" / run_name(name, arguments)
    tuned = (task for task in TASKS if (folder / task).is_dir())
    found = {t: {"rate": RATE, **scores_in(folder / t, find_task(t).metrics[0])} for t in tuned}
    return whole(found, arguments.tasks, arguments.seeds)


def best_teacher(results: Results) -> str:
    """The family with the best mean over the tasks of those that predict masked words over the whole vocabulary."""
    able = {n: f for n, f in results.items() if n in TEACHERS and f.get("mean") is not None}
    if not able:
        raise SystemExit("WORK holds no family with a masked-word head: give --teacher, or run bert first")
    return max(able, key=lambda name: able[name]["mean"])


def measure_quality(name: str, arguments: Any, earlier: Results) -> Iterator[Results]:
    """Pre-train, then fine-tune one family; what is known after each of the two, also if the second is stopped."""
    runs = arguments.work / "pretrained"
    there = {n: found for n, found in earlier.items() if is_finished(runs / run_name(n, arguments))}
    teacher = (arguments.teacher or best_teacher(there)) if name == "distilbert" else ""
    found: Results = {"pretraining": pretrained(name, arguments, teacher)}
    yield found
    release_memory()
    stopped = None
    try:
        finetune_family(name, arguments)
    except Interrupted as error:
        stopped = error
    found["tasks"] = scores_of(name, arguments)
    yield found if stopped else {**found, "mean": mean_of(found["tasks"])}
    if stopped is not None:
        raise stopped


def mean_of(tasks: Results) -> float | None:
    """The mean over the five tasks of GLUE, as far as they were run."""
    means = [tasks[task]["mean"] for task in EPOCHS if task in tasks and tasks[task]["mean"] is not None]
    return round(sum(means) / len(means), 2) if means else None

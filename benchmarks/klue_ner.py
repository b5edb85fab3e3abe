"""KLUE-NER: entities whose boundaries lie inside words and tokens, and tagging of sub-tokens beside tagging of words.

    python -m benchmarks.klue_ner klue-ner-v1.1_dev.tsv VOCABULARY --work FOLDER

KLUE's dev file is cut in two: every fifth sentence is scored, the others are trained on, since this measures the two
ways and not a published score. Both begin with the same small encoder without pre-training, have the same rows, steps
and learning rate, and are scored on the same characters. `words` gives each word of letters, and each punctuation sign,
the tag of the entity that covers most of it. Their difference is the median over the seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import record
from bertsmith.config import override
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.hf import Notes, save_folder
from bertsmith.inference.predictor import Predictor
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.settings import MaskedLMConfig
from bertsmith.rows.columns import Columns, Row
from bertsmith.rows.entities import entities_of
from bertsmith.tasks.reading import read_task
from bertsmith.tasks.tagging import tag_entities
from bertsmith.tasks.task import find_task
from bertsmith.tasks.units import Places, unit_tags, units_of, words_of
from bertsmith.text.tokenizer import Tokenizer

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "num_layers": 2,
    "num_heads": 2,
    "intermediate_size": 512,
    "max_positions": 128,
}
SETTINGS = ["train.batch_size=32", "train.learning_rate=1e-3", "train.evaluate_every=0"]
SCORES = ("entity_macro_f1", "char_macro_f1", "f1")


def counts(rows: list[Row], tokenizer: Tokenizer) -> dict[str, Any]:
    """How many entities have a boundary inside a word, and how many of them words and tokens can mark exactly."""
    total = inside = by_words = by_tokens = 0
    units = units_of(rows, tokenizer, HeadConfig("tags", unit="token"))
    for row, tokens in zip(rows, units, strict=True):
        found, text = set(entities_of(row)), f" {row.text} "
        total += len(found)
        inside += sum(not (text[entity.start].isspace() and text[entity.end + 1].isspace()) for entity in found)
        by_words += len(found & _marked(words_of(row), row))
        by_tokens += len(found & _marked(tokens.places, row))
    return {
        "sentences": len(rows),
        "entities": total,
        "boundary_inside_eojeol": inside,
        "exact_by_words": by_words,
        "exact_by_tokens": by_tokens,
        "f1_at_most": {
            name: round(200 * n / (total + n), 2) for name, n in (("words", by_words), ("tokens", by_tokens))
        },
    }


def _marked(places: Places, row: Row) -> set[Any]:
    return set(tag_entities(places, unit_tags(places, entities_of(row))))


def scores(rows: list[Row], tokenizer: Tokenizer, work: Path, epochs: int, seeds: int) -> dict[str, Any]:
    """The scores of both ways on every fifth sentence."""
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    encoder = Encoder(EncoderConfig(vocab_size=tokenizer.vocab_size, **SIZES))
    save_folder(work / "encoder", MaskedLM(encoder, MaskedLMConfig()), tokenizer, Notes())
    kept = [row for number, row in enumerate(rows) if number % 5]
    data = {
        "tokens": [{"text": row.text, "entities": row.label} for row in kept],
        "words": [_words(row) for row in kept],
    }
    found: dict[str, Any] = {}
    for seed in range(1, seeds + 1):
        for unit, trained in data.items():
            settings = [*SETTINGS, f"train.epochs={epochs}", f"train.seed={seed}", "data.dev_share=0", "restarts=0"]
            config, run = override(FinetuneConfig("tag"), settings), work / f"{unit}-{seed}"
            if not (run / "model").is_dir():
                finetune(config, work / "encoder", trained, run, device="cpu")
            figures = Predictor.load(run, "cpu").evaluate(rows[::5])
            found.setdefault(unit, []).append({name: round(figures[name], 2) for name in SCORES})
            print(unit, seed, found[unit][-1], flush=True)
    medians = {
        unit: {name: statistics.median(each[name] for each in runs) for name in SCORES} for unit, runs in found.items()
    }
    return {"encoder": SIZES, "settings": [*SETTINGS, f"train.epochs={epochs}"], "seeds": found, "median": medians}


def _words(row: Row) -> dict[str, list[str]]:
    places = words_of(row)
    return {"tokens": [row.text[a:b] for a, b in places], "tags": unit_tags(places, entities_of(row))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("vocabulary", type=Path)
    parser.add_argument("--work", type=Path, default=Path("klue-ner"))
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    tokenizer = Tokenizer.load(options.vocabulary)
    rows = list(read_task(find_task("klue-ner"), options.file, Columns(), labelled=True))
    results: dict[str, Any] = {"counts": counts(rows, tokenizer)}
    print(json.dumps(results, indent=2), flush=True)
    results["scores"] = scores(rows, tokenizer, options.work, options.epochs, options.seeds)
    print(record("klue_ner", results))


if __name__ == "__main__":
    main()

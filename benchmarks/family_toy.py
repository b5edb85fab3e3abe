"""Made-up text and made-up files of tasks, to try the benchmark of the families out in seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

WORDS = """the a cat dog bird house tree river road child woman man day night book table light water stone field runs
sees finds takes gives likes makes holds opens closes small large old new green red quiet loud here there often
never""".split()
HEADERS = {
    "SST-2": "sentence\tlabel",
    "MRPC": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
    "STS-B": "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
    "RTE": "index\tsentence1\tsentence2\tlabel",
}


def write_toy_data(folder: Path) -> Path:
    """A text of some hundred documents, and 40 training and 20 dev rows of each task."""
    rng = random.Random(0)
    (folder / "text").mkdir(parents=True)
    documents = ["\n".join(_sentence(rng) for _ in range(6)) for _ in range(200)]
    (folder / "text" / "toy.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    for task in ("CoLA", *HEADERS):
        for part, rows in (("train", 40), ("dev", 20)):
            path = folder / "glue" / task / f"{part}.tsv"
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [_row(task, number, rng) for number in range(rows)]
            header = [HEADERS[task]] if task in HEADERS else []
            path.write_text("\n".join([*header, *lines]) + "\n", encoding="utf-8")
    for part, rows in (("train", 40), ("valid", 20)):
        path = folder / "glue" / "conll2003" / f"{part}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        sentences = ["-DOCSTART- -X- -X- O", *(_tagged(rng) for _ in range(rows))]
        path.write_text("\n\n".join(sentences) + "\n", encoding="utf-8")
    return folder


def write_toy_questions(folder: Path) -> Path:
    """Questions in SQuAD's form, some of them as a part of its training file and others as those of SQuADShifts."""
    rng = random.Random(1)
    for name, count in (("squad/train-v1.1.SUBSET", 20), ("squad/dev-v1.1", 10), ("squadshifts/nyt_v1.0", 20)):
        paragraphs = []
        for number in range(count):
            context, word = _sentence(rng), rng.choice(WORDS)
            answer = {"text": word, "answer_start": len(context) + 1}
            asked = {"id": f"{name}-{number}", "question": f"Where is {word}?", "answers": [answer]}
            paragraphs.append({"context": f"{context} {word}", "qas": [asked]})
        path = folder / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"version": "1.1", "data": [{"title": "toy", "paragraphs": paragraphs}]}))
    return folder


def _sentence(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(5, 12))).capitalize() + "."


def _tagged(rng: random.Random) -> str:
    """A sentence in CoNLL's form, with a person in it."""
    first, *words = _sentence(rng).rstrip(".").split()
    tagged = [
        (first, "O"),
        ("Anna", "B-PER"),
        (rng.choice(["Berg", "Lind"]), "I-PER"),
        *((word, "O") for word in words),
    ]
    return "\n".join(f"{word} NN I-NP {tag}" for word, tag in tagged)


def _row(task: str, number: int, rng: random.Random) -> str:
    first, second, label = _sentence(rng), _sentence(rng), number % 2
    return {
        "CoLA": f"toy\t{label}\t\t{first}",
        "SST-2": f"{first}\t{label}",
        "MRPC": f"{label}\t1\t2\t{first}\t{second}",
        "STS-B": f"{number}\tg\tf\t2012\t{number}\ts\ts\t{first}\t{second}\t{rng.uniform(0, 5):.2f}",
        "RTE": f"{number}\t{first}\t{second}\t{('not_', '')[label]}entailment",
    }[task]

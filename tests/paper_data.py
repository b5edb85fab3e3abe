"""Made-up rows of the paper's tasks, in which a few words decide the label, in the format of each data set."""

import json
from pathlib import Path

WORDS = ("list", "file", "class", "name", "value", "type")


def numbered(rows: int) -> list[tuple[int, str]]:
    """This many words, each with its number."""
    return [(i, WORDS[i % len(WORDS)]) for i in range(rows)]


def write_tasks(folder: Path, rows: int = 24) -> Path:
    """MNLI, MRPC, SST-2, CoLA, STS-B, RTE, SQuAD and CoNLL; QNLI without training rows; no QQP, no SWAG."""
    pairs = [(f"the {w} of {i}", f"a {w} {'is' if i % 2 else 'not'} {i}", i) for i, w in numbered(rows)]
    nli = ("entailment", "neutral", "contradiction")
    tables = {
        "MNLI": (("sentence1", "sentence2", "gold_label"), [(a, b, nli[i % 3]) for a, b, i in pairs]),
        "MRPC": (("Quality", "#1 String", "#2 String"), [(i % 2, a, b) for a, b, i in pairs]),
        "SST-2": (("sentence", "label"), [(b, i % 2) for a, b, i in pairs]),
        "STS-B": (("sentence1", "sentence2", "score"), [(a, b, i % 6) for a, b, i in pairs]),
        "RTE": (
            ("sentence1", "sentence2", "label"),
            [(a, b, nli[0] if i % 2 else "not_entailment") for a, b, i in pairs],
        ),
    }
    for name, (header, lines) in tables.items():
        (folder / name).mkdir(parents=True)
        devs = ("dev_matched", "dev_mismatched") if name == "MNLI" else ("dev",)
        for part, kept in (("train", lines), *((dev, lines[:10]) for dev in devs)):
            text = ["\t".join(map(str, line)) for line in (header, *kept)]
            (folder / name / f"{part}.tsv").write_text("\n".join(text) + "\n")
    (folder / "CoLA").mkdir()
    for part in ("train", "dev"):
        (folder / "CoLA" / f"{part}.tsv").write_text("".join(f"x\t{i % 2}\t\t{b}\n" for a, b, i in pairs))
    (folder / "QNLI").mkdir()
    (folder / "QNLI" / "dev.tsv").write_text("question\tsentence\tlabel\nwho\tme\tentailment\n")
    (folder / "squad").mkdir()
    questions = [
        {"id": str(i), "question": f"which {w}?", "context": f"a thing of {w} here", "word": w}
        for i, w in numbered(rows)
    ]
    paragraphs = [
        {"context": q["context"], "qas": [{**q, "answers": [{"text": q["word"], "answer_start": 11}]}]}
        for q in questions
    ]
    for name in ("train-v1.1.SUBSET.json", "dev-v1.1.json"):
        (folder / "squad" / name).write_text(
            json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]})
        )
    (folder / "conll2003").mkdir()
    sentence = "-DOCSTART- O\n\nthe O\n{0} B-PER\nof O\n{0} B-LOC\n\n"
    for name in ("eng.train", "eng.testa", "eng.testb"):
        (folder / "conll2003" / name).write_text("".join(sentence.format(w) for w in WORDS * 2))
    return folder

"""What a small Korean vocabulary does not know, and whether answers survive the way to tokens and back.

Vocabularies are trained on the first 20 MB of the text. `unknown` has the share of NSMC's reviews with an `[UNK]` at
8,000 entries. `answers` has KorQuAD's exact match when each gold answer is mapped to its tokens and back at 30,000
entries, for composed text (NFC) and for the same text decomposed (NFD).
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bertsmith.tasks.squad_scores import squad1_scores
from bertsmith.text.tokenizer import Tokenizer, train_wordpiece

TEXT = 20_000_000  # bytes
Form = Literal["NFC", "NFD"]


def unknown(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, float]:
    """The shares of texts with an `[UNK]` and of tokens that are one, in percent."""
    ids, unk = tokenizer.encode(texts), tokenizer.unknown_id
    return {
        "texts_percent": round(100 * sum(unk in each for each in ids) / len(ids), 2),
        "tokens_percent": round(100 * sum(each.count(unk) for each in ids) / sum(map(len, ids)), 3),
    }


def answers(tokenizer: Tokenizer, squad: dict[str, Any], form: Form) -> dict[str, float]:
    """KorQuAD's scores of the text that each gold answer's tokens cover."""
    golds, found = {}, {}
    for paragraph in (p for article in squad["data"] for p in article["paragraphs"]):
        (aligned,) = tokenizer.encode_aligned([unicodedata.normalize(form, paragraph["context"])])
        for question in paragraph["qas"]:
            answer = question["answers"][0]
            begin = len(unicodedata.normalize(form, paragraph["context"][: answer["answer_start"]]))
            gold = unicodedata.normalize(form, answer["text"])
            touched = [(a, b) for a, b in aligned.offsets if a < begin + len(gold) and b > begin]
            covered = aligned.text[touched[0][0] : touched[-1][1]] if touched else ""
            golds[question["id"]] = [unicodedata.normalize("NFC", gold)]
            found[question["id"]] = unicodedata.normalize("NFC", covered)
    return squad1_scores(golds, found, korean=True)


def measure(wiki: Path, nsmc: Path, korquad: Path) -> dict[str, Any]:
    """Train two vocabularies and measure both."""
    lines = wiki.read_bytes()[:TEXT].decode("utf-8", "ignore").splitlines()
    reviews = [
        line.split("\t")[1] for line in nsmc.read_text(encoding="utf-8").split("\n")[1:] if line.count("\t") == 2
    ]
    squad = json.loads(korquad.read_text(encoding="utf-8"))
    large = train_wordpiece(lines, 30_000)
    return {
        "unknown": unknown(train_wordpiece(lines, 8_000), reviews),
        "answers": {form: answers(large, squad, form) for form in ("NFC", "NFD")},
    }

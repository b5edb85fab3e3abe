"""The doctor finds each problem in faulty text and none in clean text; its page is self-contained."""

import dataclasses
import json
import random
import re
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertsmith.config import to_dict
from bertsmith.corpus import sources
from bertsmith.corpus.build import BuildConfig, build_corpus
from bertsmith.corpus.cleaning import CleanConfig
from bertsmith.corpus.doctor.examination import Diagnosis, Sample, describe, examine
from bertsmith.corpus.doctor.findings import LIMITS, Finding, histogram
from bertsmith.corpus.doctor.measures import Spread
from bertsmith.corpus.sources import find_sources
from bertsmith.errors import UserError
from bertsmith.pages.doctor import write_report
from bertsmith.text.tokenizer import train_wordpiece

WORDS = "time people water river house small green long story world paper light sound table music garden north".split()
RAW = BuildConfig(CleanConfig(duplicate_documents=False, duplicate_paragraphs=False))


def sentence(rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randint(8, 14))).capitalize() + "."


def clean_documents(count: int = 120, seed: int = 0) -> list[list[str]]:
    """Documents of three paragraphs of three sentences each, all different."""
    rng = random.Random(seed)
    return [[" ".join(sentence(rng) for _ in range(3)) for _ in range(3)] for _ in range(count)]


def write(path: Path, documents: list[list[str]]) -> Path:
    path.write_text("\n\n".join("\n".join(d) for d in documents) + "\n", encoding="utf-8")
    return path


def look(folder: Path, documents: list[list[str]], **options) -> dict[str, Finding]:
    return by_name(examine([write(folder / "text.txt", documents)], **options))


def by_name(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnosis.findings}


@pytest.fixture(scope="module")
def words_tokenizer(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("doctor") / "tok"
    train_wordpiece([p for d in clean_documents() for p in d], 300).save(folder)
    return folder


def build(folder: Path, documents: list[list[str]], tokenizer: Path) -> Path:
    build_corpus([write(folder / "built.txt", documents)], tokenizer, folder / "corpus", config=RAW, workers=1)
    return folder / "corpus"


def faulty(name: str) -> list[list[str]]:
    """Clean documents with one problem added."""
    documents = clean_documents()
    rng = random.Random(1)
    one = [[sentence(rng)] for _ in range(300)]
    return {
        "duplicate_documents": documents + documents[:40],
        "duplicate_paragraphs": documents + [[*d, documents[0][0]] for d in clean_documents(80, seed=2)],
        "boilerplate": [["Home | Login | Contact", *d] for d in documents],
        "short_documents": documents + [[f"{i} {s}." for s in ("Green", "Small", "Long")] for i in range(100)],
        "one_sentence": documents + one[:100],
        "no_sentences": documents + [[f"{i} north", f"{i} south"] for i in range(100)],
        "document_boundaries": one,
        "wrapped_lines": [[line for p in d for line in textwrap.wrap(p, 72)] for d in documents],
        "scripts": documents + [[f"Маленькая река {i} течёт на север. Вода холодная."] * 2 for i in range(30)],
        "markup": [[f"<p class='x'>{p}</p>" for p in d] for d in documents],
        "control_characters": [[f"{p}\x01" for p in d] for d in documents],
        "replacement_characters": [[f"{p} caf\ufffd" for p in d] for d in documents],
    }[name]


RAW_ONLY = {"wrapped_lines", "markup", "control_characters", "replacement_characters"}
FAULTS = [
    *("duplicate_documents", "duplicate_paragraphs", "boilerplate", "short_documents"),
    *("one_sentence", "no_sentences", "document_boundaries", "scripts", *sorted(RAW_ONLY)),
]


def test_clean_text_has_no_problem(tmp_path, words_tokenizer):
    findings = look(tmp_path, clean_documents(), tokenizer=words_tokenizer)
    assert {name for name, finding in findings.items() if finding.severity != "ok"} <= {"padding_512"}
    assert set(findings) == set(LIMITS)
    assert not any(finding.fix or finding.examples for finding in findings.values() if finding.severity == "ok")


@pytest.mark.parametrize("name", FAULTS)
def test_each_problem_of_raw_text_is_found(tmp_path, name):
    finding = look(tmp_path, faulty(name))[name]
    assert finding.severity != "ok"
    assert re.search(r"\d", finding.sentence)
    assert finding.fix
    assert len(finding.examples) <= 3
    assert all(len(example) <= 130 for example in finding.examples)
    assert finding.examples


@pytest.mark.parametrize("name", [n for n in FAULTS if n not in RAW_ONLY | {"scripts"}])
def test_each_problem_of_a_corpus_folder_is_found(tmp_path, words_tokenizer, name):
    findings = by_name(examine([build(tmp_path, faulty(name), words_tokenizer)]))
    assert findings[name].severity != "ok"
    assert not RAW_ONLY & set(findings)


def test_a_clean_corpus_folder_has_no_problem(tmp_path, words_tokenizer):
    diagnosis = examine([build(tmp_path, clean_documents(), words_tokenizer)])
    assert {f.name for f in diagnosis.findings if f.severity != "ok"} <= {"padding_512"}
    assert diagnosis.facts["documents"] == diagnosis.facts["all_documents"] == 120
    assert diagnosis.facts["tokens"] == diagnosis.facts["all_tokens"]
    assert diagnosis.left_out


def test_reported_shares_are_exact(tmp_path):
    findings = look(tmp_path, faulty("duplicate_documents"))
    assert findings["duplicate_documents"].value == pytest.approx(40 / 160)
    assert findings["duplicate_documents"].severity == "problem"
    assert "25.0 %" in findings["duplicate_documents"].sentence
    assert findings["duplicate_paragraphs"].value == 0  # paragraphs of duplicate documents are not counted again
    findings = look(tmp_path, faulty("one_sentence"))
    assert findings["one_sentence"].value == pytest.approx(100 / 220)
    findings = look(tmp_path, faulty("boilerplate"))
    assert findings["boilerplate"].examples == ("Home | Login | Contact (in 120 documents)",)


def test_the_options_named_in_fixes_exist(tmp_path):
    from bertsmith.config import override

    for name in FAULTS:
        for change in re.findall(r"--set (clean\.\S+)", look(tmp_path, faulty(name))[name].fix):
            assert override(BuildConfig(), [change])


def test_text_without_document_boundaries_is_a_problem(tmp_path, words_tokenizer):
    one = [[line for d in clean_documents() for line in d]]
    findings = look(tmp_path, one, tokenizer=words_tokenizer)
    assert findings["document_boundaries"].severity == "problem"
    assert "blank line" in findings["document_boundaries"].fix
    assert findings["next_sentence"].severity == "problem"
    several = [line for d in clean_documents(500) for line in d]
    write(tmp_path / "a.txt", [several])
    write(tmp_path / "b.txt", [list(reversed(several))])
    findings = by_name(examine([tmp_path / "a.txt", tmp_path / "b.txt"]))
    assert findings["document_boundaries"].severity == "problem"


def test_documents_of_one_line_are_no_problem(tmp_path):
    findings = look(tmp_path, [[" ".join(d * 2)] for d in clean_documents()])
    assert findings["document_boundaries"].severity == "ok"


def test_a_long_document_gives_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("bertsmith.corpus.doctor.findings.LONG_DOCUMENT", 50_000)
    long = [p for d in clean_documents(100, seed=3) for p in d]
    assert look(tmp_path, [*clean_documents(), long])["long_documents"].severity == "warning"


def test_invalid_utf8_and_bad_records_are_found(tmp_path):
    path = tmp_path / "text.txt"
    path.write_bytes(write(path, clean_documents()).read_bytes().replace(b"Music", b"Mus\xffic"))
    findings = by_name(examine([path]))
    assert findings["invalid_utf8"].severity != "ok"
    assert "line" in findings["invalid_utf8"].examples[0]
    assert findings["replacement_characters"].severity == "ok"  # only characters already in the text count
    rows = [json.dumps({"text": "\n".join(d)}) for d in clean_documents()]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows[:50], "{broken", *rows[50:]]))
    findings = by_name(examine([tmp_path / "rows.jsonl"]))
    assert findings["bad_records"].severity == "problem"
    assert findings["bad_records"].value == 1


def test_unknown_words_are_named(tmp_path, words_tokenizer):
    documents = [[*d, "Ω Ω ж are foreign."] for d in clean_documents()]
    diagnosis = examine([write(tmp_path / "text.txt", documents)], tokenizer=words_tokenizer)
    finding = by_name(diagnosis)["unknown_tokens"]
    assert finding.severity != "ok"
    assert finding.examples[0] == "Ω (240 times)"
    assert diagnosis.facts["unknown_words"]["ж"] == 120
    assert "tokenizer train" in finding.fix


def test_many_tokens_per_word_are_a_problem(tmp_path):
    train_wordpiece([" ".join(WORDS)] * 2, 70, min_count=100).save(tmp_path / "letters")
    findings = look(tmp_path, clean_documents(), tokenizer=tmp_path / "letters")
    assert findings["tokens_per_word"].severity == "problem"


def test_tokens_per_word_are_counted_without_punctuation(tmp_path):
    """Punctuation is neither a word nor a piece of one; every other token but a continuation begins a word."""
    documents = [[f"Dogs bark at dogs, {i}!", f"The dog {i} barks."] for i in range(60)]
    tokenizer = train_wordpiece([" ".join(d) for d in documents], 160, min_count=40)
    tokenizer.save(tmp_path / "tok")
    diagnosis = examine([write(tmp_path / "text.txt", documents)], tokenizer=tmp_path / "tok")
    pieces = [tokenizer.token(i) for d in documents for ids in tokenizer.encode(d) for i in ids]
    assert any(piece.startswith("##") for piece in pieces)
    assert not any(piece == "[UNK]" for piece in pieces)
    of_words = [piece for piece in pieces if piece not in set(",!.")]
    words = 60 * len("dogs bark at dogs 0 the dog 0 barks".split())
    assert diagnosis.facts["tokens"] == len(pieces)
    assert diagnosis.facts["tokens_per_word"] == len(of_words) / words
    assert by_name(diagnosis)["tokens_per_word"].value == pytest.approx(len(of_words) / words)


def test_unbalanced_next_sentence_labels_are_a_problem(tmp_path, words_tokenizer):
    """A document of a single token has no next segment."""
    rng = random.Random(0)
    balanced = by_name(examine([build(tmp_path, clean_documents(), words_tokenizer)]))["next_sentence"]
    assert balanced.severity == "ok"
    assert balanced.value < 0.05
    (tmp_path / "b").mkdir()
    findings = by_name(examine([build(tmp_path / "b", [[rng.choice(WORDS)] for _ in range(300)], words_tokenizer)]))
    assert findings["next_sentence"].severity == "problem"
    assert findings["padding_128"].severity == "warning"


def test_padding_is_computed_from_the_lengths_of_pairs(tmp_path, words_tokenizer):
    diagnosis = examine([build(tmp_path, clean_documents(), words_tokenizer)])
    pairs = diagnosis.facts["pairs"]["128"]
    assert pairs["padding"] == pytest.approx(1 - (pairs["first"] + pairs["second"] + 3) / 128)
    assert by_name(diagnosis)["padding_128"].value == pairs["padding"]


def test_real_text_has_no_problem_with_duplicates(world, tmp_path):
    lines = (world / "text.txt").read_text(encoding="utf-8").splitlines()
    # Without tables: their ruled lines are duplicates, and each version of Python has more of them.
    text = tmp_path / "text.txt"
    text.write_text("\n".join(line for line in lines if not line.startswith(("+", "|"))) + "\n", encoding="utf-8")
    findings = by_name(examine([text], tokenizer=world / "tok"))
    for name in ("duplicate_documents", "duplicate_paragraphs", "boilerplate", "unknown_tokens", "next_sentence"):
        assert findings[name].severity != "problem", findings[name]
    folder = by_name(examine([world / "shards"]))
    assert folder["duplicate_documents"].severity == folder["next_sentence"].severity == "ok"


def test_without_a_tokenizer_tokens_are_not_examined(tmp_path):
    diagnosis = examine([write(tmp_path / "text.txt", clean_documents())])
    assert not {"unknown_tokens", "next_sentence", "padding_128"} & set(by_name(diagnosis))
    assert "--tokenizer" in diagnosis.left_out[0]
    assert "tokens" not in diagnosis.facts


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_a_sample_of_a_large_input_is_examined(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 4096)
    documents = clean_documents(600)
    path = write(tmp_path / "text.txt", documents)
    if kind == "parquet":
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.table({"text": ["\n".join(d) for d in documents * 5]}), path)
    diagnosis = examine([path], sample_bytes=1 << 16)
    facts = diagnosis.facts
    assert facts["sampled"]
    assert 1 << 14 <= facts["looked_at_bytes"] <= (1 << 16) + (1 << 18) * (kind == "parquet")
    assert facts["documents"] < len(documents)
    assert "sample" in describe(diagnosis)[0]
    assert not examine([path], sample_bytes=1 << 24).facts["sampled"]


def test_the_sample_is_spread_evenly(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 4096)
    paths = [write(tmp_path / f"{i}.txt", clean_documents(150, seed=i)) for i in range(4)]
    sample = Sample(find_sources(paths), "text", 1 << 16)
    blocks = list(sample)
    assert sample.skipped
    assert sample.taken == sum(len(block.data) for block in blocks) <= 1 << 16
    counts = [sum(block.source == str(path) for block in blocks) for path in paths]
    assert min(counts) >= 3
    assert max(counts) - min(counts) <= 2
    assert not any(b.skipped for b in [Sample(find_sources(paths), "text", sample.total)] if list(b))


def test_a_large_corpus_folder_is_sampled_by_shards(tmp_path, words_tokenizer, monkeypatch):
    monkeypatch.setattr(sources, "BLOCK_BYTES", 8192)
    folder = build(tmp_path, clean_documents(300), words_tokenizer)
    facts = examine([folder], sample_bytes=40_000).facts
    assert facts["sampled"]
    assert 0 < facts["tokens"] <= 15_000 < facts["all_tokens"]


def test_spread_keeps_its_limit_and_covers_the_end():
    spread = Spread(1000)
    for number in range(5000):
        spread.add([f"{number:010}"])
        assert spread.size <= 1000
    numbers = [int(document[0]) for document in spread.kept]
    assert np.ptp(np.diff(numbers)) == 0
    assert len(numbers) > 40
    assert numbers[-1] > 4800


def test_the_page_is_self_contained_and_has_the_plots(tmp_path, words_tokenizer):
    documents = [["<b>fine</b> & dandy", *d] for d in faulty("duplicate_documents")]
    diagnosis = examine([write(tmp_path / "text.txt", documents)], tokenizer=words_tokenizer)
    write_report(diagnosis, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"<script|<link|@import|src=|href=[\"']?http|url\(http", html)
    assert html.count("<svg") == len(diagnosis.histograms) == 3
    assert "25.0 %" in html
    assert "clean.duplicate_documents=true" in html
    assert "&lt;b&gt;fine" in html
    assert "<b>fine" not in html


def test_a_diagnosis_is_printed_as_json_and_as_lines(tmp_path, words_tokenizer):
    diagnosis = examine([write(tmp_path / "text.txt", faulty("duplicate_documents"))], tokenizer=words_tokenizer)
    values = json.loads(json.dumps(to_dict(diagnosis)))
    assert values["facts"]["documents"] == 160
    assert [f["severity"] for f in values["findings"]] == [f.severity for f in diagnosis.findings]
    severities = [["problem", "warning", "ok"].index(f.severity) for f in diagnosis.findings]
    assert severities == sorted(severities)
    lines = describe(diagnosis)
    assert "1 problem," in lines[0]
    assert any("fix: nothing: corpus build drops them by default" in line for line in lines)
    with pytest.raises(dataclasses.FrozenInstanceError):
        diagnosis.facts = {}  # type: ignore[misc]


def test_histogram_counts_everything():
    for values in ([], [1], [5] * 10, [0, 0, 3], range(1, 100_000), [10**k for k in range(8)]):
        found = histogram("Length", "documents", list(values))
        assert sum(found.counts) == len(values)
        assert len(found.counts) == len(found.edges) <= 13


def test_bad_inputs_are_refused_with_the_reason(tmp_path, words_tokenizer, tokenizer_folder):
    path = write(tmp_path / "text.txt", clean_documents(4))
    corpus = build(tmp_path, clean_documents(4), words_tokenizer)
    with pytest.raises(UserError, match="no such file"):
        examine([tmp_path / "missing.txt"])
    with pytest.raises(UserError, match="by itself"):
        examine([corpus, path])
    with pytest.raises(UserError, match="is not the one"):
        examine([corpus], tokenizer=tokenizer_folder)
    (tmp_path / "rows.jsonl").write_text('{"body": "A text."}\n')
    with pytest.raises(UserError, match="--field"):
        examine([tmp_path / "rows.jsonl"])
    assert examine([tmp_path / "rows.jsonl"], text_field="body").facts["documents"] == 1
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(UserError, match="no text"):
        examine([tmp_path / "blank.txt"])


def test_the_fix_for_duplicates_does_not_name_an_active_setting(tmp_path, words_tokenizer):
    finding = look(tmp_path, faulty("duplicate_paragraphs"))["duplicate_paragraphs"]
    assert finding.fix == "nothing: corpus build drops them by default (clean.duplicate_paragraphs=true)"
    raw = build(tmp_path, faulty("duplicate_paragraphs"), words_tokenizer)
    assert "--set clean.duplicate_paragraphs=true" in by_name(examine([raw]))["duplicate_paragraphs"].fix
    long = "The green river and the small house and the long story of the north and the music of the world."
    documents = [[f"{p} {long} {long}" for p in d] for d in clean_documents()]  # repeated in different paragraphs
    build_corpus([write(tmp_path / "b.txt", documents)], words_tokenizer, tmp_path / "cleaned", workers=1)
    finding = by_name(examine([tmp_path / "cleaned"]))["duplicate_paragraphs"]
    assert finding.severity != "ok"
    assert "clean.duplicate_paragraphs was on" in finding.fix
    assert "duplicate_paragraphs=true" not in finding.fix


def test_repeated_short_sentences_are_no_duplicates(tmp_path, words_tokenizer):
    """A short sentence that occurs in many documents is not a duplicate paragraph."""
    refrain = "The people of the small green house by the river tell a long story."
    assert 50 <= len(refrain) < 100
    documents = [[f"{p} {refrain}" for p in d] for d in clean_documents()]
    findings = by_name(examine([build(tmp_path, documents, words_tokenizer)]))
    assert findings["duplicate_paragraphs"].value == 0

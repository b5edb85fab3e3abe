"""Corpus builds: a resumed build has identical bytes, duplicates are dropped, errors name the bad input."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bertsmith.corpus import duplicates, shards, sources
from bertsmith.corpus.build import BuildConfig, build_corpus, tokenise_block
from bertsmith.corpus.cleaning import CleanConfig, script_counts
from bertsmith.corpus.shards import Corpus
from bertsmith.errors import UserError
from bertsmith.text.tokenizer import Tokenizer


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def texts(corpus: Corpus, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(corpus.document(i)[0].tolist()) for i in range(corpus.manifest.documents)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 30_000)
    monkeypatch.setattr(sources, "MAX_RECORD", 200_000)


def write_corpus(path: Path, documents: list[str]) -> Path:
    path.write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    return path


def test_a_resumed_build_gives_identical_bytes(world, tmp_path, small_blocks, monkeypatch, capfd) -> None:
    whole = build_corpus([world / "text.txt"], world / "tok", tmp_path / "whole", workers=1)
    assert len(whole.shards) > 5
    done = []

    def stops_after_three(work):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(work)
        return tokenise_block(work)

    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.corpus.build.tokenise_block", stops_after_three)
        with pytest.raises(KeyboardInterrupt):
            build_corpus([world / "text.txt"], world / "tok", tmp_path / "cut", workers=1)
    with pytest.raises(UserError, match="not a finished corpus"):
        Corpus.open(tmp_path / "cut")
    (tmp_path / "cut" / ".000003.safetensors.123.partial").write_bytes(b"half")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) == 3
    build_corpus([world / "text.txt"], world / "tok", tmp_path / "cut", workers=2)
    assert "3 shards are finished" in capfd.readouterr().err
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_an_unfinished_build_is_not_resumed_with_other_settings(world, tmp_path, small_blocks, monkeypatch) -> None:
    def stop(work):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bertsmith.corpus.build.tokenise_block", stop)
        with pytest.raises(KeyboardInterrupt):
            build_corpus([world / "text.txt"], world / "tok", tmp_path / "cut", workers=1)
    other = BuildConfig(CleanConfig(min_length=10))
    with pytest.raises(UserError, match="unfinished corpus with other clean"):
        build_corpus([world / "text.txt"], world / "tok", tmp_path / "cut", workers=1, config=other)


def test_a_build_resumes_after_a_bad_file_is_fixed_or_skipped(world, tmp_path, small_blocks) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "A first row."}\nnot JSON\n{"text": "A last row."}\n')
    inputs = [world / "text.txt", bad]
    for out in ("mended", "skipped"):
        with pytest.raises(UserError, match=r"bad\.jsonl, line 2: not valid JSON.*run the same command again"):
            build_corpus(inputs, world / "tok", tmp_path / out, workers=1)
    skipping = BuildConfig(skip_bad=True)
    skipped = build_corpus(inputs, world / "tok", tmp_path / "skipped", workers=1, config=skipping)
    bad.write_text('{"text": "A first row."}\n{"text": "A last row."}\n')
    mended = build_corpus(inputs, world / "tok", tmp_path / "mended", workers=1)
    assert mended.manifest.tokens == skipped.manifest.tokens
    assert mended.manifest.documents == skipped.manifest.documents


def test_bad_files_and_records_are_reported_and_skipped(world, tmp_path, capfd) -> None:
    import gzip

    (tmp_path / "rows.jsonl").write_text('{"text": "A row."}\n{"txt": 1}\n{"text": "Another."}\n')
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"lost text\n" * 1000)[:-20])
    write_corpus(tmp_path / "good.txt", ["A good one.", "And one more."])
    inputs = [tmp_path / name for name in ("rows.jsonl", "cut.txt.gz", "good.txt")]
    corpus = build_corpus(inputs, world / "tok", tmp_path / "out", workers=1, config=BuildConfig(skip_bad=True))
    assert corpus.manifest.documents == 4
    err = capfd.readouterr().err
    assert "skipped 2 bad record(s) or file(s)" in err
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: no text in field 'text'"):
        build_corpus(inputs, world / "tok", tmp_path / "strict", workers=1)
    with pytest.raises(UserError, match=r"cut\.txt\.gz is damaged"):
        build_corpus(inputs[1:], world / "tok", tmp_path / "strict2", workers=1)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_first_of_duplicates_is_kept_with_any_number_of_workers(world, tmp_path, small_blocks, workers) -> None:
    filler = [f"Filler text number {i} about nothing in particular. " * 20 for i in range(200)]
    long = "A long paragraph that stands in two documents, word for word, and is long enough to be compared at all."
    documents = ["The very first document.", *filler[:100], f"Own text here.\n{long}", *filler[100:]]
    documents += ["The very first document.", f"{long}\nOther text.", "short line\nUnique end."]
    write_corpus(tmp_path / "text.txt", documents)
    corpus = build_corpus([tmp_path / "text.txt"], world / "tok", tmp_path / f"out{workers}", workers=workers)
    tokenizer = Tokenizer.load(world / "tok")
    found = texts(corpus, tokenizer)
    assert len(corpus.shards) > 2
    assert len(found) == len(documents) - 1
    assert found[0] == tokenizer.decode(tokenizer.encode(["The very first document."])[0])
    with_long = [t for t in found if "two documents" in t]
    assert len(with_long) == 1
    assert with_long[0].startswith("own")
    assert corpus.manifest.cleaning["duplicate_documents"] == 1
    assert corpus.manifest.cleaning["dropped_paragraphs"] == 1


def test_buckets_on_disk_find_the_duplicates_that_a_set_finds(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(duplicates, "BUCKET_ITEMS", 50)
    rng = np.random.default_rng(0)
    blocks = [rng.integers(1, 300, size).astype(np.uint64) << np.uint64(55) for size in (100, 0, 170, 30)]
    files = []
    for number, hashes in enumerate(blocks):
        files.append(tmp_path / f"{number}.hashes")
        save_file(dict.fromkeys(duplicates.KINDS, hashes), files[-1])
    monkeypatch.setattr(duplicates, "bands_for", lambda similarity: (10**9, 1))
    drops = duplicates.find_drops(files, CleanConfig(boilerplate=4), tmp_path)
    counts = {h: sum((b == h).sum() for b in blocks) for h in np.concatenate(blocks)}
    for number, hashes in enumerate(blocks):
        often = {place for place, h in enumerate(hashes) if h and counts[h] >= 4}
        assert drops.of(number).documents == _later(blocks, number) | ({0} if _later(blocks, number) else set())
        assert drops.of(number).paragraphs == _later(blocks, number) | often


def _later(blocks: list[np.ndarray], number: int) -> set[int]:
    """The places of a block whose value occurs earlier, in the block or in one before it."""
    before = {int(h) for block in blocks[:number] for h in block if h}
    places = set()
    for place, h in enumerate(blocks[number]):
        if h and int(h) in before:
            places.add(place)
        before.add(int(h))
    return places


def test_near_duplicates_are_dropped_and_the_first_is_kept(world, tmp_path) -> None:
    words = [f"word{i}" for i in range(200)]
    near = " ".join([*words[:100], "changed", *words[101:]])
    other = " ".join(f"thing{i}" for i in range(200))
    write_corpus(tmp_path / "text.txt", [" ".join(words), other, near])
    config = BuildConfig(CleanConfig(near_duplicates=0.8))
    corpus = build_corpus([tmp_path / "text.txt"], world / "tok", tmp_path / "out", workers=1, config=config)
    assert corpus.manifest.documents == 2
    assert corpus.manifest.cleaning["duplicate_documents"] == 1
    plain = build_corpus([tmp_path / "text.txt"], world / "tok", tmp_path / "plain", workers=1)
    assert plain.manifest.documents == 3


def test_every_copy_of_boilerplate_is_dropped(world, tmp_path) -> None:
    write_corpus(tmp_path / "text.txt", [f"Text number {i}.\nRead more on our site" for i in range(30)])
    config = BuildConfig(CleanConfig(boilerplate=10))
    corpus = build_corpus([tmp_path / "text.txt"], world / "tok", tmp_path / "out", workers=1, config=config)
    assert not [t for t in texts(corpus, Tokenizer.load(world / "tok")) if "site" in t]
    assert corpus.manifest.cleaning["dropped_paragraphs"] == 30


def test_wrapped_lines_are_joined_before_sentence_splitting(world, tmp_path) -> None:
    words = "The quick brown fox jumps over the lazy dog and then it goes home again".split()
    lines = textwrap.wrap(" ".join(" ".join(words) + "." for _ in range(12)), 70)
    (tmp_path / "text.txt").write_text("\n".join(lines) + "\n")
    counts = {}
    for unwrap in (True, False):
        config = BuildConfig(CleanConfig(unwrap=unwrap))
        out = tmp_path / f"out{unwrap}"
        counts[unwrap] = build_corpus(
            [tmp_path / "text.txt"], world / "tok", out, workers=1, config=config
        ).manifest.sentences
    assert counts[True] == 12
    assert counts[False] > 20


def test_documents_are_filtered_by_length_and_script(world, tmp_path) -> None:
    write_corpus(
        tmp_path / "text.txt", ["Short.", "An English text that is long enough.", "한국어로 쓴 충분히 긴 문서이다."]
    )
    for config, count in ((CleanConfig(min_length=10), 2), (CleanConfig(script="hangul"), 1), (CleanConfig(), 3)):
        out = tmp_path / f"out{count}"
        corpus = build_corpus([tmp_path / "text.txt"], world / "tok", out, workers=1, config=BuildConfig(config))
        assert corpus.manifest.documents == count
    assert +script_counts(["한국어와 漢字"]) == {"hangul": 4, "han": 2}
    with pytest.raises(UserError, match="did you mean 'hangul'"):
        CleanConfig(script="hangeul")


def test_blocks_end_between_records_and_hold_all_bytes(tmp_path, small_blocks) -> None:
    rng = random.Random(3)
    documents = ["\n".join("x" * rng.randint(1, 400) for _ in range(rng.randint(1, 60))) for _ in range(80)]
    path = write_corpus(tmp_path / "a.txt", documents)
    blocks = list(sources.read_blocks(sources.find_sources([path]), "text", sources.Reading()))
    assert len(blocks) > 5
    assert b"".join(b.data for b in blocks) == path.read_bytes()
    assert all(b.data.endswith(b"\n\n") for b in blocks[:-1])
    lines = path.read_bytes().split(b"\n")
    assert all(lines[b.first_line - 1] == b.data.split(b"\n")[0] for b in blocks)


def test_a_too_long_document_is_split_between_lines(tmp_path, small_blocks) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one long line of text\n" * 30_000)
    blocks = list(sources.read_blocks(sources.find_sources([path]), "text", sources.Reading()))
    assert b"".join(b.data for b in blocks) == path.read_bytes()
    assert max(len(b.data) for b in blocks) <= 230_000


def test_globs_folders_and_urls_are_read(world, tmp_path, monkeypatch) -> None:
    import fsspec

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path.parent / f"{tmp_path.name}-cache"))
    for name in ("a.txt", "b.txt", "c.jsonl"):
        (tmp_path / name).write_text('{"text": "Row."}\n' if name == "c.jsonl" else f"File {name}.\n")
    assert len(sources.find_sources([tmp_path])) == 3
    assert len(sources.find_sources([f"{tmp_path}/*.txt"])) == 2
    with pytest.raises(UserError, match="nothing matches"):
        sources.find_sources([f"{tmp_path}/*.md"])
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/texts/a.txt", b"A document.\n\nAnother one.\n")
    corpus = build_corpus(["memory://texts/a.txt"], world / "tok", "memory://corpora/one", workers=1)
    local = build_corpus([f"file://{tmp_path}/a.txt"], world / "tok", tmp_path / "local", workers=1)
    assert corpus.manifest.documents == 2
    assert local.manifest.documents == 1
    assert memory.exists("/corpora/one/corpus.json")
    assert not memory.exists("/corpora/one/build.json")


def test_a_full_disk_is_an_error_and_the_build_can_be_repeated(world, tmp_path, monkeypatch) -> None:
    from bertsmith.corpus.store import Store

    def full(self, name, data):
        if name.endswith(".safetensors"):
            raise OSError(28, "No space left on device", name)
        original(self, name, data)

    original = Store.write
    monkeypatch.setattr(Store, "write", full)
    with pytest.raises(OSError, match="No space left"):
        build_corpus([world / "text.txt"], world / "tok", tmp_path / "out", workers=1)
    monkeypatch.undo()
    build_corpus([world / "text.txt"], world / "tok", tmp_path / "out", workers=1)


def test_a_flipped_byte_of_a_large_corpus_is_detected_in_the_background(world, tmp_path, monkeypatch) -> None:
    shutil.copytree(world / "shards", tmp_path / "shards")
    monkeypatch.setattr(shards, "VERIFY_AT_ONCE", 0)
    data = bytearray((tmp_path / "shards" / "000000.safetensors").read_bytes())
    data[-5] ^= 1
    (tmp_path / "shards" / "000000.safetensors").write_bytes(data)
    corpus = Corpus.open(tmp_path / "shards")
    deadline = time.monotonic() + 20
    while not corpus.faults and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(UserError, match=r"000000\.safetensors does not match its checksum"):
        corpus.place(0)


@pytest.mark.slow
def test_a_build_killed_at_random_moments_ends_with_identical_bytes(world, tmp_path) -> None:
    text = (world / "text.txt").read_text()
    parts = [f"Copy number {i}.\n" + text.replace("object", f"object{i}") for i in range(24)]
    write_corpus(tmp_path / "text.txt", parts)
    command = [sys.executable, "-m", "bertsmith", "corpus", "build", str(tmp_path / "text.txt")]
    command += ["--tokenizer", str(world / "tok"), "--workers", "2", "--json", "--out"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    dice, kills = random.Random(5), 0
    for _ in range(10):
        process = subprocess.Popen(
            [*command, str(tmp_path / "cut")],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(dice.uniform(0.5, 4))
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
            time.sleep(0.2)
    if not (tmp_path / "cut" / "corpus.json").exists():
        subprocess.run([*command, str(tmp_path / "cut")], check=True, capture_output=True)
    assert kills
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert json.loads((tmp_path / "cut" / "corpus.json").read_text())["documents"] > 0


@pytest.mark.slow
def test_ray_gives_identical_bytes(world, tmp_path, small_blocks) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    build_corpus([world / "text.txt"], world / "tok", tmp_path / "local", workers=1)
    build_corpus([world / "text.txt"], world / "tok", tmp_path / "ray", workers=2, engine="ray")
    assert contents(tmp_path / "ray") == contents(tmp_path / "local")


def test_a_deleted_file_is_named_or_skipped(tmp_path) -> None:
    paths = [write_corpus(tmp_path / name, ["Some text."]) for name in ("a.txt", "b.txt")]
    found = sources.find_sources(paths)
    paths[0].unlink()
    with pytest.raises(UserError, match=r"cannot read .*a\.txt: No such file"):
        list(sources.read_blocks(found, "text", sources.Reading()))
    reading = sources.Reading()
    assert len(list(sources.read_blocks(found, "text", reading, skip_bad=True))) == 1
    assert "a.txt" in reading.bad[0]

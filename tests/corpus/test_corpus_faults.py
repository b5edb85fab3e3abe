"""Damage to unfinished builds and to corpus files, truncated shards, and workers whose main process was killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from bertsmith.corpus import build as building
from bertsmith.corpus import shards, sources
from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.shards import LENGTHS, MANIFEST, PLAN, Corpus
from bertsmith.errors import UserError
from bertsmith.text.tokenizer import Tokenizer, train_wordpiece


def flip(path: Path, place: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0x04
    path.write_bytes(bytes(data))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def builds(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted build, and one that was stopped after three shards."""
    folder, real, done = tmp_path_factory.mktemp("builds"), building.tokenise_block, []

    def few(work):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(work)
        return real(work)

    with small_blocks() as patched:
        build_corpus([world / "text.txt"], world / "tok", folder / "whole", workers=1)
        patched.setattr(building, "tokenise_block", few)
        with pytest.raises(KeyboardInterrupt):
            build_corpus([world / "text.txt"], world / "tok", folder / "stopped", workers=1)
    return folder


@contextmanager
def small_blocks() -> Iterator[pytest.MonkeyPatch]:
    """Several shards of a small text."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "BLOCK_BYTES", 1 << 16)
        patched.setattr(building, "BLOCK_BYTES", 1 << 16)
        yield patched


@pytest.fixture
def stopped(builds: Path, world: Path, tmp_path: Path):
    """A copy of the stopped build, a function that resumes it, and the bytes of an uninterrupted build."""
    folder = shutil.copytree(builds / "stopped", tmp_path / "out")
    with small_blocks():
        yield (
            folder,
            lambda: build_corpus([world / "text.txt"], world / "tok", folder, workers=1),
            content(builds / "whole"),
        )


@pytest.mark.parametrize("name", ["000001.safetensors", "000002.hashes", "000001.safetensors.sha256"])
@pytest.mark.parametrize("place", [10, -1])
def test_a_flipped_byte_in_an_unfinished_build_is_repaired(stopped, name: str, place: int) -> None:
    folder, resume, whole = stopped
    flip(folder / name, place)
    resume()
    assert content(folder) == whole


def test_damage_after_writing_is_detected_before_the_manifest_is_written(stopped, monkeypatch) -> None:
    folder, resume, _ = stopped
    real = building._tokenise

    def and_damage(*given):
        real(*given)
        flip(folder / "000000.safetensors")

    monkeypatch.setattr(building, "_tokenise", and_damage)
    with pytest.raises(UserError, match=r"000000\.safetensors was damaged after it was written"):
        resume()
    assert not (folder / MANIFEST).exists()


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1]", b"\xff"])
def test_a_damaged_plan_is_a_one_line_error(stopped, damaged: bytes) -> None:
    folder, resume, _ = stopped
    (folder / PLAN).write_bytes(damaged)
    with pytest.raises(UserError, match=r"build\.json is damaged; remove"):
        resume()


@pytest.fixture
def corpus(tmp_path: Path, world: Path) -> Path:
    return shutil.copytree(world / "shards", tmp_path / "c")


def test_a_finished_corpus_has_no_temporary_files(corpus: Path) -> None:
    assert not [name for name in content(corpus) if name.endswith((".sha256", ".hashes", ".drops"))]


@pytest.mark.parametrize("place", [-1, -2, 3, 30])
def test_damaged_document_lengths_are_refused(corpus: Path, place: int) -> None:
    flip(corpus / LENGTHS, place)
    with pytest.raises(UserError, match=r"documents\.lengths does not match its checksum"):
        Corpus.open(corpus)


def test_lengths_of_older_folders_are_checked_by_their_sums(corpus: Path) -> None:
    values = json.loads((corpus / MANIFEST).read_text())
    for name in ("clean", "unknown", "lengths_sha256"):
        del values[name]
    (corpus / MANIFEST).write_text(json.dumps(values))
    assert Corpus.open(corpus).manifest.unknown is None
    flip(corpus / LENGTHS)
    with pytest.raises(UserError, match=r"documents\.lengths does not belong to this"):
        Corpus.open(corpus)
    (corpus / LENGTHS).unlink()
    with pytest.raises(UserError, match=r"documents\.lengths is missing"):
        Corpus.open(corpus)


@pytest.mark.parametrize(
    "damaged", [b"", b"{", b"[]", b"{}", b'{"version": 1}', b'{"version": 1, "shards": 3}', b"\xff"]
)
def test_a_damaged_manifest_is_a_one_line_error(corpus: Path, damaged: bytes) -> None:
    (corpus / MANIFEST).write_bytes(damaged)
    with pytest.raises(UserError, match=r"corpus\.json") as error:
        Corpus.open(corpus)
    assert "\n" not in str(error.value)


def test_a_shard_truncated_while_in_use_is_an_error(corpus: Path, monkeypatch) -> None:
    monkeypatch.setattr(shards, "CHECK_EVERY", 0.0)
    opened = Corpus.open(corpus)
    before = opened.document(0)[0].tolist()
    path = corpus / "000000.safetensors"
    whole = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(len(whole) // 2)
    with pytest.raises(UserError, match=r"000000\.safetensors was truncated to"):
        opened.document(0)
    path.write_bytes(whole)
    assert opened.document(0)[0].tolist() == before


def test_a_high_share_of_unknown_tokens_gives_a_warning(tmp_path: Path, world: Path, capfd) -> None:
    (tmp_path / "a.txt").write_text("The list of Жук and names.\n" * 3 + "\n" + "plain words\n", encoding="utf-8")
    corpus = build_corpus([tmp_path / "a.txt"], world / "tok", tmp_path / "out", workers=1)
    tokens = np.concatenate([shard.tokens for shard in corpus.shards])
    unknown = int((tokens == Tokenizer.load(world / "tok").id("[UNK]")).sum())
    assert unknown == corpus.manifest.unknown == 3
    share = 100 * unknown / corpus.manifest.tokens
    assert f"{share:.1f} % of the tokens of the corpus are [UNK]: the vocabulary" in capfd.readouterr().err


def test_a_lower_casing_tokenizer_on_a_cased_vocabulary_is_named(tmp_path: Path, capfd) -> None:
    text = ["Anna Kim liest das Buch", "Das Haus in Berlin"] * 40
    (tmp_path / "a.txt").write_text("\n".join(text), encoding="utf-8")
    train_wordpiece(text, 150, cased=True).save(tmp_path / "tok")
    (tmp_path / "tok" / "tokenizer.json").unlink()
    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    vocabulary = [t for t in (tmp_path / "tok" / "vocab.txt").read_text().splitlines() if t not in "abdhiknlsu"]
    (tmp_path / "tok" / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    build_corpus([tmp_path / "a.txt"], tmp_path / "tok", tmp_path / "out", workers=1)
    assert "the tokenizer lower-cases, but its vocabulary is cased" in capfd.readouterr().err


# Workers


def children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_no_worker_outlives_the_main_process(tmp_path: Path, world: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored here, as under nohup, and by the processes that are started")
    text = (world / "text.txt").read_text(encoding="utf-8")
    (tmp_path / "big.txt").write_text("\n\n".join(f"{i} {text}" for i in range(60)), encoding="utf-8")
    command = [sys.executable, "-m", "bertsmith", "corpus", "build", tmp_path / "big.txt", "--tokenizer"]
    command += [world / "tok", "--out", tmp_path / "out", "--workers", "2"]
    main = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, cwd=Path(__file__).parent.parent.parent)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "out").glob("0*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = children(main.pid)
    assert len(workers) >= 2
    os.kill(main.pid, number)
    _, stderr = main.communicate(timeout=60)
    deadline = time.monotonic() + 10
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))
    if number != signal.SIGKILL:
        assert main.returncode == 128 + number
        assert b"stopped; finished shards are kept" in stderr
        assert b"Traceback" not in stderr
        assert b"leaked" not in stderr
        assert not list((tmp_path / "out").glob("*.partial"))

"""Rows are tokenised once: cached rows equal encoded rows, and a damaged cache is no error."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bertsmith import draws
from bertsmith.batch import Batch, collate
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning import row_cache
from bertsmith.finetuning.batches import ORDER, micro_batches
from bertsmith.finetuning.row_cache import cache_folder, digest, encode_once
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.model.heads import HeadConfig
from bertsmith.rows.columns import Row
from bertsmith.rows.conll import with_documents
from bertsmith.tasks.description import Limits
from bertsmith.tasks.kinds import KINDS
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training.settings import TrainConfig

LIMITS = Limits(24, stride=6, max_query=8)
SENTENCES = [
    Row("", None, None, "", parts=("-DOCSTART-",)),
    *(Row(f"the list {i}", None, ["O", "B-X", "O"], f"{i}", parts=("the", "list", str(i))) for i in range(9)),
]
CONTEXT = "a list of numbers is in the file and the class has a name of its own " * 2
CASES = {
    "single": (
        [Row(f"the {'file ' * i}", "a list" if i % 2 else None, "xy"[i % 2], "") for i in range(30)],
        HeadConfig("single", ("x", "y")),
    ),
    "multi": ([Row(f"it {i}", None, ["x"] * (i % 2), "") for i in range(6)], HeadConfig("multi", ("x", "y"))),
    "regression": ([Row(f"it {i}", "b", i / 2, "") for i in range(6)], HeadConfig("regression")),
    "choice": (
        [Row(f"we {i}", "he", i % 3, "", parts=("ran", "a list of " * i, "slept")) for i in range(8)],
        HeadConfig("choice", num_choices=3),
    ),
    "tags": (list(with_documents(SENTENCES)), HeadConfig("tags", ("O", "B-X"))),
    "span": (
        [Row("what is it", CONTEXT, {"text": ["list"], "answer_start": [2]}, ""), Row("where", "it", [], "")],
        HeadConfig("span"),
    ),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept" / "rows"


@pytest.fixture
def tokenizer(world: Path) -> Tokenizer:
    return Tokenizer.load(world / "tok")


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("tokenised again")


def same(one: object, other: object) -> bool:
    if isinstance(one, (list, tuple, range, np.ndarray)) and not np.isscalar(one):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__dataclass_fields__)
    return one == other


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_cached_rows_equal_encoded_rows(folder, tokenizer, monkeypatch, name: str, labelled: bool) -> None:
    rows, head = CASES[name]
    plain = KINDS[head.kind].encode(rows, tokenizer, LIMITS, head, labelled=labelled)
    first = encode_once(rows, tokenizer, LIMITS, head, labelled=labelled)
    monkeypatch.setattr(Tokenizer, "encode", refuse)
    monkeypatch.setattr(Tokenizer, "encode_aligned", refuse)
    second = encode_once(rows, tokenizer, LIMITS, head, labelled=labelled)
    for found in (first, second):
        assert same(plain.examples, found.examples)
        assert [list(plain.parts_of(i)) for i in range(len(rows))] == [
            list(found.parts_of(i)) for i in range(len(rows))
        ]
        assert found.shortened == plain.shortened
    if not labelled:
        assert same(plain.details, second.details)
    assert len(list(folder.iterdir())) == 1


def test_cache_key_depends_on_everything_that_changes_the_tokens(tokenizer, world: Path) -> None:
    rows, head = CASES["single"]
    other = Tokenizer.load(world / "tok")
    other.backend.add_tokens(["xyz"])
    changed = [replace(rows[0], text=rows[0].text[:-1]), *rows[1:]]
    moved = [replace(rows[0], text="ab", pair="c"), replace(rows[0], text="a", pair="bc")]
    tags, tag_head = CASES["tags"]
    names = [
        digest(rows, tokenizer, LIMITS, head, True),
        digest(rows, tokenizer, LIMITS, head, False),
        digest(changed, tokenizer, LIMITS, head, True),
        digest([replace(rows[0], label="y"), *rows[1:]], tokenizer, LIMITS, head, True),
        digest([replace(rows[0], pair=""), *rows[1:]], tokenizer, LIMITS, head, True),
        digest(rows[:-1], tokenizer, LIMITS, head, True),
        digest(rows, other, LIMITS, head, True),
        digest(rows, tokenizer, replace(LIMITS, max_length=25), head, True),
        digest(rows, tokenizer, replace(LIMITS, stride=7), head, True),
        digest(rows, tokenizer, replace(LIMITS, max_query=9), head, True),
        digest(rows, tokenizer, LIMITS, HeadConfig("single", ("y", "x")), True),
        *(digest([row], tokenizer, LIMITS, head, False) for row in moved),
        digest(tags, tokenizer, LIMITS, tag_head, False),
        digest([replace(tags[0], document=tags[0].document[::-1]), *tags[1:]], tokenizer, LIMITS, tag_head, False),
        digest([replace(tags[0], begin=1), *tags[1:]], tokenizer, LIMITS, tag_head, False),
    ]
    assert len(set(names)) == len(names)
    elsewhere = [replace(row, place="another file") for row in rows]
    assert digest(elsewhere, tokenizer, replace(LIMITS, threshold=1.0, n_best=3), head, True) == names[0]


@pytest.mark.parametrize("damage", ["cut", "flipped", "text", "empty"])
def test_damaged_cache_file_is_written_again(folder, tokenizer, damage: str) -> None:
    rows, head = CASES["single"]
    whole = encode_once(rows, tokenizer, LIMITS, head, labelled=True)
    (path,) = folder.iterdir()
    data = path.read_bytes()
    flipped = bytearray(data)
    flipped[-3] ^= 1
    path.write_bytes({"cut": data[:-20], "flipped": bytes(flipped), "text": b"no tensors", "empty": b""}[damage])
    assert same(encode_once(rows, tokenizer, LIMITS, head, labelled=True).examples, whole.examples)
    assert path.read_bytes() == data


def test_unwritable_cache_folder_is_no_error(tmp_path, tokenizer, monkeypatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("BERTSMITH_CACHE", str(tmp_path / "file"))
    rows, head = CASES["single"]
    assert len(encode_once(rows, tokenizer, LIMITS, head, labelled=True).examples) == len(rows)
    monkeypatch.setenv("BERTSMITH_CACHE", "")
    assert cache_folder() is None
    assert len(encode_once(rows, tokenizer, LIMITS, head, labelled=True).examples) == len(rows)


def test_cache_folder_follows_the_environment(monkeypatch) -> None:
    monkeypatch.delenv("BERTSMITH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/bertsmith/rows")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/bertsmith/rows")


def test_least_recently_used_files_are_removed_first(folder, tokenizer, monkeypatch) -> None:
    rows, head = CASES["single"]
    for count in (10, 11, 12):
        encode_once(rows[:count], tokenizer, LIMITS, head, labelled=True)
        for age, path in enumerate(sorted(folder.iterdir(), key=lambda p: -p.stat().st_mtime_ns)):
            os.utime(path, (1000 - age, 1000 - age))
    path_of = lambda count: folder / f"{digest(rows[:count], tokenizer, LIMITS, head, True)}.safetensors"  # noqa: E731
    encode_once(rows[:10], tokenizer, LIMITS, head, labelled=True)  # a read makes the oldest file the most recent
    monkeypatch.setattr(row_cache, "LARGEST", 3 * path_of(12).stat().st_size + 300)
    (folder / ".x.safetensors.1.partial").touch()
    os.utime(folder / ".x.safetensors.1.partial", (1, 1))
    encode_once(rows[:13], tokenizer, LIMITS, head, labelled=True)
    assert set(folder.iterdir()) == {path_of(10), path_of(12), path_of(13)}


def test_second_run_does_not_tokenise(world, folder, tmp_path, monkeypatch, capfd) -> None:
    config = override(FinetuneConfig("classify"), ["train.epochs=1", "train.batch_size=16"])
    runs = [tmp_path / "one", tmp_path / "two"]
    scores = [finetune(config, world / "run", world / "train.csv", runs[0], dev=world / "dev.csv", device="cpu")]
    assert "tokenised before" not in capfd.readouterr().err
    monkeypatch.setattr(Tokenizer, "encode", refuse)
    scores += [finetune(config, world / "run", world / "train.csv", runs[1], dev=world / "dev.csv", device="cpu")]
    assert "the 40 training rows were tokenised before" in " ".join(capfd.readouterr().err.split())
    assert scores[0] == scores[1]
    assert len({(run / "model" / "model.safetensors").read_bytes() for run in runs}) == 1


def equal(one: Batch, other: Batch) -> bool:
    assert one.labels.keys() == other.labels.keys() - {"words", "sentences"}  # training scores all tokens
    pairs = [(one.tokens, other.tokens), (one.segments, other.segments), (one.positions, other.positions)]
    pairs += [(one.layout.starts, other.layout.starts), *((one.labels[k], other.labels[k]) for k in one.labels)]
    assert all(a.dtype == b.dtype for a, b in pairs)
    assert (one.counts, one.num_tokens) == (other.counts, other.num_tokens)
    return one.layout.max_length == other.layout.max_length and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", CASES)
def test_batches_of_flat_arrays_equal_those_of_examples(tokenizer, name: str) -> None:
    rows, head = CASES[name]
    examples = KINDS[head.kind].encode(rows, tokenizer, LIMITS, head, labelled=True).examples
    step = head.num_choices or 1
    chosen = np.array([1, 0, 0])
    parts = [examples[i] for row in chosen for i in range(row * step, (row + 1) * step)]
    assert equal(examples.batch(chosen), collate(parts, packed=True))
    made = micro_batches(examples, 0, TrainConfig(epochs=1, batch_size=6, micro_batch_size=6), 24, endings=step)
    assert len(made[0].indices) == min(len(examples) // step, 6 // step)


def test_order_of_an_epoch_does_not_depend_on_the_batch_size() -> None:
    count = 5000  # more than are drawn at once
    whole = draws.in_epochs(0, 2 * count, count, 3, ORDER)
    assert sorted(whole[:count]) == sorted(whole[count:]) == list(range(count))
    assert not (whole[:count] == whole[count:]).all()
    parts = [draws.in_epochs(begin, min(begin + 37, 2 * count), count, 3, ORDER) for begin in range(0, 2 * count, 37)]
    assert (np.concatenate(parts) == whole).all()


def test_cache_key_depends_on_the_length_of_questions(folder: Path, tokenizer: Tokenizer) -> None:
    """The cache must not return rows that were encoded with another `max_query`, stride or length."""
    rows, head = [Row("what is the name of a list of numbers in the file", CONTEXT, [], "")], HeadConfig("span")
    kept = []
    for limits in (LIMITS, replace(LIMITS, max_query=4), replace(LIMITS, stride=3), replace(LIMITS, max_length=30)):
        found = encode_once(rows, tokenizer, limits, head, labelled=True).examples.tokens.tolist()
        assert found == KINDS["span"].encode(rows, tokenizer, limits, head, labelled=True).examples.tokens.tolist()
        kept.append(found)
    assert all(kept[i] != kept[j] for i in range(4) for j in range(i))


@pytest.mark.parametrize("changed", ["train", "dev"])
def test_resume_with_other_rows_is_refused(world: Path, tmp_path: Path, changed: str) -> None:
    for name in ("train", "dev"):
        (tmp_path / f"{name}.csv").write_text((world / f"{name}.csv").read_text())
    config = override(FinetuneConfig("classify"), ["train.steps=2", "train.batch_size=8", "data.max_length=32"])
    arguments = (config, world / "run", tmp_path / "train.csv", tmp_path / "run")
    scores = finetune(*arguments, dev=tmp_path / "dev.csv", device="cpu")
    assert finetune(*arguments, dev=tmp_path / "dev.csv", device="cpu", resume=True)["rows"] == scores["rows"]
    data = tmp_path / f"{changed}.csv"
    data.write_text(data.read_text().replace("about numbers 3", "about numbers 4"))
    name = "rows_hash" if changed == "train" else "dev_rows_hash"
    with pytest.raises(UserError, match=f"--resume: {name} is '[0-9a-f]+' .* now"):
        finetune(*arguments, dev=tmp_path / "dev.csv", device="cpu", resume=True)

"""Weights in one file or several, in half precision, and in old pickled files, which never execute code."""

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from variants import their_model

from bertsmith.conversion import convert
from bertsmith.errors import UserError
from bertsmith.formats.hf import load_folder, save_folder

pytestmark = pytest.mark.usefixtures("one_thread")
WEIGHTS, INDEX, OLD = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    """A folder as `transformers` saves it."""
    their_model("bert", "mlm+nsp", tiny_tokenizer.vocab_size).save_pretrained(tmp_path / "theirs")
    tiny_tokenizer.save(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture
def expected(folder):
    return load_folder(folder).model.state_dict()


@pytest.fixture
def parts(folder, expected, tiny_tokenizer):
    """The same folder with its weights in several shards."""
    (folder / WEIGHTS).unlink()
    theirs = their_model("bert", "mlm+nsp", tiny_tokenizer.vocab_size)
    theirs.save_pretrained(folder, max_shard_size="100KB")
    assert not (folder / WEIGHTS).exists()
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) > 3
    return files


def rename_old(name: str) -> str:
    return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")


def make_old(folder: Path, **extra) -> None:
    torch.save({**load_file(folder / WEIGHTS), **extra}, folder / OLD)
    (folder / WEIGHTS).unlink()


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        load_folder(folder)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert "weights_only=False" not in str(caught.value)


def test_sharded_weights_are_loaded(folder, parts, expected):
    loaded = load_folder(folder)
    assert loaded.missing == ()
    assert_close(loaded.model.state_dict(), expected, atol=0, rtol=0)


def test_a_missing_shard_is_named(folder, parts):
    parts[1].unlink()
    refused(folder, parts[1].name, INDEX)


def test_a_damaged_shard_is_named(folder, parts):
    parts[1].write_bytes(parts[1].read_bytes()[:-100])
    refused(folder, parts[1].name)


@pytest.mark.parametrize("name", ["../away.safetensors", "/away.safetensors", "weights.bin", 3], ids=str)
def test_an_index_names_only_safetensors_files_beside_it(name, folder, parts):
    save_file({"a": torch.zeros(1)}, folder.parent / "away.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"bert.embeddings.word_embeddings.weight": name}}))
    refused(folder, INDEX, repr(str(name)))


@pytest.mark.parametrize("text", ['{"weight_map": {}}', "{}", "[]", "{"])
def test_an_index_without_names_is_refused(text, folder, parts):
    (folder / INDEX).write_text(text)
    refused(folder, INDEX)


def test_one_file_is_preferred_to_shards_and_both_to_a_pickle(folder, expected):
    (folder / INDEX).write_text("{}")
    (folder / OLD).write_text("nothing")
    assert_close(load_folder(folder).model.state_dict(), expected, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(dtype, folder, expected):
    save_file({name: value.to(dtype) for name, value in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    state = load_folder(folder).model.state_dict()
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert_close(state, {name: value.to(dtype).float() for name, value in expected.items()}, atol=0, rtol=0)


def test_integer_weights_are_refused(folder):
    name = "bert.embeddings.word_embeddings.weight"
    weights = load_file(folder / WEIGHTS)
    save_file({**weights, name: weights[name].to(torch.int8)}, folder / WEIGHTS)
    refused(folder, name, "int8")


def test_old_names_of_layer_norms_are_read(folder, expected):
    save_file({rename_old(name): value for name, value in load_file(folder / WEIGHTS).items()}, folder / WEIGHTS)
    assert any(name.endswith("gamma") for name in load_file(folder / WEIGHTS))
    loaded = load_folder(folder)
    assert loaded.missing == ()
    assert_close(loaded.model.state_dict(), expected, atol=0, rtol=0)


def test_a_loaded_model_does_not_depend_on_its_file(folder, expected):
    model = load_folder(folder).model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    size = (folder / WEIGHTS).stat().st_size
    with (folder / WEIGHTS).open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\x00" * (size - size // 2))
    assert_close(model.state_dict(), before, atol=0, rtol=0)


def test_pickled_weights_are_loaded(folder, expected):
    make_old(folder, version=3)
    loaded = load_folder(folder)
    assert loaded.missing == ()
    assert_close(loaded.model.state_dict(), expected, atol=0, rtol=0)


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("name", [OLD, WEIGHTS])
@pytest.mark.parametrize("hidden", [False, True], ids=["alone", "among weights"])
def test_nothing_in_a_folder_is_executed(hidden, name, folder, tmp_path):
    harm = Malicious(tmp_path / "owned")
    torch.save({**load_file(folder / WEIGHTS), "z": harm} if hidden else harm, folder / "harm")
    (folder / WEIGHTS).unlink()
    (folder / "harm").rename(folder / name)
    refused(folder, name)
    assert not (tmp_path / "owned").exists()
    with (folder / name).open("rb") as file:
        torch.load(file, weights_only=False)
    assert (tmp_path / "owned").exists()  # the pickle is effective when it is loaded unsafely


def test_pickles_beside_safe_weights_are_not_opened(folder, expected, tmp_path):
    for name in (OLD, "training_args.bin", "optimizer.pt", "tf_model.h5"):
        torch.save(Malicious(tmp_path / "owned"), folder / name)
    assert_close(load_folder(folder).model.state_dict(), expected, atol=0, rtol=0)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("content", [b"", b"not weights", b"PK\x03\x04"], ids=["empty", "text", "broken archive"])
def test_damaged_pickles_are_refused(content, folder):
    (folder / WEIGHTS).unlink()
    (folder / OLD).write_bytes(content)
    refused(folder, OLD, WEIGHTS)


def test_pickles_without_names_are_refused(folder):
    (folder / WEIGHTS).unlink()
    torch.save([torch.zeros(3)], folder / OLD)
    refused(folder, OLD, "list")


@pytest.fixture
def old_parts(folder, expected):
    """The same folder with its weights in several pickles."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    files = {f"pytorch_model-0000{i + 1}-of-00003.bin": names[i::3] for i in range(3)}
    for file, part in files.items():
        torch.save({name: tensors[name] for name in part}, folder / file)
    places = {name: file for file, part in files.items() for name in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / WEIGHTS).unlink()
    return sorted(files)


def test_sharded_pickles_are_loaded(folder, old_parts, expected):
    loaded = load_folder(folder)
    assert loaded.missing == ()
    assert_close(loaded.model.state_dict(), expected, atol=0, rtol=0)


def test_nothing_in_a_sharded_pickle_is_executed(folder, old_parts, tmp_path):
    torch.save(Malicious(tmp_path / "owned"), folder / old_parts[1])
    refused(folder, old_parts[1])
    assert not (tmp_path / "owned").exists()
    (folder / old_parts[1]).unlink()
    refused(folder, old_parts[1], "pytorch_model.bin.index.json")


@pytest.fixture
def ours(folder, tmp_path):
    """The folder saved by bertsmith."""
    loaded = load_folder(folder)
    save_folder(tmp_path / "ours", loaded.model, loaded.tokenizer, loaded.notes)
    return tmp_path / "ours"


def test_a_flipped_byte_in_our_weights_is_detected(ours):
    load_folder(ours)
    whole = (ours / WEIGHTS).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    name = whole.index(b"cls.predictions.bias")
    for place in (header, (header + len(whole)) // 2, len(whole) - 1, name):
        changed = bytearray(whole)
        changed[place] ^= 1
        (ours / WEIGHTS).write_bytes(changed)
        refused(ours, WEIGHTS, "damaged")
    (ours / WEIGHTS).write_bytes(whole)
    load_folder(ours)


def test_weights_rewritten_by_another_library_are_loaded(ours):
    model = transformers.BertForPreTraining.from_pretrained(ours)
    with torch.no_grad():
        model.cls.predictions.bias += 1
    before = load_folder(ours).model.masked_lm.decoder.bias
    model.save_pretrained(ours)
    assert_close(load_folder(ours).model.masked_lm.decoder.bias, before + 1)


def test_all_files_of_a_folder_have_the_permissions_that_new_files_get(ours, folder, tmp_path):
    convert(folder, tmp_path / "converted", "hf")
    before = os.umask(0o027)
    try:
        convert(folder, tmp_path / "umask", "hf")
    finally:
        os.umask(before)
    usual = 0o666 & ~before
    for place, mode in ((ours, usual), (tmp_path / "converted", usual), (tmp_path / "umask", 0o640)):
        assert {file.stat().st_mode & 0o777 for file in place.iterdir()} == {mode}


def test_a_full_disk_is_a_one_line_error_that_names_the_file(folder, tmp_path, run_command):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        code, _, message = run_command("convert", folder, tmp_path / "out", "--to", "hf")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert code == 2
    assert len(message.splitlines()) == 1
    assert message.startswith("error: ")
    assert str(tmp_path) in message
    assert not (tmp_path / "out").exists()

"""Folders and options that do not fit a family are refused in one line that names the fix."""

import json
from pathlib import Path

import pytest
from variants import VARIANTS, make

import bertsmith
from bertsmith.formats.families.table import FAMILIES
from bertsmith.formats.hf import Notes, save_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.causal_lm import CausalLM
from bertsmith.objectives.discriminator import Discriminator
from bertsmith.text.tokenizer import Tokenizer, train_byte_bpe, train_word_bpe, train_wordpiece

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["the quick brown fox jumps over the lazy dog, and the dogs bark at foxes 0123456789."] * 4


@pytest.fixture
def refused(run_command):
    """Runs a command that must fail with one line; returns that line."""

    def run(*arguments: object) -> str:
        code, _, err = run_command(*arguments)
        lines = [line for line in err.strip().splitlines() if not line.startswith(("note:", " "))]
        assert code == 2, err
        assert "Traceback" not in err
        return " ".join(lines)

    return run


def saved(folder: Path, tokenizer, variant: str = "bert") -> Path:
    model = make("mlm", tokenizer, **VARIANTS[variant].ours).model
    save_folder(folder, model, tokenizer, Notes())
    return folder


def test_a_tokenizer_of_another_kind(refused, tmp_path: Path) -> None:
    words, pieces = train_wordpiece(TEXTS, 99), train_byte_bpe(TEXTS, 300)
    folder = saved(tmp_path / "roberta", words, "roberta")
    for path in folder.glob("*tok*"):
        path.unlink()
    pieces.save(folder)
    message = refused("fill", folder, "the <mask> fox", "--device", "cpu")
    assert f"ids up to {pieces.vocab_size - 1}, and config.json has vocab_size = {words.vocab_size}" in message
    assert "tokenizer of another model; put the model's own tokenizer files into the folder" in message


def test_openai_gpt_without_its_merges_and_with_a_mask(refused, tmp_path: Path) -> None:
    pieces = train_word_bpe(TEXTS, 99)
    config = {**FAMILIES["openai-gpt"].defaults, "family": "openai-gpt", "intermediate_size": 128}
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "max_positions": 48, "vocab_size": pieces.vocab_size}
    save_folder(tmp_path / "gpt", CausalLM(Encoder(EncoderConfig(**{**config, **sizes}))), pieces, Notes())
    message = refused("fill", tmp_path / "gpt", "the [MASK] fox", "--device", "cpu")
    assert "has no masked-word head (it reads in one direction), so it cannot fill masks" in message
    message = refused("convert", tmp_path / "gpt", tmp_path / "tf1", "--to", "tf1")
    assert "reads in one direction, left-to-right, which tf1 has no model for" in message
    for name in ("tokenizer.json", "merges.txt"):
        (tmp_path / "gpt" / name).unlink()
    message = refused("embed", tmp_path / "gpt", tmp_path / "gpt" / "config.json", "--out", tmp_path / "v.npy")
    assert "vocab.json needs merges.txt beside it: a BPE vocabulary is used through its merges" in message


def test_a_masked_language_model_needs_a_mask(refused, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"{TEXTS[0]}\n{TEXTS[0]} {number}" for number in range(9)))
    bertsmith.train_tokenizer([tmp_path / "text.txt"], tmp_path / "tok", vocab_size=99, kind="bpe")
    bertsmith.build_corpus([tmp_path / "text.txt"], tmp_path / "tok", tmp_path / "shards", workers=1)
    command = ["pretrain", "bert-tiny", "--data", tmp_path / "shards", "--out", tmp_path / "run", "--device", "cpu"]
    message = refused(
        *command, "--set", "data.max_length=32", "--set", "train.steps=1", "--set", "data.long_length=null"
    )
    assert "the tokenizer has no mask token, so no word can be masked" in message


def test_a_family_that_we_lack(refused, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", train_wordpiece(TEXTS, 99))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "model_type": "bart"}))
    message = refused("fill", folder, "the [MASK] fox", "--device", "cpu")
    assert "model_type 'bart' is not supported yet" in message
    assert "'bert', 'roberta'" in message


def test_a_generator_without_its_discriminator_and_the_reverse(refused, world: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(world / "tok")
    generator = saved(tmp_path / "generator", tokenizer, "electra")
    command = ["pretrain", "electra-tiny", "--data", world / "shards", "--out", tmp_path / "run", "--device", "cpu"]
    command += ["--set", "train.steps=2", "--set", "data.max_length=32"]
    message = refused(*command, "--model", generator)
    assert f"{generator} holds ElectraForMaskedLM" in message
    assert "give a folder of ElectraForPreTraining, with the generator inside it" in message
    encoder = make("mlm", tokenizer, **VARIANTS["electra"].ours).model.encoder
    save_folder(tmp_path / "detector", Discriminator(encoder), tokenizer, Notes())
    message = refused(*command, "--model", tmp_path / "detector")
    assert "has no folder 'generator'" in message
    assert "put the folder of its ElectraForMaskedLM there" in message
    assert not (tmp_path / "run").exists()


def test_a_teacher_with_another_vocabulary(refused, world: Path, tmp_path: Path) -> None:
    teacher = saved(tmp_path / "teacher", train_wordpiece(TEXTS, 99))
    command = ["pretrain", "distilbert-tiny", "--data", world / "shards", "--out", tmp_path / "run", "--device", "cpu"]
    message = refused(*command, "--teacher", teacher, "--set", "data.max_length=32")
    assert "tokenizer" in message
    assert str(teacher) in message
    message = refused(*command)
    assert "--teacher" in message
    assert not (tmp_path / "run").exists()

"""Fine-tuning as in OpenAI GPT's paper: its input forms, both orders of pairs, and the language model's loss."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from labels import of_task
from runs import cut, on_ranks
from safetensors.torch import load_file
from torch.testing import assert_close
from variants import randomise

import bertsmith
from bertsmith.batch import Example, collate
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.model import start_model
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.families.table import FAMILIES
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.causal_lm import CausalLM, next_tokens
from bertsmith.rows.columns import Row
from bertsmith.tasks.description import Limits
from bertsmith.tasks.kinds import KINDS
from bertsmith.text.tokenizer import Tokenizer, train_word_bpe
from bertsmith.training import runlog

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = ["the quick brown fox jumps over the lazy dogs, and barks at foxes 0123456789"] * 4
SIZES = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 128, "max_positions": 48}
PAIRS = [
    {"sentence1": f"the fox {i}", "sentence2": "the dogs bark" if i % 2 else f"the fox {i}", "label": i % 2}
    for i in range(16)
]
RUN = ["train.steps=4", "train.batch_size=4", "train.learning_rate=1e-3", "data.max_length=32", "restarts=0"]
RUN += ["train.evaluate_every=0", "train.save_every=2", "train.keep=9"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_word_bpe(TEXTS, 90)


@pytest.fixture(scope="module")
def gpt(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a language model, as pre-training writes it."""
    config = EncoderConfig(**{**FAMILIES["openai-gpt"].defaults, **SIZES, "vocab_size": tokenizer.vocab_size})
    folder = tmp_path_factory.mktemp("gpt")
    model = randomise(CausalLM(Encoder(replace(config, family="openai-gpt"))))
    save_folder(folder, model, tokenizer, Notes())
    return folder


@pytest.fixture(scope="module")
def left_to_right(tiny_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A left-to-right BERT, whose language model has a transform and biases."""
    config = EncoderConfig(vocab_size=tiny_tokenizer.vocab_size, direction="left-to-right", **SIZES)
    folder = tmp_path_factory.mktemp("bert")
    save_folder(folder, randomise(CausalLM(Encoder(config))), tiny_tokenizer, Notes())
    return folder


def tuned(task: str, model: Path, rows: list, out: Path, *changes: str, **options: object) -> dict:
    config = override(FinetuneConfig(task), [*RUN, *changes])
    return bertsmith.finetune(config, model, rows, out, dev=rows, device="cpu", **options)


def names(tokenizer: Tokenizer, tokens: np.ndarray) -> str:
    return " ".join(tokenizer.token(number).replace("</w>", "") for number in tokens.tolist())


def test_the_input_forms_of_the_paper(tokenizer: Tokenizer) -> None:
    """Figure 1: a text, a pair, a pair in both orders, and each ending apart."""
    framed, limits = train_word_bpe([*TEXTS, "fox dogs"] * 9, 120).for_tasks(), Limits(max_length=32)
    single, choice = HeadConfig("single", ("0", "1")), HeadConfig("choice", num_choices=2)

    def forms(head: HeadConfig, row: Row) -> list[str]:
        encoded = KINDS[head.kind].encode([row], framed, limits, head, labelled=False)
        return [names(framed, example.tokens) for example in encoded.examples]

    assert forms(single, Row("fox", None, None, "")) == ["_start_ fox _classify_"]
    assert forms(single, Row("fox", "dogs", None, "")) == ["_start_ fox _delimiter_ dogs _classify_"]
    both = forms(replace(single, both_orders=True), Row("fox", "dogs", None, ""))
    assert both == ["_start_ fox _delimiter_ dogs _classify_", "_start_ dogs _delimiter_ fox _classify_"]
    endings = forms(choice, Row("the", None, None, "", parts=("fox", "dogs")))
    assert endings == ["_start_ the _delimiter_ fox _classify_", "_start_ the _delimiter_ dogs _classify_"]
    with pytest.raises(UserError, match="both_orders is for pairs of texts"):
        forms(replace(single, both_orders=True), Row("fox", None, None, ""))


def test_special_tokens_are_added_with_new_embeddings(gpt: Path, tokenizer: Tokenizer) -> None:
    head = HeadConfig("single", ("0", "1"), language_model=0.5)
    started = start_model(gpt, head, FinetuneConfig("pair"))
    before, after = (m.model.encoder.embeddings.tokens.weight for m in (load_folder(gpt), started))
    assert started.tokenizer.vocab_size == len(after) == len(before) + 3
    assert_close(after[:-3], before, atol=0, rtol=0)
    assert 0 < after[-3:].abs().max() <= 2 * 0.02
    model = started.model
    assert isinstance(model, TaskModel)
    assert model.causal_lm is not None
    assert model.causal_lm.decoder.weight is after
    again = start_model(gpt, head, FinetuneConfig("pair")).model.encoder.embeddings.tokens.weight
    assert_close(again, after, atol=0, rtol=0)


def test_the_losses_are_logged_and_add_up(gpt: Path, tmp_path: Path) -> None:
    tuned("mrpc", gpt, PAIRS, tmp_path / "run")
    records = [record for record in runlog.read(tmp_path / "run") if "loss" in record]
    assert len(records) == 4
    for record in records:
        assert record["loss"] == pytest.approx(record["task_loss"] + 0.5 * record["lm_loss"], abs=1e-5)
    saved = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert (saved["language_model"], saved["both_orders"]) == (0.5, True)
    tuned("mrpc", gpt, PAIRS, tmp_path / "alone", "language_model=0", "both_orders=false")
    assert all("lm_loss" not in record for record in runlog.read(tmp_path / "alone"))
    saved = json.loads((tmp_path / "alone" / "model" / "config.json").read_text())
    assert not saved.keys() & {"language_model", "both_orders"}


def test_a_pair_has_one_prediction_in_either_order(gpt: Path, tmp_path: Path) -> None:
    tuned("mrpc", gpt, PAIRS, tmp_path / "run")
    predictor = bertsmith.Predictor.load(tmp_path / "run", device="cpu")
    first, second = predictor([("the fox 1", "dogs bark"), ("dogs bark", "the fox 1")])
    assert "add the logits of (a, b) and of (b, a)" in (tmp_path / "run" / "model" / "README.md").read_text()
    assert first["scores"] == pytest.approx(second["scores"], abs=1e-6)
    tuned(
        "rte",
        gpt,
        [{**row, "label": "entailment not_entailment".split()[row["label"]]} for row in PAIRS],
        tmp_path / "one",
    )
    assert json.loads((tmp_path / "one" / "model" / "bertsmith.json").read_text())["remark"] == ""
    first, second = bertsmith.Predictor.load(tmp_path / "one", device="cpu")([("a fox", "dogs"), ("dogs", "a fox")])
    assert first["scores"] != pytest.approx(second["scores"], abs=1e-6)


def test_adding_logits_is_adding_states_before_the_output_layer(gpt: Path) -> None:
    head = HeadConfig("single", ("0", "1"), both_orders=True)
    model = start_model(gpt, head, FinetuneConfig("mrpc")).model.eval()
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(1, 90, size), np.zeros(size, np.int64)) for size in (5, 7, 4, 9)]
    batch = collate(examples, packed=True).with_labels(of_task(np.array([0, 1])))
    states = model.encoder(batch)[batch.layout.lasts]
    logits = model.head.output(states.view(2, 2, -1).sum(1))
    assert_close(model(batch)["task"], torch.nn.functional.cross_entropy(logits, torch.tensor([0, 1]), reduction="sum"))


@pytest.mark.parametrize("kind", ["single", "tags", "span"])
@pytest.mark.parametrize("source", ["gpt", "left_to_right"])
def test_packed_equals_padded_and_the_loss_is_that_of_the_language_model(kind, source, request) -> None:
    folder = request.getfixturevalue(source)
    labels = ("a", "b") if kind != "span" else ()
    head = HeadConfig(kind, labels, language_model=0.3)
    model = start_model(folder, head, FinetuneConfig("classify")).model.eval()
    rng, sizes, losses = np.random.default_rng(0), (5, 7, 4, 9), []
    tokens = [rng.integers(1, 60, size) for size in sizes]
    target = {"single": {"label": 1}, "span": {"label": np.array([1, 2])}, "tags": {}}[kind]
    examples = [
        Example(t, np.zeros(len(t), np.int64), of_task(**target, tags=t % 2 if kind == "tags" else None))
        for t in tokens
    ]
    words = next_tokens(np.concatenate(tokens), np.array(sizes), "left-to-right")
    for packed in (False, True):
        batch = collate(examples, packed=packed)
        real = np.arange(sum(sizes)) if packed else np.flatnonzero(batch.layout.mask.numpy())
        batch.labels["masked"] = torch.from_numpy(real[words.positions])
        batch.labels["targets"] = torch.from_numpy(words.targets)
        model.zero_grad()
        found = model(batch)
        (found["task"] + found["lm"]).backward()
        losses.append([*found.values(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert_close(*losses, atol=1e-4, rtol=1e-4)
    pretrained = load_folder(folder).model.eval()
    assert isinstance(pretrained, CausalLM)
    expected = pretrained.causal_lm(model.encoder(batch).index_select(0, batch.labels["masked"]))
    logits = model.causal_lm(model.encoder(batch).index_select(0, batch.labels["masked"]))
    assert_close(logits[:, : expected.shape[1]], expected)  # the head of pre-training, with rows for new tokens
    expected = torch.nn.functional.cross_entropy(logits, batch.labels["targets"], reduction="sum")
    assert_close(found["lm"], expected)


@pytest.mark.parametrize(("source", "task"), [("gpt", "mrpc"), ("left_to_right", "classify")])
def test_a_resumed_run_gives_identical_bytes(source, task, request, tmp_path: Path) -> None:
    rows = PAIRS if task == "mrpc" else [{"text": row["sentence1"], "label": str(row["label"])} for row in PAIRS]
    more = [] if source == "gpt" else ["language_model=0.5"]
    model = request.getfixturevalue(source)
    tuned(task, model, rows, tmp_path / "run", *more)
    copy = cut(tmp_path / "run", tmp_path / "cut", 2)
    tuned(task, model, rows, copy, *more, resume=True)
    files = [run / "model" / "model.safetensors" for run in (tmp_path / "run", copy)]
    assert files[0].read_bytes() == files[1].read_bytes()
    if source == "left_to_right":  # its head is saved as well, and `transformers` ignores it
        assert "cls.predictions.transform.dense.weight" in load_file(files[0])
        before, after = (
            load_folder(f).model.state_dict()["causal_lm.transform.weight"] for f in (model, copy / "model")
        )
        assert (before - after).abs().max() > 0


def two_ranks(model: Path, folder: Path) -> None:
    for parallel in ("ddp", "fsdp"):
        tuned("mrpc", model, PAIRS, folder / parallel, "train.micro_batch_size=2", f"train.parallel={parallel}")


@pytest.mark.slow
def test_two_ranks_equal_one(gpt: Path, tmp_path: Path) -> None:
    on_ranks(two_ranks, gpt, tmp_path)
    tuned("mrpc", gpt, PAIRS, tmp_path / "one", "train.micro_batch_size=2")
    one, *others = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "ddp", "fsdp"))
    for two in others:
        assert_close(one, two, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("model", "change", "why"),
    [
        ("bert", "language_model=0.5", "language_model 0.5 needs an encoder that reads in one direction"),
        ("bert", "both_orders=true", "both_orders .* needs .* an output layer without a bias"),
        ("left_to_right", "both_orders=true", "both_orders .* needs .* an output layer without a bias"),
    ],
)
def test_what_does_not_fit_is_refused(model, change, why, world: Path, left_to_right: Path, tmp_path: Path) -> None:
    source = world / "run" if model == "bert" else left_to_right
    with pytest.raises(UserError, match=why):
        tuned("mrpc", source, PAIRS, tmp_path / "run", change)
    assert not (tmp_path / "run").exists()


def test_frozen_encoders_have_no_language_model(gpt: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"language_model 0\.5 trains the encoder alone; leave out bilstm_layers"):
        override(FinetuneConfig("tag"), ["language_model=0.5", "bilstm_layers=1"])
    rows = [{"tokens": ["the", "fox", str(i)], "tags": ["O", "B-X", "O"]} for i in range(8)]
    tuned("tag", gpt, rows, tmp_path / "run", "features.variant=last", "features.hidden_size=8")
    assert all("lm_loss" not in record for record in runlog.read(tmp_path / "run"))

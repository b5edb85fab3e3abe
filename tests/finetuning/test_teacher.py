"""A fine-tuned teacher: its predictions for the training rows are learnt beside the labels, for every kind of task."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import randomise
from kind_rows import ROWS
from runs import cut, on_ranks, weights
from safetensors.torch import load_file
from torch.testing import assert_close

from bertsmith.batch import IGNORE, Example, Label, collate
from bertsmith.config import override, read_json
from bertsmith.errors import UserError
from bertsmith.finetuning.protocols import finetune_many
from bertsmith.finetuning.run import finetune
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.hf import Notes, save_folder
from bertsmith.inference.predictor import Predictor
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.soft_targets import SoftTargets
from bertsmith.tasks.examples import SOFT, SOFT_TOKEN, TAG, TARGET
from bertsmith.tasks.inputs import rows_of_inputs
from bertsmith.tasks.kinds import KINDS
from bertsmith.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
QUICK = ["train.steps=30", "train.batch_size=14", "train.learning_rate=3e-3", "data.max_length=32", "dropout=0"]
QUICK += ["data.dev_share=0", "data.stride=16"]
MULTI = [{"text": f"it is {i}", "label": ["a"] if i % 2 else ["a", "b"]} for i in range(14)]
TASKS = {  # the kind of each task's head, with its rows and what its model is asked
    "classify": ("single", ROWS["classify"], [f"it is {i}" for i in range(14)]),
    "multi": ("multi", MULTI, [f"it is {i}" for i in range(14)]),
    "regress": ("regression", ROWS["regress"], [f"it is {i}" for i in range(14)]),
    "choose": ("choice", ROWS["choose"], [(f"we {i}", ["ran", "a list", f"{i}"]) for i in range(14)]),
    "tag": ("tags", ROWS["tag"], [["the", "list", str(i)] for i in range(14)]),
    "answer": ("span", ROWS["answer"], [(row["question"], row["context"]) for row in ROWS["answer"]]),
}
LABELS = {"single": ("b", "a"), "multi": ("b", "a"), "tags": ("B-X", "O")}  # in another order than the run's


def make_teacher(
    folder: Path, kind: str, tokenizer: Tokenizer, labels: tuple[str, ...] | None = None, seed: int = 5
) -> Path:
    """A model with large random weights, whose predictions nobody could guess from the labels."""
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": 64}
    labels = LABELS.get(kind, ()) if labels is None else labels
    head = HeadConfig(kind, labels, num_choices=3 if kind == "choice" else 0)
    model = randomise(TaskModel(Encoder(EncoderConfig(tokenizer.vocab_size, **sizes)), head), seed)
    with torch.no_grad():
        model.head.output.weight.mul_(4.0)
        if kind == "regression":
            model.head.output.bias.fill_(2.2)  # the mean of the rows, as a teacher that has learnt them has
    save_folder(folder, model, tokenizer, Notes(max_length=32, limits={"stride": 16}))
    return folder


def tuned(task: str, world: Path, out: Path, *changes: str) -> Path:
    config = override(FinetuneConfig("classify" if task == "multi" else task), [*QUICK, *changes])
    finetune(config, world / "run", TASKS[task][1], out, device="cpu")
    return out


def probabilities(folder: Path, task: str) -> dict[str, np.ndarray]:
    """A model's probabilities for the rows of a task (the numbers of a regression), by label where there are labels."""
    kind, _, inputs = TASKS[task]
    predictor = Predictor.load(folder, "cpu")
    rows, head = list(rows_of_inputs(inputs, kind)), predictor.head
    encoded = KINDS[kind].encode(rows, predictor.tokenizer, predictor.limits, head, labelled=False)
    logits = predictor.logits(encoded.examples)
    if kind == "span":
        return {name: np.concatenate([_softmax(each[:, i]) for each in logits]) for i, name in enumerate("se")}
    found = np.concatenate(logits) if kind == "tags" else np.stack(logits)
    if kind == "choice":
        found = found.reshape(-1, 3)
    found = {"regression": lambda x: x, "multi": lambda x: 1 / (1 + np.exp(-x))}.get(kind, _softmax)(found)
    if kind == "tags":  # the words: special tokens are not learnt
        found = np.concatenate([found[start + 1 : end - 1] for start, end in _places(encoded.examples)])
    return dict(zip(head.labels or range(found.shape[1]), found.T, strict=True))


def _places(examples: Any) -> list[tuple[int, int]]:
    return list(zip(examples.starts[:-1].tolist(), examples.starts[1:].tolist(), strict=True))


def _softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return exponents / exponents.sum(-1, keepdims=True)


def distance(one: Path, other: Path, task: str) -> float:
    """The mean difference of two models' predictions."""
    first, second = probabilities(one, task), probabilities(other, task)
    assert first.keys() == second.keys()
    return float(np.mean([np.abs(first[name] - second[name]).mean() for name in first]))


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=() if t in ("classify", "tag", "answer") else pytest.mark.slow) for t in TASKS]
)
def test_student_agrees_with_its_teacher(task: str, world: Path, tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher", TASKS[task][0], Tokenizer.load(world / "tok"))
    alone = tuned(task, world, tmp_path / "alone")
    taught = tuned(
        task, world, tmp_path / "taught", f"distillation.teacher={teacher}", "distillation.label_weight=0",
        "distillation.temperature=1",
    )  # fmt: skip
    assert distance(taught, teacher, task) < 0.5 * distance(alone, teacher, task)


@pytest.mark.parametrize("kind", ["single", "multi", "regression", "choice", "tags", "span"])
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_loss_equals_a_plain_computation(kind: str, packed: bool) -> None:
    draw = torch.Generator().manual_seed(2)
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32, "max_positions": 64}
    head = HeadConfig(kind, ("a", "b", "c") if kind in ("single", "multi", "tags") else (), 2 * (kind == "choice"))
    model = randomise(TaskModel(Encoder(EncoderConfig(50, **sizes)), head)).eval()
    temperature, lengths = 3.0, [5, 8, 3, 6]
    outputs = {"regression": 1, "choice": 2, "span": 2}.get(kind, 3)
    examples, soft = [], []
    for number, length in enumerate(lengths):
        tokens = torch.randint(5, 50, (length,), generator=draw).numpy()
        labels = {}
        if kind in ("tags", "span"):
            soft.append(torch.randn(length, outputs, generator=draw))
            labels["soft"] = Label(soft[-1].numpy(), SOFT_TOKEN)
        elif kind != "choice" or number % 2 == 0:
            soft.append(torch.randn(outputs, generator=draw))
            labels["soft"] = Label(soft[-1].numpy(), SOFT)
        if kind == "tags":
            labels["tags"] = Label(np.array([IGNORE, *(i % 3 for i in range(length - 2)), IGNORE]), TAG)
        elif "soft" in labels:
            target = {"multi": np.array([1, 0, 1]), "span": np.array([1, 2]), "regression": 0.5}.get(kind, 1)
            labels["label"] = Label(target, TARGET)
        examples.append(Example(tokens, np.zeros(length, np.int64), labels))
    batch = collate(examples, packed=packed)
    hard, logits = model(batch)["task"], model.logits(batch)
    model.soft_targets = SoftTargets(temperature, soft_weight=0.7, label_weight=0.2)
    kl = lambda s, t: F.kl_div(F.log_softmax(s / temperature, 0), F.softmax(t / temperature, 0), reduction="sum")  # noqa: E731
    if kind == "regression":
        expected = sum((s - t).square().sum() for s, t in zip(logits, soft, strict=True))
    elif kind == "multi":
        both = [torch.stack([x, -x]) for x in (logits.T, torch.stack(soft).T)]  # a class against none: two logits
        expected = (
            temperature**2 / 3 * sum(kl(both[0][:, k, b] / 2, both[1][:, k, b] / 2) for k in range(3) for b in range(4))
        )
    elif kind == "tags":
        flat = logits[batch.layout.mask] if not packed else logits
        wanted = batch.labels["tags"][batch.layout.mask] if not packed else batch.labels["tags"]
        triples = zip(flat, torch.cat(soft), wanted.tolist(), strict=True)
        expected = temperature**2 * sum(kl(s, t) for s, t, tag in triples if tag != IGNORE)
    elif kind == "span":
        pairs = [(logits[b, :n, i], soft[b][:, i]) for b, n in enumerate(lengths) for i in range(2)]
        expected = temperature**2 / 2 * sum(kl(s, t) for s, t in pairs)
    else:
        expected = temperature**2 * sum(kl(s, t) for s, t in zip(logits, soft, strict=True))
    assert_close(model(batch)["task"], 0.2 * hard + 0.7 * expected, atol=1e-4, rtol=1e-5)
    model(batch)["task"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_teacher_reads_with_its_own_vocabulary(world: Path, tmp_path: Path, tiny_tokenizer) -> None:
    teacher = make_teacher(tmp_path / "teacher", "single", tiny_tokenizer)
    taught = tuned(
        "classify", world, tmp_path / "taught", f"distillation.teacher={teacher}", "distillation.label_weight=0"
    )
    assert distance(taught, teacher, "classify") < 0.1
    tagger = make_teacher(tmp_path / "tagger", "tags", tiny_tokenizer)
    with pytest.raises(UserError, match=r"tagger has another vocabulary than the model: .* take a model with the"):
        tuned("tag", world, tmp_path / "refused", f"distillation.teacher={tagger}")


def test_resumed_run_and_seeds(world: Path, tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher", "single", Tokenizer.load(world / "tok"))
    changes = [*QUICK, f"distillation.teacher={teacher}", "train.save_every=10", "train.keep=9"]
    config = override(FinetuneConfig("classify"), changes)
    whole = tmp_path / "whole"
    finetune(config, world / "run", ROWS["classify"], whole, device="cpu")
    assert read_json(whole / "run.json")["teacher"]["folder"] == str(teacher)
    run = cut(whole, tmp_path / "cut", 20)
    finetune(config, world / "run", ROWS["classify"], run, device="cpu", resume=True)
    assert weights(run) == weights(whole)
    shutil.rmtree(run / "model")
    make_teacher(teacher, "single", Tokenizer.load(world / "tok"), seed=6)
    with pytest.raises(UserError, match=r"--resume: teacher\.sha256"):
        finetune(config, world / "run", ROWS["classify"], run, device="cpu", resume=True)
    dev = [*ROWS["classify"][:6]]
    summary = finetune_many(
        override(config, ["train.steps=3"]), world / "run", ROWS["classify"], tmp_path / "seeds", seeds=2, dev=dev,
        device="cpu",
    )  # fmt: skip
    assert len(summary["settings"][0]["runs"]) == 2


def tune_on_ranks(world: Path, folder: Path, changes: list[str]) -> None:
    tuned("tag", world, folder / "two", *changes)


@pytest.mark.slow
def test_two_ranks_train_the_weights_of_one(world: Path, tmp_path: Path) -> None:
    teacher = make_teacher(tmp_path / "teacher", "tags", Tokenizer.load(world / "tok"))
    changes = [f"distillation.teacher={teacher}", "train.steps=4", "train.micro_batch_size=3"]
    on_ranks(tune_on_ranks, world, tmp_path, changes)
    one, two = (tuned("tag", world, tmp_path / "one", *changes), tmp_path / "two")
    ends = [load_file(run / "model" / "model.safetensors") for run in (one, two)]
    for name in (name for name in ends[0] if not name.endswith("key.bias")):  # its gradient is 0 apart from rounding
        assert torch.allclose(ends[0][name], ends[1][name], atol=1e-5), name


@pytest.mark.parametrize(
    ("kind", "labels", "words"),
    [
        ("single", ("a", "b", "c"), "the teacher has the label 'c', and the training rows lack it"),
        ("single", ("a", "d"), "the training rows have the label 'b', and the teacher lacks it"),
        ("regression", None, "was fine-tuned for another kind of task: regression, not single"),
        ("", None, "has no output layer for a task; `bertsmith finetune` adds one"),
    ],
)
def test_teacher_that_does_not_fit_is_refused(
    kind: str, labels: tuple[str, ...] | None, words: str, world: Path, tmp_path: Path
) -> None:
    teacher = world / "run"
    if kind:
        teacher = make_teacher(tmp_path / "teacher", kind, Tokenizer.load(world / "tok"), labels)
    with pytest.raises(UserError) as error:
        tuned("classify", world, tmp_path / "run", f"distillation.teacher={teacher}")
    assert words in str(error.value)
    assert not (tmp_path / "run").exists()


def test_teacher_and_features_are_refused() -> None:
    with pytest.raises(UserError, match="--features freezes it; leave one out"):
        override(FinetuneConfig("tag"), ["features.variant=last", "distillation.teacher=x"])


def test_command_line(world: Path, tmp_path: Path, run_command) -> None:
    teacher = make_teacher(tmp_path / "teacher", "single", Tokenizer.load(world / "tok"), ("numbers", "files"))
    code, _, errors = run_command(
        "finetune", "classify", "--model", world / "run", "--teacher", teacher, "--data", world / "train.csv",
        "--dev", world / "dev.csv", "--out", tmp_path / "run", "--steps", 2, "--max-length", 16, "--device", "cpu",
    )  # fmt: skip
    assert code == 0, errors
    assert read_json(tmp_path / "run" / "config.json")["distillation"]["teacher"] == str(teacher)

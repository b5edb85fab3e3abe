"""A model names its layers and its frozen parts: a made-up student with a frozen teacher."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bertsmith.batch import Batch, Label, LabelKind, lay_out
from bertsmith.training import distributed
from bertsmith.training.checkpoint import TrainerState, checkpoints, latest_checkpoint
from bertsmith.training.distributed import process_group
from bertsmith.training.fit import fit
from bertsmith.training.optim import learning_rate_factors, make_optimizers
from bertsmith.training.settings import TrainConfig

STEPS = 6
WEIGHT = LabelKind("token", fill=0.0, loss="distance")


class Network(nn.Module):
    """Embeddings and layers that are not in an `nn.ModuleList`."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(20, size)
        self.lower, self.upper = nn.Linear(size, size), nn.Linear(size, size)
        self.norm = nn.LayerNorm(size)
        self.dropout = nn.Dropout(0.5)

    @property
    def layers(self) -> list[nn.Module]:
        return [self.lower, self.upper]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.dropout(self.norm(x))


class Distilled(nn.Module):
    """A student that learns the hidden states of a teacher."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = Network(8), Network(8)
        self.modes: set[tuple[bool, bool]] = set()

    @property
    def encoders(self) -> list[Network]:
        return [self.student, self.teacher]

    @property
    def untrained(self) -> list[Network]:
        return [self.teacher]

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        self.modes.add((self.student.training, self.teacher.training))
        difference = self.student(batch.tokens) - self.teacher(batch.tokens)
        return {"distance": (difference.square().mean(-1) * batch.labels["weight"]).sum()}


def batches(step: int, share: float) -> list[Batch]:
    """Four micro-batches per step, divided among the ranks."""
    made = []
    for number in range(4):
        draw = np.random.default_rng([step, number])
        lengths = draw.integers(2, 7, 3)
        tokens = draw.integers(0, 20, lengths.sum())
        batch = lay_out(tokens, np.zeros(len(tokens)), lengths, packed=True)
        made.append(batch.with_labels({"weight": Label(np.ones(len(tokens), np.float32), WEIGHT)}))
    return made[distributed.rank() :: distributed.world_size()]


def save(folder: Path, tensors: Any) -> None:
    """Save the student alone, since the teacher does not change."""
    save_file({n: t for n, t in tensors.items() if n.startswith("student.")}, folder / "model.safetensors")


def load(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def train(
    run: Path, resume: tuple[Path, TrainerState] | None = None, model: Distilled | None = None, **settings: Any
) -> Distilled:
    model = model or Distilled()
    if resume is not None:
        model.load_state_dict(load(resume[0]), strict=False)
    config = TrainConfig(
        **{"steps": STEPS, "learning_rate": 0.01, "weight_decay": 0.1, "save_every": 2, "keep": 9, **settings}
    )
    fit(model, batches, config, STEPS, run, save=save, load=load, resume=resume)
    return model


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: distributed.full_tensor(value.detach()) for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_student_is_trained_and_teacher_stays_frozen(tmp_path: Path, optimizer: str) -> None:
    before, model = Distilled(), train(tmp_path, optimizer=optimizer, layer_decay=0.5)
    assert same(tensors(model.teacher), tensors(before.teacher))
    student, first = tensors(model.student), tensors(before.student)
    assert not any(torch.equal(student[name], first[name]) for name in student)
    assert model.modes == {(True, False)}  # only the student uses dropout
    assert not any(p.requires_grad or p.grad is not None for p in model.teacher.parameters())
    state = load_file(checkpoints(tmp_path)[-1] / "optimizer.safetensors")
    assert {entry.split(":")[1].split(".")[0] for entry in state} == {"student"}


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_resumed_run_gives_identical_weights(tmp_path: Path, optimizer: str) -> None:
    whole = train(tmp_path / "whole", optimizer=optimizer)
    for path in checkpoints(tmp_path / "whole")[1:]:
        path.rename(path.with_name(f"later-{path.name}"))
    found = latest_checkpoint(tmp_path / "whole")
    assert found is not None
    assert found[1].step == 2
    assert same(tensors(train(tmp_path / "resumed", found, optimizer=optimizer)), tensors(whole))


def test_best_checkpoint_is_loaded_without_the_teacher(tmp_path: Path) -> None:
    model, scores = Distilled(), iter([3.0, 1.0, 2.0])
    config = TrainConfig(steps=STEPS, learning_rate=0.01, evaluate_every=2, keep_best=True)
    evaluate = lambda: {"loss": next(scores)}  # noqa: E731
    (tmp_path / "run.json").write_text("{}")
    found = fit(model, batches, config, STEPS, tmp_path, save=save, load=load, evaluate=evaluate, goal="-loss")
    assert found["best_step"] == 4
    assert same(tensors(model.student), tensors(train(tmp_path / "four", steps=4).student)) is False  # another schedule
    (kept,) = (path for path in checkpoints(tmp_path) if path.name.endswith("4"))
    assert same({f"student.{n}": t for n, t in tensors(model.student).items()}, load(kept))
    assert same(tensors(model.teacher), tensors(Distilled().teacher))


def test_layer_decay_and_muon_use_the_layers_that_the_model_names() -> None:
    model = Distilled()
    shares = {name: learning_rate_factors(model, 0.5)[p] for name, p in model.student.named_parameters()}
    rates = {"embeddings": 0.25, "lower": 0.5, "upper": 1.0, "norm": 1.0}
    assert shares == {name: rates[name.split(".")[0]] for name in shares}
    model.teacher.requires_grad_(False)
    muon, _ = make_optimizers(model, TrainConfig(optimizer="muon"))
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    assert matrices == {id(layer.weight) for layer in model.student.layers}


def on_two_ranks(folder: str) -> None:
    with process_group(torch.device("cpu")):
        for parallel in ("ddp", "fsdp"):
            model = train(Path(folder) / parallel, parallel=parallel)
            found = tensors(model)
            if distributed.is_rank_zero():
                save_file(found, Path(folder) / f"{parallel}.safetensors")


@pytest.mark.slow
def test_two_ranks_train_the_same_weights_as_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    program = f"from test_parts import on_two_ranks; on_two_ranks({str(tmp_path)!r})"
    root = Path(__file__).parent
    places = os.pathsep.join([str(root), str(root.parent), str(root.parent.parent)])
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "PYTHONPATH": places}
    ranks = [subprocess.Popen([sys.executable, "-c", program], env={**os.environ, **shared, "RANK": r}) for r in "01"]
    alone = tensors(train(tmp_path / "alone"))
    assert [rank.wait(120) for rank in ranks] == [0, 0]
    teacher = {name: value for name, value in tensors(Distilled()).items() if name.startswith("teacher.")}
    for parallel in ("ddp", "fsdp"):
        found = load_file(tmp_path / f"{parallel}.safetensors")
        assert same({name: found[name] for name in teacher}, teacher)
        assert all(torch.allclose(found[name], alone[name], atol=1e-6) for name in alone)
        state = load_file(checkpoints(tmp_path / parallel)[-1] / "optimizer.safetensors")
        assert {entry.split(":")[1].split(".")[0] for entry in state} == {"student"}

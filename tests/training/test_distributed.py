"""Several ranks give the losses, weights, data order and checkpoints of one."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY
from runs import command, cut, finish, on_ranks, torchrun
from safetensors.torch import load_file

from bertsmith.config import override
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.training import runlog

# Sequences of unequal length, dropout on, five micro-batches of unequal size for two ranks: the sixth has zero weight.
SETTINGS = [
    *TINY,
    "train.steps=12",
    "train.batch_size=18",
    "train.micro_batch_size=4",
    "train.learning_rate=1e-3",
    "data.max_length=48",
    "data.short_share=0.5",
    "data.long_length=64",
]
SAVED = [*SETTINGS, "train.save_every=4", "train.keep=9"]
# ALBERT: narrow embeddings, shared layers, LAMB.
SHARED = [
    *(change for change in SAVED if not change.startswith(("train.steps", "train.save_every", "data.long_length"))),
    "model.embedding_size=16",
    "model.hidden_dropout=0.1",
    "model.attention_dropout=0.1",
    "train.steps=6",
    "train.save_every=3",
]


def both(data: Path, folder: Path, settings: list[str], name: str = "bert-tiny") -> None:
    """The run with `ddp` and with `fsdp`, on one of the ranks."""
    for parallel in ("ddp", "fsdp"):
        config = override(recipe(name), [*settings, f"train.parallel={parallel}"])
        pretrain(config, data, folder / parallel, device="cpu")


def losses(run: Path) -> list[tuple[float, float]]:
    return [(r["mlm_loss"], r["nsp_loss"]) for r in runlog.read(run) if "loss" in r]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def close(first: Path, second: Path, tolerance: float, steps: int = 12) -> None:
    assert len(losses(first)) == len(losses(second)) == steps
    assert torch.allclose(torch.tensor(losses(first)), torch.tensor(losses(second)), atol=tolerance, rtol=0)


@pytest.fixture(scope="session")
def alone(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one rank."""
    run = tmp_path_factory.mktemp("alone") / "run"
    pretrain(override(recipe("bert-tiny"), SAVED), world / "shards", run, device="cpu")
    return run


@pytest.fixture(scope="module")
def together(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run on two ranks with `ddp` and with `fsdp`."""
    folder = tmp_path_factory.mktemp("together")
    on_ranks(both, world / "shards", folder, SAVED)
    return folder


def test_ddp_on_two_ranks_equals_one_rank(alone: Path, together: Path) -> None:
    close(alone, together / "ddp", 1e-6)
    for name, tensor in weights(alone).items():
        assert torch.allclose(tensor, weights(together / "ddp")[name], atol=1e-5), name


def test_fsdp_on_two_ranks_equals_one_rank(alone: Path, together: Path) -> None:
    close(alone, together / "fsdp", 1e-6)


@pytest.mark.slow
def test_shared_layers_on_two_ranks_equal_one_rank_and_resume_to_the_bit(world: Path, tmp_path: Path) -> None:
    config, whole = override(recipe("albert-tiny"), SHARED), tmp_path / "whole"
    pretrain(config, world / "shards", whole, device="cpu")
    on_ranks(both, world / "shards", tmp_path, SHARED, "albert-tiny")
    for parallel in ("ddp", "fsdp"):
        close(whole, tmp_path / parallel, 2e-6, steps=6)
        found = weights(tmp_path / parallel)
        assert weights(whole).keys() == found.keys()
        for name, tensor in weights(whole).items():
            assert torch.allclose(tensor, found[name], atol=1e-5), name
    pretrain(config, world / "shards", cut(whole, tmp_path / "cut", 3), device="cpu", resume=True)
    resumed = weights(tmp_path / "cut")
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in weights(whole).items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "parallel", "tolerance"),
    [("lamb", "fsdp", 2e-6), ("muon", "fsdp", 2e-5), ("muon", "ddp", 2e-5)],
)
def test_optimisers_on_two_ranks_equal_one_rank(
    optimizer: str, parallel: str, tolerance: float, world: Path, tmp_path: Path
) -> None:
    settings = [*SETTINGS, f"train.optimizer={optimizer}", "train.clip_norm=0.1"]
    pretrain(override(recipe("bert-tiny"), settings), world / "shards", tmp_path / "one", device="cpu")
    finish(torchrun(command(world, tmp_path / "two", [*settings, f"train.parallel={parallel}"])))
    close(tmp_path / "one", tmp_path / "two", tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_checkpoint_of_two_ranks_resumes_on_one_and_back(
    parallel: str, world: Path, alone: Path, tmp_path: Path
) -> None:
    settings = [*SETTINGS, "train.save_every=4", "train.keep=9", f"train.parallel={parallel}"]
    run = tmp_path / "run"
    finish(torchrun(command(world, run, settings)))
    for folder in ("model", "checkpoints/step-00000008", "checkpoints/step-00000012"):
        shutil.rmtree(run / folder)
    pretrain(override(recipe("bert-tiny"), settings), world / "shards", run, device="cpu", resume=True)
    close(alone, run, 1e-6)
    for folder in ("model", "checkpoints/step-00000012"):
        shutil.rmtree(run / folder)
    finish(torchrun(command(world, run, settings, "--resume")))
    close(alone, run, 1e-6)


def test_one_and_two_ranks_write_equal_checkpoints(alone: Path, together: Path) -> None:
    files = [run / "checkpoints" / "step-00000008" for run in (alone, together / "fsdp")]
    first, second = (load_file(folder / "optimizer.safetensors") for folder in files)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.shape == second[name].shape
        assert torch.allclose(value, second[name], atol=1e-5), name
    states = [json.loads((folder / "trainer.json").read_text()) for folder in files]
    assert states[0]["step"] == states[1]["step"] == 8
    assert states[0]["tokens"] == states[1]["tokens"]


@pytest.mark.slow
def test_two_nodes_equal_one_rank(world: Path, alone: Path, tmp_path: Path) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    nodes = [
        torchrun(
            command(world, tmp_path / f"node{n}" / "run", SETTINGS),
            processes=1,
            store=store,
            nnodes="2",
        )
        for n in range(2)
    ]
    finish(*nodes)
    (run,) = tmp_path.glob("node*/run")  # only rank 0 writes
    close(alone, run, 1e-6)

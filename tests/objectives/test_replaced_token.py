"""Replaced-token detection: ELECTRA's losses and gradients, its two folders, and runs that resume and divide."""

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import randomise
from runs import cut, on_ranks
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from bertsmith.batch import IGNORE, Batch, Label, bucketed, lay_out
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import Notes, load_folder, weights_out
from bertsmith.inference.predictor import Predictor
from bertsmith.model import heads
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused.weights import Sampling
from bertsmith.model.sizes import electra_config
from bertsmith.objectives.discriminator import Discriminator
from bertsmith.objectives.replaced_token import ReplacedToken, corrupt, generator_config
from bertsmith.objectives.settings import ReplacedTokenConfig
from bertsmith.pages.report.page_of_runs import report
from bertsmith.pretraining.loader import MASKED, ORIGINAL, TARGET
from bertsmith.pretraining.models import save_model
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import runlog
from bertsmith.training.optim import make_optimizers
from bertsmith.training.settings import TrainConfig
from bertsmith.training.steps import weighted_losses

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "embedding_size": 16}
SIZES |= {"max_positions": 64, "vocab_size": 99}
CLS, SEP, MASK = 2, 3, 4
TINY = [f"model.{name}={size}" for name, size in SIZES.items() if name != "vocab_size"]
RUN = [*TINY, "model.hidden_dropout=0.1", "model.attention_dropout=0.1", "data.max_length=24", "train.steps=6"]
RUN += ["train.batch_size=10", "train.micro_batch_size=4", "train.save_every=3", "train.evaluate_every=3"]


def model_of(vocab_size: int = 99, **changes) -> ReplacedToken:
    """A small discriminator and its generator with large random weights."""
    config = replace(electra_config("tiny"), **{**SIZES, "vocab_size": vocab_size})
    settings = ReplacedTokenConfig(**{"generator_size": 0.5, "generator_layers": 0.5, **changes})
    return randomise(ReplacedToken(Encoder(config), settings)).eval()


def draw_batch(packed: bool, lengths=(7, 12, 3, 9)) -> Batch:
    """Sequences of unequal length in which a third of the tokens is masked."""
    draw, lengths = np.random.default_rng(3), np.array(lengths)
    original, ends = draw.integers(5, 99, lengths.sum()), lengths.cumsum()
    original[ends - lengths], original[ends - 1] = CLS, SEP
    return masked_batch(original, lengths, draw, 0.33, packed)


def masked_batch(original, lengths, draw, rate: float, packed: bool) -> Batch:
    """A batch as the loader makes it for this objective."""
    masked = np.flatnonzero((original > SEP) & (draw.random(len(original)) < rate))
    tokens = original.copy()
    tokens[masked] = MASK
    labels = {"masked": Label(masked, MASKED), "targets": Label(original[masked], TARGET)}
    batch = lay_out(tokens, np.arange(len(tokens)) % 2, lengths, packed=packed)
    batch = batch.with_labels({**labels, "original": Label(original, ORIGINAL)})
    return replace(batch, counts={"mlm": len(masked), "detection": len(original)})


def total(model: ReplacedToken, batch: Batch) -> Tensor:
    """The loss of a step with this one batch."""
    found = model(batch)
    return sum(weighted_losses(model, {name: found[name] / batch.counts[name] for name in batch.counts}))


def train(model: ReplacedToken, make: Callable[[int], Batch], steps: int) -> None:
    """Train a model on batches that are made from the number of the step."""
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=20)
    for step in range(steps):
        total(model, make(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def resumed(config: PretrainConfig, whole: Path, shards: Path, to: Path) -> Path:
    """A run that was cut after three steps and resumed; it has to end with the bytes of the whole one."""
    run = cut(whole, to, 3)
    pretrain(config, shards, run, device="cpu", resume=True)
    for file in ("model.safetensors", "generator/model.safetensors", "generator/config.json"):
        assert (run / "model" / file).read_bytes() == (whole / "model" / file).read_bytes()
    return run


def opened(folder: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The two networks of a saved folder as `transformers` opens them, whose classes the folders name."""
    found = []
    for path, kind in ((folder, "ElectraForPreTraining"), (folder / "generator", "ElectraForMaskedLM")):
        model, info = getattr(transformers, kind).from_pretrained(path, output_loading_info=True)
        assert not any(info.values()), info
        assert transformers.AutoConfig.from_pretrained(path).architectures == [kind]
        found.append(model.eval())
    return found[0], found[1]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("size", [0.5, 1.0])
def test_losses_and_gradients_equal_those_of_transformers(packed, size, world, tmp_path, monkeypatch) -> None:
    """Composed by hand: its generator, the same sampled words in place of the masks, and its discriminator."""
    model, batch = model_of(1000, generator_size=size), draw_batch(packed)
    save_model(tmp_path, model, Tokenizer.load(world / "tok"), Notes(), model.state_dict())
    discriminator, generator = opened(tmp_path)
    sampled = torch.randint(5, 99, batch.labels["targets"].shape)
    sampled[::3] = batch.labels["targets"][::3]  # a sampled word that is the original counts as original
    monkeypatch.setattr(heads, "sample", lambda *_: sampled)
    total(model, batch).backward()

    grid = draw_batch(packed=False)
    places, rows = {"attention_mask": grid.layout.mask.long(), "token_type_ids": grid.segments}, grid.labels["masked"]
    words = generator(input_ids=grid.tokens, **places).logits.flatten(0, 1)[rows]
    mlm = F.cross_entropy(words, grid.labels["targets"])
    tokens = grid.labels["original"].clamp_min(0).flatten()
    replaced = torch.zeros_like(tokens)
    replaced[rows] = (sampled != grid.labels["targets"]).long()
    tokens = tokens.scatter(0, rows, sampled).view_as(grid.tokens)
    detection = discriminator(input_ids=tokens, **places, labels=replaced.view_as(grid.tokens)).loss
    (mlm + 50 * detection).backward()

    found = model(batch)
    assert_close(found["mlm"] / batch.counts["mlm"], mlm, atol=1e-5, rtol=0)
    assert_close(found["detection"] / batch.counts["detection"], detection, atol=1e-5, rtol=0)
    theirs = {"d": dict(discriminator.named_parameters()), "g": dict(generator.named_parameters())}
    shared = [n for n in theirs["d"] if ".embeddings." in n]
    assert len(shared) == 5
    for part, ours in (("d", model.discriminator), ("g", model.generator)):
        named = {name: parameter.grad for name, parameter in ours.named_parameters()}
        for name, gradient in weights_out(ours, named).items():
            expected = theirs[part][name].grad
            if name in shared:  # tied: both losses reach it
                assert theirs["d"][name].grad.abs().max() > 1e-4 < theirs["g"][name].grad.abs().max()
                expected = theirs["d"][name].grad + theirs["g"][name].grad
            assert_close(gradient, expected, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_generators_have_the_published_sizes() -> None:
    """Those of google-research/electra's `get_generator_config`."""
    found = {}
    for size in ("small", "base", "large"):
        config = recipe(f"electra-{size}")
        made = generator_config(config.model, config.objective)
        found[size] = made.hidden_size, made.num_heads, made.intermediate_size, made.num_layers, made.table_size
    assert found == {
        "small": (64, 1, 256, 12, 128),
        "base": (256, 4, 1024, 12, 768),
        "large": (256, 4, 1024, 24, 1024),
    }


def test_words_are_sampled_from_the_softmax() -> None:
    logits, targets = torch.tensor([0.0, 1.0, 2.0, -1.0]), torch.full((20_000,), 2)
    for sampling in (Sampling(), Sampling(0.5), Sampling(disallow_correct=True)):
        torch.manual_seed(0)
        drawn = heads.sample(logits.expand(20_000, 4), targets, sampling)
        expected = logits / sampling.temperature
        expected[2] -= torch.inf if sampling.disallow_correct else 0.0
        assert_close(torch.bincount(drawn, minlength=4) / 20_000, expected.softmax(0), atol=0.015, rtol=0)


@pytest.mark.parametrize("packed", [True, False])
def test_only_sampled_words_that_differ_count_as_replaced(packed: bool) -> None:
    batch = draw_batch(packed)
    targets = batch.labels["targets"]
    sampled = targets.clone()
    sampled[1] = targets[1] % 90 + 5 + (targets[1] % 90 + 5 == targets[1])
    made = corrupt(batch, sampled)
    flat, original = made.batch.tokens.flatten(), batch.labels["original"].flatten()
    assert made.replaced.flatten().nonzero().tolist() == [[batch.labels["masked"][1].item()]]
    assert made.valid.sum() == batch.num_tokens
    valid = (original != IGNORE) & ~made.replaced.flatten()
    assert torch.equal(flat[valid], original[valid])
    assert flat[batch.labels["masked"][1]] == sampled[1]


def test_padding_for_cuda_graphs_changes_nothing(monkeypatch) -> None:
    model, batch = model_of(), draw_batch(packed=True)
    padded = bucketed(batch)
    sampled = torch.randint(5, 99, padded.labels["targets"].shape)
    assert len(padded.tokens) > len(batch.tokens)
    assert len(sampled) > batch.counts["mlm"]
    found = []
    for each in (batch, padded):
        monkeypatch.setattr(heads, "sample", lambda logits, *_: sampled[: len(logits)])
        found.append(model(each))
    assert_close(found[0], found[1], atol=1e-4, rtol=1e-5)


def test_operations_are_those_of_both_networks() -> None:
    """Counted by torch on sequences of one length: the products of the forward pass."""
    model, lengths = model_of(), [16] * 4
    batch = draw_batch(packed=False, lengths=lengths)
    with FlopCounterMode(display=False) as counter:
        model(batch)
    predicted, config = batch.counts["mlm"], model.generator.encoder.config
    attention = 4 * 4 * 16 * 16 * (2 * 32 + config.hidden_size)  # which torch does not count on a CPU
    # The estimate includes the first token of each sequence in the generator's last layer.
    firsts = 4 * 2 * config.hidden_size * (config.hidden_size + 2 * config.intermediate_size)
    assert model.flops(lengths, predicted) / 3 == counter.get_total_flops() + attention + firsts
    single = model.discriminator.memory(64, 16, 0, half=False, checkpointing=False, processes=1)
    assert model.memory(64, 16, predicted, half=False, checkpointing=False, processes=1) > single


@pytest.mark.parametrize("optimizer", ["adamw", "lamb", "muon"])
def test_optimisers_have_the_parameters_of_both_networks_once(optimizer: str) -> None:
    model = model_of()
    rate = {"rest_learning_rate": 1e-3} if optimizer == "muon" else {}
    optimizers = make_optimizers(model, TrainConfig(steps=1, optimizer=optimizer, **rate))
    groups = [[p for group in each.param_groups for p in group["params"]] for each in optimizers]
    counts = Counter(id(p) for group in groups for p in group)
    assert set(counts.values()) == {1}
    assert counts.keys() == {id(p) for p in model.parameters()}
    if optimizer == "muon":
        layers = [layer for encoder in model.encoders for layer in encoder.layers]
        assert {id(p) for p in groups[0]} == {id(p) for x in layers for p in x.parameters() if p.dim() == 2}


def repeated_words(seed: int, sequences: int = 16) -> Batch:
    """Sequences of one word that is repeated; 15 % of the tokens are masked."""
    draw = np.random.default_rng(seed)
    original = np.repeat(draw.integers(5, 13, (sequences, 1)), 12, 1)
    original[:, 0], original[:, -1] = CLS, SEP
    return masked_batch(original.ravel(), np.full(sequences, 12), draw, 0.15, packed=True)


def test_both_networks_learn() -> None:
    """A detector that knew only the share of the replaced tokens would have the entropy of that share as its loss."""
    changes = {"vocab_size": 13, "hidden_dropout": 0.0, "attention_dropout": 0.0, "init_std": 0.2}
    torch.manual_seed(0)
    model = ReplacedToken(
        Encoder(replace(electra_config("tiny"), **{**SIZES, **changes})),
        ReplacedTokenConfig(generator_size=0.5, disallow_correct=True),
    )
    train(model, repeated_words, steps=80)
    with torch.no_grad():
        sums = model.measures(repeated_words(999, 64))
    found = {name: float(value / count) for name, (value, count) in sums.items()}
    share = float(sums["detection_recall"][1] / sums["detection_accuracy"][1])
    assert 0.1 < share < 0.15  # of the tokens are masked, and each is replaced by a wrong one
    assert found["detection_loss"] < -0.6 * (share * np.log(share) + (1 - share) * np.log(1 - share))
    assert found["detection_recall"] > 0.5
    assert found["mlm_loss"] < 1.2 < np.log(8)


def settings(*changes: str):
    return override(recipe("electra-tiny"), [*RUN, *changes])


@pytest.fixture(scope="module")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with dropout, three micro-batches each."""
    run = tmp_path_factory.mktemp("electra") / "run"
    pretrain(settings(), world / "shards", run, device="cpu")
    return run


def tensors(run: Path) -> dict[str, Tensor]:
    named = {"": run / "model", "generator.": run / "model" / "generator"}
    return {f"{k}{n}": t for k, path in named.items() for n, t in load_file(path / "model.safetensors").items()}


def test_a_resumed_run_gives_identical_bytes(world: Path, whole: Path, tmp_path: Path) -> None:
    run = resumed(settings(), whole, world / "shards", tmp_path / "cut")
    ours = [r for r in runlog.read(run) if "dev_detection_loss" in r]
    theirs = [r for r in runlog.read(whole) if "dev_detection_loss" in r]
    assert [r["dev_loss"] for r in ours] == [r["dev_loss"] for r in theirs]


def on_two(data: Path, folder: Path) -> None:
    for parallel in ("ddp", "fsdp"):
        pretrain(settings(f"train.parallel={parallel}"), data, folder / parallel, device="cpu")


@pytest.mark.slow
def test_two_ranks_equal_one(world: Path, whole: Path, tmp_path: Path) -> None:
    on_ranks(on_two, world / "shards", tmp_path)
    for parallel in ("ddp", "fsdp"):
        found = tensors(tmp_path / parallel)
        for name, tensor in tensors(whole).items():
            assert torch.allclose(tensor, found[name], atol=1e-5), (parallel, name)


def test_held_out_scores_are_logged_and_reported(whole: Path, tmp_path: Path) -> None:
    scores = [r for r in runlog.read(whole) if "dev_loss" in r][-1]
    assert scores["dev_loss"] == pytest.approx(scores["dev_mlm_loss"] + 50 * scores["dev_detection_loss"])
    assert 0 <= scores["dev_detection_recall"] <= 100 > scores["dev_detection_accuracy"] > 0
    assert scores["dev_mlm_perplexity"] == pytest.approx(np.exp(scores["dev_mlm_loss"]))
    assert len(scores["dev_samples"]) == 4  # fill-ins of the generator
    step = [r for r in runlog.read(whole) if "detection_loss" in r][-1]
    assert step["loss"] == pytest.approx(step["mlm_loss"] + 50 * step["detection_loss"], rel=1e-5)
    page = Path(report([whole], tmp_path / "report.html")["page"]).read_text()
    assert "Share of the replaced tokens that were found" in page


def test_the_folders_open_in_transformers_and_tied_tables_are_equal(whole: Path) -> None:
    discriminator, generator = opened(whole / "model")
    for name, table in discriminator.electra.embeddings.named_parameters():
        assert torch.equal(table, generator.electra.embeddings.get_parameter(name))
    assert isinstance(load_folder(whole / "model").model, Discriminator)


def test_masks_are_filled_by_the_generator(whole: Path) -> None:
    with pytest.raises(UserError, match=r"cannot fill masks; give .*model/generator"):
        Predictor.load(whole).fill("a [MASK] of")
    assert len(Predictor.load(whole / "model" / "generator").fill("a [MASK] of", top=3)[0]) == 3


def test_the_discriminator_is_fine_tuned(world: Path, whole: Path, tmp_path: Path) -> None:
    config = FinetuneConfig("classify", train=TrainConfig(epochs=15, batch_size=8, learning_rate=3e-3))
    scores = finetune(config, whole, world / "train.csv", tmp_path / "tuned", device="cpu")
    assert scores["accuracy"] > 90
    assert Predictor.load(tmp_path / "tuned").predict("the b of a file 3")["label"] == "files"


def test_pretraining_continues_from_both_folders(world: Path, whole: Path, tmp_path: Path) -> None:
    changes = ["train.steps=1", "train.learning_rate=1e-9", "objective.generator_size=0.9"]
    pretrain(settings(*changes), world / "shards", tmp_path / "more", model=whole, device="cpu")
    found = tensors(tmp_path / "more")  # the generator has the saved size, not the configured one
    assert all(torch.allclose(tensor, found[name], atol=1e-6) for name, tensor in tensors(whole).items())


def refusal(world: Path, start: Path, out: Path, *changes: str) -> str:
    with pytest.raises(UserError) as caught:
        pretrain(settings(*changes), world / "shards", out, model=start, device="cpu")
    assert not out.exists()
    return str(caught.value)


def test_incomplete_folders_are_refused_with_the_fix(world: Path, whole: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    shutil.copytree(whole / "model", alone)
    generator = alone / "generator"
    found = refusal(world, generator, tmp_path / "a")
    assert "holds ElectraForMaskedLM" in found
    assert "give a folder of ElectraForPreTraining, with the generator" in found
    other = model_of(1000)
    shutil.rmtree(generator)
    assert f"put the folder of its ElectraForMaskedLM there, as {generator}" in refusal(world, alone, tmp_path / "b")
    save_model(tmp_path / "other", other, Tokenizer.load(world / "tok"), Notes(), other.state_dict())
    shutil.copytree(tmp_path / "other" / "generator", generator)
    assert "set objective.tied_embeddings=false" in refusal(world, alone, tmp_path / "c")
    untied = settings("objective.tied_embeddings=false", "train.steps=1")
    pretrain(untied, world / "shards", tmp_path / "d", model=alone, device="cpu")
    found = tensors(tmp_path / "d")
    table = "electra.embeddings.word_embeddings.weight"
    assert not torch.allclose(found[table], found[f"generator.{table}"])

"""Tests that need a GPU: fused kernels and CUDA graphs compute the same as plain code, and kernels compile once."""

from __future__ import annotations

import dataclasses
import gc
import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from labels import of_pretraining, of_task
from torch import Tensor

from bertsmith.batch import Batch, Example, Label, bucketed, collate, lay_out
from bertsmith.config import override
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused_choice import choose, compiled_kernels, plain_kernels
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.recurrent import FeatureConfig
from bertsmith.model.sizes import encoder_config
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.replaced_token import ReplacedToken
from bertsmith.objectives.settings import ReplacedTokenConfig
from bertsmith.pretraining.loader import ORIGINAL
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.training.cuda_graphs import GraphRunner
from bertsmith.training.optim import make_optimizers
from bertsmith.training.settings import TrainConfig
from bertsmith.training.steps import gradients, update

CUDA = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(choose(encoder_config("base"), CUDA, torch.bfloat16).reason),
    reason="needs a CUDA GPU and Triton",
)


def config(dropout: float = 0.0, **changes: object) -> EncoderConfig:
    values = {"num_layers": 2, "hidden_dropout": dropout, "attention_dropout": dropout, **changes}
    return dataclasses.replace(encoder_config("base"), **values)  # type: ignore[arg-type]


ALBERT = {"embedding_size": 128, "shared_layers": "all", "activation": "gelu_tanh"}
GPT: dict[str, object] = {
    "direction": "left-to-right", "num_segments": 0, "activation": "gelu_tanh", "embedding_norm": False,
    "head_transform": False, "head_bias": False,
}  # fmt: skip
DEBERTA: dict[str, object] = {
    "positions": "none", "num_segments": 0, "relative_terms": "both", "key_bias": False, "norm_eps": 1e-7,
}  # fmt: skip
DEBERTA_V3: dict[str, object] = {
    **DEBERTA, "key_bias": True, "relative_buckets": 256, "relative_norm": True, "relative_projections": False,
}  # fmt: skip
MODERN: dict[str, object] = {
    "norm_first": True, "bias": False, "num_segments": 0, "positions": "rotary", "rotary_base": 160_000.0,
    "local_rotary_base": 10_000.0, "window": 128, "global_every": 2, "gated": True, "intermediate_size": 1152,
    "first_attention_norm": False, "prediction_head": True, "max_positions": 8192,
}  # fmt: skip
FAMILIES: dict[str, dict[str, object]] = {  # what differs from BERT
    "gpt": GPT,
    "modern": MODERN,
    "modern-large": {**MODERN, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 2624},
    "rotary with biases": {**MODERN, "bias": True, "norm_first": False, "first_attention_norm": True},
    "albert": ALBERT,
    "albert-xlarge": {**ALBERT, "hidden_size": 2048, "num_heads": 16, "intermediate_size": 8192},
    "albert-xxlarge": {**ALBERT, "hidden_size": 4096, "num_heads": 64, "intermediate_size": 16384},
    "attention is shared": {**ALBERT, "shared_layers": "attention", "activation": "relu"},
    "distilbert": {"num_segments": 0},
    "electra-small": {"embedding_size": 128, "hidden_size": 256, "num_heads": 4, "intermediate_size": 1024},
    "deberta": DEBERTA,
    "deberta, one term": {**DEBERTA, "relative_terms": "content-to-position", "relative_reach": 100},
    "deberta-v3": DEBERTA_V3,
    "its generator": {"embedding_size": 128, "hidden_size": 64, "num_heads": 1, "intermediate_size": 256},
}


def masked_batch(longest: int, rows: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(longest // 4, longest + 1, rows)
    total = int(lengths.sum())
    batch = lay_out(rng.integers(1000, 30000, total), rng.integers(0, 2, total), lengths, packed=True)
    masked = np.sort(rng.choice(total, total // 7, replace=False))
    return batch.with_labels(of_pretraining(masked, rng.integers(1000, 30000, len(masked)), rng.integers(0, 2, rows)))


def all_gradients(model: torch.nn.Module, batch: Batch, precision: str) -> tuple[dict[str, float], Tensor]:
    model.zero_grad(set_to_none=True)
    train = TrainConfig(steps=1, precision=precision, clip_norm=0.0)  # type: ignore[arg-type]
    means, _ = gradients(model, [batch], {n: float(c) for n, c in batch.counts.items()}, train, 0)
    return means, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


VARIANTS: dict[str, dict[str, object]] = {
    "bert": {},
    "pre-norm": {"norm_first": True},
    "left-to-right": {"direction": "left-to-right"},
    "right-to-left": {"direction": "right-to-left"},
    "window": {"window": 32, "global_every": 2},
    "window-left-to-right": {"window": 100, "global_every": 2, "direction": "left-to-right"},
}


@pytest.mark.parametrize(
    ("longest", "changes"),
    [
        *(pytest.param(n, changes, id=f"{name}-{n}") for n in (60, 128, 512) for name, changes in VARIANTS.items()),
        *(pytest.param(n, changes, id=f"{name}-{n}") for n in (128, 512) for name, changes in FAMILIES.items()),
    ],
)
def test_fused_kernels_are_as_close_to_float32_as_plain_code(longest: int, changes: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = MaskedLM(Encoder(config(**changes))).to(CUDA)  # type: ignore[arg-type]
    batch = masked_batch(longest, 16)
    with plain_kernels():
        truth, exact = all_gradients(model, batch, "float32")
        _, plain = all_gradients(model, batch, "bfloat16")
    means, fused = all_gradients(model, batch, "bfloat16")
    assert abs(means["mlm"] - truth["mlm"]) < 2e-3
    assert (fused - exact).norm() < 2 * (plain - exact).norm() + 1e-3 * exact.norm()


def test_recomputed_weights_give_the_gradients_of_kept_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, which the kept weights carry along; the seed of a step is always the same."""
    from bertsmith.model.fused import relative_attention

    torch.manual_seed(0)
    model, batch = MaskedLM(Encoder(config(0.1, **DEBERTA_V3))).to(CUDA), masked_batch(512, 16)
    kept = all_gradients(model, batch, "bfloat16")[1]
    monkeypatch.setattr(relative_attention, "KEPT_LENGTH", 0)
    recomputed = all_gradients(model, batch, "bfloat16")[1]
    assert 0 < (kept - recomputed).norm() < 0.02 * recomputed.norm()


def test_memory_grows_with_the_length_alone() -> None:
    """Of a training step on one sequence: with twice the tokens, twice the activations, up to 8,192 tokens.

    The vocabulary is small, since its matrix, gradient and copy together are as large as the activations of 4,096
    tokens. What remains of such constants cancels out in the differences between lengths. No step leaves memory to
    Python's garbage collector, which may run at any time.
    """
    model = MaskedLM(Encoder(config(**MODERN, vocab_size=1024))).to(CUDA)  # type: ignore[arg-type]
    peaks, garbage = {}, []
    for length in (2048, 2048, 4096, 8192):  # once to compile
        rng = np.random.default_rng(0)
        batch = lay_out(rng.integers(100, 1000, length), np.zeros(length, int), np.array([length]), packed=True)
        masked = np.sort(rng.choice(length, length // 7, replace=False))
        batch = batch.with_labels(of_pretraining(masked, rng.integers(100, 1000, len(masked)), np.zeros(1, int)))
        model.zero_grad(set_to_none=True)
        left = torch.cuda.memory_allocated()
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        garbage.append(left - before)  # the first is what earlier tests left
        all_gradients(model, batch.to(CUDA), "bfloat16")
        peaks[length] = torch.cuda.max_memory_allocated() - before
    added = (peaks[8192] - peaks[4096]) / (peaks[4096] - peaks[2048])
    assert 1.8 < added < 2.2, peaks
    assert not any(garbage[1:]), garbage


def weights_after(
    model: torch.nn.Module, batches: list[Batch], train: TrainConfig, captured: bool
) -> tuple[list[float], Tensor]:
    optimizers = make_optimizers(model, train)
    runner = GraphRunner(model, optimizers, train, capturable=True) if captured else None
    losses = []
    for step, batch in enumerate(batches):
        means, _ = gradients(model, [batch], {n: float(c) for n, c in batch.counts.items()}, train, step, runner)
        losses.append(sum(v for n, v in means.items() if not n.endswith("accuracy")))
        update(optimizers, 1.0, runner)
        if runner is None:
            model.zero_grad(set_to_none=True)
    return losses, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [
        pytest.param("adamw", {}, id="adamw"),
        pytest.param("muon", {}, id="muon"),
        pytest.param("lamb", {}, id="lamb"),
        *(pytest.param(name, ALBERT, id=f"albert-{name}") for name in ("adamw", "muon", "lamb")),
        pytest.param("muon", GPT, id="gpt-muon"),
        pytest.param("adamw", DEBERTA_V3, id="deberta-v3-adamw"),
        pytest.param("adamw", MODERN, id="modern"),
    ],
)
def test_captured_steps_equal_eager_steps(optimizer: str, changes: dict[str, object]) -> None:
    train = TrainConfig(steps=1, optimizer=optimizer, learning_rate=1e-3)  # type: ignore[arg-type]
    batches = [bucketed(masked_batch(128, 8, seed)) for seed in range(8)]
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        runs.append(weights_after(MaskedLM(Encoder(config(0.1, **changes))).to(CUDA), batches, train, captured))
    (plain, first), (fast, second) = runs
    assert np.allclose(plain, fast, atol=0.02)
    assert (first - second).norm() < 0.02 * first.norm()


def electra_batch(longest: int, rows: int, seed: int = 0) -> Batch:
    """The batch with the label that replaced-token detection needs."""
    batch = masked_batch(longest, rows, seed)
    original = batch.tokens.scatter(0, batch.labels["masked"], batch.labels["targets"])
    batch = batch.with_labels({"original": Label(original.numpy(), ORIGINAL)})
    counts = {**batch.counts, "detection": batch.num_tokens, "fill": batch.counts["mlm"]}
    return dataclasses.replace(batch, counts=counts)


def electra(dropout: float = 0.0, **changes: object) -> ReplacedToken:
    torch.manual_seed(0)
    settings = ReplacedTokenConfig(**changes)  # type: ignore[arg-type]
    return ReplacedToken(Encoder(config(dropout, **FAMILIES["electra-small"])), settings).to(CUDA)  # type: ignore[arg-type]


FILLING = [{}, {"fill_every": 5}, {"fill_every": 5, "disentangled": True}]
FILLING += [{"fill_every": 5, "disentangled": True, "next_sentence": True}]


@pytest.mark.parametrize("changes", FILLING)
def test_fused_replaced_token_losses_equal_plain_ones(changes: dict[str, object]) -> None:
    """The words that are drawn differ, so the detector's loss is close only in the mean."""
    model, batch = electra(**changes), electra_batch(128, 64)
    with plain_kernels():
        plain, _ = all_gradients(model, batch, "float32")
    fused, _ = all_gradients(model, batch, "bfloat16")
    assert abs(fused["mlm"] - plain["mlm"]) < 2e-3
    assert abs(fused["detection"] - plain["detection"]) < 1e-2
    assert abs(fused.get("fill", 0.0) - plain.get("fill", 0.0)) < 2e-2
    assert abs(fused.get("nsp", 0.0) - plain.get("nsp", 0.0)) < 2e-2


@pytest.mark.parametrize("changes", FILLING)
def test_captured_replaced_token_steps_equal_eager_steps(changes: dict[str, object]) -> None:
    train = TrainConfig(steps=1, learning_rate=1e-3)
    batches = [bucketed(electra_batch(128, 8, seed)) for seed in range(8)]
    runs = [weights_after(electra(0.1, **changes), batches, train, captured) for captured in (False, True)]
    (plain, first), (fast, second) = runs
    assert np.allclose(plain, fast, atol=0.02)
    assert (first - second).norm() < 0.02 * first.norm()


def test_losses_of_captured_micro_batches_add_up() -> None:
    train = TrainConfig(steps=1, learning_rate=1e-3)
    steps = [[bucketed(masked_batch(128, rows, 10 * step + rows)) for rows in (8, 24, 8, 16)] for step in range(5)]
    found = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = MaskedLM(Encoder(config())).to(CUDA)
        runner = GraphRunner(model, make_optimizers(model, train), train, capturable=True) if captured else None
        for number, batches in enumerate(steps):
            counts = {name: float(sum(b.counts[name] for b in batches)) for name in batches[0].counts}
            means, norm = gradients(model, batches, counts, train, number, runner)
            found.append([*means.values(), norm])
            model.zero_grad(set_to_none=runner is None)
    plain, fast = found[: len(steps)], found[len(steps) :]
    assert np.allclose(plain, fast, rtol=0.02, atol=0.02)


def test_captured_fine_tuning_equals_eager_fine_tuning() -> None:
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(12):
        lengths = rng.integers(4, 60, 32)
        rows = [Example(rng.integers(1000, 30000, n), np.zeros(n, int), of_task(int(rng.integers(2)))) for n in lengths]
        batches.append(collate(rows, packed=True))
    train = TrainConfig(steps=1, learning_rate=1e-4)
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = TaskModel(Encoder(config()), HeadConfig("single", ("a", "b"))).to(CUDA)
        given = [bucketed(b) for b in batches] if captured else batches
        runs.append(weights_after(model, given, train, captured)[0])
    assert np.allclose(*runs, atol=0.02)


@pytest.mark.parametrize(
    "kind",
    ["weighted", "multi", "regression", "tags", "span", "choice", "beside", "bilstm", "bilstm-tags", "features"],
)
def test_every_head_can_be_captured(kind: str) -> None:
    rng = np.random.default_rng(0)
    labels = {"multi": [1.0, 0.0], "regression": 0.5, "span": (1, 2)}.get(kind, 1)
    head = {"bilstm-tags": "tags", "features": "tags"}.get(kind, kind)
    head = "single" if kind in ("weighted", "beside", "bilstm") else head
    batches = []
    for _ in range(4):
        rows = []
        for n in rng.integers(4, 60, 8):
            tags = rng.integers(0, 2, n) if head == "tags" else None
            states = rng.normal(size=(n, 1, 768)).astype(np.float16) if kind == "features" else None
            label = None if tags is not None else labels
            rows.append(Example(rng.integers(1000, 30000, n), np.zeros(n, int), of_task(label, tags, states=states)))
        if kind == "choice":
            rows = [dataclasses.replace(row, labels=of_task(1 if i % 4 == 0 else None)) for i, row in enumerate(rows)]
        batches.append(collate(rows, packed=True))
    encoder = config(direction="left-to-right" if kind == "beside" else "both")
    runs = []
    for captured in (False, True):
        torch.manual_seed(0)
        names = ("a", "b") if head in ("single", "multi", "tags") else ()
        choices = 4 if head == "choice" else 0
        features = FeatureConfig("last", hidden_size=256) if kind == "features" else None
        made = HeadConfig(  # type: ignore[call-overload]
            head, names, choices, features=features, bilstm_layers=int("bilstm" in kind), beside=kind == "beside"
        )
        model = TaskModel(Encoder(encoder), made).to(CUDA)
        if kind == "weighted":
            model.class_weights = [0.5, 2.0]
        given = [bucketed(b) for b in batches * 3] if captured else batches * 3
        runs.append(weights_after(model, given, TrainConfig(steps=1, learning_rate=1e-4), captured)[0])
    assert np.allclose(*runs, atol=0.03)


@pytest.mark.parametrize("kept_length", [512, 0], ids=["kept", "recomputed"])
def test_gradients_with_distances_do_not_depend_on_the_order_of_programs(
    kept_length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two backward passes give the same bits, those of the tables of distances as well."""
    from bertsmith.model.fused import relative_attention

    monkeypatch.setattr(relative_attention, "KEPT_LENGTH", kept_length)
    torch.manual_seed(0)
    encoder, batch = Encoder(config(**DEBERTA_V3)).to(CUDA), masked_batch(512, 16).to(CUDA)
    found = []
    for _ in range(2):
        encoder.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            encoder(batch).float().square().mean().backward()
        found.append([p.grad for n, p in encoder.named_parameters() if not n.startswith("embeddings")])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("changes", [{}, ALBERT, DEBERTA_V3], ids=["bert", "albert", "deberta-v3"])
def test_kernels_are_compiled_once(changes: dict[str, object]) -> None:
    model = MaskedLM(Encoder(config(0.1, **changes))).to(CUDA)
    train = TrainConfig(steps=1)
    weights_after(model, [masked_batch(128, 9, 0)], train, captured=False)
    before = compiled_kernels()
    weights_after(model, [masked_batch(128, rows, rows) for rows in range(7, 20)], train, captured=False)
    assert compiled_kernels() == before


@pytest.mark.parametrize(("dropout", "changes"), [(0.0, {}), (0.1, {}), (0.1, ALBERT)], ids=["none", "bert", "albert"])
def test_dropout_keeps_the_mean(dropout: float, changes: dict[str, object]) -> None:
    """The mean of outputs with dropout over many draws is close to the output without."""
    torch.manual_seed(0)
    model = Encoder(config(dropout, **{**changes, "num_layers": 1})).to(CUDA)
    batch = masked_batch(128, 8).to(CUDA)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        model.train()
        mean = torch.stack([model(batch).float() for _ in range(200)]).mean(0)
        model.eval()
        plain = model(batch).float()
    assert (mean - plain).norm() < 0.15 * plain.norm()


@pytest.mark.parametrize("changes", [{}, ALBERT, {"num_segments": 0}], ids=["bert", "albert", "distilbert"])
def test_evaluation_is_equal_with_plain_and_fused_kernels(changes: dict[str, object]) -> None:
    torch.manual_seed(0)
    model = MaskedLM(Encoder(config(**changes))).to(CUDA).eval()  # type: ignore[arg-type]
    batch = masked_batch(128, 8).to(CUDA)
    found = []
    for context in (plain_kernels(), nullcontext()):
        with context, torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            found.append(model.logits(batch)["mlm"].float())
    assert (found[0] - found[1]).norm() < 0.02 * found[0].norm()


@pytest.fixture(scope="module")
def pretrained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command: another thread pins the workers' batches while the main thread captures CUDA graphs."""
    run = tmp_path_factory.mktemp("pretrained") / "run"
    changes = ["model.hidden_size=128", "model.num_heads=2", "train.steps=30", "train.workers=2", "data.max_length=64"]
    pretrain(override(recipe("bert-tiny"), changes), world / "shards", run, device="cuda")
    return run


def test_pretrain_command_with_workers_and_cuda_graphs(pretrained: Path) -> None:
    logged = [json.loads(line) for line in (pretrained / "metrics.jsonl").read_text().splitlines()]
    assert max(line.get("compile_seconds", 0) for line in logged) > 0
    assert [line["loss"] for line in logged if "loss" in line][-1] < 14


@pytest.mark.parametrize("change", ["train.seed=1", "bilstm_layers=1", "features.variant=last"])
def test_a_tagger_learns_with_and_without_a_bilstm(change: str, pretrained: Path, tmp_path: Path) -> None:
    sentences = [
        "\n".join(f"{word} {'B-X' if word == 'file' else 'O'}" for word in f"the file {i} of a".split())
        for i in range(40)
    ]
    (tmp_path / "train.txt").write_text("\n\n".join(sentences) + "\n", encoding="utf-8")
    changes = ["train.epochs=8", "train.batch_size=8", "train.learning_rate=1e-3", change]
    found = override(FinetuneConfig("tag"), changes)
    scores = finetune(
        found, pretrained, tmp_path / "train.txt", tmp_path / "run", dev=tmp_path / "train.txt", device="cuda"
    )
    assert scores["f1"] > 90


def test_a_finished_run_frees_its_memory(pretrained: Path, tmp_path: Path) -> None:
    """Sweeps train many models in one process, and reference cycles would keep them all on the GPU for long."""
    rows = [(f"the file {i} of a {word}", word) for i in range(40) for word in ("good", "bad")]
    held = []
    gc.disable()
    try:
        for seed in range(3):
            finetune("classify", pretrained, rows, tmp_path / str(seed), epochs=2, seed=seed, device="cuda")
            held.append(torch.cuda.memory_allocated())
    finally:
        gc.enable()
    weights = (tmp_path / "0" / "model" / "model.safetensors").stat().st_size
    assert held[2] - held[1] < weights / 4  # the first run also leaves what the libraries keep

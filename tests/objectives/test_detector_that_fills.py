"""Replaced-token detection with `fill_every`: the discriminator also predicts the masks that are left in its input."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import randomise
from runs import on_ranks
from safetensors.torch import load_file
from test_replaced_token import MASK, draw_batch, repeated_words, resumed, total, train
from torch import Tensor
from torch.testing import assert_close

from bertsmith.batch import Batch, bucketed
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.formats.hf import load_folder
from bertsmith.inference.predictor import Predictor
from bertsmith.model import heads
from bertsmith.model.encoder import Encoder
from bertsmith.model.sizes import electra_config
from bertsmith.objectives.discriminator import Discriminator
from bertsmith.objectives.replaced_token import ReplacedToken, corrupt
from bertsmith.objectives.settings import ReplacedTokenConfig
from bertsmith.pages.view import view
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.training import runlog
from bertsmith.verify import onnx_parity, parity

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY = 2
SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "max_positions": 64}
RUN = [f"model.{name}={size}" for name, size in SIZES.items()]
RUN += ["data.max_length=24", "train.steps=6", "train.batch_size=10", "train.micro_batch_size=4", "train.save_every=3"]
RUN += ["train.evaluate_every=3", f"objective.fill_every={EVERY}"]
RECIPES = {"electra-tiny": "ElectraForMaskedLM", "deberta-v3-tiny": "DebertaV2ForMaskedLM"}


def settings(name: str, *changes: str):
    return override(recipe(name), [*RUN, *changes])


def model_of(name: str, vocab_size: int = 99) -> ReplacedToken:
    config = settings(name, "model.hidden_dropout=0.0", "model.attention_dropout=0.0")
    return randomise(ReplacedToken(Encoder(replace(config.model, vocab_size=vocab_size)), config.objective)).eval()


def counted(batch: Batch) -> Batch:
    """The batch with the count that the loader gives it for the further loss."""
    return replace(batch, counts={**batch.counts, "fill": batch.counts["mlm"]})


@pytest.mark.parametrize("packed", [True, False])
def test_every_second_mask_is_left_and_not_judged(packed: bool) -> None:
    batch = draw_batch(packed)
    targets, masked = batch.labels["targets"], batch.labels["masked"]
    sampled = (targets - 4) % 94 + 5  # never the original word
    made, whole = corrupt(batch, sampled, EVERY), corrupt(batch, sampled)
    flat, valid = made.batch.tokens.flatten(), made.valid.flatten()
    assert (flat[masked[::EVERY]] == MASK).all()
    assert torch.equal(flat[masked[1::EVERY]], sampled[1::EVERY])
    assert not valid[masked[::EVERY]].any()
    assert valid.sum() == batch.num_tokens - len(masked[::EVERY])
    assert made.replaced.flatten().nonzero().flatten().tolist() == sorted(masked[1::EVERY].tolist())
    others = torch.ones_like(valid).scatter(0, masked[::EVERY], False)
    assert torch.equal(flat[others], whole.batch.tokens.flatten()[others])


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_is_that_of_a_masked_language_model_on_the_corrupted_text(
    name: str, packed: bool, monkeypatch
) -> None:
    model, batch = model_of(name), counted(draw_batch(packed))
    targets, rows = batch.labels["targets"], batch.labels["masked"][::EVERY]
    sampled = (targets - 4) % 94 + 5
    monkeypatch.setattr(heads, "sample", lambda *_: sampled)
    found = model(batch)

    network, made = model.discriminator, corrupt(batch, sampled, EVERY)
    states = network.encoder(made.batch).flatten(0, -2)[rows]
    table = network.encoder.embeddings.table()
    head = network.masked_lm
    words = head.norm(F.gelu(head.transform(states))) @ table.T + head.decoder.bias
    loss = F.cross_entropy(words, targets[::EVERY], reduction="sum")
    assert_close(found["fill"], EVERY * loss)
    assert found["fill_accuracy"] == EVERY * (words.argmax(-1) == targets[::EVERY]).sum()
    judged = F.binary_cross_entropy_with_logits(
        network.detector(network.encoder(made.batch), made.batch)[made.valid],
        made.replaced[made.valid].float(),
        reduction="sum",
    )
    assert_close(found["detection"], judged)
    assert_close(model.logits(batch)["mlm"], model.generator.logits(batch)["mlm"])
    assert model.measures(batch)["fill_loss"][1] == len(rows)

    theirs, ours = model.generator.encoder.embeddings.tokens.weight, network.encoder.embeddings.delta
    if ours is not None:  # disentangled: the generator's table is not trained by it
        assert torch.autograd.grad(found["fill"], [theirs], retain_graph=True, allow_unused=True) == (None,)
        assert torch.autograd.grad(found["fill"], [ours], retain_graph=True)[0].abs().max() > 1e-3
    total(model, batch).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", RECIPES)
def test_padding_for_cuda_graphs_changes_nothing(name: str, monkeypatch) -> None:
    model, batch = model_of(name), draw_batch(packed=True)
    padded = bucketed(batch)
    sampled = torch.randint(5, 99, padded.labels["targets"].shape)
    found = []
    for each in (batch, padded):
        monkeypatch.setattr(heads, "sample", lambda logits, *_: sampled[: len(logits)])
        found.append(model(each))
    assert_close(found[0], found[1], atol=1e-4, rtol=1e-5)
    predicted = batch.counts["mlm"]
    plain = ReplacedToken(Encoder(model.encoder.config), replace(model.config, fill_every=0))
    assert model.flops([12, 9], predicted) > plain.flops([12, 9], predicted)


def test_one_network_learns_to_detect_and_to_fill() -> None:
    """Sequences of one repeated word: a mask is filled with it, and a wrong word among them stands out."""
    sizes = {**SIZES, "embedding_size": 16, "vocab_size": 13, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    torch.manual_seed(0)
    model = ReplacedToken(
        Encoder(replace(electra_config("tiny"), **sizes, init_std=0.2)),
        ReplacedTokenConfig(generator_size=0.5, disallow_correct=True, fill_every=EVERY),
    )
    train(model, lambda step: counted(repeated_words(step)), steps=80)
    batch = repeated_words(999, 64)
    with torch.no_grad():
        sums = model.measures(batch)
        filled = model.discriminator.token_logits(batch).argmax(-1)  # every mask at once
    found = {name: float(value / count) for name, (value, count) in sums.items()}
    assert found["detection_recall"] > 0.5
    assert found["fill_loss"] < 1.2 < np.log(8)
    assert float((filled == batch.labels["targets"]).float().mean()) > 0.6


@pytest.fixture(scope="module", params=RECIPES)
def whole(request: pytest.FixtureRequest, world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of six steps of each family."""
    run = tmp_path_factory.mktemp("filling") / "run"
    pretrain(settings(request.param), world / "shards", run, device="cpu")
    return request.param, run


def tensors(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "model.safetensors")


def test_a_resumed_run_gives_identical_bytes(whole, world: Path, tmp_path: Path) -> None:
    name, finished = whole
    resumed(settings(name), finished, world / "shards", tmp_path / "cut")


def test_scores_are_logged(whole) -> None:
    _, run = whole
    scores = [r for r in runlog.read(run) if "dev_loss" in r][-1]
    parts = scores["dev_mlm_loss"] + 50 * scores["dev_detection_loss"] + scores["dev_fill_loss"]
    assert scores["dev_loss"] == pytest.approx(parts)
    step = [r for r in runlog.read(run) if "fill_loss" in r][-1]
    assert step["loss"] == pytest.approx(step["mlm_loss"] + 50 * step["detection_loss"] + step["fill_loss"], rel=1e-5)
    assert abs(step["fill_loss"] - step["mlm_loss"]) < 1  # both are means over words: no factor is left in them


def test_the_folder_fills_masks_and_opens_in_transformers(whole, tmp_path: Path) -> None:
    name, run = whole
    model = load_folder(run / "model").model
    assert isinstance(model, Discriminator)
    words = Predictor.load(run).fill("a [MASK] of a list", top=3)[0]
    reference = getattr(transformers, RECIPES[name]).from_pretrained(run / "model").eval()
    predictor = Predictor.load(run)
    example, masked = predictor.encode_masks("a [MASK] of a list")
    with torch.no_grad():
        logits = reference(input_ids=torch.from_numpy(example.tokens.astype(np.int64))[None]).logits[0, masked]
    expected = logits.softmax(-1).topk(3)
    assert_close(torch.tensor([each["probability"] for each in words]), expected.values[0], atol=1e-5, rtol=1e-4)
    if name.startswith("deberta"):  # its class scores the words; ELECTRA's scores replaced tokens
        assert parity(run / "model", run / "model")["equal"]
        assert "logits mlm" in parity(run / "model", run / "model")["differences"]
    page = view(run, "a list of items", out=tmp_path / "page.html")["page"]
    assert "fills masks" not in Path(page).read_text()


def test_both_outputs_are_exported_to_onnx(whole, tmp_path: Path) -> None:
    from bertsmith.formats.onnx import export_onnx

    _, run = whole
    export_onnx(load_folder(run / "model"), tmp_path / "onnx")
    assert set(onnx_parity(tmp_path / "onnx", run / "model")["differences"]) == {
        "model.onnx detection_logits", "model.onnx mlm_logits"
    }  # fmt: skip
    assert onnx_parity(tmp_path / "onnx", run / "model")["equal"]
    ours, theirs = (Predictor.load(each).fill("a [MASK] of", top=2)[0] for each in (run, tmp_path / "onnx"))
    assert [each["token"] for each in ours] == [each["token"] for each in theirs]


def test_a_masked_word_model_and_a_detector_are_made_of_it_and_it_of_a_detector(whole, world, tmp_path, capsys) -> None:
    name, run = whole
    still = ["train.steps=1", "train.learning_rate=1e-9", "train.evaluate_every=0"]
    again = settings(name, *still)
    pretrain(again, world / "shards", tmp_path / "again", model=run, device="cpu")
    first, second = tensors(run), tensors(tmp_path / "again")
    assert first.keys() == second.keys()
    assert all(torch.allclose(tensor, second[key], atol=1e-6) for key, tensor in first.items())
    capsys.readouterr()
    plain = settings(name, *still, "objective.fill_every=0")
    pretrain(plain, world / "shards", tmp_path / "plain", model=run, device="cpu")
    assert "the discriminator's masked-word head is dropped" in capsys.readouterr().err
    lost = first.keys() - tensors(tmp_path / "plain").keys()
    assert lost
    with pytest.raises(UserError, match="cannot fill masks"):
        Predictor.load(tmp_path / "plain").fill("a [MASK] of")
    pretrain(again, world / "shards", tmp_path / "back", model=tmp_path / "plain", device="cpu")
    assert "no weights for masked_lm; they start at random" in capsys.readouterr().err
    back = tensors(tmp_path / "back")
    assert {key for key in first if not torch.allclose(first[key], back[key], atol=1e-5)} <= lost
    assert Predictor.load(tmp_path / "back").fill("a [MASK] of")


def test_saved_parts_are_joined_with_the_tables_that_they_share(whole) -> None:
    """Every parameter is trained: the joined network has no table beside those that it uses."""
    name, run = whole
    parts = {
        "discriminator": load_folder(run / "model").model,
        "generator": load_folder(run / "model" / "generator").model,
    }
    joined = ReplacedToken.of_parts(settings(name).objective, parts)
    total(joined, counted(draw_batch(packed=True))).backward()
    assert [name for name, p in joined.named_parameters() if p.grad is None] == []
    assert joined.discriminator.masked_lm.decoder.weight is joined.encoder.embeddings.tokens.weight


def on_two(data: Path, folder: Path) -> None:
    for name in RECIPES:
        pretrain(settings(name), data, folder / name, device="cpu")


@pytest.mark.slow
def test_two_ranks_equal_one(whole, world: Path, tmp_path: Path) -> None:
    name, run = whole
    on_ranks(on_two, world / "shards", tmp_path)
    for key, tensor in tensors(tmp_path / name).items():
        assert torch.allclose(tensor, tensors(run)[key], atol=1e-5), key


def test_a_negative_share_is_refused() -> None:
    with pytest.raises(UserError, match=r"objective\.fill_every must be at least 0, not -1"):
        ReplacedTokenConfig(fill_every=-1)

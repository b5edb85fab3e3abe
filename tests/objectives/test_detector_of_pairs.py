"""Replaced-token detection with `next_sentence`: the discriminator also predicts the label of a segment pair."""

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
from test_replaced_token import CLS, SEP, draw_batch, masked_batch, resumed, total, train
from torch import Tensor
from torch.testing import assert_close

from bertsmith.batch import Batch, Label, bucketed
from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import load_folder
from bertsmith.formats.onnx import export_onnx
from bertsmith.model import heads
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig
from bertsmith.model.sizes import electra_config
from bertsmith.objectives import replaced_token
from bertsmith.objectives.discriminator import Discriminator
from bertsmith.objectives.replaced_token import ReplacedToken, corrupt
from bertsmith.objectives.settings import ReplacedTokenConfig
from bertsmith.pages.report.page_of_runs import report
from bertsmith.pretraining.loader import PAIR
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import recipe
from bertsmith.training import runlog
from bertsmith.training.settings import TrainConfig
from bertsmith.verify import onnx_parity, parity

pytestmark = pytest.mark.usefixtures("one_thread")
EVERY, WEIGHT = 2, 3
SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "max_positions": 64}
RUN = [f"model.{name}={size}" for name, size in SIZES.items()]
RUN += ["data.max_length=24", "train.steps=6", "train.batch_size=10", "train.micro_batch_size=4", "train.save_every=3"]
RUN += ["train.evaluate_every=3", "model.num_segments=2", "objective.next_sentence=true"]
RUN += [f"objective.pair_weight={WEIGHT}"]
FILLS = f"objective.fill_every={EVERY}"
# A family, whether it also fills masks, the kind of its pairs, and its class in `transformers`.
RUNS = {
    "electra": ("electra-tiny", ["data.pairs=order"], "ElectraForPreTraining"),
    "electra-fill": ("electra-tiny", ["data.pairs=next", FILLS], "ElectraForPreTraining"),
    "deberta": ("deberta-v3-tiny", ["data.pairs=next"], "DebertaV2Model"),
    "deberta-fill": ("deberta-v3-tiny", ["data.pairs=order", FILLS], "DebertaV2ForMaskedLM"),
}
POOLERS = {"electra": "classifier.dense.weight", "deberta": "pooler.dense.weight"}


def settings(name: str, *changes: str):
    base, own, _ = RUNS[name]
    return override(recipe(base), [*RUN, *own, *changes])


def model_of(name: str) -> ReplacedToken:
    config = settings(name, "model.hidden_dropout=0.0", "model.attention_dropout=0.0")
    return randomise(ReplacedToken(Encoder(replace(config.model, vocab_size=99)), config.objective)).eval()


def paired(batch: Batch, labels, fills: bool = False) -> Batch:
    """The batch with the label of each pair, and with the counts that the loader gives it."""
    batch = batch.with_labels({"next": Label(np.array(labels), PAIR)})
    return replace(batch, counts={**batch.counts, **({"fill": batch.counts["mlm"]} if fills else {})})


def draw_pairs(packed: bool, fills: bool = False) -> Batch:
    return paired(draw_batch(packed), [0, 1, 1, 0], fills)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", RUNS)
def test_the_pair_loss_is_that_of_the_pooled_first_state_of_the_corrupted_text(name, packed, monkeypatch) -> None:
    fills = name.endswith("fill")
    model, batch = model_of(name), draw_pairs(packed, fills)
    sampled = (batch.labels["targets"] - 4) % 94 + 5
    for module in (heads, replaced_token):
        monkeypatch.setattr(module, "sample", lambda *_: sampled)
    found = model(batch)

    network, made = model.discriminator, corrupt(batch, sampled, EVERY if fills else 0).batch
    states = network.encoder(made).flatten(0, -2)[batch.layout.firsts]
    head = network.next_sentence
    scores = head.output(F.gelu(head.pooler.dense(states)))
    targets = torch.tensor([0, 1, 1, 0])
    loss = -scores.log_softmax(-1)[torch.arange(4), targets].sum()
    assert_close(found["nsp"], loss)
    assert found["nsp_accuracy"] == (scores.argmax(-1) == targets).sum()
    weights = {"mlm": 1.0, "detection": 50.0, "nsp": WEIGHT, **({"fill": 1.0} if fills else {})}
    parts = [weight * found[name] / batch.counts[name] for name, weight in weights.items()]
    assert_close(total(model, batch), sum(parts))
    assert found.keys() == {*weights, *(f"{name}_accuracy" for name in weights)}

    assert_close(network.logits(made)["nsp"], scores)
    measured = model.measures(batch)
    assert_close(measured["nsp_loss"][0], loss)
    assert measured["nsp_loss"][1] == measured["nsp_accuracy"][1] == 4
    total(model, batch).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", RUNS)
def test_packed_padded_and_bucketed_batches_have_equal_losses_and_gradients(name: str, monkeypatch) -> None:
    fills, found = name.endswith("fill"), []
    packed = draw_pairs(True, fills)
    drawn = torch.randint(5, 99, bucketed(packed).labels["targets"].shape)
    for batch in (packed, draw_pairs(False, fills), bucketed(packed)):
        monkeypatch.setattr(heads, "sample", lambda logits, *_: drawn[: len(logits)])
        model = model_of(name)
        losses = model(batch)
        total(model, batch).backward()
        found.append((losses, {name: p.grad for name, p in model.named_parameters()}))
    for losses, gradients in found[1:]:
        assert_close(losses, found[0][0], atol=1e-4, rtol=1e-5)
        assert_close(gradients, found[0][1], atol=1e-4, rtol=1e-4)


def test_without_the_setting_nothing_is_drawn_or_learnt() -> None:
    model = {}
    for pairs in (False, True):
        torch.manual_seed(0)
        config = replace(electra_config("tiny"), **SIZES, vocab_size=99)
        model[pairs] = Discriminator(Encoder(config), ReplacedTokenConfig(next_sentence=pairs))
    plain, more = (each.state_dict() for each in model.values())
    assert {name for name in more if name not in plain} == {
        f"next_sentence.{part}.{kind}" for part in ("pooler.dense", "output") for kind in ("weight", "bias")
    }
    assert all(torch.equal(tensor, more[name]) for name, tensor in plain.items())
    assert ReplacedToken.counts(ReplacedTokenConfig()) == {"mlm": "targets", "detection": "original"}


def pairs_of_words(seed: int, sequences: int = 16) -> Batch:
    """Two segments of a repeated word each, a low and a high one; the label is 1 where the high one comes first."""
    draw = np.random.default_rng(seed)
    words, swapped = draw.integers([5, 9], [9, 13], (sequences, 2)), draw.integers(0, 2, sequences)
    words = np.where(swapped[:, None] == 1, words[:, ::-1], words)
    original = np.repeat(words, 7, 1)
    original[:, 0], original[:, 6], original[:, -1] = CLS, SEP, SEP
    return paired(masked_batch(original.ravel(), np.full(sequences, 14), draw, 0.15, packed=True), swapped)


def test_one_network_learns_to_detect_and_the_order_of_segments() -> None:
    sizes = {**SIZES, "embedding_size": 16, "vocab_size": 13, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    torch.manual_seed(0)
    model = ReplacedToken(
        Encoder(replace(electra_config("tiny"), **sizes, init_std=0.2)),
        ReplacedTokenConfig(generator_size=0.5, disallow_correct=True, next_sentence=True, pair_weight=5.0),
    )
    train(model, pairs_of_words, steps=120)
    with torch.no_grad():
        sums = model.measures(pairs_of_words(999, 64))
    found = {name: float(value / count) for name, (value, count) in sums.items()}
    assert found["detection_recall"] > 0.5
    assert found["nsp_accuracy"] > 0.9


@pytest.fixture(scope="module", params=RUNS)
def whole(request: pytest.FixtureRequest, world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A run of six steps of each family, with heads for masks and without."""
    run = tmp_path_factory.mktemp("pairs") / "run"
    pretrain(settings(request.param), world / "shards", run, device="cpu")
    return request.param, run


def tensors(run: Path) -> dict[str, Tensor]:
    return load_file(run / "model" / "model.safetensors")


def test_a_resumed_run_gives_identical_bytes(whole, world: Path, tmp_path: Path) -> None:
    name, finished = whole
    resumed(settings(name), finished, world / "shards", tmp_path / "cut")


def test_scores_are_logged_and_reported(whole, tmp_path: Path) -> None:
    _, run = whole
    scores = [r for r in runlog.read(run) if "dev_loss" in r][-1]
    parts = scores["dev_mlm_loss"] + 50 * scores["dev_detection_loss"] + WEIGHT * scores["dev_nsp_loss"]
    assert scores["dev_loss"] == pytest.approx(parts + scores.get("dev_fill_loss", 0.0))
    assert 0 <= scores["dev_nsp_accuracy"] <= 100
    step = [r for r in runlog.read(run) if "nsp_loss" in r][-1]
    parts = step["mlm_loss"] + 50 * step["detection_loss"] + WEIGHT * step["nsp_loss"]
    assert step["loss"] == pytest.approx(parts + step.get("fill_loss", 0.0), rel=1e-5)
    assert 0.1 < step["nsp_loss"] < 3  # a mean over the pairs
    page = Path(report([run], tmp_path / "report.html")["page"]).read_text()
    assert "Accuracy of the sentence pairs" in page


def test_the_folder_opens_in_transformers_whose_classifier_has_the_pooler(whole) -> None:
    name, run = whole
    family, model = name.removesuffix("-fill"), load_folder(run / "model").model
    assert isinstance(model, Discriminator)
    assert model.next_sentence is not None
    assert model.fills_masks == name.endswith("fill")
    reference, info = getattr(transformers, RUNS[name][2]).from_pretrained(run / "model", output_loading_info=True)
    assert reference.config.architectures == [RUNS[name][2]]
    assert not info["missing_keys"]
    assert parity(run / "model", run / "model")["equal"]
    classes = {"electra": "ElectraForSequenceClassification", "deberta": "DebertaV2ForSequenceClassification"}
    classifier = getattr(transformers, classes[family]).from_pretrained(run / "model")
    pooler = model.next_sentence.pooler.dense.weight
    assert torch.equal(classifier.get_parameter(POOLERS[family]), pooler)
    ours = load_folder(run / "model", HeadConfig("single", ("a", "b")))
    assert torch.equal(ours.model.head.pooler.dense.weight, pooler)
    assert set(ours.missing) == {"head.output.weight", "head.output.bias"}


def test_it_is_fine_tuned(whole, world: Path, tmp_path: Path) -> None:
    _, run = whole
    config = FinetuneConfig("classify", train=TrainConfig(steps=2, batch_size=8))
    assert finetune(config, run, world / "train.csv", tmp_path / "tuned", device="cpu")["accuracy"] >= 0
    assert load_folder(tmp_path / "tuned" / "model").missing == ()


def test_all_outputs_are_exported_to_onnx(whole, tmp_path: Path) -> None:
    name, run = whole
    export_onnx(load_folder(run / "model"), tmp_path / "onnx")
    found = onnx_parity(tmp_path / "onnx", run / "model")
    outputs = ["detection", *(["mlm"] if name.endswith("fill") else []), "nsp"]
    assert list(found["differences"]) == [f"model.onnx {output}_logits" for output in outputs]
    assert found["equal"]


def test_the_head_is_continued_dropped_and_made_anew(whole, world, tmp_path, capsys) -> None:
    name, run = whole
    still = ["train.steps=1", "train.learning_rate=1e-9", "train.evaluate_every=0"]
    again = settings(name, *still)
    pretrain(again, world / "shards", tmp_path / "again", model=run, device="cpu")
    first, second = tensors(run), tensors(tmp_path / "again")
    assert first.keys() == second.keys()
    assert all(torch.allclose(tensor, second[key], atol=1e-6) for key, tensor in first.items())
    capsys.readouterr()
    plain = settings(name, *still, "objective.pair_weight=1", "objective.next_sentence=false")
    pretrain(plain, world / "shards", tmp_path / "plain", model=run, device="cpu")
    assert "the discriminator's pair head is dropped" in capsys.readouterr().err
    lost = first.keys() - tensors(tmp_path / "plain").keys()
    assert lost == {
        key
        for key in first
        if key.startswith(("next_sentence.", POOLERS[name.removesuffix("-fill")].rpartition(".")[0]))
    }
    pretrain(again, world / "shards", tmp_path / "back", model=tmp_path / "plain", device="cpu")
    assert "no weights for next_sentence; they start at random" in capsys.readouterr().err
    back = tensors(tmp_path / "back")
    assert {key for key in first if not torch.allclose(first[key], back[key], atol=1e-5)} <= lost


def on_two(data: Path, folder: Path, name: str) -> None:
    for parallel in ("ddp", "fsdp"):
        pretrain(settings(name, f"train.parallel={parallel}"), data, folder / parallel, device="cpu")


@pytest.mark.slow
def test_two_ranks_equal_one(whole, world: Path, tmp_path: Path) -> None:
    name, run = whole
    on_ranks(on_two, world / "shards", tmp_path, name)
    for parallel in ("ddp", "fsdp"):
        found = tensors(tmp_path / parallel)
        for key, tensor in tensors(run).items():
            assert torch.allclose(tensor, found[key], atol=1e-5), (parallel, key)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["data.pairs=full"], "data.pairs=full has no pairs to learn from: set objective.next_sentence=false"),
        (["data.pairs=contiguous"], "data.pairs=contiguous has no pairs to learn from"),
        (["objective.next_sentence=false"], "objective.pair_weight=3 is the weight of a loss that is switched off"),
        (["objective.pair_weight=0"], "objective.pair_weight must be above 0"),
    ],
)
def test_contradictory_settings_are_refused_with_the_fix(changes: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        settings("electra", *changes)
    assert words in str(error.value)


def test_a_family_without_a_detector_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(UserError, match=r"set model\.family=electra or deberta or deberta-v2$"):
        override(recipe("bert-tiny"), ["objective.kind=replaced-token", "objective.next_sentence=true"])


def test_pairs_without_the_loss_are_allowed() -> None:
    config = override(recipe("electra-tiny"), ["data.pairs=order"])
    assert (config.data.pairs, config.objective) == ("order", recipe("electra-tiny").objective)

"""Encoders with one direction: attention mask, parity with `transformers`, training, saving and heads."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from variants import randomise

from bertsmith.batch import Example, collate
from bertsmith.config import override
from bertsmith.conversion import convert
from bertsmith.errors import UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.inference.files import evaluate
from bertsmith.inference.predictor import Predictor
from bertsmith.model.attention import Trace
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.causal_lm import CausalLM, next_tokens
from bertsmith.objectives.settings import CausalLMConfig
from bertsmith.pretraining.run import pretrain
from bertsmith.recipes import TABLE_6, TABLE_8, bert, left_to_right, masked, no_nsp, recipe, right_to_left, sized

DIRECTIONS = ("left-to-right", "right-to-left")
LENGTHS = (5, 31, 2, 17, 8, 30)
SMALL = {"hidden_size": 32, "num_heads": 2, "num_layers": 2, "intermediate_size": 64, "max_positions": 48}
TINY = [*(f"model.{name}={size}" for name, size in SMALL.items()), "data.max_length=32", "data.long_length=48"]
QUICK = ["train.steps=6", "train.batch_size=8", "train.learning_rate=1e-3", "train.evaluate_every=0"]
pytestmark = pytest.mark.usefixtures("one_thread")
directions = pytest.mark.parametrize("direction", DIRECTIONS)
layouts = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


def encoder_of(direction: str, **changes) -> Encoder:
    return randomise(Encoder(EncoderConfig(vocab_size=99, direction=direction, **{**SMALL, **changes}))).eval()


def examples(lengths=LENGTHS, seed: int = 0) -> list[Example]:
    draw = np.random.default_rng(seed)
    return [Example(draw.integers(5, 99, n), (np.arange(n) > n // 2).astype(np.int64)) for n in lengths]


def rows_of(states: torch.Tensor, batch) -> list[torch.Tensor]:
    flat = states if states.dim() == 2 else states[batch.layout.mask]
    return list(flat.split(list(LENGTHS)))


@directions
@layouts
@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@torch.inference_mode()
def test_a_token_attends_only_to_its_direction(direction, packed, norm_first):
    encoder = encoder_of(direction, norm_first=norm_first)
    before, place = examples(), 9
    changed = [replace(e, tokens=e.tokens.copy()) for e in before]
    changed[1].tokens[place] = 7 if changed[1].tokens[place] != 7 else 8
    first, second = (rows_of(encoder(b), b) for b in (collate(x, packed=packed) for x in (before, changed)))
    same = [0, 2, 3, 4, 5]
    for row in same:
        assert_close(first[row], second[row], atol=0, rtol=0)
    blind, seeing = slice(None, place), slice(place, None)
    if direction == "right-to-left":
        blind, seeing = slice(place + 1, None), slice(None, place + 1)
    assert_close(first[1][blind], second[1][blind], atol=0, rtol=0)
    assert (first[1][seeing] - second[1][seeing]).abs().amax(-1).min() > 1e-4


@directions
@torch.inference_mode()
def test_every_kernel_computes_the_same_states(direction):
    encoder, padded, packed = encoder_of(direction), collate(examples(), packed=False), collate(examples(), packed=True)
    expected = rows_of(encoder(padded), padded)
    for batch in (packed, padded):
        trace = Trace()
        for found in (encoder(batch), encoder(batch, trace)):
            for a, b in zip(rows_of(found, batch), expected, strict=True):
                assert_close(a, b, atol=1e-5, rtol=0)
        weights = trace.attention[0]
        blind = torch.ones(31, 31).triu(1) if direction == "left-to-right" else torch.ones(31, 31).tril(-1)
        assert not (weights * blind).any()
        assert_close(weights[1].sum(-1), torch.ones(2, 31), atol=1e-5, rtol=0)
    equal = collate(examples((8,) * 4), packed=True)  # of equal lengths, so without groups
    one = collate(examples((8,) * 4), packed=False)
    assert_close(encoder(equal).view(4, 8, -1), encoder(one), atol=1e-5, rtol=0)


@directions
def test_padding_does_not_change_gradients(direction):
    encoder, gradients = encoder_of(direction), []
    for packed in (False, True):
        batch = collate(examples(), packed=packed)
        encoder.zero_grad()
        states = torch.cat(rows_of(encoder(batch), batch))
        (states * torch.linspace(-1, 1, states.numel()).view_as(states)).sum().backward()
        gradients.append([p.grad.clone() for p in encoder.parameters()])
    for a, b in zip(*gradients, strict=True):
        assert torch.isfinite(a).all()
        assert_close(a, b, atol=1e-4, rtol=1e-4)


def their_causal(folder, tokenizer, classes: str = "BertLMHeadModel"):
    import transformers

    architecture = getattr(transformers, classes)
    more = {} if classes.startswith("Bert") else {"pad_token_id": 0}
    config = architecture.config_class(
        vocab_size=tokenizer.vocab_size, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=128, max_position_embeddings=49, is_decoder=True, use_cache=False, **more,
    )  # fmt: skip
    theirs = randomise(architecture(config)).eval()
    theirs.save_pretrained(folder)
    tokenizer.save(folder)
    return theirs


@layouts
@pytest.mark.parametrize("classes", ["BertLMHeadModel", "RobertaPreLayerNormForCausalLM"])
def test_logits_losses_and_gradients_equal_those_of_transformers(tmp_path, tiny_tokenizer, packed, classes):
    theirs = their_causal(tmp_path / "a", tiny_tokenizer, classes)
    loaded = load_folder(tmp_path / "a")
    ours = loaded.model.eval()
    assert isinstance(ours, CausalLM)
    assert not loaded.missing
    rows, padded = examples(), collate(examples(), packed=False)
    batch = collate(rows, packed=packed)
    words = next_tokens(np.concatenate([e.tokens for e in rows]), np.array(LENGTHS), "left-to-right")
    places = words.positions if packed else np.flatnonzero(padded.layout.mask.numpy())[words.positions]
    batch.labels.update(masked=torch.from_numpy(places), targets=torch.from_numpy(words.targets))
    mask = padded.layout.mask
    inputs = {"input_ids": padded.tokens, "token_type_ids": padded.segments, "attention_mask": mask.long()}
    if classes.startswith("Roberta"):
        inputs["token_type_ids"] = torch.zeros_like(padded.segments)
        batch = replace(batch, segments=torch.zeros_like(batch.segments))
    output = theirs(**inputs, labels=padded.tokens.masked_fill(~mask, -100))
    flat = output.logits[mask][torch.from_numpy(words.positions)]
    assert_close(ours.logits(batch)["lm"], flat, atol=1e-5, rtol=0)
    loss = ours(batch)["lm"] / len(words.positions)
    assert_close(loss, output.loss, atol=1e-5, rtol=0)
    loss.backward(), output.loss.backward()
    assert_close(
        ours.encoder.embeddings.tokens.weight.grad,
        theirs.get_input_embeddings().weight.grad,
        atol=1e-5,
        rtol=1e-4,
    )
    layer = ours.encoder.layers[0].attention.qkv.weight.grad.chunk(3)[0]
    their_layer = theirs.base_model.encoder.layer[0].attention.self.query.weight.grad
    assert_close(layer, their_layer, atol=1e-5, rtol=1e-4)


def test_targets_are_the_next_tokens_of_each_direction():
    tokens = np.array([2, 10, 11, 3, 2, 20, 3])
    forwards = next_tokens(tokens, np.array([4, 3]), "left-to-right")
    assert forwards.positions.tolist() == [0, 1, 2, 4, 5]
    assert forwards.targets.tolist() == [10, 11, 3, 20, 3]
    backwards = next_tokens(tokens, np.array([4, 3]), "right-to-left")
    assert backwards.positions.tolist() == [1, 2, 3, 5, 6]
    assert backwards.targets.tolist() == [2, 10, 11, 2, 20]


def test_transformers_opens_a_saved_left_to_right_model(tmp_path, tiny_tokenizer):
    from transformers import AutoModelForCausalLM

    config = EncoderConfig(vocab_size=tiny_tokenizer.vocab_size, direction="left-to-right", **SMALL)
    ours = randomise(CausalLM(Encoder(config))).eval()
    save_folder(tmp_path / "a", ours, tiny_tokenizer, Notes())
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (values["is_decoder"], values["architectures"]) == (True, ["BertLMHeadModel"])
    assert "direction" not in values
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "a").eval()
    tokens = torch.randint(5, 60, (2, 12))
    batch = collate([Example(t.numpy(), np.zeros(12, np.int64)) for t in tokens], packed=True)
    batch.labels["masked"] = torch.arange(24)
    assert_close(ours.logits(batch)["lm"].view(2, 12, -1), theirs(input_ids=tokens).logits, atol=1e-5, rtol=0)
    report = convert(tmp_path / "a", tmp_path / "b", "hf", verify=True)
    assert report["parity"]["equal"]
    assert report["parity"]["class"] == "BertLMHeadModel"
    assert "logits lm" in report["parity"]["differences"]
    with pytest.raises(UserError, match="reads in one direction"):
        convert(tmp_path / "a", tmp_path / "c", "tf1")


def test_transformers_has_no_class_for_right_to_left_models(tmp_path, tiny_tokenizer):
    from transformers import AutoModel

    config = EncoderConfig(vocab_size=tiny_tokenizer.vocab_size, direction="right-to-left", **SMALL)
    save_folder(tmp_path / "a", CausalLM(Encoder(config)), tiny_tokenizer, Notes())
    with pytest.raises(ValueError, match="bertsmith-right-to-left-bert"):
        AutoModel.from_pretrained(tmp_path / "a")
    loaded = load_folder(tmp_path / "a")
    assert loaded.model.encoder.config.direction == "right-to-left"
    assert "no class" in loaded.notes.remark
    assert not loaded.missing


HEADS = {
    "single": HeadConfig("single", ("a", "b", "c")),
    "regression": HeadConfig("regression"),
    "choice": HeadConfig("choice", num_choices=2),
    "tags": HeadConfig("tags", ("a", "b")),
    "span": HeadConfig("span"),
}
FORMS = {
    "as it is": {},
    "bilstm": {"bilstm_layers": 1},
    "beside": {"beside": True},
    "both": {"bilstm_layers": 2, "beside": True},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", HEADS)
def test_heads_pool_the_last_state_and_are_saved(tmp_path, tiny_tokenizer, kind, form):
    config = EncoderConfig(vocab_size=tiny_tokenizer.vocab_size, direction="left-to-right", **SMALL)
    model = randomise(TaskModel(Encoder(config), replace(HEADS[kind], **FORMS[form]))).eval()
    batch, padded = collate(examples(), packed=True), collate(examples(), packed=False)
    scores = model.logits(batch)
    expected = model.logits(padded)
    assert_close(scores, expected[padded.layout.mask] if kind == "tags" else expected, atol=1e-4, rtol=1e-4)
    for place in (0, -1):  # both ends of a sequence change its logits
        changed = examples()
        changed[1].tokens[place] = 4
        difference = (model.scores(collate(changed, packed=True)) - model.scores(batch)).abs()
        if kind not in ("tags", "span"):
            assert difference[1].max() > 1e-4
            assert difference[0].max() == 0
    save_folder(tmp_path / "a", model, tiny_tokenizer, Notes())
    loaded = load_folder(tmp_path / "a")
    assert not loaded.missing
    assert loaded.model.head_config.own_form == model.head_config.own_form
    assert_close(loaded.model.eval().logits(batch), scores, atol=0, rtol=0)
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    assert values["model_type"].startswith("bertsmith-") == (form != "as it is")
    says = loaded.notes.remark
    if form != "as it is":
        assert "no class" in says
    else:
        assert ("its class pools the first token" in says) == (kind not in ("tags", "span"))


def test_a_classifier_that_pools_the_first_token_of_a_left_to_right_encoder_is_refused(tmp_path, tiny_tokenizer):
    config = EncoderConfig(vocab_size=tiny_tokenizer.vocab_size, direction="left-to-right", **SMALL)
    save_folder(tmp_path / "a", TaskModel(Encoder(config), HEADS["single"]), tiny_tokenizer, Notes())
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    assert values.pop("pooled") == "last"
    (tmp_path / "a" / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match="pools the first token"):
        load_folder(tmp_path / "a")


@pytest.fixture(scope="module")
def pretrained(world, tmp_path_factory):
    """A left-to-right and a right-to-left run."""
    folder = tmp_path_factory.mktemp("directions")
    for name, made in (("ltr", left_to_right("tiny")), ("rtl", right_to_left("tiny"))):
        scores = pretrain(override(made, [*TINY, *QUICK]), world / "shards", folder / name, device="cpu")
        assert scores["lm_loss"] > 0
        assert "mlm_loss" not in scores
    return folder


def test_the_causal_loss_decreases(world, pretrained, tmp_path):
    more = [*TINY, "train.steps=60", "train.batch_size=16", "train.learning_rate=5e-3", "train.evaluate_every=0"]
    scores = pretrain(override(left_to_right("tiny"), more), world / "shards", tmp_path / "run", device="cpu")
    before = json.loads((pretrained / "ltr" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert scores["lm_loss"] < before - 1.0
    predictor = Predictor.load(tmp_path / "run")
    with pytest.raises(UserError, match="reads in one direction\\), so it cannot fill"):
        predictor.fill("the [MASK]")


@pytest.mark.parametrize("form", ["", "bilstm_layers=1", "beside"])
def test_fine_tuning_learns_with_every_form_of_head(world, pretrained, tmp_path, form):
    setting = [f"beside={pretrained / 'rtl'}"] if form == "beside" else [form] if form else []
    quick = ["train.epochs=8", "train.batch_size=8", "train.learning_rate=5e-3", "data.max_length=16"]
    config = override(FinetuneConfig("classify"), [*quick, *setting])
    data = {"data": world / "train.csv", "dev": world / "dev.csv"}
    scores = finetune(config, pretrained / "ltr", out=tmp_path / "run", device="cpu", **data)
    assert scores["accuracy"] > 90
    assert evaluate(tmp_path / "run", world / "dev.csv", device="cpu")["accuracy"] == scores["accuracy"]


def test_the_second_encoder_reads_in_the_other_direction(world, pretrained, tmp_path):
    still = ["train.steps=1", "train.learning_rate=1e-9", "data.max_length=16", f"beside={pretrained / 'rtl'}"]
    config = override(FinetuneConfig("classify"), still)
    finetune(config, pretrained / "ltr", world / "train.csv", tmp_path / "still", device="cpu")
    model = load_folder(tmp_path / "still" / "model").model
    for name, encoder in zip(("ltr", "rtl"), model.encoders, strict=True):
        start = load_folder(pretrained / name / "model").model.encoder
        for a, b in zip(start.parameters(), encoder.parameters(), strict=True):
            assert_close(a, b, atol=1e-7, rtol=0)
    for model, beside, says in (("ltr", "ltr", "direction"), ("rtl", "rtl", "direction")):
        config = FinetuneConfig("classify", beside=str(pretrained / beside))
        with pytest.raises(UserError, match=says):
            finetune(config, pretrained / model, world / "train.csv", tmp_path / "run", device="cpu")
    config = FinetuneConfig("classify", beside=str(pretrained / "rtl"))
    with pytest.raises(UserError, match="this one sees both"):
        finetune(config, world / "run", world / "train.csv", tmp_path / "run", device="cpu")
    with pytest.raises(UserError, match="bilstm_layers is for one that is trained"):
        override(FinetuneConfig("tag", bilstm_layers=1), ["features.variant=last"])


def test_each_ablation_changes_one_setting():
    base = bert("base")
    assert replace(no_nsp("base"), objective=base.objective, recipe=base.recipe) == base
    ltr = left_to_right("base")
    assert ltr.objective == CausalLMConfig()
    assert replace(ltr, model=base.model, objective=base.objective, recipe=base.recipe) == base
    assert ltr.model == replace(base.model, direction="left-to-right")
    assert sized(12, 768, 12).model == base.model
    assert [recipe(f"bert-{a}-{b}-{c}").model.num_heads for a, b, c in TABLE_6] == [12, 3, 12, 12, 16, 16]
    assert masked(80, 10, 10).data == base.data
    policies = [masked(*shares).data.masking for shares in TABLE_8]
    assert [(p.mask_share, p.random_share) for p in policies] == [
        (0.8, 0.1), (1.0, 0.0), (0.8, 0.2), (0.8, 0.0), (0.0, 0.8), (0.0, 1.0)
    ]  # fmt: skip
    with pytest.raises(UserError, match="add up to 90"):
        masked(80, 10, 0)
    with pytest.raises(UserError, match=r"model\.direction is left-to-right: set objective\.kind=causal-lm"):
        override(bert("tiny"), ["model.direction=left-to-right"])
    with pytest.raises(UserError, match=r"predicts the next token, .* set model\.direction=left-to-right"):
        override(bert("tiny"), ["objective.kind=causal-lm"])
    with pytest.raises(UserError, match="'left_to_right' is not one of"):
        override(no_nsp("tiny"), ["model.direction=left_to_right"])

"""Dropout is applied where `transformers` applies it: with equal masks the logits are equal."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from comparison import CHOICES, VOCAB, draw_batch, our_loss, our_scores, run_theirs, same, same_gradients, their_scores
from variants import their_model

from bertsmith.batch import Batch, Example, collate
from bertsmith.formats.hf import load_folder
from bertsmith.model.attention import Trace
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.model.recurrent import FeatureConfig

pytestmark = pytest.mark.usefixtures("one_thread", "fixed_dropout")
RATES = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.5}
OUTPUT = {"classifier_dropout": 0.7}  # spans have no dropout before their output layer
# The rates of each family, with every field that it has for its heads.
FAMILIES = {
    "roberta": RATES | OUTPUT,
    "albert": {"hidden_dropout_prob": 0.0, "classifier_dropout_prob": 0.7},  # they drop no feed-forward output
    "distilbert": {"dropout": 0.0, "seq_classif_dropout": 0.7, "qa_dropout": 0.6},  # they drop no attention output
    "electra": RATES | OUTPUT | {"summary_last_dropout": 0.6},
}


def drop(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Dropout whose mask depends on the last dimension and the rate alone, so both libraries drop the same elements."""
    if not training or p == 0.0:
        return x
    kept = (torch.arange(x.shape[-1]) * 7 + 3) % 10 >= round(10 * p)
    return x * kept / (1 - p)


def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False) -> torch.Tensor:
    """Scaled dot-product attention with the dropout above."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    return drop(scores.softmax(-1), dropout_p) @ v


@pytest.fixture
def fixed_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "dropout", drop)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", ["mlm+nsp", "single", "tags", "span"])
def test_logits_with_equal_masks_equal_those_of_transformers(kind: str, packed: bool, tmp_path, tiny_tokenizer) -> None:
    size = max(VOCAB, tiny_tokenizer.vocab_size)
    rates = RATES if kind in ("mlm+nsp", "span") else RATES | OUTPUT
    theirs = their_model("bert", kind, size, attn_implementation="eager", **rates)
    same_in_training(theirs, kind, "bert", packed, tmp_path, tiny_tokenizer)


@pytest.mark.parametrize("kind", ["single", "choice", "tags", "span"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_dropout_in_the_places_of_its_heads(family: str, kind: str, tmp_path, tiny_tokenizer) -> None:
    size, heads = max(VOCAB, tiny_tokenizer.vocab_size), {"num_choices": CHOICES} if kind == "choice" else {}
    theirs = their_model(family, kind, size, attn_implementation="eager", **FAMILIES[family], **heads)
    same_in_training(theirs, kind, family, True, tmp_path, tiny_tokenizer)


def same_in_training(theirs, kind: str, variant: str, packed: bool, folder: Path, tokenizer) -> None:
    theirs.save_pretrained(folder)
    tokenizer.save(folder)
    model = load_folder(folder).model.train()
    padded, batch = (draw_batch(kind, packed=form, variant=variant) for form in (False, packed))
    without = our_scores(model.eval(), kind, batch)
    output = run_theirs(theirs.train(), kind, padded)
    for name, scores in our_scores(model.train(), kind, batch).items():
        same(scores, their_scores(output, kind, padded)[name], name)
        finite = scores.isfinite()
        assert not torch.allclose(scores[finite], without[name][finite], atol=1e-2)
    if kind != "span":  # their span loss includes padding
        our_loss(model, batch).backward()
        output.loss.backward()
        same_gradients(model, theirs)


def small_batch() -> tuple[EncoderConfig, Batch]:
    config = EncoderConfig(VOCAB, hidden_size=20, num_layers=2, num_heads=2, intermediate_size=40)
    rows = [Example(torch.arange(5, 5 + n).numpy(), torch.zeros(n, dtype=torch.long).numpy()) for n in (7, 3, 9)]
    return config, collate(rows, packed=True)


def test_a_trace_does_not_change_the_dropout_masks() -> None:
    config, batch = small_batch()
    encoder = Encoder(config).train()
    same(encoder(batch, Trace()), encoder(batch))


def test_the_head_may_have_its_own_dropout_rate() -> None:
    """`HeadConfig.dropout` and the rates of the encoder are separate settings."""
    config, batch = small_batch()
    for head in (HeadConfig("single", ("a", "b"), dropout=0.6), HeadConfig("tags", ("a", "b"), dropout=0.6)):
        model = TaskModel(Encoder(config), head).train()
        hidden = model.encoder(batch)
        if head.kind == "single":
            hidden = model.head.pooler(hidden[batch.layout.firsts])
        same(model.scores(batch), model.head.output(drop(hidden, 0.6)), head.kind)


def test_a_bilstm_on_frozen_states_drops_its_input_and_its_output() -> None:
    config, _ = small_batch()
    head = HeadConfig("tags", ("a", "b"), dropout=0.4, features=FeatureConfig("last", hidden_size=10, num_layers=1))
    model = TaskModel(Encoder(config), head).train()
    states = torch.randn(6, 1, 20)
    batch = collate([Example(torch.zeros(6).long().numpy(), torch.zeros(6).long().numpy())], packed=True)
    hidden = model.head.lstm(drop(states[:, 0], 0.4)[:, None])[0][:, 0]
    same(model.head(states, batch.layout), model.head.output(drop(hidden, 0.4)))

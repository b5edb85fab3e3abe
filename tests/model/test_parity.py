"""Our models have the logits, losses and gradients of `transformers`, padded and packed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from comparison import LENGTHS, VOCAB, draw_batch, our_loss, run_theirs, same, same_gradients, their_scores
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from variants import VARIANTS, make

from bertsmith.batch import NEAR
from bertsmith.errors import UserError
from bertsmith.model import kernels
from bertsmith.model.attention import Trace
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.pooling import Pooler
from bertsmith.model.sizes import SIZES, encoder_config

PUBLISHED = {"tiny": 4.4e6, "mini": 11.2e6, "small": 28.8e6, "medium": 41.4e6, "base": 109.5e6, "large": 335.1e6}
pytestmark = pytest.mark.usefixtures("one_thread")
variants = pytest.mark.parametrize("variant", VARIANTS)
layouts = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])


@layouts
def test_the_span_loss_equals_theirs_without_padding(packed, pair_of):
    theirs, model = pair_of("span")
    padded, batch = (draw_batch("span", form, lengths=(12,) * 5) for form in (False, packed))
    loss, wanted = our_loss(model, batch), run_theirs(theirs, "span", padded).loss
    same(loss, wanted, "loss")
    loss.backward()
    wanted.backward()
    same_gradients(model, theirs)


@pytest.mark.parametrize("name", ["mlm", "nsp"])
def test_each_pretraining_loss_alone_is_equal(name, pair_of):
    theirs, model = pair_of("mlm+nsp")
    batch = draw_batch("mlm+nsp", packed=False)
    logits = their_scores(run_theirs(theirs, "mlm+nsp", batch), "mlm+nsp", batch)[name]
    target = batch.labels["targets" if name == "mlm" else "next"]
    same(model(batch)[name] / batch.counts[name], F.cross_entropy(logits, target))


def test_masked_lm_without_next_sentence_needs_no_pair_labels(pair_of):
    _, model = pair_of("mlm")
    batch = draw_batch("mlm", packed=True)
    without = replace(batch, labels={name: batch.labels[name] for name in ("masked", "targets")})
    assert_close(model(without), model(batch))


@layouts
@pytest.mark.parametrize("variant", ["bert", "pre-norm"])
@pytest.mark.parametrize(
    "changes",
    [{"hidden_act": name} for name in ("gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")]
    + [{"layer_norm_eps": 0.1}, {"num_attention_heads": 1}, {"num_hidden_layers": 1, "intermediate_size": 40}],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
def test_other_configurations_are_equal(changes, variant, packed, pair_of):
    theirs, model = pair_of("mlm", variant, **changes)
    padded, batch = draw_batch("mlm", packed=False, variant=variant), draw_batch("mlm", packed, variant=variant)
    output = run_theirs(theirs, "mlm", padded)
    for name, values in their_scores(output, "mlm", padded).items():
        same(model.logits(batch)[name], values, name)


@pytest.mark.parametrize("pad", [1, 3])
def test_positions_that_start_after_the_padding_id_are_loaded(pad, pair_of):
    theirs, model = pair_of("mlm", "pre-norm", pad_token_id=pad, max_position_embeddings=31 + pad + 1)
    assert model.encoder.config.max_positions == max(LENGTHS) == 31
    batch = draw_batch("mlm", packed=False)
    output = run_theirs(theirs, "mlm", batch)
    same(model.logits(batch)["mlm"], their_scores(output, "mlm", batch)["mlm"])


@layouts
@variants
@pytest.mark.parametrize("dropout", [False, True], ids=["evaluating", "training"])
def test_gradient_checkpointing_gives_equal_losses_and_gradients(variant, packed, dropout, tiny_tokenizer):
    model = make("mlm", tiny_tokenizer, vocab_size=VOCAB, **VARIANTS[variant].ours).model
    batch, calls, results = draw_batch("mlm", packed, variant=variant), [], []
    model.train(dropout).encoder.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    for checkpointing in (False, True):
        model.encoder.gradient_checkpointing = checkpointing
        model.zero_grad()
        torch.manual_seed(0)
        loss = our_loss(model, batch)
        loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    same(*results)
    assert len(calls) == 3  # in the first forward pass, in the second, and again in its backward pass


def test_checkpointing_does_not_record_a_trace_twice(pair_of):
    _, model = pair_of("encoder")
    model.encoder.gradient_checkpointing = True
    trace = Trace()
    model.encoder(draw_batch("single", packed=True), trace=trace).sum().backward()
    assert len(trace.attention) == len(model.encoder.layers)


class Largest(TorchDispatchMode):
    """The size of the largest output of any operation, forward and backward."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for value in output if isinstance(output, (tuple, list)) else [output]:
            self.elements = max(self.elements, value.numel() if isinstance(value, torch.Tensor) else 0)
        return output


def test_packed_attention_never_spans_the_batch(monkeypatch):
    """There is no T × T mask or score matrix: attention runs on padded groups, and no tensor is as large as T × T."""
    lengths = np.random.default_rng(0).integers(1, 40, 80)
    batch, total = draw_batch("single", True, lengths), int(lengths.sum())
    model = Encoder(EncoderConfig(VOCAB, 64, 2, 4, 128, max_positions=40)).eval()
    seen, kernel = [], kernels.F.scaled_dot_product_attention

    def recorded(q, k, v, attn_mask=None, **options):
        seen.append((q.shape, k.shape, None if attn_mask is None else attn_mask.shape))
        return kernel(q, k, v, attn_mask=attn_mask, **options)

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", recorded)
    with Largest() as largest:
        model(batch).sum().backward()
    assert 0 < largest.elements < total * total / 4
    for queries, keys, masked in seen:
        assert queries[-2] == keys[-2] <= max(lengths)
        assert masked is None or masked == (queries[0], 1, 1, queries[-2])
    places = sum(queries[0] * queries[-2] for queries, _, _ in seen) / len(model.layers)
    assert total <= places < total * 8 / 7 + NEAR * len(lengths)


@pytest.mark.parametrize("size", SIZES)
def test_parameter_counts_of_the_published_sizes(size):
    from transformers import BertConfig, BertModel

    config = encoder_config(size)
    theirs = BertConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        intermediate_size=config.intermediate_size,
    )
    with torch.device("meta"):
        parts = [Encoder(config), Pooler(config)]
        expected = BertModel(theirs).num_parameters()
    count = sum(p.numel() for part in parts for p in part.parameters())
    assert count == expected == pytest.approx(PUBLISHED[size], rel=0.01)


@layouts
def test_a_sequence_longer_than_the_positions_is_refused(packed):
    encoder = Encoder(EncoderConfig(VOCAB, 32, 1, 2, 32, max_positions=16))
    encoder(draw_batch("single", packed, lengths=(3, 16)))
    with pytest.raises(UserError, match=r"17 tokens.* 16 positions"):
        encoder(draw_batch("single", packed, lengths=(3, 17)))


def test_variants_have_the_expected_parameters():
    config = EncoderConfig(VOCAB, 64, 3, 4, 128, max_positions=40)
    post, pre = Encoder(config).state_dict(), Encoder(replace(config, norm_first=True)).state_dict()
    assert pre.keys() - post.keys() == {"final_norm.weight", "final_norm.bias"}
    assert post.keys() < pre.keys()
    for norm_first, full in ((False, post), (True, pre)):
        without = Encoder(replace(config, norm_first=norm_first, bias=False)).state_dict()
        assert without.keys() == {name for name in full if not name.endswith("bias")}


def test_a_pre_norm_encoder_whose_sublayers_give_zero_passes_the_embeddings_through():
    """The residual stream of a pre-norm encoder is normalised only at the end."""
    encoder = Encoder(EncoderConfig(VOCAB, 64, 3, 4, 128, max_positions=40, norm_first=True, norm_eps=1e-9)).eval()
    batch, trace = draw_batch("single", packed=True), Trace()
    with torch.no_grad():
        for layer in encoder.layers:
            layer.attention.output.weight.zero_()
            layer.feed_forward.outer.weight.zero_()
        encoder(batch, trace)
    same(trace.hidden[0], trace.hidden[2])
    same(trace.hidden[3], encoder.final_norm(trace.hidden[0]))


@variants
@layouts
def test_the_states_of_selected_rows_equal_those_of_a_full_pass(tiny_tokenizer, variant: str, packed: bool) -> None:
    model = make("mlm", tiny_tokenizer, vocab_size=VOCAB, **VARIANTS[variant].ours).model
    batch = draw_batch("mlm", packed, variant=variant)
    rows = torch.cat([batch.labels["masked"], batch.layout.firsts])
    gradients = []
    for states in (model.encoder(batch, rows=rows), batch.layout.flat(model.encoder(batch)).index_select(0, rows)):
        model.zero_grad()
        states.square().sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        assert states.shape == (len(rows), model.encoder.config.hidden_size)
    assert_close(model.encoder(batch, rows=rows), batch.layout.flat(model.encoder(batch))[rows], atol=1e-5, rtol=0)
    assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)
    traced = model.encoder(batch, Trace(), rows)
    assert_close(traced, model.encoder(batch, rows=rows), atol=1e-5, rtol=0)

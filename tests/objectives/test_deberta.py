"""DeBERTa's mask decoder, its detector and its disentangled embeddings, beside references written from its papers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from comparison import draw_batch, our_loss, same
from conftest import randomise
from test_replaced_token import draw_batch as replaced_batch
from test_replaced_token import total
from torch import Tensor
from torch.testing import assert_close
from variants import DEBERTA, V2

from bertsmith.batch import Batch, bucketed
from bertsmith.errors import UserError
from bertsmith.model.attention import Trace
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.objectives.discriminator import DELTA, TOKENS, Discriminator
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.replaced_token import ReplacedToken
from bertsmith.objectives.settings import MaskedLMConfig, ReplacedTokenConfig

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = EncoderConfig(99, 32, 4, 4, 48, max_positions=40, hidden_dropout=0.0, attention_dropout=0.0)
DEBERTA_V1 = {**DEBERTA, "key_bias": False}
DEBERTA_V2 = {**DEBERTA, **V2}
layouts = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
DECODED = MaskedLMConfig(next_sentence=False, mask_decoder=True)
V3 = ReplacedTokenConfig(generator_size=1.0, generator_layers=0.5, disentangled=True, context=True, mask_decoder=True)
VERSIONS = {"v1": DEBERTA_V1, "v2": DEBERTA_V2}


def one_segment(batch: Batch) -> Batch:
    return replace(batch, segments=torch.zeros_like(batch.segments), largest=(98, 0))


def decoded_by_equation(model: MaskedLM, states: Tensor, query: Tensor) -> Tensor:
    """One step of the decoder for one sequence: I asks the layer, keys and values are H (section 3.2); (L, H) each."""
    encoder = model.encoder
    layer, config = encoder.layers[-1], encoder.config
    attention, size, length = layer.attention, config.head_size, len(states)
    weight = attention.qkv.weight.unflatten(0, (3, -1))
    if config.key_bias:
        bias = attention.qkv.bias.unflatten(0, (3, -1))
    else:
        bias = [attention.query_bias, torch.zeros(config.hidden_size), attention.value_bias]
    q, k, v = (x @ w.T + b for x, w, b in zip((query, states, states), weight, bias, strict=True))
    relative = encoder.relative(config.max_positions, states.device)
    if config.relative_projections:
        of_keys, of_queries = attention.relative_keys(relative.table), attention.relative_queries(relative.table)
    else:
        of_queries, of_keys = (relative.table @ w.T + b for w, b in zip(weight[:2], bias[:2], strict=True))
    mixed = torch.zeros_like(q)
    for head in range(config.num_heads):
        part = slice(head * size, (head + 1) * size)
        scores = torch.zeros(length, length)
        for i in range(length):
            for j in range(length):
                row = relative.rows[i - j + config.max_positions - 1]
                scores[i, j] = q[i, part] @ (k[j, part] + of_keys[row, part]) + k[j, part] @ of_queries[row, part]
        mixed[:, part] = (scores / (3 * size) ** 0.5).softmax(-1) @ v[:, part]
    x = layer.attention_norm(query + attention.output(mixed))
    return layer.feed_forward_norm(x + layer.feed_forward(x))


@layouts
@pytest.mark.parametrize("version", VERSIONS)
def test_the_mask_decoder_is_that_of_the_paper(version, packed) -> None:
    model = randomise(MaskedLM(Encoder(replace(SMALL, **VERSIONS[version])), DECODED)).eval()
    lengths = (5, 9, 2)
    batch, alone = (one_segment(draw_batch("mlm", form, lengths)) for form in (packed, False))
    with torch.no_grad():
        trace = Trace()
        model.encoder(alone, trace)
        expected = []
        for states, length in zip(trace.hidden[-2], lengths, strict=True):
            h = states[:length]
            query = h + model.mask_decoder.positions.weight[:length]  # I of the first step, as in the released code
            for _ in range(2):
                query = decoded_by_equation(model, h, query)
            expected.append(model.masked_lm(query))
        rows = torch.cat(expected)[draw_batch("mlm", True, lengths).labels["masked"]]
        same(model.logits(batch)["mlm"], rows)
        everywhere = model.dense_logits(alone)["mlm"]
        same(everywhere[alone.layout.mask], torch.cat(expected))


def test_the_mask_decoder_learns_and_padding_of_the_batch_changes_nothing() -> None:
    model = randomise(MaskedLM(Encoder(replace(SMALL, **DEBERTA_V1, max_positions=64)), DECODED)).train()
    batch = one_segment(draw_batch("mlm", packed=True))
    results = []
    for form in (batch, replace(bucketed(batch), counts=batch.counts)):
        model.zero_grad()
        labels = form.labels
        real = labels["targets"] != -100
        logits = model.logits(form)["mlm"]
        (F.cross_entropy(logits, labels["targets"], reduction="sum") / batch.counts["mlm"]).backward()
        results.append([logits[real].detach(), *(p.grad.clone() for p in model.parameters())])
    same(*results)
    assert model.mask_decoder.positions.weight.grad.abs().max() > 1e-4
    model.encoder.gradient_checkpointing = True
    before = our_loss(model, batch)
    same(before.detach(), our_loss(model.eval(), batch).detach())


def test_settings_that_contradict_a_mask_decoder_are_refused() -> None:
    with pytest.raises(UserError, match=r"mask_decoder=true predicts masked words alone; set objective.next_sentence"):
        MaskedLMConfig(mask_decoder=True)
    with pytest.raises(UserError, match=r"set model.positions=none, or objective.mask_decoder=false"):
        MaskedLM(Encoder(SMALL), DECODED)
    with pytest.raises(UserError, match=r"disentangled=true needs objective.tied_embeddings=true"):
        ReplacedTokenConfig(disentangled=True, tied_embeddings=False)


def pair_of_networks() -> ReplacedToken:
    return randomise(ReplacedToken(Encoder(replace(SMALL, **DEBERTA_V2)), V3)).eval()


def one_segment_batch(packed: bool) -> Batch:
    return one_segment(replaced_batch(packed))


@layouts
def test_the_detector_reads_every_state_with_that_of_cls(packed) -> None:
    """`mask_predictions` of the authors' code: LayerNorm(h_[CLS] + h_i), a dense layer, GELU, one logit."""
    model = randomise(Discriminator(Encoder(replace(SMALL, **DEBERTA_V2)), V3)).eval()
    batch, detector = one_segment_batch(packed), model.detector
    with torch.no_grad():
        states = batch.layout.pad(model.encoder(batch))
        sums = states + states[:, :1]
        normed = (sums - sums.mean(-1, keepdim=True)) / (sums.var(-1, correction=0, keepdim=True) + 1e-7).sqrt()
        scaled = normed * detector.norm.weight + detector.norm.bias
        hidden = F.gelu(scaled @ detector.dense.weight.T + detector.dense.bias)
        expected = (hidden @ detector.output.weight.T + detector.output.bias)[..., 0]
        mask = one_segment_batch(False).layout.mask
        same(batch.layout.pad(model.logits(batch)["detection"])[mask], expected[mask])


def test_gradients_of_disentangled_embeddings() -> None:
    """E_D = sg(E_G) + E_Δ (DeBERTa v3, equation 8): detection trains E_Δ alone, masked words E_G alone."""
    model, batch = pair_of_networks(), one_segment_batch(True)
    table, delta = model.generator.encoder.embeddings.tokens.weight, model.discriminator.encoder.embeddings.delta
    assert model.discriminator.encoder.embeddings.tokens.weight is table
    torch.manual_seed(0)
    found = model(batch)
    (of_words,) = torch.autograd.grad(found["mlm"], [table], retain_graph=True)
    assert torch.autograd.grad(found["mlm"], [delta], retain_graph=True, allow_unused=True) == (None,)
    assert torch.autograd.grad(found["detection"], [table], retain_graph=True, allow_unused=True) == (None,)
    (of_detection,) = torch.autograd.grad(found["detection"], [delta])
    whole = Discriminator(Encoder(replace(SMALL, **DEBERTA_V2)), replace(V3, disentangled=False)).eval()
    whole.load_state_dict({**model.tensors_of("discriminator", model.state_dict())}, strict=False)  # one table: the sum
    same(whole.encoder.embeddings.tokens.weight.detach(), (table + delta).detach())
    torch.manual_seed(0)
    words = model.generator.masked_lm.losses_and_samples(
        model.generator.states(batch)[0], batch.labels["targets"], False, model.sampling
    )
    from bertsmith.objectives.replaced_token import corrupt

    corrupted = corrupt(batch, words[2])
    scores = whole.logits(corrupted.batch)["detection"]
    loss = F.binary_cross_entropy_with_logits(scores, corrupted.replaced.float(), reduction="sum")
    same(loss.detach(), found["detection"].detach())
    (expected,) = torch.autograd.grad(loss, [whole.encoder.embeddings.tokens.weight])
    same(of_detection, expected)
    assert of_words.abs().max() > 1e-3
    names = [name for name, _ in model.named_parameters()]
    assert len([name for name in names if name.endswith((TOKENS, DELTA))]) == 2  # E_G once, and E_Δ
    total(model, batch).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_parts_that_were_saved_without_the_own_table_are_joined_by_their_difference() -> None:
    model = pair_of_networks()
    saved = model.tensors_of("discriminator", model.state_dict())
    first = Discriminator(Encoder(replace(SMALL, **DEBERTA_V2)), replace(V3, disentangled=False))
    first.load_state_dict({name: value.clone() for name, value in saved.items() if name != DELTA})
    batch, expected = one_segment_batch(True), model.discriminator.logits(one_segment_batch(True))["detection"]
    joined = ReplacedToken.of_parts(V3, {"discriminator": first.eval(), "generator": model.generator})
    same(joined.discriminator.encoder.embeddings.delta, model.discriminator.encoder.embeddings.delta)
    same(joined.discriminator.logits(batch)["detection"], expected)
    assert joined.config == V3
    assert_close(joined.tensors_of("discriminator", joined.state_dict())[TOKENS], saved[TOKENS], atol=1e-6, rtol=0)

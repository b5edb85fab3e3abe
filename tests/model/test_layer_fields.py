"""The fields that other families than BERT need: each alone, together, and compared with `transformers`."""

import copy
from dataclasses import replace

import pytest
import torch
from comparison import VOCAB, draw_batch, our_loss, same
from test_parity import layouts
from torch.distributed.device_mesh import init_device_mesh
from variants import randomise

from bertsmith.batch import Batch
from bertsmith.inference.engines import int8_backends, quantised
from bertsmith.model.attention import Trace
from bertsmith.model.config import EncoderConfig
from bertsmith.model.cost import parameter_count
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, MaskedLMHead, TaskModel
from bertsmith.objectives.causal_lm import CausalLM
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.training.distributed import shard

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = EncoderConfig(VOCAB, 32, 4, 4, 48, max_positions=40, hidden_dropout=0.0, attention_dropout=0.0)
LOCAL = {"window": 8, "global_every": 3}
ALBERT = {"embedding_size": 16, "shared_layers": "all", "activation": "gelu_tanh"}
MODERN = {
    "norm_first": True,
    "bias": False,
    "num_segments": 0,
    "positions": "rotary",
    "rotary_base": 160_000.0,
    "local_rotary_base": 10_000.0,
    "gated": True,
    "first_attention_norm": False,
    "norm_eps": 1e-5,
    **LOCAL,
}
DEBERTA = {"relative_terms": "both", "positions": "none", "num_segments": 0, "norm_eps": 1e-7}
DEBERTA_V1 = {**DEBERTA, "key_bias": False}
DEBERTA_V2 = {
    **DEBERTA,
    "relative_buckets": 8,
    "relative_norm": True,
    "relative_projections": False,
    "convolution": 3,
    "convolution_activation": "gelu",
}
FIELDS = {
    "embedding_size": {"embedding_size": 16},
    "embedding_size of the hidden size": {"embedding_size": 32},
    "no embedding_norm": {"embedding_norm": False},
    "rotary": {"positions": "rotary"},
    "window": LOCAL,
    "window and left-to-right": {**LOCAL, "direction": "left-to-right"},
    "gated": {"gated": True, "activation": "silu"},
    "no first_attention_norm": {"norm_first": True, "first_attention_norm": False},
    "share attention": {"shared_layers": "attention"},
    "share feed-forward": {"shared_layers": "feed-forward"},
    "share all": {"shared_layers": "all", **LOCAL},
    "no segments": {"num_segments": 0},
    "no head_transform": {"head_transform": False},
    "head_activation": {"head_activation": "relu"},
    "albert": ALBERT,
    "modern": MODERN,
    "content-to-position": {"relative_terms": "content-to-position", "relative_reach": 9, **LOCAL},
    "position-to-content": {"relative_terms": "position-to-content", "shared_layers": "all", "norm_first": True},
    "convolution": {"convolution": 5},
    "no key_bias": {"key_bias": False},
    "deberta": DEBERTA_V1,
    "deberta v2": DEBERTA_V2,
}
fields = pytest.mark.parametrize("changes", FIELDS.values(), ids=FIELDS)


def one_segment(batch: Batch) -> Batch:
    return replace(batch, segments=torch.zeros_like(batch.segments), largest=(VOCAB - 1, 0))


def encoder_of(changes: dict) -> Encoder:
    return randomise(Encoder(replace(SMALL, **changes))).eval()


def model_of(changes: dict) -> MaskedLM | CausalLM:
    encoder = encoder_of(changes)
    return MaskedLM(encoder) if encoder.config.direction == "both" else CausalLM(encoder)


@fields
def test_packed_equals_padded_in_states_and_gradients(changes) -> None:
    encoder, results = encoder_of(changes), []
    for packed in (False, True):
        batch = one_segment(draw_batch("single", packed))
        encoder.zero_grad()
        hidden = batch.layout.pad(encoder(batch))
        (hidden.cos().sum(-1) * (hidden != 0).any(-1)).sum().div(batch.num_tokens).backward()
        results.append([hidden.detach() * (hidden != 0), *(p.grad.clone() for p in encoder.parameters())])
    real = draw_batch("single", packed=False).layout.mask[..., None]
    same(results[0][0] * real, results[1][0] * real)
    same(results[0][1:], results[1][1:])


@fields
def test_a_trace_checkpointing_and_row_selection_do_not_change_states(changes) -> None:
    encoder, batch, trace = encoder_of(changes), one_segment(draw_batch("single", packed=True)), Trace()
    hidden = encoder(batch)
    same(encoder(batch, trace), hidden)
    assert (len(trace.hidden), len(trace.attention)) == (5, 4)
    encoder.gradient_checkpointing = True
    same(encoder(batch), hidden)
    same(encoder(batch, rows=batch.layout.firsts), hidden[batch.layout.firsts])


@fields
def test_every_parameter_has_a_gradient_and_the_loss_decreases(changes) -> None:
    model, batch = model_of(changes).train(), one_segment(draw_batch("mlm", packed=True))
    if isinstance(model, CausalLM):
        batch = replace(batch, counts={"lm": batch.counts["mlm"]})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(5):
        loss = our_loss(model, batch)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for n, p in model.named_parameters() if not n.startswith("next_sentence"))
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1


@fields
def test_the_state_dict_has_every_parameter_once_and_restores_it(changes) -> None:
    encoder, batch = encoder_of(changes), one_segment(draw_batch("single", packed=True))
    state = encoder.state_dict()
    assert state.keys() == dict(encoder.named_parameters(remove_duplicate=False)).keys()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)
    restored = Encoder(encoder.config).eval()
    restored.load_state_dict(state)
    assert torch.equal(restored(batch), encoder(batch))
    assert torch.equal(copy.deepcopy(encoder)(batch), encoder(batch))


@pytest.mark.parametrize(
    ("sharing", "own"), [("attention", "feed_forward"), ("feed-forward", "attention"), ("all", None), ("none", "")]
)
def test_sharing_layers_have_only_the_parameters_that_are_not_shared(sharing, own) -> None:
    encoder = encoder_of({"shared_layers": sharing})
    second = {name for name, _ in encoder.layers[1].named_parameters()}
    assert second == {n for n, _ in encoder.layers[0].named_parameters() if own is not None and n.startswith(own)}


def test_the_gradient_of_a_shared_parameter_sums_over_layers() -> None:
    shared = encoder_of({"shared_layers": "all"})
    separate = Encoder(SMALL).eval()
    separate.load_state_dict(
        {n: shared.get_parameter(f"layers.0.{n.split('.', 2)[2]}" if n.startswith("layers.") else n).detach()
         for n in separate.state_dict()}
    )  # fmt: skip
    batch = one_segment(draw_batch("single", packed=True))
    for encoder in (shared, separate):
        encoder(batch).cos().mean().backward()
    name = "feed_forward.inner.weight"
    expected = sum(separate.get_parameter(f"layers.{i}.{name}").grad for i in range(4))
    same(shared.get_parameter(f"layers.0.{name}").grad, expected)


@fields
def test_parameter_count_equals_that_of_the_model(changes) -> None:
    config = replace(EncoderConfig(), **changes)
    with torch.device("meta"):
        model = MaskedLM(Encoder(config))
    assert parameter_count(config) == pytest.approx(sum(p.numel() for p in model.parameters()), rel=2e-3)


@pytest.mark.skipif(not int8_backends(), reason="torch has no int8 kernels for this CPU")
def test_quantised_layers_still_share_their_sublayers() -> None:
    model = TaskModel(encoder_of({"shared_layers": "attention"}), HeadConfig("single", ("a", "b"))).eval()
    batch = one_segment(draw_batch("single", packed=True))
    quick = quantised(model)
    assert quick.encoder.layers[3].attention is quick.encoder.layers[0].attention
    assert torch.allclose(quick.encoder(batch), model.encoder(batch), atol=0.5)


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("sharing", ["none", "attention", "all"])
def test_fsdp_shards_an_encoder_whose_layers_share_parameters(sharing, one_rank) -> None:
    model, batch = model_of({"shared_layers": sharing}), draw_batch("mlm", packed=True)
    expected = model(batch)["mlm"].detach()
    shard(model, one_rank)
    loss = model(batch)["mlm"]
    same(loss.detach(), expected)
    loss.backward()
    assert all(p.grad is not None for p in model.encoder.parameters())


def test_a_window_masks_distant_tokens() -> None:
    """With a global layer and three of reach 2 a token depends on all others, with local layers only on near ones."""
    encoder = encoder_of({"window": 4, "global_every": 4})
    batch = one_segment(draw_batch("single", True, lengths=(31,)))
    trace = Trace()
    encoder(batch, trace)
    assert trace.attention[0][0].min() > 0
    distance = (torch.arange(31)[:, None] - torch.arange(31)).abs()
    for weights in trace.attention[1:]:
        assert torch.equal(weights[0] > 0, (distance <= 2).expand(4, -1, -1))


def their_states(theirs, batch: Batch, **inputs) -> torch.Tensor:
    return theirs(input_ids=batch.tokens, attention_mask=batch.layout.mask.long(), **inputs).last_hidden_state


def same_at_tokens(ours: torch.Tensor, theirs: torch.Tensor, padded: Batch, batch: Batch) -> None:
    real = padded.layout.mask
    same(batch.layout.pad(ours)[real], theirs[real])


@layouts
def test_the_modern_encoder_equals_modernbert(packed) -> None:
    from transformers import ModernBertConfig, ModernBertModel

    config = ModernBertConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=40, local_attention=8, global_attn_every_n_layers=3, pad_token_id=0,
        attn_implementation="eager",
    )  # fmt: skip
    theirs, ours = randomise(ModernBertModel(config)).eval(), encoder_of(MODERN)
    names = {
        "embeddings.tok_embeddings": "embeddings.tokens",
        "attn_norm": "attention_norm",
        "attn.Wqkv": "attention.qkv",
        "attn.Wo": "attention.output",
        "mlp_norm": "feed_forward_norm",
        "mlp.Wi": "feed_forward.inner",
        "mlp.Wo": "feed_forward.outer",
    }
    ours.load_state_dict(renamed(theirs.state_dict(), names))
    padded, batch = (one_segment(draw_batch("single", form)) for form in (False, packed))
    same_at_tokens(ours(batch), their_states(theirs, padded), padded, batch)


def renamed(state: dict, names: dict[str, str]) -> dict:
    for theirs, ours in names.items():
        state = {name.replace(theirs, ours): value for name, value in state.items()}
    return state


ALBERT_NAMES = {
    "embeddings.word_embeddings": "embeddings.tokens",
    "embeddings.token_type_embeddings": "embeddings.segments",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.LayerNorm": "embeddings.norm",
    "encoder.embedding_hidden_mapping_in": "embeddings.projection",
    "encoder.albert_layer_groups.0.albert_layers.": "layers.",
    "attention.dense": "attention.output",
    "attention.LayerNorm": "attention_norm",
    "full_layer_layer_norm": "feed_forward_norm",
    "ffn_output": "feed_forward.outer",
    "ffn": "feed_forward.inner",
}


def albert_state(theirs) -> dict:
    state = renamed(theirs.state_dict(), ALBERT_NAMES)
    for end in ("weight", "bias"):
        parts = [state.pop(f"layers.0.attention.{part}.{end}") for part in ("query", "key", "value")]
        state[f"layers.0.attention.qkv.{end}"] = torch.cat(parts)
    return {name: value for name, value in state.items() if not name.startswith("pooler")}


@layouts
def test_shared_layers_on_a_factorised_embedding_equal_albert(packed) -> None:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(
        vocab_size=VOCAB, embedding_size=16, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=40, pad_token_id=0,
    )  # fmt: skip
    theirs, ours = randomise(AlbertForMaskedLM(config)).eval(), encoder_of(ALBERT)
    ours.load_state_dict(albert_state(theirs.albert))
    padded, batch = draw_batch("single", False), draw_batch("single", packed)
    states = their_states(theirs.albert, padded, token_type_ids=padded.segments)
    same_at_tokens(ours(batch), states, padded, batch)
    head, predictions = MaskedLMHead(ours.config, ours.embeddings.tokens), theirs.predictions
    for own, other in ((head.transform, predictions.dense), (head.norm, predictions.LayerNorm)):
        own.load_state_dict(other.state_dict())
    head.decoder.bias.data.copy_(predictions.bias)
    same(head(states), predictions(states))


@layouts
def test_an_encoder_without_norm_segments_and_transform_equals_openai_gpt(packed) -> None:
    from transformers import OpenAIGPTConfig, OpenAIGPTModel

    config = OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=4, n_head=4, n_positions=40)
    theirs = randomise(OpenAIGPTModel(config)).eval()
    changes = {"embedding_norm": False, "num_segments": 0, "direction": "left-to-right", "activation": "gelu_tanh"}
    ours = encoder_of({**changes, "intermediate_size": 4 * 32, "norm_eps": config.layer_norm_epsilon})
    names = {
        "tokens_embed": "embeddings.tokens",
        "positions_embed": "embeddings.positions",
        "h.": "layers.",
        "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.output",
        "ln_1": "attention_norm",
        "mlp.c_fc": "feed_forward.inner",
        "mlp.c_proj": "feed_forward.outer",
        "ln_2": "feed_forward_norm",
    }
    state = {name: value for name, value in theirs.state_dict().items() if not name.endswith(".attn.bias")}
    transposed = {n: v.t() if ".c_" in n and v.dim() == 2 else v for n, v in state.items()}
    ours.load_state_dict(renamed(transposed, names))
    padded, batch = (one_segment(draw_batch("single", form)) for form in (False, packed))
    same_at_tokens(ours(batch), their_states(theirs, padded), padded, batch)

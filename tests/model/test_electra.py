"""What only ELECTRA has: the discriminator's head, a generator, a left-to-right class; and what the family refuses."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from comparison import VOCAB, draw_batch, same, same_gradients, their_inputs
from test_parity import layouts
from torch.testing import assert_close
from transformers import ElectraConfig, ElectraForCausalLM, ElectraForMaskedLM, ElectraForPreTraining
from variants import ELECTRA, randomise

from bertsmith.config import override
from bertsmith.errors import UserError
from bertsmith.finetuning.model import start_model
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.families.table import family_of
from bertsmith.formats.hf import Notes, load_folder, save_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.model.heads import HeadConfig
from bertsmith.objectives.causal_lm import CausalLM
from bertsmith.recipes import recipe

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
embeddings = pytest.mark.parametrize("size", [16, 64], ids=["projected", "as wide as the states"])


def make_pair(architecture, size: int, folder, tokenizer, **changes):
    """A model of `transformers` and the same as ours."""
    vocab = max(VOCAB, tokenizer.vocab_size)
    config = ElectraConfig(vocab_size=vocab, embedding_size=size, max_position_embeddings=48, **SIZES, **changes)
    theirs = randomise(architecture(config)).eval()
    theirs.save_pretrained(folder)
    tokenizer.save(folder)
    loaded = load_folder(folder)
    assert loaded.missing == ()
    assert loaded.model.encoder.config.embedding_size == (None if size == 64 else size)
    return theirs, loaded.model.eval()


@layouts
@embeddings
def test_the_discriminator_has_their_logits_loss_and_gradients(size, packed, tmp_path, tiny_tokenizer):
    theirs, model = make_pair(ElectraForPreTraining, size, tmp_path / "theirs", tiny_tokenizer)
    padded, batch = draw_batch("tags", packed=False), draw_batch("tags", packed)
    real = padded.layout.mask
    replaced = torch.from_numpy(np.random.default_rng(0).random(real.shape) < 0.3)
    output = theirs(**their_inputs(padded), labels=replaced.long())
    logits = model.logits(batch)["detection"]
    logits = logits if packed else logits[real]
    same(logits, output.logits[real], "logits")
    loss = F.binary_cross_entropy_with_logits(logits, replaced[real].float())
    same(loss, output.loss, "loss")
    loss.backward()
    output.loss.backward()
    same_gradients(model, theirs)
    save_folder(tmp_path / "ours", model, tiny_tokenizer, Notes())
    again, info = ElectraForPreTraining.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert_close(again.state_dict(), theirs.state_dict(), rtol=0, atol=0)


@layouts
def test_the_left_to_right_class_has_their_logits_loss_and_gradients(packed, tmp_path, tiny_tokenizer):
    theirs, model = make_pair(ElectraForCausalLM, 16, tmp_path, tiny_tokenizer, is_decoder=True)
    assert isinstance(model, CausalLM)
    padded, batch = draw_batch("mlm", packed=False), draw_batch("mlm", packed)
    logits = theirs(**their_inputs(padded)).logits.flatten(0, 1)[padded.labels["masked"]]
    same(model.logits(batch)["lm"], logits, "logits")
    wanted = F.cross_entropy(logits, padded.labels["targets"])
    loss = model(batch)["lm"] / len(logits)
    same(loss, wanted, "loss")
    loss.backward()
    wanted.backward()
    same_gradients(model, theirs)


def test_fine_tuning_a_generator_is_noted(tmp_path, tiny_tokenizer, capsys):
    head = HeadConfig("single", ("a", "b"))
    for architecture in (ElectraForMaskedLM, ElectraForPreTraining):
        make_pair(architecture, 16, tmp_path / architecture.__name__, tiny_tokenizer)
        start_model(tmp_path / architecture.__name__, head, FinetuneConfig("classify"))
        words = "holds ElectraForMaskedLM, a generator; the model to fine-tune is its ElectraForPreTraining"
        assert (words in capsys.readouterr().err) == (architecture is ElectraForMaskedLM)


def test_settings_that_the_family_cannot_express_are_refused():
    config = EncoderConfig(hidden_size=64, num_heads=4, embedding_size=32, **ELECTRA)
    family_of(config)
    with pytest.raises(UserError, match="embedding_size=64: ElectraModel does not project embeddings of hidden_size"):
        family_of(replace(config, embedding_size=64))
    with pytest.raises(UserError, match=r"pooler_activation=tanh: .* GELU .*; set model.pooler_activation=gelu"):
        family_of(replace(config, pooler_activation="tanh"))


@pytest.mark.parametrize("family", ["distilbert", "electra"])
def test_next_sentence_is_refused_in_a_family_without_a_class_for_it(family):
    facts = {"distilbert": ["model.num_segments=0", "model.pooler_activation=relu"]}
    facts["electra"] = ["model.pooler_activation=gelu", "model.pooler_input_dropout=true"]
    with pytest.raises(UserError, match=r"data\.pairs|objective\.next_sentence=false") as error:
        override(recipe("bert-tiny"), [f"model.family={family}", *facts[family]])
    assert "objective.next_sentence=false" in str(error.value)

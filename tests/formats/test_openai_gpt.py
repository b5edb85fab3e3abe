"""OpenAI GPT beside the classes of `transformers`: encoder, language model, double heads and classification.

Values, losses and gradients on random weights, at several lengths with padding, in both layouts; folders both ways.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from comparison import CHOICES, LENGTHS, VOCAB, same
from conftest import LABELS
from labels import of_task
from variants import randomise

from bertsmith.batch import IGNORE, Batch, Example, collate
from bertsmith.errors import UserError
from bertsmith.formats.families.table import FAMILIES
from bertsmith.formats.hf import Notes, load_folder, names_of, save_folder
from bertsmith.model.attention import Trace
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig, TaskModel
from bertsmith.objectives.causal_lm import CausalLM
from bertsmith.objectives.settings import CausalLMConfig
from bertsmith.text.tokenizer import Tokenizer, train_word_bpe
from bertsmith.verify import parity

pytestmark = pytest.mark.usefixtures("one_thread")
layouts = pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
SIZES = {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 48, "vocab_size": VOCAB}
FAMILY = FAMILIES["openai-gpt"]
GPT = EncoderConfig(**FAMILY.defaults, family="openai-gpt")
SHAPES = {"usual": LENGTHS, "one token": (1,) * 6, "equal": (7,) * 6, "longest": (48, 1, 30, 2, 47, 48)}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_word_bpe(["the quick brown fox jumps over the lazy dogs, and barks at foxes"] * 4, VOCAB)


def theirs_of(name: str, **changes: object):
    return randomise(getattr(transformers, name)(transformers.OpenAIGPTConfig(**{**SIZES, **changes}))).eval()


def opened(theirs, tokenizer: Tokenizer, folder: Path, head: HeadConfig | None = None):
    """Our model from a folder that `transformers` wrote."""
    theirs.save_pretrained(folder)
    tokenizer.save(folder)
    loaded = load_folder(folder, head)
    assert loaded.missing == ()
    return loaded.model.eval()


def batch_of(packed: bool, lengths: tuple[int, ...] = LENGTHS, **labels: np.ndarray) -> Batch:
    """Sequences without the padding token, 0, by whose places their classifier finds the last token."""
    rng = np.random.default_rng(1)
    examples = [Example(rng.integers(1, VOCAB, size), np.zeros(size, dtype=np.int64)) for size in lengths]
    return collate(examples, packed=packed).with_labels(of_task(**labels))


def inputs_of(batch: Batch) -> dict[str, torch.Tensor]:
    return {"input_ids": batch.tokens, "attention_mask": batch.layout.mask.long()}


def next_words(batch: Batch) -> torch.Tensor:
    """What `transformers` takes as labels: it moves them by one itself."""
    return batch.tokens.masked_fill(~batch.layout.mask, IGNORE)


@layouts
@pytest.mark.parametrize("lengths", SHAPES.values(), ids=SHAPES)
def test_states_and_attention_are_equal(lengths, packed, tokenizer, tmp_path: Path) -> None:
    theirs = theirs_of("OpenAIGPTModel")
    ours = opened(theirs, tokenizer, tmp_path).encoder
    padded, batch, trace = batch_of(False, lengths), batch_of(packed, lengths), Trace()
    output = theirs(**inputs_of(padded), output_hidden_states=True, output_attentions=True)
    ours(batch, trace)
    real = padded.layout.mask
    assert len(trace.hidden) == len(output.hidden_states) == 4
    for mine, other in zip(trace.hidden, output.hidden_states, strict=True):
        same(batch.layout.pad(mine)[real], other[real])
    for mine, other in zip(trace.attention, output.attentions, strict=True):
        same(mine, other * real[:, None, :, None])
    same(batch.layout.pad(ours(batch))[real], output.last_hidden_state[real])


def language_model_labels(batch: Batch, lengths: tuple[int, ...] = LENGTHS) -> dict[str, torch.Tensor]:
    """The rows of the flat form that predict, and their targets."""
    row, rows, targets = 0, [], []
    flat = batch.tokens.flatten()
    for size in lengths:
        rows += range(row, row + size - 1)
        targets += flat[row + 1 : row + size].tolist()
        row += size if batch.tokens.dim() == 1 else batch.tokens.shape[1]
    return {"masked": torch.tensor(rows), "targets": torch.tensor(targets)}


@layouts
def test_the_language_model_is_equal(packed, tokenizer, tmp_path: Path) -> None:
    theirs = theirs_of("OpenAIGPTLMHeadModel")
    model = opened(theirs, tokenizer, tmp_path)
    assert isinstance(model, CausalLM)
    assert [name for name, _ in model.named_parameters() if name.startswith("causal_lm")] == []  # tied, without a bias
    padded, batch = batch_of(False), batch_of(packed)
    batch.labels.update(language_model_labels(batch))
    output = theirs(**inputs_of(padded), labels=next_words(padded))
    predicts = padded.layout.mask.clone()
    predicts[:, :-1] &= padded.layout.mask[:, 1:]
    predicts[:, -1] = False
    same(model.logits(batch)["lm"], output.logits[predicts])
    loss = model(batch)["lm"] / len(batch.labels["targets"])
    same(loss, output.loss)
    loss.backward()
    output.loss.backward()
    gradients_are_equal(model, theirs)


def gradients_are_equal(model, theirs) -> None:
    """The gradients of all parameters; every parameter of theirs has a counterpart."""
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    table = "transformer.tokens_embed.weight"
    expected[table] = expected.pop("lm_head.weight") if "lm_head.weight" in expected else expected[table]  # tied
    names, ours = names_of(model), {name: p.grad for name, p in model.named_parameters()}
    assert sorted(stored.names[0] for stored in names.values()) == sorted(expected)
    for name, gradient in ours.items():
        same(names[name].parts(gradient, 0), {names[name].names[0]: expected[names[name].names[0]]}, name)
    assert ours["encoder.layers.0.attention.qkv.weight"].abs().max() > 1e-3


KINDS = {
    "single": ({"id2label": LABELS, "problem_type": "single_label_classification"}, np.array([0, 2, 1, 1, 0, 2])),
    "multi": ({"id2label": LABELS, "problem_type": "multi_label_classification"}, np.eye(4)[[0, 2, 1, 1, 0, 2]]),
    "regression": ({"num_labels": 1, "problem_type": "regression"}, np.linspace(-1, 2, 6)),
}


@layouts
@pytest.mark.parametrize("kind", KINDS)
def test_classification_is_equal(kind, packed, tokenizer, tmp_path: Path) -> None:
    values, label = KINDS[kind]
    theirs = theirs_of("OpenAIGPTForSequenceClassification", pad_token_id=0, **values)
    model = opened(theirs, tokenizer, tmp_path)
    assert model.head_config.kind == kind
    padded, batch = batch_of(False, label=label), batch_of(packed, label=label)
    target = padded.labels["label"]
    output = theirs(**inputs_of(padded), labels=target if kind == "single" else target.float())
    same(model.logits(batch), output.logits)
    loss = model(batch)["task"] / len(label)
    same(loss, output.loss)
    loss.backward()
    output.loss.backward()
    gradients_are_equal(model, theirs)


@layouts
def test_double_heads_with_both_losses_are_equal(packed, tokenizer, tmp_path: Path) -> None:
    """The loss of the endings and half of the language model's, as in fine-tuning (section 4.1 of the paper)."""
    theirs = theirs_of("OpenAIGPTDoubleHeadsModel")
    head = HeadConfig("choice", num_choices=CHOICES, language_model=0.5)
    model = opened(theirs, tokenizer, tmp_path, head)
    padded, batch = batch_of(False, label=np.array([2, 0])), batch_of(packed, label=np.array([2, 0]))
    batch.labels.update(language_model_labels(batch))
    ends = padded.layout.mask.sum(1) - 1
    endings = {"input_ids": padded.tokens, "labels": next_words(padded), "mc_token_ids": ends}
    endings = {name: value.unflatten(0, (-1, CHOICES)) for name, value in endings.items()}
    mask = padded.layout.mask.long()
    output = theirs(**endings, attention_mask=mask, mc_labels=padded.labels["label"])
    same(model.logits(batch), output.mc_logits)
    losses = model(batch)
    task, words = losses["task"] / 2, losses["lm"] / len(batch.labels["targets"])
    same(task, output.mc_loss)
    same(words, output.loss)
    assert model.loss_weights == {"lm": 0.5}
    (task + 0.5 * words).backward()
    (output.mc_loss + 0.5 * output.loss).backward()
    gradients_are_equal(model, theirs)


SAVED = {
    "causal_lm": ("OpenAIGPTLMHeadModel", None),
    "single": ("OpenAIGPTForSequenceClassification", HeadConfig("single", ("red", "green"))),
    "regression": ("OpenAIGPTForSequenceClassification", HeadConfig("regression")),
    "choice": ("OpenAIGPTDoubleHeadsModel", HeadConfig("choice", num_choices=CHOICES, language_model=0.5)),
}


def ours_of(head: HeadConfig | None):
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "intermediate_size": 128, "max_positions": 48}
    encoder = Encoder(replace(GPT, vocab_size=VOCAB, **sizes))  # type: ignore[arg-type]
    model = CausalLM(encoder, CausalLMConfig()) if head is None else TaskModel(encoder, head)
    return randomise(model).eval()


@pytest.mark.parametrize("kind", SAVED)
def test_transformers_opens_our_folder_and_saves_it_back(kind, tokenizer, tmp_path: Path) -> None:
    name, head = SAVED[kind]
    model = ours_of(head)
    save_folder(tmp_path / "ours", model, tokenizer, Notes())
    theirs, info = getattr(transformers, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = parity(tmp_path / "ours", tmp_path / "ours")
    assert (found["equal"], found["class"]) == (True, name)
    assert any(key.startswith("logits") for key in found["differences"])
    theirs.save_pretrained(tmp_path / "theirs")
    tokenizer.save(tmp_path / "theirs")
    again = load_folder(tmp_path / "theirs", head)
    assert again.missing == ()
    for key, value in model.state_dict().items():
        assert torch.equal(again.model.state_dict()[key], value), key


@pytest.mark.parametrize("head", [HeadConfig("tags", ("O", "B-X")), HeadConfig("span")], ids=["tags", "span"])
def test_heads_of_tokens_have_names_of_our_own(head, tokenizer, tmp_path: Path) -> None:
    model = ours_of(head)
    save_folder(tmp_path, model, tokenizer, Notes())
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["model_type"] == "bertsmith-tokens-openai-gpt"
    assert values["architectures"][0].startswith("BertsmithOpenAIGPTFor")
    with pytest.raises(ValueError, match="bertsmith-tokens-openai-gpt"):
        transformers.AutoModel.from_pretrained(tmp_path)
    again = load_folder(tmp_path)
    assert again.missing == ()
    assert again.model.head_config == head
    batch = batch_of(True)
    same(again.model.eval().logits(batch), model.logits(batch))


def test_a_released_folder_is_opened(tokenizer, tmp_path: Path) -> None:
    """The fields of the released `config.json`, weights without a prefix, `vocab.json` and `merges.txt`."""
    theirs = theirs_of("OpenAIGPTModel")
    theirs.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    values = json.loads((tmp_path / "config.json").read_text())
    more = {"n_ctx": 48, "n_special": 0, "predict_special_tokens": True, "architectures": ["OpenAIGPTLMHeadModel"]}
    more |= {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}}
    (tmp_path / "config.json").write_text(json.dumps({**values, **more}))
    loaded = load_folder(tmp_path)
    expected = replace(GPT, vocab_size=VOCAB, hidden_size=64, num_layers=3, num_heads=4, intermediate_size=256)
    assert loaded.model.encoder.config == replace(expected, max_positions=48)
    assert isinstance(loaded.model, CausalLM)
    assert loaded.missing == ()
    batch = batch_of(False)
    real = batch.layout.mask
    same(loaded.model.eval().encoder(batch)[real], theirs(**inputs_of(batch)).last_hidden_state[real])
    save_folder(tmp_path / "again", loaded.model, loaded.tokenizer, loaded.notes)
    assert json.loads((tmp_path / "again" / "config.json").read_text())["n_ctx"] == 48


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"norm_first": True}, "model.norm_first=true: the family openai-gpt normalises after each sublayer"),
        ({"direction": "both"}, "model.direction=both: OpenAIGPTModel reads left to right"),
        ({"intermediate_size": 100}, "model.intermediate_size=100: .* set model.intermediate_size=3072"),
        ({"activation": "gelu"}, "model.activation=gelu: OpenAIGPTModel has the tanh form of GELU"),
        ({"pooler": True}, "model.pooler=true: .*set model.pooler=false"),
    ],
)
def test_other_encoders_are_refused(changes, why, tokenizer, tmp_path: Path) -> None:
    from bertsmith.formats.families.table import family_of

    with pytest.raises(UserError, match=why):
        family_of(replace(GPT, **changes))


def test_the_family_has_the_shape_of_the_paper() -> None:
    assert (GPT.num_layers, GPT.hidden_size, GPT.num_heads, GPT.intermediate_size) == (12, 768, 12, 3072)
    assert (GPT.max_positions, GPT.norm_eps, GPT.hidden_dropout, GPT.attention_dropout) == (512, 1e-5, 0.1, 0.1)
    with torch.device("meta"):
        sizes = sum(p.numel() for p in Encoder(GPT).parameters())
    assert sizes == (40478 + 512) * 768 + 12 * 7_087_872
    x = torch.linspace(-4, 4, 99)
    same(F.gelu(x, approximate="tanh"), transformers.activations.NewGELUActivation()(x))

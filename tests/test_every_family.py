"""The same list for every family: pre-training, saving, tasks, inference and export. A new family is one row here.

What a row of `variants.py` adds to the list, with random weights, stands at the end: parity of the encoder and of every
head in both layouts. How `transformers` opens our folders and we open theirs is in tests/formats/test_saved_format.py.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from comparison import (
    VOCAB,
    draw_batch,
    our_loss,
    our_scores,
    run_theirs,
    same,
    same_gradients,
    their_inputs,
    their_loss,
    their_scores,
)
from kind_rows import ROWS as TASK_ROWS
from runs import cut, needs_teacher, on_ranks, shrunk
from safetensors.torch import load_file
from torch.testing import assert_close
from variants import KINDS, POSITIONS, VARIANTS, randomise, their_cases

import bertsmith
from bertsmith.config import override
from bertsmith.conversion import Options, convert
from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.errors import UserError
from bertsmith.extend import extend
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.families.table import FAMILIES
from bertsmith.formats.hf import inner_folders, load_folder, save_folder
from bertsmith.formats.saved_config import own_type
from bertsmith.inference.features import Features, features
from bertsmith.model.attention import Trace
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.pages.view import view
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import runlog
from bertsmith.verify import onnx_parity, parity

pytestmark = pytest.mark.usefixtures("one_thread")
variants = pytest.mark.parametrize("variant", VARIANTS)
LAYOUTS = {"padded": False, "packed": True}


@dataclass(frozen=True)
class Row:
    """How a family is pre-trained: the recipe, the kind of its tokenizer, and changes of the recipe."""

    recipe: str
    tokenizer: str = "wordpiece"
    changes: tuple[str, ...] = ()


ROWS = {
    "bert": Row("bert-tiny"),
    "roberta": Row("roberta-tiny", "bytes"),
    "xlm-roberta": Row("roberta-tiny", "unigram", ("model.family=xlm-roberta",)),
    "camembert": Row("roberta-tiny", "unigram", ("model.family=camembert",)),
    "roberta-prelayernorm": Row("quickstart"),
    "albert": Row("albert-tiny", "unigram"),
    "distilbert": Row("distilbert-base"),
    "electra": Row("electra-tiny"),
    "openai-gpt": Row("gpt-tiny", "bpe"),
    "deberta": Row("deberta-tiny", "bytes"),
    "deberta-v2": Row("deberta-v3-tiny", "unigram"),
    "modernbert": Row("modern-tiny", "bytes", ("model.window=8",)),
}
RUN = ["train.steps=4", "train.save_every=2", "train.keep=9", "train.batch_size=8"]
TUNED = ["train.steps=2", "train.batch_size=4", "train.learning_rate=1e-3", "data.max_length=32", "restarts=0"]
TUNED += ["train.evaluate_every=0"]
SEVERAL = [{"text": f"it is {i}", "labels": [name for name in "ab" if i % 2 or name == "b"]} for i in range(14)]
TASKS = {**TASK_ROWS, "several": SEVERAL}
ONE_TEXT = {"classify", "regress", "several"}
# The parameters that `transformers` has no class for, and does not write.
IGNORED = ("next_sentence.output.", "mask_decoder.", "encoder.embeddings.delta")
SENTENCES = ["The list of names is a file, and its class 2 has a value.", "", "import the module"]


def config_of(family: str) -> PretrainConfig:
    """A tiny run of a family."""
    return shrunk(ROWS[family].recipe, *ROWS[family].changes, *RUN)


@pytest.fixture(scope="session")
def corpora(world: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A corpus for each kind of tokenizer."""
    folder, made = tmp_path_factory.mktemp("corpora"), {"wordpiece": world / "shards"}
    (folder / "text.txt").write_text((world / "text.txt").read_text(encoding="utf-8")[:100_000], encoding="utf-8")
    for kind in ("bytes", "unigram", "bpe"):
        train_tokenizer([folder / "text.txt"], folder / f"{kind}-tok", vocab_size=600, kind=kind)
        made[kind] = folder / kind
        build_corpus([folder / "text.txt"], folder / f"{kind}-tok", made[kind], workers=1)
    return made


@pytest.fixture(scope="module", params=ROWS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pretrained(corpora: dict[str, Path], world: Path) -> Callable[..., Path]:
    """Pre-trains a family on its corpus."""

    def pretrain(family: str, out: Path, *changes: str, **options: object) -> Path:
        config = override(config_of(family), [*changes])
        teacher = world / "run" if needs_teacher(config) else None
        bertsmith.pretrain(config, corpora[ROWS[family].tokenizer], out, teacher=teacher, device="cpu", **options)
        return out

    return pretrain


@pytest.fixture(scope="module")
def run(family: str, pretrained: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pre-trained run of the family."""
    return pretrained(family, tmp_path_factory.mktemp(family) / "run")


def folders_of(model: Path) -> list[Path]:
    """The model folder, and those inside it of further networks that were trained."""
    return sorted((path.parent for path in model.rglob("model.safetensors")), key=lambda path: len(path.parts))


def saved_class(folder: Path):
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    return getattr(transformers, name)


def test_every_family_has_a_row() -> None:
    assert ROWS.keys() == {name for name, family in FAMILIES.items() if not family.is_own}  # those: test_elmo_runs.py
    assert all(config_of(name).model.family == name for name in ROWS)


def test_a_resumed_run_gives_identical_bytes(family: str, run: Path, pretrained, tmp_path: Path) -> None:
    losses = [r["loss"] for r in runlog.read(run) if "loss" in r]
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    copy = pretrained(family, cut(run, tmp_path / "cut", 2), resume=True)
    for folder in folders_of(run / "model"):
        again = copy / "model" / folder.relative_to(run / "model")
        assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_transformers_opens_the_run_and_computes_the_same(family: str, run: Path) -> None:
    for folder in folders_of(run / "model"):
        assert transformers.AutoConfig.from_pretrained(folder).model_type == family
        theirs, info = saved_class(folder).from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["mismatched_keys"]
        found = parity(folder, folder)
        assert found["equal"], found
        assert found["class"] == type(theirs).__name__
        assert found["largest_difference"] < 1e-5
        is_encoder = type(theirs).__name__ == FAMILIES[family].encoder_class  # a detector that they have no class for
        assert is_encoder or any(name.startswith("logits") for name in found["differences"])
        ours, opened = Tokenizer.load(folder), transformers.AutoTokenizer.from_pretrained(folder)
        alone = [ours.unknown_id]  # of an empty text, without special tokens
        assert [ids or alone for ids in opened(SENTENCES)["input_ids"]] == ours.encode(SENTENCES, special=True)
        first, last = ours.encode([SENTENCES[0], SENTENCES[2]])
        assert opened(SENTENCES[0], SENTENCES[2])["input_ids"] == ours.joiner.join(first, last).tokens.tolist()


def test_a_folder_that_transformers_wrote_has_the_same_tensors_and_training_continues_from_it(
    family: str, run: Path, pretrained, tmp_path: Path
) -> None:
    model = shutil.copytree(run / "model", tmp_path / "theirs")
    for folder in folders_of(run / "model"):
        copy = model / folder.relative_to(run / "model")
        saved_class(folder).from_pretrained(folder).save_pretrained(copy)
        (copy / "bertsmith.json").unlink()
        ours, theirs = (load_folder(place).model.state_dict() for place in (folder, copy))
        is_encoder = saved_class(folder).__name__ == FAMILIES[family].encoder_class  # they have no class of the head
        ignored = (*IGNORED, "detector.") if is_encoder else IGNORED
        expected = {name: value for name, value in ours.items() if not name.startswith(ignored)}
        assert theirs.keys() >= expected.keys()
        assert_close({name: theirs[name] for name in expected}, expected, atol=0, rtol=0)
    rates = ["learning_rate", *(["rest_learning_rate"] if config_of(family).train.rest_learning_rate else [])]
    still = ["train.steps=1", "train.weight_decay=0", *(f"train.{name}=1e-9" for name in rates)]
    pretrained(family, tmp_path / "more", *still, model=model)
    before, after = (load_file(place / "model.safetensors") for place in (model, tmp_path / "more" / "model"))
    if FAMILIES[family].is_encoder_alone(before):  # its names have no prefix
        before = {FAMILIES[family].prefix + name: value for name, value in before.items()}
    assert_close({name: after[name] for name in before if name in after}, before, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "task", [pytest.param(t, marks=pytest.mark.slow if t in ("regress", "several") else ()) for t in TASKS]
)  # those two have the class of `classify`
def test_a_task_is_fine_tuned_predicts_and_opens_in_transformers(
    task: str, family: str, run: Path, tmp_path: Path
) -> None:
    rows, name = TASKS[task], "classify" if task == "several" else task
    more = ["data.stride=8", "data.max_query=8"] if task == "answer" else []
    scores = bertsmith.finetune(
        override(FinetuneConfig(name), [*TUNED, *more]), run, rows, tmp_path / "run", dev=rows, device="cpu"
    )
    assert np.isfinite([value for value in scores.values() if isinstance(value, float)]).all()
    predictor = bertsmith.Predictor.load(tmp_path / "run", device="cpu")
    answers = predictor(inputs_of(task, rows))
    assert len(answers) == len(rows)
    loaded = load_folder(tmp_path / "run" / "model")
    assert loaded.missing == ()
    save_folder(tmp_path / "again", loaded.model, loaded.tokenizer, loaded.notes)
    assert bertsmith.Predictor.load(tmp_path / "again", device="cpu")(inputs_of(task, rows)) == answers
    if own_type(loaded.model):  # `transformers` has no class for it
        return
    found = parity(tmp_path / "run" / "model", tmp_path / "again")
    assert found["equal"], found
    assert any(key.startswith("logits") for key in found["differences"])


def inputs_of(task: str, rows: list[dict]) -> list:
    """Rows as `Predictor` takes them."""
    columns = {"tag": ["tokens"], "answer": ["question", "context"], "choose": ["text", "endings"]}
    chosen = [[row[name] for name in columns.get(task, ["text1", "text2"])] for row in rows if task not in ONE_TEXT]
    if task in ONE_TEXT:
        return [row["text"] for row in rows]
    return [row[0] for row in chosen] if task == "tag" else [tuple(row) for row in chosen]


@torch.inference_mode()
def their_states(folder: Path, text: str) -> list[torch.Tensor]:
    """The hidden states of `transformers` for one text, (n, H) for the embeddings and each layer."""
    inputs = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    outputs = transformers.AutoModel.from_pretrained(folder).eval()(**inputs, output_hidden_states=True)
    return [states[0] for states in (*outputs.hidden_states[:-1], outputs.last_hidden_state)]


def test_features_vectors_and_the_page_have_the_states_of_transformers(run: Path, tmp_path: Path) -> None:
    text, model = SENTENCES[0], run / "model"
    states = their_states(model, text)
    (tmp_path / "text.txt").write_text(f"{text}\n")
    options = {"layers": "all", "align": "none", "dtype": "float32", "device": "cpu"}
    features(model, tmp_path / "text.txt", tmp_path / "features", **options)
    (entry,) = Features.open(tmp_path / "features")
    frame = Tokenizer.load(model).frame
    inner = slice(len(frame.first), -len(frame.last) or None)
    np.testing.assert_allclose(entry.vectors, torch.stack(states)[:, inner].numpy(), atol=1e-5, rtol=0)
    vector = bertsmith.Embedder.load(model, "cpu", pooling="mean")(text)
    np.testing.assert_allclose(vector, states[-1].mean(0).numpy(), atol=1e-5, rtol=0)
    found = view(model, text, SENTENCES[2], tmp_path / "page.html", device="cpu")
    if frame.mask is None:
        assert not found["masked_words"]
        with pytest.raises(UserError, match="reads in one direction"):
            bertsmith.fill(model, "the [MASK] of a file", device="cpu")
        return
    filler = next(folder for folder in reversed(folders_of(model)))  # the generator of a pair of networks
    assert found["masked_words"] == (filler == model)
    mask = Tokenizer.load(model).token(Tokenizer.load(model).mask_id)
    (words,) = bertsmith.fill(filler, f"the {mask} of a file", device="cpu")
    assert len(words) == 5
    assert sum(word["probability"] for word in words) <= 1


def test_sentence_transformers_and_cards(family: str, run: Path, tmp_path: Path) -> None:
    convert(run, tmp_path / "sentences", "sentence-transformers", Options(pooling="mean"))
    vector = bertsmith.Embedder.load(tmp_path / "sentences", "cpu")(SENTENCES[0])
    np.testing.assert_allclose(vector, their_states(run / "model", SENTENCES[0])[-1].mean(0).numpy(), atol=1e-5)
    card = (run / "model" / "README.md").read_text()
    assert f"| Family | {family} |" in card
    assert json.loads((run / "model" / "config.json").read_text())["architectures"][0] in card
    encoder = load_folder(run / "model").model.encoder.config
    assert f"| Layers, hidden size | {encoder.num_layers}, 32 |" in card
    assert f"| Longest input | {encoder.max_positions} |" in card


def test_a_word_is_added_to_the_vocabulary(family: str, run: Path, tmp_path: Path) -> None:
    if ROWS[family].tokenizer != "wordpiece":
        with pytest.raises(UserError, match="WordPiece"):
            extend(run, tmp_path / "out", words=["xylophone"])
        return
    facts = extend(run, tmp_path / "out", words=["xylophone"])
    pieces = Tokenizer.load(run / "model").encode(["xylophone"])[0]
    for inside in ("", *inner_folders(run / "model")):  # ELECTRA's generator as well
        old, new = (load_folder(place / inside).model for place in (run / "model", tmp_path / "out"))
        tables = [model.encoder.embeddings.tokens.weight for model in (old, new)]
        assert_close(tables[1][facts["first_id"]], tables[0][pieces].mean(0), atol=1e-6, rtol=0)
        assert Tokenizer.load(tmp_path / "out" / inside).hash == facts["hash"]
        assert parity(tmp_path / "out" / inside, tmp_path / "out" / inside)["equal"]
    assert (tmp_path / "out" / "generator").exists() == (family == "electra")


@pytest.mark.slow  # an export takes seconds
def test_onnx_equals_transformers_and_int8_runs(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    convert(run, tmp_path / "pretrained", "onnx")
    assert onnx_parity(tmp_path / "pretrained", run / "model")["equal"]
    rows, tuned = TASKS["classify"], tmp_path / "tuned"
    bertsmith.finetune(override(FinetuneConfig("classify"), TUNED), run, rows, tuned, dev=rows, device="cpu")
    convert(tuned, tmp_path / "onnx", "onnx", Options(int8=True))
    found = onnx_parity(tmp_path / "onnx", tuned / "model")
    assert found["equal"], found
    assert {name.split()[0] for name in found["differences"]} == {"model.onnx", "model_int8.onnx"}
    texts = [row["text"] for row in rows]
    graph, plain = (bertsmith.Predictor.load(place, device="cpu") for place in (tmp_path / "onnx", tuned))
    for ours, expected in zip(graph(texts), plain(texts), strict=True):
        assert ours["scores"] == pytest.approx(expected["scores"], abs=1e-5)


def two_ranks(corpora: dict[str, Path], teacher: Path, folder: Path) -> None:
    """A run of every family on one of two ranks."""
    for family, row in ROWS.items():
        config = override(config_of(family), ["train.micro_batch_size=3", "train.parallel=ddp"])
        given = teacher if needs_teacher(config) else None
        bertsmith.pretrain(config, corpora[row.tokenizer], folder / family, teacher=given, device="cpu")


@pytest.fixture(scope="module")
def distributed(corpora: dict[str, Path], world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    on_ranks(two_ranks, corpora, world / "run", folder)
    return folder


@pytest.mark.slow
def test_two_ranks_equal_one(family: str, distributed: Path, pretrained, tmp_path: Path) -> None:
    runs = pretrained(family, tmp_path / "one", "train.micro_batch_size=3"), distributed / family
    one, two = ([r["loss"] for r in runlog.read(run) if "loss" in r] for run in runs)
    assert one == pytest.approx(two, abs=1e-5)
    for folder in folders_of(tmp_path / "one" / "model"):
        places = folder, distributed / family / folder.relative_to(tmp_path / "one")
        assert_close(*(load_file(place / "model.safetensors") for place in places), atol=1e-5, rtol=0)


# --- random weights: every kind of encoder in variants.py, with every head that `transformers` has for it


@pytest.mark.parametrize(("variant", "kind"), their_cases(KINDS))
def test_logits_losses_and_gradients_are_equal(variant, kind, pair_of):
    theirs, model = pair_of(kind, variant)
    padded = draw_batch(kind, packed=False, variant=variant)
    output = run_theirs(theirs, kind, padded, variant)
    expected, wanted = their_scores(output, kind, padded, variant), their_loss(output, kind, padded)
    wanted.backward()
    for layout, packed in LAYOUTS.items():
        model.zero_grad()
        batch = draw_batch(kind, packed, variant=variant)
        scores, loss = our_scores(model, kind, batch), our_loss(model, batch)
        assert scores.keys() == expected.keys()
        for name, values in scores.items():
            same(values, expected[name], f"{name}, {layout}")
        same(loss, wanted, f"loss, {layout}")
        loss.backward()
        same_gradients(model, theirs, layout)


@variants
def test_trace_gives_their_attention_and_hidden_states(variant, pair_of):
    theirs, model = pair_of("encoder", variant, attn_implementation="eager")
    padded = draw_batch("single", packed=False, variant=variant)
    output = theirs(**their_inputs(padded), output_attentions=True, output_hidden_states=True)
    real = padded.layout.mask
    for layout, packed in LAYOUTS.items():
        batch, trace = draw_batch("single", packed, variant=variant), Trace()
        traced = model.encoder(batch, trace=trace)
        assert len(trace.hidden) == len(output.hidden_states) == 4
        assert len(trace.attention) == len(output.attentions) == 3
        for ours, expected in zip(trace.hidden, output.hidden_states, strict=True):
            same(batch.layout.pad(ours)[real], expected[real], f"hidden state, {layout}")
        for ours, expected in zip(trace.attention, output.attentions, strict=True):
            same(ours, expected * real[:, None, :, None], f"attention, {layout}")
        plain = model.encoder(batch)
        same(batch.layout.pad(traced)[real], batch.layout.pad(plain)[real], f"without a trace, {layout}")


@pytest.fixture(scope="module", params=VARIANTS)
def random_encoder(request: pytest.FixtureRequest) -> tuple[str, Encoder]:
    """A kind of encoder, and one with random weights."""
    encoder = Encoder(EncoderConfig(VOCAB, 64, 3, 4, 128, max_positions=POSITIONS, **VARIANTS[request.param].ours))
    return request.param, randomise(encoder).eval()


@pytest.mark.parametrize(
    "lengths",
    [
        tuple(np.random.default_rng(0).permutation(np.arange(1, 49))),
        (7,) * 6,
        (48,),
        (1,),
        (1, 1, 48),
        (48, 47, 40, 39),
    ],
    ids=["1 to 48", "all 7", "one", "one token", "extremes", "near"],
)
def test_packed_equals_padded(lengths, random_encoder):
    variant, encoder = random_encoder
    results = []
    for packed in LAYOUTS.values():
        batch = draw_batch("single", packed, lengths, variant=variant)
        encoder.zero_grad()
        hidden = batch.layout.pad(encoder(batch))
        (hidden.cos().sum(-1) * (hidden != 0).any(-1)).sum().div(batch.num_tokens).backward()
        results.append([hidden.detach(), *(p.grad.clone() for p in encoder.parameters())])
    same(*results)

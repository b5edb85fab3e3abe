"""Distillation: the losses of DistilBERT's authors, and a student that starts with layers of its frozen teacher."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, randomise
from runs import cut, on_ranks, weights
from safetensors.torch import load_file
from torch.testing import assert_close

from bertsmith.batch import Batch, Label, bucketed, lay_out
from bertsmith.config import override, read_json
from bertsmith.errors import UserError
from bertsmith.finetuning.run import finetune
from bertsmith.formats.hf import Notes, load_folder, names_of, save_folder
from bertsmith.model import soft_targets
from bertsmith.model.config import EncoderConfig
from bertsmith.model.cost import forward_flops, forward_memory, training_flops, training_memory
from bertsmith.model.encoder import Encoder
from bertsmith.model.fused_choice import plain_kernels
from bertsmith.objectives.discriminator import Discriminator
from bertsmith.objectives.distillation import Distillation, copy_layers, layers_to_copy
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.settings import DistillationConfig, MaskedLMConfig
from bertsmith.pretraining.loader import MASKED, TARGET
from bertsmith.pretraining.run import pretrain
from bertsmith.pretraining.teacher import with_teacher
from bertsmith.recipes import recipe
from bertsmith.text.tokenizer import Tokenizer
from bertsmith.training import checkpoint, runlog

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "max_positions": 64, "vocab_size": 99}
PLAIN = MaskedLMConfig(next_sentence=False)
WEIGHTS = {"mlm": 2.0, "soft": 5.0, "cosine": 1.0}
# A student of half the layers on the teacher's corpus: 30 steps of a few milliseconds.
QUICK = [*TINY, "model.max_positions=64", "data.max_length=32", "data.pairs=full", "data.copies=0"]
QUICK += ["data.long_length=null", "train.steps=30", "train.batch_size=16", "train.learning_rate=1e-3"]


@pytest.fixture(scope="module")
def teacher(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of four layers that has learnt something."""
    changes = [*QUICK, "model.num_layers=4", "objective.next_sentence=false", "train.steps=120"]
    changes += ["train.learning_rate=5e-3", "model.hidden_dropout=0", "model.attention_dropout=0"]
    run = tmp_path_factory.mktemp("teacher") / "run"
    pretrain(override(recipe("bert-tiny"), changes), world / "shards", run, device="cpu")
    return run


def distilled(teacher: Path, *changes: str):
    return override(with_teacher(recipe("bert-tiny"), teacher), [*QUICK, *changes])


def draw_batch(packed: bool) -> Batch:
    """Five sequences of unequal length; some tokens of each are predicted."""
    draw = np.random.default_rng(3)
    lengths = np.array([7, 12, 3, 9, 12])
    tokens = draw.integers(5, 99, lengths.sum())
    masked = np.sort(draw.permutation(len(tokens))[:11])
    batch = lay_out(tokens, np.zeros(len(tokens)), lengths, packed=packed)
    targets = draw.integers(5, 99, len(masked))
    batch = batch.with_labels({"masked": Label(masked, MASKED), "targets": Label(targets, TARGET)})
    return replace(batch, counts={"mlm": 11, "soft": 11, "cosine": len(tokens)})


def random_pair(config: DistillationConfig, **student) -> Distillation:
    """A student of two layers and a teacher of three, with large random weights."""
    model = Distillation(Encoder(EncoderConfig(**{**SIZES, "num_layers": 2, **student})), config)
    taught = MaskedLM(Encoder(EncoderConfig(**SIZES, num_layers=3)), PLAIN)
    randomise(model, 1)
    model.teacher = randomise(taught, 2).requires_grad_(False)
    return model.eval()


def total(model: Distillation, batch: Batch) -> torch.Tensor:
    found = model(batch)
    return sum(weight * found[name] / batch.counts[name] for name, weight in WEIGHTS.items())


def theirs(model: MaskedLM, kind: str) -> torch.nn.Module:
    """A model of `transformers` with the weights of one of ours."""
    import transformers  # here, so that the ranks start without it

    config = model.encoder.config
    sizes = {"vocab_size": 99, "max_position_embeddings": 64}
    if kind == "DistilBert":
        sizes |= {"dim": 32, "hidden_dim": 64, "n_heads": 2, "n_layers": config.num_layers}
    else:
        sizes |= {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
        sizes |= {"num_hidden_layers": config.num_layers}
    other = getattr(transformers, f"{kind}ForMaskedLM")(getattr(transformers, f"{kind}Config")(**sizes)).eval()
    tensors = {}
    for ours, stored in names_of(model).items():
        tensors |= stored.parts(model.state_dict()[ours].clone(), 0)
    other.load_state_dict(tensors, strict=False)
    return other


def their_losses(student: torch.nn.Module, taught: torch.nn.Module, batch: Batch, temperature: float = 2.0) -> dict:
    """The losses as the authors' script computes them, on a padded batch."""
    mask, rows = batch.layout.mask, batch.labels["masked"]
    inputs = {"input_ids": batch.tokens, "attention_mask": mask.long(), "output_hidden_states": True}
    ours, with_gradients = student(**inputs), taught(**inputs)
    s, t = (output.logits.flatten(0, 1)[rows] for output in (ours, with_gradients))
    kl = torch.nn.KLDivLoss(reduction="batchmean")
    soft = kl(F.log_softmax(s / temperature, -1), F.softmax(t / temperature, -1)) * temperature**2
    states = [output.hidden_states[-1][mask] for output in (ours, with_gradients)]
    cosine = torch.nn.CosineEmbeddingLoss(reduction="mean")(*states, torch.ones(len(states[0])))
    return {"mlm": F.cross_entropy(s, batch.labels["targets"]), "soft": soft, "cosine": cosine}


DISTILBERT = {"family": "distilbert", "num_segments": 0, "pooler_activation": "relu"}
STUDENTS = {"Bert": {}, "DistilBert": DISTILBERT}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", STUDENTS)
def test_losses_and_gradients_equal_the_authors(kind: str, packed: bool) -> None:
    model = random_pair(DistillationConfig(), **STUDENTS[kind])
    student, taught = theirs(model, kind), theirs(model.teacher, "Bert")
    expected, batch = their_losses(student, taught.requires_grad_(False), draw_batch(False)), draw_batch(packed)
    found = model(batch)
    for name, loss in expected.items():
        assert_close(found[name] / batch.counts[name], loss, atol=1e-5, rtol=1e-5)
    total(model, batch).backward()
    sum(WEIGHTS[name] * loss for name, loss in expected.items()).backward()
    wanted = {name: parameter.grad for name, parameter in student.named_parameters()}
    names = names_of(model)
    for name, parameter in model.named_parameters():
        if not name.startswith("teacher."):
            assert_close(parameter.grad, torch.cat([wanted[part] for part in names[name].names]), atol=1e-5, rtol=1e-4)
    assert all(parameter.grad is None for parameter in model.teacher.parameters())
    measured = {name: float(value.detach()) / count for name, (value, count) in model.measures(batch).items()}
    assert measured["soft_loss"] == pytest.approx(expected["soft"].item(), abs=1e-5)


def test_losses_are_equal_in_parts_and_with_padding_for_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = random_pair(DistillationConfig()), draw_batch(packed=True)
    whole, gradients = [], []
    for chunk, given in ((512, batch), (4, batch), (512, bucketed(batch))):
        monkeypatch.setattr(soft_targets, "AT_ONCE", chunk)
        model.zero_grad()
        total(model, given).backward()
        whole.append(torch.stack(list(model(given).values())))
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert len(bucketed(batch).tokens) > len(batch.tokens)
    for other in (1, 2):
        assert_close(whole[other], whole[0], atol=1e-5, rtol=1e-5)
        assert_close(gradients[other], gradients[0], atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fused_kernels_and_cuda_graphs(teacher: Path, world: Path, tmp_path: Path) -> None:
    model, batch = random_pair(DistillationConfig(), **DISTILBERT).cuda(), draw_batch(packed=True)
    batch = batch.to(torch.device("cuda"))
    with torch.autocast("cuda", torch.bfloat16):
        assert model.encoder.choice(batch).fused
        assert model.teacher.encoder.choice(batch).fused
        fused = model(batch)
        with plain_kernels():
            plain = model(batch)
    for name in WEIGHTS:
        assert_close(fused[name], plain[name], atol=0.1, rtol=0.03)
    half = override(with_teacher(recipe("distilbert-tiny"), teacher), ["train.steps=40", "train.evaluate_every=0"])
    pretrain(half, world / "shards", tmp_path / "run", device="cuda")
    assert scores(tmp_path / "run")["soft_loss"] < 0.1


def test_without_cosine_only_the_masked_states_are_computed() -> None:
    model, batch = random_pair(DistillationConfig()), draw_batch(packed=True)
    words = random_pair(DistillationConfig(cosine_weight=0.0))
    assert words.counts(words.config) == {"mlm": "targets", "soft": "targets"}
    found, less = model(batch), words(batch)
    assert "cosine" not in less
    assert_close([less["mlm"], less["soft"]], [found["mlm"], found["soft"]], atol=1e-4, rtol=1e-5)


def test_cost_counts_the_forward_pass_of_the_teacher() -> None:
    model = random_pair(DistillationConfig())
    ours, taught = model.encoder.config, model.teacher.encoder.config
    expected = training_flops(ours, [20, 9], 4, every_state=True) + forward_flops(taught, [20, 9], 4, every_state=True)
    assert model.flops([20, 9], 4) == expected
    how = {"half": False, "checkpointing": False, "processes": 1}
    own = training_memory(ours, 512, 32, 80, **how)
    assert model.memory(512, 32, 80, **how) == own + forward_memory(taught, 512, 32, 80, half=False)
    assert model.memory(512, 32, 80, **how) > own + 4 * sum(p.numel() for p in model.teacher.parameters())


def test_six_of_twelve_layers_are_those_that_were_published() -> None:
    assert layers_to_copy(12, 6) == [0, 2, 4, 7, 9, 11]
    assert [layers_to_copy(4, 2), layers_to_copy(3, 1), layers_to_copy(2, 2)] == [[0, 3], [0], [0, 1]]


@pytest.mark.parametrize("shared", ["none", "all"])
def test_student_starts_with_its_teachers_layers(shared: str) -> None:
    taught = randomise(MaskedLM(Encoder(EncoderConfig(**SIZES, num_layers=4, shared_layers=shared)), PLAIN), 2).eval()
    student = Distillation(Encoder(EncoderConfig(**SIZES, num_layers=2, num_segments=0)), DistillationConfig()).eval()
    copy_layers(student, taught)
    batch, x = draw_batch(packed=True), {}
    for name, model in (("student", student), ("teacher", taught)):
        embeddings = model.encoder.embeddings(batch.tokens, batch.segments, batch.positions)
        x[name] = model.encoder.layers[-1](embeddings, batch.layout)
    assert_close(x["student"], x["teacher"], atol=1e-5, rtol=1e-5)
    assert_close(student.masked_lm(x["student"]), taught.masked_lm(x["teacher"]), atol=1e-4, rtol=1e-5)
    assert student.masked_lm.decoder.weight is student.encoder.embeddings.tokens.weight


def scores(run: Path) -> dict[str, float]:
    return runlog.last_scores(run)


@pytest.fixture(scope="module")
def student(teacher: Path, world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A distilled run of two layers, with checkpoints."""
    run = tmp_path_factory.mktemp("student") / "run"
    pretrain(distilled(teacher, "train.save_every=12", "train.keep=9"), world / "shards", run, device="cpu")
    return run


def test_student_learns_faster_with_its_teacher(teacher: Path, student: Path, world: Path, tmp_path: Path) -> None:
    found = scores(student)
    assert {"mlm_loss", "mlm_perplexity", "mlm_accuracy", "soft_loss", "cosine_loss"} <= set(found)
    taught = distilled(teacher, "objective.init=random")
    pretrain(taught, world / "shards", tmp_path / "random", device="cpu")
    alone = override(replace(taught, objective=PLAIN), [])
    pretrain(alone, world / "shards", tmp_path / "alone", device="cpu")
    assert found["mlm_loss"] < scores(tmp_path / "random")["mlm_loss"] - 0.3
    assert found["mlm_loss"] < scores(tmp_path / "alone")["mlm_loss"] - 0.3
    assert found["mlm_loss"] < scores(teacher)["mlm_loss"] + 0.5
    assert found["soft_loss"] < 0.5 * scores(tmp_path / "random")["soft_loss"]


def test_saved_student_is_a_masked_language_model_without_its_teacher(student: Path, teacher: Path) -> None:
    saved = load_file(student / "model" / "model.safetensors")
    assert saved.keys() == load_file(student / "checkpoints" / "step-00000012" / "model.safetensors").keys()
    assert not [name for name in saved if "layer.2." in name]
    state = load_file(student / "checkpoints" / "step-00000012" / checkpoint.OPTIMIZER)
    assert not [name for name in state if "teacher" in name]
    loaded = load_folder(student / "model")
    assert isinstance(loaded.model, MaskedLM)
    assert loaded.missing == ()
    facts = read_json(student / "run.json")
    assert facts["teacher"]["folder"] == str(teacher / "model")
    assert facts["model"]["parameters"] == sum(p.numel() for p in loaded.model.parameters())


def test_resumed_run_gives_identical_bytes(student: Path, teacher: Path, world: Path, tmp_path: Path) -> None:
    run = cut(student, tmp_path / "cut", 12)
    config = distilled(teacher, "train.save_every=12", "train.keep=9")
    before = (teacher / "model" / "model.safetensors").read_bytes()
    pretrain(config, world / "shards", run, device="cpu", resume=True)
    assert weights(run) == weights(student)
    assert (teacher / "model" / "model.safetensors").read_bytes() == before


def test_resuming_with_another_teacher_is_refused(student: Path, teacher: Path, world: Path, tmp_path: Path) -> None:
    run = cut(student, tmp_path / "cut", 12)
    other = distilled(world / "run", "train.save_every=12", "train.keep=9", "objective.init=random")
    with pytest.raises(UserError, match=r"--resume: objective\.(init|teacher)"):
        pretrain(other, world / "shards", run, device="cpu", resume=True)
    facts = read_json(run / "run.json")
    changed = distilled(teacher, "train.save_every=12", "train.keep=9")
    with pytest.MonkeyPatch.context() as patch:  # other weights in the same folder
        patch.setattr("bertsmith.pretraining.teacher.weights_facts", lambda f: {"folder": str(f), "sha256": "other"})
        with pytest.raises(UserError, match=r"--resume: teacher\.sha256 is .* and 'other' now"):
            pretrain(changed, world / "shards", run, device="cpu", resume=True)
    assert read_json(run / "run.json") == facts


def both(teacher: Path, data: Path, folder: Path, changes: list[str]) -> None:
    for parallel in ("ddp", "fsdp"):
        pretrain(distilled(teacher, *changes, f"train.parallel={parallel}"), data, folder / parallel, device="cpu")


@pytest.mark.slow
def test_two_ranks_train_the_weights_of_one(teacher: Path, world: Path, tmp_path: Path) -> None:
    changes = ["train.steps=4", "train.micro_batch_size=5"]
    pretrain(distilled(teacher, *changes), world / "shards", tmp_path / "alone", device="cpu")
    on_ranks(both, teacher, world / "shards", tmp_path, changes)
    alone = load_file(tmp_path / "alone" / "model" / "model.safetensors")
    for parallel in ("ddp", "fsdp"):
        found = load_file(tmp_path / parallel / "model" / "model.safetensors")
        assert found.keys() == alone.keys()
        assert all(torch.allclose(found[name], alone[name], atol=2e-6) for name in alone), parallel
        measured = runlog.last_scores(tmp_path / parallel)
        assert measured == pytest.approx(runlog.last_scores(tmp_path / "alone"), abs=1e-4)


def test_half_of_a_bert_is_saved_as_distilbert(teacher: Path, world: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForMaskedLM

    config = override(with_teacher(recipe("distilbert-tiny"), teacher), ["train.steps=3", "train.evaluate_every=0"])
    pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    loaded = load_folder(tmp_path / "run" / "model")
    found = loaded.model.encoder.config
    assert (found.family, found.num_layers, found.hidden_size, found.num_segments) == ("distilbert", 2, 32, 0)
    other = AutoModelForMaskedLM.from_pretrained(tmp_path / "run" / "model").eval()
    assert type(other).__name__ == "DistilBertForMaskedLM"
    batch = draw_batch(packed=False)
    expected = other(input_ids=batch.tokens, attention_mask=batch.layout.mask.long()).logits.flatten(0, 1)
    assert_close(loaded.model.eval().logits(batch)["mlm"], expected[batch.labels["masked"]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["roberta", "roberta-prelayernorm", "albert", "electra"])
def test_teacher_of_another_family(family: str, world: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(world / "tok")
    own = {"albert": {"embedding_size": 16, "shared_layers": "all"}, "roberta-prelayernorm": {"norm_first": True}}
    own["electra"] = {"embedding_size": 16, "pooler_activation": "gelu", "pooler_input_dropout": True}  # a generator
    sizes = {**SIZES, "vocab_size": tokenizer.vocab_size, "num_layers": 4, "family": family, **own.get(family, {})}
    taught = randomise(MaskedLM(Encoder(EncoderConfig(**sizes)), PLAIN), 2)
    save_folder(tmp_path / "teacher", taught, tokenizer, Notes())
    changes = ["objective.init=random", "train.steps=2", "train.learning_rate=0"]
    pretrain(distilled(tmp_path / "teacher", *changes), world / "shards", tmp_path / "bert", device="cpu")
    half = ["objective.half=true", "train.steps=2", "train.learning_rate=0"]
    pretrain(distilled(tmp_path / "teacher", *half), world / "shards", tmp_path / "half", device="cpu")
    loaded = load_folder(tmp_path / "half" / "model").model
    assert (loaded.encoder.config.family, loaded.encoder.config.num_layers) == (family, 2)
    assert_close(loaded.encoder.layers[1].attention.qkv.weight, taught.encoder.layers[3].attention.qkv.weight)
    assert scores(tmp_path / "half")["soft_loss"] < scores(tmp_path / "bert")["soft_loss"]


def test_a_saved_student_goes_on_learning(student: Path, teacher: Path, world: Path, tmp_path: Path) -> None:
    still = ["train.steps=1", "train.learning_rate=0"]
    pretrain(distilled(teacher, *still), world / "shards", tmp_path / "run", model=student, device="cpu")
    assert scores(tmp_path / "run")["soft_loss"] == pytest.approx(scores(student)["soft_loss"], abs=1e-5)


def test_muon_trains_the_student_alone(teacher: Path, world: Path, tmp_path: Path) -> None:
    muon = ["train.optimizer=muon", "train.learning_rate=0.01", "train.steps=3", "train.save_every=2"]
    pretrain(distilled(teacher, *muon), world / "shards", tmp_path / "run", device="cpu")
    path = checkpoint.checkpoints(tmp_path / "run")[0]
    names = {entry.partition(":")[2] for entry in load_file(path / checkpoint.OPTIMIZER)}
    assert {name.split(".")[0] for name in names} == {"encoder", "masked_lm"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.hidden_size=64"], "model.hidden_size is 64, and the teacher's is 32: its layers do not fit"),
        (["model.num_layers=5"], "model.num_layers is 5, and the teacher has only 4 layers"),
        (["model.hidden_size=64", "objective.init=random"], "set objective.cosine_weight=0, or model.hidden_size=32"),
        (["data.max_length=128", "model.max_positions=128"], "data.max_length 128 is longer than the 64 positions of"),
        (["objective.teacher="], "objective.kind=distillation needs a teacher: --teacher MODEL"),
        (["objective.temperature=0"], "objective.temperature must be above 0"),
        (["objective.init=middle"], "objective.init"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_fix(
    changes: list[str], words: str, teacher: Path, world: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        pretrain(distilled(teacher, *changes), world / "shards", tmp_path / "run", device="cpu")
    assert words in str(error.value)
    assert not (tmp_path / "run").exists()


def test_teacher_that_cannot_teach_is_refused(world: Path, tmp_path: Path, tiny_tokenizer) -> None:
    finetune("classify", world / "run", world / "train.csv", tmp_path / "tuned", steps=1, device="cpu")
    with pytest.raises(UserError, match=r"has no masked-word head to learn from; give a model that was pre-trained"):
        pretrain(distilled(tmp_path / "tuned"), world / "shards", tmp_path / "run", device="cpu")
    electra = EncoderConfig(**SIZES, family="electra", pooler_activation="gelu", pooler_input_dropout=True)
    electra = replace(electra, vocab_size=tiny_tokenizer.vocab_size)
    save_folder(tmp_path / "electra", Discriminator(Encoder(electra)), tiny_tokenizer, Notes())
    detector = (
        r"electra is a detector of replaced tokens: .* words that its teacher predicts at masks\. Give its generator"
    )
    with pytest.raises(UserError, match=f"{detector}, or a model that was pre-trained on masked words"):
        pretrain(distilled(tmp_path / "electra"), world / "shards", tmp_path / "run", device="cpu")
    (tmp_path / "electra" / "generator").mkdir()
    with pytest.raises(UserError, match=rf"{detector} \({tmp_path}/electra/generator\), or a model"):
        pretrain(distilled(tmp_path / "electra"), world / "shards", tmp_path / "run", device="cpu")
    other = MaskedLM(Encoder(EncoderConfig(**{**SIZES, "vocab_size": tiny_tokenizer.vocab_size})), PLAIN)
    save_folder(tmp_path / "other", other, tiny_tokenizer, Notes())
    with pytest.raises(UserError, match=r"is not the one that .* was built with .* corpus build … --tokenizer .*other"):
        pretrain(distilled(tmp_path / "other"), world / "shards", tmp_path / "run", device="cpu")

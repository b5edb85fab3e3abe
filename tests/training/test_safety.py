"""Saved work survives bad steps, damaged checkpoints, full disks and signals."""

import errno
import json
import math
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import cut, settings, weights
from safetensors import safe_open
from test_training import examples, task_model
from torch import nn

from bertsmith.batch import Batch, collate
from bertsmith.config import override
from bertsmith.errors import Interrupted, UserError
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.model.heads import TaskModel
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.pretraining import held_out
from bertsmith.pretraining.run import pretrain
from bertsmith.training import checkpoint, fit, run, runlog, stopping
from bertsmith.training.checkpoint import checkpoints
from bertsmith.training.divergence import LIMIT, Guard, raise_diverged

EIGHT = settings("train.steps=8", "train.save_every=2", "train.keep=9")


@pytest.fixture(scope="session")
def whole(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run of eight steps with all its checkpoints."""
    path = tmp_path_factory.mktemp("whole") / "run"
    pretrain(EIGHT, world / "shards", path, device="cpu")
    return path


def names(path: Path) -> list[int]:
    return [int(p.name.removeprefix("step-")) for p in checkpoints(path)]


# --- losses that are not finite


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Multiplies the first loss of chosen steps by a factor, in the forward pass."""
    step = -1
    gradients = fit.gradients

    def watched(*arguments):
        nonlocal step
        step = arguments[4]
        return gradients(*arguments)

    monkeypatch.setattr(fit, "gradients", watched)

    def choose(model: type[nn.Module], steps: set[int], factor: float) -> None:
        forward = model.forward

        def poisoned(self, batch: Batch):
            losses = forward(self, batch)
            name = next(iter(losses))
            return {**losses, name: losses[name] * (factor if step in steps else 1.0)}

        monkeypatch.setattr(model, "forward", poisoned)

    return choose


def same_files(first: Path, second: Path) -> bool:
    files = ("model.safetensors", "optimizer.safetensors")
    return all((first / file).read_bytes() == (second / file).read_bytes() for file in files)


@pytest.mark.parametrize("factor", [math.nan, math.inf, 1e4], ids=["nan", "infinite", "exploding"])
def test_bad_steps_are_skipped_and_counted(poison, factor: float, world: Path, tmp_path: Path) -> None:
    poison(MaskedLM, {2, 5}, factor)
    config = settings("train.steps=8", "train.save_every=1", "train.keep=9")
    scores = pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    assert math.isfinite(scores["mlm_loss"])
    saved = checkpoints(tmp_path / "run")
    assert [same_files(a, b) for a, b in pairwise(saved)] == [0, 1, 0, 0, 1, 0, 0]
    records = [r for r in runlog.read(tmp_path / "run") if "learning_rate" in r]
    assert [r.get("skipped", 0) for r in records] == [0, 0, 1, 1, 1, 2, 2, 2]
    assert ["loss" in r for r in records] == [True, True, False, True, True, False, True, True]
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON, which has no NaN


def test_bad_first_step_is_skipped(poison, world: Path, tmp_path: Path) -> None:
    poison(MaskedLM, {0}, math.nan)
    pretrain(settings("train.steps=3"), world / "shards", tmp_path / "run", device="cpu")
    assert runlog.read(tmp_path / "run")[2]["skipped"] == 1


def test_consecutive_bad_steps_end_the_run_even_across_a_resume(poison, world: Path, tmp_path: Path) -> None:
    poison(MaskedLM, {1, *range(3, 3 + LIMIT)}, math.nan)
    config = settings("train.steps=12", "train.save_every=1", "train.keep=20")
    errors = []
    with pytest.raises(UserError) as caught:
        pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    errors.append(str(caught.value))
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-00000005" / "trainer.json").read_text())
    assert (state["skipped"], state["in_a_row"]) == (3, 2)
    for late in checkpoints(tmp_path / "run")[5:]:
        shutil.rmtree(late)
    with pytest.raises(UserError) as caught:
        pretrain(config, world / "shards", tmp_path / "run", device="cpu", resume=True)
    errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert f"nan in step {3 + LIMIT}; first bad tensor: the loss itself, in the batch of samples" in errors[0]
    samples = errors[0].split("samples ")[1].split(". ")[0].split(", ")
    assert len(samples) == 8
    assert all(sample.isdigit() for sample in samples)


def test_divergence_by_a_high_learning_rate_is_diagnosed(world: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"first bad tensor: .*(parameter|output of|gradient of).*Lower train\.learning"
    ):
        pretrain(
            settings("train.steps=20", "train.learning_rate=1000"), world / "shards", tmp_path / "run", device="cpu"
        )


def test_bad_steps_of_fine_tuning_are_skipped_too(poison, world: Path, tmp_path: Path) -> None:
    config = override(FinetuneConfig("classify"), ["train.steps=10", "train.batch_size=8", "data.max_length=32"])
    poison(TaskModel, {4}, math.inf)
    finetune(config, world / "run", world / "train.csv", tmp_path / "one", device="cpu")
    assert [r["skipped"] for r in runlog.read(tmp_path / "one") if "skipped" in r][-1] == 1
    poison(TaskModel, set(range(4, 10)), math.inf)
    with pytest.raises(UserError, match=r"first bad tensor: the loss itself, in the batch of samples \d+"):
        finetune(config, world / "run", world / "train.csv", tmp_path / "many", device="cpu")


class _Backwards(torch.autograd.Function):
    """The identity in the forward pass; the backward pass scales the gradient."""

    @staticmethod
    def forward(context, x: torch.Tensor, factor: float) -> torch.Tensor:
        context.factor = factor
        return x.clone()

    @staticmethod
    def backward(context, gradient: torch.Tensor):
        return gradient * context.factor, None


def diagnosis(damage_model: Callable[[TaskModel, list[Batch]], None]) -> str:
    """The bad tensor that the error names for a damaged model and samples 10 to 13 and 14 to 17."""
    rows, model = examples(8), task_model()
    batches = [collate(rows[i : i + 4], packed=True, indices=np.arange(10 + i, 14 + i)) for i in (0, 4)]
    for batch in batches:  # a skipped step leaves its gradients
        model(batch)["task"].backward()
    damage_model(model, batches)
    with pytest.raises(UserError) as caught:
        raise_diverged(model, batches, lambda number: model(batches[number])["task"] / 8, math.nan, 6)
    return str(caught.value).split("first bad tensor: ")[1].split(". ")[0]


def on_the_second(model: TaskModel, module: nn.Module, batches: list[Batch], change) -> None:
    """Change a module's output in the second micro-batch, recognised by its number of tokens."""
    module.register_forward_hook(lambda m, a, out: change(out) if len(a[0]) == batches[1].num_tokens else None)


def test_diagnosis_names_a_parameter() -> None:
    def damage_model(model: TaskModel, batches: list[Batch]) -> None:
        for parameter in model.encoder.layers[1].parameters():
            parameter.data.view(-1)[-1] = math.inf

    first = next(name for name, _ in task_model().named_parameters() if "layers.1." in name)
    assert diagnosis(damage_model) == f"parameter {first}, in the batch of samples 10, 11, 12, 13"


def test_diagnosis_names_an_output_and_its_batch() -> None:
    def damage_model(model: TaskModel, batches: list[Batch]) -> None:
        on_the_second(model, model.encoder.layers[1], batches, lambda out: out * math.nan)

    assert diagnosis(damage_model) == "output of encoder.layers.1, in the batch of samples 14, 15, 16, 17"


def test_diagnosis_names_a_gradient_and_its_batch() -> None:
    def damage_model(model: TaskModel, batches: list[Batch]) -> None:
        on_the_second(model, model.encoder.layers[0], batches, lambda out: _Backwards.apply(out, math.nan))
        next(model.parameters()).grad.fill_(math.nan)  # left over from the step, the sum over both batches

    found = diagnosis(damage_model)
    assert found.startswith("gradient of encoder.layers.0.")
    assert found.endswith("samples 14, 15, 16, 17")


def test_diagnosis_of_an_exploding_loss_names_the_largest_tensor() -> None:
    def damage_model(model: TaskModel, batches: list[Batch]) -> None:
        on_the_second(model, model.encoder.layers[1], batches, lambda out: out * 1e20)

    found = diagnosis(damage_model)
    assert "all are finite, the largest is " in found
    assert found.endswith("samples 14, 15, 16, 17")


def test_guard_compares_with_the_first_loss() -> None:
    guard = Guard()
    assert guard.accepts(2.0, 1.0)
    assert guard.accepts(19.0, 1.0)
    assert not guard.accepts(21.0, 1.0)
    assert not guard.accepts(1.0, math.inf)
    assert (guard.skipped, guard.in_a_row) == (2, 2)
    assert guard.accepts(1.0, 1.0)
    assert (guard.skipped, guard.in_a_row) == (2, 0)


# --- checkpoints


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-30])


def wrong_step(file: Path) -> None:
    """Write valid JSON with a wrong step."""
    file.write_text(file.read_text().replace('"step": 6', '"step": 7'))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("model.safetensors", flip),
        ("optimizer.safetensors", flip),
        ("optimizer.safetensors", truncate),
        ("trainer.json", truncate),
        ("trainer.json", wrong_step),
        ("tokenizer.json", truncate),
        ("config.json", Path.unlink),
        ("trainer.json", Path.unlink),
    ],
)
def test_damaged_checkpoint_is_skipped(
    file: str, damage, world: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    again = cut(whole, tmp_path / "cut", 6)
    damage(again / "checkpoints" / "step-00000006" / file)
    pretrain(EIGHT, world / "shards", again, device="cpu", resume=True)
    err = capfd.readouterr().err
    assert "warning: checkpoint" in err
    assert "step-00000006 cannot be read" in err
    assert "after step 4" in err
    assert weights(again) == weights(whole)


def test_run_starts_over_when_all_checkpoints_are_damaged(world: Path, whole: Path, tmp_path: Path, capfd) -> None:
    again = cut(whole, tmp_path / "cut", 6)
    for path in checkpoints(again):
        flip(path / "model.safetensors")
    pretrain(EIGHT, world / "shards", again, device="cpu", resume=True)
    err = capfd.readouterr().err
    assert err.count("cannot be read") == 3
    assert "starting from the beginning" in err
    assert weights(again) == weights(whole)
    assert [r["step"] for r in runlog.read(again)] == [r["step"] for r in runlog.read(whole)]


def test_token_count_is_restored_on_resume(world: Path, whole: Path, tmp_path: Path) -> None:
    again = cut(whole, tmp_path / "cut", 6)
    pretrain(EIGHT, world / "shards", again, device="cpu", resume=True)
    counts = [[r["tokens"] for r in runlog.read(run) if "loss" in r] for run in (again, whole)]
    assert len(counts[0]) == 8
    assert counts[0] == counts[1] == sorted(set(counts[1]))


def test_new_checkpoint_is_kept_although_damaged_ones_have_later_steps(
    world: Path, whole: Path, tmp_path: Path
) -> None:
    again = cut(whole, tmp_path / "cut", 6)
    for path in checkpoints(again)[1:]:
        flip(path / "model.safetensors")
    found = checkpoint.latest_checkpoint(again)
    assert found is not None
    assert found[1].step == 2
    state = checkpoint.TrainerState(3)
    checkpoint.save_checkpoint(again, state, task_model(), [], lambda folder, tensors: None, keep=1)
    assert names(again) == [3, 4, 6]  # 3 is kept, although the damaged ones have later steps


def test_best_checkpoint_is_kept(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([math.nan, 3.0, 4.0, 4.2, 4.5])
    monkeypatch.setattr(held_out, "evaluate", lambda *a: {"mlm_loss": next(found)})
    often = ("train.save_every=2", "train.keep=2", "train.evaluate_every=2")
    config = settings("train.steps=10", "data.long_length=null", *often)
    assert pretrain(config, world / "shards", tmp_path / "run", device="cpu")["mlm_loss"] == 4.5
    assert names(tmp_path / "run") == [4, 8, 10]
    best = checkpoint.best_checkpoint(checkpoints(tmp_path / "run"))
    assert best is not None
    assert best.name == "step-00000004"


def test_earliest_of_equally_good_checkpoints_is_the_best(tmp_path: Path) -> None:
    for step, score in ((2, 1.0), (4, 3.0), (6, None), (8, 3.0), (10, 2.0)):
        folder = tmp_path / "checkpoints" / f"step-{step:08}"
        folder.mkdir(parents=True)
        (folder / checkpoint.STATE).write_text(json.dumps({"step": step, "score": score}))
    best = checkpoint.best_checkpoint(checkpoints(tmp_path))
    assert best is not None
    assert checkpoint.step_of(best) == 4


def test_checkpoints_are_saved_by_time_and_after_the_last_step(world: Path, tmp_path: Path) -> None:
    pretrain(settings("train.steps=5", "train.save_minutes=1e-9"), world / "shards", tmp_path / "run", device="cpu")
    assert names(tmp_path / "run") == [4, 5]
    pretrain(settings("train.steps=5"), world / "shards", tmp_path / "short", device="cpu")
    assert names(tmp_path / "short") == []  # a run shorter than `save_minutes` needs no checkpoint


def test_checkpoint_is_not_written_twice(world: Path, whole: Path, tmp_path: Path, monkeypatch) -> None:
    """A resumed run that is signalled before its first step does not rewrite its checkpoint."""
    again = cut(whole, tmp_path / "cut", 6)
    before = {p: p.stat().st_mtime_ns for p in again.rglob("step-*/*")}
    agree = fit._Loop._agree

    def signalled(self, *arguments):
        signal.raise_signal(signal.SIGTERM)
        return agree(self, *arguments)

    monkeypatch.setattr(fit._Loop, "_agree", signalled)
    with pytest.raises(Interrupted, match=r"after step 6; saved .*step-00000006"):
        pretrain(EIGHT, world / "shards", again, device="cpu", resume=True)
    assert {p: p.stat().st_mtime_ns for p in again.rglob("step-*/*")} == before


def only_plain_files(run: Path) -> None:
    """Assert that every file of a run is text, JSON or safetensors, which can hold no code."""
    for file in run.rglob("*"):
        if file.suffix == ".safetensors":
            with safe_open(file, "pt") as opened:  # refuses a file with anything besides header and tensors
                assert list(opened.keys())
        elif file.suffix == ".json":
            json.loads(file.read_bytes())
        elif file.suffix == ".jsonl":
            [json.loads(line) for line in file.read_text().splitlines()]
        else:
            assert file.is_dir() or (file.suffix in (".txt", ".md") and b"\0" not in file.read_bytes()), file


def test_run_folder_holds_no_pickle(whole: Path) -> None:
    assert names(whole) == [2, 4, 6, 8]
    only_plain_files(whole)


@pytest.mark.parametrize("moment", ["config", "facts"])
def test_run_killed_while_its_folder_was_created_resumes(moment: str, world: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    if moment == "config":
        (out / ".config.json.123.partial").write_text("{")
    else:
        shutil.copy(whole / "config.json", out)
    pretrain(EIGHT, world / "shards", out, device="cpu", resume=True)
    assert weights(out) == weights(whole)
    assert json.loads((out / "run.json").read_text()).keys() == json.loads((whole / "run.json").read_text()).keys()


# --- full disks


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of files, so that writing fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_saved_checkpoints_survive_a_full_disk(world: Path, whole: Path, tmp_path: Path, capfd) -> None:
    again = cut(whole, tmp_path / "cut", 2)
    with largest_file(100_000), pytest.raises(UserError, match=r"cut/model could not be written: .*--resume"):
        pretrain(EIGHT, world / "shards", again, device="cpu", resume=True)
    err = capfd.readouterr().err
    for step in (4, 6, 8):
        assert f"warning: no checkpoint after step {step}: " in err
    assert names(again) == [2]
    assert not list(again.rglob("*.partial"))
    assert runlog.read(again)[-1]["step"] == 8  # it trained to its last step
    pretrain(EIGHT, world / "shards", again, device="cpu", resume=True)
    assert weights(again) == weights(whole)


def test_run_whose_model_could_not_be_written_resumes_without_training(
    world: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def full(path: Path) -> Iterator[Path]:
        raise OSError(28, "No space left on device")
        yield path

    with monkeypatch.context() as patched:
        patched.setattr(run, "new_folder", full)
        with pytest.raises(UserError, match=r"could not be written: .*No space left.*--resume"):
            pretrain(EIGHT, world / "shards", tmp_path / "run", device="cpu")
    monkeypatch.setattr(fit, "gradients", lambda *a: pytest.fail("a step is done again"))
    scores = pretrain(EIGHT, world / "shards", tmp_path / "run", device="cpu", resume=True)
    assert scores["steps"] == 8
    assert weights(tmp_path / "run") == weights(whole)


def refusing(number: int) -> Callable[[int, int, int], None]:
    def allocate(handle: int, start: int, size: int) -> None:
        raise OSError(number, os.strerror(number))

    return allocate


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_run_is_refused_before_its_first_step_if_a_checkpoint_has_no_room(
    world: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refusing(number))
        patched.setattr(fit, "gradients", lambda *a: pytest.fail("a step is done"))
        patched.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=400_000))
        needed = r"a checkpoint of this run takes 1 MB, and the disk has 0 MB free\. Make room and add --resume"
        with pytest.raises(UserError, match=f"^{re.escape(str(out))}: {os.strerror(number)}: {needed}"):
            pretrain(EIGHT, world / "shards", out, device="cpu")
    assert not list(out.rglob("*.partial"))
    pretrain(EIGHT, world / "shards", out, device="cpu", resume=True)
    assert weights(out) == weights(whole)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.EFBIG, None])
def test_file_systems_that_reserve_no_room_are_used_without(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    if number is None:
        monkeypatch.delattr(os, "posix_fallocate")
    else:
        monkeypatch.setattr(os, "posix_fallocate", refusing(number))
    short = settings("train.steps=1")
    assert pretrain(short, world / "shards", tmp_path / "run", device="cpu")["steps"] == 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "lamb"])
def test_room_is_held_until_the_first_checkpoint_which_it_fits(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    held, reserve, save = [], checkpoint._reserve, checkpoint.save_checkpoint

    def reserved(run: Path, size: int) -> None:
        reserve(run, size)
        held.append(file.stat().st_size if (file := checkpoint._held_room(run)).exists() else 0)

    def saved(run: Path, *arguments) -> Path | None:
        before = checkpoint._held_room(run).exists()
        path = save(run, *arguments)
        held.append((before, checkpoint._held_room(run).exists(), sum(f.stat().st_size for f in path.iterdir())))
        return path

    monkeypatch.setattr(checkpoint, "_reserve", reserved)
    monkeypatch.setattr(checkpoint, "save_checkpoint", saved)
    config = settings("train.steps=4", "train.save_every=2", f"train.optimizer={optimizer}")
    pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    size, (before, after, written), (again, *_) = held
    assert before
    assert not after
    assert not again
    tokenizer = sum((world / "tok" / name).stat().st_size for name in ("tokenizer.json", "vocab.txt"))
    assert written - tokenizer == pytest.approx(size, rel=0.05)


def test_unwritable_metrics_do_not_end_a_run(tmp_path: Path, capfd) -> None:
    append = runlog.open_log(tmp_path, 0)
    append({"step": 1, "words": "x" * 50_000})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with largest_file(size + 10):
        append({"step": 2, "loss": 1.0})
    assert "the record of step 2 is lost" in capfd.readouterr().err
    append({"step": 3, "loss": 1.0})
    assert [r["step"] for r in runlog.read(tmp_path)] == [1, 3]


def test_truncated_lines_of_metrics_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo{"step": 3}\n{"step": 4}\n{"step": 5')
    assert [r["step"] for r in runlog.read(tmp_path)] == [1, 4]
    runlog.open_log(tmp_path, 4)({"step": 5})
    assert [r["step"] for r in runlog.read(tmp_path)] == [1, 4, 5]


# --- signals


def signal_in_step(monkeypatch: pytest.MonkeyPatch, step: int, *numbers: int) -> None:
    """Send signals to this process in the middle of a step."""
    gradients = fit.gradients

    def interrupted(*arguments):
        if arguments[4] == step:
            for number in numbers:
                signal.raise_signal(number)
        return gradients(*arguments)

    monkeypatch.setattr(fit, "gradients", interrupted)


@pytest.mark.parametrize(
    ("number", "step"),
    [
        (signal.SIGTERM, 0),
        (signal.SIGINT, 4),
        pytest.param(signal.SIGTERM, 4, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow),
    ],
)
def test_signal_saves_a_checkpoint_and_prints_how_to_resume(
    number: int, step: int, world: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    handlers = [signal.getsignal(n) for n in stopping.SIGNALS]
    with monkeypatch.context() as patched:
        signal_in_step(patched, step, number, number)  # a cluster may send it twice at once
        with pytest.raises(Interrupted) as caught:
            pretrain(EIGHT, world / "shards", tmp_path / "run", device="cpu")
    assert caught.value.code == 128 + number
    saved = tmp_path / "run" / "checkpoints" / f"step-{step + 1:08}"
    assert str(caught.value) == f"stopped after step {step + 1}; saved {saved}. The same command with --resume goes on"
    assert f"{signal.Signals(number).name}: saving after this step" in capfd.readouterr().err
    assert [signal.getsignal(n) for n in stopping.SIGNALS] == handlers
    pretrain(EIGHT, world / "shards", tmp_path / "run", device="cpu", resume=True)
    assert weights(tmp_path / "run") == weights(whole)


def test_second_signal_stops_at_once(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "ECHO", 0.0)
    signal_in_step(monkeypatch, 3, signal.SIGTERM, signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            pretrain(EIGHT, world / "shards", tmp_path / "run", device="cpu")
    finally:
        signal.signal(signal.SIGINT, before)
    assert names(tmp_path / "run") == [2]


def test_run_stopped_before_its_first_step_resumes(world: Path, whole: Path, tmp_path: Path, monkeypatch) -> None:
    agree = fit._Loop._agree

    def signalled(self, *arguments):
        signal.raise_signal(signal.SIGINT)
        return agree(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(fit._Loop, "_agree", signalled)
        with pytest.raises(Interrupted, match="after step 0; saved"):
            pretrain(EIGHT, world / "shards", tmp_path / "run", device="cpu")
    pretrain(EIGHT, world / "shards", tmp_path / "run", device="cpu", resume=True)
    assert weights(tmp_path / "run") == weights(whole)


# --- TensorBoard


def test_tensorboard_has_the_records_of_metrics(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = override(EIGHT, ["train.tensorboard=true"])
    with monkeypatch.context() as patched:
        signal_in_step(patched, 4, signal.SIGTERM)
        with pytest.raises(Interrupted):
            pretrain(config, world / "shards", tmp_path / "run", device="cpu")
    for late in checkpoints(tmp_path / "run")[-1:]:
        shutil.rmtree(late)  # so that the resumed run repeats steps that TensorBoard already has
    pretrain(config, world / "shards", tmp_path / "run", device="cpu", resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    shown = [(e.step, pytest.approx(e.value)) for e in events.Scalars("loss")]
    assert [(r["step"], r["loss"]) for r in runlog.read(tmp_path / "run") if "loss" in r] == shown
    assert len(shown) == 8
    assert "dev_mlm_loss" in events.Tags()["scalars"]


def test_unwritable_tensorboard_does_not_end_a_run(tmp_path: Path, capfd, monkeypatch) -> None:
    died: list[BaseException] = []
    monkeypatch.setattr(threading, "excepthook", lambda given: died.append(given.exc_value))
    before = set(threading.enumerate())
    append = runlog.open_log(tmp_path, 0, tensorboard=True)
    (writer,) = set(threading.enumerate()) - before
    with largest_file(1_000):
        for step in range(1, 12):
            append({"step": step, **dict.fromkeys("abcde", 1)})
        writer.join(timeout=30)
    assert [type(error) for error in died] == [OSError]  # TensorBoard's own thread dies, the run does not
    err = capfd.readouterr().err
    assert len(runlog.read(tmp_path)) == 11
    assert err.count("tensorboard: File too large; it gets no more records") == err.count("warning") == 1


def test_missing_tensorboard_is_an_error_before_anything_is_written(world: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(runlog, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'bertsmith\[tensorboard\]'"):
        pretrain(override(EIGHT, ["train.tensorboard=true"]), world / "shards", tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()

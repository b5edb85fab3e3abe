"""Damaged files, full disks and bad losses are reported in one line that names the file."""

import errno
import math
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import settings
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bertsmith.config import override
from bertsmith.demo import run as demonstration
from bertsmith.errors import Diverged, Interrupted, UserError, suggestion
from bertsmith.finetuning.protocols import PROTOCOL, SUMMARY, finetune_many, glue
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.folders import locked, naming, new_file, new_folder
from bertsmith.model.heads import TaskModel
from bertsmith.paper import reproduce as tables
from bertsmith.pretraining.run import pretrain
from bertsmith.training import runlog
from bertsmith.training.run import facts_of, read_checked

QUICK = ["train.steps=4", "train.batch_size=8", "data.max_length=16", "train.save_every=2"]


@pytest.fixture(scope="module")
def protocol(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("protocol") / "out"
    seeds(world, out)
    return out


def seeds(world: Path, out: Path, **options) -> dict:
    config, rows = override(FinetuneConfig("classify"), QUICK), world / "train.csv"
    return finetune_many(
        config, world / "run", rows, out, seeds=2, dev=world / "dev.csv", device="cpu", **{"resume": True, **options}
    )


def refusal(work: Callable[[], object]) -> str:
    """The error message, or an empty string without an error."""
    try:
        work()
    except UserError as error:
        return str(error)
    return ""


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [PROTOCOL, SUMMARY, "seed-1/run.json", "seed-1/metrics.jsonl"])
def test_flipped_byte_of_a_protocol_is_an_error_in_one_line(name: str, protocol: Path, world, tmp_path) -> None:
    before, refused = read_checked(protocol / SUMMARY), 0
    size = (protocol / name).stat().st_size
    for turn, place in enumerate(range(1, size - 1, max(1, size // 12))):
        out = shutil.copytree(protocol, tmp_path / str(turn))
        flip(out / name, place)
        message = refusal(lambda out=out: seeds(world, out))
        assert "\n" not in message
        assert not message or str(out / name) in message
        refused += bool(message)
        if not message:  # a skipped record, or a damaged key of the checksum, which older files lack
            assert read_checked(out / SUMMARY)["best"]["folder"] == before["best"]["folder"]
    assert refused >= 10 or name.endswith("jsonl")


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "config.json"])
def test_flipped_byte_of_an_unfinished_run_is_an_error_in_one_line(name: str, world: Path, tmp_path: Path) -> None:
    config = settings("train.steps=4", "train.save_every=2", "data.long_length=null")
    pretrain(config, world / "shards", tmp_path / "whole", device="cpu")
    shutil.rmtree(tmp_path / "whole" / "model")
    size, refused = (tmp_path / "whole" / name).stat().st_size, 0
    for turn, place in enumerate(range(1, size - 1, max(1, size // 8))):
        run = shutil.copytree(tmp_path / "whole", tmp_path / str(turn))
        flip(run / name, place)
        message = refusal(lambda run=run: pretrain(config, world / "shards", run, device="cpu", resume=True))
        assert "\n" not in message
        assert not message or str(run / name) in message
        refused += bool(message)
    assert refused >= 5 or name == "metrics.jsonl"


def test_damaged_lines_of_metrics_are_skipped_with_a_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines = [
        '{"step": 1, "loss": 2.0}',
        "{",
        "[1]",
        '{"stfp": 2}',
        '{"step": "3"}',
        "\x00",
        '{"step": 4}',
        '{"step": 5',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [record["step"] for record in runlog.read(tmp_path)] == [1, 4]
    err = capfd.readouterr().err
    assert [f"metrics.jsonl line {n} is damaged and left out" in err for n in range(1, 9)] == [
        False, True, True, True, True, True, False, False,
    ]  # fmt: skip  # a crash may truncate the last line


def test_finished_run_without_scores_is_an_error(protocol: Path, world: Path, tmp_path: Path) -> None:
    out = shutil.copytree(protocol, tmp_path / "out")
    (out / "seed-2" / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"seed-2/metrics\.jsonl has no scores of a finished run; remove .*seed-2"):
        seeds(world, out)


def test_damaged_summary_is_an_error(protocol: Path, tmp_path: Path) -> None:
    out = shutil.copytree(protocol, tmp_path / "out")
    (out / SUMMARY).write_text("{")
    with pytest.raises(UserError, match=r"summary\.json is not valid JSON"):
        glue([tmp_path])


def test_facts_of_older_runs_are_read_without_a_checksum(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"start": "bert"}')
    assert facts_of(tmp_path) == {"start": "bert"}


@pytest.mark.parametrize("resume", [False, True])
def test_protocol_killed_at_its_start_is_started_again(
    resume: bool, protocol: Path, world: Path, tmp_path: Path
) -> None:
    """Only a part of protocol.json was written, from which no run can be resumed."""
    out = tmp_path / "out"
    out.mkdir()
    (out / ".protocol.json.1234.partial").write_text("{")
    assert seeds(world, out, resume=resume)["best"]["folder"] == read_checked(protocol / SUMMARY)["best"]["folder"]
    assert not list(out.glob(".*"))


# --- skipped steps


@pytest.mark.parametrize(("bad", "steps"), [({0, 1, 2}, 3), ({1}, 6)])
def test_skipped_steps_are_reported_and_skipping_all_is_an_error(
    bad: set[int], steps: int, world: Path, tmp_path: Path, monkeypatch, capfd
) -> None:
    forward, count = TaskModel.forward, iter(range(100))

    def poisoned(self, batch):
        sums = forward(self, batch)
        factor = math.nan if next(count) in bad else 1.0
        return {name: value * factor if value.requires_grad else value for name, value in sums.items()}

    monkeypatch.setattr(TaskModel, "forward", poisoned)
    config = override(FinetuneConfig("classify"), [*QUICK, f"train.steps={steps}"])

    def run() -> None:
        finetune(config, world / "run", world / "train.csv", tmp_path / "out", device="cpu")

    if len(bad) == steps:
        with pytest.raises(Diverged, match="all 3 steps were skipped, since their losses or gradients were not finite"):
            run()
        assert not (tmp_path / "out" / "model").exists()
    else:
        run()
        assert "warning: 1 of 6 steps were skipped" in capfd.readouterr().err


# --- full disks


def test_full_disk_error_names_the_output(tmp_path: Path) -> None:
    out = tmp_path / "out"
    full = OSError(errno.ENOSPC, "No space left on device")
    for context in (new_file(out), new_folder(out), locked(out), naming(out)):
        full.filename = None
        with pytest.raises(OSError, match="No space left on device") as caught, context:
            raise full
        assert caught.value.filename == str(out)
    with pytest.raises(OSError, match="No space left") as caught, new_folder(out):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert (caught.value.errno, caught.value.filename) == (28, str(out))
    with pytest.raises(UserError, match="a line of ours"), new_folder(out):
        raise UserError("a line of ours (os error 28)")
    with pytest.raises(SafetensorError, match="header too large"), new_folder(out):
        raise SafetensorError("Error while deserializing: header too large")
    with pytest.raises(ConnectionError) as refused, new_file(out):
        raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert refused.value.filename is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "save",
    [
        lambda work: save_file({"a": torch.zeros(2_000_000)}, work / "model.safetensors"),
        lambda work: Tokenizer(WordLevel({str(n): n for n in range(100_000)})).save(str(work / "tokenizer.json")),
        lambda work: (work / "config.json").write_text("x" * 2_000_000),
    ],
    ids=["weights", "tokenizer", "configuration"],
)
def test_full_disk_error_names_the_folder_for_every_writer(tmp_path: Path, save: Callable[[Path], object]) -> None:
    """Writing past a limit on the file size fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def write() -> None:
        with new_folder(tmp_path / "out") as work:
            save(work)

    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == str(tmp_path / "out")
    assert not list(tmp_path.iterdir())


# --- messages


def test_reproduce_and_demo_do_not_advise_a_resume_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*arguments) -> None:
        raise Interrupted("stopped after step 3; saved x", 130)

    monkeypatch.setattr(tables, "run_table", stopped)
    with pytest.raises(Interrupted) as caught:
        tables.reproduce(["table5"], tmp_path / "out", device="cpu")
    assert str(caught.value) == "stopped after step 3; saved x. The same command resumes it"
    monkeypatch.setattr(demonstration, "write_text", stopped)
    with pytest.raises(Interrupted) as caught:
        demonstration.demo(tmp_path / "demo")
    advice = f"The demo cannot be resumed: remove {tmp_path / 'demo'}, and start it again"
    assert str(caught.value) == f"stopped after step 3; saved x. {advice}"
    assert str(Interrupted("stopped", 130)) == "stopped. The same command with --resume goes on"


@pytest.mark.parametrize(
    ("name", "allowed", "meant"),
    [
        ("push", ["corpus", "predict", "pretrain"], ""),
        ("steps", ["train.stop", "train.steps"], "train.steps"),
        ("model.foo", ["model.bias", "model.norm_eps"], ""),
        ("model.hiden_size", ["model.bias", "model.hidden_size"], "model.hidden_size"),
        ("trian.steps", ["train.steps", "train.seed"], "train.steps"),
        ("label", ["label5", "gold_label"], "gold_label"),
        ("linar", ["linear", "cosine"], "linear"),
        ("roberta", ["bert"], ""),
    ],
)
def test_suggestions_are_close_names_or_none(name: str, allowed: list[str], meant: str) -> None:
    assert suggestion(name, allowed) == (f"; did you mean {meant!r}?" if meant else "")

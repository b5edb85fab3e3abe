"""One process at a time writes an output, and the next one removes the partial files of a killed process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import settings

from bertsmith import folders
from bertsmith.conversion import convert
from bertsmith.corpus.build import build_corpus
from bertsmith.corpus.vocabulary import train_tokenizer
from bertsmith.demo.run import demo, write_text
from bertsmith.errors import UserError
from bertsmith.extend import extend
from bertsmith.finetuning.protocols import finetune_many
from bertsmith.finetuning.run import FinetuneConfig, finetune
from bertsmith.folders import locked, new_file, new_folder
from bertsmith.inference.embedder import embed
from bertsmith.inference.features import features
from bertsmith.inference.files import predict
from bertsmith.pages.page import write_page
from bertsmith.paper.reproduce import reproduce
from bertsmith.pretraining.run import pretrain

ROOT = Path(__file__).parent.parent
HOLD = (
    "import sys, time; from bertsmith.folders import locked\nwith locked(sys.argv[1]):\n print(1, flush=True)\n input()"
)


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "LOCK_TIMEOUT", 0.0)


def holder(path: Path, code: str = HOLD) -> subprocess.Popen[str]:
    """Another process that holds the lock on an output until it reads a line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], env=environment, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "1\n"
    return process


def test_second_process_is_refused_and_the_error_names_the_first(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.jsonl"
    process = holder(out)
    with pytest.raises(UserError) as caught, locked(out):
        pass
    who = f"process {process.pid} on {os.uname().nodename}"
    assert str(caught.value).startswith(f"--out {out} is being written by {who} (-c {out})")
    (tmp_path / "link").symlink_to(out.parent)
    with pytest.raises(UserError, match="is being written by"), locked(tmp_path / "link" / "out.jsonl"):
        pass
    process.communicate("\n")
    with locked(out):
        pass
    assert not list(tmp_path.glob("new*"))  # neither the lock file nor the folder that was made for it


def test_killed_process_releases_its_lock(tmp_path: Path) -> None:
    process = holder(tmp_path / "out")
    process.kill()
    process.wait()
    assert (tmp_path / ".out.lock").exists()
    with locked(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are not forked here")
def test_worker_that_outlives_its_parent_holds_no_lock(tmp_path: Path) -> None:
    # The worker itself prints the line: by then it has released the lock that it was forked with.
    worker = " import os\n if not os.fork(): print(1, flush=True); os.close(1); os.close(0); time.sleep(20)\n"
    code = HOLD.replace(" print(1, flush=True)\n", worker)
    process = holder(tmp_path / "out", code)
    process.kill()
    process.wait()
    with locked(tmp_path / "out"):
        pass


def test_lock_is_reentrant_within_a_process(tmp_path: Path) -> None:
    with locked(tmp_path / "out"):
        with locked(tmp_path / "out"):
            pass
        assert (tmp_path / ".out.lock").exists()


RACE = """
import sys, time
from pathlib import Path
from bertsmith import folders
folders.LOCK_TIMEOUT, out = 60.0, Path(sys.argv[1])
for _ in range(25):
    with folders.locked(out):
        count = int(out.read_text()) if out.exists() else 0
        time.sleep(0.001)
        out.write_text(str(count + 1))
"""


def test_processes_hold_the_lock_one_at_a_time(tmp_path: Path) -> None:
    """The lock file is removed at every release, while other processes have it open."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", RACE, str(tmp_path / "count")]
    assert [p.wait() for p in [subprocess.Popen(program, env=environment) for _ in range(3)]] == [0, 0, 0]
    assert (tmp_path / "count").read_text() == "75"


def test_outputs_that_cannot_be_locked_are_written_without_a_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("-", "s3://bucket/corpus", "/dev/null", "/"):
        with locked(place), locked(place):
            pass
    assert not Path(".-.lock").exists()
    (tmp_path / "file").touch()
    with locked(tmp_path / "file" / "out"):  # its parent is not a folder
        pass

    def refuse(*args: object) -> None:
        raise OSError(95, "Operation not supported")

    assert folders.fcntl is not None
    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    with locked(tmp_path / "out"):
        pass
    monkeypatch.setattr(folders, "fcntl", None)
    with locked(tmp_path / "out"):
        pass


def test_partial_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    left = [tmp_path / ".run.123.partial", out / ".config.json.45.partial", out / ".model.45.partial"]
    others = [tmp_path / ".run2.123.partial", tmp_path / "run.partial", out / "config.json", out / ".mine.partial"]
    for path in (*left, *others):
        path.mkdir(parents=True) if path.name.startswith(".model") else path.parent.mkdir(exist_ok=True)
        path.exists() or path.touch()
    (left[2] / "model.safetensors").touch()
    with locked(out):
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in others)
        with new_file(out / "new") as work, new_folder(out / "folder") as folder:
            work.touch()
            (folder / "a").touch()
    assert (out / "new").exists()


def commands(world: Path, out: Path) -> dict[str, Callable[[], object]]:
    """Every command that writes an output."""
    tuned, text = FinetuneConfig("classify"), [world / "text.txt"]
    rows = world / "train.csv"
    return {
        "tokenizer train": lambda: train_tokenizer(text, out),
        "tokenizer extend": lambda: extend(world / "tok", out, words=["monotonic"]),
        "corpus build": lambda: build_corpus(text, world / "tok", out),
        "pretrain": lambda: pretrain(settings("train.steps=1"), world / "shards", out, device="cpu"),
        "finetune": lambda: finetune(tuned, world / "run", rows, out, device="cpu"),
        "finetune --seeds": lambda: finetune_many(tuned, world / "run", rows, out, seeds=2, dev=rows, device="cpu"),
        "predict": lambda: predict(world / "run", rows, out),
        "embed": lambda: embed(world / "run", rows, out),
        "features": lambda: features(world / "run", rows, out),
        "convert": lambda: convert(world / "run", out, "hf"),
        "reproduce": lambda: reproduce(["table5"], out),
        "demo": lambda: demo(out),
        "demo --text-only": lambda: write_text(out),
        "report and view": lambda: write_page(out, "", "", []),
    }


def test_every_command_that_writes_holds_a_lock(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = holder(out)
    for name, run in commands(world, out).items():
        with pytest.raises(UserError) as caught:
            run()
        assert f"out is being written by process {process.pid} on " in str(caught.value), name
    assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]
    process.communicate("\n")


@pytest.mark.slow
def test_second_command_on_an_output_is_refused_and_the_first_finishes(world: Path, tmp_path: Path) -> None:
    """The second command is refused with one line, and the first one writes all of its predictions."""
    run, out = tmp_path / "run", tmp_path / "out.jsonl"
    finetune(FinetuneConfig("classify"), world / "run", world / "train.csv", run, device="cpu")
    count = 3000
    (tmp_path / "rows.csv").write_text("text\n" + "".join(f"a file {i}\n" for i in range(count)))
    program = [sys.executable, "-m", "bertsmith", "predict", str(run), str(tmp_path / "rows.csv"), "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    first = subprocess.Popen([*program, "--device", "cpu"], env=environment, stdout=subprocess.DEVNULL)
    while not (tmp_path / "out.jsonl.partial" / "answers.jsonl").exists():
        assert first.poll() is None
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGSTOP)  # it cannot finish before the second one starts
    second = subprocess.run([*program, "--resume"], env=environment, capture_output=True, text=True)
    os.kill(first.pid, signal.SIGCONT)
    assert second.returncode == 2
    assert second.stderr.startswith(f"error: --out {out} is being written by process {first.pid} on ")
    assert "(bertsmith predict" in second.stderr
    assert first.wait() == 0
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == count

"""Parallel runs: all calls are made, an error stops the others, and no process is left running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bertsmith.errors import UserError
from bertsmith.training import side_by_side as runs
from bertsmith.training.side_by_side import sharing_note, side_by_side


def write(path: Path, text: str) -> None:
    if not text:
        raise UserError(f"{path}: nothing to write")
    path.write_text(f"{os.getpid()} {text}")


def wait_for_ever(path: Path) -> None:
    path.write_text(str(os.getpid()))
    time.sleep(1000)


def wait_and_save(path: Path) -> None:
    try:
        wait_for_ever(path)
    except KeyboardInterrupt:
        time.sleep(0.6)  # a checkpoint is written
        raise


def wait_or_fail(path: Path, waits: bool) -> None:
    if waits:
        wait_for_ever(path)
    while not path.exists():
        time.sleep(0.1)
    write(path, "")


def test_all_calls_are_made_in_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "pick_device", lambda name: torch.device("cuda" if name is None else name))
    monkeypatch.setattr(runs, "sharing_note", lambda: "note: how to share the GPU")
    side_by_side(2, "writing", write, [(tmp_path / str(i), f"text {i}") for i in range(5)])
    assert "note: how to share the GPU" in capfd.readouterr().err
    found = [(tmp_path / str(i)).read_text().split(" ", 1) for i in range(5)]
    assert [text for _, text in found] == [f"text {i}" for i in range(5)]
    assert str(os.getpid()) not in {process for process, _ in found}


def test_error_is_raised_and_later_calls_are_not_started(tmp_path: Path) -> None:
    calls = [(tmp_path / "0", ""), *((tmp_path / str(i), "text") for i in range(1, 50))]
    with pytest.raises(UserError, match="nothing to write"):
        side_by_side(1, "writing", write, calls)
    assert len(list(tmp_path.iterdir())) < 49


def test_error_stops_running_calls(tmp_path: Path) -> None:
    began, calls = time.monotonic(), [(tmp_path / "child", True), (tmp_path / "child", False)]
    with pytest.raises(UserError, match="nothing to write"):
        side_by_side(2, "waiting", wait_or_fail, calls, device="cpu")
    assert time.monotonic() - began < 60
    assert not Path(f"/proc/{(tmp_path / 'child').read_text()}").exists()


@pytest.mark.parametrize(
    ("number", "to_all", "times"),
    [
        (signal.SIGINT, True, 2),
        pytest.param(signal.SIGINT, True, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, 1, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, 1, marks=pytest.mark.slow),
    ],
)
def test_signal_ends_all_processes(number: signal.Signals, to_all: bool, times: int, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal; SIGTERM reaches the parent or, on a cluster, all processes.

    `timeout` signals its command, and then all processes of its group.
    """
    code = (
        "from pathlib import Path; from tests.training.test_side_by_side import wait_and_save; "
        "from bertsmith.training.side_by_side import side_by_side; "
        f"side_by_side(2, 'waiting', wait_and_save, [(Path({str(tmp_path / 'child')!r}),)])"
    )
    command = [sys.executable, "-c", f"if __name__ == '__main__': {code}"]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as parent:
        assert within(30, lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
        for again in range(times):
            time.sleep(0.3 * again)
            (os.killpg if to_all else os.kill)(parent.pid, number)
        try:
            _, stderr = parent.communicate(timeout=20)
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
    assert stderr.splitlines()[-1].startswith("bertsmith.errors.Interrupted: stopped; runs that had begun are saved")
    assert "leaked semaphore" not in stderr
    assert stderr.count("Traceback") == 1
    assert not Path(f"/proc/{(tmp_path / 'child').read_text()}").exists()


def wait_or_be_killed(killed: bool) -> None:
    if killed:
        time.sleep(1)  # the other worker is idle then
        os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_ends_all_processes() -> None:
    """The system kills a process if memory is short; from Python 3.12 on, the pool then no longer ends idle workers."""
    code = (
        "from concurrent.futures import process; "
        "process._ExecutorManagerThread.shutdown_workers = lambda self: None; "
        "from tests.training.test_side_by_side import wait_or_be_killed; "
        "from bertsmith.training.side_by_side import side_by_side; "
        "side_by_side(2, 'waiting', wait_or_be_killed, [(False,), (True,)])"
    )
    command = [sys.executable, "-c", f"if __name__ == '__main__': {code}"]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE, text=True) as parent:
        try:
            _, stderr = parent.communicate(timeout=60)
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
    assert "UserError: one of 2 runs side by side was killed from outside" in stderr


@pytest.mark.slow
def test_killed_parent_leaves_no_child_running(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from tests.training.test_side_by_side import wait_for_ever; "
        "from bertsmith.training.side_by_side import side_by_side; "
        f"side_by_side(1, 'waiting', wait_for_ever, [(Path({str(tmp_path / 'child')!r}),)])"
    )
    parent = subprocess.Popen([sys.executable, "-c", f"if __name__ == '__main__': {code}"])
    assert within(30, lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text() != "")
    child = int((tmp_path / "child").read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert within(10, lambda: not Path(f"/proc/{child}").exists())


def within(seconds: float, condition: object) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.1)
    return False


def test_note_says_how_runs_share_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note is given where the service is installed and does not run."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path / "pipes"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sharing_note() == ""
    (tmp_path / "nvidia-cuda-mps-control").write_text("#!/bin/sh\n")
    (tmp_path / "nvidia-cuda-mps-control").chmod(0o755)
    assert "`nvidia-cuda-mps-control -d` before this command" in sharing_note()
    (tmp_path / "pipes").mkdir()
    (tmp_path / "pipes" / "control").touch()
    assert sharing_note() == ""

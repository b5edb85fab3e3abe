"""Killed at random moments and resumed, a run ends with the same weights to the bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import TINY

SETTINGS = [*TINY, "train.steps=40", "train.batch_size=16", "data.max_length=32", "train.save_every=3"]
FLAGS = [part for setting in SETTINGS for part in ("--set", setting)]


def start(world: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "bertsmith",
        "pretrain",
        "bert-tiny",
        "--data",
        str(world / "shards"),
        "--out",
        str(out),
    ]
    return subprocess.Popen(
        [*command, *FLAGS, "--device", "cpu", *more], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


@pytest.mark.slow
def test_killed_and_resumed_is_identical_to_the_bit(world: Path, tmp_path: Path) -> None:
    assert start(world, tmp_path / "whole").wait(300) == 0
    dice, kills = random.Random(7), 0
    process = start(world, tmp_path / "cut")
    while kills < 5:
        before = len(list((tmp_path / "cut").glob("checkpoints/step-*")))
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline and not before:
            time.sleep(0.05)  # until something is there to be resumed from
            before = len(list((tmp_path / "cut").glob("checkpoints/step-*")))
        time.sleep(dice.uniform(0, 1.5))
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        kills += 1
        process = start(world, tmp_path / "cut", "--resume")
        time.sleep(2.5)  # the program has to come up again
    assert process.wait(300) == 0
    assert kills >= 1
    whole, cut = (tmp_path / run / "model" / "model.safetensors" for run in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()

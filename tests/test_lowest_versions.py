"""The lowest versions that `pyproject.toml` allows work: the help of every command, and a prediction."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import reference

from bertsmith.cli import COMMANDS

ROOT = Path(__file__).parent.parent
LARGE = ("torch",)  # too large to install again: the installed version is used

EVERY_HELP = """
import sys
from bertsmith.cli import _app
for name in sys.argv[1:]:
    try:
        _app()([*name.split(), "--help"])
    except SystemExit as end:
        assert not end.code, name
"""


def lowest() -> list[str]:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return [line.replace(">=", "==") for line in listed if not line.startswith(LARGE)]


def test_every_dependency_has_a_lower_bound():
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", line) for line in lowest())


@pytest.mark.slow
def test_lowest_versions_print_help_and_fill_a_mask(tmp_path, tiny_tokenizer):
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--target", str(packages)]
    done = subprocess.run([*install, *lowest()], capture_output=True, text=True)
    if done.returncode and "No matching distribution" not in done.stderr and "onflict" not in done.stderr:
        pytest.skip(f"no packages from here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"}  # they come before the installed ones

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = run("-c", EVERY_HELP, *COMMANDS)
    assert shown.count("Example") >= len(COMMANDS)
    reference("mlm", tiny_tokenizer.vocab_size).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save(tmp_path / "model")
    assert "probability" in run("-m", "bertsmith", "fill", "model", "the [MASK] fox", "--device", "cpu", "--json")

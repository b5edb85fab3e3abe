"""The README's commands run as they stand, and the wheel works from another folder."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [line for line in re.findall(r"^bertsmith .*$", README, re.M) if "README" not in line]


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    threads = "1" if "PYTEST_XDIST_WORKER" in os.environ else ""  # more would wait for each other beside other tests
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": threads}
    return subprocess.run(command, shell=True, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.timeout(900)
def test_the_path_in_ten_commands(tmp_path: Path) -> None:
    assert len(COMMANDS) == 10
    for command in COMMANDS:
        result = shell(command, tmp_path)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 600
    python = re.search(r"```python\n(.*?)```", README, re.S)
    assert python is not None
    (tmp_path / "example.py").write_text(python.group(1))
    result = shell("python example.py", tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2


def test_the_two_commands_come_first() -> None:
    first = re.search(r"```bash\n(.*?)```", README, re.S)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first.group(1).splitlines()] == ["make demo", "make test"]


@pytest.mark.slow
def test_the_wheel_installs_in_a_clean_environment_and_runs_from_another_folder(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("bertsmith-*.whl")
    venv.create(tmp_path / "clean", with_pip=True)
    binaries = tmp_path / "clean" / "bin"
    install = [binaries / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel]
    subprocess.run(install, check=True, timeout=900)
    (tmp_path / "elsewhere").mkdir()
    helped = subprocess.run(
        [binaries / "bertsmith", "--help"], cwd=tmp_path / "elsewhere", capture_output=True, text=True
    )
    assert helped.returncode == 0
    assert "pretrain" in helped.stdout
    listed = subprocess.run(
        [binaries / "bertsmith", "recipes"], cwd=tmp_path / "elsewhere", capture_output=True, text=True
    )
    assert "bert-base" in listed.stdout, listed.stderr

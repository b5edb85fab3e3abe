"""The commands of the README run unchanged, and the wheel works from another folder."""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from bertsmith.formats.hub import DEFAULT
from bertsmith.training.runlog import read

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^bertsmith .*$", README, re.M)
PATH = re.findall(r"^bertsmith .*$", README.split("## I have text")[1].split("\n## ")[0], re.M)
CHANCE = 100 / 8  # accuracy by chance: the classifier has eight labels


def shell(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    threads = "1" if "PYTEST_XDIST_WORKER" in os.environ else ""  # more threads would compete with parallel tests
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": threads}
    return subprocess.run(command, shell=True, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


def shortened(command: str) -> list[str]:
    """The words of a command after `bertsmith`, with two steps or one epoch of training."""
    words = shlex.split(command)[1:]
    if words[0] == "pretrain":
        words += ["--steps", "2", "--set", "train.evaluate_every=0"]
    if "--epochs" in words:
        words[words.index("--epochs") + 1] = "1"
    return words


@pytest.mark.slow
def test_commands_from_text_to_predictions_run_in_their_order(tmp_path: Path, monkeypatch, run_command) -> None:
    """The same commands on less text, with a few steps of training; the slow test below shows what they learn."""
    monkeypatch.chdir(tmp_path)
    for command in PATH:
        code, out, err = run_command(*shortened(command))
        assert code == 0, f"{command}\n{out}{err}"
        for path in tmp_path.glob("sample/t*"):  # the first command wrote the text and the rows to train on
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            path.write_text("".join(lines[:2000]), encoding="utf-8")
    assert [command.split()[1] for command in PATH][-3:] == ["evaluate", "predict", "report"]
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(answers) == 600
    assert {name for answer in answers for name in answer} == {"label", "score", "scores"}
    exec(compile(python_example(), "README.md", "exec"), {"__name__": "example"})


def test_the_run_of_the_path_can_be_distilled(world: Path, tmp_path: Path, monkeypatch, run_command) -> None:
    monkeypatch.chdir(tmp_path)
    (teacher,) = [command for command in PATH if command.startswith("bertsmith pretrain")]
    (student,) = [command for command in COMMANDS if "--teacher" in command]
    (tmp_path / "shards").symlink_to(world / "shards")
    for command in (teacher, student):
        code, out, err = run_command(*shortened(command), "--device", "cpu")
        assert code == 0, f"{command}\n{out}{err}"
    sizes = {name: json.loads((tmp_path / name / "config.json").read_text())["model"] for name in ("run", "small")}
    assert sizes["small"]["hidden_size"] == sizes["run"]["hidden_size"]
    assert sizes["small"]["num_layers"] == sizes["run"]["num_layers"] // 2


def python_example() -> str:
    found = re.search(r"```python\n(.*?)```", README, re.S)
    assert found is not None
    return found.group(1)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands_from_text_to_predictions_train_a_useful_model(tmp_path: Path) -> None:
    printed = {}
    for command in PATH:
        result = shell(command, tmp_path)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        printed[command.split()[1]] = result.stdout
    held_out = [record["dev_mlm_accuracy"] for record in read(tmp_path / "run") if "dev_mlm_accuracy" in record]
    assert held_out[-1] > 25  # a model that only knows which words are frequent reaches 18
    assert json.loads(printed["evaluate"])["accuracy"] > 2.5 * CHANCE
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(answers) == 600
    assert len({answer["label"] for answer in answers}) == 8
    (tmp_path / "example.py").write_text(python_example())
    result = shell("python example.py", tmp_path)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 2


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in PATH])
def test_options_of_the_other_commands_exist(command: str, run_command) -> None:
    words = shlex.split(command)[1:]
    code, out, _ = run_command(*words[: 2 if words[0] in ("tokenizer", "corpus") else 1], "--help")
    assert code == 0
    assert all(word in out for word in words if word.startswith("--"))


def test_links_and_pictures_exist() -> None:
    places = [place for place in re.findall(r"\]\((.*?)\)", README) if not place.startswith("http")]
    assert "docs/report.png" in places
    assert all((ROOT / place).exists() for place in places)
    assert (ROOT / "docs" / "report.png").stat().st_size < 200_000


def test_make_demo_and_make_test_come_first() -> None:
    first = re.search(r"```bash\n(.*?)```", README, re.S)
    assert first is not None
    assert [line.split("#")[0].strip() for line in first.group(1).splitlines()] == ["make demo", "make test"]


@pytest.mark.slow
def test_wheel_installs_in_a_clean_environment_and_runs_from_another_folder(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (wheel,) = (tmp_path / "dist").glob("bertsmith-*.whl")
    folders = (ROOT / "bertsmith/pages/assets", ROOT / "bertsmith/serve/assets", DEFAULT)
    assets = {str(path.relative_to(ROOT)) for folder in folders for path in folder.glob("*")}
    assert assets <= set(zipfile.ZipFile(wheel).namelist())
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
    words = [binaries / "bertsmith", "fill", "Paris is the [MASK] of France.", "--json"]
    filled = subprocess.run(words, cwd=tmp_path / "elsewhere", capture_output=True, text=True)
    assert json.loads(filled.stdout)["masks"][0][0]["token"] == "capital", filled.stderr

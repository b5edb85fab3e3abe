"""The examples in the docstrings of public names run as they stand, on a small model under the name that they use."""

import doctest
from pathlib import Path

import pytest

import bertsmith


@pytest.mark.parametrize("name", ["finetune", "fill"])
def test_examples_run(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "bert-base-uncased").symlink_to(world / "run")
    monkeypatch.chdir(tmp_path)
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(bertsmith, name), name, globs={})
    assert example.examples
    told: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append)
    assert not told, "".join(told)

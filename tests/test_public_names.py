"""`import bertsmith` gives every public function and class, without torch and in any order of imports."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import bertsmith

ROOT = Path(__file__).parent.parent


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout.strip()


def test_public_names_are_listed_without_importing_torch() -> None:
    shown = run("import sys, bertsmith; print('torch' in sys.modules, *dir(bertsmith))").split()
    assert shown[0] == "False"
    classes = {"Predictor", "Embedder", "Features", "Tokenizer", "PretrainConfig", "FinetuneConfig", "UserError"}
    functions = {
        "train_tokenizer",
        "build_corpus",
        "examine",
        "pretrain",
        "finetune",
        "finetune_many",
        "evaluate",
        "predict",
    }
    assert classes | functions | {"fill", "embed", "features", "convert", "report", "view", "recipe"} <= set(shown[1:])


@pytest.mark.parametrize("name", bertsmith.__all__)
def test_every_public_name_is_defined_in_its_module(name: str) -> None:
    value = getattr(bertsmith, name)
    assert value.__name__ == name
    assert value.__module__ == f"bertsmith.{bertsmith._MODULES[name]}"
    assert value.__doc__


def test_no_module_has_the_name_of_a_public_name() -> None:
    modules = {module.name for module in pkgutil.iter_modules(bertsmith.__path__)}
    assert not modules & set(bertsmith.__all__)


def test_public_functions_are_not_shadowed_by_imported_modules() -> None:
    for module in set(bertsmith._MODULES.values()):
        importlib.import_module(f"bertsmith.{module}")
    assert not {f"bertsmith.{name}" for name in bertsmith.__all__} & set(sys.modules)
    assert all(callable(getattr(bertsmith, name)) for name in bertsmith.__all__)


def test_type_checkers_see_the_same_public_names() -> None:
    tree = ast.parse(Path(bertsmith.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: (node.module or "").removeprefix("bertsmith.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == bertsmith._MODULES
    assert (ROOT / "bertsmith" / "py.typed").exists()


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pre_train'"):
        _ = bertsmith.pre_train  # type: ignore[attr-defined]

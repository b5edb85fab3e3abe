"""The import rules of docs/design.md hold, and modules that need no torch are imported without it."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A part is a folder or a top-level module; `corpus/doctor` is in a higher layer than the rest of its folder.
LAYERS = [
    {"errors", "config", "folders", "progress", "draws", "batch", "protobuf"},
    {"text", "model"},
    {"corpus", "objectives", "training", "rows"},
    {"tasks", "formats"},
    {"pretraining", "inference"},
    {"finetuning", "corpus/doctor", "extend", "family_recipes"},
    {"recipes", "verify", "conversion"},
    {"pages", "paper", "demo", "serve"},
    {"cli", "commands", "__main__", "__init__"},
]
# The imports that are allowed inside a layer; all others go to a lower layer.
SAME_LAYER = {
    ("config", "errors"),
    ("config", "folders"),
    ("folders", "errors"),
    ("conversion", "verify"),
    ("demo", "pages"),
    ("paper", "demo"),
    ("paper", "pages"),
    ("cli", "__init__"),
    ("serve", "__init__"),  # the version
    ("serve", "pages"),  # their look, and what `view` shows
    ("cli", "commands"),
    ("__main__", "cli"),
}
FORBIDDEN = {("training", part) for part in ("model", "corpus", "rows", "tasks", "text", "objectives")}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
OBJECTS = {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}  # they unpickle
UNSAFE = {"torch.load", "torch.save", "eval", "exec", "np.load", *(f"dist.{name}" for name in OBJECTS)}
UNSAFE_ENDS = {name.split(".")[-1] for name in UNSAFE}
COMPARES = ROOT / "bertsmith" / "verify.py"  # may import transformers, inside a function: parity is measured against it
OLD_WEIGHTS = ROOT / "bertsmith" / "formats" / "weights.py"  # reads only the tensors of `pytorch_model.bin`
FILES = sorted((ROOT / "bertsmith").rglob("*.py"))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    """The name of the module in a file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in FILES}


def part_of(module: str) -> str:
    """The part that a module belongs to."""
    parts = module.split(".")[1:]
    return "/".join(parts[:2]) if "/".join(parts[:2]) in LEVEL else parts[0] if parts else "__init__"


@cache
def imports(path: Path) -> set[str]:
    """Every module of the package that a file imports, also inside functions and for type checkers only."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found & set(MODULES)


def import_cycles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that import one another, directly or through others."""
    reached = {name: set(others) for name, others in edges.items()}
    for middle in edges:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    return sorted(
        {tuple(sorted(n for n in reached[name] if name in reached[n])) for name in edges if name in reached[name]}
    )  # type: ignore[return-value, arg-type]


def test_design_page_shows_the_table_of_layers() -> None:
    lines = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines()
    for level, names in enumerate(LAYERS):
        (shown,) = [line.split() for line in lines if line.startswith(f"{level}  ")]
        assert names - {"__main__", "__init__"} <= set(shown)


def test_design_page_names_every_file() -> None:
    """A new file needs a line in the tree of docs/design.md."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    tree = re.search(r"```\nbertsmith/\n(.*?)```", design, re.S)
    assert tree is not None
    named = set(re.findall(r"^  (\S+\.py) ", tree.group(1), re.M))
    files = {str(path.relative_to(ROOT / "bertsmith")) for path in FILES}
    assert named == {file for file in files if not file.endswith(("__init__.py", "__main__.py"))}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_to_lower_layers_only(path: Path) -> None:
    own = part_of(name_of(path)) if path.parent.name != "bertsmith" else path.stem
    assert own in LEVEL, f"{own} has no place in the table of layers"
    for module in imports(path):
        edge = own, other = own, part_of(module)
        assert edge not in FORBIDDEN, f"{path}: {own} must not import {module}"
        below = other == own or LEVEL[other] < LEVEL[own]
        assert below or edge in SAME_LAYER, f"{path} imports {module}, which stands above it"


def test_no_import_cycles_even_inside_a_folder() -> None:
    edges = {name: imports(path) - {name, "bertsmith"} for name, path in MODULES.items() if name != "bertsmith"}
    assert import_cycles({**edges, "bertsmith.errors": {"bertsmith.batch"}, "bertsmith.batch": {"bertsmith.errors"}})
    assert import_cycles(edges) == []


def is_unsafe(node: ast.AST) -> bool:
    """Whether an expression is one of these names."""
    last = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return last in UNSAFE_ENDS and ast.unparse(node) in UNSAFE


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_package_never_imports_transformers_and_never_unpickles(path: Path) -> None:
    tree = parsed(path)
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    allowed = {"transformers"} if path == COMPARES else set()
    assert not names & ({"transformers", "sentence_transformers", "pickle", "cloudpickle", "dill", "joblib"} - allowed)
    top_level = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    assert "transformers" not in top_level | {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and is_unsafe(n.func)]
    if path == OLD_WEIGHTS:
        assert [ast.unparse(call.func) for call in calls] == ["torch.load"]
        assert "weights_only=True" in [ast.unparse(keyword) for keyword in calls[0].keywords]
    else:
        assert not calls
    mentions = [n for n in ast.walk(tree) if is_unsafe(n)]
    assert len(mentions) == len(calls)  # not under another name either
    from_torch = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "torch"]
    assert not {a.name for n in from_torch for a in n.names} & {"load", "save"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short_and_have_specific_names(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    assert path.stem not in {"utils", "util", "common", "helpers", "misc", "base", "manager"}


WITHOUT_TORCH = [
    "bertsmith.cli",
    "bertsmith.text.tokenizer",
    "bertsmith.text.sentences",
    "bertsmith.corpus.readers",
    "bertsmith.corpus.shards",
    "bertsmith.corpus.build",
    "bertsmith.corpus.coverage",
    "bertsmith.corpus.vocabulary",
    "bertsmith.corpus.doctor.examination",
    "bertsmith.extend",
    "bertsmith.pretraining.segments",
    "bertsmith.pretraining.masking",
    "bertsmith.tasks.metrics",
    "bertsmith.tasks.glue_average",
    "bertsmith.rows.columns",
    "bertsmith.rows.conll",
    "bertsmith.tasks.squad_scores",
]


def test_modules_are_imported_without_torch() -> None:
    lines = ["import sys, importlib", f"for name in {WITHOUT_TORCH}:", "    importlib.import_module(name)"]
    code = "\n".join([*lines, "    assert not {'torch', 'matplotlib'} & {*sys.modules}, name"])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr

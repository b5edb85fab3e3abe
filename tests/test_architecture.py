"""The import rules of docs/design.md hold, and what should start without torch does."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    {"errors", "config", "folders", "progress", "side_by_side", "draws", "batch", "page"},
    {"text", "model"},
    {"data", "objectives", "training"},
    {"tasks", "formats"},
    {
        "pretraining",
        "micro_batches",
        "held_out",
        "finetune_settings",
        "finetuning",
        "predictor",
        "answers",
        "answer_files",
        "embedder",
        "word_features",
        "frozen",
        "extend",
        "engines",
    },
    {"recipes", "verify", "conversion", "protocols"},
    {"demo_text", "demo", "reports", "text_view", "view_page", "paper"},
    {"cli", "commands", "__main__", "__init__"},
]
# Inside a layer, who may import whom; everything else goes down only.
SAME_LAYER = {
    ("config", "errors"),
    ("config", "folders"),
    ("folders", "errors"),
    ("page", "folders"),
    ("side_by_side", "progress"),
    ("side_by_side", "errors"),
    ("predictor", "engines"),
    ("pretraining", "predictor"),
    ("pretraining", "held_out"),
    ("pretraining", "micro_batches"),
    ("finetuning", "finetune_settings"),
    ("finetuning", "predictor"),
    ("finetuning", "pretraining"),
    ("answers", "predictor"),
    ("answers", "answer_files"),
    ("answer_files", "predictor"),
    ("embedder", "answer_files"),
    ("word_features", "answer_files"),
    ("answers", "engines"),
    ("embedder", "predictor"),
    ("embedder", "engines"),
    ("embedder", "answers"),
    ("finetuning", "frozen"),
    ("frozen", "word_features"),
    ("frozen", "predictor"),
    ("word_features", "predictor"),
    ("word_features", "engines"),
    ("word_features", "answers"),
    ("conversion", "verify"),
    ("demo", "demo_text"),
    ("text_view", "view_page"),
    ("paper", "demo_text"),
    ("paper", "reports"),
    ("cli", "__init__"),
    ("cli", "commands"),
    ("__main__", "cli"),
}
FORBIDDEN = {("training", part) for part in ("model", "data", "tasks", "text", "objectives")}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
UNSAFE = {"torch.load", "torch.save", "eval", "exec", "np.load"}
COMPARES = ROOT / "bertsmith" / "verify.py"  # may import transformers, inside a function: parity is measured against it
OLD_WEIGHTS = ROOT / "bertsmith" / "formats" / "weights.py"  # reads `pytorch_model.bin`, and only tensors of it
FILES = sorted((ROOT / "bertsmith").rglob("*.py"))


def part_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> set[str]:
    """Every bertsmith module that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "bertsmith":
            modules = {alias.name for alias in node.names}
            found |= {f"bertsmith.{m}" if m in LEVEL else "bertsmith" for m in modules}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] == "bertsmith"}


def test_the_design_shows_this_table() -> None:
    lines = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines()
    for level, names in enumerate(LAYERS):
        (shown,) = [line.split() for line in lines if line.startswith(f"{level}  ")]
        assert names - {"__main__", "__init__"} <= set(shown)


def test_the_design_names_every_file() -> None:
    """A new file gets its line in the tree of docs/design.md."""
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    tree = re.search(r"```\nbertsmith/\n(.*?)```", design, re.S)
    assert tree is not None
    named = set(re.findall(r"^  (\S+\.py) ", tree.group(1), re.M))
    files = {str(path.relative_to(ROOT / "bertsmith")) for path in FILES}
    assert named == {file for file in files if not file.endswith(("__init__.py", "__main__.py"))}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_arrow_points_up(path: Path) -> None:
    own = path.relative_to(ROOT / "bertsmith").parts[0].removesuffix(".py")
    assert own in LEVEL, f"{own} has no place in the table of layers"
    for module in imports(path):
        other = part_of(module)
        if other == own:
            continue
        edge = (own, other)
        assert edge not in FORBIDDEN, f"{path}: {own} must not import {module}"
        assert LEVEL[other] < LEVEL[own] or edge in SAME_LAYER, f"{path} imports {module}, which stands above it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_package_never_imports_transformers_and_never_unpickles(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
    allowed = {"transformers"} if path == COMPARES else set()
    assert not names & ({"transformers", "sentence_transformers", "pickle", "cloudpickle", "dill", "joblib"} - allowed)
    at_the_top = {a.name for n in tree.body if isinstance(n, ast.Import) for a in n.names}
    assert "transformers" not in at_the_top | {n.module for n in tree.body if isinstance(n, ast.ImportFrom)}
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) in UNSAFE]
    if path == OLD_WEIGHTS:
        assert [ast.unparse(call.func) for call in calls] == ["torch.load"]
        assert "weights_only=True" in [ast.unparse(keyword) for keyword in calls[0].keywords]
    else:
        assert not calls
    mentions = [n for n in ast.walk(tree) if isinstance(n, (ast.Attribute, ast.Name)) and ast.unparse(n) in UNSAFE]
    assert len(mentions) == len(calls)  # nor under another name
    from_torch = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "torch"]
    assert not {a.name for n in from_torch for a in n.names} & {"load", "save"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_short_and_their_names_say_something(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    assert path.stem not in {"utils", "util", "common", "helpers", "misc", "base", "manager"}


@pytest.mark.parametrize(
    "module",
    [
        "bertsmith.cli",
        "bertsmith.text.tokenizer",
        "bertsmith.text.sentences",
        "bertsmith.data.readers",
        "bertsmith.data.shards",
        "bertsmith.data.build",
        "bertsmith.data.segments",
        "bertsmith.data.masking",
        "bertsmith.tasks.metrics",
        "bertsmith.tasks.glue_average",
        "bertsmith.tasks.rows",
        "bertsmith.tasks.conll",
        "bertsmith.tasks.squad_scores",
    ],
)
def test_imports_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)

"""Results with what they need to be believed: the command, the commit, the machine, the versions, the date."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
TAKEN = "taken"  # the part of a result that says when and where it was taken


def machine() -> str:
    """The processor and its cores, and the accelerator where there is one."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    parts = [f"{model}, {os.cpu_count()} cores"]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return "; ".join(parts)


def commit() -> str:
    """The commit that was measured, with `+` where the working tree had changes."""
    git = ["git", "-C", str(RESULTS)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True)
    return (head.stdout.strip() or "unknown") + ("+" if changed.stdout.strip() else "")


def record(name: str, results: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write a benchmark's results to `benchmarks/results/NAME.json`, or into another folder."""
    import transformers

    facts = {
        "command": " ".join(["python", "-m", f"benchmarks.{name}", *(Path(a).name for a in sys.argv[1:])]),
        "commit": commit(),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "date": datetime.date.today().isoformat(),
    }
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**facts, "results": results}, indent=2) + "\n", encoding="utf-8")
    return path


def read_results(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The results of a benchmark, by section and name; empty if there are none."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}


def earlier(name: str, folder: Path) -> dict[str, Any]:
    """The results so far: those of the project, and those in the folder that this call writes to."""
    return merged(read_results(name, RESULTS), {} if folder == RESULTS else read_results(name, folder))


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Results with those of another file added, which replace the old ones of the same section and name."""
    return {part: {**old.get(part, {}), **new.get(part, {})} for part in {**old, **new}}


def keep(name: str, folder: Path, part: str, key: str, found: dict[str, Any]) -> None:
    """Add a result to those so far at once, with the commit, the machine and the date that it was taken at."""
    command = " ".join(Path(argument).name for argument in sys.argv[1:])
    taken = {"command": command, "commit": commit(), "machine": machine(), "torch": torch.__version__}
    taken["date"] = datetime.date.today().isoformat()
    results = merged(earlier(name, folder), {part: {key: {**found, TAKEN: taken}}})
    folder.mkdir(parents=True, exist_ok=True)
    print(record(name, results, folder), key, flush=True)


def merge_files(name: str, arguments: argparse.Namespace) -> None:
    """Add the results of other files to those of the project, with the command and machine of the last file."""
    results, facts = read_results(name), {}
    for file in arguments.names:
        facts = json.loads(Path(file).read_text(encoding="utf-8"))
        results = merged(results, facts["results"])
    path = RESULTS / f"{name}.json"
    written = {**facts, "commit": "see `taken`", "results": results}
    path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    print(path)

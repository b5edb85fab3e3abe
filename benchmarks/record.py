"""Results with what they need to be believed: the command, the commit, the machine, the versions, the date."""

from __future__ import annotations

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

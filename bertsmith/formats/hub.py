"""Find a model by a folder, a run or a name on the Hugging Face hub, or the default model; upload one."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.folders import regular_file
from bertsmith.progress import say

FILES = ["*.json", "*.safetensors", "vocab.txt", "merges.txt", "spiece.model"]
PUSHED = [*FILES, "README.md", "*.onnx", "*.onnx.data"]
OLD_FILES = ["pytorch_model.bin", "pytorch_model-*.bin"]
USUAL = "BERTSMITH_MODEL"  # the environment variable with the model of commands that name none
DEFAULT = Path(__file__).parent.parent / "default_model"  # inside the package, as any model folder
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def find_model(name: str | Path) -> Path:
    """Return the model folder of a folder, a run (its `model`, or its last checkpoint so far) or a hub name."""
    path = Path(name)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        raise UserError(f"{name} is a file; give a model folder, a run or a hub name")
    if isinstance(name, str) and _HUB_NAME.fullmatch(name):
        return _download(name)
    raise UserError(f"no such model folder: {name}")


def usual_model() -> str:
    """Return the model of calls that name none: the one in BERTSMITH_MODEL, else the default model, with a note."""
    if name := os.environ.get(USUAL, "").strip():
        return name
    if folder := default_model():
        if os.environ.get("RANK", "0") == "0":
            size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
            say(
                f"note: no model is named, so this is the package's default model ({size:.0f} MB, English, lower-cased)"
            )
        return str(folder)
    raise UserError(
        f"no model is named: give a model folder, a run or a hub name, or set {USUAL} to one for all commands"
    )


def default_model() -> Path | None:
    """Return the folder of the default model, or None if the package has no weights in it."""
    return DEFAULT if all((DEFAULT / name).is_file() for name in ("config.json", "model.safetensors")) else None


def known_name(folder: Path) -> str:
    """Return the hub name of a folder in the cache of the hub, what the default model is called, or nothing."""
    if folder == DEFAULT:
        return "the default model of bertsmith"
    found = re.search(r"/models--([^/]+)/snapshots/", f"{folder.as_posix()}/")
    return found[1].replace("--", "/", 1) if found else ""


def _in_folder(path: Path) -> Path:
    from bertsmith.formats.saved_config import read_config  # needs torch, which extending a tokenizer does without

    if (path / "model" / "config.json").exists():
        return path / "model"
    if saved := sorted((path / "checkpoints").glob("step-*")):
        say(f"note: {path} is not finished; taking its last checkpoint, {saved[-1].name}")
        return saved[-1]
    if (path / "config.json").exists() and _is_model(read_config(path)):
        return path
    raise UserError(f"{path} holds no model: no config.json of a model in it, nor in {path / 'model'}")


def _is_model(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is a model's and not a run's; old releases wrote no `model_type`."""
    return "model_type" in values or {"hidden_size", "num_hidden_layers"} <= values.keys()


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=FILES))
        if not any(folder.glob("*.safetensors")):  # an old repository
            snapshot_download(name, allow_patterns=OLD_FILES)
        return folder
    except Exception as error:  # offline, unknown name, no permission: the hub's errors have no common class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{name!r} is no folder here, and the hub gave nothing for it: {reason}") from None


def push(
    folder: str | Path,
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
    token_file: str | Path | None = None,
) -> dict[str, Any]:
    """Upload a model folder or the model of a run to the Hugging Face hub; return the address and the files.

    The token comes from `hf auth login`, from `HF_TOKEN`, or from the first line of a file.
    """
    if not _HUB_NAME.fullmatch(name):
        raise UserError(f"{name!r} is not a name on the hub; write NAME or OWNER/NAME in letters, digits, - _ and .")
    if not Path(folder).is_dir():
        raise UserError(f"no such folder: {folder}")
    from huggingface_hub import HfApi

    from bertsmith.formats.hf import load_folder

    found = find_model(folder)
    if not any(found.glob("*.onnx")):
        load_folder(found)  # a damaged model is not uploaded
    token = _token(token_file)
    files = sorted({path.relative_to(found).as_posix() for pattern in PUSHED for path in found.rglob(pattern)})
    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token)
        repository = api.create_repo(name, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repository.repo_id, branch=revision, exist_ok=True)
        message = "Upload a model made with bertsmith"
        done = api.upload_folder(
            repo_id=repository.repo_id,
            folder_path=found,
            revision=revision,
            allow_patterns=files,
            commit_message=message,
        )
    except Exception as error:  # offline, no permission, a bad token: the hub's errors have no common class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if token:
            reason = reason.replace(token, "***")
        raise UserError(f"the hub did not take {found} as {name!r}: {reason}") from None
    return {"url": str(repository), "commit": done.oid, "files": files}


def _token(path: str | Path | None) -> str | None:
    """Return the first line of a file with a token; without a file the hub's library finds one."""
    if path is None:
        return None
    lines = regular_file(path).read_text(encoding="utf-8", errors="replace").split()
    if not lines:
        raise UserError(f"--token-file {path} is empty; write the token into its first line")
    return lines[0]

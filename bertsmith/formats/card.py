"""The model card of a folder: a `README.md` that the Hugging Face hub shows, and its front matter for search.

The card contains facts of the folder and its run, without times, paths or host names, so the same run gives the same
bytes. The person who publishes the model adds a licence and a language.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.config import read_json
from bertsmith.formats.families.table import family_named, has_no_class
from bertsmith.formats.family import Family
from bertsmith.formats.saved_config import CONFIG

CARD = "README.md"
PIPELINES = {  # the end of a class name, and the pipeline tag of the hub
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "FeatureTagger": "token-classification",
    "FeatureClassifier": "text-classification",
    "FeatureReader": "question-answering",
    "FeatureChooser": "multiple-choice",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "LMHeadModel": "text-generation",
    "ForCausalLM": "text-generation",
}
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
SETTINGS = ("steps", "epochs", "hours", "batch_size", "learning_rate", "optimizer", "precision", "seed")


def write_card(
    folder: Path,
    *,
    data: str = "",
    settings: Mapping[str, Any] | None = None,
    scores: Mapping[str, float | None] | None = None,
    base_model: str = "",
) -> None:
    """Write the card of a model folder; scores are from 0 to 100, `base_model` is a hub name or empty."""
    config = read_json(folder / CONFIG)
    notes = read_json(folder / "bertsmith.json") if (folder / "bertsmith.json").exists() else {}
    trained = {name: settings[name] for name in SETTINGS if settings and settings.get(name) is not None}
    text = card(config, notes, _library(folder, config), data, trained, scores or {}, base_model)
    (folder / CARD).write_text(text, encoding="utf-8")


def card(
    config: Mapping[str, Any],
    notes: Mapping[str, Any],
    library: str,
    data: str,
    settings: Mapping[str, Any],
    scores: Mapping[str, float | None],
    base_model: str,
) -> str:
    """Return the text of a card."""
    family = family_named(config, Path(CONFIG))
    architecture = str((config.get("architectures") or [family.encoder_class])[0])
    pipeline = "sentence-similarity" if library == "sentence-transformers" else _pipeline(architecture, family)
    front = [f"library_name: {library}", f"pipeline_tag: {pipeline}", "tags:", "- bertsmith"]
    if HUB_NAME.fullmatch(base_model):
        front.append(f"base_model: {base_model}")
    if metrics := [f"- {name}" for name in scores if re.fullmatch(r"\w+", name)]:
        front += ["metrics:", *metrics]
    facts = {
        "Family": family.model_type,
        "Class": f"`{architecture}`",
        "Task": notes.get("task"),
        "Recipe": notes.get("recipe"),
        "Starts from": base_model,
        "Layers, hidden size": ", ".join(_value(config, family, name) for name in ("num_layers", "hidden_size")),
        "Vocabulary": _value(config, family, "vocab_size"),
        "Longest input": notes.get("max_length") or _positions(config, family),
        "Labels": ", ".join(map(str, (config.get("id2label") or {}).values())),
        "Data": data,
    }
    parts = ["---", *front, "---", "", "# Model card", "", "Made with bertsmith.", ""]
    parts += _table(("", ""), {name: value for name, value in facts.items() if value})
    if settings:
        parts += ["", "## Training", "", *_table(("setting", "value"), settings)]
    if scores:
        shown = {name: "–" if value is None else f"{value:.4g}" for name, value in scores.items()}
        parts += ["", "## Scores on held-out data", "", *_table(("metric", "value"), shown)]
    parts += ["", "## Use", "", *_use(library, architecture)]
    if notes.get("remark"):
        parts += ["", f"Note: {notes['remark']}."]
    return "\n".join(parts) + "\n"


def _pipeline(architecture: str, family: Family) -> str:
    """Return the hub's tag for what a class does."""
    own = [kind for kind, output in family.outputs.items() if output.class_name == architecture]
    if any(kind.startswith("masked_lm") for kind in own):
        return "fill-mask"
    return next((tag for end, tag in PIPELINES.items() if architecture.endswith(end)), "feature-extraction")


def _value(config: Mapping[str, Any], family: Family, name: str) -> str:
    """Return one of our settings from a `config.json` of a family, which may have another name for it."""
    return str(config.get(family.fields[name].names[0], ""))


def _positions(config: Mapping[str, Any], family: Family) -> str:
    """Return the number of positions without the unused rows that RoBERTa's table has in front."""
    found = _value(config, family, "max_positions")
    pad = config.get(family.fields["pad_token_id"].names[0], family.default("pad_token_id"))
    return str(int(found) - family.unused_rows(int(pad))) if found.isdigit() else found


def _library(folder: Path, config: Mapping[str, Any]) -> str:
    """Return the library that opens a folder."""
    if (folder / "modules.json").exists():
        return "sentence-transformers"
    if (folder / "model.onnx").exists() or not (folder / "model.safetensors").exists():
        return "onnx"
    return "bertsmith" if has_no_class(config, folder / CONFIG) else "transformers"


def _table(header: tuple[str, str], rows: Mapping[str, Any]) -> list[str]:
    cells = [tuple(re.sub(r"\s+", " ", str(cell)).replace("|", "\\|") for cell in row) for row in rows.items()]
    return [f"| {' | '.join(row)} |" for row in (header, ("---", "---"), *cells)]


def _use(library: str, architecture: str) -> list[str]:
    """Return the lines that show how a program opens the folder."""
    ours = ["```python", "import bertsmith", "", 'model = bertsmith.Predictor.load("FOLDER")', "```"]
    if library == "sentence-transformers":
        opened = ["from sentence_transformers import SentenceTransformer", "", 'model = SentenceTransformer("FOLDER")']
    elif library == "transformers":
        opened = [
            f"from transformers import AutoTokenizer, {architecture}",
            "",
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")',
            f'model = {architecture}.from_pretrained("FOLDER")',
        ]
    else:
        return ["`FOLDER` is this folder or its name on the hub.", "", *ours]
    return ["`FOLDER` is this folder or its name on the hub.", "", "```python", *opened, "```", "", "Or:", "", *ours]

"""Write the reference of all commands from their help texts: docs/commands.md and, in Korean, docs/ko/commands.md.

    python -m benchmarks.command_reference

`docs/ko/commands.json` has the Korean of every English text; one that is missing there stays English in the Korean
page. `tests/test_docs.py` fails if a page is not current, or if much is not translated.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer.main

from bertsmith.cli import COMMANDS, SECTIONS

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {"en": DOCS / "commands.md", "ko": DOCS / "ko" / "commands.md"}
TABLE = DOCS / "ko" / "commands.json"
TITLE = "Commands"
HEAD = (
    "Every command with its arguments and options. `bertsmith COMMAND --help` shows the same in a terminal. This page "
    "is written by `python -m benchmarks.command_reference`."
)
COLUMNS = ("meaning", "default", "needed")
Translate = Callable[[str], str]


def translations() -> dict[str, str]:
    """The Korean of the English texts."""
    return json.loads(TABLE.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def page(language: str) -> str:
    """A whole page."""
    korean = translations() if language == "ko" else {}
    return write(lambda text: korean.get(text, text))


def write(say: Translate) -> str:
    """The page, with every text as `say` returns it."""
    parts = [f"# {say(TITLE)}\n", f"{say(HEAD)}\n"]
    for title, words in SECTIONS.items():
        parts.append(f"## {say(title)}\n")
        for name, function in COMMANDS.items():
            if name.split()[0] in words.split():
                parts.append("\n".join(section(name, function, say)))
    return "\n".join(parts)


def section(name: str, function: Callable[..., None], say: Translate) -> Iterator[str]:
    """A command: what it does, its examples, its parameters."""
    text, _, examples = inspect.cleandoc(function.__doc__ or "").partition("\b")
    yield f"### {name}\n"
    yield f"{say(' '.join(text.split()))}\n"
    if lines := re.findall(rf"bertsmith {name}\\b.*", examples):
        yield "\n".join(["```bash", *lines, "```\n"])
    meaning, given, needed = map(say, COLUMNS)
    yield f"| | {meaning} | {given} |"
    yield "| --- | --- | --- |"
    for parameter in parameters(function):
        text = say(" ".join((parameter.help or "").split()))
        yield f"| {label(parameter)} | {text} | {needed if parameter.required else default(parameter)} |".replace(
            "  |", " |"
        )
    yield ""


def parameters(function: Callable[..., None]) -> list[Any]:
    """The arguments and options of a command, without `--help`."""
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return [found for found in typer.main.get_command(app).params if found.name != "help"]


def label(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    return ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))


def default(parameter: Any) -> str:
    """The default as it is typed; nothing for a flag, and for an option that need not be given."""
    value = parameter.default
    if value is None or callable(value) or isinstance(value, (bool, list, tuple)) or value == "":
        return ""
    return f"`{value}`"


if __name__ == "__main__":
    for language, path in PAGES.items():
        path.write_text(page(language), encoding="utf-8")
        print(path)

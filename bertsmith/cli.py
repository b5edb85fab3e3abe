"""The command line: one table of commands."""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from bertsmith import __version__
from bertsmith.commands import benchmark, convert, inference, pages, paper, push, serve, text, train
from bertsmith.errors import Interrupted, UserError

LOST = (
    "error: process {} lost the connection to another process of the run, which was killed or has failed. "
    "The same command with --resume continues from the last checkpoint"
)
COMMANDS: dict[str, Callable[..., None]] = {
    "tokenizer train": text.tokenizer_train,
    "tokenizer extend": text.tokenizer_extend,
    "tokenizer encode": text.tokenizer_encode,
    "corpus doctor": text.corpus_doctor,
    "corpus build": text.corpus_build,
    "pretrain": train.pretrain,
    "fill": inference.fill,
    "finetune": train.finetune,
    "evaluate": inference.evaluate,
    "predict": inference.predict,
    "embed": inference.embed,
    "features": inference.features,
    "convert": convert.convert,
    "push": push.push,
    "serve": serve.serve,
    "verify resume": train.verify_resume,
    "glue": train.glue,
    "benchmark": benchmark.benchmark,
    "report": pages.report,
    "view": pages.view,
    "reproduce": paper.reproduce,
    "recipes": train.recipes,
    "demo": train.demo,
}
GROUPS = {
    "tokenizer": "Train, extend and try out vocabularies.",
    "corpus": "Turn text into shards of tokens.",
    "verify": "Check on this machine that a resumed run is exact.",
}
# `bertsmith --help` lists the commands under these headings, by their first word.
SECTIONS = {
    "Start here": "demo recipes",
    "Text": "tokenizer corpus",
    "Train": "pretrain finetune",
    "Use a model": "predict fill embed features serve",
    "Score and look inside": "evaluate glue benchmark report view",
    "Other formats": "convert push",
    "The paper, and checks": "reproduce verify",
}
WIDTH = 80  # columns of a terminal by default


class Listed(TyperGroup):
    """A group whose help lists the commands under headings, each with the first sentence of its docstring."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        if self.name in GROUPS:
            sections = {"Commands": {name.split()[1]: function for name, function in _commands(self.name)}}
        else:
            sections = {
                title: {name: function for word in words.split() for name, function in _commands(word)}
                for title, words in SECTIONS.items()
            }
        wide = max(len(name) for commands in sections.values() for name in commands)
        for title, commands in sections.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:{wide}}", _first_line(function)) for name, function in commands.items()])


def _commands(word: str) -> list[tuple[str, Callable[..., None]]]:
    """Return the command with this name, or the commands of this group."""
    return [(name, function) for name, function in COMMANDS.items() if name.split()[0] == word]


def _first_line(function: Callable[..., None]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _help(function: Callable[..., None]) -> str:
    """Return the docstring of a command, with examples wrapped to the width of a terminal."""
    words, block, examples = (inspect.getdoc(function) or "").partition("\b\n")
    return words + block + "\n".join(_broken(line) for line in examples.splitlines())


def _broken(line: str) -> str:
    """Wrap a line `Label: a command` between the arguments of the command."""
    if len(line) + 2 <= WIDTH:  # help is indented by 2
        return line
    label, _, command = line.partition(": ")
    word = r'(?:"[^"]*"|\S)+'
    lines = [""]
    for argument in re.findall(rf"--[\w-]+ (?!-){word}|{word}", command):  # an option stays with its value
        if len(lines[-1]) + len(argument) + 8 > WIDTH:
            lines.append("  ")
        lines[-1] += f"{argument} "
    return f"{label}:\n  " + "\\\n  ".join(lines).rstrip()


def _app() -> typer.Typer:
    options: dict[str, Any] = {
        "no_args_is_help": True,
        "add_completion": False,
        "pretty_exceptions_enable": False,
        "rich_markup_mode": None,
        "cls": Listed,
    }
    app = typer.Typer(help="bertsmith: raw text to a working BERT.", **options)
    groups = {name: typer.Typer(help=text, **options) for name, text in GROUPS.items()}
    for name, group in groups.items():
        app.add_typer(group, name=name)
    for name, function in COMMANDS.items():
        *group_name, verb = name.split()
        (groups[group_name[0]] if group_name else app).command(verb, help=_help(function))(function)

    @app.callback(invoke_without_command=True)
    def version(show: Annotated[bool, typer.Option("--version", help="Print the version")] = False) -> None:
        if show:
            print(__version__)
            raise typer.Exit

    return app


def main() -> None:
    """Run a command and exit; under `torchrun` without the cleanup of the interpreter.

    A thread of gloo may release its last tensor during that cleanup, which aborts the process.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path may hold bytes that are not UTF-8
    try:
        _run()
    except SystemExit as end:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def _lost_a_process(error: RuntimeError) -> bool:
    """Return whether a process of `torchrun` failed because another one died, by the error of torch or gloo."""
    is_lost = type(error).__name__.startswith("Dist") or "gloo" in str(error) or "Connection" in str(error)
    return is_lost and int(os.environ.get("WORLD_SIZE", "1")) > 1


def _run() -> None:
    """Run a command; an error that the user can fix is printed as one line, with exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault(
        "OMP_WAIT_POLICY", "passive"
    )  # threads that busy-wait slow each other down on a shared machine
    try:
        _app()()
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # the other ranks of this machine have the same error
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the reader of the output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports the closed pipe at exit
        sys.exit(141)
    except OSError as error:
        print(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", file=sys.stderr)
        sys.exit(2)
    except RuntimeError as error:
        if _lost_a_process(error):
            print(LOST.format(os.environ.get("RANK")), file=sys.stderr)
            sys.exit(1)
        if type(error).__name__ != "OutOfMemoryError":  # torch's, which not every command imports
            raise
        message = str(error).split(" Process ")[0].splitlines()[0]  # without the list of the processes on the device
        print(
            f"error: {message} Run fewer at a time (--jobs), stop other processes on the device, or use --device cpu",
            file=sys.stderr,
        )
        sys.exit(2)
    except Interrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(stop, file=sys.stderr)
        sys.exit(stop.code)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

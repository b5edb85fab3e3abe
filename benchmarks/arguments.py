"""The command line of the benchmarks that have several commands and pre-train and fine-tune in some of them."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Collection
from pathlib import Path

from benchmarks.record import RESULTS


def shared_parser(
    name: str, page: str, commands: Collection[str], *, names: str, data: str, minutes: tuple[float | None, str] | None,
    seeds: tuple[int, str], jobs: tuple[int, str], tasks: Collection[str],
) -> argparse.ArgumentParser:  # fmt: skip
    """A parser with the options that these benchmarks share: each has its own help texts and default numbers.

    `page` is the docstring of the benchmark; its first line describes it.
    """
    parser = argparse.ArgumentParser(description=page.splitlines()[0])
    parser.add_argument("command", choices=commands)
    parser.add_argument("names", nargs="*", help=names)
    parser.add_argument("--data", type=Path, help=data)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / name, help="folder for runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    if minutes is not None:
        parser.add_argument("--minutes", type=float, default=minutes[0], help=minutes[1])
    parser.add_argument("--seeds", type=int, default=seeds[0], help=seeds[1])
    parser.add_argument("--jobs", type=int, default=jobs[0], help=jobs[1])
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=list(tasks))
    parser.add_argument("--device")
    parser.add_argument("--smoke", action="store_true", help="try the command out with tiny shapes")
    return parser


def parsed(
    parser: argparse.ArgumentParser, given: list[str] | None, *, with_data: Collection[str], measuring: Collection[str]
) -> argparse.Namespace:
    """What a call gives: the commands `with_data` need `--data`, and `measuring` ones try nothing out into RESULTS."""
    arguments = parser.parse_args(given)
    if arguments.command in with_data and arguments.data is None:
        parser.error("--data is needed")
    if arguments.smoke and arguments.results == RESULTS and arguments.command in measuring:
        parser.error("--smoke needs --results FOLDER: what it measures means nothing")
    return arguments

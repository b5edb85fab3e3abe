"""The text of the demo: the documentation inside every Python installation. Imports without torch."""

from __future__ import annotations

import ast
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bertsmith import draws
from bertsmith.progress import progress_bar

AREAS = {
    "interface": "tkinter idlelib turtle turtledemo curses cmd",
    "network": "email http urllib smtplib ftplib imaplib poplib nntplib mailbox socketserver xmlrpc wsgiref ssl "
    "socket telnetlib ipaddress cgi webbrowser smtpd netrc _socket _ssl select selectors",
    "processes": "asyncio threading multiprocessing concurrent subprocess queue sched signal _thread pty contextvars",
    "numbers": "_pydecimal decimal _decimal fractions statistics random numbers math cmath datetime _pydatetime "
    "_datetime calendar colorsys zoneinfo _statistics _random time",
    "files": "pathlib shutil os posixpath ntpath genericpath tarfile zipfile _pyio tempfile gzip bz2 lzma fileinput "
    "glob filecmp fnmatch stat posix zlib mmap _io dbm shelve",
    "testing": "unittest doctest pdb bdb trace traceback cProfile profile pstats faulthandler tracemalloc timeit",
    "language": "importlib inspect ast typing dis types pkgutil runpy zipimport symtable tokenize codeop code abc "
    "compileall py_compile modulefinder pyclbr annotationlib _ast",
    "text": "re string textwrap difflib codecs encodings configparser json csv xml html gettext locale unicodedata "
    "pprint reprlib plistlib stringprep _csv _json shlex optparse argparse",
}
AREA_OF = {module: area for area, modules in AREAS.items() for module in modules.split()}
SKIPPED = set("site-packages dist-packages test tests idle_test pydoc_data _bundled lib2to3 __pycache__".split())
BUILTIN_DOCS = (
    "math cmath _socket _ssl _decimal _datetime _io posix zlib select unicodedata itertools builtins array time sys"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
ORDER = 107  # the number of the stream of random draws


@dataclass(frozen=True)
class Description:
    """A docstring and its module."""

    module: str
    text: str

    @property
    def area(self) -> str:
        return AREA_OF.get(self.module, "")


@dataclass(frozen=True)
class DemoText:
    """Documents to pre-train on, and labelled descriptions; no held-out description is among the documents."""

    documents: list[str]
    train: list[Description]
    held_out: list[Description]


def collect(rows_per_area: int, held_out_per_area: int) -> DemoText:
    """Collect the text and split the labelled descriptions, always in the same way on one installation."""
    descriptions = list(_descriptions())
    train: list[Description] = []
    held_out: list[Description] = []
    for number, area in enumerate(AREAS):
        own = [d for d in descriptions if d.area == area and 40 <= len(d.text) <= 1500]
        own = [own[int(i)] for i in draws.permute(range(len(own)), len(own), number, ORDER)]
        held_out += own[:held_out_per_area]
        train += own[held_out_per_area : held_out_per_area + rows_per_area]
    hidden = {d.text for d in held_out}
    documents: dict[str, list[str]] = {}
    for d in descriptions:
        if d.text not in hidden:
            documents.setdefault(d.module, []).append(d.text)
    return DemoText([*_topics(), *("\n".join(parts) for parts in documents.values())], train, held_out)


def write_documents(path: Path, documents: Iterable[str]) -> None:
    """Write documents as text: one line per paragraph, an empty line between documents."""
    lines = ("\n".join(line for line in d.splitlines() if line.strip()) for d in documents)
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")


def _topics() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from topics.values()


def _descriptions() -> Iterator[Description]:
    """Yield every docstring of the standard library once."""
    seen: set[str] = set()
    for module, text in (*_source_docs(), *_builtin_docs()):
        if text not in seen:
            seen.add(text)
            yield Description(module, text)


def _source_docs() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [p for p in sorted(root.rglob("*.py")) if not SKIPPED & set(p.relative_to(root).parts)]
    with progress_bar("reading Python's documentation", len(paths)) as advance:
        for number, path in enumerate(paths):
            module = path.relative_to(root).parts[0].removesuffix(".py")
            yield from ((module, text) for text in _docstrings(path))
            advance(number + 1, "")


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


def _builtin_docs() -> Iterator[tuple[str, str]]:
    """Yield docstrings of modules without Python source."""
    for name in BUILTIN_DOCS.split():
        try:
            module = sys.modules.get(name) or __import__(name)
        except ImportError:
            continue
        for _, member in sorted(vars(module).items()):
            members = [member, *(m for _, m in sorted(vars(member).items()))] if inspect.isclass(member) else [member]
            for item in members:
                text = getattr(item, "__doc__", None)
                if callable(item) and isinstance(text, str):
                    yield name, inspect.cleandoc(text)

"""The command reference is current, and the Korean pages have the commands and the headings of the English ones."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import command_reference, family_pages

ROOT = Path(__file__).parent.parent
PAIRS = {"README.md": "docs/ko/README.md", "docs/korean.md": "docs/ko/korean.md"}
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
AGAIN = "run `python -m benchmarks.command_reference`"


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def code_blocks(text: str) -> list[str]:
    return re.findall(r"^```(?:bash|python)\n.*?^```$", text, re.M | re.S)


def headings(text: str) -> list[int]:
    """The levels of a page's headings, in their order."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    return [len(marks) for marks in re.findall(r"^(#+) \S", plain, re.M)]


@pytest.mark.parametrize("english", PAIRS)
def test_korean_pages_have_the_same_commands_and_headings(english: str) -> None:
    there, here = read(english), read(PAIRS[english])
    assert code_blocks(here) == code_blocks(there), f"{PAIRS[english]} has other commands than {english}"
    assert len(code_blocks(here)) > 4
    assert headings(here) == headings(there), f"{PAIRS[english]} has other headings than {english}"
    hangul = len(re.findall("[가-힣]", here))
    assert hangul > 0.25 * len(re.sub(r"^```.*?^```$|^\|.*$", "", here, flags=re.M | re.S))


def test_the_recipes_to_start_with_are_those_of_the_command() -> None:
    rows = [f"| {when} | {name} |" for when, name in family_pages.start_rows()]
    assert [line for line in read("docs/families.md").splitlines() if line in rows] == rows


@pytest.mark.parametrize("language", command_reference.PAGES)
def test_the_command_reference_is_current(language: str) -> None:
    path = command_reference.PAGES[language]
    assert path.read_text(encoding="utf-8") == command_reference.page(language), f"{path} is old: {AGAIN}"


def test_the_command_reference_is_translated() -> None:
    """A few new texts may stay English for a while; what is no longer said is removed."""
    said: list[str] = []
    command_reference.write(lambda text: said.append(text) or text)
    table = json.loads(command_reference.TABLE.read_text(encoding="utf-8"))
    missing = [text for text in dict.fromkeys(said) if text and text not in table]
    assert len(missing) <= 0.1 * len(table), f"translate in {command_reference.TABLE}: {missing}"
    assert all(re.search("[가-힣]|^[-a-z0-9. ,]+$", text) for text in table.values())


def test_every_command_is_in_the_reference() -> None:
    from bertsmith.cli import COMMANDS

    for path in command_reference.PAGES.values():
        text = path.read_text(encoding="utf-8")
        assert sorted(re.findall("^### (.*)$", text, re.M)) == sorted(COMMANDS)
        assert text.count("`--normalise`") == 1


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    plain = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in re.findall(r"^#+ (.+)$", plain, re.M)}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for name, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", read(page)):
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {name}"
        assert not anchor or anchor in anchors(target), f"{page}: {name}#{anchor}"


def test_commands_of_the_pages_have_only_options_that_exist() -> None:
    """The reference, which is current, has the options of every command."""
    reference = re.split("^### ", read("docs/commands.md"), flags=re.M)[1:]
    options = {each.split("\n")[0]: {*re.findall(r"`(--?[a-z][a-z-]*)", each), "--help"} for each in reference}
    checked = 0
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for block in re.findall(r"^```(?:bash)?\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                command = re.search(rf"(?:^|\| |-m )bertsmith ({'|'.join(options)}) ([^#|>]*)", line.strip())
                if command:
                    given = set(re.findall(r"(?<=\s)(--[a-z][a-z-]*)", f" {command[2]}"))
                    assert given <= options[command[1]], f"{path.relative_to(ROOT)}: {line.strip()}"
                    checked += len(given)
    assert checked > 200

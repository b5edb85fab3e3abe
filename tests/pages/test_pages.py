"""The layout of a wide and of a narrow page, measured in a browser if one is installed."""

import re
from pathlib import Path

import pytest

from bertsmith.pages import page
from bertsmith.pages.report.mistakes import confusion

CLASSES = [f"{word}_category" for word in "a b c d e f g h i j k l m n o p q r".split()]
MEASURE = """() => {
  const lines = e => { const r = document.createRange(); r.selectNodeContents(e.querySelector("b") || e);
    return new Set([...r.getClientRects()].map(b => Math.round(b.bottom))).size; };
  const all = s => [...document.querySelectorAll(s)];
  return {
    broken: all("td.n, td.short").filter(e => lines(e) > 1).map(e => e.textContent),
    overflow: document.body.scrollWidth - document.body.clientWidth,
    clipped: all(".wide").filter(e => getComputedStyle(e).overflowX !== "auto").length,
    columns: all(".matrix tr:nth-child(2) td").length,
    heads: all(".matrix th span").map(e => e.getBoundingClientRect().width),
    closed: all("details:not([open])").length,
    keep: all("[lang=ko]").map(e => getComputedStyle(e).wordBreak),
  };
}"""


def write(path: Path) -> None:
    pairs = [(gold, CLASSES[(i * 7) % 18]) for i, gold in enumerate(CLASSES * 12)]
    rows = [
        (
            "ko-1",
            18,
            1234567,
            "이 영화는 정말 재미있었습니다",
            "some words that are long enough to be broken into lines",
        )
    ]
    parts = [
        page.table(["run", "rows", "tokens", "text", "words"], rows),
        page.folded("the first task", confusion(CLASSES, pairs), is_open=True),
        page.table(["path"], [("/a/very/long/path/" + "x" * 90,)]),
    ]
    page.write_page(path, "A page", "What it is.", parts)


@pytest.mark.parametrize(
    ("name", "part"), [("page.css", "body {"), ("view.css", ".token {"), ("view.js", "data.tokens")]
)
def test_style_sheets_and_scripts_are_files_inside_the_package(name: str, part: str) -> None:
    assert part in page.asset(name)
    assert (Path(page.__file__).parent / "assets" / name).is_file()  # so hatch puts it into the wheel


def test_a_page_holds_its_style_sheet_and_refers_to_no_other_file(tmp_path: Path) -> None:
    page.write_page(tmp_path / "page.html", "A page", "What it is.", ["<p>A part.</p>"])
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"<style>\n{page.asset('page.css')}</style>" in text
    assert not re.search(r"<link|<script src|@import|url\(|https?://", text)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 420])
def test_cells_are_not_wrapped_and_every_class_is_visible(width: int, tmp_path: Path, browser) -> None:
    write(tmp_path / "page.html")
    opened = browser.new_page(viewport={"width": width, "height": 2000})
    opened.goto(f"file://{tmp_path / 'page.html'}")
    found = opened.evaluate(MEASURE)
    opened.close()
    assert found["broken"] == []
    assert found["overflow"] <= 0
    assert found["clipped"] == 0
    assert found["columns"] == len(CLASSES) + 3  # the label, the number of rows, the share found
    assert max(found["heads"]) < 32  # names are vertical, so that all columns fit
    assert found["closed"] == 0
    assert set(found["keep"]) == {"keep-all"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("이 영화는 정말 재미있었습니다", " lang=ko"),
        ("東京へ行きました", " lang=ja"),
        ("我们去北京", " lang=zh"),
        ("the word 영화 in English text", ""),
        ("plain words", ""),
        ("12.5", ""),
    ],
)
def test_the_language_of_a_text_is_found_from_its_script(text: str, expected: str) -> None:
    assert page.lang(text) == expected


def test_only_very_long_words_may_be_broken() -> None:
    shown = page.table(["a"], [("x" * 40,), ("short words <b> & more",), (18,)])
    assert "<wbr>" in shown
    assert "short words &lt;b&gt; &amp; more" in shown
    assert ">18<" in shown

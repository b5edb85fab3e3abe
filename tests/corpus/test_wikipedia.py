"""Only the prose of articles is kept, whatever their markup; malformed wikitext neither raises nor takes long."""

import random
import time
from html import escape

import pytest

from bertsmith.corpus.wikipedia import extracted_documents, page_documents, wikitext_paragraphs

HEADER = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="ko">
  <siteinfo><sitename>Made-up</sitename>
  <namespaces><namespace key="0" /><namespace key="6">파일</namespace></namespaces>
  </siteinfo>
"""
SPEED_TARGET = 1e6  # bytes of wikitext per second and core
SLOW_MACHINE = 4  # the machine may be shared with other work


def page(
    text: str, namespace: int = 0, head: str = "", model: str = "wikitext", attributes: str = ' bytes="9" xml:space="p"'
) -> str:
    return f"""  <page>
    <title>Mill &amp; River</title>
    <ns>{namespace}</ns>
    <id>7</id>{head}
    <revision>
      <id>70</id>
      <contributor><username>A &lt;page&gt; writer</username></contributor>
      <comment>/* &lt;ns&gt;0&lt;/ns&gt; */ typo</comment>
      <model>{model}</model>
      <format>text/x-wiki</format>
      <text{attributes}>{escape(text)}</text>
      <sha1>abc</sha1>
    </revision>
  </page>
"""


def documents(*pages: str) -> list[list[str]]:
    return list(page_documents("".join(pages).encode()))


# One element of wikitext per case: the markup and the text that is kept.
ELEMENTS = {
    "template": ("The mill {{formatnum|12}}stands.", "The mill stands."),
    "template over lines": (
        "{{Infobox mill\n| name = Mill\n| built = {{date|1801}}\n}}\nThe mill stands.",
        "The mill stands.",
    ),
    "parser function": ("{{#if: {{{1|}}} | a | b }}The mill stands.", "The mill stands."),
    "parameter": ("The {{{1}}}mill{{{2|x}}} stands.", "The mill stands."),
    "table": ('{| class="wikitable"\n! Year !! Sacks\n|-\n| 1801 || 12\n|}\nThe mill stands.', "The mill stands."),
    "indented table": (":{|\n| a\n|}\nThe mill stands.", "The mill stands."),
    "html table": ("<table><tr><td>1<table><tr><td>2</table></td></tr></table>The mill stands.", "The mill stands."),
    "table in template": ("{{box|\n{|\n| a {{b|{{c}}}}\n|}\n}}The mill stands.", "The mill stands."),
    "template, table, template": (
        "{{box|1=\n{| class={{c}}\n|-\n| {{box|\n{|\n| deep [[x|y]]\n|}}}\n| z\n|}\n}}The mill stands.",
        "The mill stands.",
    ),
    "template ends at a bar": ("{{box\n| a = b\n|}}The mill stands.", "The mill stands."),
    "table that a template ends": ("{|\n! a !! b\n|-\n| c\n{{end}}\nThe mill stands.", "The mill stands."),
    "reference": (
        'It stands.<ref name="a">[[B]] {{cite|t=1}}</ref> Still.<ref name="a" /> Yes.',
        "It stands. Still. Yes.",
    ),
    "reference without quotes": ("It stands.<ref name=a/> Still.<REF>b</REF>", "It stands. Still."),
    "references": ("It stands.\n<references group=n>\n<ref>a</ref>\n</references>\n<references/>", "It stands."),
    "gallery": ("<gallery mode=packed>\nFile:a.jpg|An ''old'' mill\n</gallery>\nIt stands.", "It stands."),
    "comment": ("The <!-- old\n\n{{ -->mill stands.<!-- to the end {{", "The mill stands."),
    "math": (r"The area <math>\frac{a}}{{b}</math> grows.", "The area grows."),
    "code block": ("It runs.\n<syntaxhighlight lang=c>\nint main() {{\n</syntaxhighlight>", "It runs."),
    "file": (
        "[[File:a.jpg|thumb|200px|a [[nested]] caption of [http://x.org it]]]The mill stands.",
        "The mill stands.",
    ),
    "file in file": ("[[Image:a.jpg|b [[file:c.jpg|d [[e|f]] g]] h]]\nThe mill stands.", "The mill stands."),
    "korean file": ("[[파일:물레방아.jpg|섬네일|오래된 [[물레방아]]]]\n물레방아가 있다.", "물레방아가 있다."),
    "category": ("It stands.\n[[Category:Mills| ]]\n[[분류:물레방아]]\n[[ category : Rivers]]", "It stands."),
    "interlanguage": ("It stands.\n[[ko:물레방아]]\n[[zh-min-nan:Mill]]", "It stands."),
    "shown category": ("See [[:Category:Mills|all mills]] and [[:분류:강]].", "See all mills and 분류:강."),
    "title like a language": ("[[Re:Start]] and [[CSI: Riverton]].", "Re:Start and CSI: Riverton."),
    "magic word": ("__NOTOC__The mill stands. __목차숨김__", "The mill stands."),
    "tags": (
        '<div class="a">The <b>mill</b> H<sub>2</sub>O<nowiki/> <span\nid=x>stands</span>.</div>',
        "The mill H2O stands.",
    ),
    "not a tag": ("If a <b and c> d, then x < y.", "If a d, then x < y."),
    "unknown tag": ("A list of std::vector<int> is long.", "A list of std::vector<int> is long."),
    "ruby": ("<ruby>水<rp>(</rp><rt>mizu</rt><rp>)</rp></ruby> is water.", "水 is water."),
    "nowiki": (
        "<nowiki>*</nowiki> Write <nowiki>[[a|b]] {{c}} ''d'' <ref></nowiki>.",
        "* Write [[a|b]] {{c}} ''d'' <ref>.",
    ),
    "comment in nowiki": ("Write <nowiki><!--</nowiki> first.", "Write <!-- first."),
    "nowiki in comment": ("The <!-- <nowiki> -->mill <nowiki>''</nowiki>.", "The mill ''."),
    "link": ("The [[mill]]s of [[Riverton (town)|Riverton]].", "The mills of Riverton."),
    "link with more bars": ("[[a|b|c]]", "b|c"),
    "pipe trick": ("In [[Riverton (town)|]].", "In Riverton."),
    "link in korean": ("[[강 (지형)|강]]가의 [[마을]]은 '''크다'''.", "강가의 마을은 크다."),
    "link in bold": ("'''[[mill|The ''old'' mill]]''' stands.", "The old mill stands."),
    "template in link": ("The [[mill|old{{x|a]]}} mill]] stands.", "The old mill stands."),
    "external link": (
        "See [https://a.org/?q={{x}}&b its page] and [//b.org], [mailto:a@b.c mail].",
        "See its page and, mail.",
    ),
    "brackets that are no link": ("He said [sic] so.", "He said [sic] so."),
    "apostrophes": (
        "'''''Both''''', ''italic'', '''bold''' and the '''mill''''s wheel.",
        "Both, italic, bold and the mill's wheel.",
    ),
    "apostrophes around what goes": (
        "In ''{{lang|la|x}}'' and '''{{y}}''' the ''mill''<ref>a</ref>'s wheel, ''mill''<ref/>'s \"{{z}}\" wheel.",
        "In and the mill's wheel, mill's wheel.",
    ),
    "headings": ("== Past ==\nIt stood.\n===Now===\nIt stands.", "It stood.\nIt stands."),
    "lists": ("It stands.\n* a\n** b\n# c\n: d\n; e : f\n*g\n----\nYes.", "It stands.\nYes."),
    "html list": ("It stands.\n<ul>\n<li>a<ul><li>b</ul>\n<li>c\n</ul>\nYes.", "It stands.\nYes."),
    "line break": ("One.<br />Two.<br>Three.\n* a<br>b", "One.\nTwo.\nThree."),
    "exclamation": ("!Kung is a name.", "!Kung is a name."),
    "entities": ("5&nbsp;km &ndash; caf&eacute; &amp;lt; &#44032;&#x3b1; &lt;ref&gt;", "5 km – café &lt; 가α <ref>"),
    "odd entities": ("Odd &#99999999999; &#xD800; &nothing; & more.", "Odd &#99999999999; \ufffd &nothing; & more."),
    "spaces": ("a\u00a0b\u3000c\u2009 \td\u200be", "a b c de"),
    "empty brackets": (
        "Riverton ({{a}}) and Milltown ({{a}}; {{b}}, ) lie here [ ].",
        "Riverton and Milltown lie here.",
    ),
    "leading separators": ("Riverton ({{a}}; {{b}}, born 1801) is.", "Riverton (born 1801) is."),
    "trailing separators": ("Riverton (old, {{a}}; ) is.", "Riverton (old) is."),
    "middle separators": ("Riverton (old, {{a}}, new), {{b}}, is {{c}}.", "Riverton (old, new), is."),
    "empty label": (
        "Riverton ([[Korean]]: {{lang|ko|강}}; 1801) and 강({{a}}; 영어: {{b}}, 한자: {{c}})은 길다.",
        "Riverton (1801) and 강은 길다.",
    ),
    "brackets in brackets": ("Riverton (({{a}}); [{{b}}]) is 《{{c}}》.", "Riverton is."),
    "only punctuation": ("{{a}}.\n({{b}})\nIt stands.", "It stands."),
    "windows line ends": ("It stands.\r\n* a\r\n\r\nYes.\r\n", "It stands.\nYes."),
}


@pytest.mark.parametrize(("text", "expected"), ELEMENTS.values(), ids=ELEMENTS)
def test_each_element_of_wikitext_becomes_prose(text: str, expected: str) -> None:
    assert documents(page(text)) == [expected.split("\n")]


@pytest.mark.parametrize(
    "name", ["References", "EXTERNAL LINKS", "See also", "각주", "외부 링크", "같이 보기", "참고 문헌", "참고문헌"]
)
def test_sections_of_sources_are_dropped(name: str) -> None:
    text = f"Kept.\n\n== {name} ==\nGone.\n=== Books ===\nGone too.\n"
    text += f"==Later==\nKept again.\n=== ''{name}''{{{{a}}}} ===\nGone."
    assert wikitext_paragraphs(text) == ["Kept.", "Kept again."]


def test_articles_in_english_and_korean_become_prose() -> None:
    english = """{{Short description|Town}}
{{Infobox town
| name = Riverton
| image = [[File:Riverton.jpg|250px]]
| people = {{val|{{people|12}}|u=[[people]]}}<ref>{{cite web|url=http://a.org|title=A}}</ref>
}}
[[File:Mill.jpg|thumb|left|The [[mill]] of [[Riverton|the town]] in 1801]]
'''Riverton''' ({{IPA|x}}; {{lang-ko|리버턴}}) is a [[town]] on the [[Silver River (north)|Silver River]].<ref name=a />
It has 5&nbsp;mills.

== Past ==
{{main|Past of Riverton}}
The ''first'' mill{{efn|A note with [[link]].}} was built in 1801.
{| class="wikitable"
|+ Mills
|-
| 1801 || {{yes}}
|}
* a list

== References ==
{{reflist|refs=<ref name=a>b</ref>}}
[[Category:Towns]]
"""
    korean = """{{마을 정보
|이름 = 강마을
|그림 = 강마을.jpg
}}
'''강마을'''({{llang|en|Riverton}}, {{한자|江村}})은 [[은강]]에 있는 [[마을 (행정)|마을]]이다.<ref>{{웹 인용}}</ref>
물레방아가 많다.

== 역사 ==
1801년에 첫 번째 [[물레방아]]가 세워졌다.

== 같이 보기 ==
* [[은강]]
== 각주 ==
{{각주}}
[[분류:마을]]
"""
    block = HEADER + page(english) + page(korean) + "</mediawiki>\n"
    assert documents(block) == [
        ["Riverton is a town on the Silver River.", "It has 5 mills.", "The first mill was built in 1801."],
        ["강마을은 은강에 있는 마을이다.", "물레방아가 많다.", "1801년에 첫 번째 물레방아가 세워졌다."],
    ]


def test_only_articles_are_kept() -> None:
    block = [
        page("#REDIRECT [[A]]"),
        page("A redirect by its element.", head='\n    <redirect title="A" />'),
        page(" #redirect [[A]] {{R from move}}"),
        page("#넘겨주기 [[강]]"),
        page("Talk.", namespace=1),
        page("A template.", namespace=10),
        page("Ten.", namespace=100),
        page("{}", model="json"),
        page("{{only a template}}\n* and a list"),
        page(""),
        page("Kept."),
        "  <page><title>x</title><ns>0</ns><revision><text bytes='0' /></revision></page>",
        "  <page><title>x</title><ns>0</ns></page>",
    ]
    assert documents(*block) == [["Kept."]]


def test_header_and_footer_of_a_dump_are_optional() -> None:
    pages = [page(f"Page {n}.") for n in range(3)]
    expected = [[f"Page {n}."] for n in range(3)]
    assert documents(HEADER, *pages, "</mediawiki>") == documents(*pages) == expected
    assert documents(HEADER) == documents("</mediawiki>") == documents("") == []
    assert documents(pages[0], "<page><title>cut") == expected[:1]


def test_the_main_text_of_the_newest_revision_is_read() -> None:
    old, new = page("Old."), page("New.", attributes="")
    revision = new[new.index("<revision>") : new.index("</revision>")]
    more = revision + "<content><role>extra</role><text>Slot.</text></content></revision>"
    assert documents(old.replace("</revision>", "</revision>" + more)) == [["New."]]


def test_entities_are_decoded_once_and_never_resolved() -> None:
    bomb = '<?xml version="1.0"?><!DOCTYPE x [<!ENTITY a "ha"><!ENTITY b "&a;&a;"><!ENTITY f SYSTEM "file:///etc/passwd">]>'
    raw = page("@").replace(
        "@", "&b; &f; &lt;b&gt;x&lt;/b&gt; &quot;y&quot; &#65;&#x42; R&amp;amp;D &amp;lt;ref&amp;gt; &amp;nbsp;z"
    )
    assert documents(bomb, raw) == [['&b; &f; x "y" AB R&D <ref> z']]


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    assert list(page_documents(page("A @ B.").encode().replace(b"@", b"\xff"))) == [["A \ufffd B."]]


MALFORMED = {
    "unclosed template": ("One.\n{{a|b\n| c = d\nTwo.", ["One.", "Two."]),
    "unclosed template in text": ("One. {{lang|ko|b} Two.\nThree {{x}}four.", ["One.", "Three four."]),
    "stray closers": ("One }} two ]] three |} four.", ["One two three |} four."]),
    "unclosed link": ("The [[mill stands. [[Riverton|It]] grows.", ["The mill stands. It grows."]),
    "unclosed file": ("[[File:a.jpg|thumb|a [[b] c]] d\n\nKept.", ["Kept."]),
    "unclosed file, stray closer": ("[[File:a.jpg|thumb\n\nKept [[a]].\n\nKept ]] too.", ["Kept a.", "Kept too."]),
    "unclosed link in template": ("{{a|[[b}}One.", ["One."]),
    "unclosed reference": ("One.<ref>a Two.<ref>b</ref> Three.", ["One.a Two. Three."]),
    "unclosed nowiki": ("One <nowiki>''two'' <!-- x -->three.", ["One two three."]),
    "crossed": ("{{a [[b }} c ]] <ref> {{ </ref> }} d", ["c d"]),
    "crossed tags": ("<ul><ref></ul></ref>One.</table>", ["One."]),
    "long number": ("One &#" + "9" * 5000 + "; two.", ["One &#" + "9" * 5000 + "; two."]),
    "brace": ("A { brace } and [ bracket.", ["A { brace } and [ bracket."]),
    "equals": ("=\n==\n=a\nOne = two.", ["=a", "One = two."]),
}


@pytest.mark.parametrize(("text", "expected"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_wikitext_keeps_the_prose(text: str, expected: list[str]) -> None:
    assert wikitext_paragraphs(text) == expected


PIECES = [
    *"{{ }} {| |} [[ ]] [ ] | ' '' ''' = == * # : ; ( ) < > & &# &amp; __ ! - / 가 a 1 \n".split(" "),
    *"<ref> </ref> <ref/> <nowiki> </nowiki> <!-- --> <ul> </ul> <b [[File: http:// \u00a0 \x00 \ud7ff".split(" "),
    " ",
    "\n",
    "\n{|",
    "\n|}",
]


def test_random_markup_never_raises_and_leaves_clean_paragraphs() -> None:
    rng = random.Random(0)
    for _ in range(1500):
        for line in wikitext_paragraphs("".join(rng.choices(PIECES, k=rng.randint(1, 60)))):
            assert line == line.strip() != ""
            assert "\n" not in line


HARD = [
    *"{{a| [[a| [[File: }}_ ]]_ {|\n <ref> <nowiki> <!-- < <ul> <b ( (; ,a: ' __A &#1 &not & \u3000 ==\n [ [http://".split(
        " "
    ),
    *["{{ ", "[[ ", "; ", "( ", "[http://a ", "<ref ", "= =\n", ", a:"],
]


def seconds(text: str) -> float:
    started = time.process_time()
    wikitext_paragraphs(text)
    return time.process_time() - started


@pytest.mark.parametrize("piece", ["{{", "[["])
def test_a_megabyte_of_opening_brackets_takes_little_time(piece: str) -> None:
    assert seconds(piece * 500_000) < 2


@pytest.mark.parametrize("piece", HARD)
def test_unclosed_markup_takes_linear_time(piece: str) -> None:
    assert seconds(piece * (300_000 // len(piece))) < 2  # quadratic time would be minutes


NESTED = [("{{", "}}"), ("[[a|", "]]"), ("[[File:a|", "]]"), ("\n{|", "\n|}"), ("<ul>", "</ul>"), ("{{a|[[", "]]}}")]


@pytest.mark.parametrize(("opening", "closing"), NESTED)
def test_deep_nesting_takes_linear_time(opening: str, closing: str) -> None:
    count = 150_000 // len(opening)
    assert seconds(opening * count + "x" * 1_000_000 + closing * count) < 2


def made_up_article(rng: random.Random, size: int) -> str:
    """Wikitext with as much markup as an article."""
    words = "the old mill of a town on river was built by many people near stone road 마을은 강가에 있다".split()
    reference = "<ref name=a>{{cite|url=http://a.org|title=Some title|date={{date|1801}}|by=[[A B|A]]}}</ref>"
    parts = ["{{Infobox\n" + "".join(f"| f{n} = {{{{val|{n}|u=[[km]]}}}}\n" for n in range(30)) + "}}\n"]
    while sum(map(len, parts)) < size:
        marked = [f"[[{w} x|{w}]]" if rng.random() < 0.1 else w for w in rng.choices(words, k=60)]
        parts += ["== Head ==\n", " ".join(marked), "'''b'''.", reference, "\n\n* [[item]]\n{|\n| {{a}} || b\n|}\n"]
    return "".join(parts)


def test_articles_are_read_at_the_target_speed() -> None:
    rng = random.Random(0)
    block = "".join(page(made_up_article(rng, 20_000)) for _ in range(50)).encode()
    started = time.process_time()
    assert len(list(page_documents(block))) == 50
    assert len(block) / (time.process_time() - started) > SPEED_TARGET / SLOW_MACHINE


EXTRACTED = """<doc id="12" url="https://made.up/wiki?curid=12" title="Mill &amp; River">
Mill &amp; River

The mill&nbsp;stands (; ) here. 1 &lt; 2.

Second paragraph.

</doc>
<doc id="13" revid="5" url="https://made.up/wiki?curid=13" title="The "Old" Mill">
The "Old" Mill

오래된 물레방아이다.
</doc>
<doc id="14" url="https://made.up/wiki?curid=14" title="Empty">
Empty

</doc>
<doc id="15" url="https://made.up/wiki?curid=15" title="River">
No title here.
River
</doc>
"""


def test_the_output_of_wikiextractor_is_read() -> None:
    expected = [
        ["The mill stands here. 1 < 2.", "Second paragraph."],
        ["오래된 물레방아이다."],
        ["No title here.", "River"],
    ]
    assert list(extracted_documents(EXTRACTED)) == expected
    assert list(extracted_documents(EXTRACTED.replace("\n", "\r\n"))) == expected
    assert list(extracted_documents(EXTRACTED.removesuffix("</doc>\n"))) == expected
    assert list(extracted_documents("")) == list(extracted_documents("no document\n</doc>\n")) == []

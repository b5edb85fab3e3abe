"""Documents from Wikipedia: articles of an XML dump as plain prose, and the output of WikiExtractor.

As in the BERT paper (section 3.1) only text passages are kept: lists, tables and headers are dropped. Wikitext is
parsed by scans and regular expressions that take linear time on any input; custom XML entities are never resolved.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from html.entities import html5

GONE = "\0"  # placeholder for removed markup, so that `''{{a}}''` does not become four apostrophes
MAX_DEPTH = 40  # no article nests deeper; the bound keeps the time linear
LANGUAGES = frozenset(
    """aa ab ace ady af ak als alt am ami an ang ann anp ar arc ary arz as ast atj av avk awa ay az azb ba ban bar
    bat-smg bbc bcl bdr be be-tarask be-x-old bew bg bh bi bjn blk bm bn bo bpy br bs btm bug bxr ca cbk-zam cdo ce ceb
    ch cho chr chy ckb co cr crh cs csb cu cv cy da dag de dga din diq dsb dtp dty dv dz ee el eml en eo es et eu ext fa
    fat ff fi fiu-vro fj fo fon fr frp frr fur fy ga gag gan gcr gd gl glk gn gom gor got gpe gsw gu guc gur guw gv ha
    hak haw he hi hif ho hr hsb ht hu hy hyw hz ia iba id ie ig igl ii ik ilo inh io is it iu ja jam jbo jv ka kaa kab
    kbd kbp kcg kg kge ki kj kk kl km kn knc ko koi kr krc ks ksh ku kus kv kw ky la lad lb lbe lez lfn lg li lij lld
    lmo ln lo lrc lt ltg lv lzh mad mai map-bms mdf mg mh mhr mi min mk ml mn mni mnw mos mr mrj ms mt mus mwl my myv
    mzn na nah nan nap nds nds-nl ne new ng nia nl nn no nov nqo nr nrm nso nup nv ny oc olo om or os pa pag pam pap pcd
    pcm pdc pfl pi pih pl pms pnb pnt ps pt pwn qu rm rmy rn ro roa-rup roa-tara rsk ru rue rup rw sa sah sat sc scn sco
    sd se sg sgs sh shi shn si simple sk skr sl sm smn sn so sq sr srn ss st stq su sv sw syl szl szy ta tay tcy tdd te
    tet tg th ti tig tk tl tly tn to tpi tr trv ts tt tum tw ty tyv udm ug uk ur uz ve vec vep vi vls vo vro wa war wo
    wuu xal xh xmf yi yo yue za zea zgh zh zh-classical zh-min-nan zh-yue zu""".split()
)
# Namespaces of files and categories: in English, which every Wikipedia accepts, Korean and other large Wikipedias.
HIDDEN_NAMESPACES = frozenset(
    """file image category 파일 그림 분류 datei bild kategorie fichier catégorie archivo imagen categoría immagine
    categoria ficheiro imagem bestand afbeelding categorie plik grafika kategoria файл изображение категория зображення
    категорія ファイル 画像 カテゴリ 文件 檔案 图像 圖像 分类 分類""".split()
)
HIDDEN_ELEMENTS = """ref references gallery math chem ce score timeline syntaxhighlight source pre imagemap hiero graph
    mapframe maplink templatedata templatestyles inputbox categorytree indicator includeonly table ul ol dl style script
    h1 h2 h3 h4 h5 h6 rt rp""".split()
BLOCK_TAGS = "br p div blockquote center hr poem li dt dd tr td th caption".split()
INLINE_TAGS = """abbr b bdi bdo big cite code data del dfn em font i ins kbd mark nowiki noinclude onlyinclude phonos
    q ruby rb rtc s samp section small span strike strong sub sup time tt u var wbr tbody thead tfoot""".split()
# Sections of sources and links, as `_section_name` normalises them: lower case, no spaces.
HIDDEN_SECTIONS = frozenset(
    """references notes footnotes citations sources bibliography workscited notesandreferences referencesandnotes
    generalreferences externallinks seealso furtherreading 각주 주석 출처 참고문헌 참고자료 외부링크 바깥고리 같이보기
    함께보기 더보기 읽을거리 관련문서 관련항목 각주및참고문헌 주석및참고자료 출처및각주""".split()
)


def _names(names: list[str] | frozenset[str]) -> str:
    return "|".join(map(re.escape, sorted(names)))


_ARTICLE = re.compile(rb"<ns>\s*0\s*</ns>")
_MODEL = re.compile(rb"<model>\s*([^<\s]*)")
_TEXT = re.compile(rb"<text(?:\s[^<>]*)?>")
_XML_ENTITY = re.compile(r"&(?:lt|gt|amp|quot|apos|#[0-9]{1,7}|#x[0-9A-Fa-f]{1,6});")
_REDIRECT = re.compile(r"\s*#\s*(?:redirect|넘겨주기)", re.I)

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.S)
_NOWIKI = re.compile(_COMMENT.pattern + r"|<nowiki>(.*?)(?:</nowiki>|(\Z))", re.S)
_MARKUP = re.compile(r"^[*#:;!]|[\[\]{}|'<>=_]")
_ELEMENT = re.compile(rf"<(?=[/a-z])(/?)({_names(HIDDEN_ELEMENTS)})\b([^<>]*)>", re.I)
# `|}` ends a table, but in `|}}` the bar belongs to a template that ends; in `|}}}` the table ends, then the template.
_BRACES = re.compile(r"\{\{+|\}\}+|^[ \t:*#]*+\{\||^[ \t]*+\|\}(?!\}(?!\}))", re.M)
_BRACKETS = re.compile(r"\[\[+|\]\](?!\](?!\]))")  # of `]]]` the first bracket is the end of an external link
_UNCLOSED = re.compile(rf"\{{\{{[^\n]*|\[\[[ \t]*(?:{_names(HIDDEN_NAMESPACES)})[ \t]*:[^\n]*", re.I)
_EXTERNAL = re.compile(r"\[(?:(?:[a-z]{3,6}:)?//|mailto:)[^\s\[\]<>]*+[ \t]*+([^\[\]\n]*+)\]", re.I)
_QUOTES = re.compile(r"'{2,}")
_MAGIC_WORD = re.compile(r"__(?:[A-Z]{3,}|[가-힣]{2,})__")
_BLOCK_TAG = re.compile(rf"<(?=[/a-z])/?(?:{_names(BLOCK_TAGS)})\b[^<>]*>", re.I)
_INLINE_TAG = re.compile(rf"<(?=[/a-z])/?(?:{_names(INLINE_TAGS + HIDDEN_ELEMENTS)})\b[^<>]*>", re.I)

_ENTITY = re.compile(r"&(?:[A-Za-z][A-Za-z0-9]{1,31}|#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6});")
_INVISIBLE = re.compile("[\u00ad\u200b\u200e\u200f\u2060\ufeff]")
_SPACES = re.compile(r"[^\S\n]+")
_EMPTY_LABEL = re.compile(r"(?<=[(（;；,]) ?[^\W\d_][\w -]{0,30}[:：] ?(?=[;；,)）])")  # `(Korean: ; 1900)`
_EMPTY_PAIR = re.compile(r' ?(?:[(（][ ;,:/；，、：·–-]*+[)）]|\[ ?\]|「 ?」|『 ?』|《 ?》|〈 ?〉|“ ?”|"")')
_LEADING = re.compile(r"([(（])[ ;,；，、]+")
_TRAILING = re.compile(r"(?<![ ;,；，、])[ ;,；，、]++(?=[)）])")
_DOUBLED = re.compile(r"([;,])(?: [;,])+")
_SPACED = re.compile(r" ([,.;])(?=\s|$)", re.M)
_WORD = re.compile(r"[^\W_]")


def page_documents(block: bytes) -> Iterator[list[str]]:
    """Yield the paragraphs of each article in whole `<page>` elements of a MediaWiki export, without redirects."""
    for page in _pages(block):
        text = _article(page)
        if text and (document := wikitext_paragraphs(text)):
            yield document


def extracted_documents(block: str) -> Iterator[list[str]]:
    """Yield the paragraphs of each `<doc …>` element of WikiExtractor's output, without titles."""
    inside, title, lines = False, "", list[str]()
    for raw in [*block.split("\n"), "</doc>"]:
        line = raw.strip()
        starts = line.startswith("<doc ") and line.endswith(">")
        if starts or line == "</doc>":
            if inside and (document := _without_title(lines, title)):
                yield document
            # WikiExtractor does not escape quotes in a title, which is the last attribute.
            inside, title, lines = starts, line.partition(' title="')[2].removesuffix('">'), []
        else:
            lines.append(line)


def wikitext_paragraphs(text: str) -> list[str]:
    """The paragraphs of prose in a page's wikitext."""
    text = _without_elements(_NOWIKI.sub(_plain_or_nothing, text.replace("\r\n", "\n")))
    text = _UNCLOSED.sub("", _with_link_texts(_without_braces(text)))
    text = _EXTERNAL.sub(r"\1", text.replace("[[", "").replace("]]", ""))
    text = _MAGIC_WORD.sub("", _QUOTES.sub(_apostrophes, text).replace(GONE, ""))
    text = "\n".join(_prose_lines(text))
    return _tidy(_INLINE_TAG.sub("", _BLOCK_TAG.sub("\n", text)))


# From the dump to wikitext. A dump escapes `<` in text as an entity, so searching for tags as bytes is exact.


def _pages(block: bytes) -> Iterator[bytes]:
    start = block.find(b"<page>")
    while start >= 0 and (end := block.find(b"</page>", start)) >= 0:
        yield block[start:end]
        start = block.find(b"<page>", end)


def _article(page: bytes) -> str | None:
    """The wikitext of a page's newest revision; None if the page is not an article."""
    head = page[: max(page.find(b"<revision"), 0)]
    if not _ARTICLE.search(head) or b"<redirect" in head:
        return None
    revision = page[page.rfind(b"<revision") :]
    opening, model = _TEXT.search(revision), _MODEL.search(revision)
    if opening is None or opening[0].endswith(b"/>") or (model and model[1] != b"wikitext"):
        return None
    end = revision.find(b"</text>", opening.end())
    raw = revision[opening.end() : end if end >= 0 else None].decode("utf-8", errors="replace")
    text = _XML_ENTITY.sub(_character, raw)
    return None if _REDIRECT.match(text) else text


# From wikitext to prose.


class _Nesting:
    """Text that is built piece by piece, from which everything since an opening mark can be taken out again."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.kinds: list[str] = []  # of the open marks, the outermost first
        self.starts: list[int] = []  # the indices of the open marks in `pieces`

    def open(self, kind: str, mark: str) -> None:
        """Write an opening mark; beyond MAX_DEPTH open marks, the outermost one counts as never closed."""
        if len(self.kinds) == MAX_DEPTH:
            del self.kinds[0], self.starts[0]
        self.kinds.append(kind)
        self.starts.append(len(self.pieces))
        self.pieces.append(mark)

    def close(self, kind: str) -> list[str] | None:
        """Take out the pieces from the nearest opening mark of the kind on; None if none is open."""
        if kind not in self.kinds:
            return None
        while self.kinds.pop() != kind:
            self.starts.pop()
        start = self.starts.pop()
        taken = self.pieces[start:]
        del self.pieces[start:]
        return taken


def _plain_or_nothing(found: re.Match[str]) -> str:
    """Remove a comment; replace `<nowiki>` by its content with markup as entities, which are decoded at the end."""
    if found[2] is not None:  # never closed: the rest is wikitext
        return _COMMENT.sub("", found[0])
    return _MARKUP.sub(_as_entity, found[1] or "")


def _as_entity(found: re.Match[str]) -> str:
    return f"&#{ord(found[0])};"


def _without_elements(text: str) -> str:
    """Remove the elements whose content is not prose."""
    nesting, at = _Nesting(), 0
    for found in _ELEMENT.finditer(text):
        nesting.pieces.append(text[at : found.start()])
        at = found.end()
        name, is_whole = found[2].lower(), found[3].rstrip().endswith("/")
        if not found[1] and not is_whole:
            nesting.open(name, found[0])
            continue
        if found[1]:
            nesting.close(name)
        nesting.pieces.append(GONE)
    return "".join(nesting.pieces) + text[at:]


def _without_braces(text: str) -> str:
    """Remove templates and tables at any depth, and closing braces without an opening one."""
    nesting, at = _Nesting(), 0
    for found in _BRACES.finditer(text):
        nesting.pieces.append(text[at : found.start()])
        at, mark = found.end(), found[0]
        if mark.startswith("{{"):
            for _ in range(min(len(mark) // 2, MAX_DEPTH)):
                nesting.open("{{", "{{")
        elif mark.endswith("{|"):
            nesting.open("{|", mark)
        elif mark.endswith("|}"):
            if nesting.close("{|") is None:
                nesting.pieces.append(mark)
        else:
            for _ in range(min(len(mark) // 2, MAX_DEPTH)):
                nesting.close("{{")
            nesting.pieces.append(GONE)
    return "".join(nesting.pieces) + text[at:]


def _with_link_texts(text: str) -> str:
    """Replace links by their text, the innermost first; remove closing brackets without an opening one."""
    nesting, at = _Nesting(), 0
    for found in _BRACKETS.finditer(text):
        nesting.pieces.append(text[at : found.start()])
        at = found.end()
        if (count := len(found[0].rstrip("]"))) > 0:
            nesting.pieces.append("[" * (count % 2))
            for _ in range(min(count // 2, MAX_DEPTH)):
                nesting.open("[[", "[[")
        elif taken := nesting.close("[["):
            nesting.pieces.append(_link_text("".join(taken[1:])))
    return "".join(nesting.pieces) + text[at:]


def _link_text(inner: str) -> str:
    """The visible text of a link; empty for files, categories and links to other languages."""
    target, bar, label = inner.partition("|")
    prefix, colon, rest = target.partition(":")
    if colon and (prefix.strip() in LANGUAGES or prefix.strip().lower() in HIDDEN_NAMESPACES):
        return "[[" + inner if "\n\n" in inner else ""  # a link does not span paragraphs: it was never closed
    if "\n" in target:
        return inner
    if label.strip():
        return label
    shown = rest if colon and not prefix.strip() else target
    return shown.partition(" (")[0] if bar else shown


def _apostrophes(found: re.Match[str]) -> str:
    """The apostrophes of a run that are text: two of them mark italics, three bold, five both."""
    count = len(found[0])
    return "'" if count == 4 else "'" * max(count - 5, 0)


def _prose_lines(text: str) -> Iterator[str]:
    """Yield the lines that are not headings, list items, rows of unclosed tables or in sections of sources."""
    hidden = 0  # the level of the current hidden section; 0 in a visible one
    for raw in text.split("\n"):
        line = raw.strip()
        if level := _heading_level(line):
            if not hidden or level <= hidden:
                hidden = level if _section_name(line) in HIDDEN_SECTIONS else 0
        elif line and not hidden and not _is_item(line):
            yield line


def _heading_level(line: str) -> int:
    if len(line) < 3 or line[0] != "=" or line[-1] != "=":
        return 0
    return min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), 6)


def _section_name(heading: str) -> str:
    return "".join(_INLINE_TAG.sub("", heading).strip("= ").split()).casefold()


def _is_item(line: str) -> bool:
    if line[0] == "!":
        return line.startswith("! ") or "!!" in line or "|" in line
    return line[0] in "*#:;|" or line.startswith(("----", "{|"))


# From prose with remains of markup to paragraphs.


def _tidy(text: str) -> list[str]:
    """Decode HTML entities, clean up spaces and brackets that removed templates left, and split into paragraphs."""
    text = _SPACES.sub(" ", _INVISIBLE.sub("", _ENTITY.sub(_character, text)))
    for _ in range(2):  # twice, for nested brackets
        text = _EMPTY_PAIR.sub("", _EMPTY_LABEL.sub("", text))
        text = _TRAILING.sub("", _LEADING.sub(r"\1", text))
    text = _SPACED.sub(r"\1", _DOUBLED.sub(r"\1", text))
    return [line.strip() for line in text.split("\n") if _WORD.search(line)]


def _character(entity: re.Match[str]) -> str:
    """Decode an entity; `html.unescape` alone would also decode the `&not` in `&nothing;`, as browsers do."""
    return html.unescape(entity[0]) if entity[0][1] == "#" else html5.get(entity[0][1:], entity[0])


def _without_title(lines: list[str], title: str) -> list[str]:
    paragraphs = _tidy("\n".join(lines))
    first = "".join(_tidy(title))
    return paragraphs[1:] if paragraphs and paragraphs[0] == first else paragraphs

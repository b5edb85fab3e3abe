"""Split paragraphs into sentences and join hard-wrapped lines; made for English and Korean, safe for other languages.

One regular expression finds the places where a sentence may end; cheap rules, the commonest case first, decide whether
it does. Sentences within a quotation are split, unless the quotation is a part of the sentence around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Set
from itertools import pairwise
from typing import NamedTuple

from bertsmith.text.unmarked import ENDED_VERB, UNMARKED, may_end_unmarked, unmarked_end

# Abbreviations after which the sentence continues, whatever follows.
_NEVER = """mr mrs ms dr drs prof profs rev capt lt sgt cmdr cdre messrs mme mlle supt ste vs cf eg ie e.g i.e p.s n.b
    viz ca c v rel approx feat incl resp Gen Gens Col Maj Gov Sen Sens Rep Reps Pres Hon Fr Cpl Pvt Adm Insp Det Atty"""
# Abbreviations after which the sentence continues if a number follows.
_NUMBER = """no nos nr vol vols p pp pgs pl fol fig figs eq eqs sec sect ch chap art arts tab tel ver op lib max min est
    b d r fl jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thur thurs fri sat sun"""
# Abbreviations (and initials) after which the sentence continues unless one of `_STARTERS` follows.
_MAYBE = """al jr sr inc ltd co corp bros dept univ assn ave blvd rd mt ft st esq ed eds ibid cit ph.d Mo Cal Calif Fla
    Ill Ind Mass Mich Minn Ont Pa Penn Tenn Tex Va Wash Wis"""
_STARTERS = """a about according after again all although am among an and another any are as at because before both
    but by can could despite did do does during each every few finally first for from had has have he hence her here
    his how however i i'm i've if in instead is it it's its last later many meanwhile more most my neither
    nevertheless no nobody none nor not nothing now of on once one only or other others our perhaps several she should
    since so some sometimes soon still such that that's the their then there there's therefore these they this those
    though through throughout thus to today together two unfortunately unlike until upon was we were what when where
    whether which while who whose why with within without would yes yet you your"""
_SPEECH_VERBS = """said asked cried replied answered exclaimed shouted whispered inquired enquired demanded murmured
    muttered repeated screamed called yelled added continued thought wondered snapped sighed laughed gasped says
    asks""".split()
_KOREAN_SPEECH_VERBS = (
    "말했|말하|물었|묻|외쳤|외치|대답|답했|소리쳤|소리치|되물|중얼|속삭|덧붙|말씀|생각했|적었|썼다|전했|밝혔|설명했"
)
_KOREAN_STARTERS = ("그러나", "그런데", "그리고", "그래서", "그래도", "그렇지만", "하지만", "따라서", "또한", "결국")
_KOREAN_ENDINGS = frozenset("다요죠까")


def _cased(words: str) -> Iterator[str]:
    for word in words.split():
        yield from (word,) if len(word) == 1 else (word, word.capitalize() if word.islower() else word, word.upper())


_ABBREVIATIONS = dict.fromkeys(_cased(_MAYBE), "maybe")
_ABBREVIATIONS |= dict.fromkeys(_cased(_NUMBER), "number")
_ABBREVIATIONS |= dict.fromkeys(_cased(_NEVER), "never")
_STARTER = frozenset(_cased(_STARTERS)) | {"A", "I"}

_MARKS = ".!?…。！？｡।؟۔"
_MOOD = "~^ㅋㅎㅠㅜㅡ♥♡"  # used instead of a full stop after a Korean sentence ending
_OPENING = "\"'“‘«‹(\\[「『《〈（【¿¡"
_CLOSING = "\"'”’»›)\\]」』》〉）】"
# A whole run of end marks; one that begins with a mood counts only after a Korean ending.
_RUN = rf"[{_MARKS}{_MOOD}](?<![{_MARKS}{_MOOD}].)(?:(?<=[{_MARKS}])|(?<=[다요죠까].))[{_MARKS}{_MOOD}]*+"
_RUN_ASCII = r"[.!?](?<![.!?~^][.!?])[.!?~^]*+"
# Closing quotation marks, brackets and footnote marks.
_CLOSED = rf"((?:[{_CLOSING}]|\[\w{{1,4}}\])*+)"
# The beginning of a sentence: an optional list dash, optional quotation marks and brackets, its first character.
_BEGINS = rf"(?=[-–—•·*]?\s*+[{_OPENING}]*+\s?(%s[^\s,;:=+/~|%%*}}–—{_MARKS}{_OPENING}{_CLOSING}-]))"
# A lower-case letter begins a sentence only after Korean text, in words such as iPhone, and in a list: b) second.
_NOT_SMALL = r"(?:(?![a-z])|(?=[a-z][A-Z)])|(?<=[가-힣][.!?]\s))"
# Without white space a sentence may end only before East Asian text, before a word such as The, and after Korean also
# before a digit, a capital and the number of a list: 별로다.1점, 좋다.CG는, 연다.②
_GLUED = r"(?=([가-힣ぁ-ヿ㐀-鿿「『“（]|[A-Z][a-z]*\s|[\dA-Z](?<=[가-힣][.!?…][\dA-Z])|[①-⑳](?<=[가-힣][.!?…][①-⑳])))"
_REPORTING = "이라하했싶"  # the first syllables of what reports a question or a call before it: 이게 뭐지? 하면서 봤다.
_REPORTS = re.compile(
    r"이?라[고는며던](?![가-힣]{2})|하(?:[며는다](?=\s)|고(?=\s(?!싶))|는데|다가|면서|더니|길래)|했[는더다지던]|싶"
)
# A long word, a full stop, white space and a capital need no check; nor do a full stop after two syllables of Hangul
# and a mark that is no full stop, before a space and Hangul (not 하면서 and the like), a capital or a digit.
_KNOWN = r"(?<=[a-z]{6}\.)(\s)(?=[A-Z])"
_KNOWN_KOREAN = rf"(\s)(?=[가-힣A-Z0-9])(?:(?<=[가-힣][가-힣]\.\s)|(?<=[!?{_MOOD}]\s)(?![{_REPORTING}]))"
_LAST_KNOWN = 4  # the number of the last of these groups
_FIRST, _FOLLOWING = 6, 7  # the groups of what follows with and without white space
_END = re.compile(rf"({_RUN}){_CLOSED}(?:{_KNOWN}|{_KNOWN_KOREAN}|(\s++){_BEGINS % _NOT_SMALL}|{_GLUED})")
_END_LOWER_CASE = re.compile(rf"({_RUN}){_CLOSED}(?:(?!)()()|(\s++){_BEGINS % ''}|{_GLUED})")  # without a capital
_END_ASCII = re.compile(  # finds the same as `_END` in ASCII text, faster
    rf"({_RUN_ASCII}){_CLOSED}(?:{_KNOWN}|(?!)()|(\s++){_BEGINS % _NOT_SMALL}|(?=([A-Z][a-z]*\s)))"
)
# A mood that stands alone after the mark belongs to the sentence before it: 재밌어요. ㅋㅋ 또 볼게요.
_LATE_MOOD = re.compile(r"(?:[ㅋㅎㅠㅜ♥♡]++|\^\^++|ㅡㅡ++)(?: ?[ㅋㅎㅠㅜㅡ^;~.!?♥♡]++){0,3}+(?=\s|$)")
_BLANK_LINE = re.compile(r"\n\s*\n|\f")

_SEPARATOR = re.compile(r"[\s—–(\[\"“«/·~:,;]|--|(?<!\w)['‘’]")
_DOTTED = re.compile(r"(?:[A-Za-zÀ-ɏ]{1,2}\.)+[A-Za-zÀ-ɏ]{1,2}")
_LIST_NUMBER = re.compile(
    r"\(?(?:\d{1,3}(?:\.\d{1,2})*|[A-Za-z]|[IVXLC]+|[ivx]+|[Ⅰ-ⅿ]|[ㄱ-ㅎ가나다라마바사아자차카타파하])"
)
_CAPTION = re.compile(  # what begins the text below a figure: 그림 4. 실험 장치
    r"[\s<〈\[(]*(?:그림|표|사진|도표|도판|지도|부록|보기|예제?|문제|정리|정의|보조정리)\s?(?:[A-Z][.-]?)?\d{1,3}(?:[.-]\d{1,2})*"
)
_LONGEST_CAPTION = 20  # characters before its number
_NUMERAL = re.compile(r"\(?(?:\d|[IVXLC]{2,}\b|[IVX]+\.)")
_DATE_CONTINUES = re.compile(r"\d{1,2}\s?\.")
_DATE_BEFORE = re.compile(r".*\b\d{4}\s?\.\s?\d{1,2}\s?\.\s?\d{1,2}", re.DOTALL)
_SPEAKER = re.compile(rf"(?:[A-Z][\w'’-]*\.?\s){{1,3}}(?:{'|'.join(_SPEECH_VERBS)})\b(?!:|\s(?:that|if|of|about)\b)")
_KOREAN_SPEAKER = re.compile(
    rf"이?라[고는며면]|고\s|하[고며는였]|하면서|했다|[^.!?…\"“”]{{1,24}}?\s(?:{_KOREAN_SPEECH_VERBS})|[“\"][^“”\"]*[”\"]\s?(?:하|라)"
)
_PARTICLE = re.compile(r"[가-힣ᄀ-ᅵとっのなを]|\s(?:하[고며]|이?라[고며는])\s")
_GLUED_PARTICLE = re.compile(r"이?라[고는며면던]|[고며는]\s|면서|이?란\s|하[고며는]\s|이[다며]")
_ASCII_PAIRS = (("(", ")"), ("[", "]"))
_PAIRS = (*_ASCII_PAIRS, ('"', '"'), *(tuple(pair) for pair in "“” ‘’ 「」 『』 《》 〈〉 （）".split()))
_OPENED = re.compile(f"[{''.join(re.escape(opening) for opening, _ in _PAIRS)}]")
_QUOTES, _TITLES = "”’」』", "》〉"
_SHORT = 150  # characters of a text that one pattern searches sooner than `in` does for each opening mark
_LONGEST_WORD = 40
_LONGEST_ASIDE = 300  # characters of brackets or a quotation; longer ones are split into sentences


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, in order, without the white space between them."""
    if "\n" in paragraph or "\f" in paragraph:
        return [s for block in _BLANK_LINE.split(paragraph) for s in _split(block)]
    return _split(paragraph)


def _split(text: str) -> list[str]:
    sentences, start, pairs = [], 0, None
    is_ascii = text.isascii()
    for match in (_END_LOWER_CASE if text.islower() else _END_ASCII if is_ascii else _END).finditer(text):
        if (match.lastindex or 0) <= _LAST_KNOWN or _ends_sentence(text, start, match):
            if pairs is None:
                pairs = _pairs_in(text)
            stop = match.end(2)
            if stop > start and not (pairs and _inside(text, start, stop, pairs)):
                begin = match.end()
                if not is_ascii and text[begin] in _MOOD and (mood := _LATE_MOOD.match(text, begin)):
                    stop = begin = mood.end()  # the marks in it end no sentence of their own
                sentences.append(text[start:stop].strip())
                start = begin
    if rest := text[start:].strip():
        sentences.append(rest)
    if is_ascii or not may_end_unmarked(text):
        return sentences
    pairs = _pairs_in(text) if pairs is None else pairs
    return [part for sentence in sentences for part in _split_unmarked(sentence, pairs)]


def _pairs_in(text: str) -> list[tuple[str, ...]]:
    """The pairs of brackets and quotation marks that a text opens."""
    if len(text) < _SHORT and not _OPENED.search(text):
        return []
    return [pair for pair in (_ASCII_PAIRS if text.isascii() else _PAIRS) if pair[0] in text]


def _ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    if match.lastindex == _FOLLOWING:
        return _ends_unspaced(text, match)
    marks, closing, first = match.group(1, 2, _FIRST)
    if first in _REPORTING and marks[-1] != "." and _REPORTS.match(text, match.end()):
        return False
    if marks[0] in _MOOD:
        return not closing
    if closing:
        return text[match.start() - 1 : match.start()] not in ("[", "(") and not _speaker_follows(text, match, first)
    if first > "\x7f" and first.islower() and match.re is not _END_LOWER_CASE:
        return False
    if marks == ".":
        return _full_stop_ends(text, start, match)
    return marks.strip(".…") != "" or _ellipsis_ends(text, match, first)


def _full_stop_ends(text: str, start: int, match: re.Match[str]) -> bool:
    """Whether a full stop ends the sentence, by the word before it."""
    stop, after = match.start(), match.end()
    low = max(start, stop - _LONGEST_WORD)
    begin = max(text.rfind(" ", low, stop) + 1, low)
    word = text[begin:stop]
    if not word.isalpha():
        if not word:
            return True
        if word[-1].isdigit():
            return not _number_continues(text, start, begin, match)
        word = _SEPARATOR.split(word)[-1]
    kind = _ABBREVIATIONS.get(word)
    if kind == "never":
        return False
    if kind == "number":
        return _NUMERAL.match(text, after) is None
    if kind is None:
        if len(word) > 4 and "." not in word:
            return True
        if begin == start and _LIST_NUMBER.fullmatch(word):
            return False
        if not (_is_initial(word, match) or _DOTTED.fullmatch(word)):
            return True
    if match.re is _END_LOWER_CASE:
        return False
    end = text.find(" ", after)
    return text[after : end if end >= 0 else None].strip("\"'“”‘’(),").replace("’", "'") in _STARTER


def _is_initial(word: str, match: re.Match[str]) -> bool:
    return len(word) == 1 and ("A" <= word <= "Z" or match.re is _END_LOWER_CASE)


def _number_continues(text: str, start: int, begin: int, match: re.Match[str]) -> bool:
    """Whether a full stop after a number belongs to the number: a list item, or a Korean date (2024. 1. 31.)."""
    stop, after = match.start(), match.end()
    if begin == start and _LIST_NUMBER.fullmatch(text, begin, stop):
        return True
    if (
        text[begin - 2 : begin - 1] in "다요죠음함임"
        and begin - 2 > start
        and _LIST_NUMBER.fullmatch(text, begin, stop)
    ):
        return True  # the next item of a list after a sentence without a mark
    if begin - start < _LONGEST_CAPTION and _CAPTION.fullmatch(text, start, stop):
        return True
    if stop - begin <= 4 and _DATE_CONTINUES.match(text, after):
        return True
    return text[after] > "\x7f" and _DATE_BEFORE.fullmatch(text, max(start, stop - 14), stop) is not None


def _speaker_follows(text: str, match: re.Match[str], first: str) -> bool:
    """Whether the speaker is named after a quotation that has its own end mark: “Who?” Tom asked."""
    if not match[2].strip(")]）》〉】") or match[2][-1] == "]":
        return False
    if first.islower():
        return True
    if text[match.end()].isascii():
        return match[1] != "." and _SPEAKER.match(text, match.end()) is not None
    return _KOREAN_SPEAKER.match(text, match.end()) is not None


def _ellipsis_ends(text: str, match: re.Match[str], first: str) -> bool:
    if first < "가":
        return match.re is not _END_LOWER_CASE
    ended = text[match.start() - 1 : match.start()] in _KOREAN_ENDINGS or match[1].endswith("….")
    return ended or text.startswith(_KOREAN_STARTERS, match.end())


def _ends_unspaced(text: str, match: re.Match[str]) -> bool:
    """Whether a sentence ends where the next one follows without white space."""
    marks, closing, following = match.group(1, 2, _FOLLOWING)
    if marks[0] in _MOOD:
        return not closing and "~" not in marks and _GLUED_PARTICLE.match(text, match.end()) is None
    if marks[-1] in "。！？｡":
        return not (closing and following in "とっのなを")
    if closing:
        return False
    stop = match.start()
    before = text[stop - 1 : stop]
    if before not in _KOREAN_ENDINGS:
        if following.isascii():
            return marks == "." and before.islower() and following.strip() in _STARTER
        is_question = marks[0] == "?" and before in "냐니지"
        if not is_question and not (before == "음" and text[stop - 2 : stop - 1] in ENDED_VERB):  # 했음, 없음
            return False
    return _GLUED_PARTICLE.match(text, match.end()) is None


def _inside(text: str, start: int, stop: int, pairs: list[tuple[str, ...]], marked: bool = True) -> bool:
    """Whether a place is inside brackets, or in a quotation that is part of the sentence around it.

    Brackets that the sentence begins with have sentences of their own if these have marks: (It rained. It was cold.)
    """
    for opening, closing in pairs:
        opened = text.rfind(opening, start, stop)
        if opened < 0:
            continue
        if opening == closing:
            if text.count(opening, start, stop) % 2 and _is_part(text, text.find(closing, stop, stop + _LONGEST_ASIDE)):
                return True
        elif text.rfind(closing, opened, stop) < 0:
            close = text.find(closing, stop, opened + _LONGEST_ASIDE)
            whole = marked and opened == start and closing not in _TITLES
            if close >= 0 and (_is_part(text, close) if closing in _QUOTES else not whole):
                return True
    return False


def _is_part(text: str, close: int) -> bool:
    return close > 0 and not text[close - 1].isspace() and _PARTICLE.match(text, close + 1) is not None


# Korean without marks


def _split_unmarked(sentence: str, pairs: list[tuple[str, ...]]) -> list[str]:
    """Split what informal writers put no mark between: 재미있어요 또 볼게요."""
    parts, start = [], 0
    for match in UNMARKED.finditer(sentence):
        stop = unmarked_end(sentence, match)
        if stop > start and not (pairs and _inside(sentence, start, stop, pairs, marked=False)):
            parts.append(sentence[start:stop].strip())
            start = stop
    return [*parts, sentence[start:].strip()] if parts else [sentence]


# Hard-wrapped lines

_NARROWEST, _WIDEST = 32, 100  # page widths that wrapped text may have
_WIDE = re.compile(r"[ᄀ-ᅟ⺀-꓏가-힣豈-﫿︰-﹏＀-｠]")
_ENDED = re.compile(r"[.!?…。！？:][\"'”’»)\]」』]*$")
_ITEM = re.compile(r"\s*(?:[-*•·▪◦○●■※]\s|\(?(?:\d{1,3}|[A-Za-z]|[ivx]{2,4}|[가-하])[.)]\s|[①-⑳])")
_CODE = re.compile(r"[{}\\]$|\(\);?$|^\s*(?:>>>|\$ |#|//|/\*|\||<[/\w]|```|[\w.]+\s*[:+-]?=\s|(?:def|class) \w+.*:$)")
_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_LAST_WORD = re.compile(r"((?:\w+-)*\w+)[-‐]$")
_COMPOUNDS = frozenset(
    "well self half all cross high low long short mid old new first second so ex one two three".split()
)


def unwrap(lines: list[str]) -> list[str]:
    """Join the lines of hard-wrapped paragraphs; a document that is not wrapped is not changed."""
    page = _page(lines)
    if page is None:
        return list(lines)
    hyphenated = any(line.rstrip().endswith(("-", "‐")) for line in lines)
    words = frozenset(_WORD.findall(" ".join(lines).lower())) if hyphenated else frozenset()
    joined: list[list[str]] = [[lines[0]]]
    for line, following in pairwise(lines):
        if _continues(line, following, page):
            joined[-1][-1] = _before_join(joined[-1][-1].rstrip(), following.lstrip(), words)
            joined[-1].append(following.lstrip())
        else:
            joined.append([following])
    return ["".join(parts) for parts in joined]


class _Page(NamedTuple):
    """The width at which a document was wrapped, in characters, or in columns (two for an East Asian character)."""

    measure: Callable[[str], int]
    width: int

    def is_full(self, line: str, following: str) -> bool:
        """Whether the first word of the next line did not fit on this one, so that the line was wrapped here."""
        return self.measure(line) + 1 + self.measure(following.split(maxsplit=1)[0]) > self.width


def _page(lines: list[str]) -> _Page | None:
    """The page that a document was wrapped for, judged by all pairs of neighbouring lines; None if it was not."""
    pairs = [(a.rstrip(), b) for a, b in pairwise(lines) if a.strip() and b.strip()]
    if len(pairs) < 3:
        return None
    unended = sum(_ENDED.search(a) is None and not _CODE.search(a) for a, _ in pairs)
    capitals = sum(b.lstrip()[0].isupper() for _, b in pairs)
    if 2 * unended < len(pairs) or 2 * capitals > len(pairs):
        return None
    pages: list[tuple[int, _Page]] = []
    for measure in (len, _columns):
        page = _Page(measure, sorted(measure(a) for a, _ in pairs)[int(len(pairs) * 0.95)])
        if _NARROWEST <= page.width <= _WIDEST:
            pages.append((sum(page.is_full(a, b) and not _ITEM.match(b) for a, b in pairs), page))
    if not pages:
        return None
    full, best = max(pages, key=lambda pair: pair[0])
    return best if full >= 0.6 * len(pairs) else None


def _columns(line: str) -> int:
    return len(line) if line.isascii() else len(line) + len(_WIDE.findall(line))


def _continues(line: str, following: str, page: _Page) -> bool:
    line = line.rstrip()
    if not line or not following.strip() or _ITEM.match(following) or _CODE.search(line) or _CODE.search(following):
        return False
    if _indent(following) > _indent(line) and not _ITEM.match(line):
        return False
    if page.is_full(line, following) or _LAST_WORD.search(line):
        return True
    return following.lstrip()[0].islower() and _ENDED.search(line) is None


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _before_join(line: str, following: str, words: Set[str]) -> str:
    """A line prepared for the next one to be appended: with a space, or without the hyphen of a divided word."""
    if line.endswith("\u00ad"):
        return line[:-1]
    if line.endswith(("—", "--")):
        return line
    left = _LAST_WORD.search(line)
    if left is None:
        return f"{line} "
    right = _WORD.match(following)
    if right is None or not following[0].islower():  # 1914-18, Anglo-Saxon
        return line
    whole, compound = f"{left[1]}{right[0]}".lower(), f"{left[1]}-{right[0]}".lower()
    keeps = compound in words or left[1].lower() in _COMPOUNDS or not left[1].isalpha()
    return line if keeps and whole not in words else line[:-1]

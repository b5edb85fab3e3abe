"""Sentences are split as in annotated English and Korean; no text is lost; wrapped lines become paragraphs."""

import random
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bertsmith.text.sentences import split_sentences, unwrap

CASES = Path(__file__).parent / "sentences"


def read_cases(language):
    """Annotated paragraphs, written for this project: `‖`, or ` ‖ ` for a space, marks the end of a sentence."""
    lines = (CASES / f"{language}.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def plain(marked):
    return marked.replace(" ‖ ", " ").replace("‖", "")


def squeezed(text):
    return "".join(text.split())


def boundaries(sentences):
    """The ends of sentences, counted in characters without white space; the end of the paragraph does not count."""
    ends, position = set(), 0
    for sentence in sentences[:-1]:
        position += len(squeezed(sentence))
        ends.add(position)
    return ends


def score(language):
    """Precision, recall and F1 of the sentence boundaries in a file of cases."""
    found = right = true = 0
    for marked in read_cases(language):
        got, expected = boundaries(split_sentences(plain(marked))), boundaries(marked.split("‖"))
        found, right, true = found + len(got), right + len(got & expected), true + len(expected)
    return right / found, right / true, 2 * right / (found + true)


@pytest.mark.parametrize("language", ["english", "korean"])
def test_f1_of_sentence_boundaries(language):
    assert len(read_cases(language)) >= 190
    precision, recall, f1 = score(language)
    assert f1 >= 0.95, f"precision {precision:.3f}, recall {recall:.3f}, F1 {f1:.3f}"


def test_there_are_400_cases():
    assert len(read_cases("korean")) >= 400


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("별로다.100점 만점에 1점", ["별로다.", "100점 만점에 1점"]),
        ("높이는 12.5m이다.3층이다.", ["높이는 12.5m이다.", "3층이다."]),
        ("좋아요 또 올게요 ㅋㅋ 안녕", ["좋아요", "또 올게요 ㅋㅋ", "안녕"]),
        ("그림 4. 장치의 구조. 왼쪽이 앞이다.", ["그림 4. 장치의 구조.", "왼쪽이 앞이다."]),
        ("연다 ② 닫는다 ③ 끈다", ["연다", "② 닫는다", "③ 끈다"]),
        ("값은 ① 10 ② 20이다", ["값은 ① 10 ② 20이다"]),
        ("(표는 무료입니다 단 예약이 필요합니다) 문은 연다.", ["(표는 무료입니다 단 예약이 필요합니다) 문은 연다."]),
        ("(표는 무료다. 예약은 받는다.) 문은 연다.", ["(표는 무료다.", "예약은 받는다.)", "문은 연다."]),
        ("재밌다ㅋㅋ 또 봐 영화ㅋㅋ 끝", ["재밌다ㅋㅋ", "또 봐 영화ㅋㅋ 끝"]),
        ("www.다.com과 3.14와 1,000.5", ["www.다.com과 3.14와 1,000.5"]),
        ("재밌어요. ㅋㅋ 또 볼게요.", ["재밌어요. ㅋㅋ", "또 볼게요."]),
        ("끝났다! ㅠㅠ 아쉽다.", ["끝났다! ㅠㅠ", "아쉽다."]),
        ("이게 뭐지? 하면서 봤다.", ["이게 뭐지? 하면서 봤다."]),
        ("살려 줘! 라고 외쳤다.", ["살려 줘! 라고 외쳤다."]),
        ("이게 뭐지? 하지만 재미있다.", ["이게 뭐지?", "하지만 재미있다."]),
        ("전화가 와요 받지 마세요", ["전화가 와요", "받지 마세요"]),
        ("전화를 해요 받지 마세요", ["전화를 해요", "받지 마세요"]),
        ("껐다 켜도 똑같아요", ["껐다 켜도 똑같아요"]),
        ("이건 꼭 봐야 합니다 소리가 다릅니다", ["이건 꼭 봐야 합니다", "소리가 다릅니다"]),
        ("재미있다 소리를 들었다.", ["재미있다 소리를 들었다."]),
    ],
)
def test_informal_korean(text, expected):
    assert split_sentences(text) == expected


@pytest.mark.parametrize("language", ["english", "korean"])
def test_single_sentences_are_not_split(language):
    sentences = [s for marked in read_cases(language) for s in split_sentences(plain(marked))]
    assert [s for s in sentences if split_sentences(s) != [s]] == []


@pytest.mark.parametrize("seed", range(20))
def test_no_text_is_lost(seed):
    rng = random.Random(seed)
    pieces = [
        *"ab Z.!?…。「」“”\"'()[]\n\t\u3000다요~ㅋ다-1é",
        "다. ",
        "Dr. ",
        ". The ",
        "라고 ",
        "3.",
        "\n\n",
        "e.g. ",
        '." ',
        *["다 ", "요 ", "습니다 ", ";; ", "ㅠㅠ ", "① ", "했음.", "2) ", "그림 4. ", "♥"],
    ]
    for _ in range(200):
        paragraph = "".join(rng.choices(pieces, k=rng.randint(0, 40)))
        sentences = split_sentences(paragraph)
        assert squeezed("".join(sentences)) == squeezed(paragraph)
        assert all(s and s == s.strip() for s in sentences)


@pytest.mark.parametrize(
    "text",
    [
        ". ",
        "A. ",
        "(A. ",
        '다. "',
        "다.”라 ",
        "… 가",
        "'. A",
        "“A! ",
        "1. 2. ",
        "。",
        "요~ ",
        "[.",
        "\n",
        "했다 ",
        "요;; ",
        "다 ① ",
        "(했다 ",
        ";;",
        "다. ㅋ. ",
        "다. ㅋ.ㅋ가",
    ],
)
def test_time_is_linear(text):
    # Quadratic time would exceed the time limit of a test.
    assert squeezed("".join(split_sentences(text * 20_000))) == squeezed(text * 20_000)


def test_a_long_laugh_takes_no_time():
    text = f"정말 웃기다. {'ㅋ' * 20_000}진짜"
    assert split_sentences(text) == ["정말 웃기다.", f"{'ㅋ' * 20_000}진짜"]


def test_a_blank_line_ends_a_sentence_and_a_line_break_does_not():
    assert split_sentences("A heading\n\nThe first line\ngoes on. The next.") == [
        "A heading",
        "The first line\ngoes on.",
        "The next.",
    ]


def test_text_without_capitals_is_split():
    text = 'he came at 5 p.m. and left. who knows why? we don\'t. mr. smith e.g. said no. "why?" she asked.'
    assert split_sentences(text) == [
        "he came at 5 p.m. and left.",
        "who knows why?",
        "we don't.",
        "mr. smith e.g. said no.",
        '"why?" she asked.',
    ]


def test_other_languages_keep_their_case_rule():
    assert split_sentences("Он ушёл. Она осталась. Это было в 5 ч. вечера.") == [
        "Он ушёл.",
        "Она осталась.",
        "Это было в 5 ч. вечера.",
    ]
    assert split_sentences("Où est-il ? Il est parti. « Non ! » dit-elle.")[:2] == ["Où est-il ?", "Il est parti."]


def test_long_quotations_are_split():
    quotation = " ".join(["나는 오늘도 그 길을 걸었다."] * 40)
    assert len(split_sentences(f"그는 “{quotation}”라고 말했다.")) > 10


def test_sentences_does_not_import_torch_numpy_or_tokenizers():
    heavy = ("torch", "numpy", "tokenizers")
    code = f"import sys, bertsmith.text.sentences; sys.exit(any(m in sys.modules for m in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


ENGLISH = [
    "The ferry left the island before dawn, and by the time the lighthouse was out of sight most of the passengers "
    "had gone below to sleep. Only the schoolteacher stayed on deck. She had never crossed the strait in winter, and "
    "she wanted to see the ice for herself, however thin and grey it might turn out to be.",
    "When the coast came into view she was the first to notice that something was wrong. There was no smoke over the "
    "town. The harbour lamps, which ought to have burned until eight, were dark, and no boat had been sent for them.",
    "Nobody spoke for a while.",
    "Then the captain ordered the engines stopped and the long silence of the sea closed round the ship like a hand, "
    "so that each of them could hear the others breathe.",
]
KOREAN = [
    "배는 날이 밝기 전에 섬을 떠났고, 등대가 보이지 않게 되었을 때 손님들은 거의 모두 선실로 내려가 잠들어 있었다. "
    "갑판에는 여교사 한 사람만 남아 있었다. 겨울에 이 해협을 건너는 것은 처음이어서 얼음을 제 눈으로 보고 싶었다.",
    "마침내 해안이 눈에 들어왔을 때 무언가 잘못되었다는 것을 가장 먼저 알아차린 사람도 그였다. 마을 위로는 연기가 "
    "오르지 않았고, 여덟 시까지 켜져 있어야 할 항구의 등불은 모두 꺼져 있었으며, 마중 나온 배도 없었다.",
]


def wrapped(paragraphs, width, between=("",)):
    lines = []
    for paragraph in paragraphs:
        lines += [*textwrap.wrap(paragraph, width), *between]
    return lines


@pytest.mark.parametrize("width", [60, 72, 80, 90])
@pytest.mark.parametrize("between", [(), ("",), ("", "")])
def test_unwrap_joins_the_lines_of_a_paragraph(width, between):
    lines = unwrap(wrapped(ENGLISH, width, between))
    assert [line for line in lines if line] == ENGLISH
    assert unwrap(lines) == lines


@pytest.mark.parametrize("width", [34, 40, 45])
def test_unwrap_joins_korean_lines(width):
    assert [line for line in unwrap(wrapped(KOREAN, width)) if line] == KOREAN


@pytest.mark.parametrize("width", [68, 76, 84])
def test_unwrap_joins_korean_lines_wrapped_by_columns(width):
    lines = []
    for paragraph in KOREAN:
        lines.append("")
        for word in paragraph.split():
            longer = f"{lines[-1]} {word}".strip()
            if len(longer.encode("euc-kr")) <= width:  # a Korean character is two bytes and two columns
                lines[-1] = longer
            else:
                lines.append(word)
        lines.append("")
    assert [line for line in unwrap(lines) if line] == KOREAN


def test_unwrap_splits_paragraphs_at_indented_lines():
    lines = [line for p in ENGLISH for line in textwrap.wrap(p, 72, initial_indent="    ")]
    assert [line.strip() for line in unwrap(lines)] == ENGLISH


def test_unwrap_joins_hyphenated_words():
    body = [
        "The old administration was replaced in the spring, and a new adminis-",
        "tration came to power with promises that nobody in the city had be-",
        "lieved for a moment. It was a well-",
        "known fact that the Anglo-",
        "Saxon charters were kept in the tower, in boxes of the years 1914-",
        "18, and that they could be read by anyone who had the patience to ask",
        "for the key, to climb the stairs, and to light a lamp in that place—",
        "which few had. A state-of-the-art vault was planned, but the state-of-",
        "the-art vault was never built, because there was no money left for it.",
    ]
    (text,) = unwrap(body)
    for words in ["new administration came", "believed", "well-known", "Anglo-Saxon", "1914-18", "place—which"]:
        assert words in text
    assert text.count("state-of-the-art") == 2


LEFT_ALONE = {
    "one paragraph a line": ENGLISH,
    "short paragraphs": ["He came in.", "She looked up.", "“You are late,” she said.", "He said nothing.", "It was so."]
    * 4,
    "headings": ["Early life", "Education and first works", "The years in Paris", "Later life", "Honours and awards"]
    * 3,
    "a list": [f"- item number {n} of the list, which is about as long as any other one" for n in range(9)],
    "a numbered list": [f"{n}. Take the cover off with the small screwdriver, then lift the lid" for n in range(1, 12)],
    "verse": [
        "The grey ship leaves the harbour in the rain,",
        "And no one on the quay has come to wave;",
        "The gulls go out and then come home again",
        "To circle round the chapel and the grave.",
        "The bell that rang all night has ceased to ring,",
        "The lamp that burned all night has ceased to burn,",
        "And what the tide has taken tides may bring,",
        "But those who sailed in winter don't return.",
    ],
    "code": [
        "def area(width, height):",
        "    if width < 0 or height < 0:",
        "        raise ValueError('negative')",
        "    return width * height",
        "",
        "for size in sizes:",
        "    print(area(size, size))",
        "    total += area(size, 2)",
    ],
    "one sentence a line": [
        "The ferry left the island before dawn on a cold day.",
        "Most of the passengers had gone below to sleep a little.",
        "Only the schoolteacher stayed on deck to see the ice.",
        "She had never crossed the strait in the winter before.",
        "The captain said that it would take about five hours.",
    ],
    "Korean titles": [
        "봄이 오는 길목에서",
        "강가의 오래된 집과 그 주인",
        "여름",
        "바다로 가는 기차를 탄 사람들",
        "끝나지 않은 노래",
    ]
    * 3,
    "nothing": [],
    "a single line": ["The ferry left the island before dawn, and by the time the lighthouse was out of"],
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_unwrap_keeps_text_that_is_not_wrapped(kind):
    assert unwrap(LEFT_ALONE[kind]) == LEFT_ALONE[kind]


def test_unwrap_keeps_headings_and_lists_in_wrapped_text():
    lines = [
        "CHAPTER ONE",
        "The Crossing",
        "",
        *wrapped(ENGLISH[:2], 70),
        "- a lamp",
        "- two blankets",
        "",
        *wrapped(ENGLISH[3:], 70),
    ]
    expected = ["CHAPTER ONE", "The Crossing", *ENGLISH[:2], "- a lamp", "- two blankets", ENGLISH[3]]
    assert [line for line in unwrap(lines) if line] == expected


def test_unwrapped_text_has_the_same_sentences():
    sentences = [s for paragraph in ENGLISH for s in split_sentences(paragraph)]
    assert [s for paragraph in unwrap(wrapped(ENGLISH, 66)) for s in split_sentences(paragraph)] == sentences

"""The ends of Korean sentences that have no mark after them, as in chats and reviews: 재미있어요 또 볼게요.

Only endings count that no other word has (했다, 갑니다, 봐서요), so that text with marks stays as it is.
"""

from __future__ import annotations

import re

HANGUL = re.compile("[가-힣]")
# What shows that a sentence has ended: a mood of its own (좋다 ㅋㅋ 또 봐야지), or the number of a list.
_MOOD_OR_ITEM = re.compile(
    r";{2,}(?= )|(?:;;)? (?:(?:[ㅋㅎㅠㅜ]+|\^\^+|;;+|ㅡㅡ+|[♥♡]+)(?= )|(?=[①-⑳][^,와과은는의을를에]|\(?\d{1,2}[.)] ))"
)
_NEXT = re.compile(r" +(?=[가-힣A-Za-z\d①-⑳“‘\"'「『(<《〈])")
# What follows a sentence that is reported by the one around it: 재미있다 하더라도, 좋다 생각했다, 왔다 갔다
_REPORTED = re.compile(
    r"이?라[고는며면던니서도]|하[고며는면여였더니던기지](?!만)|해[도서야]?\s|[했헀]|한[다들지]?(?![가-힣])|한다|합니다|함[은을이]|할[\s까지]|[\"”’']\s?[고라]"
    r"|[고는만며면까]\s|면서|싶|치[고면더]|쳐도|보니|보면|말[고았]|왔다|갔다|켜[고서니도]|켰|그려|마는|뿐|가도|카[고는]|던데|생각|말[하했]|느[꼈끼]|믿|주장"
    r"|밝혔|전했|봅니다|들었|선언|서\s|온\s|을\s|를\s|이\s|가\s|여[기겼겨]"
    r"|평가|정도|수준|때문|이[유라]|것|식|이야기|얘기|소리(?!가 )|주의|판단|또는|혹은|및|[가-힣]{1,4}다 말|\("
)
ENDED_VERB = "".join(chr(code) for code in range(0xAC00, 0xD7A4) if (code - 0xAC00) % 28 in (18, 20))  # with ㅄ, ㅆ
_POLITE_VERB = "".join(chr(code) for code in range(0xAC00, 0xD7A4) if (code - 0xAC00) % 28 == 17)  # with ㅂ
# Endings of Korean sentences that may have no mark after them: 했다, 갑니다, 봐서요, or any before a mood or an item.
UNMARKED = re.compile(
    rf"[다요죠까음함임네;] (?:(?P<verb>(?<=[한된는진준같좋{ENDED_VERB}]다 )|(?<=[{_POLITE_VERB}]니[다까] )"
    rf"|(?<=[가-힣][어아에예네세해군나데래게지까워려라돼봐와줘져셔겨]요 )|(?<= [나해돼봐와줘]요 )"
    rf"|(?<=[하거되맞렇좋{ENDED_VERB}]죠 ))"
    rf"|(?=[ㅋㅎㅠㅜ^;ㅡ♥♡①-⑳]|\(?\d{{1,2}}[.)] )|(?<=[다요죠까음함임네];; ))"
)


def may_end_unmarked(text: str) -> bool:
    """Whether a sentence without a mark may end in a text; most texts are ruled out faster than by the pattern."""
    korean = (
        "다" in text or "요" in text or "음" in text or "함" in text or "임" in text or "네" in text or "죠" in text
    )
    return korean and UNMARKED.search(text) is not None


def unmarked_end(text: str, match: re.Match[str]) -> int:
    """Where the sentence ends whose last syllable was found; 0 if it does not end there."""
    place = match.start()
    while place > 0 and text[place] == ";":
        place -= 1
    if not text[place - 1 : place].isalpha():
        return 0
    if found := _MOOD_OR_ITEM.match(text, place + 1):
        return found.end() - (found[0][-1] == " ")
    following = _NEXT.match(text, place + 1)
    ended = match["verb"] is not None and following and _REPORTED.match(text, following.end()) is None
    return place + 1 if ended else 0

"""The page at `/` in a real browser: every head, languages, dark mode, a phone, the keyboard, and what goes wrong."""

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import numpy as np
import pytest
import uvicorn
from conftest import reference

from bertsmith.serve.app import create_app
from bertsmith.serve.batching import Lane
from bertsmith.serve.models import Models, ServedModel, open_models
from bertsmith.serve.settings import ServeConfig

pytestmark = pytest.mark.slow
KEY = "correct-horse-battery"
NASTY = '<img src=x onerror="window.hacked=1">'
ENTITIES = {0: "O", 1: "B-PER", 2: "I-PER", 3: f"B-{NASTY}"}
PHONE = {"width": 390, "height": 844}
CONTEXT = "the quick 🦊 brown fox jumps over the lazy dog, and the dogs bark at foxes."


@contextmanager
def serving(models: Models, **settings: object) -> Iterator[tuple[str, uvicorn.Server]]:
    """A server in a thread of this process; gives its address."""
    app = create_app(models, ServeConfig(wait_ms=0, **settings))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/", server
        finally:
            server.should_exit = True
            thread.join(30)


@pytest.fixture(scope="module")
def models(served_models, tmp_path_factory, tiny_tokenizer) -> Models:
    """The models of the other tests, a tagger of entities, and one whose name and labels are HTML."""
    root = tmp_path_factory.mktemp("page")
    nasty = dict.fromkeys(range(4), "") | {i: f"{NASTY}{i}" for i in range(4)}
    for name, kind, labels in (("entities", "tags", ENTITIES), ("nasty", "single", nasty)):
        names = {"id2label": labels, "label2id": {label: i for i, label in labels.items()}}
        reference(kind, tiny_tokenizer.vocab_size, **names).save_pretrained(root / name)
        tiny_tokenizer.save(root / name)
    more = open_models([str(root / "entities"), str(root / "nasty")], "cpu").by_name
    more = [more["entities"], ServedModel(NASTY, more["nasty"].predictor)]
    return Models([*served_models.by_name.values(), *more])


@pytest.fixture(scope="module")
def site(models) -> Iterator[str]:
    with serving(models) as (url, _):
        yield url


class Watched:
    """A page in a browser, with its errors and the addresses that it asked for."""

    def __init__(self, browser, url: str, **options: object) -> None:
        self.context = browser.new_context(**{"locale": "en-US", "viewport": {"width": 1200, "height": 900}, **options})
        self.page, self.url = self.context.new_page(), url
        self.errors: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.set_default_timeout(20_000)
        self.page.goto(url)

    def choose(self, model: str, head: str, **fields: str) -> None:
        self.page.select_option("#model", model)
        self.page.check(f"#tasks input[value={head}]", force=True)
        for name, value in fields.items():
            self.page.fill(f"#field-{name}", value)

    def run(self, model: str, head: str, **fields: str) -> None:
        """Choose a model and a head, fill the fields, run, and wait for the result."""
        self.choose(model, head, **fields)
        self.page.click("#run")
        self.page.wait_for_selector("#result .card")

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_text_contents()

    @property
    def result(self) -> str:
        return self.page.locator("#result").inner_text()

    @property
    def status(self) -> str:
        return self.page.locator("#status").text_content()

    @property
    def problem(self) -> str:
        self.page.wait_for_selector("#problem:not([hidden])")
        return self.page.locator("#problem").inner_text()

    def close(self) -> None:
        self.context.close()
        assert all(url.startswith(self.url) for url in self.asked), "a request to another host"


@pytest.fixture
def watch(browser):
    """Opens pages; at the end none of them has written to the console or asked another host."""
    yield from opened_pages(browser, expected=None)


def opened_pages(browser, expected: str | None):
    """Yield a function that opens pages; at the end their consoles have no errors, or only the expected ones."""
    opened: list[Watched] = []

    def open_page(url: str, **options: object) -> Watched:
        opened.append(Watched(browser, url, **options))
        return opened[-1]

    yield open_page
    for page in opened:
        page.close()
        assert [error for error in page.errors if expected is None or expected not in error] == []


def shown(share: float) -> str:
    """A probability as the page writes it."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    return f"{round(100 * share)} %" if share >= 0.0995 else f"{100 * share:.1f} %"


def test_every_head_shows_what_the_server_answers(site, watch) -> None:
    page = watch(site)

    def ask(route: str, **body: object):
        return httpx.post(f"{site}{route}", json=body).raise_for_status().json()

    page.run("words", "fill-mask", masked="the [MASK] fox [MASK]")
    first, second = ask("fill-mask", inputs="the [MASK] fox [MASK]", top=8, model="words")
    assert page.texts(".passage mark") == [first[0]["token"], second[0]["token"]]
    assert page.texts("#result .bars span") == [each["token"] for each in [*first, *second]]
    assert page.texts("#result .bars b")[0] == shown(first[0]["probability"])
    assert page.status.startswith(f"Result: {first[0]['token']} ")

    for name, head, fields, inputs in (
        ("colours", "classify", {"text": CONTEXT}, CONTEXT),
        ("colours", "pair", {"text": "the fox", "second": "a dog"}, ["the fox", "a dog"]),
    ):
        page.run(name, head, **fields)
        found = ask(head, inputs=inputs, model=name)
        assert page.texts("#result .number") == [found["label"]]
        order = sorted(found["scores"], key=lambda label: -found["scores"][label])
        assert page.texts("#result .bars span") == order
        assert page.texts("#result .bars b") == [shown(found["scores"][label]) for label in order]
        assert page.status == f"Result: {found['label']}, {shown(found['score'])}"

    page.run("many", "classify", text=CONTEXT)
    found = ask("classify", inputs=CONTEXT, model="many")
    assert page.texts("#result .number") == [", ".join(found["labels"]) or "none of the labels"]
    page.run("ranks", "classify", text=CONTEXT)
    value = ask("classify", inputs=CONTEXT, model="ranks")["value"]
    assert page.texts("#result .number") == [f"{value:.3f}".replace("-", "−")]
    assert "Score two texts" in page.texts("#tasks span")
    page.run("ranks", "rerank", query="who?", texts="the fox\ndogs bark\n\nthe lazy dog")
    texts = ["the fox", "dogs bark", "the lazy dog"]
    ranked = ask("rerank", query="who?", texts=texts, model="ranks")
    assert page.texts(".ranks span") == [texts[each["index"]] for each in ranked]

    page.run("entities", "tag", text=CONTEXT)
    found = ask("tag", inputs=CONTEXT, model="entities")["entities"]
    assert found  # after an emoji, where characters and UTF-16 units differ
    assert page.texts(".entity") == [each["text"] + each["type"] for each in found]
    passage = page.page.locator(".passage").evaluate(
        "p => [...p.childNodes].map(n => n.firstChild?.data ?? n.data).join('')"
    )
    assert passage == CONTEXT
    page.run("tags", "tag", text=CONTEXT)
    found = ask("tag", inputs=CONTEXT, model="tags")
    assert page.texts(".entity") == [word + tag for word, tag in zip(found["words"], found["tags"], strict=True)]

    page.run("spans", "answer", question="who jumps?", passage=CONTEXT)
    found = ask("answer", inputs={"question": "who jumps?", "context": CONTEXT}, n_best=5, model="spans")
    assert page.texts(".passage mark") == [found["text"]]
    assert page.texts(".passage") == [CONTEXT]
    assert page.texts(".candidates button") == [each["text"] for each in found["nbest"]]
    page.page.locator(".candidates button").nth(1).click()
    assert page.texts(".passage mark") == [found["nbest"][1]["text"]]

    page.run("endings", "choose", context="the", endings="fox\ndog\nlazy")
    found = ask("choose", inputs={"context": "the", "endings": ["fox", "dog", "lazy"]}, model="endings")
    assert page.texts(".passage") == [f"the {found['text']}"]
    assert page.texts("#result .bars b") == [shown(score) for score in found["scores"]]

    page.run("words", "embed", sentences="the fox\nthe foxes\n\ndogs bark")
    vectors = np.array(ask("embed", inputs=["the fox", "the foxes", "dogs bark"], model="words"))
    cosines = [f"{value:.2f}".replace("-", "−") for value in (vectors @ vectors.T).ravel()]
    assert page.texts(".similarity td:not(.count):not(:empty)") == cosines
    assert page.status.startswith("Result: Most similar: ")

    page.run("words", "view", text="the quick fox", pair="dogs bark")
    found = ask("view", inputs=["the quick fox", "dogs bark"], model="words")
    assert page.texts(".token") == found["shown"]
    assert page.page.locator(".heads canvas").count() == found["layers"] * (found["heads"] + 1)
    assert "the itself: " in page.texts("#note")[0]
    page.page.locator(".token", has_text="fox").click()
    assert page.texts("#strongest") == ["What it attends to: fox"]


def test_language_follows_the_browser_and_is_remembered(site, watch) -> None:
    page = watch(site, locale="ko-KR")
    assert page.page.locator("html").get_attribute("lang") == "ko"
    page.run("words", "embed", sentences="the fox\ndogs bark")
    assert page.status.startswith("결과: 가장 비슷한 문장: 1번과 2번")
    page.page.get_by_role("button", name="English").click()
    assert page.page.locator("html").get_attribute("lang") == "en"
    assert "Most similar: 1 and 2" in page.result  # the result is kept, in the other language
    assert page.page.input_value("#field-sentences") == "the fox\ndogs bark"
    page.page.reload()
    page.page.wait_for_selector("#ask:not([hidden])")
    assert page.texts("#run-words") == ["Run"]
    for name in re.findall(r"data-say(?:-label)?=([\w-]+)", page.page.content()):
        assert page.page.evaluate("async name => (await import('/page/words.js')).WORDS.ko[name]", name)
    words = page.page.evaluate("async () => (await import('/page/words.js')).WORDS")
    assert words["ko"].keys() == words["en"].keys()
    for name, sentence in words["en"].items():
        places = re.findall(r"\{\w+\}", sentence)
        assert sorted(re.findall(r"\{\w+\}", words["ko"][name])) == sorted(places), name
        assert name in ("insert_mask", "milliseconds") or re.search("[가-힣]", words["ko"][name]), name


CONTRAST = """() => {
  const light = c => c.map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const parts = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const under = e => { const layers = [];
    for (; e; e = e.parentElement) { const [r, g, b, a = 1] = parts(getComputedStyle(e).backgroundColor);
      if (a) layers.push([r, g, b, a]); if (a === 1) break; }
    return layers.reverse().reduce((c, [r, g, b, a]) => [r, g, b].map((v, i) => v * a + c[i] * (1 - a)), [0, 0, 0]); };
  const found = [];
  for (const e of document.querySelectorAll("body *")) {
    if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) || !e.checkVisibility()) continue;
    if (e.closest(".same, noscript, .hidden")) continue;
    const pair = [light(parts(getComputedStyle(e).color).slice(0, 3)), light(under(e))].sort((a, b) => b - a);
    const ratio = (pair[0] + .05) / (pair[1] + .05);
    if (ratio < 4.5) found.push([e.tagName, e.className, e.textContent.slice(0, 30), ratio.toFixed(2)]);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark_mode(site, watch, scheme) -> None:
    page = watch(site, color_scheme=scheme)
    background = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == {"light": "rgb(255, 255, 255)", "dark": "rgb(17, 24, 39)"}[scheme]
    for model, head, fields in EVERY:
        page.run(model, head, **fields)
        page.page.wait_for_timeout(300)  # the card fades in
        assert page.page.evaluate(CONTRAST) == [], head


EVERY = (
    ("words", "fill-mask", {"masked": "the [MASK] fox"}),
    ("colours", "pair", {"text": CONTEXT, "second": CONTEXT}),
    ("entities", "tag", {"text": CONTEXT * 2 + "a" * 200}),
    ("spans", "answer", {"question": "who?", "passage": CONTEXT * 3}),
    ("endings", "choose", {"context": "the", "endings": "fox\n" + "dog " * 40}),
    ("ranks", "rerank", {"query": "the", "texts": "fox\n" + "dog " * 40}),
    ("words", "embed", {"sentences": "\n".join(f"the {word} dog" for word in CONTEXT.split())}),
    ("words", "view", {"text": CONTEXT, "pair": ""}),
)


@pytest.mark.parametrize("locale", ["en-US", "ko-KR"])
def test_a_phone_shows_everything_without_scrolling_sideways(site, watch, locale) -> None:
    page = watch(site, viewport=PHONE, locale=locale, has_touch=True, is_mobile=True)
    for model, head, fields in EVERY:
        page.run(model, head, **fields)
        page.page.locator("details").last.evaluate("e => { e.open = true; }")
        assert page.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], head
        assert page.page.evaluate("visualViewport.width") == PHONE["width"], head
    low = "e => e.checkVisibility() && e.getBoundingClientRect().height < 32 && !e.closest('.look, .candidates')"
    small = page.page.evaluate(
        f"[...document.querySelectorAll('button, select')].filter({low}).map(e => e.textContent)"
    )
    assert small == []  # fingers need room


def test_keyboard_alone_is_enough(site, watch) -> None:
    page = watch(site)
    keys = page.page.keyboard
    focused = "document.activeElement.id || document.activeElement.value || document.activeElement.textContent.trim()"

    def tab_to(expected: str) -> None:
        for _ in range(12):
            keys.press("Tab")
            if page.page.evaluate(focused) == expected:
                return
        raise AssertionError(f"Tab does not reach {expected}")

    tab_to("model")
    keys.type("spans")
    assert page.page.input_value("#model") == "spans"
    tab_to("answer")
    keys.press("ArrowRight")
    assert page.page.evaluate(focused) == "embed"
    keys.press("ArrowLeft")
    tab_to("field-question")
    keys.type("who?")
    tab_to("field-passage")
    keys.type("the quick fox")
    keys.press("Control+Enter")
    page.page.wait_for_selector("#result .card")
    assert page.status.startswith("Result: ")
    assert page.page.evaluate(focused) == "field-passage"  # a result does not take the focus
    keys.press("Shift+Tab")
    keys.press("End")  # a browser selects the text of a field that it moves to
    keys.type(" now")
    keys.press("Enter")  # in a field of one line
    page.page.wait_for_selector("pre:has-text('who? now')", state="attached")
    tab_to("run")
    keys.press("Enter")
    page.page.wait_for_selector("#result .card")
    ring = page.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert ring == "solid"  # the focus is visible
    tab_to(page.texts(".candidates button")[0])
    assert page.page.evaluate("document.activeElement.closest('.candidates') !== null")


def test_every_control_has_a_name(site, watch) -> None:
    page = watch(site)
    roles = {"button", "textbox", "combobox", "radio", "checkbox", "link"}
    for model, head, fields in EVERY:
        page.run(model, head, **fields)
        tree = page.context.new_cdp_session(page.page).send("Accessibility.getFullAXTree")["nodes"]
        controls = [node for node in tree if node.get("role", {}).get("value") in roles and not node["ignored"]]
        assert len(controls) > 5
        assert not [node for node in controls if not node.get("name", {}).get("value")], head
    assert page.page.locator("#problem").get_attribute("role") == "alert"
    assert page.page.locator("#status").get_attribute("role") == "status"


def test_text_labels_and_names_are_never_html(site, watch) -> None:
    page = watch(site)
    for model, head, fields in (
        (NASTY, "classify", {"text": NASTY}),
        ("words", "fill-mask", {"masked": f"{NASTY} [MASK]"}),
        ("entities", "tag", {"text": f"{NASTY} the fox"}),
        ("spans", "answer", {"question": NASTY, "passage": f"{NASTY} the fox"}),
        ("endings", "choose", {"context": NASTY, "endings": f"{NASTY}\n{NASTY}"}),
        ("ranks", "rerank", {"query": NASTY, "texts": f"{NASTY}\n{NASTY}"}),
        (NASTY, "embed", {"sentences": f"{NASTY}\n{NASTY}"}),
        ("words", "view", {"text": "<img>", "pair": ""}),
    ):
        page.run(model, head, **fields)
        assert "<img" in page.page.locator("#result").text_content()
        assert page.page.locator("main img").count() == 0
    assert page.page.evaluate("window.hacked") is None


# ---- what goes wrong ----


@pytest.fixture
def failing(browser):
    """Opens pages whose requests may fail, which a browser notes in its console."""
    yield from opened_pages(browser, expected="Failed to load resource")


def test_bad_input_is_explained(site, failing) -> None:
    page = failing(site)
    page.choose("words", "fill-mask", masked="no mask here")
    page.page.click("#run")
    assert "The text has no [MASK]" in page.problem
    assert page.page.locator("#field-masked").get_attribute("aria-invalid") == "true"
    assert page.page.evaluate("document.activeElement.id") == "field-masked"
    page.page.get_by_role("button", name="Insert [MASK]").click()
    page.page.keyboard.press("Control+Enter")
    page.page.wait_for_selector("#result .card")
    page.choose("spans", "answer", question="who?", passage="  ")
    page.page.click("#run")
    assert "Please fill in: Passage" in page.problem
    page.choose("endings", "choose", context="the", endings="one")
    page.page.click("#run")
    assert "at least two endings" in page.problem
    page.choose("words", "view", text="fox\n" * 60)
    page.page.click("#run")
    assert page.problem.startswith("The text is too long.")
    seen = "e => { const box = e.getBoundingClientRect(); return box.top >= 0 && box.bottom <= innerHeight; }"
    assert page.page.locator("#problem").evaluate(seen)  # below a long text, too
    assert "a page shows 48; shorten it" in page.problem
    page.choose("words", "fill-mask", masked="[MASK] " * 60)
    page.page.click("#run")
    assert "more than the model's 48 positions" in page.problem


def test_a_busy_and_a_stopped_server_are_explained(models, failing) -> None:
    with serving(models, queue_tokens=64) as (url, server):
        page = failing(url)
        page.choose("colours", "classify", text="the fox " * 40)
        page.page.click("#run")
        assert page.problem.startswith("The text is too long.")
        batcher, wait = server.config.app.state.service.batcher, threading.Event()
        batcher.submit(Lane("", "", compute=lambda items: [wait.wait(60)]), [0], [1])
        page.page.fill("#field-text", "the fox")
        page.page.click("#run")  # it waits
        page.page.wait_for_selector("#run:has-text('Stop')")
        page.page.click("#run")
        page.page.wait_for_selector("#status:has-text('Stopped.')")
        full = batcher.submit(Lane("", "later", compute=lambda items: items), [0], [64])
        page.page.click("#run")
        assert re.match(r"The server is busy\. Please try again in \d+ s\.", page.problem)
        wait.set()
        full.result(20)
        page.page.get_by_role("button", name="Try again").click()
        page.page.wait_for_selector("#result .card")
        assert page.page.locator("#problem").is_hidden()
    page.page.click("#run")
    assert "The server does not answer." in page.problem
    page.page.get_by_role("button", name="한국어").click()
    page.page.click("#run")
    assert "서버가 응답하지 않습니다." in page.problem


def test_the_key_is_asked_for_on_the_page_and_kept_in_the_tab(models, failing) -> None:
    with serving(models, api_keys=(KEY,)) as (url, _):
        page = failing(url)
        page.page.wait_for_selector("#unlock:not([hidden])")
        assert not [asked for asked in page.asked if asked.endswith("/models")]  # it knows that it needs a key
        assert page.errors == []
        assert "colours" not in page.page.content()
        for wrong in ("wrong-wrong", "키키키키키키키키"):
            page.page.keyboard.type(wrong)  # the field has the focus
            page.page.keyboard.press("Enter")
            assert page.problem == "The server does not accept this key."
        page.page.keyboard.type(KEY)
        page.page.keyboard.press("Enter")
        page.page.wait_for_selector("#ask:not([hidden])")
        page.run("colours", "classify", text="the fox")
        assert KEY not in page.page.content()
        assert 'Authorization: Bearer $KEY"' in page.page.locator("#result").text_content()
        assert (
            page.page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href].join()").count(KEY) == 0
        )
        page.page.reload()
        page.run("colours", "classify", text="the fox")  # the tab has kept it
        page.page.get_by_role("button", name="Forget the key").click()
        assert page.page.evaluate("sessionStorage.length") == 0
        page.page.reload()
        page.page.wait_for_selector("#unlock:not([hidden])")

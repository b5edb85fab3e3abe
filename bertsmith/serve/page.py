"""The page at `/`, on which a person tries the models in a browser, and the route of what it shows of a text.

The page is plain HTML, CSS and JavaScript modules, and loads nothing from elsewhere. Its look and its view of a text
are those of `bertsmith view`, whose files it shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Request, Response

from bertsmith.pages.page import asset
from bertsmith.serve import bodies
from bertsmith.serve.service import SMALL_NUMBERS, service_of, to_json
from bertsmith.text.frame import SHOWN_MASK

router = APIRouter()
TYPES = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
SHARED = ("page.css", "view.css", "view.js")  # with the pages that the command line writes
OWN = ("try.css", "icon.svg", "main.js", "heads.js", "results.js", "requests.js", "words.js")
FILES = frozenset(SHARED + OWN)
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a browser asks whether a file has changed, so that it never mixes two versions
}


@dataclass(frozen=True)
class File:
    """A file of the page as it is sent."""

    content: bytes
    kind: str

    def response(self, request: Request) -> Response:
        """Return the file, or that the browser's copy of it is the same."""
        tag = f'"{sha256(self.content).hexdigest()[:32]}"'
        headers = {**HEADERS, "ETag": tag}
        if request.headers.get("If-None-Match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=f"{self.kind}; charset=utf-8", headers=headers)


def _own(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


@cache
def _file(name: str) -> File:
    text = asset(name) if name in SHARED else _own(name)
    return File(text.encode(), TYPES[name.rpartition(".")[2]])


@cache
def _index(asks_for_key: bool) -> File:
    """Return the page, with the markup of the view in its template; it says whether the server wants a key."""
    text = _own("index.html").replace("<!-- view -->", asset("view.html"))
    body = f'<body data-mask="{SHOWN_MASK}"{" data-key" if asks_for_key else ""}>'
    return File(text.replace("<body>", body).encode(), "text/html")


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    return _index(bool(service_of(request).config.api_keys)).response(request)


@router.get("/page/{name}", include_in_schema=False)
async def file(name: str, request: Request) -> Response:
    if name not in FILES:
        raise HTTPException(404)
    return _file(name).response(request)


@router.post("/view", tags=["heads"], summary="Attention by layer and head, and the masked and nearest words of tokens")
async def view(body: bodies.ViewText, request: Request) -> Response:
    service = service_of(request)
    model = service.models.find("view", body.model)
    most = service.config.max_numbers
    found, _ = await service.run(model, [body.inputs], lambda: model.view(body.inputs, most))
    content = await service.call(lambda: to_json(found), len(found["attention"]), SMALL_NUMBERS)
    return Response(content, media_type="application/json")

"""Errors of requests as one line of JSON, in the form that the clients of each route expect."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from bertsmith.errors import NotFinite, UserError
from bertsmith.serve.batching import QueueFull, Stopped, TooLarge
from bertsmith.serve.models import UnknownModel
from bertsmith.text.safe import valid_text

LONGEST = 300  # characters of a message
TYPES = {400: "empty", 413: "validation", 422: "validation", 424: "backend", 429: "overloaded", 503: "unhealthy"}
FIELD = re.compile(r"[a-z_]+")
NOT_FIELDS = {"body", "str", "int", "bool", "list", "tuple", "dict", "float", "none"}


def error_response(path: str, status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error in OpenAI's form under /v1, elsewhere in the form of text-embeddings-inference."""
    line = " ".join(valid_text(message).split())
    line = line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…"
    if path.startswith("/v1/"):
        kind = "invalid_request_error" if status < 500 else "server_error"
        content: dict[str, Any] = {"error": {"message": line, "type": kind, "param": None, "code": None}}
    else:
        content = {"error": line, "error_type": TYPES.get(status, "validation" if status < 500 else "backend")}
    return JSONResponse(content, status, headers=dict(headers or {}))


def status_of(error: Exception, path: str = "") -> int:
    """Return the status of an error that a request causes."""
    if isinstance(error, QueueFull):
        return 429
    if isinstance(error, Stopped):
        return 503
    if isinstance(error, TooLarge):
        return 413
    if isinstance(error, UnknownModel):
        return 404
    if isinstance(error, NotFinite):
        return 424
    return 400 if path.startswith("/v1/") else 422


def explained(errors: Sequence[Mapping[str, Any]]) -> str:
    """Return one line on what is wrong with a body: of a validator's list, the deepest place and what is expected."""
    if not errors:
        return "the body is not valid"
    if errors[0]["type"] == "json_invalid":
        return f"the body is not JSON: {errors[0].get('ctx', {}).get('error', 'it cannot be read')}"
    depth = max(len(error["loc"]) for error in errors)
    deepest = [error for error in errors if len(error["loc"]) == depth]
    place = ""
    for part in deepest[0]["loc"]:
        if isinstance(part, int):
            place += f"[{part}]"
        elif FIELD.fullmatch(part) and part not in NOT_FIELDS:
            place += f".{part}" if place else part
    expected = dict.fromkeys(str(error["msg"]) for error in deepest)
    return f"{place or 'the body'}: {'; or '.join(expected)}"


def add_handlers(app: FastAPI) -> None:
    """Answer every exception of a route with one line; one that is not expected is a bug, and is logged."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = error.errors()
        not_json = bool(found) and found[0]["type"] == "json_invalid"
        status = 400 if not_json or request.url.path.startswith("/v1/") else 422
        return error_response(request.url.path, status, explained(found))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        known = {404: "no such page; /docs lists the routes", 405: "this route takes another method; see /docs"}
        known[400] = "the body is not JSON that can be read"
        message = known.get(error.status_code, str(error.detail))
        return error_response(request.url.path, error.status_code, message, error.headers)

    @app.exception_handler(UserError)
    async def bad_input(request: Request, error: UserError) -> JSONResponse:
        return error_response(request.url.path, status_of(error, request.url.path), str(error))

    @app.exception_handler(QueueFull)
    async def busy(request: Request, error: QueueFull) -> JSONResponse:
        return error_response(request.url.path, 429, str(error), {"Retry-After": str(error.retry_after)})

    @app.exception_handler(Stopped)
    async def stopping(request: Request, error: Stopped) -> JSONResponse:
        return error_response(request.url.path, 503, str(error), {"Retry-After": "1"})

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> JSONResponse:
        return error_response(request.url.path, 500, "the server failed; its log has the reason")

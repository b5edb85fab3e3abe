"""The page at /docs: every route with its fields and an example, from the OpenAPI schema, with no outside resource."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request, Response

from bertsmith.pages.page import Html, asset, page_text, paragraph, section, table

router = APIRouter()
TITLES = {
    "heads": "Predictions",
    "text-embeddings-inference": "As text-embeddings-inference",
    "OpenAI": "As OpenAI's API",
    "server": "The server",
}
LEAD = "The routes of this server. A body is JSON. /openapi.json has the same as a schema (OpenAPI), for programs."
WORDS = {"string": "text", "integer": "whole number", "boolean": "true or false", "null": "null", "object": "object"}


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    style = base64.b64encode(hashlib.sha256(f"\n{asset('page.css')}".encode()).digest()).decode()
    policy = f"default-src 'self'; style-src 'self' 'sha256-{style}'"
    page = page_text("bertsmith serve", LEAD, _parts(request.app.openapi()))
    return Response(page, media_type="text/html; charset=utf-8", headers={"Content-Security-Policy": policy})


def _parts(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield the routes under the titles of their groups."""
    schemas = schema.get("components", {}).get("schemas", {})
    routes = [(method, path, found) for path, each in schema["paths"].items() for method, found in each.items()]
    tags = list(dict.fromkeys([*TITLES, *(found["tags"][0] for _, _, found in routes)]))
    for tag in tags:
        yield section(TITLES.get(tag, tag))
        for method, path, found in routes:
            if found["tags"][0] == tag:
                yield from _route(method, path, found, schemas)


def _route(method: str, path: str, found: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    yield section(f"{method.upper()} {path}", 3)
    yield paragraph(found["summary"])
    if "requestBody" not in found:
        return
    body = _resolved(found["requestBody"]["content"]["application/json"]["schema"], schemas)
    needed = set(body.get("required", ()))
    rows = [
        (Html(f"<code>{html.escape(name)}</code>"), _kind(field, schemas), _default(name, field, needed), _about(field))
        for name, field in sorted(body["properties"].items(), key=lambda item: item[0] not in needed)
    ]
    yield table(("field", "value", "default", ""), rows)
    example = {name: field["examples"][0] for name, field in body["properties"].items() if field.get("examples")}
    command = f"curl localhost:8000{path} -H 'Content-Type: application/json' -d '{json.dumps(example)}'"
    yield f"<p><code>{html.escape(command)}</code></p>"


def _resolved(field: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    return schemas[field["$ref"].rsplit("/", 1)[1]] if "$ref" in field else field


def _kind(field: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """Return in words what a field may hold."""
    field = _resolved(field, schemas)
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_kind(each, schemas) for each in field["anyOf"]))
    if "enum" in field:
        return " or ".join(map(str, field["enum"]))
    if "prefixItems" in field:
        return f"[{', '.join(_kind(each, schemas) for each in field['prefixItems'])}]"
    if field.get("type") == "array":
        items = _kind(field["items"], schemas)
        return f"list of ({items})" if " or " in items else f"list of {items}"
    if "properties" in field:
        inner = (f"{name}: {_kind(each, schemas)}" for name, each in field["properties"].items())
        return f"{{{', '.join(inner)}}}"
    return WORDS.get(field.get("type", ""), "anything")


def _default(name: str, field: Mapping[str, Any], needed: set[str]) -> str:
    return "required" if name in needed else json.dumps(field.get("default"))


def _about(field: Mapping[str, Any]) -> str:
    return str(field.get("description", ""))

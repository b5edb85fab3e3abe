"""The routes of every head: fill-mask, classify, pair, tag, answer, choose, features, and what the server holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from bertsmith.inference.files import trimmed
from bertsmith.serve import bodies
from bertsmith.serve.service import json_response, service_of, to_json, vectors_to_json

router = APIRouter()


async def _predict(
    request: Request,
    route: str,
    body: Any,
    item: Callable[[Any], Any] = lambda each: each,
) -> Response:
    """Return the prediction for one input, or a list of predictions."""
    service = service_of(request)
    model = service.models.find(route, body.model)
    inputs, is_one = _listed(body.inputs)
    items = [item(each) for each in inputs]
    found, _ = await service.run(model, items, lambda: model.predict(items))
    found = [trimmed(prediction, getattr(body, "n_best", None)) for prediction in found]
    return json_response(found[0] if is_one else found)


def _listed(inputs: Any) -> tuple[list[Any], bool]:
    """Return inputs as a list, and whether there was only one."""
    return (inputs, False) if isinstance(inputs, list) else ([inputs], True)


@router.post("/classify", tags=["heads"], summary="Label, score and scores of texts, or the number of a regression")
async def classify(body: bodies.Texts, request: Request) -> Response:
    return await _predict(request, "classify", body)


@router.post("/pair", tags=["heads"], summary="Label, score and scores of pairs of texts")
async def pair(body: bodies.Pairs, request: Request) -> Response:
    return await _predict(request, "pair", body)


@router.post("/tag", tags=["heads"], summary="Words with tags, and entities with character offsets")
async def tag(body: bodies.Sentences, request: Request) -> Response:
    service = service_of(request)
    model = service.models.find("tag", body.model)
    inputs, is_one = _listed(body.inputs)
    texts = [each.document if isinstance(each, bodies.Document) else each for each in inputs]
    items = [each.rows if isinstance(each, bodies.Document) else [each] for each in inputs]
    found, _ = await service.run(model, texts, lambda: model.predict([item for each in items for item in each]))
    left = iter(found)
    predicted = [
        [next(left) for _ in rows] if isinstance(each, bodies.Document) else next(left)
        for each, rows in zip(inputs, items, strict=True)
    ]
    return json_response(predicted[0] if is_one else predicted)


@router.post("/answer", tags=["heads"], summary="The answer to a question in its context, or that there is none")
async def answer(body: bodies.Questions, request: Request) -> Response:
    return await _predict(request, "answer", body, lambda each: (each.question, each.context))


@router.post("/choose", tags=["heads"], summary="The likeliest ending of a text")
async def choose(body: bodies.Choices, request: Request) -> Response:
    return await _predict(request, "choose", body, lambda each: (each.context, each.endings))


@router.post("/fill-mask", tags=["heads"], summary="The likeliest words for each mask")
async def fill_mask(body: bodies.Masks, request: Request) -> Response:
    service = service_of(request)
    model = service.models.find("fill-mask", body.model)
    inputs, is_one = _listed(body.inputs)
    found, _ = await service.run(model, inputs, lambda: model.fill(inputs, body.top))
    return json_response(found[0] if is_one else found)


@router.post(
    "/features", tags=["heads"], summary="Hidden states of layers for every word: (layers, words, hidden size)"
)
async def features(body: bodies.FeatureTexts, request: Request) -> Response:
    service = service_of(request)
    model = service.models.find("features", body.model)
    inputs, is_one = _listed(body.inputs)
    most = service.config.max_numbers
    found, _ = await service.run(model, inputs, lambda: model.features(inputs, body.layers, body.align, most))

    def write() -> bytes:
        entries = [
            to_json({"words": each["words"], "offsets": each["offsets"]})[:-1]
            + b',"vectors":'
            + vectors_to_json(each["vectors"])
            + b"}"
            for each in found
        ]
        return entries[0] if is_one else b"[" + b",".join(entries) + b"]"

    return await service.vectors([each["vectors"] for each in found], write)


@router.get("/models", tags=["server"], summary="The models of this server, and what each can do")
async def models(request: Request) -> Response:
    return json_response([model.described for model in service_of(request).models.by_name.values()])


@router.get("/health", tags=["server"], summary="Whether the process is alive")
async def health() -> Response:
    return json_response({"status": "ok"})


@router.get("/ready", tags=["server"], summary="Whether the server takes requests; 503 if not")
async def ready(request: Request) -> Response:
    is_ready = service_of(request).batcher.is_running
    response = json_response({"status": "ready" if is_ready else "not ready"})
    response.status_code = 200 if is_ready else 503
    return response


@router.get("/metrics", tags=["server"], summary="Counters for Prometheus")
async def metrics(request: Request) -> Response:
    from bertsmith.serve.metrics import CONTENT_TYPE

    service = service_of(request)
    return Response(service.metrics.page(service.batcher), headers={"Content-Type": CONTENT_TYPE})

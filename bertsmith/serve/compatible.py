"""The routes of other servers, so that their clients work unchanged.

`/v1/embeddings` and `/v1/models` are those of OpenAI's API (platform.openai.com/docs/api-reference/embeddings).
`/embed`, `/rerank`, `/predict` and `/info` are those of text-embeddings-inference
(huggingface.github.io/text-embeddings-inference).
"""

from __future__ import annotations

import base64
import math
import time
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from bertsmith import __version__
from bertsmith.errors import UserError
from bertsmith.serve import bodies
from bertsmith.serve.batching import TooLarge
from bertsmith.serve.models import ServedModel, Work
from bertsmith.serve.service import Service, json_response, service_of, to_json, vector_to_json
from bertsmith.tasks.sequences import softmax

router = APIRouter()
STARTED = int(time.time())


@router.post("/v1/embeddings", tags=["OpenAI"], summary="Sentence vectors, as OpenAI's API")
async def openai_embeddings(body: bodies.OpenAIBody, request: Request) -> Response:
    service = service_of(request)
    model = service.models.find("embed", body.model)
    assert model.embedder is not None
    if body.dimensions not in (None, model.embedder.size):
        raise UserError(f"dimensions {body.dimensions}: the vectors of {model.name!r} have {model.embedder.size}")
    texts = body.input if isinstance(body.input, list) else [body.input]
    found, tokens = await service.run(model, texts, lambda: model.embed(texts, True))

    def write() -> bytes:
        entries = b",".join(
            b'{"object":"embedding","index":%d,"embedding":%b}' % (i, _written(vector, body.encoding_format))
            for i, vector in enumerate(found)
        )
        rest = {"model": model.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
        return b'{"object":"list","data":[' + entries + b"]," + to_json(rest)[1:]

    return await service.vectors(found, write)


def _written(vector: Any, form: str) -> bytes:
    """Return a vector as JSON: a list of numbers, or the bytes of float32 in base64."""
    if form == "base64":
        return b'"%b"' % base64.b64encode(np.ascontiguousarray(vector, dtype="<f4").tobytes())
    return vector_to_json(vector)


@router.get("/v1/models", tags=["OpenAI"], summary="The names of the models, as OpenAI's API")
async def openai_models(request: Request) -> Response:
    return json_response({"object": "list", "data": [_openai(name) for name in service_of(request).models.by_name]})


@router.get("/v1/models/{name}", tags=["OpenAI"], summary="One model, as OpenAI's API")
async def openai_model(name: str, request: Request) -> Response:
    models = service_of(request).models
    return json_response(_openai(models.named(name).name))


def _openai(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "bertsmith"}


@router.post("/embed", tags=["text-embeddings-inference"], summary="Sentence vectors, one row for each text")
async def embed(body: bodies.EmbedBody, request: Request) -> Response:
    service = service_of(request)
    model = service.models.find("embed", body.model)
    texts = body.inputs if isinstance(body.inputs, list) else [body.inputs]

    def make() -> Work:
        if body.truncate is False:
            _refuse_long(model, texts)
        return model.embed(texts, body.normalize)

    found, _ = await service.run(model, texts, make)
    return await service.vectors(
        found, lambda: b"[" + b",".join(_written(vector, body.encoding_format) for vector in found) + b"]"
    )


def _refuse_long(model: ServedModel, texts: list[str]) -> None:
    """Refuse texts that would be cut, for clients that ask for that."""
    assert model.embedder is not None
    limit, special = model.embedder.max_length, model.predictor.tokenizer.frame.size(1)
    for number, ids in enumerate(model.predictor.tokenizer.encode(texts)):
        if len(ids) + special > limit:
            raise TooLarge(
                f"inputs[{number}] has {len(ids) + special} tokens, more than {limit}; shorten it, or set truncate"
            )


@router.post("/rerank", tags=["text-embeddings-inference"], summary="Texts in the order of their fit to a query")
async def rerank(body: bodies.RerankBody, request: Request) -> Response:
    service = service_of(request)
    model = service.models.find("rerank", body.model)
    pairs = [(body.query, text) for text in body.texts]
    found, _ = await service.run(model, pairs, lambda: model.scores(pairs))
    scores = found if body.raw_scores else [_sigmoid(score) for score in found]
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return json_response(
        [{"index": i, **({"text": body.texts[i]} if body.return_text else {}), "score": scores[i]} for i in order]
    )


def _sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))


@router.post("/predict", tags=["text-embeddings-inference"], summary="Labels with scores, the likeliest first")
async def predict(body: bodies.PredictBody, request: Request) -> Response:
    service = service_of(request)
    model = service.models.find("classify", body.model)
    items, is_one = _sequences(body.inputs)
    found, _ = await service.run(model, items, lambda: model.logits(items))
    ranked = [_ranked(model, logits, body.raw_scores) for logits in found]
    return json_response(ranked[0] if is_one else ranked)


def _sequences(inputs: str | list[str] | list[list[str]]) -> tuple[list[Any], bool]:
    """Return texts and pairs: a text, one list with a text or a pair, or a list of such lists."""
    if isinstance(inputs, str):
        return [inputs], True
    if not inputs:
        raise UserError("inputs is empty; give a text, a pair [text, text] or a list of such lists")
    is_one = isinstance(inputs[0], str)
    lists = [inputs] if is_one else inputs
    if wrong := next((each for each in lists if len(each) not in (1, 2)), None):
        raise UserError(f"inputs: a list of {len(wrong)} texts; give [text], [text, text] or a list of such lists")
    if not all(lists):
        raise UserError("inputs: an empty list; give [text], [text, text] or a list of such lists")
    return [each[0] if len(each) == 1 else tuple(each) for each in lists], is_one


def _ranked(model: ServedModel, logits: Any, raw: bool) -> list[dict[str, Any]]:
    """Return the labels of a text with their scores, the likeliest first."""
    head = model.predictor.head
    if raw:
        scores = logits.tolist()
    elif head.kind == "single":
        scores = softmax(logits).tolist()
    else:
        scores = [_sigmoid(float(score)) for score in logits]
    labels = head.labels or tuple(f"LABEL_{i}" for i in range(len(scores)))
    found = [{"score": score, "label": label} for label, score in zip(labels, scores, strict=True)]
    return sorted(found, key=lambda entry: -entry["score"])


@router.get("/info", tags=["text-embeddings-inference"], summary="The default model and the limits of this server")
async def info(request: Request) -> Response:
    service: Service = service_of(request)
    model, config = next(iter(service.models.by_name.values())), service.config
    embedder = model.embedder
    return json_response(
        {
            "model_id": model.name,
            "model_sha": None,
            "model_dtype": getattr(model.predictor.engine, "precision", "float32"),
            "model_type": _model_type(model),
            "max_concurrent_requests": config.queue_tokens,
            "max_input_length": embedder.max_length if embedder else model.predictor.max_length,
            "max_batch_tokens": config.max_batch_tokens,
            "max_batch_requests": None,
            "max_client_batch_size": config.max_texts,
            "auto_truncate": True,
            "tokenization_workers": 2,
            "version": __version__,
            "sha": None,
            "docker_label": None,
        }
    )


def _model_type(model: ServedModel) -> dict[str, Any]:
    if "rerank" in model.routes:
        return {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}
    if "classify" in model.routes:
        labels = model.predictor.head.labels
        names = {str(i): label for i, label in enumerate(labels)}
        return {"classifier": {"id2label": names, "label2id": {label: i for i, label in enumerate(labels)}}}
    return {"embedding": {"pooling": model.embedder.pooling.kind if model.embedder else "none"}}

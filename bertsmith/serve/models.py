"""The models that a server holds: what each can do, and a request to it in steps (encode, compute, decode).

The steps are those of `Predictor`, `Embedder` and `Extractor`; the server computes the middle one in batches that hold
texts of several requests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import UserError, nearest_or_all
from bertsmith.inference.embedder import Embedder
from bertsmith.inference.engines import EngineName, Precision, TorchEngine
from bertsmith.inference.features import Extractor, passages
from bertsmith.inference.predictor import Predictor
from bertsmith.pages.view import Look, sequence_of
from bertsmith.rows.columns import Row
from bertsmith.serve.batching import Lane, TooLarge
from bertsmith.tasks.description import Encoded
from bertsmith.tasks.inputs import row_of_input
from bertsmith.tasks.sequences import of_rows

# The routes of each kind of head.
ROUTES: dict[str, tuple[str, ...]] = {
    "single": ("classify", "pair"),
    "multi": ("classify", "pair"),
    "regression": ("classify", "pair", "rerank"),
    "tags": ("tag",),
    "span": ("answer",),
    "choice": ("choose",),
}
EXTRACTORS = 32  # combinations of layers and alignment that are kept


@dataclass(frozen=True)
class Work:
    """A request in steps: the items to compute in a lane, their sizes in tokens, and the step after that."""

    lane: Lane
    items: Sequence[Any]
    sizes: Sequence[int]
    decode: Callable[[list[Any]], Any]


class ServedModel:
    """A model under its name, with the steps of every request that it can answer."""

    def __init__(self, name: str, predictor: Predictor) -> None:
        self.name, self.predictor = name, predictor
        self.embedder = _embedder(predictor)
        self.routes = _routes(predictor, self.embedder)
        self._extractor = lru_cache(EXTRACTORS)(self._new_extractor)

    @property
    def described(self) -> dict[str, Any]:
        """What a client needs to know about the model."""
        config = self.predictor.config
        found: dict[str, Any] = {"name": self.name, "routes": list(self.routes)}
        found |= {"num_layers": config.num_layers, "num_heads": config.num_heads, "hidden_size": config.hidden_size}
        found |= {"max_length": self.predictor.max_length, "engine": repr(self.predictor.engine)}
        if self.has_head:
            head, predictor = self.predictor.head, self.predictor
            found |= {"task": predictor.task.name, "head": head.kind, "labels": list(head.labels)}
            found["columns"] = asdict(predictor.columns)
        if "fill-mask" in self.routes:
            found["mask"] = self.predictor.tokenizer.frame.mask
        return found

    @property
    def has_head(self) -> bool:
        """Whether the model has an output layer for a task."""
        return bool({"classify", "tag", "answer", "choose"} & set(self.routes))

    def predict(self, items: Sequence[Any], place: str = "inputs") -> Work:
        """Predict items as `Predictor.predict` takes them, or rows."""
        return self._of_rows(items, place, self.predictor.decode_rows)

    def _of_rows(self, items: Sequence[Any], place: str, decode: Callable[..., list[Any]]) -> Work:
        rows = self._rows(items, place)
        encoded = self.predictor.encode_rows(rows) if rows else None
        if encoded is None:
            return Work(Lane(self.name, "predict"), [], [], lambda results: [])
        examples = list(encoded.examples)
        return self._work(
            Lane(self.name, "predict", compute=self.predictor.logits),
            examples,
            lambda logits: decode(rows, encoded, logits),
        )

    def _rows(self, items: Sequence[Any], place: str) -> list[Row]:
        kind = self.predictor.head.kind
        rows = []
        for number, item in enumerate(items):
            try:
                row = item if isinstance(item, Row) else row_of_input(item, kind)
                rows.append(replace(row, place=f"{place}[{number}]"))
            except UserError as error:
                raise UserError(f"{place}[{number}]: {error}") from None
        return rows

    def scores(self, pairs: Sequence[tuple[str, str]]) -> Work:
        """Compute the one score of each pair, before any activation, as a re-ranker gives it."""
        return self._of_rows(pairs, "texts", lambda *found: [float(row[0]) for row in self._logits(*found)])

    def logits(self, items: Sequence[Any]) -> Work:
        """Compute the logits of texts and pairs, without decoding them."""
        return self._of_rows(items, "inputs", self._logits)

    def _logits(self, rows: Sequence[Row], encoded: Encoded, logits: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        return list(of_rows(logits, encoded, self.predictor.head, self.predictor.limits))

    def fill(self, texts: Sequence[str], top: int) -> Work:
        """Fill the masks of texts; the words are chosen with their batch, since logits of the vocabulary are large."""
        encoded = [self.predictor.encode_masks(text) for text in texts]
        sizes = [len(example.tokens) + self._vocabulary_tokens * len(masked) for example, masked in encoded]
        items = [(example, masked, top) for example, masked in encoded]
        return Work(Lane(self.name, "fill-mask", compute=self._fill), items, sizes, lambda results: results)

    def _fill(self, items: list[Any]) -> list[Any]:
        examples, masked, tops = zip(*items, strict=True)
        found = self.predictor.mask_logits(examples, masked)
        return [self.predictor.decode_masks(scores, top) for scores, top in zip(found, tops, strict=True)]

    @property
    def _vocabulary_tokens(self) -> int:
        """The tokens that cost as much as the logits of one mask: its memory counts in the limits of a batch, too."""
        return max(1, self.predictor.config.vocab_size // (12 * self.predictor.config.hidden_size))

    def embed(self, texts: Sequence[str], normalize: bool | None = None) -> Work:
        """Compute sentence vectors; `normalize` is None for the setting of the model's folder."""
        embedder = self._embedder_for(normalize)
        lane = Lane(self.name, "embed", (embedder.pooling.normalize,), compute=lambda items: list(embedder.run(items)))
        return self._work(lane, embedder.encode(texts), lambda results: results)

    def _embedder_for(self, normalize: bool | None) -> Embedder:
        assert self.embedder is not None
        if normalize is None or normalize == self.embedder.pooling.normalize:
            return self.embedder
        other = copy.copy(self.embedder)
        other.pooling = replace(other.pooling, normalize=normalize)
        return other

    def features(self, texts: Sequence[str | Sequence[str]], layers: str, align: str, most: int) -> Work:
        """Compute hidden states for the words of texts, in windows where a text is longer than the model."""
        extractor = self._extractor(layers, align)
        described = extractor.described
        rows = [Row(text, None, None, "") if isinstance(text, str) else _of_words(text) for text in texts]
        part = list(passages(rows, extractor.tokenizer, described.align))
        count = sum(len(passage.words) for passage in part)
        shape = (count, len(described.layers), described.hidden_size)
        if np.prod(shape) > most:
            raise TooLarge(f"{count:,} words have more than {most:,} numbers; ask for fewer texts or layers at a time")

        def decode(results: list[tuple[NDArray[np.int64], NDArray[Any]]]) -> list[dict[str, Any]]:
            vectors = np.zeros(shape, described.dtype)
            for words, states in results:
                vectors[words] += states
            ends = np.cumsum([len(passage.words) for passage in part]).tolist()
            return [
                {"words": p.words, "offsets": p.offsets, "vectors": vectors[end - len(p.words) : end].swapaxes(0, 1)}
                for p, end in zip(part, ends, strict=True)
            ]

        items = list(extractor.windows(part))
        lane = Lane(self.name, "features", (described.layers, align), compute=extractor.states)
        return Work(lane, items, [len(window.example.tokens) for window in items], decode)

    def view(self, text: str | tuple[str, str], most: int) -> Work:
        """Compute the data of the view of a text or a pair: attention, masked words and nearest words."""
        texts = (text, None) if isinstance(text, str) else text
        try:
            example = sequence_of(self.predictor, *texts)
        except UserError as error:
            raise TooLarge(str(error)) from None
        config, count = self.predictor.config, len(example.tokens)
        if config.num_layers * config.num_heads * count**2 > most:
            raise TooLarge(f"the attention of {count} tokens has more than {most:,} numbers; shorten the text")
        look = Look(self.predictor, example)
        steps = look.steps
        lane = Lane(self.name, "view", in_order=True, compute=lambda items: [each.run(step) for each, step in items])
        return Work(lane, [(look, step) for step in steps], [step.tokens for step in steps], lambda _: look.data)

    def _new_extractor(self, layers: str, align: str) -> Extractor:
        return Extractor(self.predictor, layers, align, "float32")

    def _work(self, lane: Lane, examples: Sequence[Any], decode: Callable[[list[Any]], Any]) -> Work:
        return Work(lane, examples, [len(example.tokens) for example in examples], decode)

    def public(self, message: str) -> str:
        """Return an error message in which the model has its name, not the path of its folder."""
        return message.replace(str(self.predictor.folder), self.name).replace("--", "")


def _of_words(words: Sequence[str]) -> Row:
    return Row(" ".join(words), None, None, "", parts=tuple(words))


def _embedder(predictor: Predictor) -> Embedder | None:
    """Return the embedder of a model, or None for an ONNX graph that has no hidden states."""
    embedder = Embedder(predictor)
    if isinstance(predictor.engine, TorchEngine):
        return embedder
    try:
        embedder.embed("")
    except UserError:
        return None
    return embedder


def _routes(predictor: Predictor, embedder: Embedder | None) -> tuple[str, ...]:
    """Return the names of the routes that a model can answer."""
    found: tuple[str, ...] = ()
    with suppress(UserError):  # raised where it has no head, or one without weights
        found += ROUTES[predictor.head.kind]
    with suppress(UserError):
        predictor.check_fills()
        found += ("fill-mask",)
    found += ("embed",) if embedder is not None else ()
    if not isinstance(predictor.engine, TorchEngine):
        return found
    return (*found, "features", *(("view",) if predictor.config.layer_type != "lstm" else ()))


class Models:
    """The models of a server by their names; the first one that can answer a route is that route's default."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.by_name = {model.name: model for model in models}

    def find(self, route: str, name: str | None = None) -> ServedModel:
        """Return the model of this name, or the default one, which has to know the route."""
        if name is not None:
            model = self.named(name)
            if route not in model.routes:
                raise UserError(f"the model {name!r} does not answer /{route}; it answers: {', '.join(model.routes)}")
            return model
        for model in self.by_name.values():
            if route in model.routes:
                return model
        raise UserError(f"no model of this server answers /{route}; its models: {', '.join(self.by_name)}")

    def named(self, name: str) -> ServedModel:
        """Return the model of this name."""
        if name not in self.by_name:
            raise UnknownModel(f"no model {name[:100]!r} on this server{nearest_or_all(name[:100], self.by_name)}")
        return self.by_name[name]


class UnknownModel(UserError):
    """A request names a model that the server does not hold."""


def open_models(
    given: Sequence[str],
    device: str | None = None,
    *,
    engine: EngineName | None = None,
    threads: int | None = None,
    precision: Precision | None = None,
) -> Models:
    """Open models that are given as NAME=FOLDER, or as a folder or hub name whose last part is the name."""
    models: dict[str, ServedModel] = {}
    for entry in given:
        name, folder = split_name(entry)
        if name in models:
            raise UserError(f"two models have the name {name!r}; write NAME=FOLDER to give {entry} another one")
        predictor = Predictor.load(folder, device, engine=engine, threads=threads, precision=precision)
        models[name] = ServedModel(name, predictor)
    return Models(list(models.values()))


def split_name(entry: str) -> tuple[str, str]:
    """Return the name and the folder of a model on the command line."""
    name, equals, folder = entry.partition("=")
    if not equals or Path(entry).exists():
        name, folder = Path(entry).resolve().name, entry
    if not name or not folder or "/" in name:
        raise UserError(f"cannot read {entry!r} as a model; write FOLDER or NAME=FOLDER")
    return name, folder

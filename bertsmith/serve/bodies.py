"""The bodies of requests. An unknown field is an error on our own routes, and is ignored on those of other servers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from bertsmith.rows.columns import Row
from bertsmith.text.safe import safe_text

Text = Annotated[str, AfterValidator(safe_text)]
Pair = tuple[Text, Text]
ModelName = Annotated[str | None, Field(description="The name of a model; default: the first one that can answer")]


class Body(BaseModel):
    """A body of our own routes."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    model: ModelName = None


class Texts(Body):
    """A text or several."""

    inputs: Text | list[Text] = Field(examples=["I was charged twice."])
    n_best: Annotated[int | None, Field(ge=1, description="The number of labels to list; default: all")] = None


class Pairs(Body):
    """A pair of texts, or several pairs."""

    inputs: Pair | list[Pair] = Field(examples=[["A man sleeps.", "Somebody is awake."]])
    n_best: Annotated[int | None, Field(ge=1)] = None


class Document(BaseModel):
    """The words of a document, and its sentences as numbers of words: where each begins and ends."""

    model_config = ConfigDict(extra="forbid")
    document: list[Text]
    sentences: list[tuple[Annotated[int, Field(ge=0)], int]]

    @model_validator(mode="after")
    def _are_in_order(self) -> Document:
        bounds = [bound for sentence in self.sentences for bound in sentence]
        if bounds != sorted(bounds) or (bounds and bounds[-1] > len(self.document)):
            raise ValueError("sentences are [begin, end] in the document's words, in order, and do not overlap")
        if any(begin == end for begin, end in self.sentences):
            raise ValueError("a sentence has at least one word")
        return self

    @property
    def rows(self) -> list[Row]:
        """The sentences, each with the words of the document around it."""
        words = tuple(self.document)
        return [
            Row(" ".join(words[begin:end]), None, None, "", parts=words[begin:end], document=words, begin=begin)
            for begin, end in self.sentences
        ]


class Sentences(Body):
    """A sentence or several, each as a text or as a list of its words, or the sentences of documents."""

    inputs: Text | Document | list[Text | list[Text] | Document] = Field(examples=["Ada Lovelace was born in London."])


class Question(BaseModel):
    """A question on a text."""

    model_config = ConfigDict(extra="forbid")
    question: Text
    context: Text


class Questions(Body):
    """A question with its context, or several."""

    inputs: Question | list[Question] = Field(
        examples=[{"question": "Who wrote it?", "context": "It was written by Ada."}]
    )
    n_best: Annotated[int | None, Field(ge=1, description="The number of answers to list; default: all")] = None


class Choice(BaseModel):
    """A text and its possible endings."""

    model_config = ConfigDict(extra="forbid")
    context: Text
    endings: list[Text] = Field(min_length=1)


class Choices(Body):
    """A text with endings, or several."""

    inputs: Choice | list[Choice] = Field(examples=[{"context": "She opened the", "endings": ["door.", "sky."]}])


class Masks(Body):
    """A text with masks, or several."""

    inputs: Text | list[Text] = Field(examples=["The capital of France is [MASK]."])
    top: Annotated[int, Field(ge=1, le=1000, description="The number of words for each mask")] = 5


class FeatureTexts(Body):
    """A text or several, each as a text or as a list of its words, and the layers to read."""

    inputs: Text | list[Text | list[Text]] = Field(examples=["Ada Lovelace was born in London."])
    layers: Annotated[str, Field(max_length=200, description="-1, -4..-1, 0,6,12 or all; 0 is the embeddings")] = "-1"
    align: Annotated[
        Literal["first", "mean", "none"],
        Field(description="first sub-token of a word, mean of its sub-tokens, none: every sub-token by itself"),
    ] = "first"


class ViewText(Body):
    """A text or a pair whose attention is looked at."""

    inputs: Text | Pair = Field(examples=["Ada Lovelace was born in London."])


class Foreign(BaseModel):
    """A body in the form of another server, whose clients may send fields that change nothing here."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())
    model: ModelName = None


class EmbedBody(Foreign):
    """Texts to embed, as text-embeddings-inference takes them."""

    inputs: Text | list[Text] = Field(examples=["a cat", ["a cat", "a kitten"]])
    normalize: Annotated[
        bool | None, Field(description="Scale vectors to length 1; null: as saved in the model's folder")
    ] = True
    truncate: Annotated[bool | None, Field(description="false refuses texts that are longer than the model")] = None
    encoding_format: Annotated[
        Literal["float", "base64"], Field(description="base64: the bytes of each vector's float32 numbers")
    ] = "float"


class PredictBody(Foreign):
    """A text, a pair, or a batch of lists with one or two texts, as text-embeddings-inference takes them."""

    inputs: Text | list[Text] | list[list[Text]] = Field(examples=["I like it.", [["I like it."], ["I do not."]]])
    raw_scores: bool = False
    truncate: bool | None = None


class RerankBody(Foreign):
    """A query and the texts to rank for it, as text-embeddings-inference takes them."""

    query: Text = Field(examples=["Who wrote it?"])
    texts: list[Text] = Field(min_length=1, examples=[["It was written by Ada.", "It rains."]])
    raw_scores: bool = False
    return_text: bool = False
    truncate: bool | None = None


class OpenAIBody(Foreign):
    """Texts to embed, as OpenAI's API takes them."""

    input: Text | list[Text] = Field(examples=["a cat"])
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: Any = None

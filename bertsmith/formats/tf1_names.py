"""The names of BERT's variables and settings in the released TensorFlow code and in `transformers`.

TensorFlow stores the matrix of a dense layer (`kernel`) with the inputs first: it is transposed in `transformers`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bertsmith.errors import UserError, suggestion

Size = str | int  # a setting's name or a number
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Variable:
    """A variable of the released code."""

    tf: str
    hf: str
    shape: tuple[Size, ...]  # as `transformers` lays it out
    transposed: bool = False  # the released code keeps it with the inputs first


def dense(tf: str, hf: str, outputs: Size, inputs: Size = "hidden_size") -> list[Variable]:
    """The variables of a dense layer."""
    weight = Variable(f"{tf}/kernel", f"{hf}.weight", (outputs, inputs), transposed=True)
    return [weight, Variable(f"{tf}/bias", f"{hf}.bias", (outputs,))]


def norm(tf: str, hf: str, size: Size = "hidden_size") -> list[Variable]:
    """The variables of a layer norm."""
    ends = {"gamma": "weight", "beta": "bias"}
    return [Variable(f"{tf}/{end}", f"{hf}.{ends[end]}", (size,)) for end in ends]


def _embedding(name: str, rows: Size) -> Variable:
    return Variable(f"bert/embeddings/{name}", f"bert.embeddings.{name}.weight", (rows, "hidden_size"))


def _output(tf: str, hf: str, classes: Size) -> list[Variable]:
    """The released code multiplies by the transpose of an output layer, so it is stored as in `transformers`."""
    weight = Variable(f"{tf}output_weights", f"{hf}.weight", (classes, "hidden_size"))
    return [weight, Variable(f"{tf}output_bias", f"{hf}.bias", (classes,))]


EMBEDDINGS = [
    _embedding("word_embeddings", "vocab_size"),
    _embedding("token_type_embeddings", "type_vocab_size"),
    _embedding("position_embeddings", "max_position_embeddings"),
    *norm("bert/embeddings/LayerNorm", "bert.embeddings.LayerNorm"),
]
LAYER = [  # under bert/encoder/layer_0/ and bert.encoder.layer.0.
    *dense("attention/self/query", "attention.self.query", "hidden_size"),
    *dense("attention/self/key", "attention.self.key", "hidden_size"),
    *dense("attention/self/value", "attention.self.value", "hidden_size"),
    *dense("attention/output/dense", "attention.output.dense", "hidden_size"),
    *norm("attention/output/LayerNorm", "attention.output.LayerNorm"),
    *dense("intermediate/dense", "intermediate.dense", "intermediate_size"),
    *dense("output/dense", "output.dense", "hidden_size", "intermediate_size"),
    *norm("output/LayerNorm", "output.LayerNorm"),
]
POOLER, MASKED_LM, NEXT_SENTENCE = "pooler", "masked language model head", "next sentence head"
CLASSIFIER, SPAN = "classifier", "span head"
HEADS = {
    POOLER: dense("bert/pooler/dense", "bert.pooler.dense", "hidden_size"),
    MASKED_LM: [
        *dense("cls/predictions/transform/dense", "cls.predictions.transform.dense", "hidden_size"),
        *norm("cls/predictions/transform/LayerNorm", "cls.predictions.transform.LayerNorm"),
        Variable("cls/predictions/output_bias", "cls.predictions.bias", ("vocab_size",)),
    ],
    NEXT_SENTENCE: _output("cls/seq_relationship/", "cls.seq_relationship", 2),
    CLASSIFIER: _output("", "classifier", "labels"),  # run_classifier.py
    SPAN: _output("cls/squad/", "qa_outputs", 2),  # run_squad.py
}
FACTORISED = "factorised embeddings: an ALBERT checkpoint, which is not supported yet"
# Patterns of names in checkpoints of other models, the most specific first.
OTHERS = {
    r"_CHECKPOINTABLE_OBJECT_GRAPH$": "a TensorFlow 2 object checkpoint, whose variables do not have BERT's names",
    r"(generator|discriminator_predictions)/": "a part of an ELECTRA: electra/embeddings is missing",
    r".*(/embedding_hidden_mapping_in|/inner_group_0/|word_embeddings_2$)": FACTORISED,
    r"bert/.*/bottleneck/": "a MobileBERT checkpoint, which is not supported",
    r"model/transformer/": "an XLNet checkpoint, which is not supported",
}
OPTIMISERS = re.compile(r"(^|/)(adam\w*|lamb|momentum|rmsprop|adagrad|adadelta|ftrl|sgd)(_\w+)?(/|$)", re.I)

# bert_config.json: sizes and their values in `transformers` where a config.json leaves them out, the other settings,
# and what some have added that changes nothing.
SIZES = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
}
DEFAULTS = {
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,  # the released code has no such setting: always this
}
LABELS = ["architectures", "id2label", "label2id", "problem_type", "num_choices"]
CLASSIFIERS = [["BertForSequenceClassification"], ["BertForTokenClassification"], ["BertForMultipleChoice"]]
HARMLESS = [
    *["do_lower_case", "pad_token_id", "embedding_size", "model_type", "directionality", "pooler_fc_size"],
    *["pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type"],
]
ACTIVATIONS = ["gelu", "relu", "gelu_new", "gelu_pytorch_tanh", "silu", "swish"]


def parts(layers: int) -> dict[str, list[Variable]]:
    """Return every variable of a model with a number of layers, by the part of the model."""
    prefixes = [(f"bert/encoder/layer_{i}/", f"bert.encoder.layer.{i}.") for i in range(layers)]
    layer = [replace(v, tf=tf + v.tf, hf=hf + v.hf) for tf, hf in prefixes for v in LAYER]
    return {"encoder": [*EMBEDDINGS, *layer], **HEADS}


def select(
    names: Collection[str], side: Literal["tf", "hf"], config: Mapping[str, Any], where: Path
) -> dict[str, list[Variable]]:
    """Return the parts that names of one side make up; an incomplete part is refused."""
    found = {}
    for part, variables in parts(min(config["num_hidden_layers"], len(names))).items():
        missing = [getattr(v, side) for v in variables if getattr(v, side) not in names]
        if missing and (part == "encoder" or len(missing) < len(variables)):
            raise UserError(f"{where} lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else ""))
        if not missing:
            found[part] = variables
    known = {getattr(v, side) for variables in found.values() for v in variables}
    start = "bert/" if side == "tf" else "bert."
    if strange := sorted(name for name in names if name.startswith(start) and name not in known):
        raise UserError(
            f"{where} has {strange[0]}, which a BERT of {config['num_hidden_layers']} layers does not; "
            "mend num_hidden_layers, or it is another model"
        )
    return found


def check_shape(variable: Variable, shape: Shape, config: Mapping[str, Any], where: Path) -> None:
    """Refuse a shape, in the layout of `transformers`, that does not fit the settings."""
    asked = tuple(size if isinstance(size, int) else config.get(size) for size in variable.shape)
    if len(shape) != len(asked) or any(want not in (None, have) for have, want in zip(shape, asked, strict=True)):
        sizes = ", ".join(f"{size} = {config.get(str(size), 'any')}" for size in variable.shape)
        reason = ": factorised embeddings (ALBERT), which are not supported yet, or the settings of another model"
        raise UserError(
            f"{where}: {variable.tf} ({variable.hf}) has shape {shape}, and the settings say {sizes}"
            + (reason if variable is EMBEDDINGS[0] else "")
        )


def refuse_others(names: Iterable[str], where: Path) -> None:
    """Refuse the checkpoint of another model, with the reason."""
    names = list(names)
    for pattern, reason in OTHERS.items():
        if found := next((name for name in names if re.match(pattern, name)), None):
            raise UserError(f"{where} has {found}: {reason}")
    if EMBEDDINGS[0].tf not in names:
        scopes = [scope for scope, _ in Counter(name.split("/")[0] for name in names).most_common(4)]
        raise UserError(f"{where} holds no BERT: no {EMBEDDINGS[0].tf}; its variables begin with {', '.join(scopes)}")


def kind_of_extra(name: str, names: Collection[str], shape: Shape) -> str:
    """Return what a variable is that is not a weight of BERT; empty if unknown."""
    if name.endswith("/ExponentialMovingAverage"):
        return "moving averages"
    if name.rpartition("/")[0] in names or OPTIMISERS.search(name):  # an optimiser names its slots under the variable
        return "optimiser slots"
    return "" if shape else "counters"


def settings_in(values: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """Return `bert_config.json` as the values of a `config.json`; unknown settings are refused by name."""
    known = [*SIZES, *DEFAULTS, *LABELS, *HARMLESS]
    for key in SIZES:
        if key not in values:
            raise UserError(f"{where}: missing key {key!r}")
        if type(values[key]) is not int or values[key] < 1:
            raise UserError(f"{where}: {key} must be a whole number of at least 1, not {values[key]!r}")
    if values.get("embedding_size", values["hidden_size"]) != values["hidden_size"]:
        raise UserError(f"{where}: embedding_size {values['embedding_size']}: {FACTORISED}")
    for key in values:
        if key not in known:
            fix = suggestion(key, known) or "; remove it if it does not change what the model computes"
            raise UserError(f"{where}: unknown key {key!r}{fix}")
    if values.get("model_type", "bert") != "bert":
        raise UserError(f"{where}: model_type {values['model_type']!r}; only 'bert' has this format")
    config = {"model_type": "bert", **{key: values[key] for key in SIZES}}
    config.update({key: values.get(key, value) for key, value in DEFAULTS.items()})
    if config["hidden_act"] not in ACTIVATIONS:
        raise UserError(f"{where}: hidden_act {config['hidden_act']!r} is not one of {', '.join(ACTIVATIONS)}")
    return config


def settings_out(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a `config.json` as `bert_config.json`, and notes on settings that the released code does not support."""
    values = {key: config.get(key, value) for key, value in DEFAULTS.items()} | {key: config[key] for key in SIZES}
    notes = []
    if values["layer_norm_eps"] == DEFAULTS["layer_norm_eps"]:
        del values["layer_norm_eps"]
    else:
        notes.append(f"layer_norm_eps is {values['layer_norm_eps']}; the released code always takes 1e-12")
    if values["hidden_act"] not in ("gelu", "relu"):
        notes.append(f"hidden_act is {values['hidden_act']!r}, which the released code does not know")
    if config.get("pad_token_id"):
        notes.append(f"pad_token_id is {config['pad_token_id']}; the released code always pads with 0")
    if config.get("architectures") in CLASSIFIERS[1:]:
        name = config["architectures"][0]
        notes.append(f"the released code has no {name}: its output layer goes by output_weights, as a classifier's")
    return dict(sorted(values.items())), notes


def head_settings(found: Collection[str], values: Mapping[str, Any], labels: int, where: Path) -> dict[str, Any]:
    """Return the class of `transformers` for a checkpoint, and its labels; the format has no names for labels."""
    if SPAN in found:
        return {"architectures": ["BertForQuestionAnswering"]}
    if CLASSIFIER in found:
        named = {key: values[key] for key in LABELS if values.get(key)}
        if named.get("architectures") not in CLASSIFIERS:
            named["architectures"] = CLASSIFIERS[0]
        if named["architectures"] == ["BertForMultipleChoice"]:
            return named
        numbers = [str(i) for i in range(labels)]
        names = named.get("id2label", {number: f"LABEL_{number}" for number in numbers})
        if not isinstance(names, dict) or set(names) != set(numbers):
            raise UserError(f"{where}: id2label is to name the labels 0 to {labels - 1} of output_weights, not {names}")
        named["id2label"] = {number: str(names[number]) for number in numbers}
        return {**named, "label2id": {name: int(number) for number, name in named["id2label"].items()}}
    if MASKED_LM in found:
        return {"architectures": ["BertForPreTraining" if NEXT_SENTENCE in found else "BertForMaskedLM"]}
    return {"architectures": ["BertModel"]}

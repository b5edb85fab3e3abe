"""The models whose TensorFlow 1 checkpoints were released, and their names in `transformers`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from re import match

from bertsmith.formats.tf1_names import TOKENS, Release, Variable, dense, embeddings, heads, layer

BERT_LAYER = layer(
    [
        *[f"attention/self/{part}" for part in ("query", "key", "value")],
        *["attention/output/dense", "attention/output/LayerNorm"],
        *["intermediate/dense", "output/dense", "output/LayerNorm"],
    ],
    [
        *[f"attention.self.{part}" for part in ("query", "key", "value")],
        *["attention.output.dense", "attention.output.LayerNorm"],
        *["intermediate.dense", "output.dense", "output.LayerNorm"],
    ],
)
BERT_WORDS = ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.bias")
BERT = Release(
    name="BERT",
    sign="",
    model_type="bert",
    classes="Bert",
    embeddings=embeddings("bert", "hidden_size"),
    layer=BERT_LAYER,
    layers=("bert/encoder/layer_{i}/", "bert.encoder.layer.{i}."),
    heads=heads("bert.pooler.dense", BERT_WORDS, "cls.seq_relationship", "hidden_size"),
)

ALBERT_PARTS = [
    *[f"attention.{part}" for part in ("query", "key", "value", "dense", "LayerNorm")],
    *["ffn", "ffn_output", "full_layer_layer_norm"],
]
ALBERT = Release(
    name="ALBERT",
    sign="bert/encoder/transformer/group_0/",
    model_type="albert",
    classes="Albert",
    embeddings=[
        *embeddings("albert", "embedding_size"),
        *dense(
            "bert/encoder/embedding_hidden_mapping_in",
            "albert.encoder.embedding_hidden_mapping_in",
            "hidden_size",
            "embedding_size",
        ),
    ],
    layer=layer(
        [
            *[f"attention_1/self/{part}" for part in ("query", "key", "value")],
            *["attention_1/output/dense", "LayerNorm"],
            *["ffn_1/intermediate/dense", "ffn_1/intermediate/output/dense", "LayerNorm_1"],
        ],
        ALBERT_PARTS,
    ),
    layers=(
        "bert/encoder/transformer/group_{i}/inner_group_0/",
        "albert.encoder.albert_layer_groups.{i}.albert_layers.0.",
    ),
    heads=heads(
        "albert.pooler",
        ("predictions.dense", "predictions.LayerNorm", "predictions.bias"),
        "sop_classifier.classifier",
        "embedding_size",
    ),
    num_layers="num_hidden_groups",
    embeddings_are="projected",
    optional={"num_hidden_groups": 1, "inner_group_num": 1},
    gelu="gelu_new",  # its code approximates GELU by tanh
    checkpoint="model.ckpt-best",
    settings="albert_config.json",
)
# BERT with a projection of narrower embeddings and layers of their own, as bert4keras trains and names it: ALBERT with
# as many groups as layers computes the same.
FACTORISED_BERT = Release(
    name="a BERT with factorised embeddings",
    sign="bert/encoder/embedding_hidden_mapping_in/",
    model_type="albert",
    classes="Albert",
    embeddings=ALBERT.embeddings,
    layer=[
        Variable(theirs.tf, ours.hf, theirs.shape, theirs.transposed)
        for theirs, ours in zip(BERT_LAYER, ALBERT.layer, strict=True)
    ],
    layers=(BERT.layers[0], ALBERT.layers[1]),
    heads=ALBERT.heads,
    embeddings_are="projected",
    values={"num_hidden_groups": "num_hidden_layers"},
)
# albert_zh: the token embeddings alone are factorised and projected without a bias, also in the masked-word head, and
# all layers share their variables. BERT with the product as its table, and with equal layers, computes the same.
CHINESE_ALBERT = Release(
    name="albert_zh",
    sign="bert/encoder/layer_shared/",
    model_type="bert",
    classes="Bert",
    embeddings=[Variable(v.tf, v.hf, v.shape, factor=f"{TOKENS}_2") if v.tf == TOKENS else v for v in BERT.embeddings],
    layer=BERT_LAYER,
    layers=("bert/encoder/layer_shared/", BERT.layers[1]),
    heads=BERT.heads,
    embeddings_are="a product",
    fixed={"ln_type": "postln"},
    values={"shared_layers": "all"},
    gelu="gelu_new",
)
FACTORISED_TOKENS = replace(  # the same with layers of their own
    CHINESE_ALBERT,
    name="a BERT with factorised token embeddings",
    sign=f"{TOKENS}_2$",
    layers=BERT.layers,
    values={},
)
RELEASES = (CHINESE_ALBERT, FACTORISED_TOKENS, ALBERT, FACTORISED_BERT, BERT)
WRITTEN = {release.model_type: release for release in (BERT, ALBERT)}  # by the family of a model folder


def release_of(names: Iterable[str]) -> Release:
    """The release that a checkpoint with these variables is of."""
    names = list(names)
    return next(release for release in RELEASES if any(match(release.sign, name) for name in names))

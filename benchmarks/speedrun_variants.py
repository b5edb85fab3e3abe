"""The ways to fine-tune one checkpoint, each with one change of the protocol, and what they showed."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.tuning import Variation

JUDGED = "decay-0.01"  # the experiment on whose encoder the verdicts of the ways of fine-tuning were reached


@dataclass(frozen=True)
class Variant:
    """A change of the fine-tuning protocol on one checkpoint: settings, or the state that is classified.

    With `one_segment` the second segment has the vector of the first: full sentences train no second one. `tasks` are
    those that it can change; none: all.
    """

    asks: str
    settings: tuple[str, ...] = ()
    variation: Variation = field(default_factory=Variation)
    one_segment: bool = False
    tasks: tuple[str, ...] = ()
    verdict: str = ""


VARIANTS = {
    "protocol": Variant("the fixed protocol: 5e-5, 5 epochs, batches of 32, dropout 0.1, warm-up of a tenth"),
    "rate-2e-5": Variant("a lower rate", ("train.learning_rate=2e-5",)),
    "rate-1e-4": Variant("twice the rate of the protocol", ("train.learning_rate=1e-4",),
                         verdict="pairs gain a point; what CoLA loses is within the noise of its seeds"),
    "rate-2e-4": Variant("four times the rate", ("train.learning_rate=2e-4",),
                         verdict="no: MRPC gains two points, CoLA loses more"),
    "rate-4e-4": Variant("eight times the rate", ("train.learning_rate=4e-4",)),
    "epochs-3": Variant("3 epochs", ("train.epochs=3",)),
    "epochs-10": Variant("10 epochs; the final protocol has at most 5", ("train.epochs=10",),
                         verdict="little for twice the time"),
    "batch-16": Variant("batches of 16, twice the steps", ("train.batch_size=16",)),
    "batch-16-rate-1e-4": Variant("batches of 16 at twice the rate",
                                  ("train.batch_size=16", "train.learning_rate=1e-4"), verdict="no"),
    "mean": Variant("the mean of all states, since no loss has trained that of [CLS]", variation=Variation("mean"),
                    verdict="STS-B gains a point or two"),
    "max": Variant("the maximum of all states", variation=Variation("max"), verdict="within the noise of the seeds"),
    "direct": Variant("[CLS] without the pooler, which starts at random", variation=Variation(dense=False),
                      verdict="no difference: the pooler that starts at random is not what is wrong"),
    "mean-direct": Variant("the mean of all states without the pooler", variation=Variation("mean", dense=False),
                           verdict="pairs gain one or two points, and the seeds agree more"),
    "mean-rate-2e-4": Variant("the mean at four times the rate", ("train.learning_rate=2e-4",), Variation("mean")),
    "mean-direct-rate-1e-4": Variant("the mean without the pooler, at twice the rate",
                                     ("train.learning_rate=1e-4",), Variation("mean", dense=False),
                                     verdict="the best for pairs, not worse for CoLA"),
    "mean-direct-rate-2e-4": Variant("the mean without the pooler, at four times the rate",
                                     ("train.learning_rate=2e-4",), Variation("mean", dense=False),
                                     verdict="no: too high"),
    "direct-rate-1e-4": Variant("[CLS] without the pooler, at twice the rate",
                                ("train.learning_rate=1e-4",), Variation(dense=False), verdict="no gain"),
    "one-segment": Variant("the second segment has the vector of the first", one_segment=True,
                           tasks=("mrpc", "stsb", "rte")),
    "no-dropout": Variant("no dropout, as in pre-training", ("dropout=0",),
                          verdict="perhaps: the highest CoLA of all ways, but one seed of the protocol has as much"),
    "agreement-0.5": Variant("every batch is read twice, and the two passes must agree (R-Drop), with half the weight",
                             variation=Variation(agreement=0.5)),
    "agreement-1": Variant("the same with a weight of 1", variation=Variation(agreement=1.0)),
    "agreement-2": Variant("with a weight of 2", variation=Variation(agreement=2.0)),
    "agreement-1-rate-1e-4": Variant("with a weight of 1, at twice the rate", ("train.learning_rate=1e-4",),
                                     Variation(agreement=1.0)),
    "mean-direct-agreement-1-rate-1e-4": Variant("the mean without the pooler at twice the rate, and agreement",
                                                 ("train.learning_rate=1e-4",),
                                                 Variation("mean", dense=False, agreement=1.0)),
    "dropout-0.2": Variant("more dropout", ("dropout=0.2",)),
    "warm-up-0.3": Variant("three times the warm-up", ("train.warmup=0.3",)),
    "warm-up-0.02": Variant("nearly no warm-up", ("train.warmup=0.02",)),
    "length-64": Variant("at most 64 tokens", ("data.max_length=64",)),
    "layer-decay-0.9": Variant("lower rates in lower layers", ("train.layer_decay=0.9",),
                               verdict="no: perhaps the lower layers have to change for CoLA"),
    "layer-decay-0.8": Variant("much lower rates in lower layers", ("train.layer_decay=0.8",)),
    "layer-decay-0.9-rate-1e-4": Variant("lower rates in lower layers, at twice the rate",
                                         ("train.layer_decay=0.9", "train.learning_rate=1e-4")),
    "layer-decay-0.9-rate-2e-4": Variant("lower rates in lower layers, at four times the rate",
                                         ("train.layer_decay=0.9", "train.learning_rate=2e-4")),
    "layer-decay-0.8-rate-3e-4": Variant("much lower rates in lower layers, at six times the rate, as ELECTRA-Small",
                                         ("train.layer_decay=0.8", "train.learning_rate=3e-4")),
    "decay-0.1": Variant("ten times the weight decay", ("train.weight_decay=0.1",)),
    "no-decay": Variant("no weight decay", ("train.weight_decay=0",)),
    "reinit-1": Variant("the top layer starts at random", ("reinit_layers=1",), verdict="no gain"),
    "reinit-2": Variant("the top two layers start at random", ("reinit_layers=2",)),
    "frozen-embeddings": Variant("the embeddings are kept", ("frozen_layers=0",)),
    "balanced": Variant("both labels count the same: CoLA has 70 % acceptable sentences", ("data.balanced=true",),
                        tasks=("cola", "sst2", "mrpc", "rte"), verdict="within the noise of the seeds"),
    "beta2-0.98": Variant("a shorter memory of AdamW", ("train.beta2=0.98",)),
    "cosine": Variant("a cosine instead of a line", ("train.schedule=cosine",)),
    "muon": Variant("fine-tuned by Muon, as it was pre-trained",
                    ("train.optimizer=muon", "train.learning_rate=1e-3", "train.rest_learning_rate=1e-4"),
                    verdict="no"),
    "muon-low": Variant("by Muon at a third of that rate",
                        ("train.optimizer=muon", "train.learning_rate=3e-4", "train.rest_learning_rate=1e-4"),
                        verdict="no"),
    "random": Variant("random weights: what fine-tuning alone gives", ("random_start=true",),
                      verdict="so pre-training gives CoLA 13 points of the 23"),
}  # fmt: skip

CONSTANT = "no: a constant answer"
# What other encoders than `JUDGED` say about a way to fine-tune them: by experiment and variant.
VERDICTS = {
    ("12x256", "rate-1e-4"): "within the noise of the other rate; the protocol's own was not tried",
    ("12x256", "rate-2e-4"): "within the noise of the other rate; the protocol's own was not tried",
    ("electra-small", "rate-1e-4"): "the better one of two rates; the protocol's own was not tried",
    ("electra-small", "rate-2e-4"): "no: a constant answer with two of three seeds",
    ("electra-small-1e-3", "rate-1e-4"): CONSTANT,
    ("electra-small-1e-3", "rate-2e-4"): CONSTANT,
    ("electra-small-muon", "rate-1e-4"): CONSTANT,
    ("electra-small-muon", "rate-2e-4"): CONSTANT,
    ("electra-small-muon-slow", "rate-1e-4"): "the better one of two rates, a constant answer with one of three seeds",
    ("electra-small-muon-slow", "rate-2e-4"): CONSTANT,
}

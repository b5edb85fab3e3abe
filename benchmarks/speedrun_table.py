"""The experiments of the speedrun, each with one change beside a base."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

from benchmarks.corpora import Text
from bertsmith.config import dotted_keys, override, to_dict
from bertsmith.errors import UserError
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import recipe
from bertsmith.training.settings import Precision

RECIPE, BASE, WORDPIECE = "roberta-prenorm", "base", "wordpiece"
ROWS = 10_000  # training rows of SST-2, whose 67,349 would take most of the time


@dataclass(frozen=True)
class Experiment:
    """A pre-training run that answers a question by one change beside its `base`, another experiment.

    `base` is empty where it is the recipe itself. `corpus` is a name of `CORPORA`. `needs` is what the package lacks
    for it, apart from settings that it does not know (`lacking`); `verdict` is what its result says, written by hand,
    and empty until it is measured.
    """

    asks: str
    changes: tuple[str, ...] = ()
    base: str = BASE
    corpus: str = WORDPIECE
    needs: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer beside those of `benchmarks.families`."""

    entries: int = 32_000
    kind: str = WORDPIECE
    cased: bool | None = None


VOCABULARIES = {
    "wordpiece-8k": Vocabulary(8_000),
    "wordpiece-16k": Vocabulary(16_000),
    "wordpiece-64k": Vocabulary(64_000),
    "wordpiece-cased": Vocabulary(cased=True),
    "unigram": Vocabulary(kind="unigram"),
}
CORPORA = {
    **{name: Text(name) for name in (WORDPIECE, "bytes", *VOCABULARIES)},
    "wikipedia": Text(WORDPIECE, ("wikipedia",)),
    "books": Text(WORDPIECE, ("books",)),
    "simplewiki": Text(WORDPIECE, ("simplewiki",)),
    "wikipedia-and-books": Text(WORDPIECE, ("wikipedia", "books")),
    "long-documents": Text(WORDPIECE, clean=("clean.min_length=2000",)),
    "duplicates": Text(WORDPIECE, clean=("clean.duplicate_documents=false", "clean.duplicate_paragraphs=false")),
}


def shape(layers: int, hidden: int) -> tuple[str, ...]:
    """The settings of a shape with heads of 64 units and feed-forward layers of four times the width."""
    return (f"model.num_layers={layers}", f"model.hidden_size={hidden}", f"model.num_heads={hidden // 64}",
            f"model.intermediate_size={4 * hidden}")  # fmt: skip


POST_NORM = ("model.family=bert", "model.norm_first=false")
DETECTOR = ("model.family=electra", "model.pooler_activation=gelu", "model.pooler_input_dropout=true",
            "objective.kind=replaced-token", "objective.generator_layers=0.5",
            "data.masking.mask_share=0.85", "data.masking.random_share=0")  # fmt: skip
MODERN = ("model.family=modernbert", "model.num_segments=0", "model.positions=rotary", "model.gated=true",
          "model.first_attention_norm=false", "model.prediction_head=true", "model.pooler_activation=gelu",
          "model.pooling=mean", "model.norm_eps=1e-5", "model.intermediate_size=2048")  # fmt: skip
DISENTANGLED = ("model.family=deberta-v2", "model.norm_first=false", "model.bias=true", "model.num_segments=0",
                "model.norm_eps=1e-7", "model.positions=none", "model.pooler_activation=gelu",
                "model.relative_terms=both", "model.relative_buckets=256", "model.relative_norm=true",
                "model.relative_projections=false", "train.learning_rate=0.01", "train.batch_size=256",
                "train.warmup=0.1", "train.weight_decay=0.2")  # fmt: skip
V3 = ("objective.kind=replaced-token", "objective.generator_size=1", "objective.generator_layers=0.5",
      "objective.disentangled=true", "objective.context=true", "objective.mask_decoder=true",
      "data.masking.rate=0.15", "data.masking.mask_share=1", "data.masking.random_share=0")  # fmt: skip
PAIRS = ("model.num_segments=2", "objective.next_sentence=true")
FP8 = "" if "float8" in get_args(Precision) else "products in FP8"
ENCODER_CODE = "a family that saves this alone; `modern` has it with all the rest of ModernBERT"

EXPERIMENTS = {
    "base": Experiment("what does the recipe `roberta-prenorm` give in these minutes?", base=""),
    "base-seed-2": Experiment("how much does the seed of pre-training change?", ("train.seed=2",)),
    # Pairs: full sentences train neither the second segment nor short sequences.
    "pairs": Experiment("do pairs of segments, without a loss of their own, help tasks with pairs?",
                        ("data.pairs=next",)),
    "nsp": Experiment("does next sentence prediction help?", ("objective.next_sentence=true",), "pairs"),
    "sop": Experiment("does sentence order help?", ("data.pairs=order", "objective.next_sentence=true"), "pairs"),
    "pairs-short": Experiment("do short sequences help, as most tasks have them? half of the pairs are shortened",
                              ("data.short_share=0.5",), "pairs"),
    "contiguous": Experiment("must sequences begin with a sentence?", ("data.pairs=contiguous",)),
    # Objective and masking.
    "post-norm": Experiment("does pre-norm matter, with Muon?", POST_NORM),
    "electra": Experiment("replaced-token detection, which learns from every token (post-norm, as the family is)",
                          DETECTOR, "post-norm"),
    "electra-slow": Experiment("does a high rate keep the discriminator from learning?",
                               ("train.learning_rate=0.005", "train.rest_learning_rate=3e-4"), "electra"),
    "electra-adamw": Experiment("does Muon? AdamW at the published rate of ELECTRA-Base",
                                ("model.bias=true", "train.optimizer=adamw", "train.learning_rate=2e-4",
                                 "train.beta2=0.999", "train.batch_size=256", "data.masking.rate=0.15"), "electra"),
    "12x256": Experiment("masked words in the shape of ELECTRA-Small, in small batches",
                         (*shape(12, 256), "train.batch_size=128", "train.weight_decay=0.01"),
                         verdict="ahead of ELECTRA-Small in the same minutes: CoLA 13.6 at 1e-4, against 8.2"),
    "electra-small": Experiment("ELECTRA-Small as published (12 × 256, AdamW at 5e-4, 128 sequences), without dropout",
                                (*DETECTOR, *POST_NORM[1:], *shape(12, 256), "model.embedding_size=128",
                                 "model.bias=true", "objective.generator_layers=1", "data.masking.rate=0.15",
                                 "train.optimizer=adamw", "train.weight_decay=0.01",
                                 "train.learning_rate=5e-4", "train.beta2=0.999", "train.batch_size=128"),
                                verdict="no: 6,160 steps are few, the detector finds 4 % of the replaced tokens; "
                                        "CoLA 8.2"),
    "electra-small-1e-3": Experiment("twice the rate and the batch",
                                     ("train.learning_rate=1e-3", "train.batch_size=256"), "electra-small",
                                     verdict="no: the generator learns, the detector finds nothing; CoLA 0"),
    "electra-small-muon": Experiment("with Muon", ("train.optimizer=muon", "train.learning_rate=0.01"),
                                     "electra-small",
                                     verdict="no: a better generator, but the detector finds 4 %; CoLA 0"),
    "electra-small-muon-slow": Experiment("with Muon at a third of that rate",
                                          ("train.learning_rate=0.003", "train.rest_learning_rate=5e-4"),
                                          "electra-small-muon",
                                          verdict="no: the detector finds 7 %; CoLA 4.3"),
    "electra-weight-10": Experiment("a smaller weight of the detection", ("objective.detection_weight=10",), "electra"),
    # DeBERTa's attention and v3's objective, which had the best scores of all families after four minutes.
    "disentangled": Experiment("attention with terms of distances, post-norm", DISENTANGLED),
    "v3": Experiment("DeBERTa v3's detection: tables that share no gradients, [CLS] added to every state", V3,
                     "disentangled"),
    "v3-8x512": Experiment("a smaller encoder, three times the tokens", shape(8, 512), "v3"),
    "v3-8x512-fill": Experiment("the detector also fills a quarter of the masks: what does that cost it, or give?",
                                ("objective.fill_every=4", "data.masking.rate=0.2"), "v3-8x512"),
    "v3-8x512-order": Experiment("the detector that fills also learns the order of two segments: does that help tasks "
                                 "with pairs?", ("data.pairs=order", *PAIRS), "v3-8x512-fill"),
    "v3-8x512-next": Experiment("it learns whether the second segment is the next one or a random one",
                                ("data.pairs=next", *PAIRS), "v3-8x512-fill"),
    "v3-6x384-fill": Experiment("two fifths of the weights, twice the tokens: which size is best for so short a run?",
                                shape(6, 384), "v3-8x512-fill"),
    "v3-12x512-fill": Experiment("half as many layers again", shape(12, 512), "v3-8x512-fill"),
    "v3-12x640-fill": Experiment("deeper and wider", shape(12, 640), "v3-8x512-fill"),
    "v3-12x512-order": Experiment("half as many layers again", shape(12, 512), "v3-8x512-order"),
    "v3-12x640-order": Experiment("deeper and wider", shape(12, 640), "v3-8x512-order"),
    "speedrun": Experiment("the recipe `speedrun`: the last tenth of the time in sequences of 512",
                           ("data.long_length=512", "data.long_share=0.1"), "v3-12x512-fill",
                           verdict="GLUE-5 72.0 after four minutes, by the whole protocol"),
    "speedrun-spread": Experiment("the steps with sequences of 512 are spread over the run: does its end in long "
                                  "sequences cost short texts, as most tasks have them?", ("data.long_last=false",),
                                  "speedrun",
                                  verdict="open: all held-out losses are lower, and CoLA is lower by four points"),
    "speedrun-varied": Experiment("half of the sequences are shortened to a random length",
                                  ("data.pairs=varied", "data.short_share=0.5"), "speedrun-spread",
                                  verdict="open: the detector is not worse with fewer tokens, the generator is better"),
    "v3-12x512": Experiment("deeper than v3-8x512", shape(12, 512), "v3"),
    "v3-12x384": Experiment("deep and narrow", shape(12, 384), "v3"),
    "v3-quarter": Experiment("a generator of a quarter of the layers", ("objective.generator_layers=0.25",), "v3"),
    "v3-no-context": Experiment("without [CLS] in every state", ("objective.context=false",), "v3"),
    "v3-mask-25": Experiment("25 % masked, so that more tokens are replaced", ("data.masking.rate=0.25",), "v3"),
    "v3-batch-512": Experiment("twice the batch, half the steps", ("train.batch_size=512",), "v3"),
    "mask-15": Experiment("15 % masked", ("data.masking.rate=0.15",)),
    "mask-30": Experiment("30 % masked", ("data.masking.rate=0.3",)),
    "mask-40": Experiment("40 % masked", ("data.masking.rate=0.4",)),
    "mask-only": Experiment("every chosen token is masked, instead of 80/10/10",
                            ("data.masking.mask_share=1", "data.masking.random_share=0")),
    "mask-words": Experiment("whole words are masked", ("data.masking.unit=word",)),
    "mask-spans": Experiment("spans of words are masked", ("data.masking.unit=span",)),
    # Shape, all with equal time.
    "24x512": Experiment("deep and narrow", shape(24, 512)),
    "16x640": Experiment("a little deeper", shape(16, 640)),
    "7x1024": Experiment("shallow and wide", shape(7, 1024)),
    "6x768": Experiment("half the layers, twice the tokens", shape(6, 768)),
    "12x512": Experiment("a smaller encoder, twice the tokens", shape(12, 512)),
    "6-heads": Experiment("heads of 128 units", ("model.num_heads=6",)),
    "feed-forward-2": Experiment("feed-forward layers of twice the width", ("model.intermediate_size=1536",)),
    # Architecture.
    "modern": Experiment("rotary positions, gates, no segments, the mean of all states behind the masked-word head's "
                         "layer: the ModernBERT form with equal parameters", MODERN),
    "modern-cls": Experiment("the same, classified from [CLS]", ("model.pooling=cls",), "modern"),
    "modern-silu": Experiment("SwiGLU instead of GeGLU", ("model.activation=silu", "model.head_activation=gelu"),
                              "modern"),
    "modern-24x512": Experiment("the same, deep and narrow", (*shape(24, 512), "model.intermediate_size=1344"),
                                "modern"),
    "relu": Experiment("a cheaper activation", ("model.activation=relu", "model.head_activation=gelu")),
    "gelu-tanh": Experiment("the tanh form of GELU", ("model.activation=gelu_tanh", "model.head_activation=gelu")),
    "bias": Experiment("do biases matter?", ("model.bias=true",)),
    "init-0.01": Experiment("smaller weights at the start", ("model.init_std=0.01",)),
    "dropout": Experiment("dropout 0.1 in pre-training, so that fine-tuning's is nothing new",
                          ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")),
    # Optimiser.
    "muon-0.01": Experiment("half of Muon's rate", ("train.learning_rate=0.01",)),
    "muon-0.04": Experiment("twice Muon's rate", ("train.learning_rate=0.04",)),
    "rest-5e-4": Experiment("half the rate of embeddings and norms", ("train.rest_learning_rate=5e-4",)),
    "rest-2e-3": Experiment("twice the rate of embeddings and norms", ("train.rest_learning_rate=2e-3",)),
    "rest-4e-3": Experiment("four times that rate", ("train.rest_learning_rate=4e-3",)),
    "momentum-0.9": Experiment("a shorter momentum", ("train.momentum=0.9",)),
    "beta2-0.95": Experiment("a shorter memory of AdamW", ("train.beta2=0.95",)),
    "decay-0.01": Experiment("a tenth of the weight decay, as the recipe once had", ("train.weight_decay=0.01",),
                             verdict="open: the recipe with its decay of 0.1 has not been run in these minutes"),
    "decay-0.05": Experiment("half of the weight decay", ("train.weight_decay=0.05",)),
    "decay-0.2": Experiment("twice the weight decay: does more of it leave an encoder that fine-tuning changes more "
                            "easily?", ("train.weight_decay=0.2",)),
    "decay-0.4": Experiment("four times", ("train.weight_decay=0.4",)),
    "modern-decay-0.01": Experiment("the ModernBERT form with a tenth", ("train.weight_decay=0.01",), "modern"),
    "decay-0": Experiment("no weight decay", ("train.weight_decay=0",)),
    "adamw": Experiment("is it Muon?", ("train.optimizer=adamw", "train.learning_rate=1e-3")),
    "no-clipping": Experiment("no clipping of gradients", ("train.clip_norm=0",)),
    # Schedule, batch and length.
    "stable-0.5": Experiment("a constant rate, which falls in the second half",
                             ("train.schedule=stable", "train.decay=0.5")),
    "stable-0.2": Experiment("a constant rate, which falls in the last fifth",
                             ("train.schedule=stable", "train.decay=0.2")),
    "cosine": Experiment("a cosine", ("train.schedule=cosine",)),
    "warm-up-0.15": Experiment("three times the warm-up", ("train.warmup=0.15",)),
    "warm-up-0.01": Experiment("nearly no warm-up", ("train.warmup=0.01",)),
    "batch-256": Experiment("half the batch, twice the steps", ("train.batch_size=256",)),
    "batch-1024": Experiment("twice the batch, half the steps", ("train.batch_size=1024",)),
    "length-64": Experiment("sequences of 64 tokens, as many tokens a step",
                            ("data.max_length=64", "train.batch_size=1024")),
    "length-256": Experiment("sequences of 256 tokens, as many tokens a step",
                             ("data.max_length=256", "train.batch_size=256")),
    "length-64-then-128": Experiment("64 tokens in the first 70 %, then 128, of as many sequences",
                                     ("data.max_length=64", "data.long_length=128", "data.long_share=0.3")),
    # Vocabulary and text: losses compare by bits per byte, and those of other texts not at all.
    "vocabulary-8k": Experiment("8,000 entries", corpus="wordpiece-8k"),
    "vocabulary-16k": Experiment("16,000 entries", corpus="wordpiece-16k"),
    "vocabulary-64k": Experiment("64,000 entries", corpus="wordpiece-64k"),
    "cased": Experiment("capitals and accents kept", corpus="wordpiece-cased"),
    "bytes": Experiment("byte-level BPE, with capitals", corpus="bytes"),
    "unigram": Experiment("a Unigram vocabulary", corpus="unigram"),
    "wikipedia": Experiment("English Wikipedia alone", corpus="wikipedia"),
    "books": Experiment("books alone", corpus="books"),
    "simplewiki": Experiment("Simple English Wikipedia alone", corpus="simplewiki"),
    "wikipedia-and-books": Experiment("no Simple English Wikipedia", corpus="wikipedia-and-books"),
    "long-documents": Experiment("no documents under 2,000 characters", corpus="long-documents"),
    "duplicates": Experiment("duplicate documents and paragraphs kept", corpus="duplicates"),
    # Settings that a version of the package may lack; `lacking` says so.
    "falling-rate": Experiment("a masking rate that falls from 30 to 15 % during the run",
                               ("data.masking.rate=0.3", "data.masking.final_rate=0.15")),
    "late-masks": Experiment("masked tokens enter above half of the layers, so that 40 % of them cost less",
                             ("objective.unmasked_layers=6",), "mask-40"),
    "late-masks-9": Experiment("they enter above three quarters of the layers", ("objective.unmasked_layers=9",),
                               "mask-40"),
    "causal-and-masked": Experiment("every eighth sequence predicts next words, as in GPT-BERT",
                                    ("objective.causal_share=0.125",)),
    "half-causal": Experiment("half of the sequences predict next words", ("objective.causal_share=0.5",)),
    "averaged": Experiment("the mean of the weights of the last fifth", ("train.average=1", "train.average_from=0.8")),
    "averaged-constant": Experiment("an average in place of a falling rate",
                                    ("train.schedule=constant", "train.average=0.998")),
    "value-residuals": Experiment("values of the first layer added in every layer", ("model.value_residual=true",)),
    "embedding-residuals": Experiment("embeddings added to the input of every layer",
                                      ("model.embedding_residual=true",)),
    "growing-length": Experiment("64 tokens in the first 30 %, then 128, with as many tokens a step",
                                 ("data.phases=[[0.3, 64, 1024], [0.7, 128, 512]]",)),
    "growing-batch": Experiment("half the batch in the first 30 %",
                                ("data.phases=[[0.3, 128, 256], [0.7, 128, 512]]",)),
    "fp8": Experiment("matrix products in FP8", ("train.precision=float8",), needs=FP8),
    # What no version has.
    "rotary": Experiment("rotary positions alone", needs=ENCODER_CODE),
    "gated": Experiment("gated feed-forward layers alone", needs=ENCODER_CODE),
    "no-embedding-norm": Experiment("no norm of the embeddings", needs=ENCODER_CODE),
    "full-short": Experiment("short sequences among full sentences", ("data.pairs=varied", "data.short_share=0.5")),
    "simplewiki-first": Experiment("simple text first, the rest later", needs="an order of sources in an epoch"),
    "electra-pre-norm": Experiment("replaced-token detection with pre-norm",
                                   needs="a detector in the family of pre-norm encoders"),
}  # fmt: skip


def chain(name: str) -> list[str]:
    """An experiment and those it is based on, the recipe's own first."""
    found = [name]
    while base := EXPERIMENTS[found[0]].base:
        found.insert(0, base)
    return found


def lacking(name: str) -> str:
    """What the package lacks for an experiment; empty if it can run."""
    known = set(dotted_keys(PretrainConfig))
    keys = [change.partition("=")[0] for each in chain(name) for change in EXPERIMENTS[each].changes]
    unknown = [f"the setting {key}" for key in keys if key not in known]
    return EXPERIMENTS[name].needs or ", ".join(unknown)


def pretraining_config(name: str, minutes: float, settings: list[str], smoke: bool) -> PretrainConfig:
    """The recipe with the changes of an experiment and of those it is based on, for some minutes.

    It is evaluated at its end only, because evaluations take time of the clock.
    """
    if needs := lacking(name):
        raise UserError(f"the experiment {name} cannot run yet: it needs {needs}")
    config = recipe(RECIPE)
    train = replace(config.train, hours=minutes / 60, evaluate_every=0, workers=12)
    config = replace(config, recipe=name, train=train)
    config = override(config, [*(change for each in chain(name) for change in EXPERIMENTS[each].changes), *settings])
    return _small(config) if smoke else config


SMALL = (
    "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", "model.intermediate_size=64",
    "model.max_positions=64", "train.steps=3", "train.batch_size=8", "train.workers=0", "train.precision=auto",
)  # fmt: skip


def _small(config: PretrainConfig) -> PretrainConfig:
    """The same in a tiny shape, for three steps."""
    data, objective, changes = to_dict(config.data), to_dict(config.objective), [*SMALL]
    lengths = ["data.max_length=32", "data.long_length=64"] if data["long_length"] else ["data.max_length=64"]
    if data.get("phases"):
        lengths.append("data.phases=[[0.5, 32, 8], [0.5, 64, 8]]")
    if config.model.relative_buckets:
        changes.append("model.relative_buckets=32")
    if objective.get("unmasked_layers"):
        changes.append("objective.unmasked_layers=1")
    return override(config, [*changes, *lengths])

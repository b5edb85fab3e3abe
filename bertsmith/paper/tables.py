"""The paper's tables, one function each: the rows that are run, and the paper's scores."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace

from bertsmith.family_recipes import elmo, gpt
from bertsmith.model.recurrent import VARIANTS
from bertsmith.pretraining.settings import PretrainConfig
from bertsmith.recipes import (
    TABLE_6,
    TABLE_8,
    bert,
    left_to_right,
    masked,
    no_nsp,
    right_to_left,
    sized,
)
from bertsmith.tasks.glue_average import PAPER_COLUMNS
from bertsmith.tasks.published import AVERAGES, BASE, LARGE, paper_scores

Figures = tuple[float | None, ...]
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)  # of a pre-training run, at which figure 5 evaluates
DEV = "Our scores are on dev, the paper's are from the test server: other rows, so small differences mean nothing."
MIX = "mix-all"  # how ELMo is used: frozen, with a learned mix of its layers
ON_ELMO = (
    "On ELMo's features there is one model for all tasks, a BiLSTM with attention, where the paper has "
    "{} for this table; our row stands for it."
)
GLUE = "F1 for QQP and MRPC; WNLI is left out. The official leaderboard gave BERT-Large 80.5 and OpenAI GPT 72.8."


@dataclass(frozen=True)
class Column:
    """A score on dev rows of a task (`features`: of a BiLSTM on the frozen encoder), or of pre-training (no task)."""

    name: str
    task: str = ""
    key: str = "accuracy"
    features: str = ""
    why_not: str = ""  # the reason why it cannot be measured
    lower_is_better: bool = False

    @property
    def run(self) -> str:
        """The name of the fine-tuning run that gives this score."""
        return f"{self.task}-{self.features}" if self.features else self.task


@dataclass(frozen=True)
class Row:
    """A row of a table: the paper's scores and, if we run it, the pre-training that it starts from.

    `features` and `bilstm_layers` change the fine-tuning; `beside` is a second encoder for it; `share` takes the
    checkpoint after that share of the run. `why_not` is the reason why a row is not run.
    """

    name: str
    paper: Figures
    start: PretrainConfig | None = None
    features: str = ""
    bilstm_layers: int = 0
    beside: PretrainConfig | None = None
    share: float = 1.0
    why_not: str = "another system"
    series: str = ""  # the curve of a figure that the row belongs to

    @property
    def starts(self) -> list[PretrainConfig]:
        """The pre-training runs that the row needs."""
        return [start for start in (self.start, self.beside) if start is not None]


@dataclass(frozen=True)
class Finding:
    """A finding of the paper: the first row of each pair is better than the second, or no worse with `or_equal`.

    It is checked in these columns, or in all of them.
    """

    text: str
    pairs: tuple[tuple[str, str], ...]
    columns: tuple[str, ...] = ()
    or_equal: bool = False


@dataclass(frozen=True)
class Table:
    """A table of the paper that the command runs and prints."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    average: bool = False  # the last column is the mean of the others
    findings: tuple[Finding, ...] = ()


def run_name(start: PretrainConfig) -> str:
    """Return the name of a pre-training run: that of its recipe, with the seed if it is not the first."""
    return start.recipe if start.train.seed == 1 else f"{start.recipe}-seed-{start.train.seed}"


def with_seed(row: Row, seed: int) -> Row:
    """Return a row whose pre-training, also that of a second encoder, has this seed."""

    def seeded(start: PretrainConfig | None) -> PretrainConfig | None:
        return None if start is None else replace(start, train=replace(start.train, seed=seed))

    return replace(row, start=seeded(row.start), beside=seeded(row.beside))


def is_chosen(row: Row, chosen: Container[str]) -> bool:
    """Return whether a row is chosen, by its name in lower case or by the recipes of its pre-training."""
    needed = [start.recipe for start in row.starts]
    return bool(needed) and (row.name.lower() in chosen or all(name in chosen for name in needed))


def only_of(table: Table, models: Container[str]) -> Table:
    """Return a table in which only the rows that start from the given models are run."""

    def row_of(row: Row) -> Row:
        needed = [start.recipe for start in row.starts]
        missing = [name for name in needed if name not in models]
        why = f"no --model {missing[0]}=… was given" if missing else "it needs the checkpoints of a pre-training run"
        return replace(row, start=None, beside=None, why_not=why) if missing or (needed and row.series) else row

    return replace(table, rows=tuple(map(row_of, table.rows)))


MNLI = Column("MNLI-m", "mnli")
SST2 = Column("SST-2", "sst2")
MRPC = Column("MRPC", "mrpc")
HIDDEN = tuple(Column(f"test {name}", why_not="SQuAD's test rows are not public") for name in ("EM", "F1"))

OURS = (
    Column("CoLA", "cola", "matthews"),
    Column("RTE", "rte"),
    Column("STS-B", "stsb", "spearman"),
    Column("CoNLL-2003", "conll2003", "f1"),
)


def dev_and_test(*columns: tuple[str, str], size: int) -> Figures:
    """Return the paper's dev scores of some tasks and metrics, then their test scores."""
    return (*paper_scores(columns, size, "dev"), *paper_scores(columns, size, "test"))


def _above(name: str, rows: Sequence[Row]) -> tuple[tuple[str, str], ...]:
    """Return the pairs of a row that is better than each of some others."""
    return tuple((name, row.name) for row in rows)


def table1() -> Table:
    """GLUE, with each task fine-tuned alone."""
    columns = (
        MNLI,
        Column("MNLI-mm", "mnli", "mismatched_accuracy"),
        Column("QQP", "qqp", "f1"),
        Column("QNLI", "qnli"),
        SST2,
        Column("CoLA", "cola", "matthews"),
        Column("STS-B", "stsb", "spearman"),
        Column("MRPC", "mrpc", "f1"),
        Column("RTE", "rte"),
        Column("average"),
    )
    rows = (
        Row("Pre-OpenAI SOTA", (80.6, 80.1, 66.1, 82.3, 93.2, 35.0, 81.0, 86.0, 61.7, 74.0)),
        Row(
            "BiLSTM+ELMo+Attn",
            (76.4, 76.1, 64.8, 79.8, 90.4, 36.0, 73.3, 84.9, 56.8, 71.0),
            elmo("base"),
            features=MIX,
        ),
        Row("OpenAI GPT", (82.1, 81.4, 70.3, 87.4, 91.3, 45.4, 80.0, 82.3, 56.0, 75.1), gpt("base")),
        Row("BERT-Base", (*paper_scores(PAPER_COLUMNS, BASE, "test"), AVERAGES[BASE]), bert("base")),
        Row("BERT-Large", (*paper_scores(PAPER_COLUMNS, LARGE, "test"), AVERAGES[LARGE]), bert("large")),
    )
    findings = (Finding("BERT is better than OpenAI GPT and than ELMo", _above("BERT-Base", rows[1:3])),)
    return Table("table1", "GLUE", columns, rows, (DEV, GLUE), average=True, findings=findings)


def table2() -> Table:
    """SQuAD 1.1."""
    columns = (Column("EM", "squad1", "exact_match"), Column("F1", "squad1", "f1"), *HIDDEN)
    several = "an ensemble of seven pre-trained models; `bertsmith evaluate RUN…` scores one of fine-tuned runs"
    more = "TriviaQA is needed"
    rows = (
        Row("BiDAF+ELMo", (None, 85.6, None, None), elmo("base"), features=MIX),
        Row("BERT-Base", dev_and_test(("squad1", "exact_match"), ("squad1", "f1"), size=BASE), bert("base")),
        Row("BERT-Large", dev_and_test(("squad1", "exact_match"), ("squad1", "f1"), size=LARGE), bert("large")),
        Row("BERT-Large ensemble", (85.8, 91.8, None, None), why_not=several),
        Row("BERT-Large + TriviaQA", (84.2, 91.1, 85.1, 91.8), why_not=more),
        Row("BERT-Large ensemble + TriviaQA", (86.2, 92.2, 87.4, 93.2), why_not=more),
    )
    findings = (Finding("BERT is better than ELMo", _above("BERT-Base", rows[:1])),)
    return Table("table2", "SQuAD 1.1", columns, rows, (ON_ELMO.format("BiDAF"),), findings=findings)


def table3() -> Table:
    """SQuAD 2.0."""
    columns = (Column("EM", "squad2", "exact_match"), Column("F1", "squad2", "f1"), *HIDDEN)
    rows = (
        Row("BERT-Base", dev_and_test(("squad2", "exact_match"), ("squad2", "f1"), size=BASE), bert("base")),
        Row("BERT-Large", dev_and_test(("squad2", "exact_match"), ("squad2", "f1"), size=LARGE), bert("large")),
    )
    return Table("table3", "SQuAD 2.0", columns, rows)


def table4() -> Table:
    """SWAG."""
    columns = (Column("dev", "swag"), Column("test", why_not="the labels of SWAG's test rows are not public"))
    rows = (
        Row("ESIM+GloVe", (51.9, 52.7)),
        Row("ESIM+ELMo", (59.1, 59.2), elmo("base"), features=MIX),
        Row("OpenAI GPT", (None, 78.0), gpt("base")),
        Row("BERT-Base", dev_and_test(("swag", "accuracy"), size=BASE), bert("base")),
        Row("BERT-Large", dev_and_test(("swag", "accuracy"), size=LARGE), bert("large")),
    )
    findings = (Finding("BERT is better than OpenAI GPT and than ELMo", _above("BERT-Base", rows[1:3])),)
    return Table("table4", "SWAG", columns, rows, (ON_ELMO.format("ESIM"),), findings=findings)


def table5() -> Table:
    """Ablation over the pre-training tasks."""
    columns = (MNLI, Column("QNLI", "qnli"), MRPC, SST2, Column("SQuAD", "squad1", "f1"), *OURS)
    none = (None,) * len(OURS)
    rows = (
        Row("BERT-Base", (84.4, 88.4, 86.7, 92.7, 88.5, *none), bert("base")),
        Row("No NSP", (83.9, 84.9, 86.5, 92.6, 87.9, *none), no_nsp("base")),
        Row("LTR & No NSP", (82.1, 84.3, 77.5, 92.1, 77.8, *none), left_to_right("base")),
        Row("+ BiLSTM", (82.1, 84.1, 75.7, 91.6, 84.9, *none), left_to_right("base"), bilstm_layers=1),
        Row("LTR beside RTL", (None,) * len(columns), left_to_right("base"), beside=right_to_left("base")),
        Row("OpenAI GPT", (None,) * len(columns), gpt("base")),
        Row("ELMo", (None,) * len(columns), elmo("base"), features=MIX),
    )
    notes = (
        "CoLA, RTE, STS-B and CoNLL-2003 are ours: the paper's table does not have them.",
        "The BiLSTM has one layer as wide as the encoder; the paper gives no size.",
        "LTR beside RTL is discussed in section 5.1, without figures; two encoders, so twice the tokens.",
        "OpenAI GPT and ELMo are not in the paper's table; they have their own vocabularies and encoders.",
    )
    base, no_pairs, one_way, recurrent, two_ways, *_ = (row.name for row in rows)
    glue = ("MNLI-m", "QNLI", "MRPC", "SST-2")
    findings = (
        Finding("next sentence prediction helps", ((base, no_pairs),), ("MNLI-m", "QNLI", "SQuAD")),
        Finding("both directions beat left to right, most on MRPC and SQuAD", ((no_pairs, one_way),)),
        Finding("a BiLSTM on top of left to right helps to find spans", ((recurrent, one_way),), ("SQuAD",)),
        Finding("and does not help on GLUE", ((one_way, recurrent),), glue, or_equal=True),
        Finding("two directions trained apart are weaker than both together", ((no_pairs, two_ways),)),
        Finding("BERT is better than OpenAI GPT and than ELMo (Tables 1, 2 and 4)", _above(base, rows[-2:])),
    )
    return Table("table5", "Pre-training tasks, dev", columns, rows, notes, findings=findings)


def table6() -> Table:
    """Ablation over the model size."""
    figures = (
        (5.84, 77.9, 79.8, 88.4),
        (5.24, 80.6, 82.2, 90.7),
        (4.68, 81.9, 84.8, 91.3),
        (3.99, 84.4, 86.7, 92.9),
        (3.54, 85.7, 86.9, 93.3),
        (3.23, 86.6, 87.8, 93.7),
    )
    columns = (Column("LM perplexity", key="mlm_perplexity", lower_is_better=True), MNLI, MRPC, SST2)
    starts = {(12, 768, 12): bert("base"), (24, 1024, 16): bert("large")}
    rows = tuple(
        Row(f"{layers} / {hidden} / {heads}", paper, starts.get(shape) or sized(*shape))
        for shape, paper in zip(TABLE_6, figures, strict=True)
        for layers, hidden, heads in (shape,)
    )
    notes = ("Rows are the paper's layers / hidden size / heads; smaller scales keep their ratios.",)
    names = [row.name for row in rows]
    findings = (Finding("larger is better, at every step", tuple(zip(names[1:], names, strict=False))),)
    return Table("table6", "Size of the model, dev", columns, rows, notes, findings=findings)


def table7() -> Table:
    """Named entities: fine-tuning, and a BiLSTM on features."""
    columns = (Column("dev F1", "conll2003", "f1"), Column("test F1", "conll2003", "test_f1"))
    figures = {"embeddings": 91.0, "second-to-last": 95.6, "last": 94.9}
    figures |= {"sum-last-four": 95.9, "concat-last-four": 96.1, "sum-all": 95.5}
    rows = (
        Row("ELMo", (95.7, 92.2), elmo("base"), features=MIX),
        Row("CVT", (None, 92.6)),
        Row("CSE", (None, 93.1)),
        Row("BERT-Large, fine-tuned", dev_and_test(("conll2003", "f1"), size=LARGE), bert("large")),
        Row("BERT-Base, fine-tuned", dev_and_test(("conll2003", "f1"), size=BASE), bert("base")),
        *(Row(f"BERT-Base, {name}", (figures[name], None), bert("base"), features=name) for name in VARIANTS),
    )
    notes = ("The paper's vocabulary is cased; ours is the corpus's. The paper's figures are means of five runs.",)
    elmo_row, large, base, *features = (row.name for row in rows if row.start is not None)
    best = f"{base.split(',')[0]}, concat-last-four"
    findings = (
        Finding("Large is better than Base", ((large, base),)),
        Finding(
            "the last four layers side by side are the best features",
            tuple((best, other) for other in features if other != best),
            ("dev F1",),
        ),
        Finding("fine-tuning is better than the best features", ((base, best),)),
        Finding("BERT is better than ELMo", ((base, elmo_row),)),
    )
    return Table("table7", "CoNLL-2003 named entities", columns, rows, notes, findings=findings)


def table8() -> Table:
    """Ablation over the masking procedure."""
    columns = (
        MNLI,
        Column("NER, fine-tuned", "conll2003", "f1"),
        Column("NER, features", "conll2003", "f1", "concat-last-four"),
    )
    upper = ((84.2, 95.4, 94.9), (84.3, 94.9, 94.0), (84.1, 95.2, 94.6))
    lower = ((84.4, 95.2, 94.7), (83.7, 94.8, 94.6), (83.6, 94.9, 94.6))
    rows = tuple(
        Row(" / ".join(map(str, shares)), paper, masked(*shares) if number else bert("base"))
        for number, (shares, paper) in enumerate(zip(TABLE_8, upper + lower, strict=True))
    )
    own, *others = (row.name for row in rows)
    tuned = tuple(column.name for column in columns if not column.features)
    findings = (
        Finding("no other shares are better for fine-tuning", tuple((own, o) for o in others), tuned, or_equal=True),
        Finding("[MASK] alone hurts features", ((own, others[0]),), ("NER, features",)),
        Finding("random words alone are worse", ((own, others[-1]),)),
    )
    return Table("table8", "Masking: [MASK] / same / random per cent, dev", columns, rows, findings=findings)


def figure5() -> Table:
    """Accuracy over the steps of pre-training, for masked words and left-to-right."""
    starts = {"masked words": bert("base"), "left to right": left_to_right("base")}
    rows = tuple(
        Row(f"{series}, {share:.0%} of the steps", (None, None), start, share=share, series=series)
        for series, start in starts.items()
        for share in SHARES
    )
    notes = (
        "The paper draws MNLI alone, up to 1,000,000 steps, and gives no figures.",
        "The run on masked words also has next sentence prediction, the left-to-right run does not, as in Table 5.",
    )
    early, late = rows[1].name, rows[len(SHARES) - 1].name
    findings = (
        Finding("more steps help", ((late, early),)),
        Finding("masked words end above left to right", ((late, rows[-1].name),)),
    )
    return Table("figure5", "Accuracy against pre-training steps", (MNLI, SST2), rows, notes, findings=findings)


TABLES: dict[str, Callable[[], Table]] = {
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "table4": table4,
    "table5": table5,
    "table6": table6,
    "table7": table7,
    "table8": table8,
    "figure5": figure5,
}

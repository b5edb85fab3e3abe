"""bertsmith: raw text to a working BERT.

What the commands do, functions do here: `bertsmith.train_tokenizer`, `build_corpus`, `pretrain`, `finetune`,
`evaluate`, `predict`, … The names are imported when they are first used, so `import bertsmith` is fast and does not
import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.config import override as override
    from bertsmith.conversion import convert as convert
    from bertsmith.corpus.build import build_corpus as build_corpus
    from bertsmith.corpus.doctor.examination import examine as examine
    from bertsmith.corpus.vocabulary import train_tokenizer as train_tokenizer
    from bertsmith.errors import UserError as UserError
    from bertsmith.finetuning.protocols import finetune_many as finetune_many
    from bertsmith.finetuning.protocols import glue as glue
    from bertsmith.finetuning.run import finetune as finetune
    from bertsmith.finetuning.settings import FinetuneConfig as FinetuneConfig
    from bertsmith.formats.feature_store import Features as Features
    from bertsmith.inference.embedder import Embedder as Embedder
    from bertsmith.inference.embedder import embed as embed
    from bertsmith.inference.features import features as features
    from bertsmith.inference.files import evaluate as evaluate
    from bertsmith.inference.files import fill as fill
    from bertsmith.inference.files import predict as predict
    from bertsmith.inference.predictor import Predictor as Predictor
    from bertsmith.model.config import EncoderConfig as EncoderConfig
    from bertsmith.pages.report.page_of_runs import report as report
    from bertsmith.pages.view import view as view
    from bertsmith.paper.reproduce import reproduce as reproduce
    from bertsmith.pretraining.run import pretrain as pretrain
    from bertsmith.pretraining.settings import PretrainConfig as PretrainConfig
    from bertsmith.recipes import recipe as recipe
    from bertsmith.serve.client import Client as Client
    from bertsmith.text.tokenizer import Tokenizer as Tokenizer
    from bertsmith.training.settings import TrainConfig as TrainConfig
    from bertsmith.verify import verify_resume as verify_resume

__version__ = "0.1.0"

# Public name -> the module that defines it. No module of the package may have the name of a public function: importing
# it would put the module in the function's place (`tests/test_public_names.py`).
_MODULES = {
    "Client": "serve.client",
    "EncoderConfig": "model.config",
    "Embedder": "inference.embedder",
    "Features": "formats.feature_store",
    "FinetuneConfig": "finetuning.settings",
    "Predictor": "inference.predictor",
    "PretrainConfig": "pretraining.settings",
    "Tokenizer": "text.tokenizer",
    "TrainConfig": "training.settings",
    "UserError": "errors",
    "build_corpus": "corpus.build",
    "convert": "conversion",
    "embed": "inference.embedder",
    "evaluate": "inference.files",
    "examine": "corpus.doctor.examination",
    "features": "inference.features",
    "fill": "inference.files",
    "finetune": "finetuning.run",
    "finetune_many": "finetuning.protocols",
    "glue": "finetuning.protocols",
    "override": "config",
    "predict": "inference.files",
    "pretrain": "pretraining.run",
    "recipe": "recipes",
    "report": "pages.report.page_of_runs",
    "reproduce": "paper.reproduce",
    "train_tokenizer": "corpus.vocabulary",
    "verify_resume": "verify",
    "view": "pages.view",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'bertsmith' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"bertsmith.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})

"""bertsmith: raw text to a working BERT.

Every command is a function of the same name here: `bertsmith.train_tokenizer`, `build_corpus`, `pretrain`, `finetune`,
`evaluate`, `predict`, … The names are imported when they are first used, so `import bertsmith` is fast and does not
import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bertsmith.answers import evaluate as evaluate
    from bertsmith.answers import fill as fill
    from bertsmith.answers import predict as predict
    from bertsmith.config import override as override
    from bertsmith.conversion import convert as convert
    from bertsmith.data.build import build_corpus as build_corpus
    from bertsmith.data.doctor import examine as examine
    from bertsmith.data.vocabulary import train_tokenizer as train_tokenizer
    from bertsmith.embedder import Embedder as Embedder
    from bertsmith.embedder import embed as embed
    from bertsmith.errors import UserError as UserError
    from bertsmith.finetune_settings import FinetuneConfig as FinetuneConfig
    from bertsmith.finetuning import finetune as finetune
    from bertsmith.formats.feature_store import Features as Features
    from bertsmith.model.config import EncoderConfig as EncoderConfig
    from bertsmith.paper.reproduce import reproduce as reproduce
    from bertsmith.predictor import Predictor as Predictor
    from bertsmith.pretraining import PretrainConfig as PretrainConfig
    from bertsmith.pretraining import pretrain as pretrain
    from bertsmith.protocols import finetune_many as finetune_many
    from bertsmith.protocols import glue as glue
    from bertsmith.recipes import recipe as recipe
    from bertsmith.reports.page_of_runs import report as report
    from bertsmith.text.tokenizer import Tokenizer as Tokenizer
    from bertsmith.text_view import view as view
    from bertsmith.training.settings import TrainConfig as TrainConfig
    from bertsmith.verify import verify_resume as verify_resume
    from bertsmith.word_features import features as features

__version__ = "0.1.0"

# Public name -> the module that defines it. No module of the package may have the name of a public function: importing
# it would put the module in the function's place (`tests/test_public_names.py`).
_MODULES = {
    "EncoderConfig": "model.config",
    "Embedder": "embedder",
    "Features": "formats.feature_store",
    "FinetuneConfig": "finetune_settings",
    "Predictor": "predictor",
    "PretrainConfig": "pretraining",
    "Tokenizer": "text.tokenizer",
    "TrainConfig": "training.settings",
    "UserError": "errors",
    "build_corpus": "data.build",
    "convert": "conversion",
    "embed": "embedder",
    "evaluate": "answers",
    "examine": "data.doctor",
    "features": "word_features",
    "fill": "answers",
    "finetune": "finetuning",
    "finetune_many": "protocols",
    "glue": "protocols",
    "override": "config",
    "predict": "answers",
    "pretrain": "pretraining",
    "recipe": "recipes",
    "report": "reports.page_of_runs",
    "reproduce": "paper.reproduce",
    "train_tokenizer": "data.vocabulary",
    "verify_resume": "verify",
    "view": "text_view",
}

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'bertsmith' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"bertsmith.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})

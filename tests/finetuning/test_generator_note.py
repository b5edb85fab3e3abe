"""Fine-tuning says that a folder holds a generator, and only where it does."""

from pathlib import Path

import pytest
from variants import DEBERTA, V2

from bertsmith.finetuning.model import start_model
from bertsmith.finetuning.settings import FinetuneConfig
from bertsmith.formats.hf import Notes, save_folder
from bertsmith.model.config import EncoderConfig
from bertsmith.model.encoder import Encoder
from bertsmith.model.heads import HeadConfig
from bertsmith.objectives.masked_lm import MaskedLM
from bertsmith.objectives.objective import GENERATOR
from bertsmith.objectives.settings import MaskedLMConfig

FAMILIES = {"deberta": {**DEBERTA, "key_bias": False}, "deberta-v2": {**DEBERTA, **V2}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_deberta_with_a_masked_word_head_is_no_generator_but_in_its_folder(
    family: str, tmp_path: Path, tiny_tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EncoderConfig(tiny_tokenizer.vocab_size, 32, 2, 2, 48, max_positions=40, family=family, **FAMILIES[family])
    for name in ("model", GENERATOR):
        objective = MaskedLM(Encoder(config), MaskedLMConfig(next_sentence=False))
        save_folder(tmp_path / name, objective, tiny_tokenizer, Notes())
        start_model(tmp_path / name, HeadConfig("single", ("a", "b")), FinetuneConfig("classify"))
        assert ("a generator; the model to fine-tune is its" in capsys.readouterr().err) == (name == GENERATOR)

"""The table of families, and the family of a saved configuration or of an encoder.

The names of `transformers` are only in the modules of this folder.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError, suggestion
from bertsmith.formats.families.albert import ALBERT
from bertsmith.formats.families.bert import BERT
from bertsmith.formats.families.deberta import DEBERTA, DEBERTA_V2
from bertsmith.formats.families.distilbert import DISTILBERT
from bertsmith.formats.families.electra import ELECTRA
from bertsmith.formats.families.elmo import ELMO
from bertsmith.formats.families.modernbert import MODERNBERT
from bertsmith.formats.families.openai_gpt import OPENAI_GPT
from bertsmith.formats.families.roberta import CAMEMBERT, ROBERTA, ROBERTA_PRELAYERNORM, XLM_ROBERTA
from bertsmith.formats.family import Family, Output
from bertsmith.model.config import EncoderConfig

# A model that `transformers` has no class for must not be opened as another one: it has a `model_type` and a class of
# our own.
OWN_CLASS = "Bertsmith"
FEATURE_CLASSES = {  # a model on the features of a frozen encoder, by the kind of its head
    "tags": "BertsmithFeatureTagger",
    "single": "BertsmithFeatureClassifier",
    "choice": "BertsmithFeatureChooser",
    "span": "BertsmithFeatureReader",
}
OWN_TYPE = re.compile(r"bertsmith-(features|bilstm|two-encoders|right-to-left|tokens)-")

VERY_CLOSE = 0.9  # of a misspelt family; other families are often called nearly the same (`ibert`, `bart`)
LISTED = (
    *(BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ROBERTA_PRELAYERNORM, ALBERT, DISTILBERT, ELECTRA),
    *(ELMO, OPENAI_GPT, DEBERTA, DEBERTA_V2, MODERNBERT),
)
FAMILIES = {family.model_type: family for family in LISTED}


def family_named(values: Mapping[str, Any], where: Path) -> Family:
    """The family of a saved configuration, or an error that lists those that are supported.

    Old releases wrote no `model_type`; then the class decides, and a configuration without either is BERT's.
    """
    listed = values.get("architectures") or [BERT.encoder_class]
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise UserError(f"{where}: architectures is not a list of names: {listed!r}")
    stem = listed[0].removeprefix(OWN_CLASS).split("For")[0].removesuffix("Model").removesuffix("LMHead")
    stems = {family.encoder_class.removesuffix("Model"): name for name, family in FAMILIES.items()}
    name = OWN_TYPE.sub("", str(values.get("model_type") or stems.get(stem or "Bert", stem)))
    if name not in FAMILIES:
        known = ", ".join(map(repr, FAMILIES))
        close = difflib.get_close_matches(name.lower(), FAMILIES, n=1, cutoff=VERY_CLOSE)
        near = f"; did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{where}: model_type {name!r} is not supported yet; {known} are{near}")
    return FAMILIES[name]


def has_no_class(values: Mapping[str, Any], where: Path) -> bool:
    """Whether `transformers` has no class for the model of a saved configuration."""
    return bool(OWN_TYPE.match(str(values.get("model_type", "")))) or family_named(values, where).is_own


def family_of(config: EncoderConfig) -> Family:
    """The family that an encoder is saved as; an encoder that the family cannot express is refused, with the fix."""
    if config.family not in FAMILIES:
        near = suggestion(config.family, FAMILIES)
        raise UserError(f"model.family {config.family!r} is not one of {', '.join(FAMILIES)}{near}")
    family = FAMILIES[config.family]
    if refusal := family.refusal(config):
        name = family.refused(config)
        others = [other for other in FAMILIES.values() if other is not family]
        able = [other.model_type for other in others if other.accepts(name, getattr(config, name))]
        raise UserError(refusal + (f", or model.family={' or '.join(able)}" if able else ""))
    return family


def output_named(family: Family, output: str) -> Output:
    """The class of a family for one of our objectives or heads, or an error with the families that have one."""
    if output in family.outputs:
        return family.outputs[output]
    able = [other.model_type for other in FAMILIES.values() if output in other.outputs]
    fixes = [f"model.family={' or '.join(able)}"] if able else []
    fixes += ["objective.next_sentence=false"] if output.removesuffix("+next_sentence") in family.outputs else []
    raise UserError(
        f"model.family {family.model_type}: transformers has no class of it for {output}; set {', or '.join(fixes)}"
    )

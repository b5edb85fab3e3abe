"""A family of `transformers` as a value: its names, how it stores weights, and which encoders it cannot express."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from bertsmith.errors import UserError
from bertsmith.formats.storage import Names, as_stored, expand
from bertsmith.model.config import Activation, EncoderConfig
from bertsmith.text.tokenizer import Kind

USUAL = EncoderConfig()  # made once: its checks take longer than everything that compares settings with it
TOKENS, POSITIONS = "encoder.embeddings.tokens.weight", "encoder.embeddings.positions.weight"
# Fields of a `config.json` that do not change what an encoder computes. The first describe the file or the head, and
# are set again, or generation, which old releases wrote for every model; the others are kept and written back.
WRITTEN_ANEW = frozenset(
    """architectures id2label label2id num_labels _num_labels problem_type num_choices finetuning_task model_type
    transformers_version torch_dtype dtype _name_or_path name_or_path attn_implementation _attn_implementation_autoset
    tokenizer_class features bilstm_layers beside pooled language_model both_orders tag_unit
    xla_device do_sample early_stopping num_beams num_beam_groups
    diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores return_dict_in_generate
    forced_bos_token_id forced_eos_token_id remove_invalid_values exponential_decay_length_penalty suppress_tokens
    begin_suppress_tokens tf_legacy_loss""".split()
)
KEPT = frozenset(
    """classifier_dropout use_cache gradient_checkpointing directionality pooler_fc_size pooler_type
    pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head pooler_hidden_act output_past output_attentions
    output_hidden_states return_dict bos_token_id eos_token_id sep_token_id decoder_start_token_id
    chunk_size_feed_forward task_specific_params torchscript use_bfloat16 prefix pruned_heads model_name language
    keys_to_ignore_at_inference max_length min_length classifier_dropout_prob net_structure_type gap_size
    num_memory_blocks down_scale_factor layers_to_keep sinusoidal_pos_embds qa_dropout seq_classif_dropout
    summary_first_dropout summary_last_dropout n_ctx padding_idx cls_token_id initializer_cutoff_factor
    deterministic_flash_attn sparse_prediction sparse_pred_ignore_index reference_compile
    repad_logits_with_grad""".split()
)


@dataclass(frozen=True)
class Field:
    """What the `config.json` of a family calls one of our settings."""

    names: tuple[str, ...]  # several names: each of them has the value
    values: Mapping[Any, Any] = field(default_factory=dict)  # ours: theirs, where they differ; we have no others
    aliases: Mapping[Any, Any] = field(default_factory=dict)  # theirs: ours; read and never written
    refused: tuple[Any, ...] = ()  # values of ours that their class cannot have
    none_as: str = ""  # our None is written as the value of this setting of ours
    none_value: Any = None  # our None is written as this value
    is_list: bool = False  # it may be a list of texts, which is read as one text with bars

    def accepts(self, value: Any) -> bool:
        return value not in self.refused and (not self.values or value in self.values)

    def write(self, value: Any) -> dict[str, Any]:
        return dict.fromkeys(self.names, self.none_value if value is None else self.values.get(value, value))

    def read(self, values: Mapping[str, Any], where: Path) -> Any:
        """Our value from a `config.json`; None if it has none."""
        given = {name: values[name] for name in self.names if values.get(name) is not None}
        found = [self._ours(name, value, where) for name, value in given.items()]
        if any(value != found[0] for value in found):
            raise UserError(f"{where}: {' and '.join(given)} have different values; only equal ones are supported")
        return found[0] if found else None

    def is_null(self, values: Mapping[str, Any]) -> bool:
        """Whether a `config.json` has null for a setting that may be None, in place of the family's default."""
        may_be_none = bool(self.none_as) or self.none_value is not None
        return may_be_none and any(name in values and values[name] is None for name in self.names)

    def _ours(self, name: str, value: Any, where: Path) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{where}: {name} is {value}; give a finite number")
        if isinstance(value, list) and self.is_list:
            value = "|".join(map(str, value))
        if value == self.none_value:
            return None
        if not self.values:
            return self.aliases.get(value, value) if isinstance(value, (str, int)) else value
        known = {**{theirs: ours for ours, theirs in self.values.items()}, **self.aliases}
        if not isinstance(value, (str, int)) or value not in known:
            raise UserError(f"{where}: {name} {value!r} is not one of {', '.join(map(str, known))}")
        return known[value]


@dataclass(frozen=True)
class HeadDropout:
    """Their field for the dropout of a head, and its default; None: that of the encoder, or none for spans."""

    name: str = ""  # none: their class has no setting of its own
    default: float | None = None


CLASSIFIER_DROPOUT, NO_SETTING = HeadDropout("classifier_dropout"), HeadDropout()


@dataclass(frozen=True)
class Output:
    """Their class for one of our objectives or heads, and the names of the tensors that it adds to the encoder's."""

    class_name: str
    names: Names
    dropout: HeadDropout = CLASSIFIER_DROPOUT
    own: bool = False  # `transformers` has no such class; the name is ours, in the manner of theirs


@dataclass(frozen=True)
class Family:
    """The names of our tensors and settings in one `model_type`, and what it cannot express.

    A setting that is neither in `fields` nor in `own_fields` has one value in the family: that of `defaults`, or else
    the default of `EncoderConfig`.
    """

    model_type: str
    prefix: str  # of the encoder's tensors; a file of the encoder alone has no prefix
    encoder_class: str  # their class for the encoder alone
    encoder: Names
    outputs: Mapping[str, Output]  # by objective (masked_lm, masked_lm+next_sentence, causal_lm) or kind of head
    fields: Mapping[str, Field]
    fixed: Mapping[str, Any]  # fields of theirs with the one value that we compute
    own_fields: tuple[str, ...] = ()  # written under our own names where they differ from the default
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of our settings, where they are not EncoderConfig's
    multiples: Mapping[str, tuple[str, int]] = field(default_factory=dict)  # settings that are a multiple of another
    reasons: Mapping[str, str] = field(default_factory=dict)  # why another value of a setting is refused
    layer_groups: str = ""  # their field with the number of layers that have parameters of their own: 1, or all layers
    frame_ids: Mapping[str, Literal["first", "last"]] = field(default_factory=dict)  # their fields for special tokens
    older: Callable[[Mapping[str, Any], Path], dict[str, Any]] | None = None  # their newer `config.json` in older form
    vocabulary: Kind | None = None  # of the published models; None: of any kind
    is_own: bool = False  # whether `transformers` has no class for it; the classes are then names of our own
    language_model: float = 0.0  # the weight of the language model's loss in the published fine-tuning
    both_orders: bool = False  # whether the published fine-tuning reads pairs of like texts in both orders
    flags: Mapping[str, tuple[str, Any]] = field(default_factory=dict)  # theirs: true unless ours has this value
    equals: Mapping[str, str] = field(default_factory=dict)  # theirs: the property of our configuration that it equals
    written: Mapping[str, Any] = field(default_factory=dict)  # fields of theirs that are written and need not be read
    head_activation: Activation | None = None  # that their head over the vocabulary always has; None: the encoder's

    @property
    def config_keys(self) -> set[str]:
        """Every field of a `config.json` that is not refused."""
        named = {name for theirs in self.fields.values() for name in theirs.names}
        others = (*self.flags, *self.equals, *self.written, self.layer_groups)
        return {*named, *self.fixed, *self.own_fields, *WRITTEN_ANEW, *KEPT, *others} - {""}

    @property
    def class_names(self) -> set[str]:
        return {self.encoder_class, *(output.class_name for output in self.outputs.values())}

    @property
    def tied(self) -> dict[str, str]:
        """The further names of tensors that files may hold twice, and the names that they are read under."""
        tables = [self.encoder, *(output.names for output in self.outputs.values())]
        rows = [stored for table in tables for _, stored in expand(table, range(1))]
        return {name: stored.names[0] for stored in rows for name in stored.tied}

    def unused_rows(self, pad_token_id: int) -> int:
        """The number of unused rows in front of the position table."""
        row = self.encoder.get(POSITIONS, "")
        return pad_token_id + 1 if as_stored(row).pad_rows else 0

    def is_encoder_alone(self, names: Collection[str]) -> bool:
        """Whether a file with these names was saved from the encoder alone, whose names have no prefix."""
        return self._first.removeprefix(self.prefix) in names

    @property
    def _first(self) -> str:
        """The name of the table of tokens or, where there is none, of the first tensor."""
        return as_stored(self.encoder.get(TOKENS) or next(iter(self.encoder.values()))).names[0]

    def outer_prefix(self, names: Collection[str]) -> str:
        """What comes before the names of this family, or of its encoder alone, in the file of a larger model."""
        whole = self._first
        if whole in names or self.is_encoder_alone(names):
            return ""
        for name in (whole, whole.removeprefix(self.prefix)):
            if len(found := {n.removesuffix(name) for n in names if n.endswith(f".{name}")}) == 1:
                return found.pop()
        return ""

    def default(self, name: str) -> Any:
        """The value of a setting that a `config.json` does not have."""
        if name == "head_activation":
            return self.head_activation
        return self.defaults.get(name, getattr(USUAL, name))

    def accepts(self, name: str, value: Any) -> bool:
        """Whether the family can express a value of a setting."""
        if name in self.own_fields or name in self.multiples:
            return True
        return self.fields[name].accepts(value) if name in self.fields else bool(value == self.default(name))

    def equal_to_another(self, values: Mapping[str, Any]) -> list[str]:
        """The settings of ours that are None in the family where they equal another one, and that do."""
        return [name for name, f in self.fields.items() if f.none_as and values.get(name) == values.get(f.none_as)]

    def derived(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that are multiples of others, given those."""
        return {name: factor * values[other] for name, (other, factor) in self.multiples.items()}

    def refused(self, config: EncoderConfig) -> str:
        """The first setting that the family cannot express; empty if it can express the encoder."""
        names = [each.name for each in fields(config) if each.name not in ("family", "head_activation")]
        refused = [name for name in names if not self.accepts(name, getattr(config, name))]
        refused += [name for name, value in self.derived(vars(config)).items() if getattr(config, name) != value]
        if refused := refused or self.equal_to_another(vars(config)):
            return refused[0]
        expected = self.head_activation or config.activation
        return "head_activation" if config.head_transform and config.masked_word_activation != expected else ""

    def refusal(self, config: EncoderConfig) -> str:
        """The reason why the family cannot express an encoder, with a fix; empty if it can."""
        if not (name := self.refused(config)):
            return ""
        where = "" if self.is_own else " in transformers"
        reason = self.reasons.get(name, f"{self.model_type} models have no such setting{where}")
        fix = self.derived(vars(config)).get(name, self.default(name))
        return f"model.{name}={_shown(getattr(config, name))}: {reason}; set model.{name}={_shown(fix)}"


def _shown(value: Any) -> str:
    """A value as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)

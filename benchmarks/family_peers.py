"""The families' models for pre-training in `transformers`, compiled, in the form that is fastest for BERT.

That form gives an attention mask and rounds the vocabulary up (`peer_forms.py`). `transformers` has no class that
trains ELECTRA's two networks or a student with its teacher, so these two are written here from its classes, as a user
would write them; their vocabulary heads are applied to the masked positions only, which is faster than in its classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput

from benchmarks.peer_forms import DEVICE, ROUNDED, free_memory, measure, peer_steps, pinned, rectangular
from bertsmith.batch import Batch

DETECTION_WEIGHT = 50.0  # ELECTRA, section 3.2
SOFT, MASKED, COSINE, TEMPERATURE = 5.0, 2.0, 1.0, 2.0  # the released training script of DistilBERT


@dataclass(frozen=True)
class Shape:
    """The size of an encoder, in the words of `transformers`."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    max_position_embeddings: int
    vocab_size: int = 30522
    embedding_size: int | None = None
    hidden_act: str = "gelu"
    dropout: float = 0.1

    def config(self, model_type: str, **more: Any) -> Any:
        """The configuration of `transformers` for a family, with the vocabulary rounded up."""
        values = {name: getattr(self, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")}
        values |= {"intermediate_size": 4 * self.hidden_size, "hidden_act": self.hidden_act}
        values |= {"hidden_dropout_prob": self.dropout, "attention_probs_dropout_prob": self.dropout}
        if model_type == "distilbert":
            values = {"n_layers": self.num_hidden_layers, "dim": self.hidden_size, "n_heads": self.num_attention_heads}
            values |= {"hidden_dim": 4 * self.hidden_size, "dropout": self.dropout, "attention_dropout": self.dropout}
        if model_type in ("albert", "electra"):
            values["embedding_size"] = self.embedding_size or self.hidden_size
        values["max_position_embeddings"] = self.max_position_embeddings + 2 * (model_type == "roberta")
        values["vocab_size"] = -(-self.vocab_size // ROUNDED) * ROUNDED
        return transformers.AutoConfig.for_model(model_type, **values, **more, attn_implementation="sdpa")


class ElectraPeer(nn.Module):
    """ElectraForMaskedLM and ElectraForPreTraining with one embedding, trained together (ELECTRA, section 2)."""

    def __init__(self, generator: Shape, discriminator: Shape) -> None:
        super().__init__()
        self.generator = transformers.ElectraForMaskedLM(generator.config("electra"))
        self.discriminator = transformers.ElectraForPreTraining(discriminator.config("electra"))
        self.generator.electra.embeddings = self.discriminator.electra.embeddings
        self.generator.generator_lm_head.weight = self.discriminator.electra.embeddings.word_embeddings.weight

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, masked: Tensor, targets: Tensor
    ) -> MaskedLMOutput:
        given = {"attention_mask": attention_mask, "token_type_ids": token_type_ids}
        hidden = self.generator.electra(input_ids, **given)[0].flatten(0, 1)[masked]
        logits = self.generator.generator_lm_head(self.generator.generator_predictions(hidden)).float()  # (M, V)
        with torch.no_grad():
            sampled = (logits - torch.log(-torch.log(torch.rand_like(logits).clamp_min(1e-20)))).argmax(-1)  # (M,)
            tokens = input_ids.flatten().index_copy(0, masked, sampled).view_as(input_ids)
            replaced = torch.zeros_like(tokens.flatten(), dtype=torch.float32)
            replaced = replaced.index_copy(0, masked, (sampled != targets).float()).view_as(input_ids)
        scores = self.discriminator(tokens, **given).logits.float()
        detection = F.binary_cross_entropy_with_logits(scores, replaced)
        return MaskedLMOutput(loss=F.cross_entropy(logits, targets) + DETECTION_WEIGHT * detection)


class DistilBertPeer(nn.Module):
    """DistilBertForMaskedLM taught by BertForMaskedLM: soft targets, masked words, cosine (DistilBERT, section 3)."""

    def __init__(self, student: Shape, teacher: Shape) -> None:
        super().__init__()
        self.student = transformers.DistilBertForMaskedLM(student.config("distilbert"))
        self.teacher = transformers.BertForMaskedLM(teacher.config("bert")).requires_grad_(False)

    def train(self, mode: bool = True) -> DistilBertPeer:
        super().train(mode)
        self.teacher.eval()  # no dropout in the teacher
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor, masked: Tensor, targets: Tensor) -> MaskedLMOutput:
        student, teacher = self.student, self.teacher
        with torch.no_grad():
            known = teacher.bert(input_ids, attention_mask=attention_mask)[0].flatten(0, 1)  # (T, H)
            soft = F.softmax(teacher.cls(known[masked]).float() / TEMPERATURE, -1)  # (M, V)
        hidden = student.distilbert(input_ids, attention_mask=attention_mask)[0].flatten(0, 1)
        states = student.vocab_layer_norm(student.activation(student.vocab_transform(hidden[masked])))
        logits = student.vocab_projector(states).float()
        distance = F.kl_div(F.log_softmax(logits / TEMPERATURE, -1), soft, reduction="batchmean") * TEMPERATURE**2
        cosine = (1 - F.cosine_similarity(hidden.float(), known.float(), dim=-1)).mean()
        return MaskedLMOutput(loss=SOFT * distance + MASKED * F.cross_entropy(logits, targets) + COSINE * cosine)


def peer_model(family: str, shape: Shape, other: Shape | None) -> nn.Module:
    """The model of a family; `other` is ELECTRA's generator or DistilBERT's teacher."""
    if family == "electra" and other is not None:
        return ElectraPeer(other, shape)
    if family == "distilbert" and other is not None:
        return DistilBertPeer(shape, other)
    name = {
        "bert": "BertForPreTraining",
        "roberta": "RobertaForMaskedLM",
        "albert": "AlbertForPreTraining",
        "distilbert": "DistilBertForMaskedLM",
    }[family]
    more: dict[str, Any] = {"type_vocab_size": 1} if family == "roberta" else {}
    return getattr(transformers, name)(shape.config(family, **more))


def peer_batch(family: str, batch: Batch, has_other: bool) -> dict[str, Tensor]:
    """A batch of sequences of one length as these models take it."""
    given = rectangular(batch, mask=True)
    pair = given.pop("next_sentence_label", None)
    if family in ("bert", "albert"):
        return {**given, ("next_sentence_label" if family == "bert" else "sentence_order_label"): pair}
    if family in ("roberta", "distilbert"):
        given.pop("token_type_ids")
    if has_other:
        given.pop("labels")
        given |= {name: batch.labels[name].long() for name in ("masked", "targets")}
    return given


def peer_seconds(
    family: str, shape: Shape, other: Shape | None, batch: Batch, steps: int, warm: int = 6
) -> dict[str, float] | None:
    """Measure compiled training steps of a family in `transformers`; None where they do not fit on the device."""
    free_memory()
    torch._dynamo.reset()
    try:
        model = peer_model(family, shape, other).to(DEVICE)
        inputs = pinned(peer_batch(family, batch, other is not None))
        step = peer_steps(torch.compile(model) if DEVICE.type == "cuda" else model, [inputs])
        return measure(step, steps, warm)
    except torch.OutOfMemoryError:
        return None

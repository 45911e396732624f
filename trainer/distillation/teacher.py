"""A teacher model, and its probabilities for the tokens of a micro-batch."""

from __future__ import annotations

from typing import Any

import torch

from trainer.common.errors import UserError
from trainer.common.inputs import path_kind, user_path
from trainer.config import RunSpec
from trainer.method.method_base import places_of
from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.adapter_folder import refuse_adapter
from trainer.model_files.base_weights import load_causal_model
from trainer.models.model import load_tokenizer
from trainer.strategy import Batch


class TeacherModel:
    """A frozen model in full on the device of this process.

    `vocabulary`: number of tokens of its tokenizer; `embeddings`: number of token ids that it accepts.
    """

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        """Load the teacher of the spec. Raises UserError: it cannot be loaded, or has too few embeddings."""
        path = user_path(spec.teacher, "teacher")
        name = str(path) if path_kind(path) == "folder" else spec.teacher
        refuse_adapter(name, "teacher")
        tokenizer = load_tokenizer(name, "teacher")
        self.tokens: dict[str, int] = tokenizer.get_vocab()
        self.vocabulary = len(tokenizer)
        # Under autocast the weights would be converted to bfloat16 anyway.
        dtype = torch.bfloat16 if spec.precision == "bf16-mixed" else torch.float32
        model = load_causal_model(name, "teacher", spec.teacher, dtype=dtype)
        self.embeddings = int(model.get_input_embeddings().num_embeddings)
        if self.embeddings < self.vocabulary:
            raise UserError(
                f"teacher: {spec.teacher} has fewer embeddings than its tokenizer has tokens: choose another one"
            )
        self.model = model.requires_grad_(False).to(device)
        self._spec = spec
        self._module = ModelWithLoss(self.model).eval()

    @torch.no_grad()
    def judge(self, batch: Batch) -> torch.Tensor:
        """Return the logits of the next tokens at the places with loss of a micro-batch, [n, V]."""
        return self._module.selected_logits(batch.ids, batch.positions, places_of(batch))


def load_teacher(spec: RunSpec, tokenizer: Any, device: torch.device) -> TeacherModel | None:
    """Load the teacher of the spec; None without a teacher.

    `tokenizer`: tokenizer of the student. Raises UserError: the teacher cannot be used, or its vocabulary differs from
    that of the student.
    """
    if not spec.teacher:
        return None
    teacher = TeacherModel(spec, device)
    if teacher.tokens != tokenizer.get_vocab():
        raise UserError(
            f"teacher: {spec.teacher} has another vocabulary than {spec.model}: choose a teacher with the tokenizer of the model"
        )
    return teacher

"""A teacher model beside the student: its logits for the tokens of a micro-batch."""

from __future__ import annotations

from typing import Any

import torch

from trainer.config import RunSpec
from trainer.errors import UserError
from trainer.inputs import path_kind, user_path
from trainer.model import TokenLoss, load_tokenizer, loss_positions, read_causal_model
from trainer.strategy import Batch


class TeacherModel:
    """A frozen model with the vocabulary of the student, in full on the device of this rank."""

    def __init__(self, spec: RunSpec, tokenizer: Any, device: torch.device) -> None:
        """Load the teacher of the spec. `tokenizer`: of the student.

        Raises:
            UserError: the teacher cannot be loaded, or has another vocabulary or too few positions.
        """
        path = user_path(spec.teacher, "teacher")
        name = str(path) if path_kind(path) == "folder" else spec.teacher
        if load_tokenizer(name, "teacher").get_vocab() != tokenizer.get_vocab():
            raise UserError(
                f"teacher: {spec.teacher} has another vocabulary than {spec.model}: choose a teacher with the tokenizer of the model"
            )
        # Under autocast the weights would be converted to bfloat16 anyway.
        dtype = torch.bfloat16 if spec.precision == "bf16-mixed" else torch.float32
        model = read_causal_model(spec, "teacher", name, dtype=dtype)
        if model.get_input_embeddings().num_embeddings < len(tokenizer):
            raise UserError(
                f"teacher: {spec.teacher} has fewer embeddings than its tokenizer has tokens: choose another one"
            )
        self.model = model.requires_grad_(False).to(device)
        self._module = TokenLoss(self.model).eval()

    @torch.no_grad()
    def __call__(self, batch: Batch) -> torch.Tensor:
        """Return the logits of the next tokens at the places with loss of a micro-batch, [n, V]."""
        return self._module.selected_logits(batch.ids, batch.positions, loss_positions(batch.labels))

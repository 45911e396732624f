"""A teacher model, and its probabilities for the tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.common.errors import UserError
from trainer.common.inputs import path_kind, user_path
from trainer.config import RunSpec
from trainer.distillation.teacher_client import RemoteTeacher
from trainer.distillation.teacher_protocol import vocabulary_digest
from trainer.distributed.world import World
from trainer.method.method_base import places_of
from trainer.method.module_with_loss import ModelWithLoss
from trainer.model_files.adapter_folder import refuse_adapter
from trainer.models.loss import Teacher, TeacherLogits, at_places, top_tokens
from trainer.models.model import load_tokenizer, read_causal_model
from trainer.models.packing_check import mixes_samples, resolve_packing
from trainer.strategy import Batch


class TeacherModel:
    """A frozen model in full on the device of this process.

    `vocabulary`: number of tokens of its tokenizer; `embeddings`: number of token ids that it accepts.
    """

    ahead = 0  # micro-batches that the teacher evaluates in advance: their logits would fill the memory

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        """Load the teacher of the spec.

        Raises:
            UserError: the teacher cannot be loaded, or has too few positions or embeddings.
        """
        path = user_path(spec.teacher, "teacher")
        name = str(path) if path_kind(path) == "folder" else spec.teacher
        refuse_adapter(name, "teacher")
        tokenizer = load_tokenizer(name, "teacher")
        self.tokens: dict[str, int] = tokenizer.get_vocab()
        self.vocabulary = len(tokenizer)
        # Under autocast the weights would be converted to bfloat16 anyway.
        dtype = torch.bfloat16 if spec.precision == "bf16-mixed" else torch.float32
        model = read_causal_model(spec, "teacher", name, dtype=dtype)
        self.embeddings = int(model.get_input_embeddings().num_embeddings)
        if self.embeddings < self.vocabulary:
            raise UserError(
                f"teacher: {spec.teacher} has fewer embeddings than its tokenizer has tokens: choose another one"
            )
        self.model = model.requires_grad_(False).to(device)
        self._spec = spec
        self._module = ModelWithLoss(self.model).eval()

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next tokens at places of a flattened micro-batch, [n, V].

        Args:
            ids, positions: int64 [rows, T].
            places: int64 [n].
        """
        return self._module.selected_logits(ids, positions, places)

    @torch.no_grad()
    def judge(self, batch: Batch) -> Teacher:
        """Return the teacher's probabilities at the positions with loss of a micro-batch."""
        places = places_of(batch)
        logits = self.logits(batch.ids, batch.positions, places)
        if not self._spec.teacher_top_k:
            return TeacherLogits(logits)
        top = top_tokens(logits, self._spec.teacher_top_k, self.vocabulary)
        return at_places(batch.ids.shape, places, *top)

    def close(self) -> None:
        """Do nothing: the teacher ends with this process."""


def load_teacher(
    spec: RunSpec, tokenizer: Any, device: torch.device, waiting: Callable[[str], object]
) -> TeacherModel | RemoteTeacher | None:
    """Load the teacher of the spec, or connect to the one on another host; None without a teacher.

    Args:
        tokenizer: tokenizer of the student.
        waiting: called at intervals while the teacher loads elsewhere, with what this rank waits for.

    Raises:
        UserError: the teacher cannot be used, or its vocabulary differs from that of the student.
    """
    if not spec.teacher:
        return None
    teacher: TeacherModel | RemoteTeacher
    if spec.teacher_host:
        teacher = RemoteTeacher(spec, tokenizer, device, waiting)
        same = teacher.properties.vocabulary == vocabulary_digest(tokenizer.get_vocab())
    else:
        teacher = TeacherModel(spec, device)
        same = teacher.tokens == tokenizer.get_vocab()
    if not same:
        raise UserError(
            f"teacher: {spec.teacher} has another vocabulary than {spec.model}: choose a teacher with the tokenizer of the model"
        )
    return teacher


def isolates_samples(spec: RunSpec, teacher: TeacherModel | RemoteTeacher, world: World) -> bool:
    """Return whether the teacher keeps the samples of a packed row apart. Every rank calls it; see `resolve_packing`.

    Raises:
        UserError: `packing: true`, but it does not.
    """
    if isinstance(teacher, TeacherModel):
        return resolve_packing(spec, teacher.model, teacher.vocabulary, world, "the teacher")
    isolated = teacher.properties.isolates_samples
    if not isolated and spec.packing is True:
        raise mixes_samples("the teacher")
    return isolated

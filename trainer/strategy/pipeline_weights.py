"""The weights of a pipeline's stages: every rank reads the tensors of its own layers from the model's files."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from trainer.common.errors import UserError, first_line
from trainer.common.formats import printable
from trainer.common.inputs import path_kind
from trainer.distributed.world import World

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class WeightFiles:
    """The safetensors files of a model, in a folder or in the cache of the hub. A tensor is read only on request."""

    def __init__(self, model: str) -> None:
        """Read the index of the model, a folder or a name on the hub. Raises UserError: it has no safetensors files, or a damaged index."""
        self._model = model
        index = self._path(_INDEX, required=False)
        if index:
            try:
                places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                self._file_of = {str(name): str(file) for name, file in places.items()}
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise UserError(f"model: {_INDEX} of {model} is damaged: copy or download the model again") from None
            return
        with self._open(_SINGLE) as file:
            self._file_of = dict.fromkeys(file.keys(), _SINGLE)

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        """Open one of the files. Raises UserError, also if the block cannot read it."""
        try:
            with safe_open(self._path(name), "pt") as file:  # type: ignore[no-untyped-call]
                yield file
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"model: cannot read {printable(name, 80)} of {self._model}: {first_line(error)}: copy or download the model again"
            ) from None

    def _path(self, name: str, *, required: bool = True) -> Path | None:
        folder = Path(self._model).expanduser()
        if path_kind(folder) == "folder":
            # An index is not trusted: it may name files of this folder only.
            found = folder / Path(name).name
            path = found if path_kind(found) == "file" else None
        else:
            try:
                cached = cached_file(self._model, Path(name).name, _raise_exceptions_for_missing_entries=required)
            except Exception as error:
                raise UserError(f"model: cannot load {name} of {self._model}: {first_line(error)}") from None
            path = Path(cached) if cached else None
        if path is None and required:
            if name == _SINGLE:
                raise UserError(
                    f"model: {self._model} has no {name}, which strategy=pipeline needs: set another strategy"
                )
            raise UserError(f"model: {self._model} has no {printable(name, 80)}: copy or download the model again")
        return path

    def find(self, candidates: Sequence[str]) -> str:
        """Return the first of these names that a tensor of the files has; empty if there is none."""
        return next((candidate for candidate in candidates if candidate in self._file_of), "")

    def shapes(self) -> dict[str, list[int]]:
        """Return the shapes of all tensors that the files hold, whatever the index says. Raises UserError."""
        found: dict[str, list[int]] = {}
        for file_name in sorted(set(self._file_of.values())):
            with self._open(file_name) as file:
                found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  not a mapping
        return found

    def tensor(self, stored: str) -> torch.Tensor:
        """Return a tensor in host memory. Raises UserError."""
        ((_, tensor),) = self.read({stored: stored})
        return tensor

    def read(self, names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (key, tensor in host memory) for every {key: name in the files}, file by file. Raises UserError."""
        by_file: dict[str, list[str]] = {}
        for key, stored in names.items():
            by_file.setdefault(self._file_of[stored], []).append(key)
        for file_name, keys in by_file.items():
            with self._open(file_name) as file:
                for key in keys:
                    yield key, file.get_tensor(names[key])


def read_own(
    model: str,
    world: World,
    shapes: Mapping[str, torch.Size],
    check: Callable[[WeightFiles], object],
    wanted: Mapping[str, Sequence[str]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor in host memory) for every name in `wanted`. Every rank calls it, and takes all tensors.

    Args:
        model: folder of the model, or its name on the hub.
        shapes: of all parameters of the model, by name.
        check: raises UserError if the files do not match the model.
        wanted: {name: the names that the tensor can have in the files}.

    Raises UserError: a host lacks a file, or its files do not match the model.
    """
    why, files = "", None
    try:
        files = WeightFiles(model)
        check(files)
    except UserError as error:
        why = str(error)
    if problem := next(filter(None, world.gather(why)), ""):  # the same error on all ranks
        raise UserError(problem)
    assert files
    found = {name: files.find(candidates) for name, candidates in wanted.items()}
    if lost := next((name for name, stored in found.items() if not stored), ""):
        raise UserError(f"model: the files of {model} have no {lost}: set another strategy")
    for name, tensor in files.read(found):
        if tensor.shape != shapes[name]:
            raise UserError(
                f"model: {name} of {model} has the shape {list(tensor.shape)}, expected {list(shapes[name])}: "
                "the files do not match config.json"
            )
        yield name, tensor

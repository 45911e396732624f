"""The weights of a pipeline's stages: read by name from the model's files, or received from a host that has them.

Staging copies the files of weights to the host of rank 0 only. The other ranks receive the tensors of their own layers when the run
starts, and keep them in the run folder until the run has finished: in its unit, they can write no other. After the loss of the host
with the files, the session copies them to the new host of rank 0.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.utils import cached_file

from trainer.common.errors import UserError, first_line
from trainer.common.formats import printable
from trainer.common.inputs import path_kind
from trainer.config import RunSpec
from trainer.distributed.world import World
from trainer.supervise.environment import LAYERS

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_RESERVE = 200 << 20  # bytes that kept tensors leave free for checkpoints and logs
_CHUNK = 64 << 20  # bytes of one message
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}  # of safetensors


class WeightFiles:
    """The safetensors files of a model, in a folder or in the cache of the hub. A tensor is read only on request."""

    def __init__(self, model: str) -> None:
        """Read the index of the model, a folder or a name on the hub.

        Raises:
            UserError: it has no safetensors files, or a damaged index.
        """
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
            raise UserError(f"model: {self._model} has no {name}, which strategy=pipeline needs: set another strategy")
        return path

    @property
    def complete(self) -> bool:
        """Whether all files are on this host."""
        return all(self._path(name, required=False) for name in set(self._file_of.values()))

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

    def header(self, stored: str) -> tuple[list[int], str]:
        """Return the shape of a tensor and its data type as safetensors names it, without reading it. Raises UserError."""
        with self._open(self._file_of[stored]) as file:
            part = file.get_slice(stored)
            return list(part.get_shape()), str(part.get_dtype())

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


class ReceivedWeights:
    """Tensors that this host received for an earlier start of the run, one file each, in the run folder."""

    def __init__(self, model: str, run_dir: Path) -> None:
        self._model, self._folder = model, run_dir / LAYERS

    def _path(self, stored: str) -> Path:
        # The name of a tensor may be no valid name of a file. An earlier start of the run may have had another model.
        digest = hashlib.sha256(f"{self._model}\0{stored}".encode()).hexdigest()
        return self._folder / f"{digest[:32]}.safetensors"

    def find(self, candidates: Sequence[str]) -> str:
        """Return the first of these names whose tensor is on this host; empty if there is none."""
        return next((name for name in candidates if self._path(name).is_file()), "")

    def read(self, stored: str) -> torch.Tensor | None:
        """Return a tensor in host memory; None if its file is damaged."""
        with contextlib.suppress(OSError, SafetensorError), safe_open(self._path(stored), "pt") as file:  # type: ignore[no-untyped-call]
            tensor: torch.Tensor = file.get_tensor(stored)
            return tensor
        return None

    def keep(self, stored: str, tensor: torch.Tensor) -> None:
        """Write a tensor, unless the disk has little space. Without it the next start takes longer, but checkpoints have priority."""
        path = self._path(stored)
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            if shutil.disk_usage(self._folder.parent).free < tensor.nbytes + _RESERVE:
                return
            self._folder.mkdir(exist_ok=True)
            save_file({stored: tensor}, aside)
            aside.rename(path)
        except (OSError, SafetensorError):
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)


class Channel:
    """Sends tensors of any data type from rank to rank over gloo. `progress`: called after every message."""

    def __init__(self, group: dist.ProcessGroup, progress: Callable[[], object]) -> None:
        self._group, self._progress = group, progress

    def send(self, tensor: torch.Tensor, rank: int) -> None:
        """Send a tensor in host memory to a rank."""
        for part in tensor.contiguous().view(-1).view(torch.uint8).split(_CHUNK):
            dist.send(part, rank, group=self._group)
            self._progress()

    def receive(self, shape: torch.Size, dtype: torch.dtype, rank: int) -> torch.Tensor:
        """Return a tensor in host memory that a rank sends."""
        whole = torch.empty(shape, dtype=dtype)
        for part in whole.view(-1).view(torch.uint8).split(_CHUNK):
            dist.recv(part, rank, group=self._group)
            self._progress()
        return whole


class StageWeights:
    """The tensors of the model that a rank needs, wherever they are."""

    def __init__(
        self,
        spec: RunSpec,
        world: World,
        run_dir: Path,
        shapes: Mapping[str, torch.Size],
        check: Callable[[WeightFiles], object],
        progress: Callable[[], object],
    ) -> None:
        """Args:
        run_dir: the run folder, which keeps what this rank receives.
        shapes: of all parameters of the model, by name.
        check: raises UserError if files, which are complete, do not match the model.
        progress: called after every part that `read` sends or receives.
        """
        self._model, self._world, self._shapes, self._progress = spec.model, world, shapes, progress
        self._check_files, self._received = check, ReceivedWeights(spec.model, run_dir)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._world.device

    def read(self, wanted: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor in host memory) for every name in `wanted`. Every rank calls it, and takes all tensors.

        Args:
            wanted: {name: the names that the tensor can have in the files}.

        Raises:
            UserError: the files lack a tensor, it has another shape, or no host has the files.
        """
        files: WeightFiles | None = None
        why = difference = ""  # why this host cannot read the files, or how they do not match the model
        try:
            files = WeightFiles(self._model)
        except UserError as error:
            why = str(error)
        complete = files is not None and files.complete
        if files and complete:
            try:
                self._check_files(files)
            except UserError as error:
                difference = str(error)
        everywhere = self._world.gather([complete, difference])
        if different := next((text for _, text in everywhere if text), ""):  # the same error on all ranks
            raise UserError(different)
        if all(each for each, _ in everywhere):
            assert files
            yield from self._own(files, wanted)
            return
        owner = next((rank for rank, (each, _) in enumerate(everywhere) if each), None)
        if owner is None:
            raise UserError(why or f"model: no host of this run has all files of {self._model}: start the run again")
        # The first rank with all files sends tensors.
        source = files if owner == self._world.rank else None
        yield from self._own(files, wanted) if complete and files else self._kept(wanted)
        lacking = {} if complete else {name: list(names) for name, names in wanted.items() if name not in self._done}
        everywhere_lacking = self._world.gather(lacking)
        sent = self._offers(everywhere_lacking, source)
        for name in (name for each in everywhere_lacking for name in each):  # the same error on all ranks
            if name not in sent:
                raise UserError(f"model: the files of {self._model} have no {name}: set another strategy")
        if sent:
            # Over a slow network a rank may wait for its next tensor, or for the other ranks, longer than a collective may take.
            untimed = self._world.with_untimed_group()
            channel = Channel(untimed.untimed_group, self._progress)
            yield from self._exchange(everywhere_lacking, sent, channel, owner, source)
            untimed.sum_without_timeout([0.0], lambda: None)

    def _own(self, files: WeightFiles, wanted: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of this host's files."""
        found = {name: files.find(candidates) for name, candidates in wanted.items()}
        if lost := next((name for name, stored in found.items() if not stored), ""):
            raise UserError(f"model: the files of {self._model} have no {lost}: set another strategy")
        for name, tensor in files.read(found):
            self._check(name, list(tensor.shape))
            yield name, tensor

    def _kept(self, wanted: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that this host received for an earlier start, and remember them in `_done`."""
        self._done: set[str] = set()
        for name, candidates in wanted.items():
            stored = self._received.find(candidates)
            tensor = self._received.read(stored) if stored else None
            if tensor is not None and tensor.shape == self._shapes[name]:
                self._done.add(name)
                yield name, tensor

    def _check(self, name: str, shape: Sequence[int]) -> None:
        if list(shape) != list(self._shapes[name]):
            raise UserError(
                f"model: {name} of {self._model} has the shape {list(shape)}, expected {list(self._shapes[name])}: "
                "the files do not match config.json"
            )

    def _offers(
        self, lacking: Sequence[Mapping[str, Sequence[str]]], source: WeightFiles | None
    ) -> dict[str, tuple[str, torch.dtype]]:
        """Return what is sent of the tensors that some rank lacks: {name: name in the files, data type}. Every rank gets the same.

        Args:
            lacking: for every rank, {name: the names that the tensor can have in the files}.
            source: the files, on the rank that sends.

        Raises:
            UserError: a tensor has another shape than in the model, or a data type that ranks cannot send.
        """
        offers: dict[str, list[Any]] = {}
        for name, candidates in {name: found for each in lacking for name, found in each.items()}.items():
            if source and (stored := source.find(candidates)):
                offers[name] = [stored, *source.header(stored)]
        sent: dict[str, tuple[str, torch.dtype]] = {}
        for each in self._world.gather(offers):
            for name, (stored, shape, dtype) in each.items():
                self._check(name, shape)
                if dtype not in DTYPES:
                    raise UserError(
                        f"model: {name} of {self._model} has the data type {str(dtype)[:40]}: set another strategy"
                    )
                sent[name] = str(stored), DTYPES[dtype]
        return sent

    def _exchange(
        self,
        lacking: Sequence[Mapping[str, Sequence[str]]],
        sent: Mapping[str, tuple[str, torch.dtype]],
        channel: Channel,
        owner: int,
        source: WeightFiles | None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Send missing tensors to every rank, and yield those that this rank receives.

        Args:
            lacking: for every rank, the names of the tensors, as for `_offers`.
            owner: the rank that sends; `source`: the files there.
        """
        # One tensor for every rank in turn, so that none waits until another one has everything.
        for turn in zip_longest(*lacking):
            for place, name in enumerate(turn):
                if name is None or name not in sent:
                    continue
                stored, dtype = sent[name]
                if source:
                    channel.send(source.tensor(stored), place)
                elif self._world.rank == place:
                    received = channel.receive(self._shapes[name], dtype, owner)
                    self._received.keep(stored, received)
                    yield name, received

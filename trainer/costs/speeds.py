"""What runs computed per second on their devices: ``speeds.json`` in the cache of the controller, for the plans of later runs. No torch.

A figure counts the operations of `row_flops` without those of recomputation, so it also holds for models of another size.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from trainer.common.files import cache_folder, to_json, write_atomic
from trainer.common.inputs import read_regular

if TYPE_CHECKING:
    from trainer.config import RunSpec
    from trainer.model_files.model_shape import Shape

FIGURES = 256  # in the file; the oldest ones make room
_FILE_LIMIT = 1 << 18  # bytes
_FAR = 3.0  # powers of two between two sizes of models or micro-batches, beyond which a figure says nothing
_Word = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,20}$")]


@dataclass(frozen=True)
class DeviceSpeed:
    """What one process computed on its device.

    Attributes:
        device: name of the GPU, or the model of the CPU.
        threads: of the process on a CPU; 0 on a GPU.
        parameters: of the model.
        tokens: of a full micro-batch.
        flops: operations per second.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    device: Annotated[str, Field(pattern=r"^[ -~]{1,100}$")]
    threads: Annotated[int, Field(ge=0, le=4096)]
    precision: _Word
    quantize: _Word
    gradient_checkpointing: bool
    torch_compile: bool
    lora: bool
    parameters: Annotated[int, Field(ge=1, le=10**15)]
    tokens: Annotated[int, Field(ge=1, le=10**12)]
    flops: Annotated[float, Field(ge=1e3, le=1e18)]

    @classmethod
    def of(cls, spec: RunSpec, shape: Shape, device: str, threads: int, flops: float = 0.0) -> DeviceSpeed:
        """Return the figure of a process that trains a spec."""
        return cls(
            "".join(c if " " <= c <= "~" else "?" for c in device)[:100],
            threads,
            spec.precision,
            spec.quantize,
            spec.gradient_checkpointing,
            spec.torch_compile,
            spec.lora_r > 0,
            shape.parameters,
            spec.batch_size * spec.seq_length,
            flops,
        )

    @property
    def kind(self) -> DeviceSpeed:
        """What figures have in common of which one replaces the other: sizes are powers of two."""
        parameters, tokens = (1 << round(math.log2(size)) for size in (self.parameters, self.tokens))
        return replace(self, flops=0.0, parameters=parameters, tokens=tokens)

    def distance(self, other: DeviceSpeed) -> float:
        """Return how far the sizes of model and micro-batch are from those of another figure; infinite if it says nothing."""
        same_kind = replace(self, flops=0.0, parameters=1, tokens=1) == replace(
            other, flops=0.0, parameters=1, tokens=1
        )
        apart = [abs(math.log2(getattr(self, name) / getattr(other, name))) for name in ("parameters", "tokens")]
        return sum(apart) if same_kind and max(apart) <= _FAR else math.inf


_ONE = TypeAdapter(DeviceSpeed)
_ALL = TypeAdapter(Annotated[list[DeviceSpeed], Field(max_length=FIGURES)])


def checked_speed(values: Mapping[str, Any]) -> DeviceSpeed:
    """Return the figure that plain data describes. Raises ValueError."""
    return _ONE.validate_json(to_json(dict(values)))


def nearest(figures: Iterable[DeviceSpeed], wanted: DeviceSpeed) -> DeviceSpeed | None:
    """Return the figure with the sizes that are nearest to those of `wanted`, or None. Everything but sizes is equal."""
    far, found = min(
        ((each.distance(wanted), each) for each in figures), key=lambda pair: pair[0], default=(math.inf, None)
    )
    return None if far == math.inf else found


def speeds_file() -> Path:
    """Return the path of the file, which may not exist."""
    return Path(os.environ.get("TRAINYARD_SPEEDS") or cache_folder() / "speeds.json")


def read_speeds(report: Callable[[str], None]) -> tuple[DeviceSpeed, ...]:
    """Return the figures of earlier runs, the oldest ones first; a file that is no list of figures is reported and ignored."""
    path = speeds_file()
    try:
        return tuple(_ALL.validate_json(read_regular(path, _FILE_LIMIT)))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a list of speeds"
        report(f"warning: {path} is ignored: {why}: the next run that finishes replaces it")
        return ()


def add_speeds(new: Sequence[DeviceSpeed], report: Callable[[str], None]) -> None:
    """Add figures to the file; each replaces one of its kind. A file that cannot be written is reported."""
    if not new:
        return
    kept = {figure.kind: figure for figure in read_speeds(report)}
    for figure in new:
        kept.pop(figure.kind, None)
        kept[figure.kind] = figure
    path = speeds_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, _ALL.dump_json([*kept.values()][-FIGURES:], indent=1), 0o600)
    except OSError as error:
        report(f"warning: cannot write {path}: {error.strerror}: plans do not know the speed of this run")

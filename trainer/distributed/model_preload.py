"""What a process that forks ranks does for their model beforehand: it imports the code, and reads the weights into the page cache.

The weights stay in the memory of the host, not in that of a process: the ranks map the files, and the kernel takes the memory back where
other processes need it. Reading needs no CUDA, and takes no time of a start, because it runs beside the imports.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path

from trainer.config import TINY, RunSpec
from trainer.costs.host_memory import available_bytes
from trainer.costs.model_shape import model_type
from trainer.errors import UserError
from trainer.inputs import path_kind
from trainer.supervise.environment import LAYERS

_CHUNK = 4 << 20  # bytes
_SHARE = 2  # weights of up to 1/2 of the free memory are read


def import_architecture(spec: RunSpec) -> None:
    """Import the code of the spec's model. Most of that of Llama is needed by every architecture, and for an unknown one it is all."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    if spec.model != TINY and path_kind(Path(spec.model).expanduser()) != "folder":
        return  # the configuration may not be on this host
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with contextlib.suppress(UserError, LookupError):  # the ranks report it
        _ = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type(spec)]]  # which imports it


@contextlib.contextmanager
def weights_in_memory(spec: RunSpec, run_dir: Path | None) -> Iterator[None]:
    """Read the weights of the spec's model into the page cache while the block runs, where memory allows. The end of the block ends that."""
    ends = threading.Event()
    thread = threading.Thread(target=_read, args=(weight_files(spec, run_dir), ends), name="weights", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()  # a fork copies no thread


def weight_files(spec: RunSpec, run_dir: Path | None) -> list[Path]:
    """Return the files of the model's weights on this host, with those of the layers that ranks received; none of a model of the hub."""
    folder = Path(spec.model).expanduser()
    folders = [folder, *([run_dir / LAYERS] if run_dir else [])] if path_kind(folder) == "folder" else []
    return [file for each in folders for file in sorted(each.glob("*.safetensors")) if path_kind(file) == "file"]


def _read(files: list[Path], ends: threading.Event) -> None:
    """Read files to their ends, or until `ends` is set; nothing of files that are larger than the share of the free memory."""
    with contextlib.suppress(OSError, ValueError, KeyError):  # without this, a start takes longer
        if sum(file.stat().st_size for file in files) > available_bytes("cpu", _SHARE):
            return
        buffer = bytearray(_CHUNK)
        for path in files:
            with path.open("rb", buffering=0) as file:
                while not ends.is_set() and file.readinto(buffer):
                    pass

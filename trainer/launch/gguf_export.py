"""Prepare a finished run for Ollama on a host: its greedy answers, and the merged model as GGUF.

`python -P -m trainer.launch.gguf_export` with a request as JSON on standard input; the last line of standard output is the reply.
Existing data is returned, and a plain Llama model is written, without torch: the imports of torch, transformers and peft
take longer than a small model. One child process does what needs them.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pkgutil
import runpy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from trainer.common.errors import UserError, first_line
from trainer.common.files import sha256_file, write_atomic
from trainer.common.inputs import RUN_FILES, refuse_special_files
from trainer.common.lost_connection import end_with_connection
from trainer.distributed.worker_process import die_with_launcher
from trainer.gguf.metadata import adds_bos, context_length, is_byte_level
from trainer.gguf.special import complete
from trainer.models.greedy_answers import greedy_answers, known_answers

QUANTIZATIONS = ("f16", "q8_0")
_SHOWN = 500  # characters of a child's error


def export(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of a run and, on request, its merged model as GGUF.

    `request`: `run_dir`; `weights`, digest of the adapter or model; `quantize`, one of `QUANTIZATIONS`, or an empty
    string if no GGUF is wanted; `converter_id`, which names the version of the converter; `converter`, its path as a
    zip file, or an empty string if the host does not have it yet. Raises UserError: the model cannot be converted.
    Returns `answers` as greedy_answers returns them; `gguf`: `path`, `bytes`, `sha256`, `adds_bos` and `context` of the
    file, or None; `needs_converter`: nothing was done, because the model needs the converter.
    """
    quantize = request["quantize"]
    if quantize not in ("", *QUANTIZATIONS):
        raise UserError(f"quantize is {quantize!r}, expected {' or '.join(QUANTIZATIONS)}")
    run_dir = Path(request["run_dir"])
    refuse_special_files(run_dir, "deploy", RUN_FILES)
    (run_dir / "deploy").mkdir(exist_ok=True)
    with (run_dir / "deploy" / "lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        gguf = _known_gguf(run_dir, request) or (_write_plain(run_dir, request) if quantize else None)
        if quantize and gguf is None and not request["converter"]:
            return {"answers": None, "gguf": None, "needs_converter": True}
        answers = known_answers(run_dir, request["weights"])
        if answers is None or (quantize and gguf is None):
            _compute(run_dir, request)
            answers, gguf = known_answers(run_dir, request["weights"]), _known_gguf(run_dir, request)
        return {"answers": answers, "gguf": gguf, "needs_converter": False}


def _known_gguf(run_dir: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Return the description of the GGUF file that was written before; None if there is none."""
    for writer in (_plain_writer(), request["converter_id"]) if request["quantize"] else ():
        target = _target(run_dir, request, writer)
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            found: dict[str, Any] = json.loads(target.with_suffix(".json").read_text(encoding="utf-8"))
            if target.stat().st_size == found["bytes"] and "context" in found:  # an earlier version has not written it
                return found
    return None


def _plain_writer() -> str:
    """Return what names the version of the code that writes such a file."""
    code = [pkgutil.get_data("trainer.gguf", f"{name}.py") or b"" for name in ("llama", "special")]
    return hashlib.sha256(b"".join(code)).hexdigest()


def _target(run_dir: Path, request: dict[str, Any], writer: str) -> Path:
    key = hashlib.sha256(f"{request['weights']} {writer}".encode()).hexdigest()[:16]
    return run_dir / "deploy" / f"{key}-{request['quantize']}.gguf"


def _write_plain(run_dir: Path, request: dict[str, Any]) -> dict[str, Any] | None:
    """Write the model without torch; return the description of the file, or None if it is not a plain Llama model."""
    import yaml

    try:
        from trainer.gguf.llama import UnsupportedModelError, write_llama
    except ImportError:  # an environment that an older trainyard has made has no gguf
        return None
    spec = yaml.safe_load((run_dir / "spec.yml").read_text(encoding="utf-8"))
    adapter = run_dir / "adapter" if spec.get("lora_r") else None
    own = adapter or run_dir / "model"
    with tempfile.TemporaryDirectory(dir=run_dir / "deploy") as work:
        aside = Path(work) / "model.gguf"
        try:
            fields = write_llama(Path(spec["model"]) if adapter else own, own, adapter, aside, request["quantize"])
        except UnsupportedModelError:
            return None
        return _keep(aside, _target(run_dir, request, _plain_writer()), fields)


def _keep(aside: Path, target: Path, fields: dict[str, Any]) -> dict[str, Any]:
    """Move a GGUF file with these fields to its place, remove those of other weights or writers, and return its description."""
    described = {"path": str(target), "bytes": aside.stat().st_size, "sha256": sha256_file(aside)}
    described |= {"adds_bos": adds_bos(fields), "context": context_length(fields)}
    for old in [*target.parent.glob("*.gguf"), *target.parent.glob("*-*.json")]:
        if old.name.partition("-")[0] != target.name.partition("-")[0]:
            old.unlink()
    aside.replace(target)
    write_atomic(target.with_suffix(".json"), json.dumps(described))
    return described


def _compute(run_dir: Path, request: dict[str, Any]) -> None:
    """Compute missing data in a child process. Raises UserError."""
    with tempfile.TemporaryDirectory(dir=run_dir / "deploy") as work:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "trainer.launch.gguf_export", json.dumps(request), work],
            capture_output=True,
            text=True,
            errors="replace",
            preexec_fn=die_with_launcher,
        )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"{run_dir}: the model cannot be prepared for Ollama: {why[:_SHOWN]}")


def compute(request: dict[str, Any], work: Path) -> None:
    """Compute missing data in this process. Raises UserError, and the exceptions of the converter."""
    from trainer.config import RunSpec, read_yaml
    from trainer.loop.final_export import merge_adapter
    from trainer.spec import make_spec

    run_dir = Path(request["run_dir"])
    values = read_yaml(run_dir / "spec.yml")
    spec = make_spec({name: value for name, value in values.items() if name in RunSpec.model_fields}, "spec.yml")
    greedy_answers(spec, run_dir, request["weights"])
    if not request["quantize"] or _known_gguf(run_dir, request):
        return
    model = run_dir / ("merged" if spec.lora_r else "model")
    if spec.lora_r and not model.exists():
        merge_adapter(spec, run_dir)
    zipfile.ZipFile(request["converter"]).extractall(work / "converter")
    aside = work / "model.gguf"
    fields = convert(str(work / "converter"), str(model), str(aside), request["quantize"])
    _keep(aside, _target(run_dir, request, request["converter_id"]), fields)


def convert(converter: str, model: str, target: str, quantize: str) -> dict[str, Any]:
    """Run llama.cpp's converter in this process; return the fields of the tokenizer without tokens, and the context."""
    sys.path[:0] = [converter, f"{converter}/gguf-py"]
    import conversion.base
    import gguf

    text_model: Any = conversion.base.TextModel
    original, sentencepiece = text_model.get_vocab_base_pre, text_model._create_vocab_sentencepiece

    def known_or_byte_level(self: Any, tokenizer: Any) -> str:
        try:
            return str(original(self, tokenizer))
        except NotImplementedError:
            with contextlib.suppress(OSError, ValueError):
                if is_byte_level(json.loads((Path(model) / "tokenizer.json").read_text(encoding="utf-8"))):
                    return "gpt-2"
            raise

    def only_with_its_file(self: Any) -> Any:  # the original imports its package even where the file is missing
        if not (Path(model) / "tokenizer.model").is_file():
            raise FileNotFoundError("tokenizer.model")
        return sentencepiece(self)

    write_special = gguf.SpecialVocab.add_to_gguf

    def complete_special(self: Any, *words: Any, **options: Any) -> None:
        complete(self, Path(model))
        write_special(self, *words, **options)

    gguf.SpecialVocab.add_to_gguf = complete_special  # type: ignore[method-assign]
    text_model.get_vocab_base_pre, text_model._create_vocab_sentencepiece = known_or_byte_level, only_with_its_file
    sys.argv = ["convert_hf_to_gguf.py", "--outfile", target, "--outtype", quantize, model]
    runpy.run_path(f"{converter}/convert_hf_to_gguf.py", run_name="__main__")
    fields = gguf.GGUFReader(target).fields
    return {
        name: field.contents()
        for name, field in fields.items()
        if (name.startswith("tokenizer.ggml.") and "tokens" not in name) or name.endswith(".context_length")
    }


def main() -> None:
    """Carry out one request; with the arguments REQUEST FOLDER compute its missing data in this process."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if len(sys.argv) > 1:
        try:
            return compute(json.loads(sys.argv[1]), Path(sys.argv[2]))
        except UserError as error:
            sys.exit(str(error))
    end_with_connection()
    sink = os.dup(1)
    os.dup2(2, 1)  # libraries print to standard output
    try:
        reply = export(json.loads(sys.stdin.read()))
    except UserError as error:
        reply = {"error": str(error)}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {first_line(error)}"}
    os.write(sink, json.dumps(reply).encode() + b"\n")
    return None


if __name__ == "__main__":
    main()

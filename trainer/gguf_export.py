"""Prepare a finished run for Ollama on a host: its greedy answers, and the merged model as GGUF.

`python -P -m trainer.gguf_export` with a request as JSON on standard input; the last line of standard output is the reply.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from trainer.config import RunSpec, make_spec, read_yaml
from trainer.errors import UserError, first_line
from trainer.export import merge_adapter
from trainer.files import sha256_file
from trainer.greedy_answers import greedy_answers

QUANTIZATIONS = ("f16", "q8_0")
_NO_TEMPLATE = 500  # characters of a converter's error


def export(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answers of a run and, where asked, its merged model as GGUF.

    Args:
        request: `run_dir`; `weights`, digest of the adapter or model; `converter`, path of the converter as a zip file, or
            an empty string if no GGUF is wanted; `quantize`, one of `QUANTIZATIONS`.

    Returns:
        `answers` as greedy_answers returns them; `gguf`: `path`, `bytes`, `sha256` and `adds_bos` of the file, or None.

    Raises:
        UserError: the model cannot be converted.
    """
    run_dir = Path(request["run_dir"])
    folder = run_dir / "deploy"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        values = read_yaml(run_dir / "spec.yml")
        spec = make_spec({name: value for name, value in values.items() if name in RunSpec.model_fields}, "spec.yml")
        gguf = _gguf(spec, run_dir, request) if request["converter"] else None
        return {"answers": greedy_answers(spec, run_dir, request["weights"]), "gguf": gguf}


def _gguf(spec: RunSpec, run_dir: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Return the description of the merged model's GGUF; make it if it is not there."""
    quantize, archive = request["quantize"], Path(request["converter"])
    if quantize not in QUANTIZATIONS:
        raise UserError(f"quantize is {quantize!r}, expected {' or '.join(QUANTIZATIONS)}")
    key = hashlib.sha256(f"{request['weights']} {archive.name}".encode()).hexdigest()[:16]
    target = run_dir / "deploy" / f"{key}-{quantize}.gguf"
    note = target.with_suffix(".json")
    with contextlib.suppress(OSError, ValueError):
        known: dict[str, Any] = json.loads(note.read_text())
        if target.stat().st_size == known["bytes"]:
            return known
    model = run_dir / ("merged" if spec.lora_r else "model")
    if spec.lora_r and not model.exists():
        merge_adapter(spec, run_dir)
    with tempfile.TemporaryDirectory(dir=run_dir / "deploy") as work:
        zipfile.ZipFile(archive).extractall(f"{work}/converter")
        aside = Path(work) / "model.gguf"
        words = [f"{work}/converter", str(model), str(aside), quantize]
        done = subprocess.run(
            [sys.executable, "-P", "-m", "trainer.gguf_export", *words],
            capture_output=True,
            text=True,
            errors="replace",
        )
        if done.returncode or not aside.exists():
            why = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise UserError(f"{model} cannot be converted to GGUF: {why[:_NO_TEMPLATE]}")
        adds_bos = json.loads(done.stdout.strip().splitlines()[-1])
        described = {
            "path": str(target),
            "bytes": aside.stat().st_size,
            "sha256": sha256_file(aside),
            "adds_bos": adds_bos,
        }
        aside.replace(target)
    note.write_text(json.dumps(described))
    return described


def convert(converter: str, model: str, target: str, quantize: str) -> None:
    """Run llama.cpp's converter in this process; print whether the model's tokenizer adds the first token."""
    sys.path[:0] = [converter, f"{converter}/gguf-py"]
    import conversion.base
    import gguf

    text_model: Any = conversion.base.TextModel
    original, sentencepiece = text_model.get_vocab_base_pre, text_model._create_vocab_sentencepiece

    def known_or_byte_level(self: Any, tokenizer: Any) -> str:
        try:
            return str(original(self, tokenizer))
        except NotImplementedError:
            if not _is_byte_level(Path(model)):
                raise
            return "gpt-2"

    def only_with_its_file(self: Any) -> Any:  # the original imports its package even where the file is missing
        if not (Path(model) / "tokenizer.model").is_file():
            raise FileNotFoundError("tokenizer.model")
        return sentencepiece(self)

    text_model.get_vocab_base_pre, text_model._create_vocab_sentencepiece = known_or_byte_level, only_with_its_file
    sys.argv = ["convert_hf_to_gguf.py", "--outfile", target, "--outtype", quantize, model]
    runpy.run_path(f"{converter}/convert_hf_to_gguf.py", run_name="__main__")
    fields = gguf.GGUFReader(target).fields
    values = {
        name: field.contents()
        for name, field in fields.items()
        if name.startswith("tokenizer.ggml.") and "tokens" not in name
    }
    print(json.dumps(adds_bos(values)))


def adds_bos(fields: dict[str, Any]) -> bool:
    """Return whether llama.cpp puts the first token before each prompt, from the fields of a GGUF file."""
    said = fields.get("tokenizer.ggml.add_bos_token")
    if isinstance(said, bool):
        return said
    if fields.get("tokenizer.ggml.model") == "gpt2":
        return fields.get("tokenizer.ggml.pre") in ("llama3", "llama-v3", "llama-bpe", "falcon3", "tekken", "chameleon")
    return True


def _is_byte_level(model: Path) -> bool:
    """Return whether the tokenizer splits text as GPT-2's does, and in no other way."""
    try:
        pre: Any = json.loads((model / "tokenizer.json").read_text())["pre_tokenizer"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    return isinstance(pre, dict) and pre.get("type") == "ByteLevel" and pre.get("use_regex", True) is True


def main() -> None:
    """Carry out one request, or with arguments one conversion."""
    if len(sys.argv) > 1:
        return convert(*sys.argv[1:])
    os.environ["HF_HUB_OFFLINE"] = "1"
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

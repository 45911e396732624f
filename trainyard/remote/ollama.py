"""Deploy a model to the Ollama server of this host, over the host's own addresses. Standard library only.

A record beside the data of the cluster says which models were deployed. A model without a record belongs to another owner,
and is neither replaced nor removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from trainer.supervise.files import write_atomic
from trainyard.ollama.client import OllamaClient, OllamaError, full_name
from trainyard.remote.receive import prepare_incoming

NEW_FORM = (0, 5, 5)  # the first version whose /api/create takes `files` and `adapters`
ADAPTERS_END, ADAPTERS_AGAIN = (0, 6, 0), (0, 30, 0)  # the versions between ran models without adapters
_CHECK_TAG, _OLD_TAG = (
    "trainyard-check",
    "trainyard-old",
)  # of the model that is checked, and of the one that it replaces
_ANSWER_LIMIT = 300.0  # s for one answer, with the time to load the model
_CREATE_LIMIT = 1800.0  # s
_SHAPE = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")


def ollama(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one step of a deployment.

    Args:
        request: `step`: `state`, `prepare`, `create` or `remove`; `urls` of the server, the first that answers is
            taken; `name` of the model; `records`, the folder of the records; and what the step takes.

    Returns:
        What the step returns, see below.

    Raises:
        ValueError: the server refuses the step, or does not answer.
    """
    try:
        client = _connect(request["urls"])
        return dict(_STEPS[request["step"]](client, request))
    except OllamaError as error:
        raise ValueError(f"Ollama: {error}") from None


def equal_answers(expected: list[str], answers: list[str]) -> int:
    """Return the number of equal answers, without regard to spaces around them."""
    return sum(one.strip() == other.strip() for one, other in zip(expected, answers, strict=True))


def _connect(urls: list[str]) -> OllamaClient:
    errors = []
    for url in urls:
        try:
            client = OllamaClient(url)
            client.version()
            return client
        except (OllamaError, OSError) as error:
            errors.append(f"{url}: {error}")
    raise ValueError(f"no Ollama server answers ({'; '.join(errors)}); start it, or set ollama_url")


def _state(client: OllamaClient, request: dict[str, Any]) -> dict[str, Any]:
    """Return `version`, `adapters`, `digest` of the model or an empty string, `record` or None, and `base` or None."""
    version = client.version()
    tags = client.tags()
    base = request["base"]
    return {
        "version": list(version),
        "adapters": version < ADAPTERS_END or version >= ADAPTERS_AGAIN,
        "digest": tags.get(full_name(request["name"]), ""),
        "record": _read_record(request),
        "base": _describe(client, request, tags[full_name(base)]) if base and full_name(base) in tags else None,
    }


def _describe(client: OllamaClient, request: dict[str, Any], digest: str) -> dict[str, Any]:
    """Return what the base model must have in common with the trained one."""
    info = client.show(request["base"], verbose=True).get("model_info")
    info = info if isinstance(info, dict) else {}
    arch = str(info.get("general.architecture"))
    tokens = info.get("tokenizer.ggml.tokens")
    known = tokens[: request["tokens"]] if isinstance(tokens, list) else []
    small = {name: value for name, value in info.items() if not isinstance(value, list | dict)}
    fields = {name: value for name, value in small.items() if name.startswith("tokenizer.ggml.")}
    return {
        "digest": digest,
        "architecture": arch,
        "shape": [value if isinstance(value := info.get(f"{arch}.{name}"), int) else 0 for name in _SHAPE],
        "tokens": hashlib.sha256(json.dumps(known).encode()).hexdigest(),
        "fields": {name: str(value) for name, value in fields.items()},
    }


def _prepare(client: OllamaClient, request: dict[str, Any]) -> dict[str, Any]:
    """Return whether the server lacks the blob `sha256`; if so, create the folder `incoming` for its file."""
    lacking = not client.has_blob(request["sha256"])
    if lacking:
        prepare_incoming(Path(request["incoming"]))
    return {"lacking": lacking}


def _create(client: OllamaClient, request: dict[str, Any]) -> dict[str, Any]:
    """Create the model under a temporary name, ask it, and give it its name if it answers as trained.

    The server checks the digest of the file, which is removed afterwards. Otherwise the model that has the name stays.

    Args:
        request: `file`, path of the GGUF file, used if the server lacks it; `sha256` of it; `base`, the base of an adapter, or
            empty for a whole model; `template`; `prompts`, `options`; `expected`, one answer for each prompt, of which
            `least` must be equal; `key`, which identifies what is deployed.

    Returns:
        `answers`, one text for each prompt; `accepted`.
    """
    temporary, file = _tagged(request, _CHECK_TAG), Path(request["file"])
    try:
        client.put_blob(file, request["sha256"], deadline=_CREATE_LIMIT)
        client.delete(temporary)
        client.create(create_body(client.version(), temporary, request), deadline=_CREATE_LIMIT)
        answers = [_answer(client, temporary, prompt, request["options"]) for prompt in request["prompts"]]
        accepted = equal_answers(request["expected"], answers) >= request["least"]
        if accepted:
            _accept(client, request, temporary)
        return {"answers": answers, "accepted": accepted}
    except FileNotFoundError:
        raise ValueError(f"{file} is missing; run the same command again") from None
    finally:
        file.unlink(missing_ok=True)
        with contextlib.suppress(OllamaError):
            client.delete(temporary)


def _answer(client: OllamaClient, name: str, prompt: dict[str, Any], options: dict[str, Any]) -> str:
    more: dict[str, Any] = {"options": options, "deadline": _ANSWER_LIMIT, "first": _ANSWER_LIMIT}
    if "messages" in prompt:
        return client.chat(name, prompt["messages"], **more).text
    return client.generate(name, prompt["prompt"], raw=True, **more).text


def create_body(version: tuple[int, int, int], name: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return the body of /api/create in the form that this version of the server takes."""
    digest, base, template = f"sha256:{request['sha256']}", request["base"], request["template"]
    if version >= NEW_FORM:
        source: dict[str, Any] = (
            {"from": base, "adapters": {"adapter.gguf": digest}} if base else {"files": {"model.gguf": digest}}
        )
        return {"model": name, "template": template, **source}
    if '"""' in template:
        raise ValueError('the template contains """, which this version of Ollama cannot read')
    head = f"FROM {base}\nADAPTER @{digest}" if base else f"FROM @{digest}"
    return {"model": name, "modelfile": f'{head}\nTEMPLATE """{template}"""\n'}


def _accept(client: OllamaClient, request: dict[str, Any], temporary: str) -> None:
    """Give the model its name and write the record. Deleting the replaced model removes the files that only it used."""
    name, old = full_name(request["name"]), _tagged(request, _OLD_TAG)
    if client.digest(name):
        client.copy(name, old)
    client.copy(temporary, name)
    client.delete(old)
    record = {"name": name, "key": request["key"], "digest": client.digest(name)}
    path = _record_path(request)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(record).encode())


def _remove(client: OllamaClient, request: dict[str, Any]) -> dict[str, Any]:
    """Remove a deployed model and its record. `check` changes nothing. `foreign`: there is such a model, but not ours."""
    name, record = full_name(request["name"]), _read_record(request)
    digest = client.digest(name)
    ours = record is not None and digest in ("", record["digest"])
    if request["check"] or not ours:
        return {"changed": bool(ours), "foreign": bool(digest and not ours)}
    for model in (name, _tagged(request, _CHECK_TAG), _tagged(request, _OLD_TAG)):
        client.delete(model)
    _record_path(request).unlink(missing_ok=True)
    return {"changed": True, "foreign": False}


def _tagged(request: dict[str, Any], tag: str) -> str:
    return f"{full_name(request['name']).rpartition(':')[0]}:{tag}"


def _record_path(request: dict[str, Any]) -> Path:
    return Path(request["records"]) / f"{hashlib.sha256(full_name(request['name']).encode()).hexdigest()[:32]}.json"


def _read_record(request: dict[str, Any]) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        record = json.loads(_record_path(request).read_bytes())
        if record["name"] == full_name(request["name"]):
            return {name: str(record[name]) for name in ("name", "key", "digest")}
    return None


_STEPS = {"state": _state, "prepare": _prepare, "create": _create, "remove": _remove}

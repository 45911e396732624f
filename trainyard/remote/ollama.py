"""Deploy a model to the Ollama server of this host, over the host's own addresses. Standard library only.

A record next to the data of the cluster lists the deployed models. A model without a record belongs to another owner,
and is neither replaced nor removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainer.generation.ollama_client import OllamaClient, OllamaError
from trainer.generation.ollama_models import DEFAULTS, create_body, small_model_options, takes_adapters
from trainer.generation.ollama_names import MODEL_NAME, full_name, same_model, server_form
from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import read_json
from trainyard.remote.receive import incoming_folder, prepare_incoming

# Tags of the model that is checked, of the one that it replaces, and of the one that the server quantizes.
TAGS = _CHECK_TAG, _OLD_TAG, _SOURCE_TAG = ("trainyard-check", "trainyard-old", "trainyard-source")
_ANSWER_LIMIT = 300.0  # s for one answer, with the time to load the model
_LOADED = 20e6  # bytes/s at which a server loads a model at least
_KEPT = "10m"  # how long a model stays in memory between two answers
_LOSSES = 3  # lost connections after which an answer is given up
_CREATE_LIMIT = 1800.0  # s
BASES_LIMIT = 3  # models of a server that are tried as the base of an adapter
_READ_LIMIT = 64  # models of a server that are read to find them
_SEARCH_LIMIT = 30.0  # s to read them
_SHAPE = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")


def ollama(request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one step of a deployment.

    `request`: `step`: `state`, `prepare`, `create` or `remove`; `urls` of the server, the first that answers is taken;
    `name` of the model; `records`, the folder of the records; and what the step takes. Returns what the step returns,
    see below. Raises ValueError: the server refuses the step, or does not answer.
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
    """Return the state of the server.

    `request`: `base`, the name of a model, or empty; `like`, None or what `_search` takes; `tokens`, the size of the
    vocabulary of the run. Returns `server`, see `_machine_server`; `version`; `adapters`, whether it takes them;
    `digest` of the model or an empty string; `record` or None; `bases`, descriptions of the model `base`, or of those
    that `like` fits; `models`, the number of models that are no part of this deployment, and `read`, how many of them
    were read to find `bases`.
    """
    version = client.version()
    tags = client.tags()
    own = {server_form(name) for name in (request["name"], *(_tagged(request, tag) for tag in TAGS))}
    others = {name: digest for name, digest in tags.items() if server_form(name) not in own}
    takes, bases, read = takes_adapters(version), [], 0
    if (base := request["base"]) and (digest := same_model(tags, base)):
        bases = [_describe(base, digest, client.show(base, verbose=True), request["tokens"])]
    elif request["like"] and takes:
        bases, read = _search(client, request, others)
    return {
        "server": _machine_server(client),
        "version": list(version),
        "adapters": takes,
        "digest": same_model(tags, request["name"]),
        "record": _read_record(request),
        "bases": bases,
        "models": len(others),
        "read": read,
    }


def _machine_server(client: OllamaClient) -> str:
    """Return what identifies a server of this machine: boot, network namespace and listening socket. Empty for one of another machine."""
    url = urlsplit(client.url)
    try:
        family, _, _, _, address = socket.getaddrinfo(url.hostname, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)  # only an address of this machine can be bound
    except OSError:
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    listener = _listener(family, str(address[0]), client.port)
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino} {listener}{url.path}"


def _listener(family: int, address: str, port: int) -> str:
    """Return the inode of the socket that listens at an address of this machine; address and port if none is known."""
    listening: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = map(str.split, Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:])
            listening |= {row[1]: row[9] for row in rows if row[3] == "0A"}
    packed = socket.inet_pton(family, address.partition("%")[0])
    words = (int.from_bytes(packed[place : place + 4], sys.byteorder) for place in range(0, len(packed), 4))
    own = "".join(f"{word:08X}" for word in words)
    every = ["0" * 8] if family == socket.AF_INET else []
    found = (listening.get(f"{each}:{port:04X}") for each in (own, *every, "0" * 32))
    return next(filter(None, found), f"{address} {port}")


def _search(client: OllamaClient, request: dict[str, Any], tags: dict[str, str]) -> tuple[list[dict[str, Any]], int]:
    """Return descriptions of the first models that may be the base of the adapter, and the number of models read.

    Models that trainyard deployed come last, and models whose names resemble that of the base model come first. The
    tokens of a model, some MB, are read only if its shape fits. `request`: `like`: `architecture`, `shape` and `tokens`
    as in a description; `name` of the run's base model.
    """
    like, wanted = request["like"], _words(request["like"]["name"])

    def order(name: str) -> tuple[bool, int, str]:
        deployed = _read_record(request | {"name": name}) is not None
        return deployed, -len(wanted & _words(name)), name

    names = [name for name in tags if MODEL_NAME.fullmatch(name) and not name.endswith(TAGS)]
    found: list[dict[str, Any]] = []
    read, end = 0, time.monotonic() + _SEARCH_LIMIT
    for name in sorted(names, key=order)[:_READ_LIMIT]:
        left = end - time.monotonic()
        if len(found) == BASES_LIMIT or left <= 0:
            break
        read += 1
        if tags[name] in (base["digest"] for base in found):
            continue
        with contextlib.suppress(OllamaError):  # a damaged model is not a base
            if not _fits(client.show(name, deadline=left), like):
                continue
            shown = client.show(name, verbose=True, deadline=max(0.1, end - time.monotonic()))
            base = _describe(name, tags[name], shown, request["tokens"])
            if base["tokens"] == like["tokens"]:
                found.append(base)
    return found, read


def _fits(shown: dict[str, Any], like: dict[str, Any]) -> bool:
    """Return whether a model has the architecture and the shape of `like`, and neither an adapter nor messages of its own.

    The model that is created would inherit an adapter, a system message and messages.
    """
    if shown.get("system") or shown.get("messages") or "\nADAPTER " in str(shown.get("modelfile")):
        return False
    info = _model_info(shown)
    architecture = info.get("general.architecture")
    return bool(architecture == like["architecture"] and _shape(architecture, info) == like["shape"])


def _words(name: str) -> set[str]:
    """Return the parts of a model's name: `Llama-3.1-8B` and `llama3.1:8b` have the same ones."""
    return set(re.findall(r"[a-z]+|\d+[a-z]*", name.lower()))


def _model_info(shown: dict[str, Any]) -> dict[str, Any]:
    info = shown.get("model_info")
    return info if isinstance(info, dict) else {}


def _shape(architecture: str, info: dict[str, Any]) -> list[int]:
    sizes = [info.get(f"{architecture}.{name}") for name in _SHAPE]
    if sizes[-1] is None:  # GGUF omits the number of key heads where all heads have one
        sizes[-1] = sizes[-2]
    return [_integer(size) for size in sizes]


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _describe(name: str, digest: str, shown: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the properties that a base model must share with the trained one, with the first `count` tokens.

    `parameters`: those of DEFAULTS that the base sets, and a model that is made of it inherits.
    """
    info = _model_info(shown)
    own = {line.split()[0] for line in str(shown.get("parameters") or "").splitlines() if line.strip()}
    architecture = str(info.get("general.architecture"))
    tokens = info.get("tokenizer.ggml.tokens")
    known = tokens[:count] if isinstance(tokens, list) else []
    small = {key: value for key, value in info.items() if not isinstance(value, list | dict)}
    return {
        "name": name,
        "digest": digest,
        "architecture": architecture,
        "shape": _shape(architecture, info),
        "tokens": hashlib.sha256(json.dumps(known).encode()).hexdigest(),
        "context": max(0, _integer(info.get(f"{architecture}.context_length"))),
        "fields": {key: str(value) for key, value in small.items() if key.startswith("tokenizer.ggml.")},
        "parameters": sorted(own & DEFAULTS.keys()),
    }


def _prepare(client: OllamaClient, request: dict[str, Any]) -> dict[str, Any]:
    """Return whether the server lacks the blob `sha256`; if so, create the folder `incoming` for its file."""
    lacking = not client.has_blob(request["sha256"])
    if lacking:
        prepare_incoming(incoming_folder(request["incoming"]))
    return {"lacking": lacking}


def _create(client: OllamaClient, request: dict[str, Any]) -> dict[str, Any]:
    """Create the model under a temporary name, send prompts to it, and rename it if its answers are those of the
    trained model.

    The server checks the digest of the file, which is removed afterwards. Otherwise the model that has the name stays.
    `request`: `file`, path of the GGUF file, used if the server lacks it; `sha256` of it; `base`, the base of an
    adapter, or empty for a whole model; `quantize`, the type to which the server converts the weights, or empty;
    `template`, `parameters` and `system` of the model; `prompts`, `options`; `answer_limit`, seconds for the first
    answer, or 0; `expected`, one answer for each prompt, of which `least` must be equal; `key`, which identifies what is
    deployed; `refused`, the keys of what was tried before.
    Returns `answers`, one text for each prompt; `accepted`; `error` and no answers if the server refuses the model.
    """
    temporary, arrived = _tagged(request, _CHECK_TAG), Path(request["file"])
    path = incoming_folder(str(arrived.parent)) / arrived.name
    try:
        if not client.has_blob(request["sha256"]):
            with path.open_read() as file:
                client.put_blob(Path(f"/proc/self/fd/{file.fileno()}"), request["sha256"], deadline=_CREATE_LIMIT)
        client.delete(temporary)
        try:
            answers = _try(client, request, temporary)
            # Ollama 0.9.3 makes zeros of 16-bit weights until it has loaded a model, which the answers have required.
            if request["quantize"] and not equal_answers(request["expected"], answers):
                answers = _try(client, request, temporary)
            accepted = equal_answers(request["expected"], answers) >= request["least"]
            if accepted and request["system"]:  # the prompts have the system messages of the training, or none
                _make(client, temporary, temporary, system=request["system"])
                if client.show(temporary).get("system") != request["system"]:
                    raise OllamaError("it does not keep the system message as it is")
        except OllamaError as error:
            return {"answers": [], "accepted": False, "error": str(error)}
        if accepted:
            _accept(client, request, temporary)
        return {"answers": answers, "accepted": accepted}
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; run the same command again") from None
    finally:
        path.remove(missing_ok=True)
        for tag in (_CHECK_TAG, _SOURCE_TAG):
            with contextlib.suppress(OllamaError):
                client.delete(_tagged(request, tag))


def _try(client: OllamaClient, request: dict[str, Any], name: str) -> list[str]:
    """Create the model `name` of a request of `_create`; return its answers. Raises OllamaError."""
    source, more = f"@sha256:{request['sha256']}", {key: request[key] for key in ("template", "parameters", "quantize")}
    if request["quantize"]:  # of a model, not of the blob, which only a model takes with it when it is deleted
        _make(client, _tagged(request, _SOURCE_TAG), source)
        source = _tagged(request, _SOURCE_TAG)
    elif request["base"]:
        source, more = request["base"], more | {"adapter": source}
    _make(client, name, source, **more)
    options = request["options"] | small_model_options(client, name)
    limits = [request["answer_limit"] or max(_ANSWER_LIMIT, client.size(name) / _LOADED), _ANSWER_LIMIT]
    prompts = request["prompts"]
    return [
        _answer(
            client, name, prompt, options, limits[place > 0], {"keep_alive": _KEPT} if place + 1 < len(prompts) else {}
        )
        for place, prompt in enumerate(prompts)
    ]


def _answer(
    client: OllamaClient,
    name: str,
    prompt: dict[str, Any],
    options: dict[str, Any],
    limit: float,
    fields: dict[str, Any],
) -> str:
    """Return an answer within a limit in seconds, also of a server that says to wait. Raises OllamaError."""
    end, losses, pause = time.monotonic() + limit, 0, 0.5
    while True:
        left = max(0.1, end - time.monotonic())
        more: dict[str, Any] = {"options": options, "deadline": left, "first": left, "fields": fields}
        try:
            if "messages" in prompt:
                return client.chat(name, prompt["messages"], **more).text
            return client.generate(name, prompt["prompt"], raw=True, **more).text
        except OllamaError as error:
            losses += error.failure == "lost"
            if error.failure not in ("wait", "lost") or losses == _LOSSES or time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        pause = min(30.0, 2 * pause)


def _make(client: OllamaClient, name: str, source: str, **more: Any) -> None:
    """Create a model; `more` as in `create_body`. Raises OllamaError."""
    client.create(create_body(client.version(), name, source, **more), deadline=_CREATE_LIMIT)


def _accept(client: OllamaClient, request: dict[str, Any], temporary: str) -> None:
    """Give the model its name and write the record. Deleting the replaced model removes the files that only it used."""
    name, old = full_name(request["name"]), _tagged(request, _OLD_TAG)
    if client.digest(name):
        client.copy(name, old)
    client.copy(temporary, name)
    if not (digest := client.digest(name)):
        raise OllamaError(f"it lists no model {name} after the model got this name")
    client.delete(old)
    record = {"name": server_form(name), "key": request["key"], "digest": digest, "refused": request["refused"]}
    path = _record_path(request)
    path.parent.mkdir(parents=True, exist_ok=True)
    link_free(path).write(json.dumps(record).encode())


def _remove(client: OllamaClient, request: dict[str, Any]) -> dict[str, Any]:
    """Remove a deployed model and its record. `check` changes nothing. `foreign`: there is such a model, but not ours."""
    name, record = full_name(request["name"]), _read_record(request)
    digest = client.digest(name)
    ours = record is not None and (not digest or digest == record["digest"])
    if request["check"] or not ours:
        return {"changed": bool(ours), "foreign": bool(digest and not ours)}
    for model in (name, *(_tagged(request, tag) for tag in TAGS)):
        client.delete(model)
    _record_path(request).unlink(missing_ok=True)
    return {"changed": True, "foreign": False}


def _tagged(request: dict[str, Any], tag: str) -> str:
    return f"{full_name(request['name']).rpartition(':')[0]}:{tag}"


def _record_path(request: dict[str, Any]) -> Path:
    return Path(request["records"]) / f"{hashlib.sha256(server_form(request['name']).encode()).hexdigest()[:32]}.json"


def _read_record(request: dict[str, Any]) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        record = read_json(_record_path(request)) or {}
        if record["name"] == server_form(request["name"]):
            refused = [str(key) for key in record.get("refused", [])][:BASES_LIMIT]
            return {"refused": refused} | {name: str(record[name]) for name in ("name", "key", "digest")}
    return None


_STEPS = {"state": _state, "prepare": _prepare, "create": _create, "remove": _remove}

"""A server with the part of Ollama's API that a deployment needs, in threads of this process. It follows the documented API.

It refuses the form of /api/create that its version does not have, blobs whose digest is wrong, and models that are missing.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

from threaded_server import QuietHandler, running


class Target:
    """The state of one server. `answer` gets the model's /api/create body and the question."""

    def __init__(self, version: str, answer: Callable[[dict[str, Any], str], str]) -> None:
        self.version, self.answer = version, answer
        self.models: dict[str, dict[str, Any]] = {}
        self.blobs: set[str] = set()
        self.info: dict[str, Any] = {}  # of /api/show
        self.infos: dict[str, dict[str, Any]] = {}  # of models that differ from `info`
        self.log: list[str] = []
        self.url = ""

    def digest(self, name: str) -> str:
        return hashlib.sha256(json.dumps(self.models[name] | {"model": ""}, sort_keys=True).encode()).hexdigest()

    def show(self, name: str, verbose: bool) -> dict[str, Any]:
        """Return /api/show of a model. As with 0.5.4, there are no tokens unless `verbose` is set."""
        name = name if name in self.models else f"{name}:latest"
        made, info = self.models[name], self.infos.get(name, self.info)
        text = made.get("modelfile") or "\nADAPTER /blob" * bool(made.get("adapters"))
        system = re.search('SYSTEM """(.*?)"""', text) or {1: made.get("system", "")}
        more = {} if verbose else {"tokenizer.ggml.tokens": None}
        return {"modelfile": f"# generated\n{text}", "system": system[1], "model_info": info | more}

    def create(self, body: dict[str, Any]) -> str:
        """Create a model; return the error, or an empty string."""
        new = tuple(map(int, self.version.split("."))) >= (0, 5, 5)
        if new == ("modelfile" in body):
            return "neither 'from' or 'files' was specified" if new else "path or Modelfile are required"
        text = body.get("modelfile", "")
        used = {**body.get("files", {}), **body.get("adapters", {})}.values() if new else []
        used = list(used) + [word[1:] for word in text.split() if word.startswith("@sha256:")]
        if not all(blob in self.blobs for blob in used):
            return "blob not found"
        source = body.get("from") or (text.split()[1] if text and "FROM @" not in text else "")
        if source and not {source, f"{source}:latest"} & set(self.models):
            return "model not found"
        made = self.models.get(source, {})
        self.models[body["model"]] = made | body | {"modelfile": made.get("modelfile", "") + text}
        return ""

    def listed(self, name: str) -> str:
        """Return the spelling under which a model is listed: a server compares names without case, registry and library."""
        name = name.removeprefix("registry.ollama.ai/").removeprefix("library/")
        name = name if ":" in name else f"{name}:latest"
        return next((known for known in self.models if known.lower() == name.lower()), name)


class _Handler(QuietHandler):
    target: Target

    def send(self, status: int, *lines: dict[str, Any]) -> None:
        self.reply(status, "".join(json.dumps(line) + "\n" for line in lines))

    def _body(self) -> bytes:
        self.target.log.append(f"{self.command} {self.path}")
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_HEAD(self) -> None:
        self._body()
        self.send(200 if self.path.rpartition("/")[2] in self.target.blobs else 404)

    def do_GET(self) -> None:
        self._body()
        models = [{"name": name, "digest": self.target.digest(name)} for name in self.target.models]
        self.send(200, {"version": self.target.version} if self.path == "/api/version" else {"models": models})

    def do_DELETE(self) -> None:
        known = self.target.models.pop(self.target.listed(json.loads(self._body())["model"]), None)
        self.send(200 if known else 404)

    def do_POST(self) -> None:
        data, target = self._body(), self.target
        if self.path.startswith("/api/blobs/"):
            digest = self.path.rpartition("/")[2]
            right = digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
            target.blobs |= {digest} if right else set()
            return self.send(201 if right else 400, {})
        body = json.loads(data)
        if self.path == "/api/create":
            error = target.create(body)
            return self.send(400, {"error": error}) if error else self.send(200, {"status": "success"})
        if self.path == "/api/copy":
            target.models[target.listed(body["destination"])] = target.models[target.listed(body["source"])]
            return self.send(200)
        if self.path == "/api/show":
            return self.send(200, target.show(body["model"], body["verbose"]))
        question = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        text = target.answer(target.models[body["model"]], question)
        last = {"done": True, "done_reason": "stop", "eval_count": 1}
        return self.send(
            200, {"message": {"content": text}, **last} if "messages" in body else {"response": text, **last}
        )


@contextlib.contextmanager
def serve_target(address: str, version: str, answer: Callable[[dict[str, Any], str], str]) -> Iterator[Target]:
    """Run a server on a free port of an address until the block ends."""
    target = Target(version, answer)
    server = ThreadingHTTPServer((address, 0), type("Handler", (_Handler,), {"target": target}))
    target.url = f"http://{address}:{server.server_port}"
    with running(server):
        yield target

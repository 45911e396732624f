"""A stand-in for the Hugging Face Hub: serves folders of this machine as repositories, and counts the bytes that it sends.

Run it as a program to serve on a port: `python fake_hub.py ADDRESS PORT FOLDER`, where FOLDER has models/OWNER/NAME and
datasets/OWNER/NAME.
"""

import base64
import hashlib
import json
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from threaded_server import QuietHandler

_API = re.compile(r"/api/(models|datasets)/([^/?]+/[^/?]+)(?:/revision/[^/?]+)?(?:\?.*)?")
_TREE = re.compile(r"/api/(models|datasets)/([^/?]+/[^/?]+)/tree/[^/?]+.*")
_UPLOAD = re.compile(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main.*")
_WITHOUT_OWNER = re.compile(r"((?:/api)?/datasets/)([^/?]+)((?:/(?:revision|tree|resolve)/.*|\?.*)?)")
_FILE = re.compile(r"/(datasets/)?([^/?]+/[^/?]+)/resolve/[^/]+/(.+?)(?:\?.*)?")


class FakeHub:
    """The server, in threads of this process."""

    def __init__(self, folder: Path, address: str = "127.0.0.1", port: int = 0) -> None:
        hub = self
        self.folder, self.sent, self.downloads = folder, 0, []  # type: ignore[var-annotated]
        self.created: list[dict[str, Any]] = []

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_POST(self) -> None:
                hub.receive(self)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

        self.server = ThreadingHTTPServer((address, port), Handler)
        self.url = f"http://{address}:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler, body: bool) -> None:
        """Answer one request."""
        path = unquote(handler.path)
        if found := _WITHOUT_OWNER.fullmatch(path):
            if owned := next(self.folder.glob(f"datasets/*/{found[2]}"), None):
                place = f"{found[1]}{owned.parent.name}/{owned.name}{found[3]}"
                return self.send(handler, 307, b"", {"Location": place}, body)
        elif found := _API.fullmatch(path) or _TREE.fullmatch(path):
            repository = self.folder / found[1] / found[2]
            if repository.is_dir():
                answer = self.tree(repository) if _TREE.fullmatch(path) else self.about(repository, found[2])
                return self.send(handler, 200, json.dumps(answer).encode(), {}, body)
        elif found := _FILE.fullmatch(path):
            repository = self.folder / ("datasets" if found[1] else "models") / found[2]
            file = repository / found[3]
            if file.is_file():
                data = file.read_bytes()
                headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": self.commit(repository)}
                if body:
                    self.downloads.append(found[3])
                return self.send(handler, 200, data, headers, body)
        return self.send(handler, 404, b"{}", {"X-Error-Code": "EntryNotFound"}, body)

    def receive(self, handler: BaseHTTPRequestHandler) -> None:
        """Create a repository, or write the files of a commit. Only the token `hf_right` may."""
        body = handler.rfile.read(int(handler.headers["Content-Length"]))
        if handler.headers["Authorization"] != "Bearer hf_right":
            return self.send(handler, 401, b"{}", {}, True)
        answer: dict[str, Any] = {"errors": [], "warnings": []}
        if handler.path == "/api/repos/create":
            values = json.loads(body)
            self.created.append(values)
            name = f"{values.get('organization') or 'me'}/{values['name']}"
            (self.folder / "models" / name).mkdir(parents=True, exist_ok=True)
            answer = {"url": f"{self.url}/{name}"}
        elif found := _UPLOAD.fullmatch(handler.path):
            if found[2] == "preupload":
                how = {"uploadMode": "regular", "shouldIgnore": False}
                answer = {"files": [one | how for one in json.loads(body)["files"]]}
            else:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        file = self.folder / "models" / found[1] / line["value"]["path"]
                        file.parent.mkdir(parents=True, exist_ok=True)
                        file.write_bytes(base64.b64decode(line["value"]["content"]))
                answer = {"commitUrl": f"{self.url}/{found[1]}/commit/1", "commitOid": "1" * 40}
        return self.send(handler, 200, json.dumps(answer).encode(), {}, True)

    def send(
        self, handler: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str], body: bool
    ) -> None:
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(data)), "Accept-Ranges": "bytes"} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        if body:
            handler.wfile.write(data)
            self.sent += len(data)

    def files(self, repository: Path) -> list[Path]:
        return sorted(path for path in repository.rglob("*") if path.is_file())

    def commit(self, repository: Path) -> str:
        digest = hashlib.sha1(usedforsecurity=False)
        for path in self.files(repository):
            digest.update(str(path.relative_to(repository)).encode() + path.read_bytes())
        return digest.hexdigest()

    def about(self, repository: Path, name: str) -> dict[str, Any]:
        siblings = [{"rfilename": file["path"], "size": file["size"]} for file in self.tree(repository)]
        about = {"_id": "1", "id": name, "sha": self.commit(repository), "siblings": siblings}
        return about | {"tags": [], "downloads": 1}

    def tree(self, repository: Path) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": str(path.relative_to(repository)), "size": path.stat().st_size, "oid": "0" * 40}
            for path in self.files(repository)
        ]

    def close(self) -> None:
        """End the server."""
        self.server.shutdown()
        self.server.server_close()


if __name__ == "__main__":
    FakeHub(Path(sys.argv[3]), sys.argv[1], int(sys.argv[2]))
    threading.Event().wait()

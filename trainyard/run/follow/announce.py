"""Tell others about a run: `notify` sends its events to URLs, `hook` runs a program of the user."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from trainer.common.errors import UserError
from trainer.common.formats import printable, quoted
from trainer.common.inputs import user_path
from trainyard.run.launch_options import LaunchOptions

Event = Literal["started", "restarting", "stopped", "failed", "finished", "queue empty"]
SEND_LIMIT = 10.0  # s
HOOK_LIMIT = 60.0  # s
_WEB = ("http", "https")


class Announcer:
    """Tells the URLs of `notify` and the program `hook` about the events of one run. A failure is a reported line, never an error.

    A URL may contain a secret: no line names more than its host, and programs get it in a file.
    """

    def __init__(self, options: LaunchOptions, report: Callable[[str], None]) -> None:
        self.urls, self.hook, self.report = options.notify, options.hook, report

    def check(self) -> None:
        """Raises UserError if an option cannot have an effect on this machine."""
        if self.hook and not os.access(user_path(self.hook, "hook"), os.X_OK):
            raise UserError(f"hook: {self.hook} is missing or not executable: chmod +x it, or omit hook")
        try:
            others = [urlsplit(url).scheme for url in self.urls if urlsplit(url).scheme not in _WEB]
        except ValueError:
            raise UserError("notify: a URL is not valid: check its address") from None
        if "" in others:
            raise UserError("notify: a URL has no scheme: write https://..., or one of apprise")
        if others and not _apprise():
            raise UserError(
                f"notify: {quoted(others[0])} needs the program apprise: pip install apprise, or use an http or https URL"
            )

    def __call__(self, event: Event, run: str, message: str = "") -> None:
        """Announce an event; `message` is one or more lines. A service has SEND_LIMIT for each part of its answer, the program HOOK_LIMIT."""
        message = "\n".join(printable(line, 1000) for line in message.splitlines()[:20])
        title = f"trainyard: {'the queue is empty' if event == 'queue empty' else f'run {run} {event}'}"
        for url in self.urls:
            try:
                if urlsplit(url).scheme in _WEB:
                    _post(url, {"event": event, "run": run, "title": title, "message": message, "time": time.time()})
                else:
                    _send(url, title, message)
            except (OSError, ValueError, http.client.HTTPException, subprocess.TimeoutExpired) as error:
                why = getattr(error, "reason", None) or getattr(error, "code", None) or type(error).__name__
                self.report(f"warning: notify: {_place(url)}: not sent: {printable(why)}")
        if self.hook:
            self._run_hook(event, run, message)

    def _run_hook(self, event: Event, run: str, message: str) -> None:
        values = {"TRAINYARD_EVENT": event, "TRAINYARD_RUN": run, "TRAINYARD_MESSAGE": message}
        why = ""
        try:
            done = _run([str(user_path(self.hook, "hook").absolute())], os.environ | values, HOOK_LIMIT)
            if done.returncode:
                why = f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
        except subprocess.TimeoutExpired:
            why = f"ended after {HOOK_LIMIT:.0f} s"
        except OSError as error:
            why = str(error.strerror)
        if why:
            self.report(f"warning: hook: {self.hook}: {printable(why)}")


def _place(url: str) -> str:
    """Return the part of a URL that names the service, and no secret."""
    parts = urlsplit(url)
    return (parts.scheme in _WEB and parts.hostname) or parts.scheme


def _post(url: str, values: dict[str, object]) -> None:
    """Send JSON to a web server. `text` is for services that show only this. Raises OSError, ValueError, HTTPException."""
    body = json.dumps(values | {"text": f"{values['title']}\n{values['message']}".strip()}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "trainyard"})
    urllib.request.urlopen(request, timeout=SEND_LIMIT).close()


def _send(url: str, title: str, message: str) -> None:
    """Let apprise send a message. Raises OSError, subprocess.TimeoutExpired."""
    program = _apprise()
    if not program:
        raise OSError("apprise is not installed")
    with tempfile.NamedTemporaryFile("w", suffix=".conf", encoding="utf-8") as file:  # mode 0600
        file.write(url + "\n")
        file.flush()
        done = _run(
            [program, "--config", file.name, "--title", title, "--body", message or title], dict(os.environ), SEND_LIMIT
        )
    if done.returncode:
        raise urllib.error.URLError(f"apprise ended with exit code {done.returncode}")


def _apprise() -> str | None:
    return shutil.which(
        "apprise", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    )


def _run(words: Sequence[str], environment: dict[str, str], limit: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=limit,
        check=False,
    )

"""Tell others about a run: `notify` sends its events to URLs, `hook` runs a program of the user."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable
from typing import Literal
from urllib.parse import urlsplit

from trainer.common.errors import UserError
from trainer.common.formats import printable
from trainer.common.inputs import user_path
from trainyard.run.launch_options import LaunchOptions

Event = Literal["started", "restarting", "stopped", "failed", "finished", "queue empty"]
SEND_LIMIT = 10.0  # s
HOOK_LIMIT = 60.0  # s


class Announcer:
    """Tells the URLs of `notify` and the program `hook` about the events of one run. A failure is a reported line, never an error.

    A URL may contain a secret: no line names more than its host.
    """

    def __init__(self, options: LaunchOptions, report: Callable[[str], None]) -> None:
        self.urls, self.hook, self.report = options.notify, options.hook, report

    def check(self) -> None:
        """Raises UserError if an option cannot have an effect on this machine."""
        if self.hook and not os.access(user_path(self.hook, "hook"), os.X_OK):
            raise UserError(f"hook: {self.hook} is missing or not executable: chmod +x it, or omit hook")
        try:
            valid = all(urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname for url in self.urls)
        except ValueError:
            valid = False
        if not valid:
            raise UserError("notify: a URL is not one of http or https: write https://..., or use a hook")

    def __call__(self, event: Event, run: str, message: str = "") -> None:
        """Announce an event; `message` is one or more lines. A restart does not wait; all else waits for SEND_LIMIT or HOOK_LIMIT."""
        message = "\n".join(printable(line, 1000) for line in message.splitlines()[:20])
        title = f"trainyard: {'the queue is empty' if event == 'queue empty' else f'run {run} {event}'}"
        values = {"event": event, "run": run, "title": title, "message": message, "time": time.time()}
        # A server that sends one byte at a time would hold up the run: a limit of urllib is one for each part of an answer.
        threads = {url: _background(self._post, url, values) for url in self.urls}
        hook = _background(self._run_hook, event, run, message) if self.hook else None
        if event == "restarting":
            return
        end = time.monotonic() + SEND_LIMIT
        for url, thread in threads.items():
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.report(f"warning: notify: {urlsplit(url).hostname}: no answer within {SEND_LIMIT:.0f} s")
        if hook:
            hook.join(HOOK_LIMIT + SEND_LIMIT)

    def _post(self, url: str, values: dict[str, object]) -> None:
        """Send JSON to a web server. `text` is for services that show only this."""
        body = json.dumps(values | {"text": f"{values['title']}\n{values['message']}".strip()}).encode()
        try:
            request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "trainyard"})
            urllib.request.urlopen(request, timeout=SEND_LIMIT).close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = getattr(error, "reason", None) or getattr(error, "code", None) or type(error).__name__
            self.report(f"warning: notify: {urlsplit(url).hostname}: not sent: {printable(why)}")

    def _run_hook(self, event: Event, run: str, message: str) -> None:
        values = {"TRAINYARD_EVENT": event, "TRAINYARD_RUN": run, "TRAINYARD_MESSAGE": message}
        try:
            done = subprocess.run(
                [user_path(self.hook, "hook").absolute()],
                env=os.environ | values,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=HOOK_LIMIT,
                check=False,
            )
            last = (done.stderr.decode(errors="replace").strip().splitlines() or [""])[-1]
            why = f"exit code {done.returncode}: {last}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            why = f"ended after {HOOK_LIMIT:.0f} s"
        except OSError as error:
            why = str(error.strerror)
        if why:
            self.report(f"warning: hook: {self.hook}: {printable(why)}")


def _background(work: Callable[..., None], *values: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=values, daemon=True)
    thread.start()
    return thread

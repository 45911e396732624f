"""What the controller gives the queue host about the logins of hosts."""

import json

import pytest

from trainyard.queue import run_folder
from trainyard.queue.run_folder import QueuedStart
from trainyard.run.launch_options import LaunchOptions
from trainyard.wire.connection import Host, Login


def test_a_password_of_the_inventory_stays_on_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "plain", lambda prepared: {})
    host = Host("a", "10.0.0.1", "/d", "/p", login=Login("x", "me", 22, password="hunter2"))
    text = QueuedStart([host], LaunchOptions(), None).as_json()  # type: ignore[arg-type]
    assert b"hunter2" not in text and json.loads(text)["hosts"][0]["login"]["user"] == "me"

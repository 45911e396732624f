"""Variables of the role ollama: hostile values are refused with one line that names the variable."""

from __future__ import annotations

from typing import Any

import pytest
from hostile import HOSTILE_STRINGS

from trainyard.ollama.parameters import ollama_problems

VALID: dict[str, Any] = {
    "version": "0.12.11",
    "sha256": "0" * 64,
    "archive": "https://github.com/ollama/ollama/releases/download/v0.12.11/ollama-linux-amd64.tgz",
    "models": "/var/lib/ollama",
    "pull": ["llama3.2:1b", "hf.co/org/model-GGUF:Q4_K_M", "localhost:5000/me/mine"],
    "environment": {"OLLAMA_KEEP_ALIVE": "5m", "A_1": 'quotes " and\nlines are escaped'},
    "port": 11434,
    "address": "10.0.0.1",
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"version": "0.5.8-rc7"},
        {"version": "0.1.30"},
        {"archive": "/home/me/my archives/ollama.tgz"},
        {"models": "/home/me/100% models"},
        {"port": "11500"},
        {"address": "fd00::5"},
        {"address": "node1.example.org"},
    ],
)
def test_valid_values(change: dict[str, Any]) -> None:
    assert ollama_problems(VALID | change) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ollama_version", "0.12.11\n"),
        ("ollama_version", "v0.12.11"),
        ("ollama_version", "0.12.11/../../evil"),
        ("ollama_sha256", "0" * 64 + "\n"),
        ("ollama_archive", "https://example.org/a b"),
        ("ollama_archive", "https://example.org/a\nb"),
        ("ollama_archive", "relative/path.tgz"),
        ("ollama_models", "/a\nUser=root"),
        ("ollama_models", "/a:/etc"),
        ("ollama_models", "/srv/../etc"),
        ("ollama_models", "relative"),
        ("ollama_port", 0),
        ("ollama_port", "11434\n"),
        ("cluster_address", "10.0.0.1\nUser=root"),
        ("cluster_address", "10.0.0.1 evil"),
        ("ollama_pull", ["--insecure"]),
        ("ollama_pull", ["a\tb"]),
        ("ollama_environment", {"A B": "x"}),
        ("ollama_environment", {"A": "x\0"}),
    ],
)
def test_a_problem_names_the_variable(name: str, value: Any) -> None:
    key = "address" if name == "cluster_address" else name.removeprefix("ollama_")
    [problem] = ollama_problems(VALID | {key: value})
    assert name in problem and problem.isprintable()


@pytest.mark.parametrize("text", HOSTILE_STRINGS)
def test_hostile_strings(text: str) -> None:
    for key in VALID:
        value: Any = {"pull": [text], "environment": {text: "x"}}.get(key, text)
        for problem in ollama_problems(VALID | {key: value}):
            assert problem.isprintable()
    accepted = [key for key in ("version", "sha256", "port") if not ollama_problems(VALID | {key: text})]
    assert not accepted or text.isascii()

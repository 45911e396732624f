"""The embedded dataset: questions and answers from the documentation of the installed ansible-core.

The texts of the questions define the digest of the dataset, and so the loss curves of the documented runs: keep them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.common.files import write_atomic

_KINDS = (
    "module",
    "lookup",
    "filter",
    "test",
    "callback",
    "connection",
    "inventory",
    "become",
    "strategy",
    "shell",
    "cache",
    "vars",
)
_MARKUP = re.compile(r"\b(?:[IBCMLRUVOEP]|RV|HORIZONTALLINE)\(([^()]*)\)")


def _plain(text: Any) -> str:
    """Return documentation text (a string or a list of them) without Ansible's markup."""
    lines = text if isinstance(text, list) else [text]
    joined = " ".join(str(line).strip() for line in lines if line is not None)
    return " ".join(_MARKUP.sub(lambda found: found[1].split(",")[0], joined).split())


def _options(name: str, kind: str, options: dict[str, Any], parents: str = "") -> Iterator[dict[str, str]]:
    for option, entry in sorted(options.items()):
        if not isinstance(entry, dict) or not entry.get("description"):
            continue
        path = f"{parents}{option}"
        facts = [_plain(entry["description"])]
        if entry.get("required"):
            facts.append("It is required.")
        if entry.get("type"):
            facts.append(f"Its type is {entry['type']}.")
        if entry.get("choices"):
            facts.append(f"Choices: {', '.join(map(str, entry['choices']))}.")
        if entry.get("default") is not None:
            facts.append(f"The default is {entry['default']}.")
        yield {
            "instruction": f"What does the option {path} of the {kind} {name} do?",
            "input": "",
            "output": " ".join(facts),
        }
        if isinstance(entry.get("suboptions"), dict):
            yield from _options(name, kind, entry["suboptions"], f"{path}.")


def questions(dump: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield Alpaca records from the output of ``ansible-doc --metadata-dump``, for ansible.builtin only, in a fixed order."""
    for kind in _KINDS:
        for full_name, entry in sorted(dump.get(kind, {}).items()):
            doc = entry.get("doc") if isinstance(entry, dict) else None
            if not full_name.startswith("ansible.builtin.") or not isinstance(doc, dict):
                continue
            name = full_name.removeprefix("ansible.builtin.")
            what = _plain(doc.get("short_description", ""))
            if what:
                yield {"instruction": f"What is the {kind} {name} for?", "input": "", "output": what}
            if doc.get("description"):
                yield {"instruction": f"Describe the {kind} {name}.", "input": "", "output": _plain(doc["description"])}
            yield from _options(name, kind, doc.get("options") or {})
            for note in doc.get("notes") or []:
                yield {
                    "instruction": f"What should one know before using the {kind} {name}?",
                    "input": "",
                    "output": _plain(note),
                }
            for value, meaning in sorted((entry.get("return") or {}).items()):
                if isinstance(meaning, dict) and meaning.get("description"):
                    yield {
                        "instruction": f"What is {value} in the result of the {kind} {name}?",
                        "input": "",
                        "output": _plain(meaning["description"]),
                    }
            if isinstance(entry.get("examples"), str):
                for example in re.split(r"\n(?=- name: )", "\n" + entry["examples"])[1:]:
                    title, _, body = example.partition("\n")
                    task = title.removeprefix("- name: ").strip().strip("\"'")
                    if task and body.strip():
                        yield {
                            "instruction": "Write an Ansible task.",
                            "input": task,
                            "output": f"- name: {task}\n{body.rstrip()}",
                        }


def write_dataset(ansible_doc: str, path: Path) -> int:
    """Write the dataset as JSONL to `path` atomically; return the number of samples.

    Raises:
        RuntimeError: ansible-doc failed, or its documentation is incomplete.
    """
    with tempfile.NamedTemporaryFile(suffix=".cfg") as empty:
        # An empty configuration and a small environment keep a project's plugins and ansible-runner's escape codes out.
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        environment |= {"ANSIBLE_CONFIG": empty.name, "LC_ALL": "C.UTF-8", "ANSIBLE_FORCE_COLOR": "0"}
        done = subprocess.run(
            [ansible_doc, "--metadata-dump", "--no-fail-on-errors"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"{ansible_doc} --metadata-dump failed: {done.stderr.strip()[-300:]}")
    records = list(questions(json.loads(done.stdout)["all"]))
    if len(records) < 1000:
        raise RuntimeError(f"{ansible_doc} documents only {len(records)} items: reinstall ansible-core")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return len(records)

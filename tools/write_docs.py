"""Write what is read off the code: docs/run-spec.md and the roles' READMEs. With --check: fail if one of them is old."""

import re
import sys
from pathlib import Path
from typing import Any

import yaml

from trainer.config import EMBEDDED_DATASET, PRESETS, TINY, table

TOP = Path(__file__).resolve().parents[1]


def run_spec() -> str:
    """Return docs/run-spec.md."""
    preset = ", ".join(
        f"`{name}={','.join(value) if isinstance(value, tuple) else value}`" for name, value in PRESETS[TINY].items()
    )
    return f"""# The run spec

One YAML file a run, or flags, or `-e`: the same names everywhere. This page is written by `make docs` off `trainer/config/run_spec.py`.

    ansible-playbook train.yml -e model=tiny -e lr=1e-3 -e max_steps=50      # on every host
    ansible-playbook train.yml -e spec=run.yml -e seed=2                     # from a file; -e goes over it
    python -m trainer run.yml --seed 2                                       # one process, no Ansible
    torchrun --nproc-per-node 2 -m trainer run.yml                           # several, no Ansible

{table()}

\\* A run that is started again under its name may change these; a change of any other is refused, because the run would not be
the same run any more.

What a step is does not depend on the number of nodes: `total_batch_size` rows (or `gradient_accumulation` x `batch_size`), in an
order that follows from the seed alone, divided among the ranks. 1, 2 or 3 nodes walk the same loss curve.

`model={TINY}` is made on the controller: a Llama of a few million random weights and a tokenizer trained on the dataset. It comes
with values of its own where you say nothing: {preset}.

`dataset={EMBEDDED_DATASET}` is made on the controller too: questions and answers out of the documentation that ansible-core carries.
A JSONL file holds one sample a line, in any of four shapes:

    {{"instruction": "...", "input": "...", "output": "..."}}
    {{"messages": [{{"role": "user", "content": "..."}}, {{"role": "assistant", "content": "..."}}]}}
    {{"prompt": "...", "completion": "..."}}
    {{"text": "..."}}

The first two go through the model's chat template (a plain one, if it has none). Only answers carry loss, unless `train_on=all`.
Samples longer than `seq_length` are cut, samples without a token to train on are dropped; both are counted in result.json.
"""


def variables(options: dict[str, Any]) -> list[str]:
    """Return a role's options as the rows of a Markdown table."""
    rows = ["| variable | type | default | what it is |", "| --- | --- | --- | --- |"]
    for name, option in options.items():
        kind = option["type"] + (f" of {option['elements']}" if "elements" in option else "")
        default = "required" if option.get("required") else f"`{option['default']!r}`" if "default" in option else ""
        about = option["description"]
        text = " ".join(about) if isinstance(about, list) else about
        if "choices" in option:
            text += " One of " + ", ".join(map(str, option["choices"])) + "."
        rows.append(f"| `{name}` | {kind} | {default} | {text} |")
    return rows


def role_readme(path: Path) -> str:
    """Return a role's README: its argument_specs, and below them what the role's NOTES.md says, if it has one."""
    spec = yaml.safe_load((path / "meta" / "argument_specs.yml").read_text())["argument_specs"]["main"]
    about = spec["description"]
    lines = [
        f"# {path.name}",
        "",
        spec["short_description"] + ".",
        "",
        *(about if isinstance(about, list) else [about]),
        "",
    ]
    lines += variables(spec["options"]) if spec.get("options") else ["It takes no variables."]
    notes = path / "NOTES.md"
    if notes.exists():
        lines += ["", notes.read_text().rstrip()]
    lines += ["", "Written by `make docs` off `meta/argument_specs.yml`."]
    return "\n".join(lines) + "\n"


def code_marks(text: str) -> str:
    """Turn Ansible's C(...) into Markdown's `...`."""
    return re.sub(r"C\(([^()]*)\)", r"`\1`", text)


def pages() -> dict[Path, str]:
    """Return every page that is read off the code."""
    found = {TOP / "docs" / "run-spec.md": run_spec()}
    for specs in sorted((TOP / "roles").glob("*/meta/argument_specs.yml")):
        found[specs.parents[1] / "README.md"] = code_marks(role_readme(specs.parents[1]))
    return found


def main() -> int:
    """Write the pages, or with --check name those that differ."""
    old = [path for path, text in pages().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        for path in old:
            print(f"error: {path.relative_to(TOP)} is not what the code says: run make docs", file=sys.stderr)
        return 1 if old else 0
    for path in old:
        path.write_text(pages()[path])
        print(f"wrote {path.relative_to(TOP)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

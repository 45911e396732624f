"""Write a plan as scripts to start by hand: one for every host, and one for Slurm."""

from __future__ import annotations

import shlex
from pathlib import Path

from trainer.tools import slurm_script
from trainyard.run.types import PlanEntry, StepResult
from trainyard.wire.run_errors import RunError

# Exports the lines of `env`, as trainer.supervise does. They are read and not sourced, because a value may contain spaces
# or quotes. Scripts contain no values, because these may be secrets.
_READ_ENVIRONMENT = """\
cd {run_dir}
while IFS= read -r line; do
    case $line in ''|'#'*) ;; *) export "$line" ;; esac
done < {run_dir}/env
"""


def write_scripts(entries: list[PlanEntry], folder: Path, check: bool = False) -> StepResult:
    """Write the scripts of a plan into a folder on the controller.

    `check`: write nothing; return what would be written. Raises RunError: the folder cannot be written. Returns
    `files`, by host in rank order, then the one for Slurm; `changed`, whether one differed; `lines`, readable text.
    """
    run = Path(entries[0].run_dir).name
    texts = {folder / f"{entry.host}.sh": script(entry, run) for entry in entries}
    texts[folder / f"{run}.sbatch"] = sbatch(entries, run)
    changed = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if not check:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in changed:
                path.write_text(texts[path], encoding="utf-8")
                path.chmod(0o755)
        except OSError as error:
            raise RunError(f"cannot write {error.filename}: {error.strerror}") from None
    files = [str(path) for path in texts]
    how = f"by hand: ssh HOST bash -s < {folder}/HOST.sh, on all hosts; by Slurm: sbatch {folder}/{run}.sbatch"
    return {"changed": bool(changed), "files": files, "lines": [*files, how]}


def script(entry: PlanEntry, run: str) -> str:
    """Return the bash script that starts one host's part of a run."""
    ranks = ",".join(map(str, entry.ranks))
    return (
        "#!/bin/bash\n"
        f"# trainyard run {run}: node {entry.node_rank}, ranks {ranks}, for {' '.join(entry.host.split())} ({entry.address}).\n"
        "# Start it on all hosts within a few minutes.\n"
        "set -euo pipefail\n"
        f"{_READ_ENVIRONMENT.format(run_dir=shlex.quote(entry.run_dir))}"
        f"exec {shlex.join(entry.command)}\n"
    )


def sbatch(entries: list[PlanEntry], run: str) -> str:
    """Return the script for `sbatch`. Slurm must know the hosts by their names in the inventory.

    Every node selects its own command by its Slurm name, because ranks, devices and folders may differ between nodes.
    """
    gpus = {len(entry.gpus) for entry in entries}
    names = [entry.host for entry in entries]
    resources = slurm_script.Resources(len(entries), gpus.pop() if len(gpus) == 1 else 0, names=names)
    lines = [
        *slurm_script.header(run, resources),
        f"# trainyard run {run}. Its files are staged on every host. Submitted again, it resumes from the latest checkpoint.",
        "set -euo pipefail",
    ]
    cases = ["case $SLURMD_NODENAME in"]
    for entry in entries:
        cases.append(f"{shlex.quote(entry.host)})")
        # Not splitlines(): a folder's name may contain other characters at which it ends a line.
        cases += _READ_ENVIRONMENT.format(run_dir=shlex.quote(entry.run_dir)).rstrip("\n").split("\n")
        cases.append(f"exec {shlex.join(entry.command)} ;;")
    cases += ["*)", 'echo "error: no part of the run is planned for $SLURMD_NODENAME" >&2; exit 2 ;;', "esac"]
    return "\n".join([*lines, f"exec {slurm_script.step(chr(10).join(cases))}", ""])

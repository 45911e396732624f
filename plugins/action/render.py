"""Write a plan as scripts instead of running it. Documented in plugins/modules/render.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainyard.ansible_adapter import ClusterAction, failure
from trainyard.run.launch_scripts import sbatch, script


class ActionModule(ClusterAction):
    def run(self, tmp: Any = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        _, a = self.validate_argument_spec(
            {
                "plan": {"type": "list", "elements": "dict", "required": True},
                "folder": {"type": "path", "required": True},
            }
        )
        plan, folder = a["plan"], Path(a["folder"]).expanduser()
        run = Path(plan[0]["run_dir"]).name
        texts = {folder / f"{entry['host']}.sh": script(entry, run) for entry in plan}
        texts[folder / f"{run}.sbatch"] = sbatch(plan, run)
        old = {path: path.read_text() for path in texts if path.exists()}
        changed = [path for path, text in texts.items() if old.get(path) != text]
        if not self._task.check_mode:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                for path in changed:
                    path.write_text(texts[path])
                    path.chmod(0o755)
            except OSError as error:
                return failure(f"cannot write {error.filename}: {error.strerror}")
        lines = [str(path) for path in texts]
        lines.append(
            f"by hand: ssh HOST bash -s < {folder}/HOST.sh, on all hosts; by Slurm: sbatch {folder}/{run}.sbatch"
        )
        return {"changed": bool(changed), "files": [str(path) for path in texts], "lines": lines}

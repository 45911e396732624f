"""What a kind of hosts installs: uv resolves the requirements within the lock, for their Python, processor and build of torch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.common.formats import printable
from trainyard.python_env.resolve import EnvironmentBuildError, EnvironmentRequest, normal_name
from trainyard.python_env.uv_settings import environment_of_uv

FROM_SOURCE = "deepspeed"  # on the package index as source only; its wheel has no compiled code
_LIMIT = 600.0  # s
_PACKAGE = re.compile(r"^([\w.-]+)==(\S+)((?: \\\n    --hash=\S+)*)", re.MULTILINE)


def resolved(
    request: EnvironmentRequest, tag: str, machine: str, flavour: str, options: Mapping[str, Any], work: Path
) -> tuple[list[str], str]:
    """Return one line NAME==VERSION --hash=sha256:DIGEST... for each package, and the index of torch's build; empty: the configured one.

    Digests of the lock in `request` replace those of the index. Raises EnvironmentBuildError: there is no solution, or an
    index does not answer.

    Args:
        tag: version of the Python, such as 3.12.
        flavour: build of torch.
        options: fields of `trainyard.commands.role_steps.EnvironmentOptions`.
        work: folder of the controller for uv's input.
    """
    work.mkdir(parents=True, exist_ok=True)
    pins, wanted = work / "pins.txt", work / "requirements.in"
    pins.write_text("".join(f"{line}\n" for line in request.constraints), encoding="utf-8")
    wanted.write_text("".join(f"{line}\n" for line in request.requirements), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += [
        "--no-config",
        "--generate-hashes",
        f"--python-version={tag}",
        f"--python-platform={machine}-manylinux_2_28",
    ]
    command += ["--only-binary=:all:", f"--no-binary={FROM_SOURCE}", f"--constraints={pins}"]
    wheelhouse, index = options["wheelhouse"], ""
    if wheelhouse:
        command += ["--no-index", f"--find-links={wheelhouse}"]
    else:
        command += [f"--default-index={options['index']}"] if options["index"] else []
        torch = any(normal_name(line) == "torch" for line in request.requirements)
        if torch and options["torch_index"] and request.packages == "standard":
            index = f"{options['torch_index']}/{flavour}"
    # Another build of torch may lie where pip looks, and a lock of its own has that of the package index.
    only = () if request.packages == "standard" else ("UV_DEFAULT_INDEX", "SSL_CERT_FILE")
    done = _run([*command, *([f"--index={index}"] if index else []), str(wanted)], only)
    if done.returncode and index and index in done.stderr:
        if options["flavour"] != "auto":
            raise EnvironmentBuildError(
                f"{index} does not answer, and python_torch_flavour requires it: set python_torch_index, or set "
                'python_torch_index: "" to use the package index'
            )
        index = ""
        done = _run([*command, str(wanted)])
    if done.returncode:
        why = " ".join(line.strip() for line in done.stderr.splitlines() if line.strip()) or "uv printed no message"
        raise EnvironmentBuildError(
            f"uv cannot get the packages for Python {tag} from {wheelhouse or 'the package index'}: {printable(why, 600)}"
            + ("" if wheelhouse else " (without internet access, set python_wheelhouse: see roles/python/README.md)")
        )
    return _lines(done.stdout, request), index


def _run(command: list[str], only: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    variables = environment_of_uv(only) | {"UV_HTTP_RETRIES": "1"}
    try:
        return subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=_LIMIT)
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentBuildError(f"cannot run uv: {printable(str(error), 200)}") from None


def _lines(text: str, request: EnvironmentRequest) -> list[str]:
    """Return the packages in uv's output, with the digests of the lock where it has some."""
    held = {normal_name(line): re.findall(r"--hash=\S+", line) for line in request.constraints}
    lines = []
    for name, version, digests in _PACKAGE.findall(text):
        offered, locked = re.findall(r"--hash=\S+", digests), held.get(normal_name(name), [])
        # The lock does not have the digests of all builds of torch: README of the role.
        found = locked if locked and (name != "torch" or set(locked) & set(offered)) else offered
        lines.append(" ".join([f"{name}=={version}", *found]))
    return lines

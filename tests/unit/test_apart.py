"""The units of programs that read what ranks wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainyard.remote import apart
from trainyard.remote.digests import sha256_file


@pytest.mark.parametrize("verb", [apart.merge, apart.evaluate, apart.gguf_export])
def test_programs_reach_no_other_machine_and_no_cache_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: Any
) -> None:
    run_dir, trainer = tmp_path / "runs/r", tmp_path / "trainer.zip"
    run_dir.mkdir(parents=True)
    trainer.write_bytes(b"archive")
    request = {"trainer": str(trainer), "digest": sha256_file(trainer), "run_dir": str(run_dir), "reads": []}
    request |= {"backend": "auto", "limit": 9, "input": {}}
    ran = list[list[str]]()
    monkeypatch.setattr(apart.os, "execvpe", lambda _file, command, _environment: ran.append(command))
    monkeypatch.setattr(apart.os, "dup2", lambda *_: None)
    for systemd, limited in (["systemd-run"], True), (["systemd-run", "--user"], False):
        monkeypatch.setattr(apart, "choose_backend", lambda _, found=systemd: found)
        verb(request)
        words = ran.pop()
        caches = {word for word in words if word.startswith("--setenv=") and "CACHE" in word}
        assert ("--property=IPAddressDeny=any" in words) is limited, "a user's manager cannot limit addresses"
        assert bool(caches) is limited and not any(str(run_dir) in word for word in caches)
        assert "--property=MemoryMax=90%" in words
        if limited:
            assert {"--property=PrivateTmp=yes", "--setenv=XDG_CACHE_HOME=/tmp/cache"} <= {*words}

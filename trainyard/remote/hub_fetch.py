"""Fetches a model or a dataset of the Hugging Face Hub into the store of this host. Needs the package huggingface_hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from trainer.supervise.link_free import LinkFreePath
from trainer.supervise.run_files import read_json, write_json
from trainyard.remote.digests import Digests
from trainyard.remote.local_files import describe, tree_digest
from trainyard.remote.trees import path_below

RESERVE = 1 << 30  # bytes that a download leaves free


def hub_fetch(request: dict[str, Any]) -> dict[str, Any]:
    """Fetch a repository, and place its files in the store under their names and one digest.

    `request`: `kind`, model or dataset; `name`, owner/name; `patterns` of the files to fetch, all if empty; `weights`,
    patterns to fetch also if no *.safetensors is there; `data_dir`; `target`, the folder below it, to which the digest
    is appended; `env`, variables such as HF_ENDPOINT; `texts`, see local_files. Returns `names` and `texts`, as
    `local_files` describes a folder; `unreachable`, why these are the files of an earlier call, or empty. Or only
    `error`, such as that the hub is unreachable.
    """
    os.environ.pop("HF_HUB_OFFLINE", None)
    os.environ.update({"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"} | request["env"])
    store = Path(request["data_dir"], "store")
    folder: Path | LinkFreePath
    digests = Digests(store / "digests.json")
    cache = LinkFreePath(store, "hub")
    record = cache / f"{request['kind']}--{request['name'].replace('/', '--')}.json"

    def stored(name: str) -> LinkFreePath:
        return path_below(store, f"{store.parent}/{name}")

    before = (read_json(record) or {}).get("folder")
    try:
        store.mkdir(parents=True, exist_ok=True)
        cache.make_folder()
        folder, why = _snapshot(request, cache.path), ""
    except ImportError:
        return {"error": "the Python environment has no huggingface_hub: run site.yml"}
    except Exception as error:  # the library's own classes, those of its HTTP client, OSError
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].strip()
        if not isinstance(before, str) or not (placed := stored(before)).is_folder():
            return {"error": why}
        folder = placed
    found = describe(folder, digests, request["texts"])
    if found["error"] or not found["names"]:
        return {"error": found["error"] or f"{request['name']} has no files"}
    if isinstance(folder, Path):
        digest = tree_digest({name: digest for name, (_, digest) in found["names"].items()})
        target = f"{request['target']}-{digest[:12]}"
        _place(folder, cache, stored(target), list(found["names"]))
        write_json(record, {"folder": target})
    digests.keep()
    return {"names": found["names"], "texts": found["texts"], "unreachable": why}


def _snapshot(request: dict[str, Any], cache: Path) -> Path:
    """Download the files that are not in the cache; return the folder of the newest revision. Raises the exceptions of
    the library."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.utils import filter_repo_objects

    name, kind = request["name"], request["kind"]
    info = HfApi().repo_info(name, repo_type=kind, files_metadata=True)
    siblings = {file.rfilename: file.size or 0 for file in getattr(info, "siblings", None) or []}
    patterns = request["patterns"] or None
    if patterns and request["weights"] and not any(name.endswith(".safetensors") for name in siblings):
        patterns = [*patterns, *request["weights"]]
    hidden = [".*", "*/.*"]
    wanted = list(filter_repo_objects(siblings, allow_patterns=patterns, ignore_patterns=hidden))
    needed, free = sum(siblings[file] for file in wanted), shutil.disk_usage(cache).free
    if needed + RESERVE > free:
        raise OSError(f"{name} has {needed >> 20} MiB, and {cache} has {free >> 20} MiB free: free disk space")
    options = {"repo_type": kind, "revision": info.sha, "allow_patterns": patterns, "ignore_patterns": hidden}
    return Path(snapshot_download(name, cache_dir=cache, **options))


def _place(folder: Path, cache: LinkFreePath, target: LinkFreePath, names: list[str]) -> None:
    """Make `target` a folder with these files. They share the disk space of the cache where the file system permits it.

    Raises ValueError if one of the cache's links leads out of it.
    """
    for name in names:
        # The library keeps links to its files: none may lead elsewhere.
        source, file = path_below(cache.path.resolve(), str((folder / name).resolve())), target / name
        if file.is_file() and file.stat().st_size == source.stat().st_size:
            continue  # its digest is compared when the run is staged
        file.parent.make_folder()
        aside = file.aside()
        try:
            with source.in_folder() as here, aside.in_folder() as there:
                os.link(source.name, aside.name, src_dir_fd=here, dst_dir_fd=there, follow_symlinks=False)
        except OSError:
            with source.open_read() as content, aside.create() as copy:
                shutil.copyfileobj(content, copy)
        aside.move_to(file)

"""install_conda.py WHEEL LOCK PREFIX CACHE: install the packages of an explicit lock with rattler, the wheel of which is given.

It downloads the packages and compares their digests by itself: rattler does not compare those of files.
"""

import asyncio
import hashlib
import os
import pathlib
import shutil
import sys
import urllib.request
import zipfile


def fetch(url, digest, folder):
    """Download a package into the folder of its platform; return its path. Raises ValueError for another digest."""
    subdir, name = url.rsplit("/", 2)[1:]
    path = folder / subdir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    found = hashlib.sha256()
    with urllib.request.urlopen(url, timeout=60) as reply, path.open("wb") as file:
        while block := reply.read(1 << 20):
            found.update(block)
            file.write(block)
    if found.hexdigest() != digest:
        raise ValueError(
            f"{name} does not have the digest of the lock: it was changed on the way, or on the host that serves it"
        )
    return path


def record(path, digest):
    """Return what rattler needs to know of a package."""
    from rattler import PackageRecord, RepoDataRecord
    from rattler.package import BuildString

    stem = path.name.removesuffix(".conda").removesuffix(".tar.bz2")
    package, version, build = stem.rsplit("-", 2)
    about = PackageRecord(package, version, BuildString(build), 0, path.parent.name, sha256=bytes.fromhex(digest))
    return RepoDataRecord(about, path.name, path.as_uri(), path.parent.parent.as_uri())


def main(wheel, lock, prefix, cache):
    """Fetch the packages and unpack rattler below the cache, and let it install."""
    shutil.rmtree(cache, ignore_errors=True)
    top = pathlib.Path(cache)
    lines = [line.split("#") for line in pathlib.Path(lock).read_text(encoding="utf-8").split()]
    packages = [(fetch(url, digest, top / "packages"), digest) for url, digest in lines]
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(top / "rattler")
    sys.path.insert(0, str(top / "rattler"))
    from rattler import install

    records = [record(path, digest) for path, digest in packages]
    asyncio.run(install(records, prefix, cache_dir=top / "unpacked", show_progress=False))


if __name__ == "__main__":
    code = 0
    try:
        main(*sys.argv[1:])
    except Exception as error:  # of rattler, which has its own types
        print(f"error: {error}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of rattler do not always survive the end of the interpreter

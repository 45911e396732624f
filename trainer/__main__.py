"""``python -m trainer [train] [SPEC.yml] [--run-dir DIR] [--data-dir DIR] [--lr 1e-3 ...]``: one rank, or all there are."""

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from trainer.config import (
    RunSpec,
    is_known,
    make_spec,
    parse_flags,
    read_spec,
    read_yaml,
    resolve_aliases,
    table,
)
from trainer.distributed.replica import Member
from trainer.errors import DiskError, UserError, disk_trouble
from trainer.strategy import plan_of, summaries
from trainer.telemetry import Heartbeat

USAGE = """usage: python -m trainer [train] [SPEC.yml] [--data-dir DIR] [--run-dir DIR] [--lr 1e-3 --max-steps 50 ...]
                       [--replica 0/2 --first-rank 0 --lighthouse HOST:PORT]     with diloco_membership=torchft
       python -m trainer check [SPEC.yml] [--lr 1e-3 ...]     print the whole spec, or what is wrong with it
       python -m trainer fields                               the run spec as a table
       python -m trainer plan [SPEC.yml] [--hosts 2] [--link-mbit 1000] [--json] [--no-measure] [--lr 1e-3 ...]
                                                              memory, wire and speed of every strategy; which to take
       python -m trainer config deepspeed|fsdp|accelerate|slurm [SPEC.yml] [--hosts 2] [--head ADDRESS] [--no-gpu]
                                                              the spec as another tool's config file

SPEC.yml holds names and values of the run spec, the flags go over it; `lr=1e-3` is taken for `--lr=1e-3`, too.
Several ranks: torchrun ... -m trainer run=mine lr=1e-3 (torchrun itself stumbles over --run).
--hosts: how many, or a JSON list with one object a host (host, processes, memory_mib); a run's plan.json will do.
DIR: the data dir (default: here) holds runs/<run>/, and in store/ what several runs share.
"""
_LOST_PEER = ("DistBackendError", "DistNetworkError", "DistStoreError")
_LOST_PEER_WORDS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "gloo")


def _word(argv: list[str], flag: str) -> str | None:
    """Take ``--flag WORD`` or ``--flag=WORD`` out of argv. Raises UserError: the word is missing."""
    for place, word in enumerate(argv):
        if word == flag:
            if not argv[place + 1 :] or argv[place + 1].startswith("--"):
                raise UserError(f"{flag}: got nothing, takes a value: {flag}=...")
            del argv[place]
            return argv.pop(place)
        if word.startswith(f"{flag}="):
            return argv.pop(place).partition("=")[2]
    return None


def _take(argv: list[str], flag: str) -> Path | None:
    """Take ``--flag DIR`` or ``--flag=DIR`` out of argv."""
    word = _word(argv, flag)
    return None if word is None else Path(word).expanduser().absolute()


def _switch(argv: list[str], flag: str) -> bool:
    """Take ``--flag`` out of argv."""
    if flag not in argv:
        return False
    argv.remove(flag)
    return True


def _is_flag(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and is_known(name.replace("-", "_")) and not Path(word).exists()


def _spec(argv: list[str]) -> RunSpec:
    # torchrun takes --run=x for a short form of its own --run-path, so run=x is a flag too, unless it is a file.
    argv[:] = [f"--{word}" if _is_flag(word) else word for word in argv]
    path = Path(argv.pop(0)) if argv and not argv[0].startswith("--") else None
    flags = parse_flags(argv)
    if os.environ.get("RANK", "0") == "0":
        # On stderr: what `check` prints is a spec.
        below, notes = resolve_aliases(read_yaml(path) if path else {})
        for note in notes + resolve_aliases(flags, below)[1]:
            print(note, file=sys.stderr)
    return read_spec(path, flags, "the flags") if path else make_spec(flags, "the flags")


def _plan(argv: list[str]) -> int:
    from trainer.planner.hosts import read_hosts
    from trainer.planner.report import plan

    data_dir, hosts = _take(argv, "--data-dir") or Path.cwd(), read_hosts(_word(argv, "--hosts") or "1")
    as_json, fast, said = _switch(argv, "--json"), _switch(argv, "--no-measure"), _word(argv, "--link-mbit")
    try:
        link = None if said is None else float(said)
    except ValueError:
        link = 0.0
    if link is not None and not 0 < link < 1e9:
        raise UserError(f"--link-mbit: got {said!r}, takes a number of Mbit/s > 0")
    made = plan(_spec(argv), hosts, link, fast=fast, data_dir=data_dir)
    print(json.dumps(made, indent=1) if as_json else "\n".join(made["lines"]))
    return 0


def _config(argv: list[str]) -> int:
    from trainer.tool_configs import render

    kind = argv.pop(0) if argv and not argv[0].startswith("--") else ""
    hosts, head, gpus = _word(argv, "--hosts") or "1", _word(argv, "--head"), not _switch(argv, "--no-gpu")
    words = list(argv)
    print(render(kind, _spec(argv), hosts, head, words, gpus), end="")
    return 0


def _help() -> int:
    import tyro

    print(USAGE)
    print("strategies:")
    for name, summary in summaries().items():
        print(f"  {name:<11}{summary}")
    print()
    tyro.cli(RunSpec, prog="python -m trainer", args=["--help"])
    return 0


def _train(argv: list[str]) -> int:
    run_dir, data_dir = _take(argv, "--run-dir"), _take(argv, "--data-dir")
    member = Member.parse(_word(argv, "--replica"), _word(argv, "--first-rank"), _word(argv, "--lighthouse"))
    rank = member.first_rank + int(os.environ.get("RANK", "0"))
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if launched and run_dir:
        # Before anything that takes time: what goes wrong while torch is imported belongs in the rank's own log too.
        from trainer.worker_process import die_with_launcher, redirect_output

        die_with_launcher()
        redirect_output(run_dir / "logs" / f"rank{rank}.log")
    spec = _spec(argv).named()
    member.check(spec)
    wanted = spec.quantize != "none" or spec.optimizer == "adamw8bit" or spec.backend == "unsloth"
    if launched and not wanted:
        # peft imports it wherever it is installed, and with it torch's compiler: a fifth of the time that a start takes.
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    data_dir = data_dir or (run_dir.parent.parent if run_dir else Path.cwd())
    run_dir = run_dir or data_dir / "runs" / spec.run
    beat = Heartbeat(run_dir, rank)
    beat("starting", force=True, note="importing torch")
    try:
        result = _run(spec, run_dir, data_dir, member, beat)
    except UserError as error:
        return _failed(beat, error, plain=True, secondary=False)
    except KeyboardInterrupt:
        interrupted = UserError("interrupted; started again, the run goes on from its newest checkpoint")
        return _failed(beat, interrupted, plain=True, secondary=False)
    except Exception as error:
        if isinstance(error, OSError) and (why := disk_trouble(error)):
            full = DiskError(f"cannot write: {why}: make room or mend its rights, and start the run again")
            return _failed(beat, full, plain=True, secondary=False)
        lost = type(error).__name__ in _LOST_PEER or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST_PEER_WORDS)
        )
        return _failed(beat, error, plain=False, secondary=lost)
    beat(result["status"], force=True, step=result["step"], steps=result["steps"])
    return 0


def _run(spec: RunSpec, run_dir: Path, data_dir: Path, member: Member, beat: Heartbeat) -> dict:
    from trainer.distributed.world import World
    from trainer.train import claim, finished, train

    done = finished(run_dir)
    asked_for = spec.strategy
    if asked_for == "auto":
        from trainer.planner.recommend import choose_here

        spec, why = choose_here(spec, run_dir)
        print(why)
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        claim(spec, run_dir)
    world = World.join(spec.collective_timeout, member)
    if asked_for == "auto" and len(set(world.gather(spec.strategy))) > 1:
        raise UserError("strategy: auto comes to another answer on unlike hosts: name one, or start by train.yml")
    # Only if all are: a host that died before it wrote its result needs the others to get to one.
    # Whether other torchruns need it only their meeting tells.
    if all(world.gather(done is not None)) and done and not plan_of(spec).separate_launchers(spec):
        print(f"run {spec.run} is finished: {done['steps']} steps, last loss {done['loss_last']:.4f}; nothing to do")
        return done
    result = train(spec, run_dir, data_dir, world, beat)
    if world.rank == 0 and result.get("loss_first") is not None:
        print(
            f"run {spec.run} {result['status']} at step {result['step']}/{result['steps']}: loss {result['loss_first']:.4f} -> "
            f"{result['loss_last']:.4f}, eval {result['eval_loss']}, {result['tokens_per_second']:.0f} tokens/s, in {run_dir}"
        )
    return result


def _failed(beat: Heartbeat, error: BaseException, *, plain: bool, secondary: bool) -> int:
    text = traceback.format_exc()
    beat(
        "failed",
        force=True,
        error={
            "type": type(error).__name__,
            "message": str(error),
            "traceback": text,
            "plain": plain,
            "secondary": secondary,
        },
    )
    print(f"error: {error}" if plain else text, file=sys.stderr, flush=True)
    return 1


def main(argv: Sequence[str]) -> int:
    """Run one command; return its exit status (0: well, 1: failed, 2: called wrongly)."""
    words = list(argv)
    # peft imports the one and asks the other: nothing that whoever reads our words could mend.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    try:
        status = _command(words)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, like `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _command(words: list[str]) -> int:
    if "--help" in words or "-h" in words:
        return _help()
    command = words.pop(0) if words and words[0] in ("train", "check", "fields", "plan", "config") else "train"
    try:
        if command == "fields":
            print(table())
            return 0
        if command == "plan":
            return _plan(words)
        if command == "config":
            return _config(words)
        if command == "check":
            print(_spec(words).named().to_yaml(), end="")
            return 0
        return _train(words)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if "trainer.distributed.world" in sys.modules:
        sys.modules["trainer.distributed.world"].leave(status)
    sys.exit(status)

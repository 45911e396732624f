"""The command line of the trainer: ``python -m trainer [COMMAND] [SPEC.yml] [options] [--lr 1e-3 ...]``."""

import argparse
import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.common.errors import DiskError, UserError, disk_failure, memory_failure
from trainer.common.files import write_atomic
from trainer.common.formats import quoted
from trainer.common.imports import without_collector
from trainer.common.inputs import path_kind, user_path
from trainer.common.utf8 import require_utf8
from trainer.config import FIELDS, RunSpec, describe, parse_flags, plain_name, table
from trainer.config.aliases import ACCUMULATION, field_of
from trainer.config.fields import default_of, expected_value
from trainer.config.reward_source import NOTHING_LEARNED
from trainer.distributed.galaxy import Galaxy, parse_address
from trainer.loop import unsloth_backend
from trainer.loop.script import run_script
from trainer.records.failure_report import is_of_peer, report_failure
from trainer.records.telemetry import Heartbeat
from trainer.spec import read_spec
from trainer.strategy import AUTO, STRATEGIES

if TYPE_CHECKING:
    from trainer.distributed.meeting import Meeting

SPEAKS_FIRST = 3.0  # s

USAGE = """usage: python -m trainer [train] [SPEC.yml] [--data-dir DIR] [--run-dir DIR] [--lr 1e-3 --max-steps 50 ...]
                       [--hv.galaxy-size 2 --hv.world-rank 0 --hv.initial-peers HOST:PORT]       one of several torchruns
       python -m trainer store --host_maddrs /ip4/0.0.0.0/tcp/30001
                                                              serve the store in which such torchruns meet
       python -m trainer check [SPEC.yml] [--lr 1e-3 ...]     validate the spec and print it with all defaults
       python -m trainer fields                               print the fields of the run spec as a table
       python -m trainer data [SPEC.yml] [--samples 3] [--json] [--model DIR --dataset FILE ...]
                                                              show the text of samples with the parts that carry loss
                                                              marked, what is truncated or dropped, and totals
       python -m trainer plan [SPEC.yml] [--hosts 2] [--link-mbit 1000] [--json] [--no-measure] [--lr 1e-3 ...]
                                                              estimate memory, communication and speed of every
                                                              strategy and recommend one
       python -m trainer config deepspeed|fsdp|accelerate|slurm|launcher [SPEC.yml] [--output FILE] [--hosts 2]
                                [--head ADDRESS] [--no-gpu] [--env NAME=VALUE ...] [--partition NAME] [--account NAME]
                                [--time 12:00:00] [--gres gpu:4] [--cpus 16] [--mem 64G] [--prologue "module load cuda"]
                                [--num_gpus_per_node 4] [--master_port 29500] [--node_rank 0] [--use_deepspeed]
                                                              print the spec as a configuration file of another tool,
                                                              or as a script for Slurm or torchrun
       python -m trainer merge < REQUEST.json                 merge the results of runs, as playbooks/merge.yml asks
       python -m trainer evaluate < REQUEST.json              answer questions, as playbooks/evaluate.yml asks

SPEC.yml contains fields of the run spec; flags override it. `lr=1e-3` is equivalent to `--lr=1e-3`.
Several ranks: torchrun ... -m trainer --run-name mine --lr 1e-3 (torchrun takes --run for its own --run-path).
Names of other tools are understood, such as --learning_rate or --per-device-train-batch-size: docs/run-spec.md.
--hosts (--num_nodes): their number, or a JSON list with one object per host (host, processes, memory_mib); a run's plan.json works.
DIR: the data directory (default: the current one) contains runs/<run>/, and store/ with files that runs share.
"""


# Arguments -------------------------------------------------------------------------------------------------------------


def take_value(argv: list[str], flag: str) -> str | None:
    """Remove ``--flag VALUE`` or ``--flag=VALUE`` from argv and return the value. Raises UserError if it is missing."""
    for index, argument in enumerate(argv):
        if argument == flag:
            if not argv[index + 1 :] or argv[index + 1].startswith("--"):
                raise UserError(f"{flag}: expected a value: {flag}=...")
            del argv[index]
            return argv.pop(index)
        if argument.startswith(f"{flag}="):
            return argv.pop(index).partition("=")[2]
    return None


def take_any(argv: list[str], *flags: str) -> str | None:
    """Remove every one of the flags from argv, also written with hyphens; return the value of the first that is present."""
    found = [
        take_value(argv, name) for flag in flags for name in dict.fromkeys((flag, f"--{flag[2:].replace('_', '-')}"))
    ]
    return next((value for value in found if value is not None), None)


def take_path(argv: list[str], flag: str) -> Path | None:
    """Remove ``--flag DIR`` or ``--flag=DIR`` from argv and return the absolute path. Raises UserError if it is missing."""
    value = take_value(argv, flag)
    return None if value is None else user_path(value, flag).absolute()


def take_switch(argv: list[str], flag: str) -> bool:
    if flag not in argv:
        return False
    argv.remove(flag)
    return True


def take_positional(argv: list[str]) -> str | None:
    """Remove the first argument from argv and return it, unless it is a flag."""
    return argv.pop(0) if argv and not argv[0].startswith("--") else None


def take_spec(argv: list[str], ranks: int | None, *, quiet: bool = False, strict: bool = True) -> RunSpec:
    """Return the spec that the remaining arguments define: an optional file, and flags. Raises UserError.

    `ranks`: number of ranks of the run, if it is known. `quiet`: print no notes. `strict`: see `read_spec`.
    """
    # run=x is also a flag unless it is a file: torchrun interprets --run=x as an abbreviation of its --run-path.
    argv[:] = [f"--{argument}" if _is_assignment(argument) else argument for argument in argv]
    positional = take_positional(argv)
    path = user_path(positional, "run spec") if positional is not None else None
    flags = parse_flags(argv)
    report = _print_note if not quiet and os.environ.get("RANK", "0") == "0" else lambda line: None
    return read_spec(path, flags, "the flags", ranks=ranks, report=report, strict=strict)


def _print_note(line: str) -> None:
    print(line, file=sys.stderr)  # not stdout, where `check` prints the spec


def _world_size() -> int | None:
    """Return the number of ranks of this torchrun, or of this process alone."""
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdecimal() else None


def _is_assignment(argument: str) -> bool:
    """Return whether an argument is a field without dashes; also of an unknown field, so that the error names it, not a file."""
    name, equals, _ = argument.partition("=")
    named = plain_name(name).isidentifier() and not name.startswith("-")
    return bool(equals) and named and not path_kind(Path(argument))


# Commands --------------------------------------------------------------------------------------------------------------


def check(argv: list[str]) -> int:
    print(take_spec(argv, _world_size()).named().to_yaml(), end="")
    return 0


def fields(argv: list[str]) -> int:
    print(table())
    return 0


def data(argv: list[str]) -> int:
    from trainer.data.encode import Encoder
    from trainer.data.samples import samples_of
    from trainer.data.show import View, check_shown, show
    from trainer.data.text_tokenizer import TextTokenizer
    from trainer.data.tiny import with_tiny_model
    from trainer.model_files.adapter_folder import refuse_adapter
    from trainer.model_files.model_shape import fit_to_model

    data_dir, samples = take_path(argv, "--data-dir") or Path.cwd(), take_value(argv, "--samples")
    view = View.of(samples, take_switch(argv, "--json"))
    spec = take_spec(argv, None)
    check_shown(spec)
    spec = fit_to_model(with_tiny_model(spec, data_dir / "store"))
    refuse_adapter(spec.model)
    with without_collector():
        from trainer.model_files.base_weights import embedding_rows
        from trainer.models.model import load_tokenizer
    tokenizer = TextTokenizer.of(load_tokenizer(spec.model))
    show(samples_of(spec), Encoder.of(spec, tokenizer, rows=embedding_rows(spec.model)), view)
    return 0


def plan(argv: list[str]) -> int:
    from trainer.costs.host_memory import read_hosts
    from trainer.planner.plan_report import plan as make_plan

    data_dir, hosts = take_path(argv, "--data-dir") or Path.cwd(), read_hosts(take_value(argv, "--hosts") or "1")
    as_json, fast = take_switch(argv, "--json"), take_switch(argv, "--no-measure")
    link, given = None, take_value(argv, "--link-mbit")
    if given is not None:
        with contextlib.suppress(ValueError):
            link = float(given)
        if not 0 < (link or 0.0) < 1e9:
            raise UserError(f"--link-mbit: got {quoted(given)}, expected a number of Mbit/s > 0")
    ranks = sum(host["processes"] for host in hosts)
    made = make_plan(take_spec(argv, ranks, strict=False), hosts, link, fast=fast, data_dir=data_dir)
    print(json.dumps(made, indent=1) if as_json else "\n".join(made["lines"]))
    return 0


def config(argv: list[str]) -> int:
    from trainer.tools.tool_configs import SLURM_OPTIONS, Script, render

    kind = take_positional(argv) or ""
    output = take_path(argv, "--output")
    argument = take_any(argv, "--hosts", "--num_nodes", "--nnodes") or "1"
    head = take_any(argv, "--head", "--master_addr")
    gpus = not take_switch(argv, "--no-gpu")
    places = {name: take_any(argv, f"--{name}") for name in ("num_gpus_per_node", "master_port", "node_rank")}
    env = []
    while (pair := take_value(argv, "--env")) is not None:
        env.append(pair)
    slurm = {}
    for name in SLURM_OPTIONS:
        if value := take_any(argv, f"--slurm_{name}", f"--{name}", *(["--time_limit"] if name == "time" else [])):
            slurm[name] = value
    script = Script.of(env, slurm, places, kind)
    meanings = {"use_deepspeed": "strategy=deepspeed", "offload_optimizer": "deepspeed_offload=optimizer"}
    for switch, meaning in meanings.items():
        if take_switch(argv, f"--{switch}") or take_switch(argv, f"--{switch.replace('_', '-')}"):
            argv.append(f"--{meaning}")
    argv[:] = [f"--{argument}" if _is_assignment(argument) else argument for argument in argv]
    flags, hosts = list(argv), script.hosts_of(argument)
    ranks = sum(host["processes"] for host in hosts)
    strict = kind not in ("deepspeed", "fsdp")  # which name the strategy
    spec = take_spec(argv, ranks, strict=strict)
    if kind in ("deepspeed", "accelerate") and not (flags and not flags[0].startswith("--")):  # no file
        rows = -(-spec.rows_per_step // (spec.batch_size * ranks)) * spec.batch_size * ranks
        names = ("total_batch_size", "gradient_accumulation", ACCUMULATION, "deepspeed_config")
        chosen = any(field_of(name) in names for name in parse_flags(flags))
        if rows != spec.rows_per_step and not chosen:
            _print_note(f"total_batch_size={rows}: other tools require a multiple of batch_size x processes")
            spec = take_spec([*flags, f"--total_batch_size={rows}"], ranks, quiet=True, strict=strict)
    text = render(kind, spec, hosts, head, flags, gpus, script)
    if output is None:
        print(text, end="")
        return 0
    try:
        write_atomic(output, text)
        if kind in ("launcher", "slurm"):
            output.chmod(0o755)
    except OSError as error:
        raise UserError(f"--output: cannot write {quoted(str(output))}: {error.strerror}") from None
    return 0


def _offline(command: str) -> int:
    """Carry out the request on standard input; the controller starts it."""
    with without_collector():
        module = importlib.import_module(f"trainer.offline.{command}")
    status: int = module.main()
    return status


def store(argv: list[str]) -> int:
    """Serve the store in which the torchruns of a galaxy meet, until SIGTERM or Ctrl-C."""
    take_any(argv, "--identity_path")  # of hivemind-dht, whose place this takes
    flag = "--host_maddrs"
    host, port = parse_address(flag, take_any(argv, flag), any_host=True)
    if argv:
        raise UserError(f"store: unknown argument {quoted(argv[0])}")
    with without_collector():
        from trainer.distributed.meeting import serve
    from trainer.supervise.interface import interfaces

    awaited = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, awaited)  # also of the threads of the store
    try:
        kept = serve(host, port)
    except OSError as error:
        raise UserError(f"{flag}: cannot listen on {host}:{port}: {error.strerror or error}") from None
    if kept is None:
        raise UserError(f"{flag}: {host} is no address of this machine, or port {port} is in use: name another one")
    outside = [entry["address"] for entry in interfaces() if not entry["address"].startswith("127.")]
    for address in [*outside, "127.0.0.1"] if host == "0.0.0.0" else [host]:
        print(f"--hv.initial-peers /ip4/{address}/tcp/{port}", flush=True)
    signal.sigwait(awaited)
    return 0


def show_help() -> int:
    """Print the usage, and the fields of the spec as flags."""
    print(USAGE)
    print("strategies:")
    for name, summary in STRATEGIES.items():
        print(f"  {name:<11}{summary}")
    print()
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=RunSpec.__doc__, add_help=False)
    for name, field in FIELDS.items():
        words = f"{describe(name)} (default: {default_of(field)})".replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=expected_value(field), help=words)
    print(parser.format_help())
    return 0


def train(argv: list[str]) -> int:
    """Run one rank. Errors are also reported in its heartbeat."""
    run_dir, data_dir = take_path(argv, "--run-dir"), take_path(argv, "--data-dir")
    galaxy_flags = [take_any(argv, flag) for flag in ("--hv.galaxy_size", "--hv.world_rank", "--hv.initial_peers")]
    rank, under_torchrun = int(os.environ.get("RANK", "0")), "TORCHELASTIC_RUN_ID" in os.environ
    try:
        galaxy = Galaxy.parse(*galaxy_flags)
        rank += galaxy.rank * int(os.environ.get("WORLD_SIZE", "1"))  # a guess, until all workers have met
        if galaxy.size > 1:
            place = 1 if argv and not argv[0].startswith("--") else 0  # after a file; flags of the user win
            argv[place:place] = ["--strategy=diloco"]
        if under_torchrun and run_dir:
            # Redirect before torch is imported, so that import errors are in the log of the rank.
            from trainer.distributed.worker_process import die_with_launcher, redirect_output

            die_with_launcher()
            redirect_output(run_dir / "logs" / f"rank{rank}.log")
        spec = take_spec(argv, None if galaxy.size > 1 else _world_size()).named()
    except UserError as error:
        if not under_torchrun or not run_dir:
            raise
        return report_failure(Heartbeat(run_dir, rank), error)  # the controller shows it instead of an exit code
    eight_or_four_bits = spec.quantize != "none" or spec.optimizer == "adamw8bit"
    if under_torchrun and not eight_or_four_bits and not unsloth_backend.may_use(spec):
        # peft imports an installed bitsandbytes, which imports torch's compiler: a fifth of the start-up time.
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    data_dir = data_dir or (run_dir.parent.parent if run_dir else Path.cwd())
    run_dir = run_dir or data_dir / "runs" / spec.run
    heartbeat = Heartbeat(run_dir, rank)
    try:
        _write_first(heartbeat, run_dir, "" if spec.script else "importing torch")
        try:
            if spec.script:
                result = run_script(spec, run_dir, heartbeat)
            elif galaxy.size > 1:
                result = run_in_galaxy(galaxy, spec, run_dir, data_dir, heartbeat)
            else:
                result = run_rank(spec, run_dir, data_dir, heartbeat)
        except Exception as error:
            if isinstance(error, OSError) and (reason := disk_failure(error)):
                error = DiskError(
                    f"cannot write: {reason}: free disk space or fix permissions, and start the run again"
                )
            if isinstance(error, MemoryError):
                error = UserError(memory_failure(error))
            return report_failure(heartbeat, error)
        heartbeat(result["status"], force=True, step=result["step"], steps=result["steps"])
    except KeyboardInterrupt:
        # If the signal arrived inside an exec of text, as in namedtuple, CPython would end this process by SIGINT although
        # the exception is handled here, until another exec clears its note (pythonrun.c, unhandled_keyboard_interrupt).
        exec("")
        return report_failure(
            heartbeat, UserError("interrupted: start the run again to resume from its newest checkpoint")
        )
    return 0


def _write_first(heartbeat: Heartbeat, run_dir: Path, note: str) -> None:
    """Create the run folder and write the first heartbeat. Raises UserError if the folder cannot be written."""
    try:
        heartbeat("starting", force=True, note=note)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot write the run folder {run_dir}: {reason}: set --run-dir or --data-dir") from None


def run_in_galaxy(galaxy: Galaxy, spec: RunSpec, run_dir: Path, data_dir: Path, heartbeat: Heartbeat) -> dict[str, Any]:
    """Meet the other workers, and run this rank with theirs. It ends when one of them fails or is silent, and says which."""
    with without_collector():
        from trainer.distributed.heartbeats import Heartbeats
        from trainer.distributed.meeting import Meeting

    leads = os.environ.get("RANK", "0") == "0"
    meeting = Meeting.find(
        galaxy, spec.digest(), run_dir, spec.collective_timeout, lambda note: heartbeat("starting", note=note)
    )
    meeting.set_environment()
    heartbeat.move(meeting.run_dir, int(os.environ["RANK"]))

    def end(why: str) -> None:
        if not leads:
            time.sleep(SPEAKS_FIRST)  # the first rank of this torchrun, whose end is that of the others
        report_failure(heartbeat, UserError(why))
        if meeting.me.serves and leads:
            time.sleep(SPEAKS_FIRST)  # the other workers see the same in the store
        os._exit(1)

    heartbeats = Heartbeats(meeting, leads=leads, end=end)
    try:
        result = run_rank(spec, meeting.run_dir, data_dir, heartbeat, meeting)
    except Exception as error:
        if is_of_peer(error):
            heartbeats.explain()
        else:
            heartbeats.fail(error)
        raise
    heartbeats.close()
    return result


def run_rank(
    spec: RunSpec, run_dir: Path, data_dir: Path, heartbeat: Heartbeat, meeting: "Meeting | None" = None
) -> dict[str, Any]:
    """Join the other ranks, train, and return the result; or the existing result if the run has already finished."""
    from trainer.loop.run_dir import check_owner, claim, finished_result
    from trainer.model_files.model_shape import fit_to_model

    previous = finished_result(run_dir)
    spec, started = fit_to_model(spec), True
    if spec.strategy == AUTO or spec.automatic:
        from trainer.planner.decisions import decide_here

        spec, lines, started = decide_here(spec, run_dir)
        print(*lines, sep="\n")
    with without_collector():
        unsloth_backend.import_early(spec)
        from trainer.distributed.world import World
        from trainer.loop import train as loop
        from trainer.planner.agreement import agree, agree_compile

    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        check_owner(spec, run_dir)
    world = World.join(spec.collective_timeout, meeting)
    spec = agree(spec, started, world)
    # Not before all ranks have decided: in a job of Slurm, ranks that start later read this file.
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        claim(spec, run_dir)
    # Return it only if all hosts have a result: a host that failed before it wrote its result needs the other hosts.
    if all(world.gather(previous is not None)) and previous:
        steps, loss = previous["steps"], previous["loss_last"]
        print(f"run {spec.run} is finished: {steps} steps, last loss {loss:.4f}; nothing to do")
        return previous

    def settle(loaded: RunSpec, steps: int) -> RunSpec:
        found = agree_compile(loaded, steps, world)
        if world.is_host_leader:
            claim(
                spec.model_copy(update={name: getattr(found, name) for name in ("torch_compile", "automatic")}), run_dir
            )
        return found

    result = loop.train(spec, run_dir, data_dir, world, heartbeat, settle)
    if world.rank == 0 and result.get("loss_first") is not None:
        used = f" ({result['mfu']:.0%} of the device's peak)" if result.get("mfu") else ""
        print(
            f"run {spec.run} {result['status']} at step {result['step']}/{result['steps']}: "
            f"loss {result['loss_first']:.4f} -> {result['loss_last']:.4f}, eval {result['eval_loss']}, "
            f"{result['tokens_per_second']:.0f} tokens/s{used}, in {run_dir}"
        )
        if result.get("learning_steps") == 0:
            print(f"warning: {NOTHING_LEARNED}")
    return result


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "check": check,
    "fields": fields,
    "data": data,
    "plan": plan,
    "config": config,
    "merge": lambda _: _offline("merge"),
    "evaluate": lambda _: _offline("evaluate"),
    "store": store,
}


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit status: 0 for success, 1 for a failed run, 2 for invalid arguments."""
    # Messages of peft's dependencies about themselves, which a user cannot act on.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    try:
        status = dispatch(list(argv))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, for example `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def dispatch(arguments: list[str]) -> int:
    """Run the command that the first argument names; the default is `train`."""
    if "--help" in arguments or "-h" in arguments:
        return show_help()
    name = arguments.pop(0) if arguments and arguments[0] in COMMANDS else "train"
    try:
        require_utf8()
        return COMMANDS[name](arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:
        print(f"error: {memory_failure(error)}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    if "trainer.distributed.world" in sys.modules:
        sys.modules["trainer.distributed.world"].leave(exit_status)
    sys.exit(exit_status)

"""The settings of DiLoCo that the planner tries: longer rounds, 4-bit values, fragments, and models that a replica divides. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.costs.alternatives import NONE, Alternative, Alternatives, switch

if TYPE_CHECKING:
    from trainer.config import RunSpec

_ROUNDS = (20, 50, 100, 200, 500)  # steps of a round that the planner tries; each longer one is a concession more
_FRAGMENTS = 5
_DELAYS = (0.5, 1.0)  # parts of the longest delay of a fragment
_REPLICA_HOSTS = (1, 2, 3, 4)  # of a pipeline


def exchange_alternatives(spec: RunSpec) -> list[Alternatives]:
    """Return the alternatives that send less between replicas, or send it while they train."""
    cost = "pseudo-gradients are rounded to 4 bits; what rounding lost is sent with the next exchange"
    return [_round_alternatives(spec), switch(spec, "diloco_comm_dtype", "int4", cost, 1)]


def _round_alternatives(spec: RunSpec) -> Alternatives:
    """Return the alternatives of the steps in a round, of its fragments and of their delay, which the steps limit."""
    found: list[Alternative] = []
    for longer, steps in enumerate([spec.local_steps, *(steps for steps in _ROUNDS if steps > spec.local_steps)]):
        fields = {"local_steps": steps} if longer else {}
        costs = ["replicas differ more between synchronizations"] if longer else []
        if spec.diloco_fragments > 1:
            fields |= _delay(spec, spec.diloco_delay * steps // spec.local_steps)
        found.append(Alternative(fields, "; ".join(costs), longer))
        for late, part in enumerate(_DELAYS, 1) if spec.diloco_fragments == 1 else ():
            delay = int(steps / _FRAGMENTS * part)
            if delay:
                after = "1 step" if delay == 1 else f"{delay} steps"
                cost = f"replicas apply a fragment {after} after its exchange started, and evaluate other weights than they train"
                changed = fields | {"diloco_fragments": _FRAGMENTS} | _delay(spec, delay)
                found.append(Alternative(changed, "; ".join([*costs, cost]), longer + late))
    return found


def _delay(spec: RunSpec, steps: int) -> dict[str, int]:
    """Return the field with the delay of a fragment, if it changes."""
    return {} if steps == spec.diloco_delay else {"diloco_delay": steps}


def replica_alternatives(spec: RunSpec) -> Alternatives:
    """Return the alternatives of a replica that holds the full model on every rank: it shards the model, or divides its layers."""
    if spec.replica_strategy != "ddp":
        return [NONE]
    cost = "every pass within a replica sends the weights of all layers"
    found = [NONE, Alternative({"replica_strategy": "fsdp"}, cost)]
    cost = "ranks of a replica wait while its pipeline fills and drains"
    sizes = _REPLICA_HOSTS if spec.replica_hosts == 1 else (spec.replica_hosts,)
    for hosts in sizes:
        fields = {"replica_strategy": "pipeline"} | ({"replica_hosts": hosts} if hosts != spec.replica_hosts else {})
        found.append(Alternative(fields, cost, 1))
    return found

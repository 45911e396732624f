"""torchrun whose rendezvous only the hosts of the run can reach. Takes the arguments of torch.distributed.run."""

import torch.distributed
from torch.distributed import run
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

from trainer.distributed.store import RunStore


def main() -> None:
    """Run torchrun with the stores of this package."""
    for module in (torch.distributed, static_tcp_rendezvous, c10d_rendezvous_backend):
        vars(module)["TCPStore"] = RunStore
    run.main()


if __name__ == "__main__":
    main()

"""How ranks share the work. One room a strategy; the loop knows only what `Strategy` says."""

from trainer.config.run_spec import RunSpec
from trainer.distributed.world import World
from trainer.model import TokenLoss
from trainer.strategy.averaging import Averaging
from trainer.strategy.base import Batch, Stopped, Strategy
from trainer.strategy.ddp import DDP
from trainer.strategy.diloco import DiLoCo

STRATEGIES: dict[str, type[Strategy]] = {"ddp": DDP, "diloco": DiLoCo, "averaging": Averaging}


def make_strategy(spec: RunSpec, world: World, module: TokenLoss) -> Strategy:
    """Return the strategy that the spec names, with `module` in its hands."""
    if spec.strategy == "fsdp":
        from trainer.strategy.fsdp import FSDP  # torch.distributed.checkpoint takes its time, DeepSpeed even more

        return FSDP(spec, world, module)
    if spec.strategy == "deepspeed":
        from trainer.strategy.deepspeed import DeepSpeedZeRO

        return DeepSpeedZeRO(spec, world, module)
    if spec.by_torchft:
        from trainer.strategy.diloco_torchft import DiLoCoTorchFT  # an extra

        return DiLoCoTorchFT(spec, world, module)
    return STRATEGIES[spec.strategy](spec, world, module)


__all__ = ["STRATEGIES", "Batch", "Stopped", "Strategy", "make_strategy"]

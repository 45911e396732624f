"""The registry of strategies. One line here and the file `trainer/strategy/NAME.py` with its `PLAN` add a strategy."""

# Value of the field `strategy` -> a few words for help texts and documentation. The first one is the default.
STRATEGIES: dict[str, str] = {
    "ddp": "every rank holds the full model",
    "fsdp": "every rank holds a shard of the model",
    "deepspeed": "ZeRO: every rank holds a shard of optimizer state, gradients (stage 2) and weights (stage 3)",
    "diloco": "hosts train independently and synchronize every local_steps steps",
    "pipeline": "every rank holds some of the layers",
    "averaging": "hosts train independently and are averaged once, at the end",
}
DEFAULT_STRATEGY = next(iter(STRATEGIES))
AUTO = "auto"  # the planner chooses one of the strategies

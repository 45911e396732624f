"""The division of layers over ranks, the order of their passes, and the costs of strategy=pipeline."""

import os
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from trainer.common.errors import UserError
from trainer.costs.cost import Layout, RowStats, autocast_bytes, full_state
from trainer.distributed import COPY_STAGES
from trainer.distributed.world import World
from trainer.model_files.model_shape import Shape, read_shape
from trainer.spec import make_spec
from trainer.strategy import pipeline_copies, pipeline_measure, plan_named
from trainer.strategy.pipeline_copies import StageCopies, stage_file, transfers
from trainer.strategy.pipeline_costs import layer_costs, stage_state
from trainer.strategy.pipeline_measure import divide_model
from trainer.strategy.pipeline_schedule import Operation, operations
from trainer.strategy.pipeline_split import LayerCosts, RankFacts, divide_layers, given_layers, in_flight

FREE = LayerCosts(head=0, layer=0, saved=0, received=0, first=0, last=0)
LLAMA_7B = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
LLAMA_7B |= {"num_attention_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096}
SMALL_GEMMA = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SMALL_GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100}
GIB = 2**30


def shape_7b() -> Shape:
    return read_shape(LLAMA_7B)


def test_a_fast_rank_holds_more_layers() -> None:
    assert divide_layers(12, [RankFacts(1.0), RankFacts(1.0)], FREE, 8) == [6, 6]
    assert divide_layers(12, [RankFacts(1.0), RankFacts(2.0)], FREE, 8) == [8, 4]
    assert divide_layers(12, [RankFacts(3.0), RankFacts(1.0), RankFacts(1.0)], FREE, 8) == [2, 5, 5]
    assert divide_layers(12, [RankFacts(1.0), RankFacts(0.0)], FREE, 8) == [6, 6], "a speed is unknown"
    assert divide_layers(3, [RankFacts(1.0), RankFacts(99.0)], FREE, 8) == [2, 1], "no rank is without a layer"


def test_the_head_counts_as_layers_of_the_last_rank() -> None:
    costs = LayerCosts(head=4, layer=0, saved=0, received=0, first=0, last=0)
    assert divide_layers(12, [RankFacts(1.0)] * 2, costs, 8) == [8, 4]


def test_a_small_rank_holds_what_fits() -> None:
    costs = LayerCosts(head=0, layer=10, saved=1, received=0, first=5, last=5)
    # The first of two ranks holds 3 micro-batches: 13 bytes per layer and the embedding.
    assert divide_layers(12, [RankFacts(1.0, 5 + 4 * 13), RankFacts(1.0, 1e3)], costs, 8) == [4, 8]
    assert divide_layers(12, [RankFacts(1.0, 5 + 4 * 11), RankFacts(1.0, 1e3)], costs, 1) == [4, 8]
    with pytest.raises(UserError, match=r"strategy: pipeline needs about .* over 2 ranks, which have .*: add hosts"):
        divide_layers(12, [RankFacts(1.0, 5 + 4 * 13), RankFacts(1.0, 5 + 7 * 11)], costs, 8)
    with pytest.raises(UserError, match="pipeline needs about"):
        divide_layers(2, [RankFacts(1.0, 10), RankFacts(1.0, 1e3)], costs, 8)


@given(
    layers=st.integers(1, 9), seconds=st.lists(st.sampled_from([1.0, 1.5, 2.0, 5.0]), min_size=1, max_size=3),
    head=st.sampled_from([0.0, 0.5, 3.0]), room=st.sampled_from([3, 5, 99]),
)  # fmt: skip
def test_no_other_division_is_faster(layers: int, seconds: list[float], head: float, room: int) -> None:
    ranks = len(seconds)
    costs = LayerCosts(head=head, layer=1, saved=0, received=0, first=0, last=0)
    facts = [RankFacts(second, room) for second in seconds]

    def slowest(counts: tuple[int, ...]) -> float:
        heads = [0.0] * (ranks - 1) + [head]
        return max((n + h) * s for n, h, s in zip(counts, heads, seconds, strict=True))

    possible = [c for c in product(range(1, min(layers, room) + 1), repeat=ranks) if sum(c) == layers]
    if not possible:
        with pytest.raises(UserError):
            divide_layers(layers, facts, costs, 4)
        return
    found = divide_layers(layers, facts, costs, 4)
    assert slowest(tuple(found)) == min(map(slowest, possible))


def test_given_layers_must_match_the_model() -> None:
    assert given_layers("3,1", 2, 4) == [3, 1]
    for text, ranks in (("3,1", 3), ("3,2", 2)):
        with pytest.raises(UserError, match=r"pipeline_layers: .* give one number per rank with the sum 4"):
            given_layers(text, ranks, 4)


@given(ranks=st.integers(1, 6), micro=st.integers(1, 20))
def test_the_order_of_passes_never_blocks(ranks: int, micro: int) -> None:
    """Every pass runs once, after the passes that it needs, and no rank holds more micro-batches than the memory model says."""
    waiting = [operations(rank, ranks, micro) for rank in range(ranks)]
    done: set[tuple[int, Operation]] = set()
    held = [0] * ranks
    assert all(sorted(order) == sorted(product((False, True), range(micro))) for order in waiting)
    while any(waiting):
        progress = False
        for rank, order in enumerate(waiting):
            if not order:
                continue
            (forward, number), neighbour = order[0], rank - 1 if order[0].forward else rank + 1
            ready = not 0 <= neighbour < ranks or (neighbour, order[0]) in done
            if ready and (forward or (rank, Operation(True, number)) in done):
                done.add((rank, order.pop(0)))
                held[rank] += 1 if forward else -1
                assert held[rank] <= in_flight(rank, ranks, micro)
                progress = True
        assert progress, "every rank waits for another one"
    for rank in range(ranks):
        backward = [op.micro for op in operations(rank, ranks, micro) if not op.forward]
        assert backward == list(range(micro)), "gradients are summed in the order of a single process"


@pytest.mark.parametrize("fields", [{"lora_r": 0}, {"lora_r": 16}, {"quantize": "nf4"}])
def test_the_stages_together_hold_the_whole_state(fields: dict[str, Any]) -> None:
    spec, shape = make_spec({"model": "x", "strategy": "pipeline"} | fields, "here"), shape_7b()
    state = full_state(spec, shape, 4)
    stages = [stage_state(spec, shape, 4, n, first=place == 0, last=place == 2) for place, n in enumerate((10, 12, 10))]
    for field in ("base", "adapters", "gradients", "optimizer"):
        assert sum(getattr(stage, field) for stage in stages) == pytest.approx(getattr(state, field), rel=1e-6)


def test_costs_grow_with_layers_and_name_the_ends() -> None:
    spec, shape = make_spec({"model": "x", "strategy": "pipeline", "lora_r": 0}, "here"), shape_7b()
    costs = layer_costs(spec, shape, RowStats.full(spec), 4, cuda=False)
    assert costs.layer == pytest.approx(16 * shape.layer_parameters, rel=1e-3)  # weights, gradients, two moments
    assert costs.first == pytest.approx(16 * shape.head_parameters, rel=1e-3)
    assert costs.last > costs.first, "the head has logits"
    assert 0.3 < costs.head < 1.0
    recomputed = spec.model_copy(update={"gradient_checkpointing": True})
    less = layer_costs(recomputed, shape, RowStats.full(spec), 4, cuda=False)
    assert less.head == pytest.approx(costs.head * 3 / 4, rel=1e-6), "four passes, and three through the head"
    many = plan_named("pipeline").memory(spec, shape, Layout((1,) * 40), RowStats.full(spec))
    few = plan_named("pipeline").memory(spec, shape, Layout((1, 1)), RowStats.full(spec))
    assert sum(many.step.values()) < sum(few.step.values())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_micro_batch_in_flight_has_its_copies_of_the_weights(checkpointing: bool) -> None:
    """Autocast begins anew for each of them, and the backward pass needs the copies of its own forward pass."""
    fields = {"model": "x", "strategy": "pipeline", "lora_r": 0, "batch_size": 1, "total_batch_size": 16}
    fields |= {"gradient_checkpointing": checkpointing, "pipeline_layers": "8,8,8,8"}
    shape, layout = shape_7b(), Layout((1,) * 4)
    mixed, plain = (make_spec(fields | {"precision": name}, "here") for name in ("bf16-mixed", "32-true"))
    rows, plan = RowStats.full(mixed), plan_named("pipeline")
    found = [
        half.weights - full.weights
        for half, full in zip(
            plan.memories(mixed, shape, layout, rows, cuda=True),
            plan.memories(plain, shape, layout, rows, cuda=True),
            strict=True,
        )
    ]
    copies = autocast_bytes(mixed, shape, 4) / 4
    assert found == pytest.approx([copies * times for times in ([1] * 4 if checkpointing else [7, 5, 3, 1])], abs=2)
    costs, without = (layer_costs(spec, shape, rows, 4, cuda=True) for spec in (mixed, plain))
    assert costs.layer - without.layer == (copies / 8 if checkpointing else 0)


def test_a_division_that_the_spec_gives_or_a_model_with_images_limits_where_a_pipeline_runs() -> None:
    spec = make_spec({"model": "x", "strategy": "pipeline", "pipeline_layers": "8,8,8,8"}, "here")
    plan, shape = plan_named("pipeline"), shape_7b()
    assert plan.runs_on(spec, shape, Layout((1,) * 4)) and not plan.runs_on(spec, shape, Layout((1,) * 2))
    wrapped = read_shape({"model_type": "gemma3", "text_config": SMALL_GEMMA})
    assert wrapped.kind == "gemma3_text" and wrapped.wrapped and not read_shape(SMALL_GEMMA).wrapped
    free = make_spec({"model": "x", "strategy": "pipeline"}, "here")
    assert plan.runs_on(free, read_shape(SMALL_GEMMA), Layout((1, 1)))
    assert not plan.runs_on(free, wrapped, Layout((1, 1)))


def test_ranks_with_room_for_the_rows_of_the_dataset_only_get_layers_and_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dataset is not read yet when the layers are divided."""
    shape = shape_7b()
    spec = make_spec({"model": "x", "strategy": "pipeline", "balance": "even", "batch_size": 4}, "here")
    monkeypatch.setattr(pipeline_measure, "shape_of", lambda spec: shape)
    monkeypatch.setattr(pipeline_measure, "available_bytes", lambda device, processes: 20.0 * GIB)
    world = SimpleNamespace(rank=0, size=2, device=torch.device("cpu"), gather=lambda value: [value, value])
    pipelines = SimpleNamespace(world=world, stages=SimpleNamespace(size=2, rank=1), ranks=[[0, 1]])
    large, small = (replace(FREE, layer=size * GIB) for size in (4.0, 1.0))
    assert sum(divide_model(spec, pipelines, [small, large]).layers) == shape.layers  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    assert sum(divide_model(spec, pipelines, [large, small]).layers) == shape.layers  # type: ignore[arg-type]
    assert capsys.readouterr().out.startswith("warning: the memory may not suffice for rows of ")
    with pytest.raises(UserError, match=r"^strategy: pipeline needs about 128\.0 GiB"):
        divide_model(spec, pipelines, [large, replace(small, layer=2.0 * GIB)])  # type: ignore[arg-type]


# Copies of the checkpoint of a pipeline ------------------------------------------------------------------------------

LARGE = 10**9


def test_every_host_sends_its_files_to_the_next_one() -> None:
    """Every second host sends first; with an odd number of hosts, the last one sends to the first among these."""
    assert transfers([0, 1], [True] * 2, [5, 5], [LARGE] * 2) == [(0, 1), (1, 0)]
    assert transfers([0, 1, 2], [True] * 3, [5] * 3, [LARGE] * 3) == [(0, 1), (2, 0), (1, 2)]
    assert transfers([0, 2, 4, 5], [True] * 4, [5] * 4, [LARGE] * 4) == [(0, 1), (2, 3), (1, 2), (3, 0)]


def test_the_first_rank_of_a_host_receives_the_files_of_all_ranks_of_another() -> None:
    leaders = [True, False, True, False]
    assert transfers([0, 0, 1, 1], leaders, [5] * 4, [LARGE] * 4) == [(0, 2), (1, 2), (2, 0), (3, 0)]


def test_a_host_receives_nothing_that_fills_half_of_its_free_space() -> None:
    assert transfers([0, 1], [True] * 2, [60, 60], [120, 119]) == [(1, 0)]
    assert transfers([0, 0, 1], [True, False, True], [60, 60, 60], [LARGE, LARGE, 200]) == [(2, 0)]


def test_a_file_that_could_not_be_written_is_not_sent() -> None:
    assert transfers([0, 1], [True] * 2, [0, 60], [LARGE] * 2) == [(1, 0)]
    assert transfers([0, 0], [True, False], [5, 5], [LARGE] * 2) == []


# Two ranks as processes -------------------------------------------------------------------------------------------------


def rank(number: int, folder: Path, case: str) -> None:
    """Write a file, copy it as one of two hosts, and finish."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    world = World(number, 2, 0, number, torch.device("cpu"))
    os.environ[COPY_STAGES] = "1" if case != "off" else "0"
    pipeline_copies._CHUNK, pipeline_copies._PATIENCE = 1000, 0.2 if case == "slow" else 60.0
    send = dist.send
    if case == "slow":
        dist.send = lambda *args, **options: (time.sleep(0.05), send(*args, **options))
    here = folder / f"host{number}"
    here.mkdir()
    copies = StageCopies(world)
    for step in ("first", "second"):
        (here / step).mkdir()
        (here / step / stage_file(number)).write_bytes(bytes([number]) * 50_500)
        if case == "full" and number == 1:
            (here / step / stage_file(0)).with_suffix(".part").mkdir()  # no file can be written
        copies.start(here / step, 50_500)
        copies.finish()
        assert copies.done()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "copied"),
    [
        ("plain", [True, True]),
        *(pytest.param(name, [name == "full", False], marks=pytest.mark.long) for name in ("full", "off", "slow")),
    ],
)
def test_copies_are_complete_or_absent(case: str, copied: list[bool], tmp_path: Path) -> None:
    """`copied`: whether a host has the file of the other one."""
    torch.multiprocessing.spawn(rank, (tmp_path, case), nprocs=2)
    for number in (0, 1):
        for step in ("first", "second"):
            folder = tmp_path / f"host{number}" / step
            found = {path.name for path in folder.iterdir() if path.is_file()}
            assert found == {stage_file(number), *([stage_file(1 - number)] if copied[number] else [])}
            for name in found:
                assert (folder / name).read_bytes() == bytes([int(name[6:11])]) * 50_500

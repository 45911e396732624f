"""The order of samples: deterministic and complete; packing is exactly best-fit decreasing."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.common.errors import UserError
from trainer.data.mixture import Mixture, describe_mixture, permutation
from trainer.data.order import Order, held_out, training_samples
from trainer.data.packing import best_fit
from trainer.data.shares import micro_batches, share
from trainer.spec import make_spec

lengths_lists = st.lists(st.integers(1, 24), min_size=1, max_size=60)


def naive_best_fit(lengths: list[int], capacity: int, order: list[int]) -> list[list[int]]:
    """Textbook best-fit decreasing; among equally full bins it takes the one that changed last."""
    bins: list[list[int]] = []
    left: list[int] = []
    touched: list[int] = []
    for turn, item in enumerate(sorted(order, key=lambda place: -lengths[place])):
        fitting = [place for place in range(len(bins)) if left[place] >= lengths[item]]
        if fitting:
            chosen = min(fitting, key=lambda place: (left[place], -touched[place]))
        else:
            chosen = len(bins)
            bins.append([])
            left.append(capacity)
            touched.append(0)
        bins[chosen].append(item)
        left[chosen] -= lengths[item]
        touched[chosen] = turn
    return bins


@given(st.integers(0, 200), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=3))
def test_a_permutation_depends_only_on_its_key(n: int, key: list[int]) -> None:
    drawn = permutation(n, *key)
    np.random.default_rng(7).random(100)
    assert sorted(drawn.tolist()) == list(range(n))
    assert drawn.tolist() == permutation(n, *key).tolist()


def test_permutations_do_not_change_between_versions_and_machines() -> None:
    # Known values: a run that started on another machine must resume on this one.
    assert permutation(8, 1, 0, 0).tolist() == [2, 0, 1, 4, 5, 6, 7, 3]
    assert permutation(1000, 1, 0, 0).tolist() != permutation(1000, 1, 1, 0).tolist()
    assert permutation(1000, 1, 0, 0).tolist() != permutation(1000, 2, 0, 0).tolist()


def test_permutations_are_uniform() -> None:
    firsts = Counter(int(permutation(4, seed)[0]) for seed in range(2000))
    assert set(firsts) == {0, 1, 2, 3}
    assert all(400 < count < 600 for count in firsts.values()), firsts


@given(lengths_lists, st.integers(24, 40), st.randoms(use_true_random=False))
def test_best_fit_is_exactly_best_fit_decreasing(lengths: list[int], capacity: int, draw) -> None:
    order = list(range(len(lengths)))
    draw.shuffle(order)
    assert best_fit(lengths, capacity, order) == naive_best_fit(lengths, capacity, order)


def test_best_fit_rejects_items_that_fit_nowhere() -> None:
    with pytest.raises(ValueError, match="item 1 has length 9, expected 1 to 8"):
        best_fit([8, 9], 8, [0, 1])
    with pytest.raises(ValueError, match="expected 1 to 8"):
        best_fit([0], 8, [0])


@given(
    lengths_lists, st.integers(24, 64), st.integers(1, 4), st.integers(1, 9), st.booleans(), st.integers(0, 2**32 - 1)
)
def test_every_epoch_has_every_sample_once_and_steps_cover_all_rows_once(
    lengths: list[int], capacity: int, epochs: int, rows: int, packing: bool, seed: int
) -> None:
    given_lengths = np.array(lengths)
    order = Order(given_lengths, seed=seed, capacity=capacity, packing=packing, epochs=epochs, rows=rows)
    for epoch in range(epochs):
        all_rows = order.epoch(epoch)
        assert len(all_rows) == order.rows_per_epoch
        assert sorted(sample for row in all_rows for sample in row) == list(range(len(lengths)))
        assert all(sum(lengths[sample] for sample in row) <= capacity for row in all_rows)
        assert packing or all(len(row) == 1 for row in all_rows)
    straight = [row for epoch in range(epochs) for row in order.epoch(epoch)]
    steps = [order.step(step) for step in range(order.steps)]
    assert [row for step in steps for row in step] == straight
    assert all(len(step) == rows for step in steps[:-1]) and 1 <= len(steps[-1]) <= rows
    ends = [order.rows_per_epoch * (epoch + 1) for epoch in range(epochs)]
    assert [order.epochs(step) for step in range(order.steps + 1)] == [
        sum(end <= step * rows or step == order.steps for end in ends) for step in range(order.steps + 1)
    ]
    # Deterministic: a new instance returns the same rows for any step.
    last = Order(given_lengths, seed=seed, capacity=capacity, packing=packing, epochs=epochs, rows=rows)
    assert last.step(order.steps - 1) == steps[-1]
    assert order.step(order.steps) == []


@pytest.mark.parametrize("packing", [False, True])
def test_every_epoch_shuffles_the_samples(packing: bool) -> None:
    """With packing, a sample also shares its row with other samples."""
    order, other = (Order(np.full(64, 16), seed=n, capacity=64, packing=packing, epochs=3, rows=4) for n in (1, 2))
    epochs = [order.epoch(epoch) for epoch in range(3)]
    assert epochs[0] != other.epoch(0)
    assert all(sorted(sample for row in rows for sample in row) == list(range(64)) for rows in epochs)
    if packing:
        epochs = [sorted(sorted(row) for row in rows) for rows in epochs]
    assert len({str(rows) for rows in epochs}) == 3


@given(st.integers(0, 500), st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any))
def test_shares_cover_every_row_once_and_keep_their_proportion(rows: int, shares: list[int]) -> None:
    parts = [range(rows)[share(rows, shares, rank)] for rank in range(len(shares))]
    assert [row for part in parts for row in part] == list(range(rows))
    for part, weight in zip(parts, shares, strict=True):
        assert abs(len(part) - rows * weight / sum(shares)) < 1


@given(st.integers(0, 50), st.integers(1, 9))
def test_micro_batches_cover_the_rows_and_are_never_empty_lists(rows: int, size: int) -> None:
    mine = [[row] for row in range(rows)]
    parts = micro_batches(mine, size)
    assert [row for part in parts for row in part] == mine
    assert all(len(part) <= size for part in parts)
    assert len(parts) == max(1, -(-rows // size))


weights_of_datasets = st.lists(
    st.tuples(st.integers(1, 20), st.sampled_from([0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 2.7, 3.0])), min_size=1, max_size=4
)


def sources_of(datasets: list[tuple[int, float]]) -> np.ndarray:
    return np.repeat(np.arange(len(datasets)), [count for count, _ in datasets])


@given(weights_of_datasets, st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_a_mixture_holds_its_weights(datasets: list[tuple[int, float]], epochs: int, seed: int) -> None:
    """In every epoch and since the start: within one sample, and no sample more than once more than another one."""
    sources = sources_of(datasets)
    mixture = Mixture(sources, [weight for _, weight in datasets], seed)
    total: Counter[int] = Counter()
    for epoch in range(epochs):
        samples = mixture.samples(epoch).tolist()
        assert len(samples) == mixture.count(epoch)
        assert samples == Mixture(sources, [weight for _, weight in datasets], seed).samples(epoch).tolist()
        used = Counter(samples)
        total += used
        for number, (count, weight) in enumerate(datasets):
            indices = np.flatnonzero(sources == number).tolist()
            exact = Fraction(str(weight)) * count
            assert abs(sum(used[i] for i in indices) - exact) < 1
            assert abs(sum(total[i] for i in indices) - exact * (epoch + 1)) < 1
            assert max(used[i] for i in indices) <= math.ceil(weight), "a repeat that the weight does not ask for"
            assert min(used[i] for i in indices) >= math.floor(weight), "a sample is lost"
            assert max(total[i] for i in indices) - min(total[i] for i in indices) <= 1


@given(weights_of_datasets, st.integers(1, 4), st.integers(1, 7), st.booleans(), st.data())
def test_the_order_of_a_mixture_is_complete_and_the_same_after_a_resume(
    datasets: list[tuple[int, float]], epochs: int, rows: int, packing: bool, data: st.DataObject
) -> None:
    sources = sources_of(datasets)
    weights = [weight for _, weight in datasets]
    lengths = np.array(data.draw(st.lists(st.integers(1, 9), min_size=len(sources), max_size=len(sources))))

    def order(max_steps: int = 0, repeats: bool = True) -> Order:
        mixture = Mixture(sources, weights, 5)
        more = {"mixture": mixture, "max_steps": max_steps, "repeats": repeats}
        return Order(lengths, seed=5, capacity=9, packing=packing, epochs=epochs, rows=rows, **more)

    straight = order()
    steps = [straight.step(step) for step in range(straight.steps)]
    used = Counter(sample for step in steps for row in step for sample in row)
    mixture = Mixture(sources, weights, 5)
    assert used == Counter(sample for epoch in range(epochs) for sample in mixture.samples(epoch).tolist())
    assert all(len(step) == rows for step in steps[:-1]) and 1 <= len(steps[-1]) <= rows
    assert straight.step(straight.steps) == []
    ends = np.cumsum([len(straight.epoch(epoch)) for epoch in range(epochs)])
    assert [straight.epochs(step) for step in range(straight.steps)] == [
        int((ends <= step * rows).sum()) for step in range(straight.steps)
    ]
    assert straight.epochs(straight.steps) == epochs
    resumed = data.draw(st.integers(0, straight.steps - 1))
    assert order().step(resumed) == steps[resumed], "a new instance begins in the middle"
    limited = order(max_steps=resumed + 1, repeats=False)
    assert limited.steps == resumed + 1 and limited.step(resumed) == steps[resumed]
    assert order(max_steps=straight.steps + 3, repeats=False).steps == straight.steps, "as an earlier version"
    longer = order(max_steps=straight.steps + 3)
    assert longer.steps == straight.steps + 3 and longer.epochs(longer.steps) >= epochs
    assert [len(longer.step(step)) for step in range(longer.steps)] == [rows] * longer.steps
    assert [longer.step(step) for step in range(straight.steps - 1)] == steps[:-1]


def test_weights_of_one_change_nothing() -> None:
    """A run of one dataset has the same order as before weights were introduced."""
    lengths = np.arange(1, 33)
    plain = Order(lengths, seed=1, capacity=32, packing=True, epochs=2, rows=4)
    mixed = Order.of(
        make_spec({"dataset": ["a", "b"], "seed": 1, "seq_length": 32, "total_batch_size": 4, "epochs": 2}, ""),
        lengths,
        sources_of([(16, 1.0), (16, 1.0)]),
    )
    assert [plain.step(step) for step in range(plain.steps)] == [mixed.step(step) for step in range(mixed.steps)]


def test_held_out_samples_of_a_mixture() -> None:
    """The evaluation split follows the weights: a small part of a large dataset does not fill it."""
    spec = make_spec({"dataset": ["a", {"path": "b", "weight": 0.01}], "eval_split": 0.1}, "")
    sources = sources_of([(100, 1.0), (10_000, 0.01)])
    out = held_out(spec, len(sources), sources)
    assert len(out) == len({*out}) == 20
    assert Counter(sources[out].tolist()) == {0: 10, 1: 10}
    assert out == held_out(spec, len(sources), sources)
    assert held_out(spec, 2, np.array([0, 1])) == [], "each dataset keeps a sample"
    train = np.delete(sources, out)
    assert describe_mixture(spec, train) == [
        "dataset a: 90 samples x 1, 47% of an epoch",
        "dataset b: 9990 samples x 0.01, 53% of an epoch",
    ]
    named = describe_mixture(spec, train, "./mine.jsonl, org/data")
    assert [line.split(":")[0] for line in named] == ["dataset ./mine.jsonl", "dataset org/data"]
    assert describe_mixture(spec, train, "one, with a comma, org/data")[0].startswith("dataset a:"), "which is which?"
    assert describe_mixture(make_spec({"dataset": "a"}, ""), train[:90]) == []


def chosen(**values: object) -> tuple[list[int], set[int]]:
    spec = make_spec({"dataset": "a", "eval_split": 0.1, **values}, "")
    out = held_out(spec, 200)
    return training_samples(spec, 200, out), set(out)


def test_parts_of_the_samples() -> None:
    """Students share the held-out samples, which none of them trains on."""
    everything, out = chosen()
    assert sorted([*everything, *out]) == list(range(200))
    shards = [chosen(seed=n, shared_seed=1, data_part=f"shard:{n}/3") for n in (1, 2, 3)]
    assert [held for _, held in shards] == [out] * 3
    assert sorted(sample for shard, _ in shards for sample in shard) == everything
    assert [len(shard) for shard, _ in shards] == [60] * 3 and all(shard == sorted(shard) for shard, _ in shards)
    one, two = (chosen(seed=n, shared_seed=1, data_part="bootstrap")[0] for n in (1, 2))
    assert one != two and len(one) == len(two) == 180 and set(one) | set(two) <= set(everything)
    assert 100 < len(set(one)) < 130, "1 - 1/e of the samples are drawn"
    assert chosen(seed=2)[1] != out, "seed without shared_seed"
    with pytest.raises(UserError, match="data_part: shard:181/181 has no samples, of 180"):
        chosen(data_part="shard:181/181")

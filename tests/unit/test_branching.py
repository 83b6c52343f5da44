import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_arpo.algorithm.branching import (
    ArpoBranching,
    ForkBudget,
    NoBranching,
    decide,
    fork_probability,
    keyed_seed,
    keyed_uniform,
)


def arpo(**changes):
    return ArpoBranching(**({"num_rollouts": 16, "num_initial": 8} | changes))


def test_fork_probability_by_hand():
    assert fork_probability(arpo(), initial_entropy=1.0, entropy=2.5) == pytest.approx(0.8)
    assert fork_probability(arpo(alpha=0.1, beta=1.0), initial_entropy=2.0, entropy=0.5) == pytest.approx(-1.4)


def test_bernoulli_compares_with_the_clipped_probability():
    assert decide(arpo(), 1.0, 2.5, drawn=0.79) == (pytest.approx(0.8), True)
    assert decide(arpo(), 1.0, 2.5, drawn=0.81) == (pytest.approx(0.8), False)
    assert decide(arpo(), 0.0, 50.0, drawn=0.999999) == (1.0, True)
    assert decide(arpo(), 50.0, 0.0, drawn=0.0) == (0.0, False)


def test_threshold_takes_no_chances():
    settings = arpo(rule="threshold", threshold=0.8)
    assert decide(settings, 1.0, 2.6, drawn=0.999) == (pytest.approx(0.82), True)
    assert decide(settings, 1.0, 2.4, drawn=0.0) == (pytest.approx(0.78), False)
    assert decide(arpo(rule="threshold", alpha=0.5, threshold=0.5), 1.0, 1.0, drawn=0.0) == (0.5, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_initial": 17}, "num_initial=17 must be between 1 and num_rollouts=16"),
        ({"num_initial": 0}, "num_initial=0"),
        ({"beam_size": 1}, "beam_size=1 must be at least 2"),
        ({"probe_tokens": 0}, "probe_tokens=0"),
        ({"beta": float("nan")}, "beta=nan"),
        ({"rule": "coin"}, "rule='coin'"),
        ({"fork_budget": "mine"}, "fork_budget='mine'"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        arpo(**changes)


def test_no_branching_needs_a_rollout():
    with pytest.raises(ValueError, match="num_rollouts=0"):
        NoBranching(num_rollouts=0)
    budget = ForkBudget.of(NoBranching(num_rollouts=3))
    assert [budget.left(branch) for branch in budget.branches()] == [0, 0, 0]


def test_keyed_shares_by_hand():
    budget = ForkBudget(num_rollouts=7, num_initial=2, mode="keyed")
    assert [budget.left(branch) for branch in ((0,), (1,))] == [3, 2]
    assert budget.fork((0,), turn=1, num_wanted=1) == ((0, 1, 0),)
    assert [budget.left(branch) for branch in ((0,), (0, 1, 0), (1,))] == [1, 1, 2]
    assert budget.fork((1,), turn=2, num_wanted=4) == ((1, 2, 0), (1, 2, 1))
    assert budget.left((1,)) == 0
    assert budget.end((0, 1, 0)) == ((2, 0, 1, 0, 0),), "a share that nobody else may use comes back at once"
    assert budget.left((2, 0, 1, 0, 0)) == 0


def test_the_remainder_of_a_split_stays_with_the_parent():
    budget = ForkBudget(num_rollouts=9, num_initial=1, mode="keyed")
    children = budget.fork((0,), turn=1, num_wanted=2)
    assert [budget.left(branch) for branch in ((0,), *children)] == [2, 2, 2]
    child = budget.fork((0,), turn=2, num_wanted=1)[0]
    assert [budget.left(branch) for branch in ((0,), child)] == [1, 0]


def test_shared_is_first_come_and_returns_the_rest_once_all_have_ended():
    budget = ForkBudget(num_rollouts=5, num_initial=2, mode="shared")
    assert budget.fork((1,), turn=1, num_wanted=1) == ((1, 1, 0),)
    assert [budget.left(branch) for branch in budget.branches()] == [2, 2, 2]
    assert budget.end((0,)) == () == budget.end((1,))
    assert len(budget.end((1, 1, 0))) == 2
    assert [budget.left(branch) for branch in budget.branches()] == [0, 0]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_every_history_ends_with_exactly_m_leaves(data):
    """Whatever is forked and ended in whatever order, the number of branches that ever lived is M."""
    num_initial = data.draw(st.integers(1, 5))
    num_rollouts = num_initial + data.draw(st.integers(0, 12))
    mode = data.draw(st.sampled_from(["shared", "keyed"]))
    budget = ForkBudget(num_rollouts=num_rollouts, num_initial=num_initial, mode=mode)
    seen, turn = list(budget.branches()), 0
    while alive := budget.branches():
        branch = data.draw(st.sampled_from(alive))
        turn += 1
        if data.draw(st.booleans()):
            seen += budget.fork(branch, turn, data.draw(st.integers(1, 3)))
        else:
            seen += budget.end(branch)
        assert all(budget.left(alive) >= 0 for alive in budget.branches())
    assert len(seen) == len(set(seen)) == num_rollouts


def test_keyed_numbers_are_stable_and_apart():
    """Literals: another process, platform or Python version must draw the same."""
    assert keyed_seed(7, "p", (0,), 1) == 824836583296110899
    assert keyed_uniform(7, "p", (0,), 1) == 0.2829143279306783
    seeds = {
        keyed_seed(seed, prompt, key, turn)
        for seed in (0, 1)
        for prompt in ("1", "11")
        for key in ((0,), (1,), (0, 1, 0), (0, 10))
        for turn in (0, 1)
    }
    assert len(seeds) == 32
    assert all(0 <= seed < 2**63 for seed in seeds)
    drawn = [keyed_uniform(0, "p", (branch,), turn) for branch in range(50) for turn in range(20)]
    assert min(drawn) >= 0.0 and max(drawn) < 1.0
    assert abs(sum(drawn) / len(drawn) - 0.5) < 0.05

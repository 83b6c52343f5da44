import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_arpo.algorithm.entropy import entropy_from_logprobs, probe_entropy


def test_entropy_by_hand():
    """p = (1/2, 1/4): 1/4 is left for two tokens of at most 1/4, as (1/4, 0) or as (1/8, 1/8)."""
    head = 0.5 * math.log(2) + 0.25 * math.log(4)
    least, most = 0.25 * math.log(4), 0.25 * math.log(8)
    entropy, error = entropy_from_logprobs([math.log(0.5), math.log(0.25)], vocab_size=4)
    assert entropy == pytest.approx(head + (least + most) / 2)
    assert error == pytest.approx((most - least) / 2)
    assert (round(entropy, 4), round(error, 4)) == (1.1264, 0.0866)


def test_the_smallest_listed_probability_tightens_the_bound():
    """q = 0.5 over 98 tokens of at most 0.1 each: at least five tokens share it, not one."""
    _, error = entropy_from_logprobs([math.log(0.4), math.log(0.1)], vocab_size=100)
    assert error == pytest.approx((0.5 * math.log(98 / 0.5) - 5 * 0.1 * math.log(10)) / 2)


def test_the_full_vocabulary_is_exact():
    assert entropy_from_logprobs([math.log(0.25)] * 4, vocab_size=4) == (pytest.approx(math.log(4)), 0.0)


def test_masked_tokens_count_nothing():
    assert entropy_from_logprobs([0.0, -math.inf, -math.inf], vocab_size=1000) == (0.0, 0.0)


@given(
    weights=st.lists(st.floats(0.0, 12.0), min_size=2, max_size=40).map(lambda logits: [math.exp(x) for x in logits]),
    num_listed=st.integers(1, 40),
)
@settings(max_examples=150, deadline=None)
def test_the_true_entropy_lies_within_the_bound(weights, num_listed):
    probabilities = sorted((weight / sum(weights) for weight in weights), reverse=True)
    truth = -sum(p * math.log(p) for p in probabilities)
    listed = [math.log(p) for p in probabilities[:num_listed]]
    entropy, error = entropy_from_logprobs(listed, vocab_size=len(probabilities))
    assert abs(entropy - truth) <= error + 1e-9
    assert error >= 0.0
    if num_listed >= len(probabilities):
        assert error == 0.0


@pytest.mark.parametrize(
    ("logprobs", "vocab_size", "message"),
    [
        ([], 5, "need between 1 and vocab_size"),
        ([-1.0, -1.0], 1, "need between 1 and vocab_size"),
        ([2.0], 5, "natural logs of probabilities"),
        ([-0.1, -0.1], 5, "sum to probability"),
        ([float("nan"), -1.0], 5, "sum to probability"),
        ([math.log(0.1)], 3, "pass the largest log-probs"),
    ],
)
def test_wrong_lists_are_refused(logprobs, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        entropy_from_logprobs(logprobs, vocab_size)


def test_probe_entropy_by_hand():
    nats = [math.log(4), math.log(4), 9.0]
    assert probe_entropy(nats, k=2, vocab_size=16) == pytest.approx(1.0)
    assert probe_entropy(nats[:1], k=20, vocab_size=16) == pytest.approx(0.5)
    assert probe_entropy([], k=20, vocab_size=16) == 0.0
    with pytest.raises(ValueError, match="vocab_size=1"):
        probe_entropy(nats, k=2, vocab_size=1)

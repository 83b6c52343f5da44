from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_arpo.algorithm.loss import (
    ClipSettings,
    EntropyScale,
    clipped_loss,
    entropy_scaled,
    importance_weights,
    kl_to_reference,
    tree_policy_loss,
)

CLIP = ClipSettings(low=0.2, high=0.3, dual=3.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.6),  # clipped at 1.3
        (0.5, 2.0, -1.0),  # the smaller gain counts
        (0.5, -2.0, 1.6),  # clipped at 0.8
        (1.5, -2.0, 3.0),
        (5.0, -2.0, 6.0),  # dual clip: 3 |A|
    ],
)
def test_clipped_loss_by_hand(ratio: float, advantage: float, expected: float) -> None:
    loss = clipped_loss(torch.tensor([ratio]).log(), torch.tensor([advantage]), CLIP)
    assert float(loss) == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(
    log_ratio=st.floats(-2, 2),
    advantages=st.lists(st.floats(-3, 3), min_size=1, max_size=6),
    dual=st.sampled_from([None, 3.0]),
)
def test_a_shared_token_has_the_summed_loss_of_its_leaves(log_ratio: float, advantages: list[float], dual: float | None) -> None:
    clip = ClipSettings(low=0.2, high=0.2, dual=dual)
    weights = [1.0 / (index + 1) for index in range(len(advantages))]

    def gradient_and_loss(loss_of) -> tuple[float, float]:
        logprob = torch.tensor([log_ratio - 1.0], dtype=torch.float64, requires_grad=True)
        loss = loss_of(logprob)
        loss.backward()
        return float(loss), float(logprob.grad)

    old = torch.tensor([-1.0], dtype=torch.float64)

    def flat(logprob: torch.Tensor) -> torch.Tensor:
        ratio = (logprob - old).exp()
        return sum(
            w * clipped_loss(ratio.log(), torch.tensor([a], dtype=torch.float64), clip).sum()
            for w, a in zip(weights, advantages, strict=True)
        )

    positive = torch.tensor([sum(w * max(a, 0) for w, a in zip(weights, advantages, strict=True))], dtype=torch.float64)
    negative = torch.tensor([sum(w * min(a, 0) for w, a in zip(weights, advantages, strict=True))], dtype=torch.float64)
    tree = gradient_and_loss(lambda logprob: tree_policy_loss(logprob, old, positive, negative, clip))
    assert tree == pytest.approx(gradient_and_loss(flat), rel=1e-9, abs=1e-9)


def test_importance_weights_are_capped_and_carry_no_gradient() -> None:
    actor = torch.tensor([-1.0, -1.0], requires_grad=True)
    weights = importance_weights(actor, torch.tensor([-1.5, -3.0]), cap=2.0)
    assert weights.tolist() == pytest.approx([1.6487, 2.0], rel=1e-4)
    assert not weights.requires_grad


def test_aepo_clipping_keeps_the_value_and_a_gradient_and_survives_a_vanishing_ratio() -> None:
    clip = ClipSettings(low=0.2, high=0.2, dual=3.0, keep_gradient=True)
    log_ratio = torch.tensor([0.5, 0.1, -110.0, 0.5], requires_grad=True)
    advantage = torch.tensor([2.0, 2.0, 2.0, -2.0])
    loss = clipped_loss(log_ratio, advantage, clip)
    plain = clipped_loss(log_ratio.detach(), advantage, ClipSettings(low=0.2, high=0.2, dual=3.0))
    assert torch.allclose(loss, plain)
    (gradient,) = torch.autograd.grad(loss.sum(), log_ratio)
    ratio = log_ratio.detach().exp()
    assert gradient.tolist() == pytest.approx([-2.0 * 1.2, -2.0 * float(ratio[1]), 0.0, 2.0 * float(ratio[3])])


def test_kl_and_entropy_scale_by_hand() -> None:
    found = kl_to_reference(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -2.0]), torch.tensor([0.5, 1.0]))
    assert float(found) == pytest.approx(0.5 * (math.exp(-0.5) + 0.5 - 1.0))
    scale = EntropyScale.of_sums(4.0, 1.0 + 1.0 + 3.0 + 3.0, 1.0 + 1.0 + 9.0 + 9.0)
    assert (scale.mean, scale.std) == (2.0, 1.0)
    pos, neg = entropy_scaled(torch.tensor([1.0, 1.0]), torch.tensor([-0.5, -0.5]), torch.tensor([3.0, -8.0]), scale, 0.2)
    assert pos.tolist() == pytest.approx([1.2, 0.5]) and neg.tolist() == pytest.approx([-0.6, -1.0]), "a negative factor turns signs"

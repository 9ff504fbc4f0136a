"""Losses and statistics against numpy and numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from draftgrid.heads.distributions import acceptance, count_table, entropy, mix_guidance, smooth_l1
from draftgrid.heads.grid import TokenGrid


def distributions(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(shape[-1], 0.3), shape[:-1])


def test_acceptance_is_one_minus_total_variation() -> None:
    p, q = distributions(0, 3, 4, 9), distributions(1, 3, 4, 9)
    expected = 1 - 0.5 * np.abs(p - q).sum(-1)
    np.testing.assert_allclose(acceptance(torch.tensor(p), torch.tensor(q)).numpy(), expected, atol=1e-12)


def test_acceptance_is_one_for_equal_and_zero_for_disjoint_distributions() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]])
    assert acceptance(p, p).tolist() == [1.0, 1.0]
    assert acceptance(p[:1], torch.tensor([[0.0, 0.0, 1.0, 0.0]])).tolist() == [0.0]


def test_guidance_one_is_the_conditional_branch_and_three_goes_two_steps_beyond() -> None:
    conditional, unconditional = [[1.0, -2.0, 0.5]], [[0.0, 1.0, 0.5]]
    logits = torch.tensor([conditional, unconditional])
    assert mix_guidance(logits, 1.0).tolist() == conditional
    # u + 3 (c - u): 0 + 3 * 1, 1 + 3 * (-3), .5 + 0
    assert mix_guidance(logits, 3.0).tolist() == [[3.0, -8.0, 0.5]]
    assert mix_guidance(logits, 0.0).tolist() == unconditional


def test_one_branch_passes_through_unmixed_in_fp32() -> None:
    logits = torch.tensor([[[1.0, -2.0]]], dtype=torch.bfloat16)
    mixed = mix_guidance(logits, 7.0)
    assert mixed.tolist() == [[1.0, -2.0]]
    assert mixed.dtype == torch.float32


def test_smooth_l1_equals_the_hand_computed_mean() -> None:
    # |d| = .5, 1, 3, 0 -> .5 d^2 below 1, |d| - .5 from there on: .125, .5, 2.5, 0
    predicted, target = torch.tensor([[0.5, 1.0, -3.0, 2.0]]), torch.tensor([[0.0, 0.0, 0.0, 2.0]])
    assert float(smooth_l1(predicted, target)) == pytest.approx((0.125 + 0.5 + 2.5 + 0) / 4)


def test_smooth_l1_of_bf16_states_is_taken_in_fp32() -> None:
    predicted = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    target = torch.zeros(1, 4096, dtype=torch.bfloat16)
    loss = smooth_l1(predicted, target)
    assert loss.dtype == torch.float32
    assert float(loss) == 0.5


def test_entropy_is_in_nats_and_zero_probability_adds_nothing() -> None:
    p = torch.tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0]])
    np.testing.assert_allclose(entropy(p).numpy(), [math.log(4), 0.0, math.log(2)], atol=1e-7)
    q = distributions(2, 5, 7)
    np.testing.assert_allclose(entropy(torch.tensor(q)).numpy(), -(q * np.log(q)).sum(-1), atol=1e-12)


@pytest.mark.parametrize("offset", [(0, 1), (0, 3), (1, 0), (1, -1)])
def test_count_table_equals_a_count_over_cells(offset: tuple[int, int]) -> None:
    codes, prior, (H, W) = 4, 0.5, (3, 5)
    tokens = np.random.default_rng(3).integers(0, codes - 1, (6, H, W))  # the last code never occurs
    counts = np.zeros((codes, codes))
    for picture in tokens:
        for y in range(H):
            for x in range(W):
                ty, tx = y + offset[0], x + offset[1]
                if 0 <= ty < H and 0 <= tx < W:
                    counts[picture[y, x], picture[ty, tx]] += 1
    unigram = np.array([(tokens == c).sum() for c in range(codes)]) + 1e-3
    unigram /= unigram.sum()
    expected = (counts + prior * unigram) / (counts.sum(1, keepdims=True) + prior)

    source, target = TokenGrid(H, W, 1).pairs(offset)
    table = count_table(torch.tensor(tokens), source, target, codes, prior)
    np.testing.assert_allclose(table.numpy(), expected, rtol=1e-5)
    # A code that was never seen falls back to the unigram; every row is a distribution.
    np.testing.assert_allclose(table[-1].numpy(), unigram, rtol=1e-5)
    np.testing.assert_allclose(table.sum(1).numpy(), np.ones(codes), rtol=1e-5)

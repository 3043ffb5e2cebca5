"""One test for each exercise, failing until it is solved; GRIL_SOLUTIONS=1 tests solutions.py."""
import os

import pytest
import torch

import exercises
import solutions
from exercises import descent
from gril import MultistepGRIL, construct_multistep, interleave
from tasks import NdRegression, gradient_descent

ANSWERS = solutions if os.environ.get("GRIL_SOLUTIONS") else exercises


def prompts(B=3, N=7, f=4, seed=0):
    """x (B, N+1, f) with features of different lengths, y = W x, in float64."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(B, N + 1, f, generator=generator, dtype=torch.float64)
    x = x * torch.linspace(0.5, 2, f, dtype=torch.float64)
    return x, x @ torch.randn(B, f, f, generator=generator, dtype=torch.float64).mT


def every_prefix(learner, x, y):
    """Its prediction for x_{t+1} after t examples, t = 1 … N: (B, N, f)."""
    return torch.stack([learner(x[:, :t], y[:, :t], x[:, t]) for t in range(1, x.shape[1])], 1)


def equal(got, expected, what):
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    error = (got - expected).abs().max().item() / max(1, expected.abs().max().item())
    assert error < 1e-10, f"{what}: off by {error:.1e}"


def test_1_a_task_with_an_offset(answers=ANSWERS):
    task = answers.AffineRegression(f=5, n=8, scale=1.5, weight_scale=2.0)
    x, y, s = task.sample(20_000, torch.Generator().manual_seed(0))
    again = task.sample(20_000, torch.Generator().manual_seed(0))
    same = all(torch.equal(a, b) for a, b in zip((x, y, s), again))
    assert same, "the generator does not fix everything"
    assert x.shape == y.shape == (20_000, 9, 5) and torch.equal(s, interleave(x, y[:, :-1]))
    assert (x[..., -1] == 1).all(), "the last feature is 1"
    assert x[..., :-1].abs().max() <= 0.75, "the others are uniform"
    assert x[..., :-1].var().item() == pytest.approx(1.5 ** 2 / 12, rel=0.02)
    W = torch.linalg.lstsq(x[:, :-1].double(), y[:, :-1].double()).solution.mT  # (B, 5, 5)
    error = W @ x[:, -1, :, None].double() - y[:, -1, :, None]
    assert error.abs().median() < 1e-5, "the query has the examples' W"
    assert W[..., -1].std().item() == pytest.approx(2, rel=0.02), "b is as large as other weights"

    p = gradient_descent([1.0])(x[:, :-1], y[:, :-1], x[:, -1])             # a parabola in η
    eta, loss = task.optimal()
    best = (p * y[:, -1]).sum() / p.square().sum()
    assert eta == pytest.approx(best.item(), rel=0.02), "η*, against 20,000 tasks"
    expected = task.error(eta * p, y[:, -1]).item()
    assert loss == pytest.approx(expected, rel=0.05), "loss*, against 20,000 tasks"
    nodes = 1.5 * 0.15 ** 0.5 * torch.tensor([-1, 0, 1]).double()           # Gauss's three points,
    p = torch.tensor([5, 8, 5]).double() / 18                               # exact for x⁴
    for N in (1, 2, 30):
        x = torch.cat([torch.cartesian_prod(nodes, nodes), torch.ones(9, 1).double()], 1)   # (9, 3)
        px = torch.outer(p, p).flatten()[:, None] * x
        Sigma, itself = px.mT @ x, (x.square().sum(1) * px.mT) @ x
        e = (Sigma @ (itself + (N - 1) * Sigma @ Sigma)).trace().item() / N
        squared = Sigma.square().sum().item()
        expected = squared / e, 2.0 ** 2 / 2 * (Sigma.trace().item() - squared ** 2 / e)
        got = answers.AffineRegression(f=3, n=N, scale=1.5, weight_scale=2.0).optimal()
        assert got == pytest.approx(expected, rel=1e-10), f"(η*, loss*) at f = 3, N = {N}"
    alone = answers.AffineRegression(f=1, n=3).optimal()
    assert alone == pytest.approx((1, 0), abs=1e-12), "an offset alone"
    with_offset, without = answers.AffineRegression(f=5, n=8), NdRegression(f=5, n=8)
    assert with_offset.optimal()[0] < 0.5 * without.optimal()[0], "one long feature slows all"


def test_2_momentum(answers=ANSWERS):
    (x, y), eta, mu = prompts(), 0.05, 0.6
    s, t = interleave(x, y[:, :-1]), torch.arange(1, x.shape[1])

    def layer(kind, layers, loops=1, N=t, mu=mu):
        made = construct_multistep(kind(x.shape[2], layers, loops).double(), eta, N)
        made.mu = mu
        return made
    for steps in (1, 2, 3, 6):
        expected = every_prefix(descent(steps, eta, mu), x, y)
        equal(layer(answers.MomentumGRIL, steps)(s), expected, f"{steps} layers, every prefix")
        looped = layer(answers.MomentumGRIL, 1, loops=steps)
        equal(looped(s), expected, f"a layer looped {steps} times, every prefix")
        alone = layer(answers.MomentumGRIL, steps, N=len(t)).query(s)
        equal(alone, expected[:, -1], f"{steps} layers, the query alone")
    equal(layer(answers.MomentumGRIL, 3, mu=0.0)(s), layer(MultistepGRIL, 3)(s), "without momentum")


def test_3_a_preconditioner(answers=ANSWERS):
    (x, y), eta = prompts(), 0.3
    s = interleave(x, y[:, :-1])

    def layer(layers, loops=1):
        made = answers.PreconditionedGRIL(x.shape[2], layers, loops).double()
        construct_multistep(made, eta, 1)
        made.epsilon = 0.0
        return made
    for steps in (1, 2, 5):
        expected = every_prefix(descent(steps, eta, precondition=True), x, y)
        equal(layer(steps)(s), expected, f"{steps} layers, every prefix")
        equal(layer(1, loops=steps)(s), expected, f"a layer looped {steps} times, every prefix")
        equal(layer(steps).query(s), expected[:, -1], f"{steps} layers, the query alone")
    units = torch.tensor([100.0, 1.0, 0.01, 3.0], dtype=torch.float64)  # centimetres for metres, …
    equal(layer(3)(interleave(x * units, y[:, :-1])), layer(3)(s), "features in other units")
    silent = torch.cat([x[..., :-1], 0 * x[..., -1:]], -1)          # a feature that is always 0
    made = layer(2)
    made.epsilon = 1e-12
    assert made(interleave(silent, y[:, :-1])).isfinite().all(), "a silent feature divides by zero"

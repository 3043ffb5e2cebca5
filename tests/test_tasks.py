"""Samplers against their definitions, learners against autograd, training against its bounds."""
import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F

import gril
import tasks
import train
from baselines import Pairs
from gril import (GRIL, ClassifierGRIL, MultistepGRIL, NonlinearGRIL, StateMLPGRIL,
                  construct_multistep, construct_multivariate)
from machine.options import Option
from tasks import (TASKS, NdRegression, as_learner, as_predictor, closed_form, delta_rule, evaluate,
                   gradient_descent, longhorn, newton, ridge, sensitivity, zero)
from test_gril import agree, binary_loss, descend, f64, seeded, softmax_loss, squared


def draw(task, B=4, seed=0):
    return task.sample(B, torch.Generator().manual_seed(seed))


# ----------------------------------------------------------------------------------------- samplers

@pytest.mark.parametrize("scale, weight_scale", ((1.0, 1.0), (2.0, 0.5)))
def test_moments_of_the_regression_sampler(scale, weight_scale):
    batch = draw(NdRegression(f=4, n=7, scale=scale, weight_scale=weight_scale), 50_000)
    x = batch.x.double() / scale
    assert x.abs().max() <= 0.5 and abs(x.mean()) < 1e-3
    assert abs(x.square().mean() * 12 - 1) < 0.01 and abs(x.pow(4).mean() * 80 - 1) < 0.01
    x, y = batch.x.double(), batch.y.double()
    W = torch.linalg.lstsq(x, y).solution / weight_scale                # N+1 > f: W is determined
    agree(1e-3, linear=(weight_scale * x[:50] @ W[:50], y[:50]))
    quartile = 0.6745                                                   # of N(0, 1)
    assert abs(W.median()) < 0.02 and abs((W.abs() < quartile).double().mean() - 0.5) < 0.01


def test_targets_and_tokens_of_every_task():
    for name, Kind in TASKS.items():
        task = Kind(f=5, n=6, **({"k": 4} if "k" in Kind.options else {}))
        batch = draw(task, 300)
        assert batch.x.shape == (300, 7, 5) and batch.y.shape == (300, 7, task.outputs), name
        assert torch.equal(draw(task, 300).s, batch.s), name
        assert not torch.equal(draw(task, 300, 1).s, batch.s), name
        assert task.tokens(batch.x, batch.y).shape == batch.s.shape
        leaked = task.tokens(batch.x, torch.cat([batch.y[:, :-1], batch.y[:, -1:] + 9], 1))
        assert torch.equal(leaked, batch.s), f"{name}: the held-out target is in the tokens"
    x, y, s = draw(TASKS["nd_regression"](f=5, n=6))
    agree(0, x=(s[:, ::2], x), y=(s[:, 1::2], y[:, :-1]))
    x, y, s = draw(TASKS["scalar_regression"](f=5, n=6))
    agree(0, xy=(s[..., :5], x[:, :-1] * y[:, :-1]), x_next=(s[..., 5:], x[:, 1:]))
    x, y, s = draw(TASKS["scalar_regression"](f=5, n=6, raw=True))
    agree(0, x=(s[..., :5], x[:, :-1]), y=(s[..., 5:6], y[:, :-1]), x_next=(s[..., 6:], x[:, 1:]))
    x, y, s = draw(TASKS["softmax_classification"](f=5, n=6, k=3), 500)
    assert torch.equal(y.sum(-1), torch.ones(500, 7)) and set(y.unique().tolist()) == {0.0, 1.0}
    assert (y.mean((0, 1)) - 1 / 3).abs().max() < 0.05
    agree(1e-6, x=(s[:, ::2, :5], x), error=(s[:, 1::2, 5:], y[:, :-1] - 1 / 3))
    assert not s[:, 1::2, :5].any() and not s[:, ::2, 5:].any()
    x, y, s = draw(TASKS["binary_classification"](f=5, n=6), 500)
    assert set(y.unique().tolist()) == {0.0, 1.0} and abs(y.mean() - 0.5) < 0.05
    agree(1e-6, error=(s[:, 1::2, 5:], y[:, :-1] - 0.5))
    assert draw(TASKS["nonlinear_regression"]()).y.abs().max() <= 1


def test_labels_follow_the_logits():
    """The same seed draws the same W and x for every task: labels are functions of W x."""
    for scale in (1.0, 1e-8):                                   # σ of a tiny logit is ½ in float32
        y = {name: draw(Kind(f=3, n=9, scale=scale)).y for name, Kind in TASKS.items()}
        logits, classes = y["nd_regression"], y["softmax_classification"]
        assert torch.equal(classes.argmax(-1), logits.argmax(-1))
        agree(1e-6, sine=(y["nonlinear_regression"], logits.sin()))
        assert torch.equal(y["binary_classification"], (y["scalar_regression"] > 0).float())


def test_a_stream_goes_on_where_it_was():
    stream = NdRegression().stream(5, 8)
    next(stream)
    position = stream.position()
    expected = next(stream)
    stream.seek(position)
    assert torch.equal(next(stream).s, expected.s)


@pytest.mark.parametrize("world", (2, 4))
def test_the_shares_of_a_batch_are_the_batch(world):
    whole = NdRegression().stream(5, 8)
    shares = [NdRegression().stream(5, 8, "cpu", rank, world) for rank in range(world)]
    for _ in range(2):
        parts = zip(*(next(share) for share in shares))
        assert all(torch.equal(torch.cat(part), all_) for part, all_ in zip(parts, next(whole)))


# ----------------------------------------------------------------------------------------- learners

@pytest.mark.parametrize("etas", ([0.7], [0.2, 0.5], [0.1, 0.2, 0.3]))
@pytest.mark.parametrize("loss, name", ((squared, "nd_regression"),
                                        (softmax_loss, "softmax_classification"),
                                        (binary_loss, "binary_classification")))
def test_gradient_descent_is_autograds(etas, loss, name):
    x, y = seeded(2, 7, 3), (seeded(2, 7, 1 if loss is binary_loss else 3, seed=1) > 0).to(f64)
    if loss is softmax_loss:
        y = F.one_hot(y.argmax(-1), 3).to(f64)
    expected = []
    for b in range(2):
        W = torch.zeros(y.shape[-1], 3, dtype=f64)
        for eta in etas:
            W = descend(lambda W: loss(W, x[b, :-1], y[b, :-1]), W, eta)
        expected.append(W @ x[b, -1])
    got = gradient_descent(etas, TASKS[name]().residual)(x[:, :-1], y[:, :-1], x[:, -1])
    agree(1e-12, prediction=(got, torch.stack(expected)))


def test_one_step_on_the_sine_model_is_autograds():
    x, y = seeded(1, 7, 3), seeded(1, 7, 3, seed=1).sin()
    W = descend(lambda W: 0.5 * ((x[0, :-1] @ W.mT).sin() - y[0, :-1]).square().sum(-1).mean(),
                torch.zeros(3, 3, dtype=f64), 0.7)
    got = gradient_descent([0.7], link=torch.sin)(x[:, :-1], y[:, :-1], x[:, -1])
    agree(1e-12, prediction=(got[0], (W @ x[0, -1]).sin()))


def test_newton_and_ridge_solve_their_systems():
    x, W = seeded(3, 12, 4), seeded(3, 2, 4, seed=1)
    y = x @ W.mT
    agree(1e-10, newton=(newton(x[:, :-1], y[:, :-1], x[:, -1]), y[:, -1]))
    agree(1e-10, damped=(newton(x[:, :-1], y[:, :-1], x[:, -1], step=0.48), 0.48 * y[:, -1]))
    y = y + seeded(3, 12, 2, seed=2)

    for b in range(3):                                      # the minimum of loss + 0.3/2 ‖W‖²
        W = descend(lambda W: squared(W, x[b, :-1], y[b, :-1]) + 0.15 * W.square().sum(),
                    torch.zeros(2, 4, dtype=f64), 0.3, steps=500)
        agree(1e-10, ridge=(ridge(0.3)(x[:, :-1], y[:, :-1], x[:, -1])[b], W @ x[b, -1]))


def test_longhorn_minimises_its_objective_and_the_delta_rule_descends():
    x, y, x_query, beta = seeded(1, 5, 3), seeded(1, 5, 2, seed=1), seeded(1, 3, seed=2), 0.8
    S, D = torch.zeros(2, 3, dtype=f64), torch.zeros(2, 3, dtype=f64)
    for x_t, y_t in zip(x[0], y[0]):
        before = S
        S = torch.linalg.solve(torch.eye(3, dtype=f64) + beta * torch.outer(x_t, x_t),
                               (S + beta * torch.outer(y_t, x_t)), left=False)
        S_ = S.clone().requires_grad_()
        error = S_ @ x_t - y_t
        objective = (S_ - before).square().sum() + beta * error.square().sum()      # App. G
        assert torch.autograd.grad(objective, S_)[0].abs().max() < 1e-12
        D = descend(lambda D: 0.5 * (D @ x_t - y_t).square().sum(), D, beta)
    agree(1e-12, longhorn=(longhorn(beta)(x, y, x_query)[0], S @ x_query[0]),
          delta=(delta_rule(beta)(x, y, x_query)[0], D @ x_query[0]))


def test_more_steps_of_gradient_descent_are_never_worse():
    """Each number of steps starts from the shorter solution; a fixed start would diverge."""
    def loss(steps):
        task = TASKS["multistep_regression"](f=3, n=6, layers=steps, tasks=300)
        assert min(task.eta) > 0
        scores = evaluate(task, dict(gd=as_learner(task.learner())), 300, 10_000, 2)
        return scores["gd"]["loss"]                             # on the tasks of the tuning
    losses = [loss(steps) for steps in (1, 2, 3, 5, 8, 12)]
    assert losses == sorted(losses, reverse=True), losses


@pytest.mark.parametrize("dtype, scale", (("float32", 1500.0), ("float64", 4e25)))
def test_the_largest_scale_that_is_said_to_fit_trains(tmp_path, dtype, scale):
    words = f"--task nd_regression --f 3 --steps 3 --tasks 100 --quiet --dtype {dtype} --force"
    result = train.main([*words.split(), "--scale", str(scale), "--out", str(tmp_path / "run")])
    assert math.isfinite(result["loss"])
    with pytest.raises(SystemExit, match=f"beyond {dtype}"):
        train.main([*words.split(), "--scale", str(2 * scale), "--out", str(tmp_path / "run")])


def test_the_cosine_of_small_sensitivities_is_theirs():
    """An input scale of 1e-6 makes a model's sensitivities 1e-12 of gradient descent's."""
    task = TASKS["nd_regression"](f=3)
    gd = as_learner(task.learner())
    small = evaluate(task, dict(gd=gd, small=lambda *prompt: 1e-12 * gd(*prompt)), 10, 0, 50)
    assert small["small"]["cosine"] == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("f, N, tasks, scale, weight_scale", (
    (10, 10, 60_000, 1, 1), (3, 20, 60_000, 1, 2), (20, 5, 60_000, 0.5, 3),
    pytest.param(10, 10, 1_000_000, 1, 1, marks=pytest.mark.slow)))
def test_closed_form_against_monte_carlo(f, N, tasks, scale, weight_scale):
    task = NdRegression(f=f, n=N, scale=float(scale), weight_scale=float(weight_scale))
    eta, loss = task.optimal()
    learners = dict(gd=as_learner(gradient_descent([eta])), zero=as_learner(zero))
    score = evaluate(task, learners, tasks, seed=1, sensitivities=2)
    nothing = f / 24 * scale ** 2 * weight_scale ** 2
    bound = 0.012 if tasks < 1_000_000 else 0.002       # standard error about 0.3%, or 0.065%
    assert score["gd"]["loss"] == pytest.approx(loss, rel=bound)
    assert score["zero"]["loss"] == pytest.approx(nothing, rel=bound)


def test_the_line_search_finds_the_closed_form():
    for f, N in ((10, 10), (5, 20)):
        task = NdRegression(f=f, n=N)
        (eta,) = task.tuned(1)
        assert abs(eta / closed_form(f, N)[0] - 1) < 0.02
    assert closed_form(10, 10) == pytest.approx((6.0606, 0.20623), rel=1e-5)


def test_tuned_steps_are_a_minimum_and_more_steps_are_better():
    losses = []
    for steps in (1, 2, 3):
        task = NdRegression(tasks=3_000)
        etas = task.tuned(steps)
        batch = draw(task, 3_000, seed=10_000)

        def score(etas):
            prediction = as_learner(gradient_descent(etas))(batch, batch.x[:, -1])
            return task.error(prediction, batch.y[:, -1]).item()
        losses.append(score(etas))
        for i, factor in itertools.product(range(steps), (0.9, 1.1)):
            assert score([e * factor if j == i else e for j, e in enumerate(etas)]) > losses[-1]
    assert losses[1] < 0.75 * losses[0] and losses[2] < 0.85 * losses[1]
    assert abs(losses[1] / 0.141 - 1) < 0.03 and abs(losses[2] / 0.110 - 1) < 0.03


def test_every_step_has_the_size_tuned_for_it():
    sizes = dict(f=3, n=4, tasks=300)
    etas = NdRegression(**sizes).tuned(3)
    assert TASKS["multistep_regression"](layers=3, **sizes).eta == etas and len(set(etas)) == 3


@pytest.mark.parametrize("calibrate, drawn", ((None, [300, 300]), (7, [300] + 7 * [64])))
def test_calibration_is_so_many_steps_on_fresh_batches(monkeypatch, calibrate, drawn):
    seen, sample = [], NdRegression.sample
    monkeypatch.setattr(NdRegression, "sample",
                        lambda self, B, g: seen.append(B) or sample(self, B, g))
    NdRegression(f=3, n=4, tasks=300, calibrate=calibrate).tuned(2)
    assert seen == drawn                                        # one step to start from, then two


def test_calibration_comes_close_to_the_line_search():
    """App. B.4: 1,000 optimiser steps on fresh batches lose next to nothing on two steps."""
    task = TASKS["multistep_regression"]()
    calibrated = TASKS["multistep_regression"](calibrate=1000)
    learners = dict(tuned=as_learner(task.learner()), calibrated=as_learner(calibrated.learner()))
    scores = evaluate(task, learners, 5_000, 1, 2)
    assert 0.999 < scores["calibrated"]["loss"] / scores["tuned"]["loss"] < 1.05


class Noisy(NdRegression):
    """Targets with noise, and ridge regression beside gradient descent."""
    name = "noisy"
    options = dict(NdRegression.options, noise=Option(0.1, "noise of the targets", least=0))

    def sample(self, B, generator):
        x, y, _ = super().sample(B, generator)
        y = y + self.noise * torch.randn(y.shape, generator=generator)
        return tasks.Batch(x, y, self.tokens(x, y))

    def optimal(self):
        return None

    def references(self):
        return dict(super().references(), ridge=as_learner(ridge(0.1)))


def test_an_option_is_a_keyword_and_its_step_size_the_instances():
    """A subclass with a number of its own never gets the step size that was tuned for another."""
    sizes = dict(f=3, n=5, tasks=2000)
    loud, little, none = (Noisy(noise=noise, **sizes) for noise in (1.0, 0.1, 0.0))
    assert loud.noise == 1 and Noisy().noise == 0.1
    assert 1.5 * loud.eta < 0.98 * little.eta < 0.98 * none.eta
    assert none.eta == pytest.approx(closed_form(3, 5)[0], rel=0.05)
    assert loud.eta == Noisy(noise=1.0, **sizes).eta
    report = little.report(little.constructed(), 0)
    assert report["eta"] == little.eta and report["ridge_loss"] > 0
    with pytest.raises(ValueError, match="--noise must be 0 or more, got -1"):
        Noisy(noise=-1.0)
    with pytest.raises(ValueError, match="unknown number of noisy, 'nose', did you mean noise?"):
        Noisy(nose=1.0)


@pytest.mark.parametrize("sizes", (dict(f=7), dict(n=7), dict(k=7), dict(scale=7.0), dict(tasks=7),
                                   dict(weight_scale=7.0), dict(calibrate=7)))
def test_step_sizes_found_for_one_task_are_not_anothers(sizes):
    kind = TASKS["softmax_classification" if "k" in sizes else "nonlinear_regression"]
    small = dict(f=3, n=4, tasks=50)
    assert kind(**small).eta == kind(**small).eta != kind(**{**small, **sizes}).eta


# ------------------------------------------------------------------------------------------ metrics

def test_metrics_of_known_predictors():
    task = NdRegression(f=3, n=5)
    W = seeded(3, 3, dtype=torch.float32)
    predictors = {"W": lambda batch, x: x @ W.mT, "2W": lambda batch, x: 2 * x @ W.mT,
                  "-W": lambda batch, x: -x @ W.mT}
    scores = evaluate(task, predictors, 500, 1)
    assert [scores[name]["cosine"] for name in ("2W", "-W")] == pytest.approx([1, -1])
    assert scores["2W"]["sensitivity_l2"] == pytest.approx(W.norm().item(), rel=1e-5)
    batch = draw(task, 7)
    agree(1e-6, jacobian=(sensitivity(predictors["W"], batch), W.flatten().expand(7, -1)))


@pytest.mark.parametrize("f, N, parts", ((3, 5, (40,)), (200, 199, (100, 30))))
def test_likeness_is_measured_within_each_task(f, N, parts):
    """Jacobians that are another in every task; large tasks are drawn a part at a time."""
    task = NdRegression(f=f, n=N)
    predictors = {"first": lambda batch, x: x * batch.x[:, 0],
                  "second": lambda batch, x: x * batch.x[:, 1]}
    generator = torch.Generator().manual_seed(4)
    scores = evaluate(task, predictors, sum(parts), seed=4, sensitivities=20)["second"]
    batches, probe = [task.sample(n, generator) for n in parts], task.sample(20, generator)
    cosines = [torch.dot(a, b) / a.norm() / b.norm() for a, b in probe.x[:, :2]]
    distances = [(a - b).norm() for a, b in probe.x[:, :2]]
    answers = [(x[-1] * (x[0] - x[1])).norm() for batch in batches for x in batch.x]
    losses = [0.5 * (x[-1] * x[1] - y[-1]).square().mean()
              for batch in batches for x, y in zip(batch.x, batch.y)]
    expected = dict(cosine=cosines, sensitivity_l2=distances, prediction_l2=answers, loss=losses)
    for key, values in expected.items():
        assert scores[key] == pytest.approx(sum(values).item() / len(values), rel=1e-5), key


LOSSES = dict.fromkeys(TASKS, lambda prediction, y: 0.5 * (prediction - y).square().mean()) | dict(
    binary_classification=lambda logits, y: -((2 * y - 1) * logits).sigmoid().log().mean(),
    softmax_classification=lambda logits, y: F.cross_entropy(logits, y.argmax(-1)))


@pytest.mark.parametrize("name", TASKS)
def test_every_number_is_of_the_predictor_that_it_names(monkeypatch, name):
    """Trained and "constructed" are random here, of two kinds, and neither is gradient descent."""
    torch.manual_seed(0)
    classes = 4 if name == "softmax_classification" else 2
    task = TASKS[name](f=3, n=4, tasks=300, **({"k": classes} if classes > 2 else {}))
    trained, other = task.model(), task.model("s5")
    monkeypatch.setattr(task, "constructed", lambda: other)
    result, row = task.report(trained, 20_007), task.validate(trained)
    for got, seed, count, probes in ((result, 20_007, 300, 300), (row, 30_000, 1000, 100)):
        generator = torch.Generator().manual_seed(seed)
        (x, y, s), probe = task.sample(count, generator), task.sample(probes, generator)
        gd = gradient_descent(task.eta if isinstance(task.eta, list) else [task.eta], task.residual)
        with torch.no_grad():
            answers = dict(loss=trained(s)[:, -1], gd_loss=gd(x[:, :-1], y[:, :-1], x[:, -1]),
                           constructed_loss=other(s)[:, -1], zero_loss=torch.zeros_like(y[:, -1]))
        expected = {key: LOSSES[name](answer, y[:, -1]) for key, answer in answers.items()}
        ours = sensitivity(as_predictor(task, trained), probe)
        theirs = sensitivity(as_learner(gd), probe)
        expected |= dict(prediction_l2=(answers["loss"] - answers["gd_loss"]).norm(dim=1).mean(),
                         cosine=F.cosine_similarity(ours, theirs, -1).mean(),
                         sensitivity_l2=(ours - theirs).norm(dim=1).mean())
        assert len({value.item() for value in expected.values()}) == 7
        for key in expected.keys() & got.keys():
            assert got[key] == pytest.approx(expected[key].item(), rel=1e-4, abs=1e-6), key
    assert result.keys() > expected.keys()
    assert row.keys() == expected.keys() - {"constructed_loss", "zero_loss"}
    found = {key: value for key, value in tasks.recovered(trained, 4).items() if key in result}
    assert result == result | found and found["A_distance"] > 0 and "gain" in found
    one_step_linear = name in ("scalar_regression", "nd_regression")
    assert result["optimal_loss"] == (closed_form(3, 4)[1] if one_step_linear else None)
    assert result["eta"] == (closed_form(3, 4)[0] if one_step_linear else task.eta)
    assert result["parameters"] == sum(p.numel() for p in trained.parameters())
    if name.endswith("classification"):
        assert result["zero_loss"] == pytest.approx(math.log(classes), rel=1e-5)


def test_the_table_of_a_run_divides_by_gradient_descent():
    result = dict(model="no_window", loss=0.3, constructed_loss=0.2, gd_loss=0.25, zero_loss=0.5,
                  optimal_loss=0.24, cosine=0.9, sensitivity_l2=0.11, prediction_l2=0.22,
                  Q_distance=0.3, q_distance=0.4, A_distance=0.6, gain=[5.0], eta=6.0,
                  ridge_loss=0.1, references=["gd", "constructed", "zero", "ridge"])
    said = NdRegression(tasks=1234).table(result).splitlines()
    assert "the same 1,234 fresh tasks" in said[0] and said[0].endswith("÷ gradient descent")
    rows = [(line[:36].rstrip(), *map(float, line[36:].split())) for line in said[1:7]]
    assert rows == [
        ("trained no_window", 0.3, 1.2), ("gradient descent", 0.25, 1.0),
        ("  its closed form", 0.24, 0.96), ("constructed GRIL", 0.2, 0.8),
        ("zero predictor", 0.5, 2.0), ("ridge", 0.1, 0.4)]
    rest = "\n".join(said[7:])
    for text in ("cosine of sensitivities 0.90000, their L2 distance 0.1100, of predictions 0.2200",
                 "Q 0.3000, q 0.4000", "mean of |A - 1| 0.6000",
                 "step size in the weights: 5.000; of gradient descent: 6.000"):
        assert text in rest


@pytest.mark.parametrize("name", TASKS)
def test_constructed_weights_score_as_explicit_gradient_descent(name):
    task = TASKS[name](f=4, n=6, tasks=500)
    report = task.report(task.constructed(), seed=3)
    assert report["loss"] == pytest.approx(report["gd_loss"], rel=1e-4)
    assert report["cosine"] == pytest.approx(1, abs=1e-4)
    assert report["prediction_l2"] < 1e-4 and report["sensitivity_l2"] < 1e-4
    for key in ("Q_distance", "q_distance", "A_distance", "PsiTheta_distance"):
        assert report.get(key, 0) == 0
    gain, eta = (torch.tensor(report[key]).flatten().tolist() for key in ("gain", "eta"))
    assert gain == pytest.approx(eta, rel=1e-5)


def test_a_looped_layer_takes_as_many_steps_as_asked():
    task = TASKS["multistep_regression"](f=3, n=5, layers=3)
    layer, batch = construct_multistep(task.model("looped"), 0.7, 5), draw(task)
    expected = as_learner(gradient_descent([0.7] * 3))(batch, batch.x[:, -1])
    agree(1e-5, prediction=(tasks.query(layer, batch.s), expected))


def test_recovered_sees_through_the_shared_scale_and_nothing_else():
    task = NdRegression()
    model = task.constructed()
    with torch.no_grad():
        model.Q *= -4
        model.q *= 0.5
        model.beta /= -2
    found = tasks.recovered(model, 10)
    assert found["Q_distance"] == 0 and found["gain"][0] == pytest.approx(task.eta)
    with torch.no_grad():
        model.Q[0, 2] = 0.1 * model.Q[1, 0]
    assert tasks.recovered(model, 10)["Q_distance"] == pytest.approx(0.1)
    with torch.no_grad():
        model.A[::2] = 1.2
        model.A[1::2] = 0.8
    assert tasks.recovered(model, 10)["A_distance"] == pytest.approx(0.2)
    scalar = TASKS["scalar_regression"](f=3, n=5).constructed()
    with torch.no_grad():
        scalar.Psi[0, 4] = 0.3
        scalar.A[:] = torch.tensor([1.3, 0.7, 1.3])
    found = tasks.recovered(scalar, 5)
    assert found["PsiTheta_distance"] == pytest.approx(0.3)
    assert found["A_distance"] == pytest.approx(0.3)
    for loops, distance in ((1, 0), (2, 0.3)):      # W = 0 makes head 2 idle; a loop comes back
        model = construct_multistep(MultistepGRIL(3, 1, loops=loops), 1.0, 10)
        with torch.no_grad():
            model.Q[0, 1, 2, 2] = 0.3 * model.Q[0, 1, 0, 0]
        assert tasks.recovered(model, 10)["Q_distance"] == pytest.approx(distance)


def test_the_loss_is_half_the_mean_squared_error():
    task, (a, b) = TASKS["scalar_regression"](), seeded(2, 5, 1)
    agree(1e-12, loss=(task.error(a, b), sum((x - y) ** 2 for x, y in zip(a, b))[0] / 10))


@pytest.mark.parametrize("name, model, hopeless", (
    *(("nd_regression", model, True) for model in ("no_window", "no_readout", "neither")),
    *(("scalar_regression --raw", model, True) for model in ("no_input", "no_output", "neither")),
    ("scalar_regression", "no_output", True), ("nd_regression", "w2", False),
    ("nd_regression", "gril", False), ("scalar_regression --raw", "gril", False),
    ("scalar_regression", "gril", False)))
def test_parity_makes_zero_the_best_answer_of_every_ablation(name, model, hopeless):
    """Flipping the sign of W, of the query, or of all other inputs changes no distribution.

    Whatever its weights, an ablated layer's answer times the target sums to zero over these eight
    copies of a prompt, so that its loss is ½ E y² + ½ E ŷ²: nothing beats ŷ = 0. The full layer,
    and a window of two, escape.
    """
    torch.manual_seed(0)
    name, *raw = name.split()
    task = TASKS[name](f=4, n=5, **(dict(raw=True) if raw else {}))
    layer, batch, product = task.model(model).to(f64), draw(task, 50), 0
    x, y = batch.x.double(), batch.y.double()
    for W, context, query in itertools.product((1, -1), repeat=3):
        flip = torch.tensor([context] * 5 + [query], dtype=f64)[:, None]
        answer = tasks.query(layer, task.tokens(x * flip, W * y * flip))
        product = product + answer * (W * y * flip)[:, -1]
    assert (product.abs().max() < 1e-12) == hopeless


# ----------------------------------------------------------------------------------------- training

def short(tmp_path, task, steps, *more):
    return train.main(["--task", task, "--steps", str(steps), "--tasks", "2000", *more,
                       "--quiet", "--force", "--out", str(tmp_path / "run")])


@pytest.mark.parametrize("task, steps, bound, more", (
    ("nd_regression", 500, 1.01, ()), ("scalar_regression", 800, 1.03, ()),
    ("multistep_regression", 600, 1.05, ("--f", "5")), ("nonlinear_regression", 500, 1.00, ()),
    pytest.param("binary_classification", 1200, 1.05, ("--f", "5"), marks=pytest.mark.slow),
    ("softmax_classification", 1200, 1.05, ("--f", "5"))))
def test_a_short_run_reaches_gradient_descent(tmp_path, task, steps, bound, more):
    result = short(tmp_path, task, steps, *more)
    assert result["loss"] < bound * result["gd_loss"]
    assert result["cosine"] > 0.9 and result["zero_loss"] > 1.2 * result["gd_loss"]
    wanted = ("task model seed steps seconds loss gd_loss constructed_loss zero_loss cosine "
              "sensitivity_l2 prediction_l2 parameters optimal_loss")
    assert json.loads((tmp_path / "run/result.json").read_text()).keys() >= set(wanted.split())


def test_a_short_run_recovers_the_construction(tmp_path):
    result = short(tmp_path, "nd_regression", 800)
    assert result["Q_distance"] < 0.1 and result["q_distance"] < 0.05
    assert result["A_distance"] < 0.02
    assert result["gain"][0] == pytest.approx(result["eta"], rel=0.05) and result["cosine"] > 0.999


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_every_seed_becomes_gradient_descent(tmp_path, seed):
    result = train.main(["--task", "nd_regression", "--seed", str(seed), "--quiet",
                         "--out", str(tmp_path / "run")])
    assert result["loss"] < 1.01 * result["gd_loss"] and result["cosine"] >= 0.999
    assert max(result["Q_distance"], result["q_distance"]) < 0.03 and result["A_distance"] < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("task, f, N", (
    *(("nd_regression", f, 10) for f in (5, 20, 35, 50)),
    *(("nd_regression", 10, N) for N in (5, 20, 100)), ("scalar_regression", 10, 10)))
def test_other_sizes_become_gradient_descent(tmp_path, task, f, N):
    result = train.main(["--task", task, "--f", str(f), "--n", str(N), "--quiet",
                         "--out", str(tmp_path / "run")])
    assert result["loss"] < 1.02 * result["gd_loss"] and result["cosine"] >= 0.999
    assert result.get("Q_distance", result.get("PsiTheta_distance")) < 0.03
    assert result["A_distance"] < 0.02 and result.get("q_distance", 0) < 0.03


@pytest.mark.parametrize("name, paper, default", (     # App. B.1, B.2, B.4 and Table 4; this code's
    ("scalar_regression", dict(weight_decay=0.05, hidden=20),
     dict(steps=3000, batch=1024, hidden=None)),
    ("nd_regression", {}, {}),
    ("multistep_regression", dict(layers=2, calibrate=1000), dict(steps=4000, layers=2)),
    ("nonlinear_regression", {}, dict(steps=4000)),
    ("binary_classification", dict(lr=1.23e-4, recurrent_lr=1.23e-4, weight_decay=5.17e-3),
     dict(lr=1e-2)),
    ("softmax_classification", dict(lr=1.56e-4, recurrent_lr=1.56e-4, weight_decay=8.45e-5, k=3),
     dict(lr=1e-2, k=3))))
def test_paper_recipes(name, paper, default):
    both = dict(f=10, n=10, layers=1, width=0, heads=0, scale=1.0, weight_scale=1.0, form="query",
                tasks=10_000, calibrate=None, weight_decay=0.0, checkpoint_every=1000, accumulate=1,
                patience=0, device="cpu", dtype="float32", threads=1)
    if name == "scalar_regression":
        both["raw"] = False
    elif name.endswith("regression"):
        both["embed"] = 0
    papers = dict(both, steps=300_000, batch=64, lr=2e-4, recurrent_lr=1e-4, warmup=3000, clip=0.0,
                  evaluate_every=1000)
    ours = dict(both, steps=2000, batch=256, lr=2e-2, recurrent_lr=2e-3, warmup=100, clip=1.0,
                evaluate_every=100)
    assert TASKS[name].recipes.keys() == {"default", "paper"}
    assert TASKS[name].numbers("default") == ours | default
    assert TASKS[name].numbers("paper") == papers | paper


@pytest.mark.parametrize("name, model, kind, features, frozen", (
    ("nonlinear_regression", "gril", NonlinearGRIL, False, False),
    ("nonlinear_regression", "gd_dagger", NonlinearGRIL, False, True),
    ("nonlinear_regression", "gril_rho", StateMLPGRIL, False, False),
    ("nonlinear_regression", "gd_dagger_rho", StateMLPGRIL, False, True),
    *((name, model, ClassifierGRIL, model != "gril_identity", model == "gd_dagger")
      for name in ("binary_classification", "softmax_classification")
      for model in ("gril", "gd_dagger", "gril_identity"))))
def test_a_name_builds_its_model_and_gd_dagger_its_step(name, model, kind, features, frozen):
    task = TASKS[name](f=3, n=5, tasks=200)
    layer = task.model(model)
    assert type(layer) is kind and (getattr(layer, "phi", None) is not None) == features
    assert [getattr(layer.linear, key).requires_grad for key in "QqA"] == 3 * [not frozen]
    assert layer.linear.beta.requires_grad
    if frozen:
        expected = construct_multivariate(GRIL(len(layer.linear.A)), task.eta, 5).state_dict()
        agree(0, **{key: (layer.linear.state_dict()[key], expected[key]) for key in expected})


def test_linear_attention_on_pairs_reads_pairs():
    task = NdRegression(f=3, n=5)
    interleaved, pairs = task.model("linear_attention"), task.model("linear_attention_pairs")
    assert type(pairs) is Pairs and pairs.model.f == 2 * interleaved.f == 6


@pytest.mark.parametrize("form", gril.FORMS)
def test_the_form_that_is_asked_for_runs(form, monkeypatch):
    ran = []
    for name, run in gril.FORMS.items():
        monkeypatch.setitem(gril.FORMS, name,
                            lambda *C, name=name, run=run: ran.append(name) or run(*C))
    task = NdRegression(f=3, n=4, form=form)
    tasks.query(task.model(), draw(task).s)
    assert ran == [form]


def test_gd_dagger_starts_at_the_steps_of_gradient_descent():
    task = TASKS["nonlinear_regression"](f=3, n=5, layers=2, tasks=200)
    model = task.model("gd_dagger")
    assert (5 * model.linear.beta).flatten().tolist() == pytest.approx(task.tuned(2))
    trained = 2 + 3 * 3 + 3                                     # β of both layers, the gated unit
    assert task.report(model, 3)["parameters"] == trained


@pytest.mark.parametrize("recipe, task, model, lr, decay, layers", (
    ("default", "nd_regression", "s5", 3e-3, 0.0, 1),
    ("default", "multistep_regression", "s5", 3e-3, 0.0, 2),
    ("paper", "nd_regression", "s5", 1e-4, 0.0, 1),
    ("paper", "nd_regression", "mamba_lp", 1e-4, 0.01, 4),
    ("paper", "nd_regression", "griffin_lp", 2e-4, 0.0, 4),
    ("paper", "scalar_regression", "griffin_lp", 1e-4, 0.0, 4)))
def test_another_model_trains_with_its_own_rates(tmp_path, recipe, task, model, lr, decay, layers):
    """App. B.3; what is typed still counts."""
    result = train.main(["--task", task, "--recipe", recipe, "--model", model, "--width", "24",
                         *"--f 3 --n 4 --tasks 20 --steps 1 --batch 3 --quiet".split(),
                         "--out", str(tmp_path / "run")])
    assert result == result | dict(lr=lr, recurrent_lr=lr, weight_decay=decay, layers=layers,
                                   batch=3, width=24, steps=1)
    _, network, _ = train.load(tmp_path / "run")
    norms = [part for part in network.modules() if isinstance(part, torch.nn.LayerNorm)]
    assert len(network.layers) == layers and {norm.normalized_shape for norm in norms} == {(24,)}


def test_the_paper_recipe_runs(tmp_path):
    result = train.main(["--task", "scalar_regression", "--recipe", "paper", "--steps", "30",
                         "--tasks", "200", "--quiet", "--out", str(tmp_path / "run")])
    assert result["parameters"] == 2 * 20 * 20 + 20 + 1

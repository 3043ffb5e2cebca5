"""What a task is; the in-context tasks, the explicit learners beside them, and the metrics.

An in-context task is one prompt: N examples (x_i, y_i) of a freshly drawn W and a query x_{N+1}
whose target is held out (Sec. 5, App. B, App. C).

  scalar_regression       y = w·x                        tokens [x_t y_t, x_{t+1}]     Sec. 4.1, B.1
  nd_regression           y = W x,  W (f, f)             tokens x_1, y_1, x_2, …       Sec. 4.2, B.2
  multistep_regression    the same, for several layers                                 Sec. 4.3, B.4
  nonlinear_regression    y = sin(W x)                                                 Sec. 4.3, B.4
  binary_classification   y = [w·x > 0]                  tokens x_1, y_1 - ½, x_2, …   Sec. 4.4, B.5
  softmax_classification  y = argmax W x,  W (K, f)      tokens x_1, y_1 - 1/K, …      Sec. 4.4, B.5

W ~ N(0, 1); the loss is ½ the squared error per coordinate, or cross-entropy. Departure:
x ~ U(-½, ½)^f. The paper's text says U(-1, 1), but its numbers (0.207 for gradient descent, 0.414
and 0.426 where an ablation can only answer zero) are near those of U(-½, ½), 0.206 and 0.417; with
U(-1, 1) they would be 0.825 and 1.667.
"""
import copy
import math
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F

import baselines
from gril import (SCALAR_VARIANTS, VARIANTS, GRIL, ClassifierGRIL, EmbeddedGRIL, MultistepGRIL,
                  NonlinearGRIL, ScalarGRIL, StateMLPGRIL, beside, construct_multistep,
                  construct_multivariate, construct_scalar, construct_softmax, gd_dagger,
                  interleave)
from machine.errors import known, refuse
from machine.options import LOOP, Option


class Task:
    """What the training loop asks of a task. In-context ones are below, others in lra.py and lm.py.

      model(name)             the named network
      stream(seed, batch, device, rank, world)    endless batches with position() and
                              seek(position); a rank gets its share of each
      example(batch)          a batch of shapes without numbers, on the default device
      loss(model, batch)
      validate(model)         a row of metrics.csv
      report(model, seed)     the numbers of result.json
      table(result)           these as a person reads them

    A task declares its own numbers as options, and takes them as keywords. A recipe names the
    numbers, of the task and of the loop, that differ from their defaults; the first recipe is the
    one that runs if nobody says.
    """
    name = None
    options = {}                    # name -> Option
    recipes = {}                    # name -> {number: value}
    choose, higher = None, True     # the validation score that chooses the weights, if any
    dense_start = False             # validate more often at the start
    compiles = True                 # worth compiling, on a GPU
    compiled = False                # the loop says so where it compiles the loss
    paper_parameters = None

    def __init__(self, data=None, **numbers):
        self.recipe = {**self.numbers(next(iter(self.recipes))), **numbers}
        for name, value in self.recipe.items():
            known(f"number of {self.name},", name, {**self.options, **LOOP}).check(name, value)

    @classmethod
    def numbers(cls, recipe, model="gril"):
        """Every number of a recipe."""
        changes = known("recipe", recipe, cls.recipes)
        return {name: changes.get(name, option.default)
                for name, option in {**LOOP, **cls.options}.items()}


class Batch(NamedTuple):
    x: torch.Tensor                 # (B, N+1, f), the last is the query
    y: torch.Tensor                 # (B, N+1, outputs), the last is held out
    s: torch.Tensor                 # (B, L, ·), the tokens a model sees


# A step under a millisecond feeds no GPU, and no second core.
LAPTOP = dict(evaluate_every=100, device="cpu", dtype="float32", threads=1, clip=1.0)
DEFAULT = dict(LAPTOP, steps=2000, batch=256, lr=2e-2, recurrent_lr=2e-3, warmup=100)
PAPER = dict(LAPTOP, steps=300_000, lr=2e-4, recurrent_lr=1e-4, warmup=3000, clip=0.0,
             evaluate_every=1000)


class InContext(Task):
    """Prompts of one kind: how they are drawn, what solves them, what is set beside a model."""
    reference = "gradient descent"
    layered = ()                    # models of the task itself that have as many as --layers
    dense_start = True              # gradient descent is found early
    compiles = False                # a run is over before compiling would be
    embed = 0                       # Ψ, Θ and φ are embeddings; regressions on vectors may have one
    options = dict(
        f=Option(10, "input width", least=1),
        n=Option(10, "examples in the prompt, N", least=1),
        scale=Option(1.0, "scale of the inputs"),
        weight_scale=Option(1.0, "scale of the true weights"),
        layers=Option(1, "layers, or gradient steps in context", least=1),
        width=Option(0, "of another sequence model than gril", least=0),
        heads=Option(0, "of a model with attention", least=0),
        form=Option("query", "how GRIL computes: loop, scan, or query, their shortcut",
                    among=("query", "loop", "scan")),
        tasks=Option(10_000, "fresh tasks of the final evaluation", least=1),
        calibrate=Option(None, "optimiser steps that tune gradient descent's step size", least=0,
                         kind=int),
    )
    recipes = dict(default=DEFAULT, paper=PAPER)

    def __init__(self, data=None, **numbers):
        """There is no data to read. Numbers become attributes; f and N are the paper's."""
        super().__init__(**numbers)
        for name in self.options:
            setattr(self, name, self.recipe[name])
        self.N = self.n
        self.check_scale()

    def check_scale(self):
        dtype = torch.float64 if self.recipe["dtype"] == "float64" else torch.float32
        limits = torch.finfo(dtype)
        most = limits.max ** (1 / 12) / max(1, abs(self.weight_scale))
        least = limits.tiny ** (1 / 4)
        wider = "; --dtype float64 holds more" if dtype == torch.float32 else ""
        refuse((self.scale == 0, f"{self.name}: --scale must be a number other than 0, got 0"),
               (not least < abs(self.scale) < most,
                f"{self.name}: --scale {self.scale:g} with --weight-scale {self.weight_scale:g} is "
                f"beyond {str(dtype)[6:]}. An untrained layer's gradient is a product of up to six "
                f"inputs, and the optimiser squares it: from {least:.0e} to {most:.0e} a scale "
                f"fits{wider}"))

    # ---- data

    @property
    def outputs(self):
        return self.f

    def sample(self, B, generator):
        """B fresh prompts; the generator fixes them."""
        device = generator.device
        W = torch.randn(B, self.outputs, self.f, generator=generator, device=device)
        x = torch.rand(B, self.N + 1, self.f, generator=generator, device=device) - 0.5
        W, x = self.weight_scale * W, self.scale * x
        y = self.target(x @ W.mT)                                           # (B, N+1, outputs)
        return Batch(x, y, self.tokens(x, y))

    def target(self, Wx):
        return Wx

    def tokens(self, x, y):
        return interleave(x, y[:, :-1])                                     # (B, 2N+1, f)

    def stream(self, seed, batch, device="cpu", rank=0, world=1):
        return Stream(self, seed, batch, device, rank, world)

    def example(self, batch):
        x = torch.empty(batch, self.N + 1, self.f)
        y = torch.empty(batch, self.N + 1, self.outputs)
        return Batch(x, y, self.tokens(x, y))

    # ---- models

    def models(self):
        """Names of the task's own models: the full one, GD†, the ablations of App. C."""
        return ["gril"]

    def own(self, name, f):
        """One of those, untrained, for tokens of width f."""
        raise NotImplementedError

    def constructed(self):
        """The model whose weights are set, not trained, to be gradient descent."""
        return construct_multivariate(GRIL(self.f), self.eta, self.N)

    def model(self, name="gril"):
        others = dict.fromkeys(baselines.offered("in_context"))
        if self.example(1).s.shape[1] != 2 * self.N + 1:        # not x_1, y_1, …: nothing to pair
            del others["linear_attention_pairs"]
        known(f"model for {self.name}", name, {**dict.fromkeys(self.models()), **others})
        if name in others:
            refuse((self.embed, f"--embed is for GRIL's layers; {name} has --width"))
            return self.other(name)
        if self.width or self.heads:
            raise ValueError(f"--width and --heads are sizes of other sequence models than {name}")
        if self.layers > 1 and name not in self.layered:
            raise ValueError(f"--layers: {name} of {self.name} has one layer; multistep_regression "
                             "has several")
        model = self.own(name, self.embed or self.f)
        if self.embed:
            model = EmbeddedGRIL(model, self.f, self.embed)
        model.form = self.form
        return model

    def other(self, name):
        """Another sequence model on the very tokens that GRIL gets, read at the last position."""
        f = self.example(1).s.shape[2]
        sizes = dict(baselines.MODELS[name].in_context["default"])
        if self.heads and "heads" not in sizes:
            raise ValueError(f"--heads: {name} has no heads")
        sizes |= {size: value for size in ("layers", "width", "heads")
                  if (value := getattr(self, size))}
        return baselines.make(name, f, self.outputs, sizes.pop("width"), **sizes)

    @classmethod
    def numbers(cls, recipe, model="gril"):
        """Another sequence model has rates and sizes of its own."""
        numbers = super().numbers(recipe)
        if model not in baselines.offered("in_context"):
            return numbers
        changes = baselines.recipe(recipe, model, cls.name)
        if numbers["layers"] > 1:                               # the task's steps are its layers
            del changes["layers"]
        return {**numbers, **changes}

    # ---- losses and explicit learners

    def error(self, prediction, target):
        """½ the mean squared error per coordinate (Eq. 4; Eq. 15 ÷ f)."""
        return 0.5 * F.mse_loss(prediction, target)

    def loss(self, model, batch):
        return self.error(query(model, batch.s), batch.y[:, -1])

    def residual(self, prediction, y):
        """Minus the derivative of an example's loss by W x; gradient descent writes it beside x."""
        return y - prediction

    def optimal(self):
        """(η*, loss*) of one step of gradient descent in closed form, or None."""
        return None

    @cached_property
    def eta(self):
        """The best step size of one step of gradient descent: closed form, or line search."""
        return self.optimal()[0] if self.optimal() else self.tuned(1)[0]

    def tuned(self, steps):
        """Step sizes for several steps of gradient descent, tuned together (or as in App. B.4).

        One step after the other: the shorter solution and a small step more are where the longer
        one starts, so that more steps are never worse.
        """
        etas = []
        for step in range(1, steps + 1):
            start = [*etas, 0.1 * sum(etas) / len(etas) if etas else 4.0 / self.scale ** 2]
            with torch.device("cpu"):                           # numbers, also on meta
                etas = tune(lambda *etas: gradient_descent(etas, self.residual), start, self,
                            final=step == steps)
        return etas

    def learner(self):
        """Explicit gradient descent, the reference of this task."""
        return gradient_descent([self.eta], self.residual)

    def references(self):
        """name -> predictor(batch, x_query): what report and table set beside the model.

        The first is the task's own reference. A task with one more row adds it here.
        """
        return dict(gd=as_learner(self.learner()),
                    constructed=as_predictor(self, self.constructed()), zero=as_learner(zero))

    # ---- what the training loop asks for

    def validate(self, model):
        """The model beside explicit gradient descent on one fixed draw of 1,000 tasks."""
        device = next(model.parameters()).device
        predictors = dict(trained=as_predictor(self, model), gd=as_learner(self.learner()))
        scores = evaluate(self, predictors, 1_000, seed=30_000, sensitivities=100, device=device)
        gd = scores["gd"]
        return dict(loss=scores["trained"]["loss"], gd_loss=gd["loss"], cosine=gd["cosine"],
                    prediction_l2=gd["prediction_l2"], sensitivity_l2=gd["sensitivity_l2"])

    def report(self, model, seed):
        """The model beside its references on fresh tasks, and what it learned."""
        model = copy.deepcopy(model).cpu()
        predictors = dict(trained=as_predictor(self, model), **self.references())
        scores = evaluate(self, predictors, self.tasks, seed, min(self.tasks, 1_000))
        beside = scores[list(predictors)[1]]                    # the model against its reference
        return dict(
            loss=scores["trained"]["loss"],
            **{f"{name}_loss": scores[name]["loss"] for name in list(predictors)[1:]},
            references=list(predictors)[1:], optimal_loss=self.optimal() and self.optimal()[1],
            cosine=beside["cosine"], sensitivity_l2=beside["sensitivity_l2"],
            prediction_l2=beside["prediction_l2"], eta=self.eta,
            parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            **{name: value for name, value in recovered(model, self.N).items()
               if not isinstance(value, torch.Tensor)})

    def table(self, r):
        names = dict(gd=self.reference, constructed="constructed GRIL", zero="zero predictor")
        gd = r[f"{r['references'][0]}_loss"]
        rows = [(names.get(name, name), r[f"{name}_loss"]) for name in r["references"]]
        rows.insert(1, ("  its closed form", r["optimal_loss"]))
        rows.insert(0, (f"trained {r['model']}", r["loss"]))
        lines = [f"{f'loss on the same {self.tasks:,} fresh tasks':36s}{'':10s}"
                 f"{'÷ ' + self.reference:>20s}"]
        lines += [f"{name:36s}{loss:10.5f}{loss / (gd or math.nan):20.4f}"
                  for name, loss in rows if loss is not None]
        lines += ["", f"trained against {self.reference}: cosine of sensitivities "
                  f"{r['cosine']:.5f}, their L2 distance {r['sensitivity_l2']:.4f}, of predictions "
                  f"{r['prediction_l2']:.4f}"]
        distances = [f"{name} {r[name + '_distance']:.4f}" for name in ("PsiTheta", "Q", "q")
                     if name + "_distance" in r]
        if distances:
            sizes = (torch.tensor(r[key]).flatten().sort().values for key in ("gain", "eta"))
            gain, eta = (", ".join(f"{size:.3f}" for size in of.tolist()) for of in sizes)
            lines += [f"largest distance from the construction, scale removed: "
                      f"{', '.join(distances)}; mean of |A - 1| {r['A_distance']:.4f}",
                      f"step size in the weights: {gain}; of {self.reference}: {eta}"]
            if "," in gain:
                lines += ["steps may be taken in any order, so that only the sum and the products "
                          "of their sizes are determined"]
        return "\n".join(lines)


class Stream:
    """Endless fresh batches of one seed; position() and seek() let a stopped run go on."""

    def __init__(self, task, seed, batch, device, rank, world):
        self.task, self.batch = task, batch
        self.generator = torch.Generator(device).manual_seed(seed)
        self.share = slice(rank * batch // world, (rank + 1) * batch // world)

    def __next__(self):
        """This rank's share of the batch that all of them draw."""
        return Batch(*(x[self.share] for x in self.task.sample(self.batch, self.generator)))

    def position(self):
        return self.generator.get_state()

    def seek(self, position):
        self.generator.set_state(position)


class NdRegression(InContext):
    """Linear regression with vector targets (Sec. 4.2, App. B.2)."""
    name, variants = "nd_regression", VARIANTS
    options = dict(InContext.options, embed=Option(
        0, "width of learned token embeddings, f or more; 0: tokens as they are", least=0))

    def models(self):
        return ["gril", *(name for name in self.variants if name != "full")]

    def own(self, name, f):
        return GRIL(f, "full" if name == "gril" else name)

    def optimal(self):
        return closed_form(self.f, self.N, self.scale, self.weight_scale)


class ScalarRegression(NdRegression):
    """Sec. 4.1, App. B.1: one target a token."""
    name, variants = "scalar_regression", SCALAR_VARIANTS
    options = dict(InContext.options, hidden=Option(None, "state size", least=1, kind=int),
                   raw=Option(False, "tokens [x_t, y_t, x_{t+1}], without their product"))
    recipes = dict(default=dict(DEFAULT, steps=3000, batch=1024),
                   paper=dict(PAPER, weight_decay=0.05, hidden=20))

    outputs = 1

    def tokens(self, x, y):
        x, y, x_next = x[:, :-1], y[:, :-1], x[:, 1:]
        parts = (x, y, x_next) if self.raw else (x * y, x_next)
        return torch.cat(parts, -1)                                         # (B, N, 2f or 2f+1)

    def own(self, name, f):
        variant = "full" if name == "gril" else name
        if not (self.raw or SCALAR_VARIANTS[variant]["product"]):
            raise ValueError(f"--model {name} is without the product x_t y_t, which is in the "
                             "tokens: --raw leaves it out")
        return ScalarGRIL(f, self.hidden, variant)

    def constructed(self):
        return construct_scalar(ScalarGRIL(self.f, self.hidden), self.eta, self.N)


class MultistepRegression(NdRegression):
    """Sec. 4.3, App. B.4: as many steps of gradient descent as layers."""
    name, layered = "multistep_regression", ("gril", "looped")
    recipes = dict(default=dict(DEFAULT, steps=4000, layers=2),
                   paper=dict(PAPER, layers=2, calibrate=1000))

    def models(self):
        return ["gril", "looped"]

    def own(self, name, f):
        if name == "looped":
            return MultistepGRIL(f, 1, loops=self.layers)
        return MultistepGRIL(f, self.layers)

    @cached_property
    def eta(self):
        """One step size per step, tuned together."""
        return self.tuned(self.layers)

    def learner(self):
        return gradient_descent(self.eta)

    def constructed(self):
        return construct_multistep(MultistepGRIL(self.f, self.layers), self.eta, self.N)

    def optimal(self):
        return super().optimal() if self.layers == 1 else None


class NonlinearRegression(InContext):
    """App. B.4: sine targets. The explicit reference is linear GD; GD† is a model beside it."""
    name, layered = "nonlinear_regression", ("gril", "gd_dagger")
    options = NdRegression.options
    recipes = dict(default=dict(DEFAULT, steps=4000), paper=PAPER)

    def target(self, Wx):
        return Wx.sin()

    def models(self):
        return ["gril", "gd_dagger", "gril_rho", "gd_dagger_rho"]

    def own(self, name, f):
        model = StateMLPGRIL(f) if name.endswith("rho") else NonlinearGRIL(f, self.layers)
        if not name.startswith("gd_dagger"):
            return model
        start = self.eta if self.layers == 1 else self.tuned(self.layers)   # linear GD's
        return gd_dagger(model, start, self.N)                              # trains it


class SoftmaxClassification(InContext):
    """Sec. 4.4, App. B.5: K classes."""
    name = "softmax_classification"
    options = dict(InContext.options, k=Option(3, "classes, K", least=1))
    recipes = dict(default=dict(DEFAULT, lr=1e-2),
                   paper=dict(PAPER, lr=1.56e-4, recurrent_lr=1.56e-4, weight_decay=8.45e-5))

    @property
    def outputs(self):
        return self.k

    def target(self, Wx):
        return F.one_hot(Wx.argmax(-1), self.k).to(Wx.dtype)

    def tokens(self, x, y):
        error = self.residual(torch.zeros_like(y[:, :-1]), y[:, :-1])       # y - p at W = 0
        return interleave(*beside(x, error))                                # (B, 2N+1, f+K)

    def models(self):
        return ["gril", "gd_dagger", "gril_identity"]

    def own(self, name, f):
        model = ClassifierGRIL(f, self.outputs, identity=name == "gril_identity")
        return gd_dagger(model, self.eta, self.N) if name == "gd_dagger" else model

    def constructed(self):
        model = ClassifierGRIL(self.f, self.outputs, identity=True)
        return construct_softmax(model, self.eta, self.N)

    def error(self, logits, target):
        return -(target * logits.log_softmax(-1)).sum(-1).mean()

    def residual(self, logits, y):
        """Minus Eq. 11's gradient."""
        return y - logits.softmax(-1)


class BinaryClassification(SoftmaxClassification):
    """The same with one logit."""
    name = "binary_classification"
    options = InContext.options
    recipes = dict(default=SoftmaxClassification.recipes["default"],
                   paper=dict(PAPER, lr=1.23e-4, recurrent_lr=1.23e-4, weight_decay=5.17e-3))
    outputs = 1

    def target(self, Wx):
        return (Wx > 0).to(Wx.dtype)

    def error(self, logits, target):
        return F.binary_cross_entropy_with_logits(logits, target)

    def residual(self, logits, y):
        return y - logits.sigmoid()


TASKS = {task.name: task for task in (ScalarRegression, NdRegression, MultistepRegression,
                                      NonlinearRegression, BinaryClassification,
                                      SoftmaxClassification)}


def query(model, s):
    """The model's prediction for the query, (B, outputs): its last output."""
    if hasattr(model, "query"):
        return model.query(s)
    return torch.cat([model(part)[:, -1] for part in s.split(1024)])        # large models: in parts


# ------------------------------------------------------------------------------- explicit learners
# learner(x (B, N, f), y (B, N, outputs), x_query (B, f)) -> prediction (B, outputs), from W = 0

def zero(x, y, x_query):
    return torch.zeros_like(y[:, 0])


def gradient_descent(etas, residual=lambda prediction, y: y - prediction, link=lambda Wx: Wx):
    """len(etas) steps W ← W - η ∇L with the mean loss over the prompt (Eq. 15, Eq. 11)."""
    def learner(x, y, x_query):
        W = torch.zeros_like(y[:, 0, :, None] * x[:, 0, None])              # (B, outputs, f)
        for eta in etas:
            W = W + eta / x.shape[1] * residual(x @ W.mT, y).mT @ x
        return link((W @ x_query[..., None])[..., 0])
    return learner


def newton(x, y, x_query, step=1.0):
    """App. C.3: a Newton-Raphson step from zero, W = -∇L(0) H⁻¹, H = Σ x xᵀ/N: least squares.

    Where N < f, its solution of least norm.
    """
    # X⁺ Y = (XᵀX)⁻¹ XᵀY = (-∇L(0) H⁻¹)ᵀ
    W = (torch.linalg.pinv(x.double()) @ y.double()).mT.to(x.dtype)         # (B, outputs, f)
    return step * (W @ x_query[..., None])[..., 0]


def ridge(penalty):
    """W = (Σ y xᵀ/N) (Σ x xᵀ/N + λ I)⁻¹; also Newton's step with a damped Hessian."""
    def learner(x, y, x_query):
        N, eye = x.shape[1], torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
        solved = torch.linalg.solve(x.mT @ x / N + penalty * eye, x_query[..., None])
        return (y.mT @ x / N @ solved)[..., 0]
    return learner


def online(step_size):
    """S ← S + Δ (y - S x) xᵀ, example by example."""
    def learner(x, y, x_query):
        S = torch.zeros_like(y[:, 0, :, None] * x[:, 0, None])              # (B, outputs, f)
        for x_t, y_t in zip(x.unbind(1), y.unbind(1)):
            error = y_t - (S @ x_t[..., None])[..., 0]
            S = S + (step_size(x_t) * error)[..., None] * x_t[:, None]
        return (S @ x_query[..., None])[..., 0]
    return learner


def delta_rule(beta):
    """DeltaNet's write (Sec. 2): a plain online gradient step."""
    return online(lambda x: beta)


def longhorn(beta):
    """App. G: the implicit step min ‖S - S_{t-1}‖² + β ‖S x - y‖², Δ = β / (1 + β ‖x‖²).

    The paper's key k and token x are the example's x and y here.
    """
    return online(lambda x: beta / (1 + beta * x.square().sum(-1, keepdim=True)))


def closed_form(f, N, scale=1.0, weight_scale=1.0):
    """(η*, loss*) of one-step gradient descent on linear regression with x ~ U(-½, ½)·scale.

    S = Σ x xᵀ/N has E[S] = σ² I, and e = E[S²]'s diagonal is (E x⁴ + (f-1) σ⁴ + (N-1) σ⁴)/N; the
    loss is that of W (I - η S) on a fresh x, ½ f σ² (1 - 2 η σ² + η² e) per coordinate, least at
    η* = σ²/e.
    """
    variance, fourth = scale ** 2 / 12, scale ** 4 / 80
    e = (fourth + (f - 1 + N - 1) * variance ** 2) / N
    return variance / e, weight_scale ** 2 * 0.5 * f * variance * (1 - variance ** 2 / e)


def tune(family, start, task, seed=10_000, final=True):
    """The positive parameters with which family(*parameters) has the least loss, on fixed tasks.

    If the task asks for it, the paper's calibration of App. B.4 instead: that many Adam steps on
    fresh batches. What is only a start for more is tuned on fewer tasks.
    """
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.tensor(start, dtype=torch.float64).log().requires_grad_()

    def loss(batch):
        x, y = batch.x.double(), batch.y.double()
        return task.error(family(*log_p.exp())(x[:, :-1], y[:, :-1], x[:, -1]), y[:, -1])

    if task.calibrate and final:
        optimizer = torch.optim.Adam([log_p], lr=1e-2)
        for _ in range(task.calibrate):
            optimizer.zero_grad()
            loss(task.sample(64, generator)).backward()
            optimizer.step()
        return log_p.detach().exp().tolist()

    optimizer = torch.optim.LBFGS([log_p], max_iter=50 if final else 10, tolerance_change=1e-12,
                                  line_search_fn="strong_wolfe")
    batch = task.sample(task.tasks if final else min(task.tasks, 1_000), generator)

    def closure():
        optimizer.zero_grad()
        value = loss(batch)
        value.backward()
        return value

    optimizer.step(closure)
    return log_p.detach().exp().tolist()


# ------------------------------------------------------------------------------------- the metrics

def evaluate(task, predictors, tasks, seed, sensitivities=1_000, device="cpu"):
    """Losses of all predictors on the same fresh tasks, so that their ratios are exact (App. B.1).

    predictors: name -> f(batch, x_query) -> prediction. The first is compared with each of the
    others: by the distance of predictions, and by ∂ŷ/∂x_query, the whole Jacobian as one vector,
    its cosine and its distance, averaged over tasks.
    """
    generator = torch.Generator(device).manual_seed(seed)
    trained = next(iter(predictors))
    size = max(1, min(tasks, 4_000_000 // ((task.N + 1) * task.f)))
    losses, distance, done = dict.fromkeys(predictors, 0.0), dict.fromkeys(predictors, 0.0), 0
    with torch.no_grad():
        while done < tasks:
            batch = task.sample(min(size, tasks - done), generator)
            answers = {name: p(batch, batch.x[:, -1]) for name, p in predictors.items()}
            for name, answer in answers.items():
                losses[name] += task.error(answer, batch.y[:, -1]).item() * len(answer)
                distance[name] += (answers[trained] - answer).norm(dim=-1).sum().item()
            done += len(batch.x)
    batch = task.sample(sensitivities, generator)
    jacobians = {name: sensitivity(p, batch) for name, p in predictors.items()}
    return {name: dict(
        loss=losses[name] / tasks, prediction_l2=distance[name] / tasks,
        cosine=cosine(jacobians[trained], J).mean().item(),
        sensitivity_l2=(jacobians[trained] - J).norm(dim=-1).mean().item())
        for name, J in jacobians.items()}


def cosine(a, b):
    """App. B.1: ⟨a, b⟩ / (‖a‖ ‖b‖); of zero with anything 0, and nothing else is too small."""
    a, b = (F.normalize(x.cpu().double(), dim=-1, eps=1e-300) for x in (a, b))
    return (a * b).sum(-1)


def sensitivity(predictor, batch):
    """App. B.1: ∂ŷ/∂x_query, (B, outputs·f)."""
    x_query = batch.x[:, -1].clone().requires_grad_()
    prediction = predictor(batch, x_query)                                  # (B, outputs)
    if not prediction.requires_grad:                                        # the zero predictor
        return x_query.new_zeros(len(x_query), prediction.shape[1] * x_query.shape[1])
    rows = [torch.autograd.grad(p.sum(), x_query, retain_graph=True)[0]
            for p in prediction.unbind(1)]
    return torch.stack(rows, 1).flatten(1)


def as_predictor(task, model):
    """A model as evaluate wants it: the query enters through the tokens, so gradients reach it."""
    def predict(batch, x_query):
        x = torch.cat([batch.x[:, :-1], x_query[:, None]], 1)
        return query(model, task.tokens(x, batch.y))
    return predict


def as_learner(learner):
    return lambda batch, x_query: learner(batch.x[:, :-1], batch.y[:, :-1], x_query)


def recovered(model, N):
    """What a layer of gril.py has learned, beside the construction; nothing of any other model."""
    return model.recovered(N) if hasattr(model, "recovered") else {}

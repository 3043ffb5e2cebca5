"""In-context tasks, the explicit learners they are compared with, and the metrics (Sec. 5, App. B, App. C).

A task is one prompt: N examples (x_i, y_i) of a freshly drawn W and a query x_{N+1} whose target is held out.

  scalar_regression      y = w·x                         tokens [x_t, y_t, x_{t+1}]     Sec. 4.1, App. B.1
  nd_regression          y = W x,  W (f, f)              tokens x_1, y_1, x_2, …        Sec. 4.2, App. B.2
  multistep_regression   the same, for several layers                                   Sec. 4.3, App. B.4
  nonlinear_regression   y = sin(W x)                                                   Sec. 4.3, App. B.4
  binary_classification  y = [w·x > 0]                   tokens x_1, y_1 - ½, x_2, …    Sec. 4.4, App. B.5
  softmax_classification y = argmax W x,  W (K, f)       tokens x_1, y_1 - 1/K, …       Sec. 4.4, App. B.5

W ~ N(0, 1); the loss is ½ the squared error per coordinate, or cross-entropy. Departure: x ~ U(-½, ½)^f. The paper's
text says U(-1, 1), but its numbers (0.41 to 0.43 for the zero predictor, 0.206 for gradient descent) are those of
U(-½, ½); with U(-1, 1) they would be 1.667 and 0.825.
"""
import copy
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

import baselines
from gril import (SCALAR_VARIANTS, VARIANTS, GRIL, ClassifierGRIL, MultistepGRIL, NonlinearGRIL, ScalarGRIL,
                  StateMLPGRIL, beside, construct_binary, construct_multistep, construct_multivariate, construct_scalar,
                  construct_softmax, gd_dagger, interleave)
from machine.errors import known


class Batch(NamedTuple):
    x: torch.Tensor                 # (B, N+1, f), the last is the query
    y: torch.Tensor                 # (B, N+1, outputs), the last is held out
    s: torch.Tensor                 # (B, L, ·), the tokens a model sees


_TUNED = {}                         # step sizes found by line search, which takes seconds: once a process

SIZES = dict(f=10, n=10, k=3, layers=1, hidden=None, width=0, heads=0, scale=1.0, weight_scale=1.0, tasks=10_000,
             calibrate=None)
LOOP = dict(evaluate_every=100, dense_start=True, checkpoint_every=1000,        # gradient descent is found early
            device="cpu", dtype="float32", threads=1)       # a step under a millisecond feeds no GPU, and no second core


class Task:
    """Linear regression with vector targets; the other tasks say what differs."""
    name, reference, paper_parameters = "nd_regression", "gradient descent", None
    layered = ()                                                # models of the task itself that have as many as --layers
    recipes = {
        "default": dict(SIZES, **LOOP, steps=2000, batch=256, lr=2e-2, recurrent_lr=2e-3, weight_decay=0.0, warmup=100,
                        clip=1.0),
        "paper": dict(SIZES, **LOOP, steps=300_000, batch=64, lr=2e-4, recurrent_lr=1e-4, weight_decay=0.0, warmup=3000,
                      clip=0.0),
    }

    def __init__(self, recipe=None, data=None, **sizes):
        """As a recipe says, and single sizes otherwise: Task(f=5, N=20). There is no data to read."""
        for name in sizes:
            known(f"size of {self.name}", name.lower(), SIZES)
        r = {**self.recipes["default"], **(recipe or {}), **{name.lower(): size for name, size in sizes.items()}}
        for name, value in (("f (input width)", r["f"]), ("N (examples in the prompt)", r["n"]), ("K (classes)", r["k"]),
                            ("--layers", r["layers"]), ("--width", r["width"] or 1), ("--heads", r["heads"] or 1),
                            ("--tasks", r["tasks"])):
            if value < 1:
                raise ValueError(f"{self.name}: {name} must be at least 1, got {value}")
        dtype = torch.float64 if r["dtype"] == "float64" else torch.float32
        if r["hidden"] is not None and self.name != "scalar_regression":
            raise ValueError(f"--hidden is for scalar_regression: the state of {self.name} is as wide as its tokens")
        scale = abs(r["scale"])
        if not scale > 0:
            raise ValueError(f"{self.name}: --scale must be a number other than 0, got {r['scale']:g}")
        large, small = math.prod([scale * max(1, abs(r["weight_scale"]))] * 6), math.prod([scale] * 4)
        if not (large < torch.finfo(dtype).max and small > torch.finfo(dtype).tiny):
            raise ValueError(f"{self.name}: with --scale {r['scale']:g} and --weight-scale {r['weight_scale']:g} an untrained "
                             f"layer's loss, a product of six inputs ({large:.0e}), or its gradient, of four ({small:.0e}), "
                             f"is beyond what {str(dtype)[6:]} holds; --scale 1e-6 to 1e6 fits"
                             + ", and so does --dtype float64" * (dtype == torch.float32))
        self.f, self.N, self.K, self.layers, self.hidden = (r[name] for name in ("f", "n", "k", "layers", "hidden"))
        self.sizes = {name: r[name] for name in ("layers", "width", "heads")}   # of another sequence model
        self.scale, self.weight_scale = r["scale"], r["weight_scale"]
        self.tasks, self.calibrate = r["tasks"], r["calibrate"]                 # for evaluating, for tuning step sizes
        self._eta = None

    # ---- data

    @property
    def outputs(self):
        return self.f

    def sample(self, B, generator):
        """B fresh prompts; the generator fixes them."""
        device = generator.device
        W = self.weight_scale * torch.randn(B, self.outputs, self.f, generator=generator, device=device)
        x = self.scale * (torch.rand(B, self.N + 1, self.f, generator=generator, device=device) - 0.5)
        y = self.target(x @ W.mT)                                               # (B, N+1, outputs)
        return Batch(x, y, self.tokens(x, y))

    def target(self, Wx):
        return Wx

    def tokens(self, x, y):
        return interleave(x, y[:, :-1])                                         # (B, 2N+1, f)

    def stream(self, seed, batch, device="cpu", rank=0, world=1):
        return Stream(self, seed, batch, device, rank, world)

    def example(self, batch):
        """Shapes without numbers, on the default device."""
        x, y = torch.empty(batch, self.N + 1, self.f), torch.empty(batch, self.N + 1, self.outputs)
        return Batch(x, y, self.tokens(x, y))

    # ---- models

    def models(self):
        """Named variants, a row each: the full model, GD†, and the ablations of App. C."""
        return {"gril": lambda: GRIL(self.f),
                **{name: lambda name=name: GRIL(self.f, name) for name in VARIANTS if name != "full"}}

    def others(self):
        """The other sequence models on the very tokens that GRIL gets, a row each; read at the last position."""
        L, f = self.example(1).s.shape[1:]

        def build(name):
            default = baselines.MODELS[name].in_context["default"]
            sizes = {**default, **{size: value for size, value in self.sizes.items() if value}}
            if "heads" in sizes.keys() - default.keys():
                raise ValueError(f"--heads: {name} has no heads")
            return baselines.make(name, f, self.outputs, sizes.pop("width"), **sizes)
        return {name: lambda name=name: build(name) for name in baselines.offered("in_context")
                if name != "linear_attention_pairs" or L == 2 * self.N + 1}     # interleaved, so that it can be paired

    def model(self, name="gril"):
        row = known(f"model for {self.name}", name, {**self.models(), **self.others()})
        if name not in baselines.offered("in_context") and (self.sizes["width"] or self.sizes["heads"]):
            raise ValueError(f"--width and --heads are sizes of other sequence models than {name}")
        if self.layers > 1 and name not in baselines.offered("in_context") and name not in self.layered:
            raise ValueError(f"--layers: {name} of {self.name} has one layer; multistep_regression has several")
        return row()

    @classmethod
    def adapt(cls, name, model):
        """What the named recipe changes for another sequence model: its rates and sizes."""
        if model not in baselines.offered("in_context"):
            return {}
        changes = baselines.recipe(name, model, cls.name)
        if cls.recipes[name]["layers"] > 1:                                     # the task's steps are the model's layers
            del changes["layers"]
        return changes

    def constructed(self):
        """The model whose weights are set, not trained, to be one step of gradient descent."""
        return construct_multivariate(GRIL(self.f), self.eta, self.N)

    # ---- losses and explicit learners

    def error(self, prediction, target):
        """½ the mean squared error per coordinate."""
        return 0.5 * F.mse_loss(prediction, target)

    def loss(self, model, batch):
        return self.error(query(model, batch.s), batch.y[:, -1])

    @property
    def eta(self):
        """The step size of one-step gradient descent that minimises the expected loss: closed form, or line search."""
        if self._eta is None:
            self._eta = self.optimal()[0] if self.optimal() else self.tuned(1)[0]
        return self._eta

    def tuned(self, steps):
        """Step sizes for several steps of gradient descent, tuned together (or calibrated as in App. B.4)."""
        key = (self.name, self.f, self.N, self.K, self.scale, self.weight_scale, self.tasks, self.calibrate, steps)
        if key not in _TUNED:
            start = [4.0 + i for i in range(steps)]                             # equal ones would stay equal: a saddle
            with torch.device("cpu"):                                           # numbers, also in a dry run on meta
                _TUNED[key] = tune(lambda *etas: gradient_descent(etas, self.residual), start, self)
        return _TUNED[key]

    def residual(self, prediction, y):
        """Minus the derivative of the example's loss with respect to W x: what gradient descent writes beside x."""
        return y - prediction

    def learner(self):
        """Explicit gradient descent, the reference of this task."""
        return gradient_descent([self.eta], self.residual)

    def optimal(self):
        """Closed form (η*, loss*) of one-step gradient descent; see closed_form."""
        return closed_form(self.f, self.N, self.scale, self.weight_scale)

    # ---- what the training loop asks for

    def validate(self, model):
        """A row of metrics.csv: the model beside explicit gradient descent on one fixed draw of 1,000 tasks."""
        device = next(model.parameters()).device
        predictors = dict(trained=as_predictor(self, model), gd=as_learner(self.learner()))
        scores = evaluate(self, predictors, 1_000, seed=30_000, sensitivities=100, device=device)
        return dict(scores["gd"], loss=scores["trained"]["loss"], gd_loss=scores["gd"]["loss"])

    def report(self, model, seed):
        """The numbers of result.json: the model beside its references on fresh tasks."""
        model = copy.deepcopy(model).cpu()
        predictors = dict(trained=as_predictor(self, model), gd=as_learner(self.learner()),
                          constructed=as_predictor(self, self.constructed()), zero=as_learner(zero))
        scores = evaluate(self, predictors, self.tasks, seed, sensitivities=min(self.tasks, 1_000))
        result = dict(loss=scores["trained"]["loss"], gd_loss=scores["gd"]["loss"],
                      constructed_loss=scores["constructed"]["loss"], zero_loss=scores["zero"]["loss"],
                      optimal_loss=self.optimal() and self.optimal()[1],
                      cosine=scores["gd"]["cosine"], sensitivity_l2=scores["gd"]["sensitivity_l2"],
                      prediction_l2=scores["gd"]["prediction_l2"], eta=self.eta,
                      parameters=sum(p.numel() for p in model.parameters() if p.requires_grad))
        return dict(result, **{name: value for name, value in recovered(model, self.N).items()
                               if not isinstance(value, torch.Tensor)})

    def table(self, r):
        """result.json as a person reads it."""
        rows = [(f"trained {r['model']}", r["loss"]), ("constructed GRIL", r["constructed_loss"]),
                (self.reference, r["gd_loss"]), ("  its closed form", r["optimal_loss"]), ("zero predictor", r["zero_loss"])]
        lines = [f"{f'loss on the same {self.tasks:,} fresh tasks':36s}{'':10s}{'÷ ' + self.reference:>20s}"]
        lines += [f"{name:36s}{loss:10.5f}{loss / (r['gd_loss'] or math.nan):20.4f}" for name, loss in rows if loss is not None]
        lines += ["", f"trained against {self.reference}: cosine of sensitivities {r['cosine']:.5f}, their L2 distance "
                  f"{r['sensitivity_l2']:.4f}, of predictions {r['prediction_l2']:.4f}"]
        distances = [f"{name} {r[name + '_distance']:.4f}" for name in ("PsiTheta", "Q", "q") if name + "_distance" in r]
        if distances:
            gain, eta = (", ".join(f"{g:.3f}" for g in sorted(torch.tensor(r[key]).flatten().tolist()))
                         for key in ("gain", "eta"))
            lines += [f"largest distance from the construction, scale removed: {', '.join(distances)}; mean of |A - 1| "
                      f"{r['A_distance']:.4f}", f"step size in the weights: {gain}; of {self.reference}: {eta}"]
        return "\n".join(lines)


class Stream:
    """Endless fresh batches from one seed; position() and seek() make a stopped run go on with the same data."""

    def __init__(self, task, seed, batch, device, rank, world):
        self.task, self.batch, self.generator = task, batch, torch.Generator(device).manual_seed(seed)
        self.share = slice(rank * batch // world, (rank + 1) * batch // world)

    def __next__(self):
        """This rank's share of the batch that all of them draw."""
        return Batch(*(x[self.share] for x in self.task.sample(self.batch, self.generator)))

    def position(self):
        return self.generator.get_state()

    def seek(self, position):
        self.generator.set_state(position)


class ScalarRegression(Task):
    name = "scalar_regression"
    recipes = {"default": dict(Task.recipes["default"], steps=3000, batch=1024),
               "paper": dict(Task.recipes["paper"], weight_decay=0.05, hidden=20)}

    @property
    def outputs(self):
        return 1

    def tokens(self, x, y):
        return torch.cat([x[:, :-1], y[:, :-1], x[:, 1:]], -1)                  # (B, N, 2f+1)

    def models(self):
        return {"gril": lambda: ScalarGRIL(self.f, self.hidden),
                **{name: lambda name=name: ScalarGRIL(self.f, self.hidden, name) for name in SCALAR_VARIANTS
                   if name != "full"}}

    def constructed(self):
        return construct_scalar(ScalarGRIL(self.f, self.hidden), self.eta, self.N)


class MultistepRegression(Task):
    name, layered = "multistep_regression", ("gril", "looped")
    recipes = {"default": dict(Task.recipes["default"], steps=4000, layers=2),
               "paper": dict(Task.recipes["paper"], layers=2, calibrate=1000)}

    def models(self):
        return {"gril": lambda: MultistepGRIL(self.f, self.layers),
                "looped": lambda: MultistepGRIL(self.f, 1, loops=self.layers)}

    @property
    def eta(self):
        """One step size per step, tuned together."""
        if self._eta is None:
            self._eta = self.tuned(self.layers)
        return self._eta

    def learner(self):
        return gradient_descent(self.eta)

    def constructed(self):
        return construct_multistep(MultistepGRIL(self.f, self.layers), self.eta, self.N)

    def optimal(self):
        return super().optimal() if self.layers == 1 else None


class NonlinearRegression(Task):
    """App. B.4: sine targets. The explicit reference is linear GD; GD† (a model, trained) stands beside it."""
    name, layered = "nonlinear_regression", ("gril", "gd_dagger")
    recipes = {"default": dict(Task.recipes["default"], steps=4000), "paper": Task.recipes["paper"]}

    def target(self, Wx):
        return Wx.sin()

    def models(self):
        return {"gril": lambda: NonlinearGRIL(self.f, self.layers),
                "gd_dagger": lambda: gd_dagger(NonlinearGRIL(self.f, self.layers), self.start, self.N),
                "gril_rho": lambda: StateMLPGRIL(self.f),
                "gd_dagger_rho": lambda: gd_dagger(StateMLPGRIL(self.f), self.eta, self.N)}

    @property
    def start(self):
        """GD† begins at linear GD's step size (per layer) and trains it."""
        return self.eta if self.layers == 1 else self.tuned(self.layers)

    def optimal(self):
        return None


class SoftmaxClassification(Task):
    name = "softmax_classification"
    recipes = {"default": dict(Task.recipes["default"], lr=1e-2),
               "paper": dict(Task.recipes["paper"], lr=1.56e-4, recurrent_lr=1.56e-4, weight_decay=8.45e-5)}

    @property
    def outputs(self):
        return self.K

    def target(self, Wx):
        return F.one_hot(Wx.argmax(-1), self.K).to(Wx.dtype)

    def tokens(self, x, y):
        error = self.residual(torch.zeros_like(y[:, :-1]), y[:, :-1])           # y - p at W = 0
        return interleave(*beside(x, error))                                    # (B, 2N+1, f+K)

    def models(self):
        return {"gril": lambda: ClassifierGRIL(self.f, self.outputs),
                "gd_dagger": lambda: gd_dagger(ClassifierGRIL(self.f, self.outputs), self.eta, self.N),
                "gril_identity": lambda: ClassifierGRIL(self.f, self.outputs, identity=True)}

    def constructed(self):
        return construct_softmax(ClassifierGRIL(self.f, self.outputs, identity=True), self.eta, self.N)

    def error(self, logits, target):
        return -(target * logits.log_softmax(-1)).sum(-1).mean()

    def residual(self, logits, y):
        return y - logits.softmax(-1)

    def optimal(self):
        return None


class BinaryClassification(SoftmaxClassification):
    name = "binary_classification"
    recipes = {"default": SoftmaxClassification.recipes["default"],
               "paper": dict(Task.recipes["paper"], lr=1.23e-4, recurrent_lr=1.23e-4, weight_decay=5.17e-3)}

    @property
    def outputs(self):
        return 1

    def target(self, Wx):
        return (Wx.sigmoid() > 0.5).to(Wx.dtype)

    def constructed(self):
        return construct_binary(ClassifierGRIL(self.f, 1, identity=True), self.eta, self.N)

    def error(self, logits, target):
        return F.binary_cross_entropy_with_logits(logits, target)

    def residual(self, logits, y):
        return y - logits.sigmoid()


TASKS = {task.name: task for task in (ScalarRegression, Task, MultistepRegression, NonlinearRegression,
                                      BinaryClassification, SoftmaxClassification)}


def query(model, s):
    """The model's prediction for the query, (B, outputs): its last output, computed alone where the model can."""
    if hasattr(model, "query"):
        return model.query(s)
    return torch.cat([model(part)[:, -1] for part in s.split(1024)])            # large models: a part of the tasks at a time


# ------------------------------------------------------------------------------------------------ explicit learners
# learner(x (B, N, f), y (B, N, outputs), x_query (B, f)) -> prediction (B, outputs), each from W = 0

def zero(x, y, x_query):
    return torch.zeros_like(y[:, 0])


def gradient_descent(etas, residual=lambda prediction, y: y - prediction, link=lambda Wx: Wx):
    """len(etas) steps W ← W - η ∇L with the mean loss over the prompt (Eq. 15, Eq. 11)."""
    def learner(x, y, x_query):
        W = torch.zeros_like(y[:, 0, :, None] * x[:, 0, None])                  # (B, outputs, f)
        for eta in etas:
            W = W + eta / x.shape[1] * residual(x @ W.mT, y).mT @ x
        return link((W @ x_query[..., None])[..., 0])
    return learner


def newton(x, y, x_query, step=1.0):
    """One Newton-Raphson step from zero: the least-squares solution (its minimum-norm one where N < f)."""
    return step * (torch.linalg.pinv(x.double()) @ y.double()).mT.to(x.dtype).matmul(x_query[..., None])[..., 0]


def ridge(penalty):
    """W = (Σ y xᵀ/N) (Σ x xᵀ/N + λ I)⁻¹; also Newton's step with a damped Hessian."""
    def learner(x, y, x_query):
        N, eye = x.shape[1], torch.eye(x.shape[2], dtype=x.dtype, device=x.device)
        return (y.mT @ x / N @ torch.linalg.solve(x.mT @ x / N + penalty * eye, x_query[..., None]))[..., 0]
    return learner


def online(step_size):
    """S ← S + Δ (y - S x) xᵀ, example by example."""
    def learner(x, y, x_query):
        S = torch.zeros_like(y[:, 0, :, None] * x[:, 0, None])                  # (B, outputs, f)
        for x_t, y_t in zip(x.unbind(1), y.unbind(1)):
            error = y_t - (S @ x_t[..., None])[..., 0]
            S = S + (step_size(x_t) * error)[..., None] * x_t[:, None]
        return (S @ x_query[..., None])[..., 0]
    return learner


def delta_rule(beta):
    """DeltaNet's write (Sec. 2): a plain online gradient step."""
    return online(lambda x: beta)


def longhorn(beta):
    """App. G: the implicit step min ‖S - S_{t-1}‖² + β ‖S x - y‖², Δ = β / (1 + β ‖x‖²)."""
    return online(lambda x: beta / (1 + beta * x.square().sum(-1, keepdim=True)))


def closed_form(f, N, scale=1.0, weight_scale=1.0):
    """(η*, loss*) of one-step gradient descent on linear regression with x ~ U(-½, ½)·scale.

    S = Σ x xᵀ/N has E[S] = σ² I, and e = E[S²]'s diagonal is (E x⁴ + (f-1) σ⁴ + (N-1) σ⁴)/N; the loss is that of
    W (I - η S) on a fresh x, ½ f σ² (1 - 2 η σ² + η² e) per coordinate, least at η* = σ²/e.
    """
    variance, fourth = scale ** 2 / 12, scale ** 4 / 80
    e = (fourth + (f - 1 + N - 1) * variance ** 2) / N
    return variance / e, weight_scale ** 2 * 0.5 * f * variance * (1 - variance ** 2 / e)


def tune(family, start, task, seed=10_000):
    """The positive parameters with which family(*parameters) has the least loss, on one fixed draw of tasks.

    If the task asks for it, the paper's calibration of App. B.4 instead: that many Adam steps on fresh batches.
    """
    generator = torch.Generator().manual_seed(seed)
    log_p = torch.tensor(start, dtype=torch.float64).log().requires_grad_()

    def loss(batch):
        x, y = batch.x.double(), batch.y.double()
        return task.error(family(*log_p.exp())(x[:, :-1], y[:, :-1], x[:, -1]), y[:, -1])
    if task.calibrate:
        optimizer = torch.optim.Adam([log_p], lr=1e-2)
        for _ in range(task.calibrate):
            optimizer.zero_grad()
            loss(task.sample(64, generator)).backward()
            optimizer.step()
    else:
        optimizer = torch.optim.LBFGS([log_p], max_iter=50, tolerance_change=1e-12, line_search_fn="strong_wolfe")
        batch = task.sample(task.tasks, generator)

        def closure():
            optimizer.zero_grad()
            value = loss(batch)
            value.backward()
            return value
        optimizer.step(closure)
    return log_p.detach().exp().tolist()


# ----------------------------------------------------------------------------------------------------- the metrics

def evaluate(task, predictors, tasks, seed, sensitivities=1_000, device="cpu"):
    """Losses of all predictors on the same fresh tasks, so that their ratios are exact; and how alike they answer.

    predictors: name -> f(batch, x_query) -> prediction; the first is compared with each of the others (App. B.1).
    """
    generator = torch.Generator(device).manual_seed(seed)
    names, first = list(predictors), next(iter(predictors))
    size = max(1, min(tasks, 4_000_000 // ((task.N + 1) * task.f)))
    losses, distance, done = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), 0
    with torch.no_grad():
        while done < tasks:
            batch = task.sample(min(size, tasks - done), generator)
            answers = {name: p(batch, batch.x[:, -1]) for name, p in predictors.items()}
            for name, answer in answers.items():
                losses[name] += task.error(answer, batch.y[:, -1]).item() * len(answer)
                distance[name] += (answers[first] - answer).norm(dim=-1).sum().item()
            done += len(batch.x)
    result = {name: dict(loss=losses[name] / tasks, prediction_l2=distance[name] / tasks) for name in names}
    batch = task.sample(sensitivities, generator)
    jacobians = {name: sensitivity(p, batch) for name, p in predictors.items()}
    for name, J in jacobians.items():
        result[name]["cosine"] = F.cosine_similarity(jacobians[first], J, -1).mean().item()
        result[name]["sensitivity_l2"] = (jacobians[first] - J).norm(dim=-1).mean().item()
    return result


def sensitivity(predictor, batch):
    """∂ŷ/∂x_query, (B, outputs·f)."""
    x_query = batch.x[:, -1].clone().requires_grad_()
    prediction = predictor(batch, x_query)                                      # (B, outputs)
    if not prediction.requires_grad:                                            # the zero predictor
        return x_query.new_zeros(len(x_query), prediction.shape[1] * x_query.shape[1])
    rows = [torch.autograd.grad(p.sum(), x_query, retain_graph=True)[0] for p in prediction.unbind(1)]
    return torch.stack(rows, 1).flatten(1)


def as_predictor(task, model):
    """A model as evaluate wants it: the query enters through the tokens, so that gradients reach it."""
    def predict(batch, x_query):
        x = torch.cat([batch.x[:, :-1], x_query[:, None]], 1)
        return query(model, task.tokens(x, batch.y))
    return predict


def as_learner(learner):
    return lambda batch, x_query: learner(batch.x[:, :-1], batch.y[:, :-1], x_query)


def recovered(model, N):
    """The learned recurrence beside the construction, after removing the scale that Q, q and β share.

    Each matrix is divided by its largest entry; the product of what was divided out is the gain, N β Q₂₁ q₃ = η.
    """
    if hasattr(model, "linear"):
        return recovered(model.linear, N)
    if isinstance(model, ScalarGRIL) and all(model.variant.values()):
        # any invertible M turns (Ψ, Θ) into (M Ψ, M⁻ᵀ Θ) without changing a prediction: only ΨᵀΘ is determined
        product = (model.Psi.mT @ model.Theta).detach()
        eye = torch.eye(model.f)
        aim = torch.zeros_like(product)
        aim[:model.f, model.f:] = eye
        scale = (product * aim).sum() / model.f
        return dict(PsiTheta=product / scale, PsiTheta_distance=(product / scale - aim).abs().max().item(),
                    A=model.A.detach(), A_distance=(model.A.detach() - 1).abs().mean().item(),
                    gain=(N * model.beta.detach() * scale).item())
    if not hasattr(model, "q") or len(model.q) != 3:
        return {}
    heads = model.Q.detach().reshape(-1, 3, 3)                                  # (layers · heads, 3, 3)
    aims = torch.zeros_like(heads)
    aims[0::2, 1, 0] = 1                                                        # e₂ e₁ᵀ, y xᵀ
    aims[1::2, 0, 0] = 1                                                        # e₁ e₁ᵀ, x xᵀ
    scales = torch.stack([Q.flatten()[Q.abs().argmax()] for Q in heads])
    Q = heads / scales[:, None, None]
    q_scale = model.q.detach()[model.q.abs().argmax()]
    q, A = model.q.detach() / q_scale, model.A.detach()
    gain = N * model.beta.detach().reshape(-1)
    unused = 1 if getattr(model, "loops", 1) == 1 else None                     # layer 1's second head meets W₀ = 0
    counts = torch.tensor([i != unused for i in range(len(heads))])
    A_distance = (A - 1).abs().reshape(len(heads), -1).mean(1)[counts].mean()
    return dict(Q=Q, Q_distance=(Q - aims)[counts].abs().max().item(), q=q,
                q_distance=(q - torch.eye(3)[2]).abs().max().item(), A=A, A_distance=A_distance.item(),
                gain=(gain * scales[::len(heads) // len(gain)] * q_scale).tolist())

"""Theorems first: constructed weights are gradient descent. Then: all forms are the same function.

    .venv/bin/python -m pytest -q            everything but the slow proofs
    .venv/bin/python -m pytest -q -m slow    the slow proofs
"""
import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gril import (GRIL, Block, ClassifierGRIL, EmbeddedGRIL, GrilMixer, MultistepGRIL,
                  NonlinearGRIL, ScalarGRIL, StateMLPGRIL, beside, complex_gate, construct,
                  construct_multistep, construct_multivariate, construct_scalar, construct_softmax,
                  gd_dagger, gril_chunk, gril_loop, gril_scan, gril_step, interleave,
                  linear_attention, scan, window)

f32, f64 = torch.float32, torch.float64
SIZES = list(itertools.product((1, 3, 10), (1, 10, 100)))               # f, N


def agree(tol, **pairs):
    """Each name=(got, expected) within tol of the expected tensor's size; a failure names it."""
    wrong = []
    for name, (got, expected) in pairs.items():
        assert got.shape == expected.shape, f"{name}: {got.shape}, expected {expected.shape}"
        error = (got - expected).abs().max().item() / max(1.0, expected.abs().max().item())
        if not error <= tol:                                            # also true for nan
            wrong.append(f"{name}: error {error:.1e} > {tol:.0e}")
    assert not wrong, "; ".join(wrong)


def seeded(*shape, seed=0, dtype=f64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def zeros(*shape):
    return torch.zeros(*shape, dtype=f64)


def descend(loss, W0, eta, steps=1):
    """Gradient descent by autograd on an explicit loss: what the constructions must reproduce."""
    W = W0.clone()
    for _ in range(steps):
        W.requires_grad_()
        (gradient,) = torch.autograd.grad(loss(W), W)
        W = (W - eta * gradient).detach()
    return W


def every_prefix(x, y, loss, W0, eta, steps=1):
    """W_t x_{t+1} (B, N, n_o), W_t by gradient descent on loss(W, x_{≤t}, y_{≤t}), one by one."""
    def prediction(x, y, t):
        return descend(lambda W: loss(W, x[:t], y[:t]), W0, eta, steps) @ x[t]
    return torch.stack([torch.stack([prediction(*task, t) for t in range(1, y.shape[1] + 1)])
                        for task in zip(x, y)])


def prompts(B, N, f, outputs=None):
    """x (B, N+1, f), y = W x (B, N, outputs) of the examples, and the tokens of both."""
    x, W = seeded(B, N + 1, f), seeded(B, outputs or f, f, seed=1)
    y = x[:, :-1] @ W.mT
    return x, y, interleave(x, y)


def squared(W, x, y):
    """Eq. 15: 1/(2N) Σ ‖W x - y‖²."""
    return 0.5 * (x @ W.mT - y).square().sum(-1).mean()


# ------------------------------------------------------------------------------------- the theorems

@pytest.mark.parametrize("f, N", SIZES)
def test_scalar_construction_is_gradient_descent(f, N):
    x, y, _ = prompts(2, N, f, outputs=1)
    layer = construct_scalar(ScalarGRIL(f).to(f64), 0.7, torch.arange(1, N + 1))
    c, raw = torch.cat([x[:, :-1] * y, x[:, 1:]], -1), torch.cat([x[:, :-1], y, x[:, 1:]], -1)
    expected = every_prefix(x, y, squared, zeros(1, f), 0.7)
    agree(1e-10, c=(layer(c), expected), raw=(layer(raw), expected))


@pytest.mark.parametrize("f, N", SIZES)
def test_multivariate_construction_is_gradient_descent_on_every_prefix(f, N):
    x, y, s = prompts(2, N, f)
    expected = every_prefix(x, y, squared, zeros(f, f), 0.7)
    layer = construct_multivariate(GRIL(f).to(f64), 0.7, torch.arange(1, N + 1))
    agree(1e-10, prefixes=(layer(s), expected))
    layer = construct_multivariate(GRIL(f).to(f64), 0.7, N)     # one β = η/N: exact at the query
    agree(1e-10, query=(layer(s)[:, -1], expected[:, -1]))
    wide = EmbeddedGRIL(GRIL(f + 2), f, f + 2).to(f64)
    construct_multivariate(wide.layer, 0.7, torch.arange(1, N + 1))
    wide.E.data = torch.linalg.qr(seeded(f + 2, f)).Q.mT        # any basis: y comes back in it
    whole = wide.layer(s @ wide.E)
    agree(1e-10, embedded=(whole @ wide.E.mT, expected))
    wide.E.data = torch.eye(f, f + 2, dtype=f64)
    agree(1e-10, identity=(wide(s), expected))


@pytest.mark.parametrize("f, N", ((1, 1), (1, 10), (3, 1), (3, 30), (10, 10)))
@pytest.mark.parametrize("layers", (1, 2, 5))
@pytest.mark.parametrize("start", ("zero", "random"))
def test_multistep_construction_is_gradient_descent_on_every_prefix(f, N, layers, start):
    x, y, s = prompts(1, N, f)
    W0 = zeros(f, f) if start == "zero" else seeded(f, f, seed=2)
    eta, t = 0.3 / f, torch.arange(1, N + 1)
    expected = every_prefix(x, y, squared, W0, eta, layers)
    stack = construct_multistep(MultistepGRIL(f, layers).to(f64), eta, t, W0)
    looped = construct_multistep(MultistepGRIL(f, 1, loops=layers).to(f64), eta, t, W0)
    agree(1e-10, stack=(stack(s), expected), looped=(looped(s), expected))


def test_a_multistep_stack_takes_its_layers_from_the_bottom_up():
    """Each with weights of its own: W_l = W_{l-1} + β_l (Z_l - W_{l-1} Z̃_l), formed in full."""
    torch.manual_seed(0)
    stack, s = MultistepGRIL(3, 3).to(f64), seeded(1, 9, 3)
    for p in stack.parameters():
        nn.init.normal_(p)
    W = stack.W0
    C = window(s, 3, 2, causal=False)[:, :, None]                       # (1, T, 1, f, 3)
    for l in range(3):
        Z, Z_tilde = gril_loop(C, C, C, stack.Q[l], stack.q, stack.A[l])[1][0]
        W = W + stack.beta[l] * (Z - W @ Z_tilde)
    agree(1e-10, query=(stack(s)[0, -1], W @ C[0, -1, 0] @ stack.q))


def test_multistep_with_a_step_size_per_layer():
    (x, y, s), W = prompts(1, 7, 3), zeros(3, 3)
    for eta in (0.2, 0.5):
        W = descend(lambda W: squared(W, x[0, :-1], y[0]), W, eta)
    layer = construct_multistep(MultistepGRIL(3, 2).to(f64), [0.2, 0.5], 7)
    agree(1e-10, query=(layer(s)[0, -1], W @ x[0, -1]))


@pytest.mark.parametrize("f, N", SIZES)
def test_l2_construction_is_gradient_descent_on_the_penalised_loss(f, N):
    (x, y, s), W0, penalty = prompts(1, N, f), seeded(f, f, seed=2), 0.4

    def loss(W, x, y):
        return squared(W, x, y) + penalty / 2 * W.square().sum()
    layer, eta, t = MultistepGRIL(f, 2).to(f64), 0.3 / f, torch.arange(1, N + 1)
    construct_multistep(layer, eta, t, W0, weight_decay=penalty)
    agree(1e-10, prefixes=(layer(s), every_prefix(x, y, loss, W0, eta, 2)))


def softmax_loss(W, x, y):
    return -(y * (x @ W.mT).log_softmax(-1)).sum(-1).mean()


def binary_loss(W, x, y):
    return F.binary_cross_entropy_with_logits(x @ W.mT, y)


@pytest.mark.parametrize("f, N", SIZES)
@pytest.mark.parametrize("K, loss, p", ((3, softmax_loss, 1 / 3), (1, binary_loss, 1 / 2)))
def test_cross_entropy_construction_is_gradient_descent_in_feature_space(f, N, K, loss, p):
    x = seeded(2, N + 1, f)
    label = torch.randint(K if K > 1 else 2, (2, N), generator=torch.Generator().manual_seed(1))
    y = F.one_hot(label, K).to(f64) if K > 1 else label[..., None].to(f64)
    torch.manual_seed(0)
    model = construct_softmax(ClassifierGRIL(f, K).to(f64), 0.7, torch.arange(1, N + 1))
    logits = model(interleave(*beside(x, y - p)))
    phi = (x + model.phi(x)).detach()
    agree(1e-10, logits=(logits.detach(), every_prefix(phi, y, loss, zeros(K, f), 0.7)))


def test_softmax_needs_no_residual_but_binary_does():
    """At W = 0: logits from y and y - 1/K differ by a constant; a single logit needs y - ½."""
    x, label = seeded(4, 6, 3), torch.randint(3, (4, 5), generator=torch.Generator().manual_seed(1))
    y = F.one_hot(label, 3).to(f64)
    model = construct_softmax(ClassifierGRIL(3, 3, identity=True).to(f64), 1.0, 5)
    agree(1e-12, probabilities=(model(interleave(*beside(x, y))).softmax(-1),
                                model(interleave(*beside(x, y - 1 / 3))).softmax(-1)))
    binary = construct_softmax(ClassifierGRIL(3, 1, identity=True).to(f64), 1.0, 5)
    y = (label > 0)[..., None].to(f64)
    p, expected = (binary(interleave(*beside(x, z))).sigmoid() for z in (y, y - 0.5))
    assert (p - expected).abs().max() > 0.01


@pytest.mark.parametrize("n_o", (1, 2, 5))
def test_targets_of_another_width_by_zero_padding(n_o):
    """n_o < f, n_o > f, scalar targets (App. A.1): all are the multivariate construction."""
    x, y, s = prompts(2, 7, 3, outputs=n_o)
    layer = construct_multivariate(GRIL(s.shape[-1]).to(f64), 0.7, torch.arange(1, 8))
    expected = every_prefix(x, y, squared, zeros(n_o, 3), 0.7)
    agree(1e-10, prediction=(layer(s)[..., :n_o], expected))
    assert not layer(s)[..., n_o:].any()                        # nothing leaks into the padding


@pytest.mark.parametrize("f, N", SIZES)
def test_two_tokens_are_enough_where_x_and_y_have_places_of_their_own(f, N):
    """Q adds x_{t+1} y_tᵀ to y_t x_tᵀ, in a block of the state that x_{t+1} does not read."""
    (x, y, _), Q, q = prompts(2, N, f), torch.tensor([[0, 0], [1, 0]]), torch.tensor([0, 1])
    steps = torch.arange(1, N + 1).repeat_interleave(2)         # windows (x_t, y_t), (y_t, x_{t+1})
    layer = construct(GRIL(2 * f, "w2").to(f64), 0.7, steps, Q=Q, q=q, A=1)
    o = layer(interleave(*beside(x, y)))[:, 1::2]                           # (B, N, 2f)
    agree(1e-10, prediction=(o[..., f:], every_prefix(x, y, squared, zeros(f, f), 0.7)))
    assert not o[..., :f].any()


EXTENDED = (NonlinearGRIL(4), NonlinearGRIL(4, layers=2), StateMLPGRIL(4), ClassifierGRIL(4, 3))


def test_gd_dagger_freezes_the_recurrence_and_trains_the_rest():
    for model in map(copy.deepcopy, EXTENDED):
        gd_dagger(model, 1.0, 5)
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        assert "linear.beta" in trainable and len(trainable) > 1
        assert not trainable & {"linear.Q", "linear.q", "linear.A"}
        step = model.linear.Q.reshape(-1, 3, 3)[0], model.linear.q, model.linear.A.unique()
        for weight, aim in zip(step, (torch.outer(*torch.eye(3)[[1, 0]]), torch.eye(3)[2], 1)):
            assert (weight == aim).all()
        assert (5 * model.linear.beta == 1).all()
        width = 7 if isinstance(model, ClassifierGRIL) else 4
        model(seeded(2, 11, width, dtype=f32)).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("form", ("query", "loop", "scan"))
@pytest.mark.parametrize("model", (
    GRIL(4), GRIL(4, "no_window"), GRIL(4, "no_readout"), GRIL(4, "w2"), MultistepGRIL(4, 3),
    MultistepGRIL(4, 1, loops=2), *EXTENDED, ScalarGRIL(5), ScalarGRIL(5, variant="neither"),
    EmbeddedGRIL(GRIL(6), 4, 6)),
    ids=lambda model: type(model).__name__)
def test_the_query_alone_is_the_last_of_all_predictions(model, form):
    s = seeded(3, 11, {ScalarGRIL: 11, ClassifierGRIL: 7}.get(type(model), 4))
    model = model.to(f64)
    model.form = form
    alone, last = model.query(s), model(s)[:, -1]
    got, expected = (torch.autograd.grad(y.square().sum(), list(model.parameters()),
                                         allow_unused=True) for y in (alone, last))
    gradients = {f"d{i}": pair for i, pair in enumerate(zip(got, expected)) if pair[1] is not None}
    agree(1e-11, prediction=(alone, last), **gradients)


def test_the_gated_unit():
    """Eq. 2 and App. B.4: y ⊙ σ(W GELU(y) + b) after the linear layer."""
    model, s = NonlinearGRIL(4).to(f64), seeded(2, 11, 4)
    y, gelu = model.linear(s), torch.nn.GELU()
    gate = torch.einsum("btf,gf->btg", gelu(y), model.U.weight) + model.U.bias
    agree(1e-12, output=(model(s), y / (1 + torch.exp(-gate))))


def test_state_mlp_with_zero_rho_is_the_linear_layer():
    torch.manual_seed(0)
    model = StateMLPGRIL(4).to(f64)
    for p in model.rho[-1].parameters():
        nn.init.zeros_(p)
    s = seeded(2, 11, 4)
    agree(1e-12, output=(model(s), model.linear(s)))


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_degrees_of_freedom_grow_as_f_squared():
    for f in (1, 10, 50):
        assert count(GRIL(f)) == f ** 2 + 3 * 3 + 3 + 1


# ----------------------------------------------------------------------------------- w = 1, windows

def test_w1_is_linear_self_attention_in_its_parallel_form():
    s, W_Q, W_K, W_V = (seeded(*shape, seed=i)
                        for i, shape in enumerate(((2, 9, 4), (4, 5), (4, 5), (4, 3))))
    parallel = ((s @ W_Q) @ (s @ W_K).mT).tril() @ (s @ W_V)    # causal LSA(S) = Q Kᵀ V, Sec. 3
    for form in (gril_loop, gril_scan):
        agree(1e-12, output=(linear_attention(s, W_Q, W_K, W_V, form=form), parallel))
    one, state = torch.ones(1, 1, dtype=f64), (zeros(2, 1, 3, 5), zeros(2, 1, 13, 0))
    v, k, u = ((s @ W)[:, :, None] for W in (W_V, W_K, W_Q))
    o, _ = gril_chunk(v, k, u, one[None], one, zeros(1, 5), None, state)
    agree(1e-12, chunk=(o[:, :, 0], parallel))


def test_mixer_of_w1_is_gated_linear_attention():
    torch.manual_seed(0)
    mixer = GrilMixer(8, 6, 1, w=1, gate="real").to(f64)
    z = seeded(2, 9, 8)
    log_rho, _, scale = mixer.gates()
    gamma, (v, k, u) = log_rho.exp(), (x[:, :, 0] for x in mixer.tokens(z, scale))
    distance = (torch.arange(9)[:, None] - torch.arange(9)).clamp(min=0)[..., None]
    scores = torch.einsum("btm,bsm,tsm->bts", u, k, gamma[0] ** distance).tril()
    scores = scores * mixer.Q.item() * mixer.q.item()
    agree(1e-12, output=(mixer(z), mixer.output((scores @ v)[:, :, None], z)))


def test_windows():
    s = torch.arange(1.0, 8)[None, :, None]                             # x1 y1 x2 y2 x3 y3 x4
    assert window(s, 3, 2, causal=False)[0, :, 0].tolist() == [[1, 2, 3], [3, 4, 5], [5, 6, 7]]
    assert window(s, 3)[0, :3, 0].tolist() == [[0, 0, 1], [0, 1, 2], [1, 2, 3]]
    assert window(s, 3).shape == (1, 7, 1, 3) and window(s[:, :1], 3).shape == (1, 1, 1, 3)
    x, y = seeded(2, 4, 3), seeded(2, 3, 3, seed=1)
    C = window(interleave(x, y), 3, 2, causal=False)                    # Eq. 9
    agree(0, x=(C[..., 0], x[:, :-1]), y=(C[..., 1], y), x_next=(C[..., 2], x[:, 1:]))


@pytest.mark.parametrize("variant, w", (("full", 3), ("w2", 2)))
def test_the_cross_product_is_the_sum_of_its_outer_products(variant, w):
    """Eq. 10: what a step adds to the state is Σ_ij Q_ij c_i c_jᵀ, over the window's columns."""
    torch.manual_seed(0)
    layer = GRIL(4, variant).to(f64)
    s = seeded(1, w, 4)                                                 # a single window
    expected = sum(layer.Q[i, j] * torch.outer(s[0, i], s[0, j])
                   for i, j in itertools.product(range(w), range(w)))
    C = window(s, w, causal=False)[:, :, None]
    for form in (gril_loop, gril_scan):
        _, Z = form(C, C, C, layer.Q, layer.q, layer.A)
        agree(1e-12, cross_product=(Z[0, 0], expected))


# ----------------------------------------------------------------------- loop = scan = chunk = step

def gate(name, J, d, m, dtype=f64):
    def draw(*shape, seed):
        return torch.rand(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    per_key = draw(J, 1, m, seed=3)
    return {"none": None, "ones": torch.ones_like(per_key), "zeros": torch.zeros_like(per_key),
            "1e-8": torch.full_like(per_key, 1e-8), "-1e-8": torch.full_like(per_key, -1e-8),
            "mixed": per_key, "negative": -per_key,
            "with 0 and 1": per_key.mul(3).clamp(max=1) * (per_key > 0.1),
            "complex": torch.polar(per_key, 9 * per_key),
            "complex 1": torch.polar(torch.ones_like(per_key), 9 * per_key),
            "per entry": draw(J, d, m, seed=4),
            "per entry complex": torch.polar(*draw(2, J, d, m, seed=5))}[name]


GATES = ["none", "ones", "zeros", "1e-8", "-1e-8", "mixed", "negative", "with 0 and 1", "complex",
         "complex 1"]
TOLERANCE = {f64: 1e-11, f32: 3e-5, torch.bfloat16: 2e-2}       # of outputs, states and gradients
WINDOWS = ("C_v", "C_k", "C_u")


def problem(T, gate_name, dtype=f64, B=2, J=3, d=4, m=5, w=3):
    """Operands of a form, gradients wanted, windows scaled so that outputs are of order one."""
    shapes = dict(C_v=(B, T, J, d, w), C_k=(B, T, J, m, w), C_u=(B, T, J, m, w),
                  Q=(J, w, w), q=(J, w), Z0=(B, J, d, m))
    inputs = {name: seeded(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    inputs["C_v"] /= w * math.sqrt(T if gate_name in ("none", "ones", "complex 1") else 1)
    inputs["A"] = gate(gate_name, J, d, m)
    if gate_name.endswith(("complex", "complex 1")):
        inputs["Z0"] = inputs["Z0"] * (1 + 1j)
    state = torch.promote_types(dtype, f32)
    return {name: leaf(x, dtype if name[0] == "C" else state) for name, x in inputs.items()}


def results(form, inputs, **options):
    """Outputs, final state and the gradient of every input, from both outputs and state."""
    outputs = [y for y in form(**inputs, **options) if y.numel()]
    wanted = {name: x for name, x in inputs.items() if x is not None and x.numel()}
    cotangents = [seeded(*y.shape, seed=8).to(y.dtype) for y in outputs]
    gradients = dict(zip(wanted, torch.autograd.grad(outputs, list(wanted.values()), cotangents)))
    if "theta" in gradients:                                    # of log γ = log ρ + iθ, one number
        gradients["gate"] = torch.complex(gradients.pop("log_rho"), gradients.pop("theta"))
    return dict(zip(("o", "Z", "past"), outputs), **{"d" + n: g for n, g in gradients.items()})


def leaf(x, dtype, scale=1):
    """x times scale in this dtype, or its complex one, with a gradient wanted."""
    if x is not None:
        dtype = dtype.to_complex() if x.is_complex() else dtype
        return (x.detach() * scale).to(dtype).requires_grad_()


def exactly(inputs):
    return {name: leaf(x, f64) for name, x in inputs.items()}


def plain(inputs):
    return {name: x if x is None else x.detach() for name, x in inputs.items()}


def compare(expected, got, tol):
    assert all(got[name].dtype == expected[name].dtype for name in expected), "dtypes differ"
    agree(tol, **in_double(got, expected))


def in_double(got, expected):
    return {name: (got[name].detach().to(torch.complex128), x.detach().to(torch.complex128))
            for name, x in expected.items()}


@pytest.mark.parametrize("T, gate_name", [
    *itertools.product((1, 2, 63, 500, 2048), GATES),
    *itertools.product((1, 2, 63, 500), ("per entry", "per entry complex"))])
def test_scan_equals_the_loop(T, gate_name):
    inputs = problem(T, gate_name)
    compare(results(gril_loop, inputs), results(gril_scan, inputs), TOLERANCE[f64])


@pytest.mark.parametrize("T", (1, 2, 3, 7, 8, 9, 64, 100))
@pytest.mark.parametrize("constant", (False, True))
@pytest.mark.parametrize("wide", (3, 600))                      # associative, and step by step
def test_the_scan_is_the_recurrence(T, constant, wide):
    """z_t = a_t z_{t-1} + b_t with complex numbers, and the gradient of a, b and z_0."""
    shapes = ((1, 1, wide) if constant else (2, T, wide), (2, T, wide), (2, wide))
    a, b, z0 = (torch.view_as_complex(seeded(*shape, 2, seed=i)).requires_grad_()
                for i, shape in enumerate(shapes))
    a = (a / 2).detach().requires_grad_()

    def loop(a, b, z):
        steps = []
        for t in range(T):
            z = a[:, 0 if constant else t] * z + b[:, t]
            steps.append(z)
        return torch.stack(steps, 1)
    cotangent = seeded(2, T, wide, seed=9).to(b.dtype)
    got, expected = ([z, *torch.autograd.grad(z, (a, b, z0), cotangent)]
                     for z in (scan(a, b, z0), loop(a, b, z0)))
    agree(1e-11, **dict(zip(("z", "da", "db", "dz0"), zip(got, expected))))


# The gates of gril_chunk: log ρ and θ. The smallest is e^(-80/L); a negative gate is an angle of π.
TOKEN_GATES = ("ones", "mixed", "smallest", "complex", "complex 1", "complex smallest", "negative")


def token_problem(T, gate_name, w=3, d=4, m=5, B=3, J=2, L=16):
    share = torch.rand(J, m, dtype=f64, generator=torch.Generator().manual_seed(3))
    log_rho = {"ones": 0 * share, "complex 1": 0 * share, "smallest": 0 * share - 80 / L,
               "complex smallest": 0 * share - 80 / L}.get(gate_name, -3 * share)
    theta = {"complex": 9 * share, "complex 1": 9 * share, "complex smallest": 9 * share,
             "negative": 0 * share + math.pi}.get(gate_name)
    shapes = dict(v=(B, T, J, d), k=(B, T, J, m), u=(B, T, J, m), Q=(J, w, w), q=(J, w),
                  Z=(B, J, d, m), past=(B, J, d + 2 * m, w - 1))
    inputs = {name: seeded(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    inputs["v"] = inputs["v"] / (math.sqrt(T) if gate_name in ("ones", "complex 1") else 1)
    inputs["Z"] = inputs["Z"] * (1 + 1j) if theta is not None else inputs["Z"]
    return exactly(dict(inputs, log_rho=log_rho, theta=theta))


def by_chunk(v, k, u, Q, q, Z, past, log_rho, theta, L=16):
    o, (Z, past) = gril_chunk(v, k, u, Q, q, log_rho, theta, (Z, past), L)
    return o, Z, past


def by_windows(v, k, u, Q, q, A, Z, past, form):
    """What gril_chunk computes, as windows and another form."""
    w, sizes = Q.shape[-1], [v.shape[-1], k.shape[-1], k.shape[-1]]
    tokens = torch.cat([past, torch.cat([v, k, u], -1).permute(0, 2, 3, 1)], -1)
    windows = tokens.unfold(-1, w, 1).movedim(3, 1).split(sizes, -2)
    o, Z = form(*windows, Q, q, A, Z)
    return o, Z, tokens[..., tokens.shape[-1] - (w - 1):]


def by_loop(v, k, u, Q, q, Z, past, log_rho, theta):
    return by_windows(v, k, u, Q, q, complex_gate(log_rho, theta), Z, past, gril_loop)


@pytest.mark.parametrize("T, w, d, m, L", (
    (1, 3, 4, 5, 16), (2, 2, 4, 5, 16), (9, 3, 8, 8, 16), (16, 3, 4, 5, 16), (63, 3, 4, 5, 16),
    (63, 1, 4, 5, 16), (50, 4, 4, 5, 16), (100, 3, 20, 24, 32), (500, 3, 3, 2, 16),
    pytest.param(700, 3, 4, 3, 64, marks=pytest.mark.slow),
    pytest.param(4500, 3, 2, 1, 16, marks=pytest.mark.slow)))
@pytest.mark.parametrize("gate_name", TOKEN_GATES)
def test_chunk_equals_the_loop(T, w, d, m, L, gate_name):
    """Outputs, next state, gradient of every input; a chunk, groups of them, groups of groups."""
    inputs = token_problem(T, gate_name, w, d, m, L=L)
    compare(results(by_loop, inputs), results(by_chunk, inputs, L=L), TOLERANCE[f64])


# Each form with its reference, its inputs and its gates; of the inputs these have a time axis.
KINDS = {"loop": (gril_loop, gril_loop, problem, GATES),
         "scan": (gril_scan, gril_loop, problem, GATES),
         "chunk": (by_chunk, by_loop, token_problem, TOKEN_GATES)}
TIMED = (*WINDOWS, "v", "k", "u")


@pytest.mark.parametrize("dtype", (f32, torch.bfloat16))
@pytest.mark.parametrize("kind, gate_name", [(kind, g) for kind in KINDS for g in KINDS[kind][-1]])
def test_lower_precision_inputs_keep_a_float32_state(kind, gate_name, dtype):
    """Against the float64 loop on the same rounded inputs: the state loses what float32 does.

    Also with a chunk's smallest gates, whose inverse powers must not overflow into anything.
    """
    form, reference, make, _ = KINDS[kind]
    inputs = {n: leaf(x, dtype if n in TIMED else f32) for n, x in make(200, gate_name).items()}
    got, expected = results(form, inputs), results(reference, exactly(inputs))
    assert got["o"].dtype == dtype and got["Z"].dtype in (f32, torch.complex64)
    pairs = in_double(got, expected)
    agree(TOLERANCE[f32], Z=pairs.pop("Z"))
    agree(TOLERANCE[dtype], **pairs)


@pytest.mark.parametrize("kind, gate_name, w", [
    *itertools.product(KINDS, ("mixed", "complex"), (1, 3)), ("loop", "none", 3),
    ("scan", "none", 3)])
def test_a_sequence_cut_anywhere_and_continued_is_the_uncut_one(kind, gate_name, w):
    form, _, make, _ = KINDS[kind]
    inputs = plain(make(40, gate_name, w=w))
    states = [n for n in ("Z0", "Z", "past") if n in inputs]
    o, *end = form(**inputs)
    for at in range(1, 40):
        first, second = (dict(inputs, **{n: x[:, part] for n, x in inputs.items() if n in TIMED})
                         for part in (slice(at), slice(at, 40)))
        o1, *state = form(**first)
        o2, *state = form(**dict(second, **dict(zip(states, state))))
        agree(1e-12, o=(torch.cat([o1, o2], 1), o),
              **{n: pair for n, pair in zip(states, zip(state, end)) if pair[0].numel()})


@pytest.mark.parametrize("form, inputs", [
    *((gril_scan, problem(5, name, B=1, J=2, d=2, m=3, w=2))
      for name in ("none", "mixed", "zeros", "complex")),
    *((by_chunk, token_problem(17, name, w=2, d=1, m=2, B=1, J=1))
      for name in ("mixed", "smallest", "complex"))])
def test_gradcheck(form, inputs):
    names = [n for n, x in inputs.items() if x is not None]
    assert torch.autograd.gradcheck(lambda *xs: form(**dict(inputs, **dict(zip(names, xs)))),
                                    [inputs[n] for n in names])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate_name", ("mixed", "complex"))
def test_forms_are_causal_to_the_bit(kind, gate_name):
    form, _, make, _ = KINDS[kind]
    dtype = f64 if kind == "chunk" else f32
    inputs = plain({n: leaf(x, dtype) for n, x in make(40, gate_name).items()})
    o = form(**inputs)[0]
    for t in (0, 1, 7, 15, 16, 30, 38):
        changed = {n: torch.cat([x[:, :t + 1], x[:, t + 1:] + 1], 1) if n in TIMED else x
                   for n, x in inputs.items()}
        got = form(**changed)[0]
        assert torch.equal(got[:, :t + 1], o[:, :t + 1]), f"a later token changed outputs up to {t}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gate_name", ("mixed", "complex"))
def test_no_form_reads_values(kind, gate_name):
    """On the meta device a look at any value raises; on a GPU it would wait for the device."""
    form, _, make, _ = KINDS[kind]
    inputs = {n: x if x is None else x.detach().to("meta").requires_grad_()
              for n, x in make(600 if kind == "chunk" else 70, gate_name).items()}
    o, Z, *_ = form(**inputs)
    (o.sum() + Z.abs().sum()).backward()
    assert all(x.grad.shape == x.shape for n, x in inputs.items() if n in ("A", "log_rho"))


def test_the_memory_of_chunk_grows_with_its_tokens_alone():
    """What is kept for the backward pass: arrays of the tokens' size, never T states of d × m."""
    sizes = []
    for T in (512, 1024):
        inputs, kept = token_problem(T, "mixed", d=32, m=32, L=32), {}

        def keep(x):
            kept[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
            return x
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            result = by_chunk(**inputs, L=32)                   # noqa: F841, alive while counted
        sizes.append(sum(kept.values()))
    assert sizes[1] < 2.1 * sizes[0] and sizes[1] < 15 * sum(inputs[n].nbytes for n in "vku")


@pytest.mark.parametrize("form", (gril_loop, gril_scan))
def test_a_state_of_bfloat16_tokens_is_float32_without_gate_and_start(form):
    C_v, C_k, Q = (torch.ones(*shape, dtype=torch.bfloat16)
                   for shape in ((1, 600, 1, 2, 1), (1, 600, 1, 3, 1), (1, 1)))
    o, Z = form(C_v, C_k, C_k, Q, Q[0], None)
    assert Z.dtype == f32 and o.dtype == torch.bfloat16
    assert (Z == 600).all()                                     # bfloat16 would stop at 256


@pytest.mark.parametrize("gate_name", ("none", "mixed", "zeros", "complex"))
@pytest.mark.parametrize("w", (1, 2, 3))
def test_step_equals_the_loop(gate_name, w):
    """Token by token with Z and the last w-1 tokens carried: outputs, state and every gradient."""
    B, T, J, d, m = 2, 9, 3, 4, 5
    shapes = dict(v=(B, T, J, d), k=(B, T, J, m), u=(B, T, J, m), Q=(J, w, w), q=(J, w),
                  Z0=(B, J, d, m))
    inputs = {name: seeded(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    inputs = exactly(dict(inputs, A=gate(gate_name, J, d, m)))

    def parallel(v, k, u, Q, q, Z0, A):
        C_v, C_k, C_u = (window(x.flatten(2), w).unflatten(2, (J, -1)) for x in (v, k, u))
        return gril_loop(C_v, C_k, C_u, Q, q, A, Z0)

    def streamed(v, k, u, Q, q, Z0, A):
        o, state = [], (Z0, v.new_zeros(B, J, d + 2 * m, w - 1))
        for t in range(T):
            o_t, state = gril_step(v[:, t], k[:, t], u[:, t], Q, q, A, state)
            o.append(o_t)
        return torch.stack(o, 1), state[0]
    compare(results(parallel, inputs), results(streamed, inputs), TOLERANCE[f64])


def test_no_form_overflows_for_any_gate_up_to_one():
    """float32, 2,000 steps, gates from 0 over 1e-38 to 1: all finite, and equal to the loop."""
    inputs = problem(2000, "mixed", f32, B=1, J=1, m=10)
    inputs["A"] = leaf(torch.tensor([0, 1e-38, 1e-20, 1e-8, 0.1, 0.5, 0.999, 1, -1, -0.3]), f32)
    expected, got = results(gril_loop, inputs), results(gril_scan, inputs)
    assert all(x.isfinite().all() for x in got.values())
    compare(expected, got, 1e-4)                                        # 2,000 float32 additions


# ----------------------------------------------------------------------------------------- extremes

def by_size(expected, got, tol):
    """Each tensor within tol of its own size, be that 1e-30 or 1e30."""
    sizes = {name: x.abs().max().item() or 1.0 for name, x in expected.items()}
    pairs = in_double(got, expected)
    agree(tol, **{n: (pairs[n][0] / size, pairs[n][1] / size) for n, size in sizes.items()})


def scaled(inputs, scale):
    """Inputs times scale, states (of two inputs) times its square, in float32; weights as is."""
    powers = dict.fromkeys((*TIMED, "past"), 1) | dict(Z0=2, Z=2)
    return {n: leaf(x, f32, scale ** powers.get(n, 0)) for n, x in inputs.items()}


@pytest.mark.parametrize("scale", (1e-10, 1e10))
@pytest.mark.parametrize("gate_name", GATES)
def test_forms_hold_inputs_of_1e10_and_1e_minus_10(scale, gate_name):
    """float32: outputs of 1e±30, states and every gradient to float32's precision."""
    inputs = scaled(problem(100, gate_name), scale)
    expected = results(gril_loop, exactly(inputs))
    for form in (gril_loop, gril_scan):
        by_size(expected, results(form, inputs), TOLERANCE[f32])


@pytest.mark.parametrize("scale, gate_name", [
    *((scale, name) for scale in (1e-5, 1e5) for name in TOKEN_GATES),
    *((scale, name) for scale in (1e-10, 1e10) for name in ("ones", "complex 1"))])
def test_chunk_holds_small_and_large_tokens(scale, gate_name):
    """1e±5 with any gate; 1e±10 where no power of the gate is large or small."""
    inputs = scaled(token_problem(100, gate_name), scale)
    by_size(results(by_loop, exactly(inputs)), results(by_chunk, inputs), TOLERANCE[f32])


@pytest.mark.parametrize("dtype, tol", ((f64, 1e-11), (f32, 3e-5)))
@pytest.mark.parametrize("scale", (1e-10, 1.0, 1e10))
@pytest.mark.parametrize("target", ("linear", "all equal", "all zero"))
def test_the_construction_holds_at_any_scale_and_with_equal_targets(scale, target, dtype, tol):
    x = (scale * seeded(2, 9, 3)).to(dtype)
    y = {"linear": x @ seeded(3, 3, seed=1).to(dtype), "all equal": torch.full_like(x, 0.7 * scale),
         "all zero": 0 * x}[target]
    eta = 0.7 / scale ** 2
    layer = construct_multivariate(GRIL(3).to(dtype), eta, torch.arange(1, 9))
    expected = every_prefix(x.double(), y[:, :-1].double(), squared, zeros(3, 3), eta)
    by_size(dict(prefixes=expected), dict(prefixes=layer(interleave(x, y[:, :-1]))), tol)


@pytest.mark.parametrize("Layer", (GRIL, ScalarGRIL, lambda f: MultistepGRIL(f, 2)))
def test_a_gate_of_zero_or_one_trains(Layer):
    """Gates of exactly 0, 1, -1: the query is the last prediction, no gradient is lost to 0⁰."""
    torch.manual_seed(0)
    layer, s = Layer(4).to(f64), seeded(3, 11, 9 if Layer is ScalarGRIL else 4)
    with torch.no_grad():
        layer.A.copy_(torch.tensor([0.0, 1.0, -1.0, 0.5]).expand_as(layer.A))
    wanted = dict(layer.named_parameters())
    alone, last = (torch.autograd.grad(y.square().sum(), list(wanted.values()))
                   for y in (layer.query(s), layer(s)[:, -1]))
    agree(1e-11, **{name: pair for name, pair in zip(wanted, zip(alone, last))})
    assert all(g.abs().sum() > 0 for g in alone)


@pytest.mark.parametrize("gate_name", ("real", "complex"))
@pytest.mark.parametrize("nu, radius", (
    *((nu, 1) for nu in (-math.inf, -200.0, -20.0)),
    *((nu, math.exp(-5)) for nu in (3.0, 200.0, math.inf))))
def test_a_mixers_gate_may_reach_its_bounds(gate_name, nu, radius):
    """In float32, however far ν has gone: all forms agree, a stream too; gradients are finite."""
    x, expected = seeded(2, 20, 8, dtype=f32), None
    for form in ("loop", "scan", "chunk"):
        torch.manual_seed(0)
        mixer = GrilMixer(8, 8, 2, gate=gate_name, form=form)
        torch.nn.init.constant_(mixer.nu, nu)
        agree(1e-7, radius=(mixer.gates()[0].exp(), torch.full((2, 4), float(radius))))
        y = mixer(x)
        gradients = torch.autograd.grad(y.square().sum(), list(mixer.parameters()))
        assert all(g.isfinite().all() for g in gradients)
        expected = y if expected is None else expected
        agree(1e-5, **{form: (y, expected)})
    agree(1e-5, stream=(streamed([mixer], x), expected))


def streamed(layers, x):
    """Token by token through all layers."""
    states, outputs = [None] * len(layers), []
    for y in x.unbind(1):
        for i, layer in enumerate(layers):
            y, states[i] = layer.step(y, states[i])
        outputs.append(y)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("P, L", ((8, 16), (32, 16), (64, 32), (256, 64)))
def test_gates_start_inside_their_bounds(P, L):
    for r in (0.0, 1.0):
        mixer = GrilMixer(8, P, 2, r_min=r, r_max=r)
        rho = mixer.gates()[0].exp()
        assert mixer.nu.isfinite().all() and abs(rho - max(r, math.exp(-80 / L))).max() < 1e-5
    assert GrilMixer(8, P, 2, max_phase=0.0).theta.isfinite().all()
    for r_min, r_max in ((0.5, 1.1), (-0.1, 0.5), (0.9, 0.5)):
        with pytest.raises(ValueError, match=f"r_min = {r_min} and r_max = {r_max}"):
            GrilMixer(8, 8, 2, r_min=r_min, r_max=r_max)


STREAMS = pytest.mark.parametrize("T", (5_000, pytest.param(1_000_000, marks=pytest.mark.slow)))


@STREAMS
@torch.no_grad()
def test_a_stream_does_not_drift(T):
    """float32, token by token, against float64: within 1e-4 of the output after a million tokens.

    The sums of a gate of 1 lose a little with every token, √T in all; with gates inside the circle
    the error does not grow. Tokens have a mean, so that the sums grow as T. Real gates run as
    complex ones beside the others.
    """
    d, m, w, stretch = 3, 4, 3, 500
    radius = torch.rand(m, generator=torch.Generator().manual_seed(1))
    one = torch.ones_like(radius)
    gamma = dict(zeros=0 * radius, ones=one, mixed=radius, turning=torch.polar(one, 9 * radius),
                 spiral=torch.polar(radius, 9 * radius))
    names, gamma = list(gamma), torch.stack([row.to(torch.complex64) for row in gamma.values()])

    def double(*tensors):
        return [leaf(x, f64) for x in tensors]
    J = len(names)
    weights = seeded(J, w, w, seed=3, dtype=f32), seeded(J, w, seed=4, dtype=f32)
    state = torch.zeros(1, J, d, m, dtype=torch.complex64), torch.zeros(1, J, d + 2 * m, w - 1)
    exact, errors = double(*state), []
    for start in range(0, T, stretch):
        tokens = seeded(1, stretch, J, d + 2 * m, seed=start, dtype=f32) + 0.3
        v, k, u = tokens.split([d, m, m], -1)
        outputs = []
        for v_t, k_t, u_t in zip(v.unbind(1), k.unbind(1), u.unbind(1)):
            o, state = gril_step(v_t, k_t, u_t, *weights, gamma[:, None], state)
            outputs.append(o)
        expected, *exact = by_windows(*double(v, k, u, *weights, gamma[:, None]), *exact, gril_scan)
        error = torch.stack(outputs, 1) - expected
        errors.append(error.abs().amax((0, 1, 3)) / expected.abs().amax((0, 1, 3)))
    errors = torch.stack(errors)                                        # (stretches, J)
    print({name: f"{error:.1e}" for name, error in zip(names, errors.amax(0).tolist())})
    bounds = dict(zeros=2e-6, ones=1e-4, mixed=2e-6, turning=1e-4, spiral=2e-6)
    for name, error in zip(names, errors.mT):
        agree(bounds[name], **{name: (error, 0 * error)})


@STREAMS
@torch.no_grad()
def test_two_blocks_with_their_state_handed_on_do_not_drift(T):
    """The block, 99 tokens at once and then one by itself: within 1e-4, from start to end."""
    torch.manual_seed(0)
    blocks = [Block(GrilMixer(8, 8, 2), 8) for _ in range(2)]
    exact, stretch, errors = copy.deepcopy(blocks), 5_000, []
    states, exact_states = [None, None], [None, None]
    for start in range(0, T, stretch):
        x, parts = seeded(1, stretch, 8, seed=start, dtype=f32), []
        for part in x.split(100, 1):
            many, one = part[:, :-1], part[:, -1]
            for i, block in enumerate(blocks):
                many, states[i] = block.run(many, states[i])
                one, states[i] = block.step(one, states[i])
            parts += [many, one[:, None]]
        expected = x.double()
        for i, block in enumerate(exact):
            expected, exact_states[i] = block.double().run(expected, exact_states[i])
        errors.append((torch.cat(parts, 1) - expected).abs().max() / expected.abs().max())
    errors = torch.stack(errors)
    print(f"{errors.max():.1e}")
    tenth = max(1, len(errors) // 10)
    assert errors.max() < 1e-4 and errors[-tenth:].max() < 3 * errors[:tenth].max()


# ------------------------------------------------------------------------------- the sequence block

PAPER_SIZES = dict(listops=(128, 8, 32), text=(256, 16, 128), retrieval=(128, 16, 256),  # H, J, P
                   image=(512, 2, 256), pathfinder=(256, 16, 128), wikitext=(768, 32, 128))


@pytest.mark.parametrize("H, J, P", PAPER_SIZES.values(), ids=PAPER_SIZES)
def test_block_parameter_count(H, J, P):
    with torch.device("meta"):
        parameters = count(Block(GrilMixer(H, P, J), H))
    quadratic = 2 * H * H + 2 * P * H + 2 * P * P
    assert parameters - quadratic == 5 * H + 2 * P + 13 * J     # norm, D, GLU bias; ν, θ; Q, q, β


@pytest.mark.parametrize("form", ("loop", "scan", "chunk"))
@pytest.mark.parametrize("gate_name", ("real", "complex"))
@pytest.mark.parametrize("w", (1, 3))
def test_stacked_blocks_streamed_equal_their_parallel_forward(form, gate_name, w):
    torch.manual_seed(0)
    blocks = [Block(GrilMixer(8, 12, 3, w=w, gate=gate_name, form=form), 8).to(f64)
              for _ in range(3)]
    x = seeded(2, 37, 8)
    agree(1e-11, output=(streamed(blocks, x), nn.Sequential(*blocks)(x)))
    y1, state = blocks[0].run(x[:, :5])                         # in stretches, the state handed on
    y2, state = blocks[0].run(x[:, 5:6], state)
    y3, state = blocks[0].run(x[:, 6:], state)
    agree(1e-11, stretches=(torch.cat([y1, y2, y3], 1), blocks[0](x)))
    y, state = blocks[0].step(x[:, 0], state)                   # a stream goes on from a stretch
    expected = blocks[0](torch.cat([x, x[:, :1]], 1))[:, -1]
    agree(1e-11, after=(y, expected))


def test_the_block_adds_its_mixer_to_what_it_normed():
    block, x = Block(GrilMixer(8, 8, 2), 8).to(f64), seeded(2, 9, 8)
    x_0 = x - x.mean(-1, keepdim=True)
    normed = x_0 / (x_0.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    agree(1e-12, y=(block(x), x + block.mixer(normed)))


@pytest.mark.parametrize("gate_name", ("real", "complex"))
def test_block_forms_agree_in_outputs_and_gradients(gate_name):
    x, expected = seeded(2, 50, 8).requires_grad_(), None
    for form in ("loop", "scan", "chunk"):
        torch.manual_seed(0)
        block = Block(GrilMixer(8, 12, 3, gate=gate_name, form=form), 8).to(f64)
        y = block(x)
        wanted = dict(block.named_parameters(), x=x)
        gradients = torch.autograd.grad(y.square().sum(), list(wanted.values()))
        got = dict(y=y, **{"d" + n: g for n, g in zip(wanted, gradients)})
        expected = expected or got
        compare(expected, got, 1e-10)


@pytest.mark.parametrize("form", ("loop", "scan", "chunk"))
def test_block_is_causal(form):
    torch.manual_seed(0)
    block, x = Block(GrilMixer(8, 8, 2, form=form), 8), seeded(1, 40, 8, dtype=f32)
    changed = torch.cat([x[:, :21], x[:, 21:] + 1], 1)
    assert torch.equal(block(x)[:, :21], block(changed)[:, :21])
    assert not torch.equal(block(x)[:, 21:], block(changed)[:, 21:])


def test_lru_initialisation():
    """|λ|² uniform in [r_min², r_max²], phase in [0, max_phase]; a read-out of order one."""
    torch.manual_seed(0)
    mixer = GrilMixer(64, 4096, 64, r_min=0.5, r_max=0.9, max_phase=1.0)
    log_rho, theta, scale = mixer.gates()
    squares = (2 * log_rho).exp().flatten()
    assert 0.25 <= squares.min() and squares.max() <= 0.81
    assert abs(squares.mean() - 0.53) < 0.01 and abs(squares.std() - 0.56 / math.sqrt(12)) < 0.01
    assert abs(theta.mean() - 0.5) < 0.02 and theta.max() <= 1
    agree(1e-5, scale=(scale.flatten(), ((1 - squares) / 64).sqrt()))
    mixer = GrilMixer(128, 256, 16)
    seen = []
    mixer.output = lambda o, z: seen.append(o)
    mixer.run(seeded(4, 500, 128, dtype=f32))
    assert 0.5 < seen[0].std() < 2


def test_block_under_autocast_keeps_its_state_in_float32():
    torch.manual_seed(0)
    block, x = Block(GrilMixer(16, 16, 4), 16), seeded(2, 100, 16, dtype=f32)
    no_mkldnn = torch.backends.mkldnn.flags(enabled=False)      # not every CPU has its bfloat16
    with torch.autocast("cpu", torch.bfloat16), no_mkldnn:
        y, (Z, past) = block.run(x)
        y1, _ = block.step(x[:, 0], (Z, past))
    assert Z.dtype == torch.complex64 and past.dtype == f32 and y1.isfinite().all()
    agree(0.05, output=(y.float(), block(x)))


@pytest.mark.parametrize("form", ("loop", "scan", "chunk"))
def test_block_on_the_meta_device(form):
    with torch.device("meta"):
        block, x = Block(GrilMixer(16, 16, 4, form=form), 16), torch.randn(2, 50, 16)
        block(x).sum().backward()
    assert all(p.grad is not None and p.grad.is_meta for p in block.parameters())


def test_the_gates_are_made_once_a_layer(monkeypatch):
    calls, gates = [], GrilMixer.gates
    monkeypatch.setattr(GrilMixer, "gates", lambda self: calls.append(self) or gates(self))
    Block(GrilMixer(8, 8, 2), 8)(seeded(1, 20, 8, dtype=f32))
    assert len(calls) == 1


@pytest.mark.parametrize("gate_name", ("real", "complex"))
@pytest.mark.parametrize("backend", ("eager", pytest.param("inductor", marks=pytest.mark.slow)))
def test_a_blocks_loss_compiles_into_one_graph(gate_name, backend):
    torch.manual_seed(0)
    block = Block(GrilMixer(16, 16, 2, gate=gate_name), 16)
    x = leaf(seeded(2, 40, 16), f32)

    def loss(x):
        return block(x).square().mean()
    torch.compiler.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True, dynamic=False)
    got, expected = ([y, *torch.autograd.grad(y, [x, *block.parameters()])]
                     for y in (compiled(x), loss(x)))
    agree(1e-4, **{f"{i}": pair for i, pair in enumerate(zip(got, expected))})


# ---------------------------------------------------------------------------------------- bad input

@pytest.mark.parametrize("call, message", (
    (lambda: window(torch.zeros(2, 3, dtype=torch.long)[..., None]), "embed integer tokens"),
    (lambda: window(torch.zeros(2, 3)), r"\(2, 3\)"),
    (lambda: window(torch.zeros(2, 0, 3)), "empty sequence"),
    (lambda: window(torch.zeros(2, 2, 3), causal=False), "3 is longer than the sequence of 2"),
    (lambda: GRIL(3)(torch.zeros(2, 2, 3)), "window of 3 is longer"),
    (lambda: GRIL(3)(torch.zeros(2, 5, 4)), r"A \(3, 3\) does not .*\(J, d, m\) = \(1, 4, 4\)"),
    (lambda: GRIL(3, variant="no_windows"), "There are: full, no_window"),
    (lambda: ScalarGRIL(3, variant="none"), "There are: full, no_input"),
    (lambda: ScalarGRIL(3, hidden=2), "cannot hold the gradient of 3 weights"),
    (lambda: EmbeddedGRIL(GRIL(3), 4, 3), "width 4 do not fit an embedding of width 3"),
    (lambda: GrilMixer(8, 10, 3), "P = 10 is not divisible by J = 3"),
    (lambda: GrilMixer(8, 8, 2, gate="imaginary"), "real, complex"),
    (lambda: GrilMixer(8, 8, 2)(torch.zeros(2, 0, 8)), "empty sequence"),
    (lambda: GrilMixer(8, 8, 2, form="fast"), "There are: loop, scan, chunk"),
))
def test_bad_input_is_answered_with_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("form", (gril_loop, gril_scan))
@pytest.mark.parametrize("change, message", (
    (dict(C_k=torch.zeros(2, 4, 3, 5, 3)), r"C_k \(2, 4, 3, 5, 3\)"),
    (dict(C_u=torch.zeros(2, 9, 3, 4, 3)), r"C_u \(2, 9, 3, 4, 3\) does not broadcast"),
    (dict(C_v=torch.zeros(2, 9, 3, 4)), r"C_v \(2, 9, 3, 4\)"),
    (dict.fromkeys(WINDOWS, torch.zeros(2, 0, 3, 4, 3)) | dict(A=None, Z0=None), "empty sequence"),
    (dict(C_v=torch.zeros(2, 9, 3, 4, 3, dtype=torch.long)), "C_v must be floating.*torch.int64"),
    (dict(Q=torch.zeros(3, 2, 3)), r"Q \(3, 2, 3\) does not .* \(J, w, w\) = \(3, 3, 3\)"),
    (dict(q=torch.zeros(3, 2)), r"q \(3, 2\) does not broadcast to \(J, n\) = \(3, 3\)"),
    (dict(A=torch.ones(3, 1, 4)), r"\(3, 1, 4\) does not .* \(J, d, m\) = \(3, 4, 5\)"),
    (dict(A=torch.ones(3, 1, 5, dtype=torch.long)), "A must be floating"),
    (dict(Z0=torch.zeros(2, 3, 4, 4)), r"Z0 \(2, 3, 4, 4\) does not .* \(B, J, d, m\)"),
))
def test_forms_refuse_shapes_that_do_not_fit(form, change, message):
    with pytest.raises(ValueError, match=message):
        form(**{**problem(9, "mixed"), **change})

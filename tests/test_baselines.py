"""Each baseline is the recurrence of its paper: equations, steps, any state, causality."""
import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import lm
import lra
import train
from baselines import (LRU, MODELS, RGLRU, S5, Attention, CausalConv, DeltaNet, Filtered, GatedMLP,
                       GatedRecurrent, Griffin, LinearAttention, Longhorn, Mamba, Model, Pairs,
                       RecurrentBlock, Stack, Transformer, griffin_mixer, hippo, make, offered,
                       parameters, recipe, rotate, state_size)
from gril import GRIL, Block, GrilMixer, MultistepGRIL, ScalarGRIL, interleave
from tasks import TASKS, gradient_descent, query
from test_gril import agree, seeded

f64 = torch.float64
H = 8
MIXERS = {
    "S5":               lambda: S5(H, P=12, J=3),
    "LRU":              lambda: LRU(H, P=12),
    "Mamba":            lambda: Mamba(H, N=3),
    "Longhorn":         lambda: Longhorn(H, N=3),
    "DeltaNet":         lambda: DeltaNet(H, heads=2),
    "Filtered":         lambda: Filtered(H, 8, 2),
    "LinearAttention":  lambda: LinearAttention(H, heads=2),
    "Attention":        lambda: Attention(H, heads=2),
    "local attention":  lambda: Attention(H, heads=4, kv_heads=1, window=5),
    "CausalConv":       lambda: CausalConv(H),
    "RGLRU":            lambda: RGLRU(H, blocks=2),
    "RecurrentBlock":   lambda: RecurrentBlock(H, 12, blocks=3),
    "Griffin":          lambda: Griffin(H, heads=2),
    "Transformer":      lambda: Transformer(H, heads=2),
}
NETWORKS = [name for name in offered("in_context") if name != "linear_attention_pairs"]


def built(name):
    torch.manual_seed(0)
    return MIXERS[name]().to(f64)


@pytest.fixture
def network(name):
    """Two layers of the named network, on tokens of width 4."""
    torch.manual_seed(0)
    return make(name, 4, 3, H, layers=2)


def leaves(state):
    """The tensors of a state, however it is nested, but for a past of no tokens."""
    return [x for x in tree_leaves(state) if x is not None and x.numel()]


def in_parts(model, x, *sizes):
    """Stretches of these sizes and the rest, each from the state before; without sizes, steps."""
    parts = x.split([*sizes, x.shape[1] - sum(sizes)], 1) if sizes else x.unbind(1)
    y, state = [], None
    for part in parts:
        y_part, state = (model.run if sizes else model.step)(part, state)
        y.append(y_part)
    return torch.cat(y, 1) if sizes else torch.stack(y, 1), state


def results(model, x, run):
    """Output, state, and the gradient of x and every parameter; it flows in through both."""
    y, state = run(x)
    out = {"y": y, **{f"state {i}": s for i, s in enumerate(leaves(state))}}
    wanted = {"x": x, **dict(model.named_parameters())}
    cotangents = [seeded(*o.shape, seed=i).to(o.dtype) for i, o in enumerate(out.values())]
    gradients = torch.autograd.grad(list(out.values()), list(wanted.values()), cotangents)
    return {**out, **{"d" + name: g for name, g in zip(wanted, gradients)}}


# ---------------------------------------------------------------------- the equations of each paper

def legs(n):
    """HiPPO-LegS as S4 prints it, entry by entry, and the rank-one term that makes it normal."""
    def entry(i, k):
        return -math.sqrt((2 * i + 1) * (2 * k + 1)) if i > k else -(i + 1.0) if i == k else 0.0
    A = torch.tensor([[entry(i, k) for k in range(n)] for i in range(n)], dtype=f64)
    p = (torch.arange(n, dtype=f64) + 0.5).sqrt()
    return A, torch.outer(p, p)


def hold(A, B):
    """Zero-order hold over one unit of time: exp [[A, B], [0, 0]] = [[Ā, B̄], [0, 1]]."""
    n, m = B.shape
    M = torch.linalg.matrix_exp(torch.cat([torch.cat([A, B], 1), A.new_zeros(m, n + m)]))
    return M[:n, :n], M[:n, n:]


def ssm(A, B, C, D, u):
    x, y = A.new_zeros(len(u), len(A)), []
    for u_t in u.unbind(1):
        x = x @ A.mT + u_t.to(B.dtype) @ B.mT
        y.append((x @ C.mT).real + D * u_t if C.is_complex() else x @ C.mT + D * u_t)
    return torch.stack(y, 1)


def s5_unit(layer, y):
    """Of S5's code, half_glu2 as in its experiments: g ⊙ σ(W g), one matrix."""
    return F.gelu(y) * torch.sigmoid(F.gelu(y) @ layer.W.weight.mT + layer.W.bias)


def lru_unit(layer, y):
    """Orvieto et al.'s GLU: two matrices, W_1 g ⊙ σ(W_2 g)."""
    (W_1, W_2), (b_1, b_2) = layer.glu.weight.chunk(2), layer.glu.bias.chunk(2)
    return (F.gelu(y) @ W_1.mT + b_1) * torch.sigmoid(F.gelu(y) @ W_2.mT + b_2)


def pairs(z):
    """Both members of every conjugate pair along the first axis."""
    return torch.cat([z, z.conj()])


def test_s5_is_the_dense_system_with_both_members_of_each_pair():
    layer, u = built("S5"), seeded(2, 30, H)
    Lambda = torch.complex(layer.Lambda_re, layer.Lambda_im)
    B, C = map(torch.view_as_complex, (layer.B, layer.C))
    Delta = pairs(layer.log_Delta.exp())[:, None]
    A_bar, B_bar = hold(Delta * pairs(Lambda).diag(), Delta * pairs(B))
    expected = ssm(A_bar, B_bar, pairs(C.mT).mT, layer.D, u)
    agree(1e-12, y=(layer(u), s5_unit(layer, expected)))


@torch.no_grad()
def test_s5_starts_as_blocks_of_the_real_hippo_system():
    """With one timescale: x' = A x + B u in real coordinates, A block-diagonal HiPPO-N.

    C̃ = C V is half of a real read-out, whatever complex C was.
    """
    layer, u, h, J = built("S5"), seeded(2, 30, H), 4, 3
    layer.log_Delta.fill_(math.log(0.05))
    A, rank_one = legs(h)
    V = torch.block_diag(*[hippo(h)[1]] * J)                                # (P, P/2)
    B = 2 * (V @ torch.view_as_complex(layer.B)).real               # back from B̃ = V⁻¹ B, C̃ = C V
    C = 2 * (torch.view_as_complex(layer.C) @ V.mH).real
    A_bar, B_bar = hold(0.05 * torch.block_diag(*[A + rank_one] * J), 0.05 * B)
    expected = s5_unit(layer, ssm(A_bar, B_bar, C, layer.D, u))
    agree(1e-6, y=(layer(u), expected))         # weights were rounded to float32


def test_lru_is_its_recurrence():
    layer, u = built("LRU"), seeded(2, 30, H)
    Lambda = torch.exp(torch.complex(-layer.nu.exp(), layer.theta.exp()))
    B = layer.log_gamma.exp()[:, None] * torch.complex(*layer.B.unbind(-1))
    expected = ssm(Lambda.diag(), B, 2 * torch.complex(*layer.C.unbind(-1)), layer.D, u)
    agree(1e-12, y=(layer(u), lru_unit(layer, expected)))


def in_mambas_block(layer, u, update):
    """Gu & Dao's Fig. 3, step by step, around h = update(h, x_t, B_t, logit of the step size)."""
    layer.D.copy_(seeded(len(layer.D), seed=1))
    E, N, (W, b) = len(layer.D), layer.N, (layer.conv.W, layer.conv.b)
    x, z = (u @ W_half.mT for W_half in layer.W_in.weight.split(E))
    x = F.silu(torch.stack([sum(W[3 - i] * x[:, t - i] for i in range(min(4, t + 1))) + b
                            for t in range(u.shape[1])], 1))
    W_low, W_B, W_C = layer.W_x.weight.split([layer.rank, N, N])
    h, y = torch.zeros(len(u), E, N, dtype=f64), []
    for x_t in x.unbind(1):
        h = update(h, x_t, x_t @ W_B.mT, layer.W_Delta(x_t @ W_low.mT))     # B (B, N)
        y.append(torch.einsum("ben,bn->be", h, x_t @ W_C.mT) + layer.D * x_t)
    return (torch.stack(y, 1) * F.silu(z)) @ layer.W_out.weight.mT


@torch.no_grad()
def test_mamba_is_algorithm_2_step_by_step():
    layer, u = built("Mamba"), seeded(2, 40, H)

    def update(h, x, B, logit):
        Delta = torch.log(1 + torch.exp(logit))                             # (B, E)
        A_bar = torch.exp(torch.einsum("be,en->ben", Delta, -layer.A_log.exp()))
        return A_bar * h + torch.einsum("be,bn,be->ben", Delta, B, x)
    agree(1e-12, y=(in_mambas_block(layer, u, update), layer(u)))


@torch.no_grad()
def test_longhorn_is_an_online_learner_in_mambas_block():
    """Algorithm 1 of Liu et al., a channel at a time; its step solves their Eq. 5 for N = 1."""
    layer, u = built("Longhorn"), seeded(2, 40, H)

    def update(h, x, k, logit):
        h, beta = h.clone(), torch.sigmoid(logit)
        for b, e in itertools.product(range(2), range(len(layer.D))):
            Delta = beta[b, e] / (1 + beta[b, e] * (k[b] @ k[b]))
            h[b, e] = (1 - Delta * k[b] ** 2) * h[b, e] + Delta * x[b, e] * k[b]
        return h
    agree(1e-12, y=(in_mambas_block(layer, u, update), layer(u)))
    s, k, x, beta = torch.tensor((0.3, 0.8, -1.1, 0.6), dtype=f64)          # one key, so exactly
    Delta = layer.step_size(beta.logit(), k[None])
    s_new = layer.gate(Delta, k) * s + Delta * x * k
    agree(1e-12, derivative=((s_new - s) + beta * (s_new * k - x) * k, torch.zeros(1, dtype=f64)))


@torch.no_grad()
def test_deltanet_corrects_what_its_state_answers():
    """After a write with β = 1 the state answers v to k; else it moves by β of the error."""
    layer, x = built("DeltaNet"), seeded(2, 40, H)
    y, d = layer.conv(x @ layer.W_qkv.weight.mT), H // 2
    q, k, v = (F.silu(z).view(2, 40, 2, d) for z in y.chunk(3, -1))
    beta, out = torch.sigmoid(x @ layer.W_beta.weight.mT), torch.zeros(2, 40, 2, d, dtype=f64)
    for b, head in itertools.product(range(2), range(2)):
        S = torch.zeros(d, d, dtype=f64)
        for t in range(40):
            key, query = (z[b, t, head] / z[b, t, head].norm() for z in (k, q))
            S = S @ (torch.eye(d, dtype=f64) - beta[b, t, head] * torch.outer(key, key))
            S = S + beta[b, t, head] * torch.outer(v[b, t, head], key)
            o = S @ query
            out[b, t, head] = o / (o.square().mean() + 1e-5).sqrt() * layer.norm.weight
    agree(1e-12, y=(layer(x), out.flatten(2) @ layer.W_out.weight.mT))


@torch.no_grad()
@pytest.mark.parametrize("gate", ("real", "complex"))
def test_a_window_of_rank_one_is_linear_attention_after_short_filters(gate):
    """C_v (a bᵀ) C_kᵀ = (C_v a)(C_k b)ᵀ: the filters a, b and q over values, keys, read-outs."""
    torch.manual_seed(0)
    gril, x = GrilMixer(H, 8, 2, w=3, gate=gate).to(f64), seeded(2, 40, H)
    filtered, (a, b) = Filtered(H, 8, 2, w=3, gate=gate).to(f64), seeded(2, 2, 3)
    gril.Q.copy_(a[:, :, None] * b[:, None])
    there = {name: p for name, p in gril.state_dict().items() if name not in ("Q", "q")}
    filtered.load_state_dict(there, strict=False)
    filtered.Q.fill_(1)
    filtered.q.fill_(1)
    filtered.conv.b.zero_()
    taps = torch.stack([a, b, gril.q], 1)[..., None].expand(2, 3, 3, 4)     # (J, v k u, w, h)
    filtered.conv.W.copy_(taps.permute(2, 0, 1, 3).flatten(1))
    agree(1e-12, y=(filtered(x), gril(x)))
    gril.Q.copy_(seeded(2, 3, 3, seed=1))                                   # of rank three: no more
    assert not torch.allclose(filtered(x), gril(x), atol=1e-3)


@torch.no_grad()
def test_a_gated_recurrent_network_does_gradient_descent_with_f_to_the_fourth_weights():
    x, y, eta = seeded(2, 7, 3), seeded(2, 6, 3, seed=1), 0.7
    c = torch.cat([x[:, :-1], y, x[:, 1:]], -1)
    layer = GatedRecurrent(3, eta, 6).to(f64)
    agree(1e-6, prediction=(layer(c)[:, -1], gradient_descent([eta])(x[:, :-1], y, x[:, -1])))
    counts = {f: parameters(GatedRecurrent(f, 1, 1)) for f in (3, 30)}
    assert counts == {f: f ** 4 + 10 * f ** 3 for f in counts}


@torch.no_grad()
def test_rglru_is_its_recurrence():
    layer, x = built("RGLRU"), seeded(2, 40, H)
    layer.b.copy_(seeded(2, 8, seed=1))
    W_a, W_x = (torch.block_diag(*W) for W in layer.W.chunk(2, -1))
    b_a, b_x = (b.flatten() for b in layer.b.chunk(2, -1))
    h, y = torch.zeros(2, H, dtype=f64), []
    for x_t in x.unbind(1):
        r, i = torch.sigmoid(x_t @ W_a + b_a), torch.sigmoid(x_t @ W_x + b_x)
        a = torch.sigmoid(layer.Lambda) ** (8 * r)
        h = a * h + torch.sqrt(1 - a ** 2) * (i * x_t)
        y.append(h)
    agree(1e-12, y=(layer(x), torch.stack(y, 1)))


def test_rglru_can_be_trained_where_its_gate_has_closed():
    """√(1 - a²) at a = 1: finite gradients, and a state that is kept."""
    layer, x = built("RGLRU").float(), seeded(2, 10, H, dtype=torch.float32)
    with torch.no_grad():
        layer.Lambda.fill_(40.0)                                            # σ(Λ) rounds to 1
    h, _ = layer.run(x, torch.ones(2, H))
    h.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())
    agree(0.02, h=(h, torch.ones_like(h)))


def test_linear_attention_is_its_parallel_formula():
    layer, e = built("LinearAttention"), seeded(2, 40, H)
    expected, d = e.clone(), H // 2
    for head in (slice(d), slice(d, None)):
        q, k, v = (e @ W.weight[head].mT for W in (layer.W_Q, layer.W_K, layer.W_V))
        expected += (q @ k.mT).tril() @ v @ layer.P.weight[:, head].mT
    agree(1e-12, y=(layer(e), expected))


@torch.no_grad()
def test_linear_attention_can_be_a_step_of_gradient_descent():
    """von Oswald et al., Prop. 1, tokens (x_i, y_i), (x_q, 0): keys, queries x, values y."""
    x, y, eta = seeded(2, 7, 5), seeded(2, 6, 3, seed=1), 0.7
    layer = LinearAttention(8).to(f64)
    first = torch.diag(torch.tensor([1.0] * 5 + [0.0] * 3, dtype=f64))      # projects on x
    last = torch.eye(8, dtype=f64) - first                                  # and on y
    for name, value in dict(W_Q=first, W_K=first, W_V=last, P=eta / 6 * last).items():
        getattr(layer, name).weight.copy_(value)
    tokens = torch.cat([x, F.pad(y, (0, 0, 0, 1))], -1)
    W = torch.zeros(3, 5, dtype=f64).requires_grad_()
    for b in range(2):
        with torch.enable_grad():
            loss = 0.5 * (x[b, :6] @ W.mT - y[b]).square().sum(-1).mean()
            (gradient,) = torch.autograd.grad(loss, W)
        agree(1e-12, prediction=(layer(tokens)[b, -1, 5:], -eta * gradient @ x[b, -1]))


@pytest.mark.parametrize("T", (1, 3, 5, 6, 40))
@pytest.mark.parametrize("name, window", (("Attention", 10 ** 6), ("local attention", 5)))
def test_attention_is_its_parallel_formula(name, window, T):
    """softmax over the visible scores; rotary positions turn complex numbers by their places."""
    layer, x = built(name), seeded(2, T, H)
    d, n = layer.d, layer.d // 2
    frequency = 10000.0 ** (-2 * torch.arange(n, dtype=f64) / d)
    turn = torch.exp(1j * torch.arange(T)[:, None] * frequency)             # (T, d/2)
    k_all, v_all = (x @ W.mT for W in layer.W_KV.weight.chunk(2))
    distance, o = torch.arange(T)[:, None] - torch.arange(T), []
    for head in range(layer.heads):
        q = x @ layer.W_Q.weight[head * d:(head + 1) * d].mT
        shared = head * layer.kv_heads // layer.heads
        k, v = (y[..., shared * d:(shared + 1) * d] for y in (k_all, v_all))
        q, k = (torch.complex(y[..., :n], y[..., n:2 * n]) * turn for y in (q, k))
        scores = (q @ k.mH).real / math.sqrt(d)
        scores = scores.masked_fill((distance < 0) | (distance >= window), -math.inf)
        o.append(scores.softmax(-1) @ v)
    agree(1e-12, y=(layer(x), torch.cat(o, -1) @ layer.W_out.weight.mT + layer.W_out.bias))


def test_griffin_is_recurrent_recurrent_attention_with_a_gated_mlp_after_each():
    model, x = built("Griffin"), seeded(2, 20, H)
    mixer, mlp, *_, attention, _ = mixers = [block.mixer for block in model.layers]
    assert list(map(type, mixers)) == [RecurrentBlock, GatedMLP] * 2 + [Attention, GatedMLP]
    assert attention.kv_heads == 1 and attention.window == 1024
    gate, inner = (x @ W.mT + b for W, b in zip(*(p.chunk(2) for p in mixer.W_in.parameters())))
    conv, rglru = mixer.inner.layers
    agree(1e-12, recurrent=(mixer(x), mixer.W_out(F.gelu(gate) * rglru(conv(inner)))))
    a, b = (x @ W.mT + c for W, c in zip(*(p.chunk(2) for p in mlp.W_13.parameters())))
    agree(1e-12, mlp=(mlp(x), mlp.W_2(F.gelu(a) * b)))


def test_rotation_sees_differences_only_and_leaves_an_odd_channel_alone():
    q, k, t = seeded(5, 7), seeded(5, 7, seed=1), torch.arange(5)
    turn = torch.exp(1j * t[:, None] * 1e4 ** (-torch.arange(3, dtype=f64) / 3))
    turned = torch.complex(q[:, :3], q[:, 3:6]) * turn
    agree(1e-12, turned=(rotate(q, t)[:, :6], torch.cat([turned.real, turned.imag], -1)))
    scores, later = (rotate(q, place) @ rotate(k, place).mT for place in (t, t + 100))
    agree(1e-12, shifted=(later, scores), odd=(rotate(q, t)[:, -1], q[:, -1]))
    assert rotate(seeded(5, 1), t).shape == (5, 1)              # one channel has nothing to turn


# ----------------------------------------------------------------------- run = step, from any state

@pytest.mark.parametrize("name, T", [
    pytest.param(name, T, marks=pytest.mark.slow) if T == 500 else (name, T)
    for name in MIXERS for T in (1, 63, 500)])
def test_run_equals_its_steps_in_outputs_states_and_gradients(name, T):
    model, x = built(name), seeded(2, T, H).requires_grad_()
    got, expected = (results(model, x, run) for run in (model.run, lambda x: in_parts(model, x)))
    assert got.keys() == expected.keys()
    agree(1e-10, **{n: (got[n], expected[n]) for n in expected})


@pytest.mark.parametrize("name", MIXERS)
def test_a_sequence_cut_anywhere_and_continued_is_the_uncut_one(name):
    model, x = built(name), seeded(2, 23, H).requires_grad_()
    expected = results(model, x, model.run)
    for sizes in ((5, 1), (1, 1), (16, 6), (2, 20)):
        got = results(model, x, lambda x: in_parts(model, x, *sizes))
        agree(1e-11, **{n: (got[n], expected[n]) for n in expected})


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_two_layers_streamed_equal_their_forward(network):
    network, s = network.to(f64), seeded(2, 37, 4)
    expected = network(s)
    assert expected.shape == (2, 37, 3)
    y, state = in_parts(network, s)
    z, _ = in_parts(network, s, 5, 1)
    agree(1e-11, steps=(y, expected), stretches=(z, expected))
    y, _ = network.run(s, state)                                # a stretch goes on from a stream
    agree(1e-11, after=(y, network(torch.cat([s, s], 1))[:, 37:]))


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_causal_to_the_bit(network):
    s = seeded(2, 50, 4, dtype=torch.float32)
    y = network(s)
    for t in (0, 1, 15, 16, 33, 48):
        changed = torch.cat([s[:, :t + 1], s[:, t + 1:] + 1], 1)
        z = network(changed)
        assert torch.equal(z[:, :t + 1], y[:, :t + 1]), f"a later token changed outputs up to {t}"
        assert not torch.equal(z[:, t + 1:], y[:, t + 1:])


@pytest.mark.parametrize("T", (1, 21, 64))
def test_both_forms_of_linear_attention_agree_from_any_state(T):
    """On a short prompt it is their formula, on a long one gril_chunk."""
    q, k, v = (seeded(2, T, 3, 4, seed=i) for i in range(3))
    Z = seeded(2, 3, 4, 4, seed=3)
    forms = LinearAttention.parallel, LinearAttention.chunked
    got, expected = (form(v, k, q, Z) for form in forms)
    agree(1e-12, o=(got[0], expected[0]), Z=(got[1], expected[1]))


# ----------------------------------------------------------------------------------- initialisation

def test_hippo_eigenvalues():
    for n in (2, 8, 32):
        Lambda, V = hippo(n)
        A, rank_one = legs(n)
        half = V @ Lambda.diag() @ V.mH
        agree(1e-10, pairs=(half + half.conj(), (A + rank_one).to(V.dtype)),
              orthonormal=(V.mH @ V, torch.eye(n // 2).to(V)))
        assert (Lambda.real == -0.5).all() and (Lambda.imag > 0).all()
    assert 0.9 < hippo(256)[0].imag.max() / (256 ** 2 / math.pi) < 1.1  # the largest grows as n²/π


def log_uniform(x, low, high):
    assert low <= x.min() * 1.0001 and x.max() <= high * 1.0001
    position = (x.log() - math.log(low)) / math.log(high / low)
    assert abs(position.mean() - 0.5) < 0.05 and abs(position.std() - 12 ** -0.5) < 0.03


def test_s5_never_grows():
    layer = built("S5")
    layer.Lambda_re.data += 1                                       # where training may not take it
    assert (layer.system()[0].abs() < 1).all()


def test_published_initialisation():
    torch.manual_seed(0)
    s5 = S5(4, P=2048, J=64)
    log_uniform(s5.log_Delta.exp(), 1e-3, 1e-1)
    Lambda, mamba = torch.complex(s5.Lambda_re, s5.Lambda_im), Mamba(512)
    agree(1e-5, blocks=(Lambda, hippo(32)[0].repeat(64).to(torch.cfloat)),
          A=(-mamba.A_log.exp(), -torch.arange(1.0, 17).expand(1024, 16)),
          D=(mamba.D, torch.ones(1024)))
    log_uniform(F.softplus(mamba.W_Delta.bias), 1e-3, 1e-1)
    assert mamba.rank == 32 and mamba.conv.W.shape == (4, 1024)
    assert mamba.W_Delta.weight.abs().max() <= 32 ** -0.5
    for Delta in (1e-3, 0.05, 0.1):                                         # exactly, not nearly so
        bias = Mamba(H, dt_min=Delta, dt_max=Delta).W_Delta.bias
        assert (F.softplus(bias.double()) / Delta - 1).abs().max() < 1e-6
    gate = RGLRU(2048).Lambda.sigmoid() ** 8
    assert 0.899 < gate.min() < 0.901 and 0.998 < gate.max() < 0.9991
    assert abs(gate.mean() - 0.9495) < 0.003
    Lambda, B = LRU(4, P=4096, r_min=0.5, r_max=0.9, max_phase=1.0).system()
    squares = Lambda.abs().square()
    assert 0.25 <= squares.min() and squares.max() <= 0.8101 and abs(squares.mean() - 0.53) < 0.01
    assert 0 <= Lambda.angle().min() and Lambda.angle().max() <= 1
    agree(0.05, power=(B.abs().square().mean(), (1 - squares).mean() / 4))
    Lambda, _ = LRU(4, P=8192).system()                                     # the whole disc
    assert abs(Lambda.abs().square().mean() - 0.5) < 0.03 and Lambda.abs().max() < 1
    angle = Lambda.angle() % (2 * math.pi)
    assert angle.min() < 0.1 and 6.2 < angle.max()


def standard_deviation(expected, *starts):
    """Normal numbers with mean zero: moments within six standard errors, so for any seed."""
    x = torch.cat([start.flatten() for start in starts]) / expected
    error = len(x) ** -0.5
    assert abs(x.mean()) < 6 * error < 0.1 and abs(x.square().mean() - 1) < 6 * 2 ** 0.5 * error
    assert abs(x.pow(4).mean() - 3) < 6 * 96 ** 0.5 * error             # 1.8 for uniform numbers


def test_random_starts_have_their_published_size():
    s5, H, P = S5(256, P=512, J=4), 256, 512
    V = torch.block_diag(*[hippo(P // 4)[1]] * 4).to(torch.cfloat)  # (P, P/2); B̃ = Vᴴ B, C̃ = C V
    standard_deviation(P ** -0.5, 2 * (V @ torch.view_as_complex(s5.B)).real)
    standard_deviation(P ** -0.5, s5.C)                                 # Re and Im; V is unitary
    lru, attention = LRU(512), LinearAttention(512)
    standard_deviation((2 * 512) ** -0.5, lru.B)                        # real and imaginary parts
    standard_deviation((2 * 512) ** -0.5, lru.C)
    for W in (attention.W_Q, attention.W_K, attention.W_V, attention.P):
        standard_deviation(0.2 * 512 ** -0.5, W.weight)
    standard_deviation(64 ** -0.5, RGLRU(1024, blocks=16).W)
    conv = CausalConv(50_000, w=4)
    for x in (conv.W, conv.b):
        assert 0.499 < x.max() <= 0.5 and -0.5 <= x.min() < -0.499
        assert abs(x.std() - 12 ** -0.5) < 0.01
    assert (RGLRU(8).b == 0).all()
    for i in range(3):
        for path, part in griffin_mixer(960, 2, i).named_modules():
            if isinstance(part, torch.nn.Linear):
                standard_deviation(part.in_features ** -0.5, part.weight)
            if isinstance(part, CausalConv):
                standard_deviation((0.01 / 4) ** 0.5, part.W)
            for name, bias in part.named_parameters(recurse=False):
                assert name not in ("b", "bias") or (bias == 0).all(), path
    gated = Griffin(96).layers[1].mixer
    standard_deviation(96 ** -0.5, gated.W_13.weight)
    standard_deviation(288 ** -0.5, gated.W_2.weight)
    standard_deviation(3 ** -0.5, Filtered(8, 800, 1).conv.W)
    assert abs(S5(2000, P=2).D.std() - 1) < 0.1


def test_grils_weights_start_as_said():
    """Q small, so that what the loss does not ask for stays small; gates near 1."""
    scalar, free = ScalarGRIL(250, 400), ScalarGRIL(300, variant="neither")
    mixer = GrilMixer(8, 4000, 4000)
    for expected, start in (
            (500 ** -0.5, scalar.Psi), (500 ** -0.5, scalar.Theta), (601 ** -0.5, free.Psi),
            (0.1 / 3, MultistepGRIL(1, 6000).Q), (3 ** -0.5, mixer.Q), (3 ** -0.5, mixer.q)):
        standard_deviation(expected, start)
    for w, name in ((3, "full"), (2, "w2")):
        layers = [GRIL(1, name) for _ in range(2000)]
        standard_deviation(0.05 / w, *(layer.Q for layer in layers))
        standard_deviation(w ** -0.5, *(layer.q for layer in layers))
    for layer in (scalar, GRIL(100), MultistepGRIL(100)):
        assert 0.9 <= layer.A.min() < 0.91 and 0.99 < layer.A.max() <= 1 and (layer.beta == 1).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_every_parameter_is_reached_and_every_recurrent_one_exists(network, name):
    network(seeded(4, 30, 4, dtype=torch.float32)).square().sum().backward()
    for n, p in network.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), f"{n}: no gradient"
    named = [getattr(m, n) for m in network.modules() for n in getattr(m, "recurrent", ())]
    assert all(isinstance(p, torch.nn.Parameter) for p in named)
    assert bool(named) == (name not in ("linear_attention", "transformer", "deltanet"))


MAMBA = {"W_in": [4], "W_out": [2]}
GRIFFIN = {"W_in": [2.67], "W_out": [1, 1.33], "W_13": [6], "W_2": [3]}     # 1: the attention's


@pytest.mark.parametrize("name, layer, projected, normed, inner", (
    ("s5", S5, False, False, {}), ("lru", LRU, False, False, {}),
    ("linear_attention", LinearAttention, False, False, {"P": [1]}),
    ("longhorn", Longhorn, False, True, MAMBA), ("deltanet", DeltaNet, False, True, {"W_qkv": [3]}),
    ("mamba", Mamba, False, True, MAMBA), ("mamba_lp", Mamba, True, True, MAMBA),
    ("griffin", Griffin, False, True, GRIFFIN), ("griffin_lp", Griffin, True, True, GRIFFIN),
    ("transformer", Transformer, True, True, {"W_1": [4], "W_2": [4]})))
def test_each_network_is_built_as_published(name, layer, projected, normed, inner):
    """A projection in front, a norm before the read-out, widths inside the layers in units of H."""
    network = make(name, 5, 3, 24, layers=3)
    assert [type(getattr(part, "mixer", part)) for part in network.layers] == [layer] * 3
    assert isinstance(network.embed, torch.nn.Linear) == projected
    s = seeded(2, 7, 5, dtype=torch.float32)
    assert projected or torch.equal(network.embed(s), F.pad(s, (0, 19)))
    last = network.readout[-1] if normed else network.readout
    assert isinstance(last, torch.nn.Linear) and (last.bias is None) == (name == "linear_attention")
    assert not normed or isinstance(network.readout[0], torch.nn.LayerNorm)
    for key, widths in inner.items():
        named = [m for path, m in network.layers.named_modules() if path.split(".")[-1] == key]
        assert sorted({round(max(m.weight.shape) / 24, 2) for m in named}) == widths, key


def test_heads_and_windows_of_attention():
    for name in ("transformer", "griffin", "linear_attention"):
        network = make(name, 4, 3, 24, layers=2, heads=4)
        found = [m for m in network.modules() if isinstance(m, (Attention, LinearAttention))]
        assert [m.heads for m in found] == [4, 4]
        if name == "transformer":
            assert {(m.kv_heads, m.window) for m in found} == {(4, math.inf)}
        if name == "griffin":
            assert {(m.kv_heads, m.window) for m in found} == {(1, 1024)}
            gates = [m.W.shape for m in network.modules() if isinstance(m, RGLRU)]
            assert gates == [(4, 8, 16)] * 4                                # D = 32 in four blocks
            assert {len(m.W) for m in network.modules() if isinstance(m, CausalConv)} == {4}


@pytest.mark.parametrize("name", offered("lra"))
def test_dropout_reaches_every_block_in_training_alone(name):
    torch.manual_seed(0)
    row, x = MODELS[name], seeded(2, 9, H, dtype=torch.float32)
    layer = row.build(H, dropout=0.5, **row.given(dict(P=8, J=2)))
    blocks = [m for m in layer.modules() if isinstance(m, Block)]
    assert blocks and all(block.dropout.p == 0.5 for block in blocks)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


def test_pairs_are_each_input_with_its_own_target_and_the_query_with_zero():
    x, y = seeded(2, 4, 3), seeded(2, 3, 3, seed=1)
    assert torch.equal(Pairs(Stack())(interleave(x, y)), torch.cat([x, F.pad(y, (0, 0, 0, 1))], -1))


def test_state_sizes():
    """Real numbers per sequence: recurrent states stay, a cache grows up to its window."""
    x = torch.zeros(3, 21, 32)
    for model, size in (
            (S5(32, P=16), 16), (LRU(32, P=16), 16), (Mamba(32), 64 * 16 + 64 * 3),
            (Longhorn(32), 64 * 16 + 64 * 3), (DeltaNet(32, heads=2), 2 * 16 * 16 + 96 * 3),
            (LinearAttention(32, heads=2), 2 * 16 * 16), (Transformer(32, heads=4), 2 * 21 * 32),
            (Griffin(32, heads=2), 2 * (42 + 3 * 42) + 2 * 21 * 16),
            (Attention(32, heads=2, kv_heads=1, window=9), 2 * 8 * 16)):
        assert state_size(model, x) == size, type(model)
    assert state_size(make("s5", 5, 5, 32, layers=4), x[..., :5]) == 4 * 32


@pytest.mark.parametrize("name", MIXERS)
def test_under_autocast_recurrent_states_stay_float32(name):
    model, x = built(name).float(), seeded(2, 40, H, dtype=torch.float32)
    block = Block(model, H)
    mkldnn = torch.backends.mkldnn.flags(enabled=False)                     # not on every CPU
    with torch.autocast("cpu", torch.bfloat16), mkldnn:
        y, state = block.run(x)
        y1, _ = block.step(x[:, 0], state)
    agree(0.05, y=(y.float(), block(x)))
    assert y1.isfinite().all()
    if name in ("S5", "LRU", "Mamba", "Longhorn", "DeltaNet", "Filtered", "LinearAttention",
                "RGLRU"):
        assert leaves(state)[0].dtype in (torch.float32, torch.complex64)


@pytest.mark.parametrize("name", ("s5", "lru", "mamba", "longhorn", "griffin"))
def test_every_scan_compiles_into_one_graph(name):
    """Forward and backward; a state of fewer than 1,024 numbers takes the path that a GPU takes."""
    model, x = make(name, 4, 1, 8), torch.randn(2, 20, 4, requires_grad=True)

    def loss(x):
        return model(x).square().mean()
    torch.compiler.reset()
    compiled = torch.compile(loss, backend="eager", fullgraph=True, dynamic=False)
    got, expected = (torch.autograd.grad(f(x), [x, *model.parameters()]) for f in (compiled, loss))
    agree(1e-5, **{f"{i}": pair for i, pair in enumerate(zip(got, expected))})


@pytest.mark.parametrize("name", NETWORKS)
def test_every_model_is_of_the_default_dtype(name):
    torch.set_default_dtype(f64)
    try:
        model = make(name, 4, 1, 8)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in model.parameters()} == {f64}


# ---------------------------------------------------------------------------------------- bad input

@pytest.mark.parametrize("call, message", (
    (lambda: S5(8, P=10, J=2), "J = 2 blocks: 10 is not divisible by 4"),
    (lambda: S5(8, P=7), "conjugate pairs .* 7 is not divisible by 2"),
    (lambda: LRU(8, P=7), "conjugate pairs: 7 is not divisible by 2"),
    (lambda: Attention(10, heads=3), "width H into heads: 10 is not divisible by 3"),
    (lambda: Attention(8, 4, 3), "heads over key-value heads: 4 is not divisible by 3"),
    (lambda: LinearAttention(10, heads=3), "10 is not divisible by 3"),
    (lambda: RGLRU(10, blocks=3), "10 is not divisible by 3"),
    (lambda: DeltaNet(10, heads=3), "10 is not divisible by 3"),
    (lambda: make("mamba2", 4, 4, 8),
     "unknown model 'mamba2', did you mean mamba. There are: s5, lru, mamba"),
    (lambda: make("griffin", 10, 4, 8),
     "tokens of width 10 do not fit the model's width 8: widen it"),
    (lambda: make("transformer", 10, 4, 30, heads=4), "30 is not divisible by 4"),
    (lambda: make("s5", 4, 4, 8)(torch.zeros(2, 0, 4)), r"L > 0; got torch.float32 \(2, 0, 4\)"),
    (lambda: make("mamba", 4, 4, 8)(torch.zeros(2, 3, 5)), r"\(B, L, 4\), .* \(2, 3, 5\)"),
    (lambda: make("s5", 4, 4, 8)(torch.zeros(2, 3, 4).long()), "floating point.* got torch.int64"),
))
def test_bad_input_is_answered_with_a_sentence(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# -------------------------------------------------------------------------- on the in-context tasks

@pytest.mark.parametrize("layers", (1, 2))
@pytest.mark.parametrize("task, tokens, hopeless", (
    ("scalar_regression", None, True), ("nd_regression", None, True),
    ("scalar_regression", "raw", False), ("nd_regression", "pairs", False)))
def test_parity_decides_on_which_tokens_linear_attention_can_learn(task, tokens, hopeless, layers):
    """With W, the query or all of the context's x of the other sign, a task is just as likely.

    Where answer × target sums to zero over these eight copies of a prompt, the loss is ½ E y² +
    ½ E ŷ², whatever the weights: nothing beats ŷ = 0. Without biases, layers of linear attention
    are odd in all tokens together. On [x_t y_t, x_{t+1}], flipping W and every x turns the sign of
    each token, so of the answer, but not the target's. On x_1, y_1, x_2, …, flipping W turns the y
    tokens only; every sum Σ v kᵀ stays, so the query's answer does, but the target turns. On
    [x_t, y_t, x_{t+1}] a token holds all three factors of y xᵀ x_query, on (x_i, y_i), (x_query, 0)
    two of them.
    """
    torch.manual_seed(0)
    task, product = TASKS[task](f=4, n=5, **(dict(raw=True) if tokens == "raw" else {})), 0
    x, y, _ = task.sample(50, torch.Generator().manual_seed(0))
    x, y = x.double(), y.double()
    f = task.tokens(x, y).shape[-1] * (2 if tokens == "pairs" else 1)
    network = make("linear_attention", f, task.outputs, 16, layers, std=4.0).to(f64)
    network = Pairs(network) if tokens == "pairs" else network
    for W, context, asked in itertools.product((1, -1), repeat=3):
        flip = torch.tensor([context] * 5 + [asked], dtype=f64)[:, None]
        target = W * y * flip
        product = product + query(network, task.tokens(x * flip, target)) * target[:, -1]
    scale = query(network, task.tokens(x, y)).abs().max()
    assert (product.abs().max() < 1e-12 * scale) == hopeless


@torch.no_grad()
def test_linear_attention_on_raw_scalar_tokens_can_be_a_step_of_gradient_descent():
    """On [x_t, y_t, x_{t+1}] the window is in the token: keys x_t, values y_t, queries x_{t+1}."""
    task, eta = TASKS["scalar_regression"](f=4, n=5, raw=True), 0.7
    x, y, _ = task.sample(20, torch.Generator().manual_seed(0))
    x, y = x.double(), y.double()
    network = make("linear_attention", 9, 1, 16).to(f64)
    layer, eye = network.layers[0], torch.eye(16, dtype=f64)                # no token uses place 15
    for W, rows, columns in (
            (layer.W_K, range(4), range(4)), (layer.W_Q, range(4), range(5, 9)),
            (layer.W_V, [15], [4]), (layer.P, [15], [15]), (network.readout, [0], [15])):
        W.weight.zero_()
        W.weight[list(rows)] = eye[list(columns)]
    network.readout.weight *= eta / 5
    expected = gradient_descent([eta])(x[:, :-1], y[:, :-1], x[:, -1])
    agree(1e-12, prediction=(query(network, task.tokens(x, y)), expected))


@pytest.mark.slow
def test_one_layer_of_linear_attention_learns_a_step_of_gradient_descent_from_pairs(tmp_path):
    """von Oswald et al.: from pairs within 2 % of the best step; on x_1, y_1, … stuck at zero."""
    options = "--task nd_regression --steps 3000 --batch 64 --lr 3e-3 --quiet --out".split()
    pairs, interleaved = (train.main([*options, str(tmp_path / name), "--model", name])
                          for name in ("linear_attention_pairs", "linear_attention"))
    assert pairs["loss"] < 1.02 * pairs["gd_loss"] and pairs["cosine"] > 0.99
    assert abs(interleaved["loss"] / interleaved["zero_loss"] - 1) < 0.005


def tiny(words, folder):
    options = "--f 3 --n 4 --steps 3 --batch 4 --tasks 20 --width 16 --quiet --force --out"
    return train.main([*options.split(), str(folder / "run"), *words.split()])


@pytest.mark.parametrize("task, model", [
    (task, model) if task == "nd_regression" or model in ("lru", "linear_attention_pairs")
    else pytest.param(task, model, marks=pytest.mark.slow)
    for task in TASKS for model in offered("in_context")])
def test_every_model_trains_on_every_task_and_loads_again(tmp_path, task, model):
    words = f"--task {task} --model {model}"
    if (task, model) == ("scalar_regression", "linear_attention_pairs"):    # windows already
        with pytest.raises(SystemExit, match=f"unknown .* {task}.*There are: gril.*transformer"):
            tiny(words, tmp_path)
        return
    result = tiny(words, tmp_path)
    loaded, network, again = train.load(tmp_path / "run")
    loss = loaded.report(network, 20_000)["loss"]
    assert loss == result["loss"] and math.isfinite(loss)
    default = MODELS[model].in_context["default"]
    sizes = {name: again[name] for name in default}
    layers = dict(layers=2) if task == "multistep_regression" else {}       # the task's steps
    assert sizes == dict(default, width=16, **layers) == {name: result[name] for name in sizes}
    assert result["parameters"] == sum(p.numel() for p in network.parameters())
    assert {"gd_loss", "zero_loss", "constructed_loss", "cosine", "seconds"} <= set(again)
    assert "Q_distance" not in again
    torch.manual_seed(0)                                                # as the run did
    start = TASKS[task](f=3, n=4, **sizes).model(model)
    for name, p in start.named_parameters():
        assert not torch.equal(p, network.get_parameter(name)), f"{name} was never trained"


def test_sizes_on_the_command_line(tmp_path):
    tiny("--task nd_regression --model griffin --layers 2 --heads 4", tmp_path)
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert (config["width"], config["layers"], config["heads"]) == (16, 2, 4)
    _, network, _ = train.load(tmp_path / "run")
    assert len(network.layers) == 2 and network.layers[0].layers[4].mixer.heads == 4
    tiny("--task multistep_regression --model s5", tmp_path)
    task, network, _ = train.load(tmp_path / "run")
    assert len(network.layers) == task.layers == 2                  # two layers beside two steps


@pytest.mark.parametrize("words, answer", (
    ("--model griffin --heads 5", "16 is not divisible by 5"),
    ("--model transformer --heads 3", "16 is not divisible by 3"),
    ("--model mamba --f 20",
     "tokens of width 20 do not fit the model's width 16: widen it (--width)"),
    ("--model s5 --width 9", "9 is not divisible by 2"),
    ("--model s5 --heads 2", "--heads: s5 has no heads"),
    ("--model s5 --embed 20", "--embed is for GRIL's layers; s5 has --width"),
    ("--model gril --width 8", "--width and --heads are sizes of other sequence models than gril"),
    ("--model mamba --width -1", "--width must be 0 or more, got -1"),
    ("--model mambda", "did you mean mamba"),
))
def test_sizes_that_do_not_fit_are_answered(tmp_path, words, answer):
    with pytest.raises(SystemExit) as stop:
        tiny(f"--task nd_regression {words}", tmp_path)
    assert answer in str(stop.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model, default, paper", (             # width, layers, heads
    ("s5", (32, 1), (32, 1)), ("lru", (32, 1), (32, 1)), ("mamba", (32, 1), (64, 1)),
    ("longhorn", (32, 1), (32, 1)), ("deltanet", (32, 1, 1), (32, 1, 1)),
    ("mamba_lp", (32, 1), (128, 4)), ("griffin", (32, 1, 2), (32, 2, 2)),
    ("griffin_lp", (32, 1, 2), (96, 4, 4)), ("linear_attention", (32, 1, 1), (32, 1, 1)),
    ("linear_attention_pairs", (32, 1, 1), (32, 1, 1)), ("transformer", (32, 2, 4), (32, 2, 4))))
def test_sizes_and_rates_of_every_model(model, default, paper):
    """By default the same examples, rate and width; the paper's are those of App. B.3.

    Adam 1e-4; with LP 4 layers of 128, AdamW for Mamba, 4 heads and 2e-4 on vectors for Griffin.
    """
    default, paper = (dict(zip(("width", "layers", "heads"), row)) for row in (default, paper))
    assert recipe("default", model, "nd_regression") == dict(
        default, steps=1500, batch=64, lr=3e-3, recurrent_lr=3e-3, weight_decay=0.0)
    for task in ("scalar_regression", "nd_regression"):
        lr = 2e-4 if (task, model) == ("nd_regression", "griffin_lp") else 1e-4
        assert recipe("paper", model, task) == dict(
            paper, lr=lr, recurrent_lr=lr, weight_decay=0.01 if model == "mamba_lp" else 0.0)


def test_the_papers_recipes_reach_the_network_and_the_loop():
    vectors, scalar = TASKS["nd_regression"], TASKS["scalar_regression"]
    network = vectors(**vectors.numbers("paper", "griffin_lp")).model("griffin_lp")
    assert len(network.layers) == 4
    assert network.layers[0].layers[0].mixer.inner.layers[1].Lambda.numel() == 128
    full = scalar.numbers("paper", "mamba")
    assert full.items() >= dict(steps=300_000, batch=64, weight_decay=0.0, lr=1e-4).items()


def test_a_class_and_a_row_make_a_model_for_all_three_places(monkeypatch):
    class New(LRU):
        def __init__(self, H, J=1):
            super().__init__(H)
            self.J = J
    monkeypatch.setitem(MODELS, "new", Model(New, "J", lm=dict(framed=True)))
    places = [(TASKS["nd_regression"](), 1), (lra.LRA["text"](), 8), (lm.LM["text_file"](), 16)]
    for task, J in places:
        mixers = [m for m in task.model("new").modules() if isinstance(m, New)]
        assert mixers and {m.J for m in mixers} == {J}, task.name
    monkeypatch.setitem(MODELS, "new", Model(New, in_context=None, lra=None, lm=None))
    for task, _ in places:
        with pytest.raises(ValueError, match="unknown model.*'new'.*There are: .*s5"):
            task.model("new")


def test_a_causal_filter_keeps_bfloat16():
    y, past = CausalConv(4).run(seeded(1, 6, 4, dtype=torch.bfloat16))
    assert y.dtype == past.dtype == torch.bfloat16

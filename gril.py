"""GRIL: a linear recurrent network whose state does gradient descent on the examples in its prompt.

The model of "Learning in the Recurrent State: Gradient Descent with Linear Recurrent Networks", top to bottom:

  1. window         the context matrix C_t                                        Sec. 4.2, Eq. 9
  2. recurrence     Z_t = A ⊙ Z_{t-1} + C_t Q C_tᵀ,  o_t = β Z_t C_t q            Definition 4.2, Eq. 10
                    as loop, scan, chunk, step and (o_T alone) query
  3. layers         scalar, multivariate, multi-step, non-linear, classification  Sec. 4.1 to 4.5, App. A
  4. constructions  weights with which a layer's forward pass *is* gradient descent
  5. block          the same recurrence between projections, for long sequences   App. D

Glossary, with the paper's letters (capitals are matrices):

  s, f      tokens (B, L, f) and their width            C_t   window, the w tokens of step t (f, w)
  Z_t       recurrent state (d, m)                      A     gate, multiplies Z elementwise
  Q, q, β   mix, select, scale the window's columns     o_t   read-out (d)
  J         independent states side by side             η, N  step size, examples in the prompt

Loop and scan share one signature, in which the window is already multiplied out (V = C Q, K = C, r = β C q):

  form(V, K, r, A, Z0=None) -> (o, Z_T)      Z_t = A ⊙ Z_{t-1} + V_t K_tᵀ,   o_t = Re(Z_t r_t)
  V (B, T, J, d, w)  K (B, T, J, m, w)  r (B, T, J, m)  A broadcasts to (J, d, m)  Z (B, J, d, m)  o (B, T, J, d)

They are exact for |A| ≤ 1, zero included. A gate beyond 1 is not refused: Z grows as |A|^T until it overflows.
Chunk and step take the tokens of which windows are made, because that is what they carry on: v (B, T, J, d) for C Q,
k for Cᵀ and u for C q (B, T, J, m). Their state is Z and the last w-1 tokens; chunk has a gate per key channel.

Sign, a departure from the paper: it writes the state as +gradient in Eq. 5 and as -gradient in Eq. 7 (and App. A.1
mixes both, which would climb). Here the state always holds +Σ y xᵀ, minus the gradient at W = 0, and β = +η/N.
W is the paper's Wᵀ: y = W x here, ŷ = Wᵀ x in Sec. 4.2, and W_{l-1} Z̃ below is the Z̃ W_{l-1} of App. A.3, transposed.
"""
import math
from contextlib import nullcontext
from functools import reduce

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from machine.errors import known


# ------------------------------------------------------------------------------------------------ 1. the window

def window(s, w=3, stride=1, causal=True):
    """Context matrices C_t (Eq. 9): tokens (B, L, f) to windows (B, T, f, w), left-padded with zeros if causal.

    stride=2, causal=False on x_1, y_1, x_2, … gives (x_t, y_t, x_{t+1}); stride=1 gives (s_{t-2}, s_{t-1}, s_t).
    """
    if s.ndim != 3:
        raise ValueError(f"window: tokens must be (B, L, f), got {tuple(s.shape)}")
    if not s.is_floating_point():
        raise ValueError(f"window: tokens must be floating point, got {s.dtype}; embed integer tokens first")
    if s.shape[1] == 0:
        raise ValueError(f"window: empty sequence {tuple(s.shape)}")
    if causal:
        s = F.pad(s, (0, 0, w - 1, 0))                                      # (B, w-1+L, f)
    if s.shape[1] < w:
        raise ValueError(f"window: a window of {w} is longer than the sequence of {s.shape[1]} tokens")
    return s.unfold(1, w, stride)                                           # (B, T, f, w)


# -------------------------------------------------------------------------------------------- 2. the recurrence

def gril_loop(V, K, r, A, Z0=None):
    """Definition 4.2, line by line: the reference. Any gate; Z is carried, nothing else is kept."""
    V, K, r, A, Z, dtype = _prepare(V, K, r, A, Z0)
    V, K, r = V.to(Z.dtype), K.to(Z.dtype), r.to(Z.dtype)
    o = []
    for V_t, K_t, r_t in zip(V.unbind(1), K.unbind(1), r.unbind(1)):
        Z = (Z if A is None else A * Z) + V_t @ K_t.mT                      # (B, J, d, m)
        o.append((Z @ r_t[..., None])[..., 0])                              # (B, J, d)
    return real(torch.stack(o, 1)).to(dtype), Z


def gril_scan(V, K, r, A, Z0=None):
    """Definition 4.2, all steps at once: a cumulative sum without gate, else an associative scan. Holds T states."""
    V, K, r, A, Z0, dtype = _prepare(V, K, r, A, Z0)
    Z = states(V, K, A, Z0)                                                 # (B, T, J, d, m)
    o = (real(Z) @ r[..., None])[..., 0]                                    # (B, T, J, d)
    return o.to(dtype), Z[:, -1]


def states(V, K, A, Z0):
    """Every state Z_1 … Z_T of the recurrence (Eq. 7, Eq. 10), (B, T, J, d, m)."""
    VK = (V @ K.mT).to(Z0.dtype)                                            # (B, T, J, d, m)
    return VK.cumsum(1) + Z0[:, None] if A is None else scan(A[None, None], VK, Z0)


def gril_chunk(v, k, u, Q, q, log_rho, theta, state, L=16):
    """Definition 4.2 on tokens v (B, T, J, d), k, u (B, T, J, m): o (B, T, J, d) and the next state.

    Q (J, w, w); q (J, w), β in it; a gate γ = ρ e^{iθ} per key channel, (J, m), real if θ is None.

    One key per token. The columns of a window are tokens, so the w outer products of a step can be
    regrouped by the token that they write. Let K̃_{t,i} = Σ_j Q_ij k_{t-w+1+j}; then, for w = 2,

        Z_t = γ Z_{t-1} + v_{t-1} K̃_{t,0}ᵀ + v_t K̃_{t,1}ᵀ  =  M_t + v_t K̃_{t,1}ᵀ
        M_t = γ M_{t-1} + v_{t-1} κ_tᵀ    with one key    κ_t = K̃_{t,0} + γ K̃_{t-1,1}

    For any w a token enters M once, w-1 steps late, with κ_t = Σ_i γ^i K̃_{t-i,i}: M is linear
    attention with a constant gate. The tokens of the window itself are read beside it; so is what
    enters just now, whose γ⁰ would else leave the gate a gradient of rounding errors.

    Chunks. Around the middle c of a chunk of L tokens γ^{t-s} = γ^{t-c} γ^{c-s}: one product of
    read-outs γ^{t-c} r_t and keys γ^{c-s} κ_s. From chunk to chunk M is carried, γ^L M + what the
    chunk wrote.

    Turns. Re(γ^{t-s} κ_s) r_t is ρ^{t-s} times the product of two pairs of real numbers, the key
    turned by (c-s) θ and the read-out by (c-t) θ, as rotary positions are. So a complex gate is a
    real one on twice the channels, and only M is turned as a whole, by L θ from chunk to chunk.

    Gates e^(-80/L) ≤ ρ ≤ 1, from 0.0067 for L = 16, keep γ^(-L/2) … γ^L within float32, and with
    tokens up to 1e5 their gradients too.
    """
    (B, T, J, d), m, w, (Z, past) = v.shape, k.shape[-1], Q.shape[-1], state
    C = -(-T // L)                                              # chunks; the last may be shorter
    if T == 0:
        raise ValueError(f"empty sequence: v {tuple(v.shape)}, k {tuple(k.shape)}")
    gamma = powers(torch.arange(-L // 2, L + 1, device=v.device), log_rho, theta)   # γⁿ at L/2 + n

    def mix(weights, columns):                                  # Σ_j weights_j columns_j
        y = weights[:, 0, None, None] * columns[0]
        for j in range(1, w):
            y = torch.addcmul(y, weights[:, j, None, None], columns[j])
        return y                                                # (B, J, C L, m)

    def late(x, n):                                             # x_{t-n}; what is older, Z holds
        return F.pad(x, (0, 0, n, -n)) if n else x

    def cut(x):
        return x.unflatten(2, (C, L))                           # (B, J, C, L, ·)

    pasts = past.mT.split([d, m, m], -1)
    tokens = [torch.cat([p, x.transpose(1, 2), p.new_zeros(B, J, C * L - T, x.shape[-1])], 2)
              for p, x in zip(pasts, (v, k, u))]                # (B, J, w-1 + C L, ·)
    C_v, C_k, C_u = ([x[:, :, j:j + C * L] for j in range(w)] for x in tokens)
    r, K = mix(q, C_u), [mix(Q[:, i], C_k) for i in range(w)]   # r_t = C_u q and K̃_{t,i}
    o = young = 0
    for c in range(w):                                          # the window's own tokens, beside M
        power, keys = gamma[:, L // 2:], [late(x, n) for n, x in enumerate(K[w - 1 - c:])]
        key = sum((power[:, n, :1] * keys[n] for n in range(1, c + 1)), keys[0])
        o = o + cut((key * r).sum(-1, keepdim=True) * C_v[w - 1 - c])
        key = sum(power[:, n] * x[:, :, T - 1, None] for n, x in enumerate(keys))
        young = young + C_v[w - 1 - c][:, :, T - 1, :, None, None] * key[:, :, None]

    U = cut(r)[..., None, :] * conjugate(gamma[:, None, 1:L + 1])                   # γ^{t-c} r_t
    K = [cut(x)[..., None, :] * gamma[:, None, i:i + L].flip(2) for i, x in enumerate(keys)]
    U, K, V = U.flatten(-2), reduce(torch.add, K).flatten(-2), cut(C_v[0])          # γ^{c-s} κ_s
    X, half = (V.mT @ K).unflatten(-1, (-1, m)), gamma[:, None, L, None]    # (B, J, C, d, parts, m)
    M = torch.cat([in_parts(Z, theta)[:, :, None], times(half, X[:, :, :-1])], 2)
    M = carry(M, L, log_rho, theta)                             # M where each chunk starts
    o = o + (U @ K.mT).tril(-1) @ V + U @ times(half, M).flatten(-2).mT

    end = T - (C - 1) * L                                       # tokens of the last chunk
    X = (V[:, :, -1, :end - 1].mT @ K[:, :, -1, :end - 1]).unflatten(-1, (-1, m))
    Z = times(gamma[:, L // 2 + end, None], M[:, :, -1]) + times(gamma[:, end, None], X) + young
    Z = Z[..., 0, :] if theta is None else torch.complex(*Z.unbind(-2))
    past = torch.cat([x[:, :, T:T + w - 1] for x in tokens], -1).mT
    return o.flatten(2, 3)[:, :, :T].transpose(1, 2).to(v.dtype), (Z, past)


# Numbers in parts, (…, 1 | 2, m): the real one, and the imaginary one if there is an angle θ.

def powers(n, log_rho, theta):
    """γⁿ = ρⁿ (cos nθ, sin nθ) for exponents n (…): (J, …, parts, m)."""
    (J, m), n = log_rho.shape, n[..., None]
    rho = torch.exp(n * log_rho.view(J, *[1] * (n.ndim - 1), m))
    if theta is None:
        return rho[..., None, :]
    angle = n * theta.view(J, *[1] * (n.ndim - 1), m)
    return torch.stack([rho * angle.cos(), rho * angle.sin()], -2)


def times(a, x):
    if a.shape[-2] == 1:
        return a * x
    (a, b), (x, y) = a.unbind(-2), x.unbind(-2)
    return torch.stack([a * x - b * y, a * y + b * x], -2)


def conjugate(a):
    return a if a.shape[-2] == 1 else torch.stack([a[..., 0, :], -a[..., 1, :]], -2)


def in_parts(Z, theta):
    if theta is None:
        return Z[..., None, :]
    return torch.stack([Z.real, Z.imag] if Z.is_complex() else [Z, torch.zeros_like(Z)], -2)


def carry(b, n, log_rho, theta, G=16):
    """M_c = Σ_{c' ≤ c} γ^{n(c-c')} b_{c'} for b (B, J, C, d, parts, m), and M of the same shape.

    G of them at a time are one product with the powers of γⁿ, a triangle D. What a group of G hands
    on to the next is carried the same way, with γ^{nG}.
    """
    C = b.shape[2]
    if C == 1:
        return b
    log_rho, G, ages = n * log_rho, min(C, G), torch.arange(min(C, G), device=b.device)
    if theta is not None:
        theta = torch.atan2((n * theta).sin(), (n * theta).cos())           # small, for the sake of float32
    age = ages[:, None] - ages                                              # (G, G)
    D = powers(age.clamp(min=0), log_rho, theta) * (age >= 0)[..., None, None]
    D = torch.stack([D] if theta is None else [D, torch.stack([-D[..., 1, :], D[..., 0, :]], -2)], -2)
    b = F.pad(b, (0, 0, 0, 0, 0, 0, 0, -C % G)).unflatten(2, (-1, G))       # (B, J, groups, G, d, parts, m)
    M = torch.einsum("jghqpm,bjchdpm->bjcgdqm", D, b)
    if C > G:
        before = carry(M[:, :, :-1, -1], G, log_rho, theta, G)              # (B, J, groups-1, d, parts, m)
        before = times(powers(ages + 1, log_rho, theta)[:, None, :, None], before[:, :, :, None])
        M = M + F.pad(before, (0, 0, 0, 0, 0, 0, 0, 0, 1, 0))
    return M.flatten(2, 3)[:, :, :C]


def associative_scan(a, b):
    """z_t = a_t z_{t-1} + b_t along axis 1, from zero and in log depth; a constant a has one entry there.

    Pairs of steps are merged into one, the half as long sequence is solved the same way, and the rest filled in.
    """
    T, n = b.shape[1], b.shape[1] // 2
    if n == 0:
        return b
    a0, a1, a2 = [a] * 3 if a.shape[1] == 1 else (a[:, :2 * n:2], a[:, 1::2], a[:, 2::2])
    z = torch.empty_like(b)
    z[:, 0] = b[:, 0]
    z[:, 1::2] = associative_scan(a1 * a0, b[:, 1::2] + a1 * b[:, :2 * n:2])
    z[:, 2::2] = b[:, 2::2] + a2 * z[:, 1:T - 1:2]
    return z


def scan(a, b, z0):
    """z_t = a_t ⊙ z_{t-1} + b_t along axis 1 (Eq. 1), one scan for every model; a (B|1, T|1, …), b (B, T, …), z0 (B, …)."""
    return _Scan.apply(a, b, z0)


class _Scan(torch.autograd.Function):
    """The scan with its gradient written as the same scan backwards, so that only a and z are kept."""

    @staticmethod
    def forward(ctx, a, b, z0):
        z = b.clone()
        z[:, 0].addcmul_(a[:, 0], z0)
        z = _solve(a, z)
        ctx.save_for_backward(a, z, z0)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        a, z, z0 = ctx.saved_tensors
        g = _solve(a.conj(), g.clone(), back=True)                          # dL/db_t = g_t + ā_{t+1} dL/db_{t+1}
        z = torch.cat([z0[:, None], z[:, :-1]], 1)
        return (g * z.conj()).sum_to_size(a.shape), g, (a[:, 0].conj() * g[:, 0]).sum_to_size(z0.shape)


def _solve(a, z, back=False):
    """z_t += a_t z_{t-1}, or backwards z_t += a_{t+1} z_{t+1}; z may be overwritten.

    On a CPU, where a step is long enough to fill it, one step after the other: that reads everything once.
    """
    if z.device.type == "cpu" and z[:, 0].numel() >= 1024:
        steps, gates = z.unbind(1), a.expand(-1, z.shape[1], *a.shape[2:]).unbind(1)[1:]
        steps, gates = (steps[::-1], gates[::-1]) if back else (steps, gates)
        for a_t, before, z_t in zip(gates, steps, steps[1:]):
            z_t.addcmul_(a_t, before)
        return z
    if back:
        a = torch.cat([a[:, 1:], a[:, :1]], 1)                              # a_{t+1} meets z_{t+1}
        return associative_scan(a.flip(1), z.flip(1)).flip(1)
    return associative_scan(a, z)


def gril_step(v, k, u, Q, q, A, state):
    """Definition 4.2 for one token of a stream: v, k, u (B, J, d | m | m) with the state (Z, the last w-1 tokens)."""
    Z, past = state                                                         # (B, J, d, m), (B, J, d+2m, w-1)
    C = torch.cat([past, torch.cat([v, k, u], -1)[..., None]], -1)          # (B, J, d+2m, w)
    C_v, C_k, C_u = C.split([v.shape[-1], k.shape[-1], u.shape[-1]], -2)
    Z = (Z if A is None else A * Z) + C_v @ Q @ C_k.mT                      # (B, J, d, m)
    o = (real(Z) @ (C_u @ q[..., None]))[..., 0]                            # (B, J, d)
    return o, (Z, C[..., 1:])


def gril_query(V, K, r, A):
    """o_T alone, without any state: o_T = Σ_t Σ_i V_ti ⊙ (A^{T-t} (K_ti ⊙ r_T)), for training on the query's loss.

    Columns come first: V (w, T, B, J, d), K (w, T, B, J, m), r (B, J, m) -> (B, J, d). The same sum as Z_T r_T with the
    read-out taken first: a product with the T powers of the gate, which never forms the (B, T, d, m) outer products.
    """
    w, T, B, J, d = V.shape
    A = A.reshape((1,) * (3 - A.ndim) + A.shape).expand(J, d, K.shape[4])
    V, X = (x.permute(1, 3, 0, 2, 4).reshape(T, J, w * B, -1) for x in (V, K * r))
    ages = torch.arange(T - 1, -1, -1, dtype=A.real.dtype, device=A.device)[:, None, None, None]
    o = V * (X @ (A ** ages).mT)                                            # (T, J, w B, d)
    return o.view(T, J, w, B, d).sum((0, 2)).transpose(0, 1)                # (B, J, d)


def columns(s, w, stride):
    """The columns of all windows that lie within the tokens s (B, L, f): (w, T, B, f)."""
    T = (s.shape[1] - w) // stride + 1
    if T < 1:
        raise ValueError(f"a window of {w} is longer than the sequence of {s.shape[1]} tokens")
    s = s.transpose(0, 1)
    return torch.stack([s[i:i + stride * (T - 1) + 1:stride] for i in range(w)])


def real(x):
    return x.real if x.is_complex() else x


def _prepare(V, K, r, A, Z0):
    """Checks shapes; state and gate become at least float32 (float64, complex when the inputs are); A gets 3 axes."""
    shapes = f"V {tuple(V.shape)}, K {tuple(K.shape)}, r {tuple(r.shape)}"
    if V.ndim != 5 or K.ndim != 5 or r.ndim != 4 or V.shape[:3] != K.shape[:3] or V.shape[4] != K.shape[4] \
            or r.shape != K.shape[:4]:
        raise ValueError(f"shapes do not fit V (B, T, J, d, w), K (B, T, J, m, w), r (B, T, J, m): got {shapes}")
    if V.shape[1] == 0:
        raise ValueError(f"empty sequence: {shapes}")
    for name, x in dict(V=V, K=K, r=r).items():
        if not x.is_floating_point():
            raise ValueError(f"{name} must be real floating point, got {x.dtype}")
    B, T, J, d, _ = V.shape
    m = K.shape[3]
    if A is not None:
        if not (A.is_floating_point() or A.is_complex()):
            raise ValueError(f"A must be floating point or complex, got {A.dtype}")
        if A.ndim > 3 or any(a not in (1, n) for a, n in zip(A.shape[::-1], (m, d, J))):
            raise ValueError(f"gate A {tuple(A.shape)} does not broadcast to (J, d, m) = {(J, d, m)}")
    if Z0 is not None and Z0.shape != (B, J, d, m):
        raise ValueError(f"Z0 {tuple(Z0.shape)} is not (B, J, d, m) = {(B, J, d, m)}")
    dtype = reduce(torch.promote_types, (x.dtype for x in (V, K, r)), torch.float32)
    Z_dtype = reduce(torch.promote_types, (x.dtype for x in (A, Z0) if x is not None), dtype)
    if A is not None:
        A = A.to(Z_dtype).reshape((1,) * (3 - A.ndim) + A.shape)
    Z0 = V.new_zeros(B, J, d, m, dtype=Z_dtype) if Z0 is None else Z0.to(Z_dtype)
    dtype = Z_dtype.to_real()
    return V.to(dtype), K.to(dtype), r.to(dtype), A, Z0, V.dtype


def full_precision(device_type):
    """No autocast: a state is float32 even in a bfloat16 run. There CUDA's products of float32 are TF32 (train.py)."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


# ---------------------------------------------------------------------------------------- 3. the in-context layers
# Each takes tokens (B, L, f) and gives one prediction per recurrent step, (B, T, outputs); the last is the query's.

def interleave(x, y):
    """The prompt x_1, y_1, …, x_N, y_N, x_query of Sec. 4.2 from x (B, N+1, ·), y (B, N, ·), the narrower zero-padded."""
    f = max(x.shape[-1], y.shape[-1])
    x, y = (F.pad(z, (0, f - z.shape[-1])) if z.shape[-1] < f else z for z in (x, y))
    pairs = torch.stack([x[:, :-1], y], 2).flatten(1, 2)                    # (B, 2N, f)
    return torch.cat([pairs, x[:, -1:]], 1)                                 # (B, 2N+1, f)


SCALAR_VARIANTS = {             # App. C.1: what Ψ is fed, how the state is read
    "full":       dict(product=True, query=True),
    "no_input":   dict(product=False, query=True),
    "no_output":  dict(product=True, query=False),
    "neither":    dict(product=False, query=False),
}


class ScalarGRIL(nn.Module):
    """Eq. 12 to 14 (App. A.1): z_t = A ⊙ z_{t-1} + Ψ c_t, o_t = β z_tᵀ Θ c_t with c_t = [x_t y_t, x_{t+1}].

    Tokens are the raw [x_t, y_t, x_{t+1}]; the layer forms the product x_t y_t ("input construction") itself, so that
    its ablation sees the same data. Without "output construction" the state is read by a learned vector, o = uᵀ z.
    """
    recurrent = ("A",)

    def __init__(self, f, hidden=None, variant="full"):
        super().__init__()
        self.f, self.variant = f, known("variant", variant, SCALAR_VARIANTS)
        hidden, width = hidden or f, 2 * f if self.variant["product"] else 2 * f + 1
        if hidden < f:
            raise ValueError(f"ScalarGRIL: a hidden size of {hidden} cannot hold the gradient of {f} weights")
        self.Psi = nn.Parameter(torch.randn(hidden, width) / math.sqrt(width))
        if self.variant["query"]:
            self.Theta = nn.Parameter(torch.randn(hidden, width) / math.sqrt(width))
        else:
            self.u = nn.Parameter(torch.randn(hidden) / math.sqrt(hidden))
        self.A = nn.Parameter(torch.empty(hidden).uniform_(0.9, 1))
        self.beta = nn.Parameter(torch.ones(1))

    def operands(self, s):
        x, y, x_next = s.split([self.f, 1, self.f], -1)
        c = torch.cat([x * y, x_next], -1) if self.variant["product"] else s        # (B, T, 2f | 2f+1)
        V = torch.ones_like(c[:, :, None, :1, None])                                # z is the one row of Z: d = w = 1
        r = c @ self.Theta.mT if self.variant["query"] else self.u.expand(*c.shape[:2], -1)
        return V, (c @ self.Psi.mT)[:, :, None, :, None], (_per_step(self.beta) * r)[:, :, None], self.A

    def forward(self, s):
        return gril_scan(*self.operands(s))[0][:, :, 0]                             # (B, T, 1)

    def query(self, s):
        V, K, r, A = self.operands(s)
        V, K = (x.permute(4, 1, 0, 2, 3) for x in (V, K))                           # (1, T, B, 1, ·)
        return gril_query(V, K, r[:, -1], A)[:, 0]                                  # (B, 1)


VARIANTS = {                    # App. C.2, and the window of two that qualifies "w = 3 is minimal"
    "full":       dict(w=3, stride=2, query=True),
    "no_window":  dict(w=1, stride=1, query=True),
    "no_readout": dict(w=3, stride=2, query=False),
    "neither":    dict(w=1, stride=1, query=False),
    "w2":         dict(w=2, stride=1, query=True),
}


class GRIL(nn.Module):
    """Definition 4.2 on interleaved tokens (Sec. 4.2): one layer, one gradient step on W, where o = W x."""
    recurrent = ("A",)

    def __init__(self, f, variant="full"):
        super().__init__()
        self.variant = known("variant", variant, VARIANTS)
        w = self.variant["w"]
        self.Q = nn.Parameter(0.05 * torch.randn(w, w) / w)     # small: what the loss does not ask for stays small
        self.A = nn.Parameter(torch.empty(f, f).uniform_(0.9, 1))
        self.beta = nn.Parameter(torch.ones(1))
        if self.variant["query"]:
            self.q = nn.Parameter(torch.randn(w) / math.sqrt(w))
        else:
            self.u = nn.Parameter(torch.randn(f) / math.sqrt(f))                    # reads the state without a query

    def operands(self, s):
        C = window(s, self.variant["w"], self.variant["stride"], causal=False)      # (B, T, f, w)
        r = C @ self.q if self.variant["query"] else self.u.expand(*C.shape[:3])    # (B, T, f)
        return (C @ self.Q)[:, :, None], C[:, :, None], (_per_step(self.beta) * r)[:, :, None], self.A

    def forward(self, s):
        return gril_scan(*self.operands(s))[0][:, :, 0]                             # (B, T, f)

    def query(self, s):
        C = columns(s, self.variant["w"], self.variant["stride"])                   # (w, T, B, f)
        r = (self.q @ C[:, -1].flatten(1)).view_as(C[0, 0]) if self.variant["query"] else self.u.expand_as(C[0, 0])
        V = (self.Q.mT @ C.flatten(1)).view_as(C)
        return gril_query(V[:, :, :, None], C[:, :, :, None], self.beta[-1] * r[:, None], self.A)[:, 0]     # (B, f)


class MultistepGRIL(nn.Module):
    """App. A.3, Proposition A.1: a gradient step per layer, W_l = (1-ηλ) W_{l-1} + β_l (Z_l - W_{l-1} Z̃_l), o = W_L C q.

    Each layer sees the same window and has two heads, Z = Σ y xᵀ and Z̃ = Σ x xᵀ. No W_l is ever formed: the layers are
    walked from the top with the read-out vector, since W_l r = β_l Z_l r + W_{l-1} (r - ηλ r - β_l Z̃_l r). With
    loops=k the whole stack is applied k times with the same weights. `decay` is ηλ (App. A.5).
    """
    recurrent = ("A",)

    def __init__(self, f, layers=2, loops=1):
        super().__init__()
        self.loops = loops
        self.Q = nn.Parameter(0.1 * torch.randn(layers, 2, 3, 3) / 3)
        self.q = nn.Parameter(torch.randn(3) / math.sqrt(3))
        self.A = nn.Parameter(torch.empty(layers, 2, f, f).uniform_(0.9, 1))
        self.beta = nn.Parameter(torch.ones(layers, 1))
        self.register_buffer("decay", torch.zeros(layers))
        self.register_buffer("W0", torch.zeros(f, f))

    def forward(self, s):
        C = window(s, 3, 2, causal=False)                                           # (B, T, f, 3)
        return self.walk(C, C @ self.q, lambda V, K, r, A: gril_scan(V, K, r, A)[0])        # (B, T, f)

    def query(self, s):
        C = window(s, 3, 2, causal=False)
        return self.walk(C, C[:, -1] @ self.q,
                         lambda V, K, r, A: gril_query(V.permute(4, 1, 0, 2, 3), K.permute(4, 1, 0, 2, 3), r, A))      # (B, f)

    def walk(self, C, r, read):
        K, o = C[:, :, None].expand(-1, -1, 2, -1, -1), 0                           # (B, T, 2, f, 3), for both heads
        for l in reversed(list(range(len(self.Q))) * self.loops):
            V = (C @ self.Q[l].mT.flatten(0, 1).mT).unflatten(-1, (2, 3)).movedim(-2, 2)    # (B, T, 2, f, 3)
            ZZ = read(V, K, r[..., None, :].expand(*r.shape[:-1], 2, -1), self.A[l])        # (B, [T,] 2, f)
            beta = self.beta[l][:, None] if r.ndim == 3 else self.beta[l][-1]
            Zr, Zr_tilde = ZZ.unbind(-2)                                            # (B, [T,] f)
            o, r = o + beta * Zr, r - self.decay[l] * r - beta * Zr_tilde
        return o + r @ self.W0.mT


class NonlinearGRIL(nn.Module):
    """App. A.4 and B.4: a linear layer, then the weighted sigmoid gated unit y ⊙ σ(W GELU(y)) on its output."""

    def __init__(self, f, layers=1):
        super().__init__()
        self.linear = GRIL(f) if layers == 1 else MultistepGRIL(f, layers)
        self.gate = nn.Linear(f, f)

    def unit(self, y):
        return y * self.gate(F.gelu(y)).sigmoid()

    def forward(self, s):
        return self.unit(self.linear(s))                                            # (B, T, f)

    def query(self, s):
        return self.unit(self.linear.query(s))                                      # (B, f)


class StateMLPGRIL(nn.Module):
    """App. A.4: ρ on each row of the state before it is read, o_t = β ρ(Z_t) C_t q. A departure: ρ(Z) = Z + MLP(Z)."""

    def __init__(self, f):
        super().__init__()
        self.linear = GRIL(f)
        self.rho = mlp(f, 4 * f, f)                             # the skip: training starts near the linear layer

    def forward(self, s):
        V, K, r, A, Z0, _ = _prepare(*self.linear.operands(s), None)
        Z = states(V, K, A, Z0)                                                     # (B, T, 1, f, f)
        return ((Z + self.rho(Z)) @ r[..., None])[:, :, 0, :, 0]                    # (B, T, f)

    def query(self, s):
        V, K, r, A = self.linear.operands(s)
        _, Z = gril_scan(V, K, r, A)                                                # (B, 1, f, f)
        return ((Z + self.rho(Z)) @ r[:, -1, ..., None])[:, 0, :, 0]                # (B, f)


class ClassifierGRIL(nn.Module):
    """Sec. 4.4, Proposition 4.3: windows (φ(x_t), y_t - p_t, φ(x_{t+1})); the state holds minus the gradient of Eq. 11.

    Tokens of width f + K: x_t in the first f places, the error y_t - p_t at W = 0 (one-hot minus 1/K; ±½ when binary,
    K = 1) in the last K. Sharing places would do for the construction, but some seeds then train into a feature map with
    a dead direction, in the place that holds the error too. φ(x) = x + MLP(x): with the MLP alone, where the paper leaves
    it, three seeds of five stay on a plateau of binary classification.
    """

    def __init__(self, f, K, identity=False):
        super().__init__()
        self.f, self.K = f, K
        self.phi = None if identity else mlp(f, 4 * f, f)
        self.linear = GRIL(f + K)

    def features(self, s):
        x = s[:, ::2, :self.f]                                                      # (B, N+1, f)
        x = x if self.phi is None else x + self.phi(x)
        return interleave(F.pad(x, (0, self.K)), s[:, 1::2])                        # (B, 2N+1, f+K)

    def forward(self, s):
        return self.linear(self.features(s))[..., self.f:]                          # logits (B, N, K)

    def query(self, s):
        return self.linear.query(self.features(s))[..., self.f:]                    # (B, K)


def beside(x, y):
    """x and y in places of their own, zero elsewhere (the paper's footnote in Sec. 4.2): widths k and l into k + l."""
    return F.pad(x, (0, y.shape[-1])), F.pad(y, (x.shape[-1], 0))


def linear_attention(s, W_Q, W_K, W_V, form=gril_scan):
    """w = 1 (Sec. 4.5, Eq. 3): Z_t = Z_{t-1} + (W_Vᵀ s_t)(W_Kᵀ s_t)ᵀ, o_t = Z_t W_Qᵀ s_t."""
    o, _ = form((s @ W_V)[:, :, None, :, None], (s @ W_K)[:, :, None, :, None], (s @ W_Q)[:, :, None], None)
    return o[:, :, 0]                                                               # (B, T, d)


def mlp(f, hidden, out):
    return nn.Sequential(nn.Linear(f, hidden), nn.GELU(), nn.Linear(hidden, out))


def _per_step(beta):
    """β is one number, or one per step t (η/t, for exact gradient descent on every prefix): made to fit (B, T, ·)."""
    return beta[:, None]


# ------------------------------------------------------------------------------------------- 4. the constructions
# Each sets a layer's weights so that its forward pass is gradient descent with step size eta on the mean loss of the
# N examples, and returns the layer. N may be a tensor 1 … T: then step t is gradient descent on the first t examples.

@torch.no_grad()
def construct_scalar(layer, eta, N):
    """App. A.1: Ψ = [I 0], Θ = [0 I], A = 1, β = η/N."""
    hidden, f = len(layer.A), layer.f
    eye = torch.eye(hidden, f).to(layer.Psi)
    layer.Psi.copy_(torch.cat([eye, 0 * eye], 1))
    layer.Theta.copy_(torch.cat([0 * eye, eye], 1))
    layer.A.fill_(1)
    layer.beta = _step_size(layer.beta, eta, N)
    return layer


@torch.no_grad()
def construct_multivariate(layer, eta, N):
    """Sec. 4.2, Proposition 4.1: Q = e₂ e₁ᵀ, q = e₃, A = 1, β = η/N, so that Z = Σ y xᵀ is read with x_query."""
    e1, e2, e3 = torch.eye(3).to(layer.Q)
    layer.Q.copy_(torch.outer(e2, e1))
    layer.q.copy_(e3)
    layer.A.fill_(1)
    layer.beta = _step_size(layer.beta, eta, N)
    return layer


@torch.no_grad()
def construct_multistep(layer, eta, N, W0=None, weight_decay=0.0):
    """App. A.3: heads Q = e₂ e₁ᵀ and Q̃ = e₁ e₁ᵀ, q = e₃, A = 1, β = η/N, from W0; eta may be one per layer.

    App. A.5: for the loss plus (λ/2) ‖W‖², λ = weight_decay, each step also takes ηλ W. The paper's formula has
    (η/N) W there, which belongs to neither (λ/2) ‖W‖² nor its own ‖W‖²; the recurrence is untouched either way.
    """
    e1, e2, e3 = torch.eye(3).to(layer.Q)
    layer.Q.copy_(torch.stack([torch.outer(e2, e1), torch.outer(e1, e1)]).expand_as(layer.Q))
    layer.q.copy_(e3)
    layer.A.fill_(1)
    eta = torch.as_tensor(eta, dtype=layer.beta.dtype).expand(len(layer.beta)).to(layer.beta.device)
    layer.beta = _step_size(layer.beta, eta[:, None], N)
    layer.decay.copy_(eta * weight_decay)
    layer.W0.copy_(torch.zeros_like(layer.W0) if W0 is None else W0)
    return layer


def construct_softmax(model, eta, N):
    """App. A.6: the error of cross-entropy takes the place of y, so the weights are those of the multivariate case.

    With the paper's r = p - y the state would hold the gradient and β its minus; here the tokens are y - p, β = +η/N.
    """
    construct_multivariate(model.linear, eta, N)
    return model


def construct_binary(model, eta, N):
    """App. A.6, one logit: the same weights on tokens y - ½."""
    if model.K != 1:
        raise ValueError(f"construct_binary: the model has {model.K} logits, binary cross-entropy has one")
    return construct_softmax(model, eta, N)


def gd_dagger(model, eta, N):
    """GD† (Fig. 3B, Fig. 4): the recurrence frozen at the construction; the auxiliary map (and β) stay trainable."""
    construct = construct_multistep if isinstance(model.linear, MultistepGRIL) else construct_multivariate
    construct(model.linear, eta, N)
    for name in ("Q", "q", "A"):
        getattr(model.linear, name).requires_grad_(False)
    return model


def _step_size(beta, eta, N):
    eta, N = (torch.as_tensor(x, dtype=beta.dtype, device=beta.device) for x in (eta, N))
    return nn.Parameter(eta / N.reshape(-1), requires_grad=beta.requires_grad)


# ------------------------------------------------------------------------------------------- 5. the sequence block

class Mixer(nn.Module):
    """A layer of a sequence model: give it run(x, state) -> (y, state), and it streams.

    run takes a stretch (B, T, H) from a state (None at the start) to the next one.
    """
    recurrent = ()                                              # parameters with the lower learning rate, undecayed
    writes = None                                               # the Linear whose output is added to the residual stream

    def step(self, x, state=None):
        """One token of a stream: (B, H), state -> (B, H), state."""
        y, state = self.run(x[:, None], state)
        return y[:, 0], state

    def forward(self, x):
        return self.run(x)[0]


class GrilMixer(Mixer):
    """The recurrence between projections (App. D): (B, T, H) -> (B, T, H), J states of (P/J) × (P/J), causal.

    u = W_in z;  windows over u, W_k u, W_v u;  V = C_v Q, K = γ-normalised C_k, r = β C_u q per block;
    y = GELU(W_out o + D ⊙ z);  W_1 y ⊙ σ(W_2 y).     2H² + 2PH + 2P² parameters, and a few per channel.
    The gate is the LRU's: one λ = exp(-exp ν + i exp θ) per key channel, inputs scaled by √(1 - |λ|²).
    """
    recurrent = ("nu", "theta", "Q", "q", "beta")               # trained with the lower learning rate, undecayed
    writes = "glu"

    def __init__(self, H, P, J, w=3, r_min=0.0, r_max=0.99, max_phase=2 * math.pi, gate="complex", form="chunk", beta=1.0):
        super().__init__()
        if P % J:
            raise ValueError(f"GrilMixer: state size P = {P} is not divisible by J = {J} blocks")
        if not 0 <= r_min <= r_max <= 1:
            raise ValueError(f"GrilMixer: a gate starts between r_min = {r_min} and r_max = {r_max}, which must be in order "
                             "and between 0 and 1")
        known("gate", gate, dict.fromkeys(("real", "complex")))
        self.J, self.h, self.w = J, P // J, w
        self.form = known("form", form, {"loop": gril_loop, "scan": gril_scan, "chunk": gril_chunk})
        self.L = min(64, max(16, 1 << (self.h - 1).bit_length()))                   # a chunk's state is h × h
        self.W_in = nn.Linear(H, P, bias=False)
        self.W_vk = nn.Linear(P, 2 * P, bias=False)
        self.W_out = nn.Linear(P, H, bias=False)
        for W in (self.W_in, self.W_vk, self.W_out):
            nn.init.normal_(W.weight, std=W.in_features ** -0.5)                    # unit variance in, unit variance out
        self.D = nn.Parameter(torch.randn(H))
        self.glu = nn.Linear(H, 2 * H)
        self.Q = nn.Parameter(torch.randn(J, w, w) / math.sqrt(w))
        self.q = nn.Parameter(torch.randn(J, w) / math.sqrt(w))
        self.beta = nn.Parameter(torch.full((J,), beta))
        radius = torch.empty(J, self.h).uniform_(r_min ** 2, r_max ** 2).clamp(1e-6, 1 - 1e-6)   # |λ|²
        self.nu = nn.Parameter((-0.5 * radius.log()).log())
        self.theta = nn.Parameter((max_phase * torch.rand(J, self.h)).clamp(min=1e-6).log()) if gate == "complex" else None

    def gates(self):
        """log |λ| and the angle of λ (None if real), (J, h), and the key scale √(1 - |λ|²) / √h.

        |λ| stays between gril_chunk's e^(-80/L) and 1: a departure from the LRU, where it may go to 0.
        """
        log_rho = -self.nu.clamp(-50, math.log(80 / self.L)).exp()
        scale = (-torch.expm1(2 * log_rho) / self.h).sqrt()
        return log_rho, None if self.theta is None else self.theta.exp(), scale

    def tokens(self, z, scale):
        """(…, H) -> v, k, u (…, J, h), what the windows run over; keys get their scale through their weights."""
        u = self.W_in(z)
        W_v, W_k = self.W_vk.weight.chunk(2)
        v, k = F.linear(u, torch.cat([W_v, W_k * scale.flatten()[:, None]])).chunk(2, -1)
        return [x.unflatten(-1, (self.J, self.h)) for x in (v, k, u)]

    def output(self, o, z):
        return F.glu(self.glu(F.gelu(self.W_out(o.flatten(-2).to(z.dtype)) + self.D * z)))

    def recur(self, v, k, u, log_rho, theta, state):
        """The recurrence alone: tokens v, k, u (B, T, J, h) and a state -> o (B, T, J, h), state."""
        q = self.beta[:, None] * self.q
        if v.shape[1] == 1:
            v, k, u = (x[:, 0].to(log_rho.dtype) for x in (v, k, u))
            o, state = gril_step(v, k, u, self.Q, q, complex_gate(log_rho, theta), state)
            return o[:, None], state
        if self.form is gril_chunk:
            return gril_chunk(v, k, u, self.Q, q, log_rho, theta, state, self.L)
        Z, past = state
        tokens = torch.cat([v, k, u], -1).permute(0, 2, 3, 1).to(past.dtype)        # (B, J, 3h, T)
        tokens = torch.cat([past, tokens], -1)                                      # (B, J, 3h, w-1+T)
        C = tokens.unfold(-1, self.w, 1).movedim(3, 1)                              # (B, T, J, 3h, w)
        C_v, C_k, C_u = C.split(self.h, -2)                                         # (B, T, J, h, w) each
        r = torch.einsum("btjhw,jw->btjh", C_u, q)
        o, Z = self.form(C_v @ self.Q, C_k, r, complex_gate(log_rho, theta), Z)
        return o, (Z, tokens[..., tokens.shape[-1] - (self.w - 1):])

    def run(self, z, state=None):
        """A stretch of the sequence from a state to the next one: (B, T, H), state -> (B, T, H), state."""
        log_rho, theta, scale = self.gates()
        v, k, u = self.tokens(z, scale)                                             # (B, T, J, h)
        with full_precision(z.device.type):                                         # state and gate stay float32
            state = self.start(z) if state is None else state
            o, state = self.recur(v, k, u, log_rho, theta, state)
        return self.output(o, z), state

    def start(self, z):
        """The empty state: Z = 0 and a window of zeros; a complex gate makes Z complex."""
        dtype = torch.promote_types(self.nu.dtype, torch.float32)
        return (z.new_zeros(len(z), self.J, self.h, self.h, dtype=dtype),
                z.new_zeros(len(z), self.J, 3 * self.h, self.w - 1, dtype=dtype))


def complex_gate(log_rho, theta):
    """λ (J, 1, h) as loop, scan and step take it."""
    return (log_rho.exp() if theta is None else torch.polar(log_rho.exp(), theta))[:, None]


class Block(Mixer):
    """x + dropout(mixer(LayerNorm(x))), for GRIL and every other mixer."""

    def __init__(self, mixer, H, dropout=0.0):
        super().__init__()
        self.norm, self.mixer, self.dropout = nn.LayerNorm(H), mixer, nn.Dropout(dropout)

    def run(self, x, state=None):
        y, state = self.mixer.run(self.norm(x), state)
        return x + self.dropout(y), state

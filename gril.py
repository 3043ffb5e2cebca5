"""GRIL: a linear recurrent network whose state does gradient descent on the examples in its prompt.

The model of "Learning in the Recurrent State: Gradient Descent with Linear Recurrent Networks":

  1. window         the context matrix C_t                                        Sec. 4.2, Eq. 9
  2. recurrence     Z_t = A ⊙ Z_{t-1} + C_t Q C_tᵀ,  o_t = β Z_t C_t q            Definition 4.2
  3. layers         scalar, multivariate, multi-step, non-linear, classification  Sec. 4, App. A
  4. constructions  weights with which a layer's forward pass *is* gradient descent
  5. block          the same recurrence between projections, for long sequences   App. D

  s, f      tokens (B, L, f) and their width            C_t   window, the w tokens of step t (f, w)
  Z_t       recurrent state (d, m)                      A     gate, multiplies Z elementwise
  Q, q, β   mix, select, scale the window's columns     o_t   read-out (d)
  J         independent states side by side             η, N  step size, examples in the prompt

Loop, scan and query (from Z = 0, with a gate) share a signature and a layout of axes; β is the
caller's:

  o, Z_T = form(C_v, C_k, C_u, Q, q, A, Z0)       Z_t = A ⊙ Z_{t-1} + C_v Q C_kᵀ,  o_t = Z_t C_u q
  C_v (B, T, J, d, w)  C_k (B, T, J, m, w)  C_u (B, T, J, m, n)  o (B, T, J, d)  Z (B, J, d, m)
  Q (J, w, w)  q (J, n)  A broadcasts to (J, d, m); J may be 1 in any of them

An in-context layer passes one window three times; the block has windows over values, keys and
queries. Chunk and step take tokens v, k, u (B, T, J, ·), not windows: their state is Z and the last
w-1 tokens, from which they make the windows. A gate beyond 1 is not refused: Z grows as |A|^T.

Sign, a departure from the paper: it writes the state as +gradient in Eq. 5 and as -gradient in
Eq. 7 (and App. A.1 mixes both, which would climb). Here the state always holds +Σ y xᵀ, minus the
gradient at W = 0, and β = +η/N. W is the paper's Wᵀ: y = W x here, ŷ = Wᵀ x in Sec. 4.2.
"""
import math
from functools import reduce

import torch
import torch.nn.functional as F
from torch import nn

from machine.errors import fitting, known
from machine.scan import (aged, carry, conjugate, full_precision, in_parts, last, loop, powers,
                          scan, times)


# ---------------------------------------------------------------------------------- 1. the window

def window(s, w=3, stride=1, causal=True, past=None):
    """Context matrices C_t (Eq. 9): tokens (B, L, f) to windows (B, T, f, w).

    In context, stride=2 and causal=False make (x_t, y_t, x_{t+1}) of x_1, y_1, x_2, …
    In the block (App. D, F) a window is causal, (s_{t-2}, s_{t-1}, s_t): before the first token
    stand zeros, or the last w-1 tokens of the stretch before, past (B, w-1, f).
    """
    if s.ndim != 3:
        raise ValueError(f"window: tokens must be (B, L, f), got {tuple(s.shape)}")
    if not s.is_floating_point():
        raise ValueError(f"window: tokens must be real, got {s.dtype}; embed integer tokens first")
    if s.shape[1] == 0:
        raise ValueError(f"window: empty sequence {tuple(s.shape)}")
    if causal:
        past = s.new_zeros(len(s), w - 1, s.shape[2]) if past is None else past
        s = torch.cat([past, s], 1)                                         # (B, w-1+L, f)
    if s.shape[1] < w:
        raise ValueError(f"a window of {w} is longer than the sequence of {s.shape[1]} tokens")
    return s.unfold(1, w, stride)                                           # (B, T, f, w)


# ------------------------------------------------------------------------------ 2. the recurrence

def gril_loop(C_v, C_k, C_u, Q, q, A, Z0=None):
    """Definition 4.2, line by line: the reference. Any gate; Z is carried, nothing else is kept."""
    dtype, outputs = C_v.dtype, []
    C_v, C_k, C_u, Q, q, A, Z = _prepare(C_v, C_k, C_u, Q, q, A, Z0)
    A = 1 if A is None else A
    steps = zip(C_v.unbind(1), C_k.unbind(1), C_u.unbind(1), strict=True)
    for C_v, C_k, C_u in steps:
        Z = A * Z + C_v @ Q @ C_k.mT            # Eq. 10, C_t Q C_tᵀ: in context all C are C_t
        o = Z.real @ (C_u @ q)                  # only the block's gates are complex, (B, J, d, 1)
        outputs.append(o[..., 0])
    return torch.stack(outputs, 1).to(dtype), Z


def gril_scan(C_v, C_k, C_u, Q, q, A, Z0=None):
    """Definition 4.2, all steps at once: the same two lines on T states, and all T are held."""
    dtype = C_v.dtype
    C_v, C_k, C_u, Q, q, A, Z0 = _prepare(C_v, C_k, C_u, Q, q, A, Z0)
    Z = scan(A, C_v @ Q @ C_k.mT, Z0)                               # Eq. 10, (B, T, J, d, m)
    o = Z.real @ (C_u @ q)                                                  # (B, T, J, d, 1)
    return o[..., 0].to(dtype), Z[:, -1]


def gril_query(C_v, C_k, C_u, Q, q, A):
    """o_T alone, (B, 1, J, d): a shortcut for gril_loop's last `o = Z @ (C_u @ q)`, without any Z.

    With r = C_u q of the last step, and the read-out taken before the sum over steps t,

        o_T = Z_T r = Σ_t (A^{T-t} ⊙ C_v Q C_kᵀ) r = Σ_t Σ_i (C_v Q)_i ⊙ A^{T-t} (C_k,i ⊙ r)

    with columns i: one product with the powers of the gate instead of T outer products. For
    training on the query's loss, where all heads share windows and q: J = 1 in C, q (n).
    """
    (B, T, _, d, w), m = C_v.shape, C_k.shape[3]
    J = Q.numel() // w ** 2
    gates = aged(A.expand(J, d, m), T)                                      # (T, J, d, m)
    r = (C_u[:, -1] @ q).transpose(0, 1)                                    # (1, B, m)
    K = C_k.permute(1, 2, 4, 0, 3).contiguous() * r[:, None]                # (T, 1, w, B, m)
    V = Q.mT.reshape(-1, w) @ C_v.permute(4, 1, 2, 0, 3).flatten(1)         # (J w, T B d)
    V = V.view(J, w, T, B, d).permute(2, 0, 1, 3, 4)                        # (T, J, w, B, d)
    o = V * (K.flatten(2, 3) @ gates.mT).view(V.shape)
    return o.sum((0, 2)).transpose(0, 1)[:, None], None


def gril_step(v, k, u, Q, q, A, state):
    """Definition 4.2 for one token of a stream, v (B, J, d), k, u (B, J, m), and the next state.

    The past holds the w-1 tokens before it, which App. F's causal window sees.
    """
    Z, past = state                                                         # (B, J, d+2m, w-1)
    C = torch.cat([past, torch.cat([v, k, u], -1)[..., None]], -1)          # (B, J, d+2m, w)
    C_v, C_k, C_u = C.split([v.shape[-1], k.shape[-1], u.shape[-1]], -2)
    Z = (Z if A is None else A * Z) + C_v @ Q @ C_k.mT                      # (B, J, d, m)
    o = (Z.real @ (C_u @ q[..., None]))[..., 0]                             # (B, J, d)
    return o, (Z, C[..., 1:])


def gril_chunk(v, k, u, Q, q, log_rho, theta, state, L=16):
    """Definition 4.2 on tokens v (B, T, J, d), k, u (B, T, J, m): o (B, T, J, d), the next state.

    The same windows as `window` makes, with a gate γ = ρ e^{iθ} per key channel, (J, m), real if θ
    is None; faster than a scan, and it holds no state per token.

    One key per token. The columns of a window are tokens, so the w outer products of a step can be
    regrouped by the token that they write. Let K̃_{t,i} = Σ_j Q_ij k_{t-w+1+j}; then, for w = 2,

        Z_t = γ Z_{t-1} + v_{t-1} K̃_{t,0}ᵀ + v_t K̃_{t,1}ᵀ  =  M_t + v_t K̃_{t,1}ᵀ
        M_t = γ M_{t-1} + v_{t-1} κ_tᵀ    with one key    κ_t = K̃_{t,0} + γ K̃_{t-1,1}

    For any w a token enters M once, w-1 steps late, with κ_t = Σ_i γ^i K̃_{t-i,i}: M is linear
    attention with a constant gate. The tokens of the window itself are read beside it, and so is
    what enters just now, with power γ⁰: written as γ^{t-c} γ^{c-t}, as in the product below, its
    gradient by γ, which is zero, would be a difference of two large numbers.

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
    if T == 0:
        raise ValueError(f"empty sequence: v {tuple(v.shape)}, k {tuple(k.shape)}")
    chunks = -(-T // L)                                         # the last may be shorter
    gamma = powers(torch.arange(-L // 2, L + 1, device=v.device), log_rho, theta)   # γⁿ at L/2 + n

    def mix(weights, columns):                                  # Σ_j weights_j columns_j
        y = weights[:, 0, None, None] * columns[0]
        for j in range(1, w):
            y = torch.addcmul(y, weights[:, j, None, None], columns[j])
        return y                                                # (B, J, chunks L, m)

    def late(x, n):                                             # x_{t-n}; what is older, Z holds
        return F.pad(x, (0, 0, n, -n)) if n else x

    def cut(x):
        return x.unflatten(2, (chunks, L))                      # (B, J, chunks, L, ·)

    pasts = past.mT.split([d, m, m], -1)                        # zeros at first: left padding
    whole = chunks * L
    tokens = [torch.cat([p, x.transpose(1, 2), p.new_zeros(B, J, whole - T, x.shape[-1])], 2)
              for p, x in zip(pasts, (v, k, u))]                # (B, J, w-1 + whole, ·)
    # App. F, the causal window: column j of C_t is token t-w+1+j; t-2, t-1, t for w = 3
    C_v, C_k, C_u = ([x[:, :, j:j + whole] for j in range(w)] for x in tokens)
    r, K = mix(q, C_u), [mix(Q[:, i], C_k) for i in range(w)]   # r_t = C_u q and K̃_{t,i}
    o = young = 0
    for j in reversed(range(w)):                                # the window's own tokens, beside M
        power, keys = gamma[:, L // 2:], [late(x, n) for n, x in enumerate(K[j:])]
        key = sum((power[:, n, :1] * keys[n] for n in range(1, w - j)), keys[0])
        o = o + cut((key * r).sum(-1, keepdim=True) * C_v[j])
        key = sum(power[:, n] * x[:, :, T - 1, None] for n, x in enumerate(keys))
        young = young + C_v[j][:, :, T - 1, :, None, None] * key[:, :, None]

    U = cut(r)[..., None, :] * conjugate(gamma[:, None, 1:L + 1])                   # γ^{t-c} r_t
    # keys are now those of the oldest token, j = 0: K̃_{t-i,i}, all terms of κ_t
    K = [cut(x)[..., None, :] * gamma[:, None, i:i + L].flip(2) for i, x in enumerate(keys)]
    U, K, V = U.flatten(-2), reduce(torch.add, K).flatten(-2), cut(C_v[0])          # γ^{c-s} κ_s
    half = gamma[:, None, L, None]
    X = (V.mT @ K).unflatten(-1, (-1, m))                       # (B, J, chunks, d, parts, m)
    M = torch.cat([in_parts(Z, theta)[:, :, None], times(half, X[:, :, :-1])], 2)
    M = carry(M, L, log_rho, theta)                             # M where each chunk starts
    o = o + (U @ K.mT).tril(-1) @ V + U @ times(half, M).flatten(-2).mT

    end = T - (chunks - 1) * L                                     # tokens of the last chunk
    X = (V[:, :, -1, :end - 1].mT @ K[:, :, -1, :end - 1]).unflatten(-1, (-1, m))
    Z = times(gamma[:, L // 2 + end, None], M[:, :, -1]) + times(gamma[:, end, None], X) + young
    Z = Z[..., 0, :] if theta is None else torch.complex(*Z.unbind(-2))
    past = torch.cat([x[:, :, T:T + w - 1] for x in tokens], -1).mT
    return o.flatten(2, 3)[:, :, :T].transpose(1, 2).to(v.dtype), (Z, past)


def _prepare(C_v, C_k, C_u, Q, q, A, Z0):
    """Shapes checked, q as a column, all at least float32: bfloat16 would stop counting at 256."""
    sizes = fitting(C_v=(C_v, "BTJdw"), C_k=(C_k, "BTJmw"), C_u=(C_u, "BTJmn"),
                    Q=(Q, "Jww"), q=(q, "Jn"), A=(A, "Jdm"), Z0=(Z0, "BJdm"))
    if sizes["T"] == 0:
        raise ValueError(f"empty sequence: C_v {tuple(C_v.shape)}")
    Z0 = C_v.new_zeros([sizes[axis] for axis in "BJdm"]) if Z0 is None else Z0
    weights, gates = (C_v, C_k, C_u, Q, q), (Z0,) if A is None else (A, Z0)
    dtype = reduce(torch.promote_types, (x.dtype for x in weights + gates), torch.float32)
    C_v, C_k, C_u, Q, q = (x.to(dtype.to_real()) for x in weights)
    return C_v, C_k, C_u, Q, q[..., None], A if A is None else A.to(dtype), Z0.to(dtype)


# ----------------------------------------------------------------------- 3. the in-context layers

FORMS = {"query": gril_query, "loop": gril_loop, "scan": gril_scan}
STATES = {"query": last, "loop": loop, "scan": scan}            # for layers that read Z themselves


class PromptLayer(nn.Module):
    """A layer on a prompt (B, L, f): give it run(s, form), a prediction per step (B, T, outputs).

    form is how query() computes the last of them: "query", the shortcut, "loop" or "scan", in full.
    """

    form = "query"

    def forward(self, s):
        return self.run(s, "scan")                              # (B, T, outputs)

    def query(self, s):
        return self.run(s, self.form)[:, -1]                    # (B, outputs)

    def recovered(self, N):
        """The learned recurrence beside the construction; {} where there is none to compare."""
        return self.linear.recovered(N)


def interleave(x, y):
    """x (B, N+1, ·), y (B, N, ·) as a prompt x_1, y_1, …, x_query; the narrower one zero-padded."""
    f = max(x.shape[-1], y.shape[-1])
    x, y = (F.pad(z, (0, f - z.shape[-1])) if z.shape[-1] < f else z for z in (x, y))
    pairs = torch.stack([x[:, :-1], y], 2).flatten(1, 2)                    # (B, 2N, f)
    return torch.cat([pairs, x[:, -1:]], 1)                                 # (B, 2N+1, f)


SCALAR_VARIANTS = {             # App. C.1: is Ψ fed x_t y_t, is the state read with the query?
    "full":       dict(product=True, readout=True),
    "no_input":   dict(product=False, readout=True),
    "no_output":  dict(product=True, readout=False),
    "neither":    dict(product=False, readout=False),
}


class ScalarGRIL(PromptLayer):
    """Scalar targets, Eq. 12 to 14 (Sec. 4.1, App. A.1): the state is a vector z.

    Tokens are the paper's c_t = [x_t y_t, x_{t+1}]. On raw ones, [x_t, y_t, x_{t+1}], the layer
    forms the product x_t y_t itself; the ablation without this "input construction" is fed raw
    tokens as they are. Without "output construction" a learned vector reads the state, o = uᵀ z.
    """
    recurrent = ("A",)

    def __init__(self, f, hidden=None, variant="full"):
        super().__init__()
        self.f, self.variant = f, known("variant", variant, SCALAR_VARIANTS)
        hidden, width = hidden or f, 2 * f if self.variant["product"] else 2 * f + 1
        if hidden < f:
            raise ValueError(f"ScalarGRIL: {hidden} hidden cannot hold the gradient of {f} weights")
        self.Psi = nn.Parameter(torch.randn(hidden, width) / math.sqrt(width))
        if self.variant["readout"]:
            self.Theta = nn.Parameter(torch.randn(hidden, width) / math.sqrt(width))
        else:
            self.u = nn.Parameter(torch.randn(hidden) / math.sqrt(hidden))
        self.A = nn.Parameter(torch.empty(hidden).uniform_(0.9, 1))
        self.beta = nn.Parameter(torch.ones(1))

    def run(self, s, form):
        c = s                                                   # (B, T, 2f), or raw (B, T, 2f+1)
        if self.variant["product"] and s.shape[-1] == 2 * self.f + 1:
            x, y, x_next = s.split([self.f, 1, self.f], -1)
            c = torch.cat([x * y, x_next], -1)
        z = STATES[form](self.A, c @ self.Psi.mT)               # Eq. 12: z_t = A ⊙ z_{t-1} + Ψ c_t
        r = c @ self.Theta.mT if self.variant["readout"] else self.u
        o = (z * r).sum(-1, keepdim=True)                       # Eq. 13: o_t = β z_tᵀ Θ c_t
        return self.beta[:, None] * o                           # (B, T, 1)

    @torch.no_grad()
    def recovered(self, N):
        """ΨᵀΘ alone is determined: at A = 1 (M Ψ, M⁻ᵀ Θ) predicts the same for any M."""
        if not all(self.variant.values()):
            return {}
        product, f = self.Psi.mT @ self.Theta, self.f           # (2f, 2f)
        aim = torch.zeros_like(product)
        aim[:f, f:] = torch.eye(f)
        scale = (product * aim).sum() / f
        return dict(PsiTheta=product / scale, A=self.A.detach(),
                    PsiTheta_distance=(product / scale - aim).abs().max().item(),
                    A_distance=(self.A - 1).abs().mean().item(),
                    gain=(N * self.beta * scale).item())


VARIANTS = {                    # App. C.2, and a window of two: "w = 3 is minimal" of shared places
    "full":       dict(w=3, stride=2, readout=True),
    "no_window":  dict(w=1, stride=1, readout=True),
    "no_readout": dict(w=3, stride=2, readout=False),
    "neither":    dict(w=1, stride=1, readout=False),
    "w2":         dict(w=2, stride=1, readout=True),
}


class GRIL(PromptLayer):
    """Definition 4.2 on interleaved tokens: one layer, one gradient step on W, where o = W x."""
    recurrent = ("A",)

    def __init__(self, f, variant="full"):
        super().__init__()
        self.variant = known("variant", variant, VARIANTS)
        w = self.variant["w"]
        self.Q = nn.Parameter(0.05 * torch.randn(w, w) / w)     # what no loss asks for stays small
        self.A = nn.Parameter(torch.empty(f, f).uniform_(0.9, 1))
        self.beta = nn.Parameter(torch.ones(1))
        if self.variant["readout"]:
            self.q = nn.Parameter(torch.randn(w) / math.sqrt(w))
        else:
            self.u = nn.Parameter(torch.randn(f) / math.sqrt(f))            # reads without a query

    def run(self, s, form):
        C = window(s, self.variant["w"], self.variant["stride"], causal=False)  # (B, T, f, w)
        C = C[:, :, None]                                       # one state, J = 1
        C_u, q = (C, self.q) if self.variant["readout"] else column(self.u.expand(*C.shape[:2], -1))
        o, _ = FORMS[form](C, C, C_u, self.Q, q, self.A)        # (B, T, 1, f)
        return self.beta[:, None] * o[:, :, 0]                  # (B, T, f); β may be one per step

    def recovered(self, N):
        return beside_construction(self, N) if self.variant == VARIANTS["full"] else {}


def column(r):
    """C_u and q with C_u q = r, for a read-out r (B, T, m) that is no mix of a window's columns."""
    return r[:, :, None, :, None], r.new_ones(1)


class MultistepGRIL(PromptLayer):
    """App. A.3, Proposition A.1: a gradient step per layer, o = W_L C q with

        W_l = W_{l-1} + β_l (Z_l - W_{l-1} Z̃_l) - ηλ W_{l-1}

    Every layer sees the same windows and has two heads, Z = Σ y xᵀ and Z̃ = Σ x xᵀ (the paper has
    Z̃ W_{l-1}, for its W is transposed). The last term is η times the gradient of an L2 penalty
    (λ/2) ‖W‖² (App. A.5, which prints (η/N) W); ηλ is `decay`. W_0 trains, from zero. loops=k
    applies the stack k times.
    """
    recurrent = ("A",)

    def __init__(self, f, layers=2, loops=1):
        super().__init__()
        self.loops = loops
        self.Q = nn.Parameter(0.1 * torch.randn(layers, 2, 3, 3) / 3)       # (layers, heads, w, w)
        self.q = nn.Parameter(torch.randn(3) / math.sqrt(3))
        self.A = nn.Parameter(torch.empty(layers, 2, f, f).uniform_(0.9, 1))
        self.beta = nn.Parameter(torch.ones(layers, 1))
        self.register_buffer("decay", torch.zeros(layers))
        self.W0 = nn.Parameter(torch.zeros(f, f))

    def run(self, s, form):
        C = window(s, 3, 2, causal=False)                       # (B, T, f, 3)
        return self.walk(C, C @ self.q, FORMS[form])            # (B, T, f)

    def walk(self, C, r, form):
        """W_L r for read-outs r (B, T, f), from the top layer down, so that no W_l is formed:

        W_l r = β_l Z_l r + W_{l-1} (r - ηλ r - β_l Z̃_l r)

        is the update above, applied to r: what is left for W_{l-1} is again a vector. Two layers
        without decay from W_0 = 0: W_2 r = β_2 Z_2 r + β_1 Z_1 (r - β_2 Z̃_2 r). (By gril_query Z r
        is of the last step alone, (B, 1, f), and only the last row of r counts.)
        """
        o = 0
        for l in reversed(list(range(len(self.Q))) * self.loops):           # l = L … 1
            beta, (Zr, Zr_tilde) = self.beta[l][:, None], self.heads(C, r, l, form)
            o = o + beta * Zr                                   # β_l Z_l r
            r = r - self.decay[l] * r - beta * Zr_tilde         # ηλ r: the L2 term, App. A.5
        return o + r @ self.W0.mT                               # (B, T, f)

    def heads(self, C, r, l, form):
        """Z_l r and Z̃_l r, (B, T, f) both: two states; Q[l] holds Q and Q̃, A[l] their gates."""
        C, (C_u, q) = C[:, :, None], column(r)                  # (B, T, 1, f, 3)
        o, _ = form(C, C, C_u, self.Q[l], q, self.A[l])         # (B, T, 2, f)
        return o.unbind(2)

    def recovered(self, N):
        return beside_construction(self, N, unused=1 if self.loops == 1 else None)


@torch.no_grad()
def beside_construction(layer, N, unused=None):
    """Q, q, A beside the construction, after removing the scale that Q, q and β share.

    Each matrix is divided by its largest entry; the product of what was divided out is the gain,
    N β Q₂₁ q₃ = η. An unused head does not count: layer 1's second one, which meets W_0 = 0.
    """
    heads, A = layer.Q.detach().reshape(-1, 3, 3), layer.A.detach()         # (layers · heads, 3, 3)
    aims = torch.zeros_like(heads)
    aims[0::2, 1, 0] = 1                                        # e₂ e₁ᵀ, y xᵀ
    aims[1::2, 0, 0] = 1                                        # e₁ e₁ᵀ, x xᵀ
    scales = torch.stack([Q.flatten()[Q.abs().argmax()] for Q in heads])
    q_scale = layer.q[layer.q.abs().argmax()]
    Q, q, gain = heads / scales[:, None, None], layer.q / q_scale, N * layer.beta.reshape(-1)
    counts = torch.tensor([i != unused for i in range(len(heads))])
    return dict(Q=Q, Q_distance=(Q - aims)[counts].abs().max().item(),
                q=q, q_distance=(q - torch.eye(3)[2]).abs().max().item(),
                A=A, A_distance=(A - 1).abs().view(len(heads), -1).mean(1)[counts].mean().item(),
                gain=(gain * scales[::len(heads) // len(gain)] * q_scale).tolist())


class EmbeddedGRIL(PromptLayer):
    """A layer on learned token embeddings, which Definition 4.2 leaves free: s E for s, E (f, e).

    The first f places of the read-out are the answer, so that E = [I 0] is the layer itself.
    """

    def __init__(self, layer, f, e):
        super().__init__()
        if e < f:
            raise ValueError(f"tokens of width {f} do not fit an embedding of width {e}: the state "
                             f"must hold {f} × {f} weights; take {f} or more (--embed)")
        self.f, self.layer = f, layer
        self.E = nn.Parameter(torch.randn(f, e) / math.sqrt(f))

    def run(self, s, form):
        return self.layer.run(s @ self.E, form)[..., :self.f]   # (B, T, f)

    def recovered(self, N):
        return {}                                               # another basis, other weights


class NonlinearGRIL(PromptLayer):
    """App. A.4, B.4: a linear layer, then the weighted sigmoid gated unit on its output.

    Eq. 2's o ⊙ σ(U_1 o) with a GELU and a bias inside, one of the two units of S5's code; the
    other, g ⊙ σ(W g) with g = GELU(y), is that of its layer (baselines.S5).
    """

    def __init__(self, f, layers=1):
        super().__init__()
        self.linear = GRIL(f) if layers == 1 else MultistepGRIL(f, layers)
        self.U = nn.Linear(f, f)

    def unit(self, y):
        return y * self.U(F.gelu(y)).sigmoid()                  # y ⊙ σ(U GELU(y) + b)

    def run(self, s, form):
        return self.unit(self.linear.run(s, form))              # (B, T, f)


class StateMLPGRIL(PromptLayer):
    """App. A.4: ρ on each row of the state before it is read, o_t = β ρ(Z_t) C_t q.

    A departure: ρ(Z) = Z + MLP(Z), so that training starts near the linear layer.
    """

    def __init__(self, f):
        super().__init__()
        self.linear = GRIL(f)
        self.rho = mlp(f, 4 * f, f)

    def run(self, s, form):
        layer, C = self.linear, window(s, 3, 2, causal=False)   # (B, T, f, 3)
        Z = STATES[form](layer.A, C @ layer.Q @ C.mT)           # (B, T, f, f)
        o = (Z + self.rho(Z)) @ (C[:, -Z.shape[1]:] @ layer.q)[..., None]
        return layer.beta[:, None] * o[..., 0]                  # (B, T, f)


class ClassifierGRIL(PromptLayer):
    """Sec. 4.4, Proposition 4.3: windows (φ(x_t), y_t - p_t, φ(x_{t+1})): Z is -gradient, Eq. 11.

    Tokens of width f + K: x_t in the first f places, the error y_t - p_t in the last K, with p at
    W = 0 (1/K, or ½ when binary, K = 1), where the paper lets the logits produce it. So Eq. 11's
    matrix is a block of Z: the last K rows of its first f columns. A departure: φ(x) = x + MLP(x),
    where the paper has the MLP alone.
    """

    def __init__(self, f, K, identity=False):
        super().__init__()
        self.f, self.K = f, K
        self.phi = None if identity else mlp(f, 4 * f, f)
        self.linear = GRIL(f + K)

    def run(self, s, form):
        x = s[:, ::2, :self.f]                                  # (B, N+1, f)
        x = x if self.phi is None else x + self.phi(x)
        s = interleave(F.pad(x, (0, self.K)), s[:, 1::2])       # (B, 2N+1, f+K)
        return self.linear.run(s, form)[..., self.f:]           # logits (B, N, K)


def beside(x, y):
    """x and y in places of their own (footnote in Sec. 4.2): widths k and l into k + l."""
    return F.pad(x, (0, y.shape[-1])), F.pad(y, (x.shape[-1], 0))


def mlp(f, hidden, out):
    return nn.Sequential(nn.Linear(f, hidden), nn.GELU(), nn.Linear(hidden, out))


def linear_attention(s, W_Q, W_K, W_V, form=gril_scan):
    """w = 1 (Sec. 4.5, Eq. 3): Z_t = Z_{t-1} + (W_Vᵀ s_t)(W_Kᵀ s_t)ᵀ, o_t = Z_t W_Qᵀ s_t."""
    v, k, u = ((s @ W)[:, :, None, :, None] for W in (W_V, W_K, W_Q))       # windows of one column
    o, _ = form(v, k, u, s.new_ones(1, 1), s.new_ones(1), None)
    return o[:, :, 0]                                           # (B, T, d)


# --------------------------------------------------------------------------- 4. the constructions
# Each sets a layer's weights so that its forward pass is gradient descent with step size eta on
# the mean loss of the N examples, and returns the layer. N may be a tensor 1 … T: then step t is
# gradient descent on the first t examples.

e1, e2, e3 = torch.eye(3)                                       # x_t, y_t and x_{t+1} of a window


@torch.no_grad()
def construct(layer, eta, N, **weights):
    """Sets β = η/N and the named weights."""
    for name, value in weights.items():
        getattr(layer, name).copy_(torch.as_tensor(value))
    eta, N = (torch.as_tensor(x, dtype=layer.beta.dtype).to(layer.beta.device) for x in (eta, N))
    layer.beta = nn.Parameter(eta / N.reshape(-1), requires_grad=layer.beta.requires_grad)
    return layer


def construct_scalar(layer, eta, N):
    """App. A.1: Ψ = [I 0], Θ = [0 I], A = 1, β = η/N."""
    eye = torch.eye(len(layer.A), layer.f)
    Psi, Theta = torch.cat([eye, 0 * eye], 1), torch.cat([0 * eye, eye], 1)
    return construct(layer, eta, N, Psi=Psi, Theta=Theta, A=1)


def construct_multivariate(layer, eta, N):
    """Proposition 4.1: Q = e₂ e₁ᵀ, q = e₃, A = 1, β = η/N: Z = Σ y xᵀ is read with x_query."""
    return construct(layer, eta, N, Q=torch.outer(e2, e1), q=e3, A=1)


def construct_multistep(layer, eta, N, W0=0, weight_decay=0.0):
    """App. A.3: heads Q = e₂ e₁ᵀ and Q̃ = e₁ e₁ᵀ, q = e₃, A = 1, from W0; eta may be one per layer.

    App. A.5: for the loss plus (λ/2) ‖W‖², λ = weight_decay, each step also takes ηλ W. The paper's
    formula has (η/N) W there, which belongs to neither (λ/2) ‖W‖² nor its own ‖W‖²; the recurrence
    is untouched either way.
    """
    Q = torch.stack([torch.outer(e2, e1), torch.outer(e1, e1)])
    eta = torch.as_tensor(eta, dtype=layer.beta.dtype).expand(len(layer.beta))
    return construct(layer, eta[:, None], N, Q=Q, q=e3, A=1, decay=eta * weight_decay, W0=W0)


def construct_softmax(model, eta, N):
    """Proposition 4.3, App. A.6: cross-entropy's error takes the place of y, no weight changes.

    The softmax is in the tokens: tasks.SoftmaxClassification.residual is y - p, at W = 0; with one
    logit (binary) y - ½. With the paper's r = p - y, Z would be the gradient and β = -η/N.
    """
    construct_multivariate(model.linear, eta, N)
    return model


def gd_dagger(model, eta, N):
    """GD† (App. B.4, Fig. 3B, 4): the recurrence is frozen at GD, the MLP or gated unit trains.

    A departure: β trains, too.
    """
    several = isinstance(model.linear, MultistepGRIL)
    (construct_multistep if several else construct_multivariate)(model.linear, eta, N)
    for name, weight in model.linear.named_parameters():
        weight.requires_grad_(name == "beta")
    return model


# --------------------------------------------------------------------------- 5. the sequence block

class Mixer(nn.Module):
    """A layer of a sequence model: give it run(x, state) -> (y, state), and it streams.

    run takes a stretch (B, T, H) from a state (None at the start) to the next one.
    """
    recurrent = ()              # names of parameters with the lower learning rate, undecayed
    writes = None               # name of its Linear whose output is added to the residual stream

    def step(self, x, state=None):
        """One token of a stream: (B, H), state -> (B, H), state."""
        y, state = self.run(x[:, None], state)
        return y[:, 0], state

    def forward(self, x):
        return self.run(x)[0]


class GrilMixer(Mixer):
    """App. D, Fig. 11: the GRIL block, causal, (B, T, H) -> (B, T, H).

    u = W_in z;  causal windows C_v, C_k, C_u over W_v u, √(1-|λ|²)/√h W_k u and u, h = P/J;
    Z = λ ⊙ Z + C_v Q C_kᵀ, o = β Re(Z) C_u q in each of J blocks, with a state of h × h;
    y = GELU(W_out o + D ⊙ z);  W_1 y ⊙ σ(W_2 y).
    2H² + 2PH + 2P² parameters, and a few per channel. λ is the LRU's, one per key channel.
    """
    recurrent = ("nu", "theta", "Q", "q", "beta")
    writes = "glu"

    def __init__(self, H, P, J, w=3, r_min=0.0, r_max=0.99, max_phase=2 * math.pi, gate="complex",
                 form="chunk", beta=1.0):
        super().__init__()
        if P % J:
            raise ValueError(f"GrilMixer: state size P = {P} is not divisible by J = {J} blocks")
        if not 0 <= r_min <= r_max <= 1:
            raise ValueError(f"GrilMixer: a gate starts between r_min = {r_min} and r_max = {r_max}"
                             ", which must be in order and between 0 and 1")
        known("gate", gate, dict.fromkeys(("real", "complex")))
        forms = {"loop": gril_loop, "scan": gril_scan, "chunk": gril_chunk}
        self.J, self.h, self.w, self.form = J, P // J, w, known("form", form, forms)
        self.L = min(64, max(16, 1 << (self.h - 1).bit_length()))           # a chunk, about h
        self.W_in = nn.Linear(H, P, bias=False)
        self.W_vk = nn.Linear(P, 2 * P, bias=False)
        self.W_out = nn.Linear(P, H, bias=False)
        for W in (self.W_in, self.W_vk, self.W_out):
            nn.init.normal_(W.weight, std=W.in_features ** -0.5)            # keeps unit variance
        self.D = nn.Parameter(torch.randn(H))
        self.glu = nn.Linear(H, 2 * H)                                      # W_1 and W_2
        self.Q = nn.Parameter(torch.randn(J, w, w) / math.sqrt(w))
        self.q = nn.Parameter(torch.randn(J, w) / math.sqrt(w))
        self.beta = nn.Parameter(torch.full((J,), beta))
        # App. E.2, F.2, the start of the LRU: λ = exp(-exp ν + i exp θ), |λ|² uniform in
        # [r_min², r_max²], its angle in [0, max_phase]; a real gate has no angle
        squared = torch.empty(J, self.h).uniform_(r_min ** 2, r_max ** 2).clamp(1e-6, 1 - 1e-6)
        self.nu, self.theta = nn.Parameter((-0.5 * squared.log()).log()), None
        if gate == "complex":
            self.theta = nn.Parameter((max_phase * torch.rand(J, self.h)).clamp(min=1e-6).log())

    def gates(self):
        """log |λ| and the angle of λ (None if real), (J, h), and the key scale √(1 - |λ|²) / √h.

        |λ| stays between gril_chunk's e^(-80/L) and 1; a departure, the LRU's may go to 0.
        """
        log_rho = -self.nu.clamp(-50, math.log(80 / self.L)).exp()
        scale = (-torch.expm1(2 * log_rho) / self.h).sqrt()
        return log_rho, None if self.theta is None else self.theta.exp(), scale

    def tokens(self, z, scale):
        """(…, H) -> v, k, u (…, J, h), what the windows run over; W_k takes up the keys' scale."""
        u = self.W_in(z)
        W_v, W_k = self.W_vk.weight.chunk(2)
        v, k = F.linear(u, torch.cat([W_v, W_k * scale.flatten()[:, None]])).chunk(2, -1)
        return [x.unflatten(-1, (self.J, self.h)) for x in (v, k, u)]

    def recur(self, v, k, u, log_rho, theta, state):
        """The recurrence alone: v, k, u (B, T, J, h) and a state -> o (B, T, J, h), state."""
        Q, q, (Z, past) = self.Q, self.beta[:, None] * self.q, state
        if v.shape[1] == 1:
            v, k, u = (x[:, 0].to(past.dtype) for x in (v, k, u))
            o, state = gril_step(v, k, u, Q, q, complex_gate(log_rho, theta), state)
            return o[:, None], state
        if self.form is gril_chunk:
            return gril_chunk(v, k, u, Q, q, log_rho, theta, state, self.L)
        s = torch.cat([v, k, u], -1).flatten(2).to(past.dtype)              # (B, T, J 3h)
        C = window(s, self.w, causal=True, past=past.flatten(1, 2).mT)      # (B, T, J 3h, w)
        C = C.unflatten(2, (self.J, -1))                                    # (B, T, J, 3h, w)
        o, Z = self.form(*C.split(self.h, 3), Q, q, complex_gate(log_rho, theta), Z)
        return o, (Z, C[:, -1, ..., 1:])                                    # the last w-1 tokens

    def output(self, o, z):
        y = F.gelu(self.W_out(o.flatten(-2).to(z.dtype)) + self.D * z)
        return F.glu(self.glu(y))                                           # W_1 y ⊙ σ(W_2 y)

    def run(self, z, state=None):
        """A stretch of the sequence: (B, T, H), state -> (B, T, H), next state."""
        log_rho, theta, scale = self.gates()
        v, k, u = self.tokens(z, scale)                                     # (B, T, J, h)
        with full_precision(z.device.type):                                 # of state and gate
            state = self.start(z) if state is None else state
            o, state = self.recur(v, k, u, log_rho, theta, state)
        return self.output(o, z), state

    def start(self, z):
        """The empty state: Z = 0 and a past of zeros; a complex gate makes Z complex."""
        dtype = torch.promote_types(self.nu.dtype, torch.float32)
        return (z.new_zeros(len(z), self.J, self.h, self.h, dtype=dtype),
                z.new_zeros(len(z), self.J, 3 * self.h, self.w - 1, dtype=dtype))


def complex_gate(log_rho, theta):
    """λ (J, 1, h) as loop, scan and step take it."""
    return (log_rho.exp() if theta is None else torch.polar(log_rho.exp(), theta))[:, None]


class Block(Mixer):
    """x + dropout(mixer(LayerNorm(x))), App. D's pre-norm, for GRIL and every other mixer."""

    def __init__(self, mixer, H, dropout=0.0):
        super().__init__()
        self.norm, self.mixer, self.dropout = nn.LayerNorm(H), mixer, nn.Dropout(dropout)

    def run(self, x, state=None):
        y, state = self.mixer.run(self.norm(x), state)
        return x + self.dropout(y), state

"""The other sequence models: those of the paper's comparison (Fig. 3C, App. B.3), and more.

All are gril.Mixer: run(x, state) -> (y, state) for a stretch, step for one token of a stream.

  1. shared       Stack, causal convolution, Hyena's frame, feed-forward layers, f⁴ weights
  2. S5, LRU      constant diagonal complex gate             Smith et al. 2023; Orvieto et al. 2023
  3. Mamba        gate, write and read chosen by the input   Gu & Dao 2023
     Longhorn     the same block, an online learner inside   Liu et al. 2024
  4. attention    linear, softmax, local multi-query         von Oswald et al. 2023; Vaswani et al.
     DeltaNet     keys write what the state lacks            Yang et al. 2024
     Filtered     GRIL's window replaced by short filters    ours, a control
  5. Griffin      RG-LRU blocks and local attention          De et al. 2024
  6. the table    MODELS: one row makes a model for in-context tasks, Long Range Arena, language;
                  make, recipe: networks for the in-context tasks, and their rates and sizes

Letters are those of each paper: x is the state and u the input in S5, h the state and x the input
in Mamba and Griffin. H is the width, P and N are state sizes, J blocks. Diagonal recurrences run on
machine/scan.py.

Layers and starts are as published. What stays different:

  all         gril.Block with its LayerNorm, where Mamba, Griffin and DeltaNet have RMSNorm and S5
              batch norm; no weight is scaled down with depth (but for lm.py's √(2 layers))
  S5          causal, where S5 reads Long Range Arena in both directions; the exact GELU, where
              its code has the tanh approximation; B and C normal, not truncated
  LRU         half of each conjugate pair, as S5, with a C that makes its variance theirs
  attention   rotary positions on whole heads, where Griffin's turn half of each; the transformer is
              pre-norm with a GELU, where Vaswani's is post-norm with a ReLU and sinusoids
  Griffin     no reset at t = 0, where its code takes h = i ⊙ x, without √(1 - a²)
  Longhorn    the block is Mamba's, with its start of W_Δ
  DeltaNet    a loop over tokens, not their chunks: for the short prompts of in-context tasks; no
              feed-forward layer beside it
"""
import math
from typing import Callable, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from gril import Block, GrilMixer, Mixer, gril_chunk
from machine.errors import known
from machine.scan import full_precision, scan


# --------------------------------------------------------------------------------------- 1. shared

class Stack(Mixer):
    """Layers one after the other; the state is the list of theirs."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def run(self, x, state=None):
        states = []
        for layer, s in zip(self.layers, state or [None] * len(self.layers)):
            x, s = layer.run(x, s)
            states.append(s)
        return x, states


class CausalConv(Mixer):
    """A filter per channel over the last w inputs, y_t = Σ_i W_i ⊙ x_{t-w+1+i} + b."""

    def __init__(self, H, w=4, std=None):
        super().__init__()
        self.W = nn.Parameter(torch.empty(w, H).uniform_(-1, 1) / math.sqrt(w))
        self.b = nn.Parameter(torch.empty(H).uniform_(-1, 1) / math.sqrt(w))
        if std is not None:
            nn.init.normal_(self.W, std=std)
            nn.init.zeros_(self.b)

    def run(self, x, past=None):
        w, T = len(self.W), x.shape[1]
        W, b = self.W.to(x.dtype), self.b.to(x.dtype)           # or bfloat16 becomes float32 here
        x = F.pad(x, (0, 0, w - 1, 0)) if past is None else torch.cat([past, x], 1)
        return sum((W[i] * x[:, i:i + T] for i in range(w)), b), x[:, T:]


class Gated(Mixer):
    """Hyena's frame: W_o(x0 ⊙ mixer(v ⊙ x1)), where v, x1, x0 = filter of 3 (W_3H z).

    The causal window of App. F, (x_{t-2}, x_{t-1}, x_t) with zeros to the left of the text, is
    GrilMixer's (C_v, C_k, C_u in gril_chunk). The filter in front reaches as far, so that a layer
    sees x_{t-4} … x_t; the target x_{t+1} is in neither. The mixer has no norm and no residual.
    """
    writes = "W_o"

    def __init__(self, H, mixer):
        super().__init__()
        self.W_3H = nn.Linear(H, 3 * H, bias=False)
        self.conv, self.mixer = CausalConv(3 * H, 3), mixer
        self.W_o = nn.Linear(H, H, bias=False)
        nn.init.normal_(self.W_3H.weight, std=(3 / H) ** 0.5)               # filters start at 1/√3

    def run(self, z, state=None):
        past, inner = state or (None, None)
        y, past = self.conv.run(self.W_3H(z), past)                         # of t-2, t-1 and t
        v, x1, x0 = y.chunk(3, -1)                                          # (B, T, H) each
        y, inner = self.mixer.run(v * x1, inner)
        return self.W_o(x0 * y), (past, inner)


class MLP(Mixer):
    """W_2 GELU(W_1 x), the transformer's feed-forward layer. No state."""
    writes = "W_2"

    def __init__(self, H, inner):
        super().__init__()
        self.W_1, self.W_2 = nn.Linear(H, inner), nn.Linear(inner, H)

    def run(self, x, state=None):
        return self.W_2(F.gelu(self.W_1(x))), None


class GatedMLP(Mixer):
    """W_2 (GELU(W_1 x) ⊙ W_3 x), Griffin's (De et al. 2024, Sec. 2.2). No state."""
    writes = "W_2"

    def __init__(self, H, inner):
        super().__init__()
        self.W_13, self.W_2 = nn.Linear(H, 2 * inner), nn.Linear(inner, H)

    def run(self, x, state=None):
        gate, x = self.W_13(x).chunk(2, -1)
        return self.W_2(F.gelu(gate) * x), None


def divide(size, parts, what):
    if size % parts:
        raise ValueError(f"{what}: {size} is not divisible by {parts}")
    return size // parts


class GatedRecurrent(Mixer):
    """Linear attention by a gated recurrent network (Zucchet et al. 2023), set to gradient descent.

    h_t = h_{t-1} + W_1 c_t ⊙ W_2 c_t,  o_t = D (W_3 h_t ⊙ W_4 c_t)  on tokens c = [x_t, y_t,
    x_{t+1}] with a state of f² numbers. W_1 and W_2 select the factors of y_i x_j, W_4 those of the
    query; W_3, dense in such a network and here the identity, has f⁴ weights (Sec. 4.5).
    """

    def __init__(self, f, eta, N):
        super().__init__()
        i, j = torch.arange(f).repeat_interleave(f), torch.arange(f).repeat(f)      # of y_i x_j
        eye = torch.eye(3 * f)
        self.W_1, self.W_2, self.W_4 = map(nn.Parameter, (eye[f + i], eye[j], eye[2 * f + j]))
        self.W_3, self.D = nn.Parameter(torch.eye(f * f)), nn.Parameter(eta / N * eye[:f, :f][:, i])

    def run(self, c, h=None):
        h = scan(None, (c @ self.W_1.mT) * (c @ self.W_2.mT), h)            # (B, T, f²)
        return (h @ self.W_3.mT * (c @ self.W_4.mT)) @ self.D.mT, h[:, -1]


# ----------------------------------------------------------------------------------- 2. S5 and LRU

def hippo(n):
    """HiPPO-N, S = -½ I + skew part = V Λ Vᴴ: those Λ (n/2) with Im > 0, and their V (n, n/2)."""
    p = torch.arange(1, 2 * n, 2, dtype=torch.float64).sqrt()               # √(2k+1)
    skew = torch.outer(p, p).triu(1) / 2
    frequency, V = torch.linalg.eigh(-1j * (skew - skew.mT))                # ascending, in pairs ±
    return -0.5 + 1j * frequency[n // 2:], V[:, n // 2:]


class DiagonalSSM(Mixer):
    """x_t = Λ̄ ⊙ x_{t-1} + B̄ u_t, y_t = 2 Re(C x_t) + D ⊙ u_t, then a gated unit of GELU(y).

    Conjugate symmetry: of P states in pairs, one of each pair is held, P/2 complex numbers; hence
    2 Re. Complex parameters are pairs of real ones, which any optimiser and .to(dtype) understand.
    """

    def __init__(self, B, C):
        super().__init__()
        B, C = (torch.view_as_real(x).to(torch.get_default_dtype()).contiguous() for x in (B, C))
        self.B, self.C = nn.Parameter(B), nn.Parameter(C)       # (P/2, H, 2), (H, P/2, 2)
        self.D = nn.Parameter(torch.randn(len(C)))

    def run(self, u, x=None):
        with full_precision(u.device.type):
            Lambda, B = self.system()                                       # (P/2,), (P/2, H)
            u = u.to(self.D.dtype)
            Bu = torch.view_as_complex(torch.stack([u @ B.real.mT, u @ B.imag.mT], -1))
            x = scan(Lambda[None, None], Bu, x)                             # (B, T, P/2)
            C = 2 * torch.stack([self.C[..., 0], -self.C[..., 1]], -1)      # (H, P/2, 2)
            y = torch.view_as_real(x).flatten(2) @ C.flatten(1).mT + self.D * u     # (B, T, H)
        return self.unit(F.gelu(y)), x[:, -1]


class S5(DiagonalSSM):
    """S5 (Smith et al. 2023): Λ from J blocks of HiPPO-N, zero-order hold, a Δ for each state.

    Its unit is g ⊙ σ(W g).
    """
    recurrent = ("Lambda_re", "Lambda_im", "B", "log_Delta")

    def __init__(self, H, P=None, J=1):
        P = P or H
        h = 2 * divide(P, 2 * J, f"S5: state size P in conjugate pairs and J = {J} blocks")
        Lambda, V = hippo(h)
        B = torch.randn(J, h, H).to(V) / math.sqrt(P)
        C = torch.randn(H, J, h, dtype=V.dtype) * math.sqrt(2 / P)          # Re and Im 1/P each
        super().__init__((V.mH @ B).flatten(0, 1), (C @ V).flatten(1))      # B̃ = V⁻¹ B, C̃ = C V
        self.Lambda_re = nn.Parameter(Lambda.real.repeat(J).to(self.B.dtype))
        self.Lambda_im = nn.Parameter(Lambda.imag.repeat(J).to(self.B.dtype))
        self.log_Delta = nn.Parameter(torch.empty(P // 2).uniform_(math.log(1e-3), math.log(0.1)))
        self.W = nn.Linear(H, H)

    def unit(self, g):
        return g * self.W(g).sigmoid()

    def system(self):
        """Λ̄ = exp(Λ Δ), B̄ = Λ⁻¹ (Λ̄ - 1) B̃ (their Eq. 6); Re Λ < 0, so that no state grows."""
        Lambda = torch.complex(self.Lambda_re.clamp(max=-1e-4), self.Lambda_im)
        step = Lambda * self.log_Delta.exp()
        return step.exp(), (torch.expm1(step) / Lambda)[:, None] * torch.view_as_complex(self.B)


class LRU(DiagonalSSM):
    """LRU (Orvieto et al. 2023): the same without Δ, Λ̄ = exp(-exp ν + i exp θ), B̄ = γ ⊙ B.

    Starts on a ring, |Λ̄|² uniform in [r_min², r_max²], with γ = √(1 - |Λ̄|²), learned from there.
    Its unit is W₁ g ⊙ σ(W₂ g).
    """
    recurrent = ("nu", "theta", "log_gamma", "B")

    def __init__(self, H, P=None, r_min=0.0, r_max=1.0, max_phase=2 * math.pi):
        n = divide(P or H, 2, "LRU: state size P in conjugate pairs")
        B = torch.randn(n, H, dtype=torch.cfloat) / math.sqrt(H)            # Re, Im: 1/(2H) each
        C = torch.randn(H, n, dtype=torch.cfloat) / math.sqrt(2 * n)        # for 2 Re
        super().__init__(B, C)
        squared = torch.empty(n).uniform_(r_min ** 2, r_max ** 2).clamp(1e-6, 1 - 1e-6)     # |Λ̄|²
        self.nu = nn.Parameter((-0.5 * squared.log()).log())
        self.theta = nn.Parameter((max_phase * torch.rand(n)).clamp(min=1e-6).log())
        self.log_gamma = nn.Parameter(0.5 * (1 - squared).log())
        self.glu = nn.Linear(H, 2 * H)                                      # W_1 and W_2

    def unit(self, g):
        return F.glu(self.glu(g))

    def system(self):
        Lambda = torch.polar((-self.nu.exp()).exp(), self.theta.exp())
        return Lambda, self.log_gamma.exp()[:, None] * torch.view_as_complex(self.B)


# ---------------------------------------------------------------------------------------- 3. Mamba

class Mamba(Mixer):
    """Mamba (Gu & Dao 2023, Fig. 3): W_out (SSM(SiLU(conv(x))) ⊙ SiLU(z)), x and z halves of W_in.

    The selective SSM (their Algorithm 2): h_t = exp(Δ_t A) ⊙ h_{t-1} + Δ_t x_t B_tᵀ,
    y_t = h_t C_t + D ⊙ x_t; h is E × N; Δ, B, C from x_t. The write is their code's Δ B, the first
    order of the zero-order hold that the paper prints.
    """
    recurrent = ("A_log", "D")
    writes = "W_out"
    chunk = 16                  # steps whose states exist at once

    def __init__(self, H, N=16, expand=2, dt_min=1e-3, dt_max=1e-1):
        super().__init__()
        E, self.N, self.rank = expand * H, N, -(-H // 16)
        self.W_in = nn.Linear(H, 2 * E, bias=False)
        self.conv = CausalConv(E)
        self.W_x = nn.Linear(E, self.rank + 2 * N, bias=False)
        self.W_Delta = nn.Linear(self.rank, E)
        self.W_out = nn.Linear(E, H, bias=False)
        self.A_log = nn.Parameter(torch.arange(1.0, N + 1).log().repeat(E, 1))      # A = -1 … -N
        self.D = nn.Parameter(torch.ones(E))
        Delta = torch.empty(E).uniform_(math.log(dt_min), math.log(dt_max)).exp()
        with torch.no_grad():
            self.W_Delta.weight.uniform_(-1, 1).div_(math.sqrt(self.rank))
            self.W_Delta.bias.copy_(Delta + (-torch.expm1(-Delta)).log())   # softplus of it is Δ

    def run(self, x, state=None):
        h, past = state or (None, None)
        x, z = self.W_in(x).chunk(2, -1)                                    # (B, T, E) both
        x, past = self.conv.run(x, past)
        x = F.silu(x)
        Delta, B, C = self.W_x(x).split([self.rank, self.N, self.N], -1)    # B, C (B, T, N)
        Delta = self.W_Delta(Delta)                                         # (B, T, E)
        with full_precision(x.device.type):
            x, Delta, B, C = (v.to(self.D.dtype) for v in (x, Delta, B, C))
            y, h = self.selective(x, self.step_size(Delta, B), B, C, h)
            y = y + self.D * x                                              # (B, T, E)
        return self.W_out(y * F.silu(z)), (h, past)

    def step_size(self, logit, B):
        return F.softplus(logit)

    def gate(self, Delta, B):
        return (Delta * -self.A_log.exp()).exp()                            # (B, T, E, N)

    def selective(self, x, Delta, B, C, h):
        """All but D ⊙ x, a chunk of steps at a time: T · E · N states would not fit the cache.

        The backward pass makes them again, as the authors' kernel does; for more than two chunks.
        """
        if x.shape[1] <= 2 * self.chunk:
            return self.scan_chunk(h, x, Delta, B, C)
        y = []
        for part in zip(*(v.split(self.chunk, 1) for v in (x, Delta, B, C))):
            y_part, h = checkpoint(self.scan_chunk, h, *part, use_reentrant=False,
                                   preserve_rng_state=False)
            y.append(y_part)
        return torch.cat(y, 1), h

    def scan_chunk(self, h, x, Delta, B, C):
        gate, write = self.gate(Delta[..., None], B[:, :, None]), (Delta * x)[..., None]
        h = scan(gate, write * B[:, :, None], h)                            # (B, T, E, N)
        return (h @ C[..., None])[..., 0], h[:, -1]                         # (B, T, E)


class Longhorn(Mamba):
    """Longhorn (Liu et al. 2024; App. G): Mamba's block around an online learner, key k, query q.

    Each channel x of the block is regressed on k. The implicit step of min ‖h - h_{t-1}‖² +
    β (hᵀk - x)² is (I - Δ k kᵀ) h_{t-1} + Δ x k with Δ = β / (1 + β ‖k‖²), and tasks.longhorn takes
    it; here, as published, k kᵀ is replaced by its diagonal: h_t = (1 - Δ k²) ⊙ h_{t-1} + Δ x k.
    β = σ(·) of the input; k and q are Mamba's B and C, and the update is its scan_chunk's.
    """
    recurrent = ("D",)

    def __init__(self, H, N=16):
        super().__init__(H, N)
        del self.A_log                                                      # forgets by k alone

    def step_size(self, logit, k):
        beta = logit.sigmoid()
        return beta / (1 + beta * k.square().sum(-1, keepdim=True))

    def gate(self, Delta, k):
        return 1 - Delta * k.square()                                       # (B, T, E, N)


# ------------------------------------------------------------------------------------ 4. attention

class LinearAttention(Mixer):
    """e_t + Σ_heads P Z_t W_Q e_t, Z_t = Z_{t-1} + W_V e_t (W_K e_t)ᵀ (von Oswald et al. 2023).

    Their layer, causal and recurrent (the last token sees the same sum): no softmax, norm or bias.
    """
    writes = "P"

    def __init__(self, H, heads=1, std=0.2):
        super().__init__()
        self.heads, self.d = heads, divide(H, heads, "LinearAttention: width H into heads")
        self.W_Q, self.W_K, self.W_V, self.P = (nn.Linear(H, H, bias=False) for _ in range(4))
        for W in (self.W_Q, self.W_K, self.W_V, self.P):
            nn.init.normal_(W.weight, std=std / math.sqrt(H))               # starts near e_t itself

    def run(self, e, Z=None):
        q, k, v = (W(e).unflatten(-1, (self.heads, self.d))                 # (B, T, heads, d)
                   for W in (self.W_Q, self.W_K, self.W_V))
        form = self.parallel if e.shape[1] <= 64 else self.chunked
        with full_precision(e.device.type):
            dtype = torch.promote_types(q.dtype, torch.float32)
            Z = q.new_zeros(len(q), self.heads, self.d, self.d, dtype=dtype) if Z is None else Z
            o, Z = form(v, k, q, Z)
        return e + self.P(o.flatten(-2)), Z                                 # Z (B, heads, d, d)

    @staticmethod
    def parallel(v, k, q, Z):
        """Their formula, o = tril(q kᵀ) v: fast on a short prompt, quadratic on a long one."""
        dtype = q.dtype
        q, k, v = (x.to(Z.dtype).transpose(1, 2) for x in (q, k, v))        # (B, heads, T, d)
        o = (q @ k.mT).tril() @ v + q @ Z.mT
        return o.transpose(1, 2).to(dtype), Z + v.mT @ k

    @staticmethod
    def chunked(v, k, q, Z):
        """A window of one token and a gate of 1 make gril_chunk linear attention (Sec. 4.5)."""
        one = Z.new_ones(Z.shape[1], 1)                                     # (heads, w)
        log_rho = Z.new_zeros(Z.shape[1], Z.shape[3])
        past = Z.new_zeros(*Z.shape[:2], 3 * Z.shape[3], 0)
        o, (Z, _) = gril_chunk(v, k, q, one[..., None], one, log_rho, None, (Z, past))
        return o, Z


class DeltaNet(Mixer):
    """DeltaNet (Yang et al. 2024): S_t = S_{t-1} + β_t (v_t - S_{t-1} k_t) k_tᵀ, o_t = S_t q_t.

    q, k, v = SiLU(filter of 4 (W x)) in each head, q and k of length 1, β = σ(w x); the heads'
    read-outs are normed, then mixed by W_out.
    """
    writes = "W_out"

    def __init__(self, H, heads=1):
        super().__init__()
        self.d, self.heads = divide(H, heads, "DeltaNet: width H into heads"), heads
        self.W_qkv, self.conv = nn.Linear(H, 3 * H, bias=False), CausalConv(3 * H)
        self.W_beta, self.W_out = nn.Linear(H, heads, bias=False), nn.Linear(H, H, bias=False)
        self.norm = nn.RMSNorm(self.d, eps=1e-5)

    def run(self, x, state=None):
        S, past = state or (None, None)
        y, past = self.conv.run(self.W_qkv(x), past)
        q, k, v = (z.unflatten(-1, (self.heads, self.d)) for z in F.silu(y).chunk(3, -1))
        with full_precision(x.device.type):
            dtype = torch.promote_types(x.dtype, torch.float32)
            q, k, v = (z.to(dtype) for z in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
            beta = self.W_beta(x).to(dtype).sigmoid()[..., None, None]      # (B, T, heads, 1, 1)
            S = q.new_zeros(len(x), self.heads, self.d, self.d) if S is None else S
            o = []
            for q_t, k_t, v_t, beta_t in zip(*(z.unbind(1) for z in (q, k, v, beta))):
                error = v_t[..., None] - S @ k_t[..., None]                 # (B, heads, d, 1)
                S = S + beta_t * error @ k_t[..., None, :]
                o.append((S @ q_t[..., None])[..., 0])
        o = self.norm(torch.stack(o, 1).to(x.dtype))                        # (B, T, heads, d)
        return self.W_out(o.flatten(2)), (S, past)


class Filtered(GrilMixer):
    """A control: GRIL with w = 1 on v, k, u that went through short filters, instead of a window.

    With Q = a bᵀ the cross-product C_v Q C_kᵀ is (C_v a)(C_k b)ᵀ, the outer product of a filtered
    value and a filtered key, read with the filtered C_u q: a GRIL of rank one is linear attention
    after three filters, each shared by the channels of a head. Here each channel has its own, so
    that Filtered contains every GRIL of rank one, and none of higher rank.
    """

    def __init__(self, H, P, J, w=3, **options):
        super().__init__(H, P, J, w=1, **options)
        self.conv = CausalConv(3 * P, w, std=w ** -0.5)                     # keeps unit variance

    def recur(self, v, k, u, log_rho, theta, state):
        state, past = state
        x = torch.cat([v, k, u], -1).flatten(2)                             # (B, T, J 3h)
        x, past = self.conv.run(x, past.to(x.dtype))
        v, k, u = x.unflatten(-1, (self.J, -1)).split(self.h, -1)
        o, state = super().recur(v, k, u, log_rho, theta, state)
        return o, (state, past)

    def start(self, z):
        Z, past = super().start(z)
        return (Z, past), z.new_zeros(len(z), len(self.conv.W) - 1, len(self.conv.b))


class Attention(Mixer):
    """Softmax attention (Vaswani et al. 2017), rotary positions; kv_heads=1 makes it multi-query.

    The state is the keys and values that later tokens may still see: all, or the last window-1.
    """
    writes = "W_out"

    def __init__(self, H, heads=1, kv_heads=None, window=math.inf):
        super().__init__()
        self.d = divide(H, heads, "Attention: width H into heads")
        self.heads, self.kv_heads, self.window = heads, kv_heads or heads, window
        divide(heads, self.kv_heads, "Attention: heads over key-value heads")
        self.W_Q = nn.Linear(H, H, bias=False)
        self.W_KV = nn.Linear(H, 2 * self.kv_heads * self.d, bias=False)
        self.W_out = nn.Linear(H, H)

    def run(self, x, state=None):
        q, k, v = (y.unflatten(-1, (-1, self.d)).transpose(1, 2)            # (B, heads, T, d)
                   for y in (self.W_Q(x), *self.W_KV(x).chunk(2, -1)))
        if state is not None:
            k, v = (torch.cat([past, new], 2) for past, new in zip(state, (k, v)))
        T, S = q.shape[2], k.shape[2]                                       # k (B, kv_heads, S, d)
        t, s = torch.arange(S - T, S, device=x.device), torch.arange(S, device=x.device)
        shared = self.heads // self.kv_heads
        k_all, v_all = (y.repeat_interleave(shared, 1) for y in (rotate(k, s), v))
        distance, causal = t[:, None] - s, S == T <= self.window            # causal needs no mask
        seen = None if causal else (distance >= 0) & (distance < self.window)       # (T, S)
        o = F.scaled_dot_product_attention(rotate(q, t), k_all, v_all, seen, is_causal=causal)
        first = max(0, S - self.window + 1)
        return self.W_out(o.transpose(1, 2).flatten(2)), (k[:, :, first:], v[:, :, first:])


def rotate(x, position):
    """Rotary positions (Su et al. 2021): channels (i, i + d/2) turned by position · 10000^(-2i/d).

    Only differences matter: positions count from the oldest key. An odd last channel is let be.
    """
    n, dtype = x.shape[-1] // 2, torch.promote_types(x.dtype, torch.float32)
    frequency = 1e4 ** (-torch.arange(n, dtype=dtype, device=x.device) / max(n, 1))
    angle = position[:, None] * frequency                                   # (T, d/2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = x.split([n, n, x.shape[-1] - 2 * n], -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


class Transformer(Stack):
    """One layer of a pre-norm transformer: attention, then an MLP of 4H."""

    def __init__(self, H, heads=1, dropout=0.0):
        mixers = Attention(H, heads), MLP(H, 4 * H)
        super().__init__(*(Block(mixer, H, dropout) for mixer in mixers))


# -------------------------------------------------------------------------------------- 5. Griffin

class RGLRU(Mixer):
    """RG-LRU (De et al. 2024, Eq. 1 to 4): h_t = a_t ⊙ h_{t-1} + √(1 - a_t²) ⊙ (i_t ⊙ x_t).

    a_t = σ(Λ)^(c r_t), r = σ(W_a x + b_a), i = σ(W_x x + b_x), W block-diagonal. σ(Λ)^c starts
    uniform in [0.9, 0.999].
    """
    recurrent = ("Lambda",)
    c = 8

    def __init__(self, D, blocks=1):
        super().__init__()
        n = divide(D, blocks, "RGLRU: width D into blocks")
        self.W = nn.Parameter(torch.randn(blocks, n, 2 * n) / math.sqrt(n))         # W_a beside W_x
        self.b = nn.Parameter(torch.zeros(blocks, 2 * n))
        a = torch.empty(D).uniform_(0.9, 0.999) ** (1 / self.c)
        self.Lambda = nn.Parameter(a.logit())

    def run(self, x, h=None):
        with full_precision(x.device.type):
            x = x.to(self.Lambda.dtype)
            gates = torch.einsum("btkn,knm->btkm", x.unflatten(-1, (len(self.W), -1)), self.W)
            r, i = (g.flatten(2) for g in (gates + self.b).sigmoid().chunk(2, -1))
            log_a = self.c * r * F.logsigmoid(self.Lambda)                  # (B, T, D)
            scale = (-torch.expm1(2 * log_a)).clamp(min=1e-7).sqrt()        # no derivative at a = 1
            h = scan(log_a.exp(), scale * i * x, h)
        return h, h[:, -1]                                                  # (B, T, D), (B, D)


class RecurrentBlock(Mixer):
    """W_out (GELU(W_gate x) ⊙ RG-LRU(conv(W_in x))), Griffin's (De et al. 2024, Fig. 2c)."""
    writes = "W_out"

    def __init__(self, H, D, blocks=1):
        super().__init__()
        self.W_in, self.W_out = nn.Linear(H, 2 * D), nn.Linear(D, H)
        self.inner = Stack(CausalConv(D, 4, std=math.sqrt(0.01 / 4)), RGLRU(D, blocks))

    def run(self, x, state=None):
        gate, x = self.W_in(x).chunk(2, -1)                                 # (B, T, D)
        h, state = self.inner.run(x, state)
        return self.W_out(F.gelu(gate) * h), state


def griffin_mixer(H, heads, i):
    """Mixer i of De et al.'s pattern: recurrent, recurrent, local multi-query attention."""
    if i % 3 == 2:
        return griffin_start(Attention(H, heads, kv_heads=1, window=1024))
    D = heads * round(4 * H / 3 / heads)                                    # "LRU width"
    return griffin_start(RecurrentBlock(H, D, heads))


def griffin_start(module):
    """Their start of dense layers: normal with variance 1 / fan-in, no bias."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=part.in_features ** -0.5)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    return module


class Griffin(Stack):
    """The whole pattern of three, as in the comparison's table, a gated MLP of 3H after each."""

    def __init__(self, H, heads=1, dropout=0.0):
        mixers = [griffin_mixer(H, heads, i) for i in range(3)]
        parts = [part for mixer in mixers for part in (mixer, griffin_start(GatedMLP(H, 3 * H)))]
        super().__init__(*(Block(part, H, dropout) for part in parts))


# ------------------------------------------------------------------------------------ 6. the table

def sizes(width=32, layers=1, **others):
    return dict(width=width, layers=layers, **others)


class Model(NamedTuple):
    """A row of MODELS: the model, then what each place adds; None where it is not offered."""
    mixer: Callable                     # mixer(H, **numbers), of one layer
    takes: str = ""                     # which numbers of a recipe it is given, if there are such
    layer: Callable = None              # layer(H, dropout=…, **numbers), if not Block(mixer)
    norm: bool = False                  # one more before the read-out
    in_context: dict = dict(default=sizes())        # by recipe; also tokens and layer, see make
    lra: dict = {}                      # numbers instead of the recipe's; depth: layers for GRIL's
    lm: dict = {}                       # numbers, too; framed: it stands in Hyena's frame

    def given(self, numbers):
        """Those of a recipe's numbers that the mixer takes."""
        return {name: numbers[name] for name in self.takes.split() if name in numbers}

    def build(self, H, dropout=0.0, **numbers):
        if self.layer:
            return self.layer(H, dropout=dropout, **numbers)
        return Block(self.mixer(H, **numbers), H, dropout)


# The paper's sizes in context are those of App. B.3; it gives no width for Griffin (96 makes its
# "LRU width" the 128 it has with LP), and nothing for LRU and attention but layers. S5 has an input
# projection in B.3's text and none in Table 3's caption: none here. In context GRIL has layers of
# its own (gril.py), and linear attention is von Oswald's; elsewhere it is GRIL with a window of one
# token, gate and all (Sec. 4.5).
GRIL = "P J w gate r_min r_max max_phase form beta"
MODELS = {
    "gril": Model(GrilMixer, GRIL, in_context=None, lm=dict(framed=True)),
    "filtered": Model(Filtered, GRIL, in_context=None, lm=dict(framed=True)),
    "s5": Model(S5, "P J", lm=dict(framed=True)),
    "lru": Model(LRU, "r_min r_max max_phase", lm=dict(framed=True)),
    "mamba": Model(Mamba, norm=True, in_context=dict(default=sizes(), paper=sizes(64))),
    "mamba_lp": Model(Mamba, norm=True, lra=None, lm=None, in_context=dict(
        tokens="projected", default=sizes(), paper=sizes(128, layers=4, weight_decay=0.01))),
    "longhorn": Model(Longhorn, norm=True),
    "deltanet": Model(DeltaNet, norm=True, lra=None, lm=None,
                      in_context=dict(default=sizes(heads=1))),
    "griffin": Model(griffin_mixer, "heads i", Griffin, norm=True, in_context=dict(
        default=sizes(heads=2), paper=sizes(layers=2, heads=2)), lra=dict(heads=4, depth=1 / 3)),
    "griffin_lp": Model(griffin_mixer, layer=Griffin, norm=True, lra=None, lm=None, in_context=dict(
        tokens="projected", default=sizes(heads=2), paper=sizes(96, layers=4, heads=4))),
    "linear_attention": Model(GrilMixer, GRIL, lra=dict(w=1), lm=dict(w=1), in_context=dict(
        layer=LinearAttention, default=sizes(heads=1))),
    "transformer": Model(Attention, "heads", Transformer, norm=True, lra=dict(heads=2),
                         in_context=dict(tokens="projected", default=sizes(layers=2, heads=4))),
    "linear_attention_pairs": Model(LinearAttention, lra=None, lm=None, in_context=dict(
        tokens="paired", layer=LinearAttention, default=sizes(heads=1))),
}


def offered(place):
    """The rows that are there in_context, in lra or in lm."""
    return {name: row for name, row in MODELS.items() if getattr(row, place) is not None}


def parameters(module):
    return sum(p.numel() for p in module.parameters())


class Network(Stack):
    """Tokens (B, L, f) to predictions (B, L, out) everywhere: embedding, layers, read-out."""

    def __init__(self, f, embed, layers, readout):
        super().__init__(*layers)
        self.embed, self.readout, self.f = embed, readout, f

    def run(self, s, state=None):
        if s.ndim != 3 or s.shape[1] == 0 or s.shape[2] != self.f or not s.is_floating_point():
            raise ValueError(f"tokens must be floating point (B, L, {self.f}), L > 0; "
                             f"got {s.dtype} {tuple(s.shape)}")
        x, state = super().run(self.embed(s), state)
        return self.readout(x), state


class Pairs(Mixer):
    """von Oswald's tokens (x_i, y_i), (x_query, 0) for a model, from x_1, y_1, …, x_query."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def run(self, s, state=None):
        x, y = s[:, ::2], F.pad(s[:, 1::2], (0, 0, 0, 1))                   # (B, N+1, f) both
        return self.model.run(torch.cat([x, y], -1), state)


def make(name, f, out, H, layers=1, **options):
    """The named network for tokens of width f; options go to its layers.

    Tokens are padded with zeros to the width H, or linearly projected, or paired before padding.
    """
    row = known("model", name, offered("in_context"))
    tokens = row.in_context.get("tokens", "padded")
    layer = row.in_context.get("layer", row.build)
    f = 2 * f if tokens == "paired" else f
    if tokens != "projected" and H < f:
        raise ValueError(f"{name}: without a projection in front, tokens of width {f} do not fit "
                         f"the model's width {H}: widen it (--width)")
    embed = nn.Linear(f, H) if tokens == "projected" else nn.ZeroPad1d((0, H - f))
    readout = nn.Linear(H, out, bias=layer is not LinearAttention)          # theirs has none
    if row.norm:
        readout = nn.Sequential(nn.LayerNorm(H), readout)
    network = Network(f, embed, [layer(H, **options) for _ in range(layers)], readout)
    return Pairs(network) if tokens == "paired" else network


def recipe(name, model, task):
    """What a task's named recipe changes for one of these: one rate for all parameters, sizes."""
    lr = dict(default=3e-3, paper=1e-4)[name]
    if (name, model) == ("paper", "griffin_lp") and task != "scalar_regression":
        lr = 2e-4
    budget = dict(steps=1500, batch=64) if name == "default" else {}        # a minute of one core
    row = MODELS[model].in_context
    return {**budget, "lr": lr, "recurrent_lr": lr, "weight_decay": 0.0,
            **row.get(name, row["default"])}


def state_size(model, tokens):
    """Real numbers that a model carries on, per sequence, after reading tokens (B, L, ·)."""
    with torch.no_grad():
        tensors = [z for z in tree_leaves(model.run(tokens)[1]) if z is not None]
    return sum(z[0].numel() * (2 if z.is_complex() else 1) for z in tensors)

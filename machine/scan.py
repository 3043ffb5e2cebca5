"""The scan z_t = a_t ⊙ z_{t-1} + b_t (Eq. 1), a cumulative sum with a gate, and its arithmetic.

S5, LRU, Mamba, Longhorn and Griffin run through it, and GRIL's form scan; its shortcuts, query and
chunk, have their own arithmetic, below.
"""
from contextlib import nullcontext
from functools import reduce

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


def scan(a, b, z0=None):
    """Every z_t, along axis 1 of b (B, T, …), from z0 (B, …) or zero.

    a is (B, T, …), or constant and broadcast, or None: no gate, a cumulative sum.
    """
    z0 = torch.zeros_like(b[:, 0]) if z0 is None else z0
    if a is None:
        return b.cumsum(1) + z0[:, None]
    dtype = reduce(torch.promote_types, (a.dtype, b.dtype, z0.dtype))
    a = a.reshape((1,) * (b.ndim - a.ndim) + a.shape)
    return Scan.apply(a.to(dtype), b.to(dtype), z0.to(dtype))


def loop(a, b):
    """The same from zero and with a constant gate, step by step."""
    z, steps = 0, []
    for b_t in b.unbind(1):
        z = a * z + b_t
        steps.append(z)
    return torch.stack(steps, 1)


def last(a, b):
    """Its last state alone, z_T = Σ_t a^{T-t} ⊙ b_t, (B, 1, …)."""
    return (aged(a, b.shape[1]) * b).sum(1, keepdim=True)


def aged(a, T):
    """a^{T-t} for t = 1 … T, (T, …): what is left of each step at the last."""
    ages = torch.arange(T - 1, -1, -1, dtype=a.dtype, device=a.device)
    return a ** ages.view(T, *[1] * a.ndim)


def full_precision(device_type):
    """No autocast: a state is float32 even in a bfloat16 run (on CUDA with TF32, devices.py)."""
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


class Scan(torch.autograd.Function):
    """The scan with its gradient written as the same scan backwards: only a, z and z0 are kept."""

    @staticmethod
    def forward(ctx, a, b, z0):
        z = solve(a, b, z0)
        ctx.save_for_backward(a, z, z0)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        a, z, z0 = ctx.saved_tensors
        g = solve(a.conj(), g, back=True)                       # db_t = g_t + ā_{t+1} db_{t+1}
        da = g.clone()                                          # da_t = db_t z̄_{t-1}
        da[:, 0].mul_(z0.conj())                                # out= a slice breaks a graph
        da[:, 1:].mul_(z[:, :-1].conj())
        return da.sum_to_size(a.shape), g, (a[:, 0].conj() * g[:, 0]).sum_to_size(z0.shape)


def solve(a, b, z0=None, back=False):
    """z_t = a_t z_{t-1} + b_t from z0, or backwards z_t = a_{t+1} z_{t+1} + b_t from z_T = b_T.

    On a CPU that a single step fills, one after the other: that reads and writes everything once.
    """
    if b.device.type == "cpu" and b[:, 0].numel() >= 1024:
        z = torch.empty_like(b)
        gates, b, steps = (x.unbind(1) for x in (a.expand(-1, b.shape[1], *a.shape[2:]), b, z))
        if back:
            steps[-1].copy_(b[-1])
            gates, b, steps = gates[:0:-1], b[-2::-1], steps[::-1]
        else:
            torch.addcmul(b[0], gates[0], z0, out=steps[0])
            gates, b = gates[1:], b[1:]
        for a_t, b_t, before, z_t in zip(gates, b, steps, steps[1:]):
            torch.addcmul(b_t, a_t, before, out=z_t)
        return z
    if back:
        a = torch.cat([a[:, 1:], a[:, :1]], 1)                  # a_{t+1} meets b_{t+1}
        return associative_scan(a.flip(1), b.flip(1)).flip(1)
    b = b.clone()
    b[:, 0].addcmul_(a[:, 0], z0)
    return associative_scan(a, b)


def associative_scan(a, b):
    """The scan from zero in log depth; a constant a has one entry along axis 1.

    Pairs of steps are merged into one, the sequence of half the length is solved the same way, and
    the rest filled in.
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


# ------------------------------------------------------------------------------ numbers in parts
# (…, 1 | 2, m), the real one, and the imaginary one if the gate γ = ρ e^{iθ} has an angle: complex
# arithmetic that compiles, and that is real wherever θ is None. For gril_chunk.

def powers(n, log_rho, theta):
    """γⁿ = ρⁿ (cos nθ, sin nθ) for exponents n (…): (J, …, parts, m)."""
    (J, m), n = log_rho.shape, n[..., None]
    rho = torch.exp(n * log_rho.view(J, *[1] * (n.ndim - 1), m))
    if theta is None:
        return rho[..., None, :]
    angle = n * theta.view(J, *[1] * (n.ndim - 1), m)
    return torch.stack([rho * angle.cos(), rho * angle.sin()], -2)


def times(a, x):
    """a x for numbers in parts."""
    if a.shape[-2] == 1:
        return a * x
    (a, b), (x, y) = a.unbind(-2), x.unbind(-2)
    return torch.stack([a * x - b * y, a * y + b * x], -2)


def conjugate(a):
    """ā."""
    return a if a.shape[-2] == 1 else torch.stack([a[..., 0, :], -a[..., 1, :]], -2)


def in_parts(Z, theta):
    """A state (…, m), real or complex, in parts."""
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
        theta = torch.atan2((n * theta).sin(), (n * theta).cos())           # small, for float32
    age = ages[:, None] - ages                                              # (G, G)
    D = powers(age.clamp(min=0), log_rho, theta) * (age >= 0)[..., None, None]
    turned = [] if theta is None else [torch.stack([-D[..., 1, :], D[..., 0, :]], -2)]
    D = torch.stack([D, *turned], -2)
    b = F.pad(b, (0, 0, 0, 0, 0, 0, 0, -C % G)).unflatten(2, (-1, G))       # (…, C/G, G, d, ·, m)
    M = torch.einsum("jghqpm,bjchdpm->bjcgdqm", D, b)
    if C > G:
        before = carry(M[:, :, :-1, -1], G, log_rho, theta, G)              # (…, C/G - 1, d, ·, m)
        before = times(powers(ages + 1, log_rho, theta)[:, None, :, None], before[:, :, :, None])
        M = M + F.pad(before, (0, 0, 0, 0, 0, 0, 0, 0, 1, 0))
    return M.flatten(2, 3)[:, :, :C]

"""What the recurrence is computed with: powers of gates, scans, and the form in which the sequence block runs.

`gril_loop` in gril.py is the text to read; `gril_tokens` here is the same sum regrouped for speed, with its gradient
written out. v, k, u are a head's tokens (GrilMixer), C_v, C_k, C_u their windows: V = C_v Q, K = C_k, r = C_u q with β in
q, and γ is the gate, one number per key channel. Three ideas make it fast:

  one key per token   The columns of a window are tokens, so the w outer products of a step can be regrouped by the token
                      that they write. With K̃_{s,i} = Σ_j Q_ij k_{s-w+1+j}, zero before the sequence starts, for w = 3:
                        κ⁰_t = K̃_{t,2}      κ¹_t = K̃_{t,1} + γ κ⁰_{t-1}      κ²_t = K̃_{t,0} + γ κ¹_{t-1}
                        Z_t = v_t κ⁰_tᵀ + v_{t-1} κ¹_tᵀ + M_t      M_t = γ ⊙ M_{t-1} + v_{t-2} κ²_tᵀ
                      M is a linear attention with one key a token, two tokens late. So o = S v, a matrix with
                        S_{t,t} = κ⁰_t · r_t      S_{t,t-1} = κ¹_t · r_t      S_{t,s-2} = (γ^{t-s} κ²_s) · r_t
  blocks of eight     Inside eight steps γ^{t-s} = γ g^{t-1-c} g^{c-s}, c in the middle: one product of scaled read-outs
                      with scaled keys. g is γ moved off zero by less than rounding, so that g⁻³ is finite; as the
                      diagonal t = s is kept apart and one γ is left alone, γ = 0 and its gradient stay exact.
                      Between blocks a state is carried; wide heads first take longer chunks, half by half.
  tiles               Heads and sequences are independent. A few of them at a time fit the cache, head after head, as rows
                      of tokens; backward makes a tile's arrays again, so that nothing but v, k, u is kept.
"""
import torch

BLOCK = 8                       # torch computes products of fewer than 400 multiply-adds in a plain loop
TILE = 1 << 18                  # numbers in one array of a tile, for each CPU thread


# ------------------------------------------------------------------------------------------------- powers and scans

def flat(x):
    """Complex channels as pairs of real ones, so that Re(a · conj(b)) is the real product flat(a) · flat(b)."""
    return torch.view_as_real(x.resolve_conj()).flatten(-2) if x.is_complex() else x


def unflat(x, like):
    """The inverse of flat, where `like` is complex."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2))) if like.is_complex() else x


def real(x):
    return x.real if x.is_complex() else x


def powers(gamma, n):
    """γ⁰ … γⁿ along a new first axis, by doubling: products only, so exact and differentiable at γ = 0 too."""
    p = torch.ones_like(gamma)[None]
    while len(p) <= n:
        p = torch.cat([p, p * gamma])
        gamma = gamma * gamma
    return p[:n + 1]


def flush(x):
    """Zero instead of denormal numbers, with which a CPU computes a hundred times slower; the gradient is x's."""
    return x - torch.where(x.abs() < torch.finfo(x.dtype).tiny ** 0.8, x, 0).detach()


def scan(a, b, z0):
    """z_t = a_t ⊙ z_{t-1} + b_t along axis 1 (Eq. 1), in log depth; a (B|1, T|1, …), b (B, T, …), z0 (B, …)."""
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
    def backward(ctx, g):
        a, z, z0 = ctx.saved_tensors
        g = _solve(a.conj(), g.clone(), back=True)                          # dL/db_t = g_t + ā_{t+1} dL/db_{t+1}
        z = torch.cat([z0[:, None], z[:, :-1]], 1)
        return (g * z.conj()).sum_to_size(a.shape), g, (a[:, 0].conj() * g[:, 0]).sum_to_size(z0.shape)


def _solve(a, z, back=False):
    """z_t += a_t z_{t-1}, or backwards z_t += a_{t+1} z_{t+1}, in log depth; z may be overwritten.

    On a CPU, where a step is long enough to fill it, one step after the other: that reads everything once.
    """
    if z.device.type == "cpu" and z[:, 0].numel() >= 1024:
        steps, gates = z.unbind(1), a.expand(-1, z.shape[1], *a.shape[2:]).unbind(1)[1:]
        steps, gates = (steps[::-1], gates[::-1]) if back else (steps, gates)
        for a_t, before, z_t in zip(gates, steps, steps[1:]):
            z_t.addcmul_(a_t, before)
        return z
    if a.shape[1] == 1:
        scan_(z, a, back)
        return z
    if back:
        a = torch.cat([a[:, 1:], a[:, :1]], 1)                              # a_{t+1} meets z_{t+1}
        return _associative_scan(a.flip(1), z.flip(1)).flip(1)
    return _associative_scan(a, z)


def scan_(z, a, back=False):
    """z_t += a z_{t-1} (back: a z_{t+1}) along axis 1 for a constant gate a, in place: pairs, pairs of pairs, and down."""
    T, n, gates = z.shape[1], 1, []

    def add(first, a):                                                      # place i += a · place i-n, every 2n places
        count = len(range(first, T, 2 * n))
        if count:
            first = T - 1 - first - 2 * n * (count - 1) if back else first
            source = first + n if back else first - n
            to, by = (slice(i, i + 2 * n * (count - 1) + 1, 2 * n) for i in (first, source))
            z[:, to].addcmul_(z[:, by], a)
    while 2 * n <= T:
        add(2 * n - 1, a)
        gates.append(a)
        a, n = flush(a * a), 2 * n
    for a in reversed(gates):
        n //= 2
        add(3 * n - 1, a)


def _associative_scan(a, b):
    """z_t = a_t z_{t-1} + b_t from zero: pairs are merged, the half as long sequence solved, the rest filled in."""
    T = b.shape[1]
    if T == 1:
        return b
    n, rest = T // 2, (T - 1) // 2
    first, second, third = a[:, :2 * n:2], a[:, 1::2], a[:, 2::2]
    z = torch.empty_like(b)
    z[:, 0] = b[:, 0]
    z[:, 1::2] = _associative_scan(second * first, b[:, 1::2] + second * b[:, :2 * n:2])
    z[:, 2::2] = b[:, 2::2] + third * z[:, 1:2 * rest:2]
    return z


# --------------------------------------------------------------------------------------------- the recurrence on tokens

def gril_tokens(v, k, u, Q, q, gamma, state, final=True):
    """Definition 4.2 on a stretch of tokens v (B, T, J, d), k, u (B, T, J, m): o (B, T, J, d) and the next state.

    Q (J, w, w); q (J, w), β in it; a gate γ (J, m) per key channel; the state is gril_step's: Z (B, J, d, m) and the last
    w-1 tokens (B, J, d+2m, w-1). final=False leaves the next state out, which costs a pass of its own. In float32 a gate
    next to 0 asks for tokens below 100, or gradients overflow: g⁻³ is 1e27 there. After a norm they are of order one.
    """
    if v.shape[1] == 0:
        raise ValueError(f"empty sequence: v {tuple(v.shape)}, k {tuple(k.shape)}")
    Z0, past = state
    dtype = torch.promote_types(gamma.dtype, Z0.dtype)
    gamma, Z0, Q, q, past = gamma.to(dtype), Z0.to(dtype), *(x.to(dtype.to_real()) for x in (Q, q, past))
    L = max(BLOCK, 1 << (max(v.shape[-1], k.shape[-1]) - 1).bit_length())           # a state is d · m numbers a chunk
    L = min(L, max(BLOCK, 1 << (v.shape[1] - 1).bit_length()), 64)
    sign = torch.where(real(gamma) < 0, -1, 1).to(dtype)
    g = gamma + sign * (1e-9 if dtype.to_real() == torch.float32 else 1e-60)
    around, none = torch.cat([powers(1 / g, 3).flip(0), powers(g, 3)[1:]]), torch.zeros_like(g)[None]     # g⁻³ … g³
    up, down = torch.cat([none, gamma * around]), torch.cat([around.flip(0), none])     # (8, J, m), rows of a block
    p = flush(powers(gamma, L))
    read, write = p[1:], p[:L].flip(0)                                              # (L, J, m), rows of a chunk
    tables = [table.movedim(0, 1).contiguous() for table in (up.conj(), down, read.conj(), write)]
    o = _Tokens.apply(v, k, u, Z0, past, Q, q, gamma, p[L], *tables)
    return o, final_state(v, k, u, Q, gamma, Z0, past) if final else None


def final_state(v, k, u, Q, gamma, Z0, past):
    """The state after the last token: Z_T = γ^T ⊙ Z_0 + Σ_t γ^{T-1-t} ⊙ V_t K_tᵀ in one product, and the last w-1 tokens."""
    T, w = v.shape[1], Q.shape[-1]
    tokens = stretch(past, v, k, u)
    C = tokens.unfold(-1, w, 1)                                                     # (B, J, d+2m, T, w)
    V, K = C[:, :, :v.shape[-1]] @ Q[:, None], C[:, :, v.shape[-1]:v.shape[-1] + k.shape[-1]]
    p = powers(gamma, T).permute(1, 2, 0)                                           # (J, m, T+1)
    K = (K * p[..., :T].flip(-1)[..., None]).flatten(-2)                            # (B, J, m, T w)
    return p[..., None, :, T] * Z0 + V.flatten(-2).to(K.dtype) @ K.mT, tokens[..., tokens.shape[-1] - (w - 1):]


def stretch(past, v, k, u):
    """The carried tokens and the new ones, side by side: (B, J, d+2m, w-1+T)."""
    return torch.cat([past, torch.cat([v, k, u], -1).permute(0, 2, 3, 1).to(past.dtype)], -1)


class _Tokens(torch.autograd.Function):

    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs)
        o = inputs[0].new_empty(inputs[0].shape)
        for rows, heads in tiles(o):
            o[rows, :, heads] = _Tile(inputs, rows, heads).forward()
        return o

    @staticmethod
    def backward(ctx, go):
        inputs = ctx.saved_tensors
        grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs[:5]]
        grads += [torch.zeros_like(x) for x in inputs[5:]]
        for rows, heads in tiles(go):
            _Tile(inputs, rows, heads).backward(go, grads)
        return tuple(grads)


def tiles(v):
    """(sequences, heads) of each tile; off the CPU there is only one."""
    B, T, J, d = v.shape
    size = TILE * torch.get_num_threads() if v.device.type == "cpu" else v.numel()
    heads = min(J, max(1, size // (T * d)))
    step = max(1, size // (T * d * heads))
    return [(slice(b, b + step), slice(j, j + heads)) for j in range(0, J, heads) for b in range(0, B, step)]


class _Tile:
    """Some heads of some sequences, head after head, as rows of tokens: w-1 of the past, T new ones, zeros up to R.

    Row t of the values is therefore v_{t-w+1}, of the keys' first column k_{t-w+1}. In the rows from T on keys are zero,
    so that nothing is written there, and read-outs are junk that nobody returns; the last chunk has only such rows.
    In backward gx is the gradient of x.
    """

    def __init__(self, inputs, rows, heads):
        v, k, u = (x[rows, :, heads] for x in inputs[:3])
        Z0, past = (x[rows, heads] for x in inputs[3:5])
        self.Q, self.q, self.gamma, self.whole, self.up, self.down, self.read, self.write = (x[heads] for x in inputs[5:])
        (self.B, self.T, self.J, self.d), self.m, self.where = v.shape, k.shape[-1], (rows, heads)
        self.w, self.L = self.Q.shape[-1], self.read.shape[1]
        self.R = (-(-self.T // self.L) + 1) * self.L
        self.n = self.J * self.B * self.R
        self.Z0 = Z0.transpose(0, 1)                                                # (J, B, d, m)
        past = past.mT.split([self.d, self.m, self.m], -1)                          # (B, J, w-1, ·)
        self.v, self.k, self.u = (self.gather(x, before) for x, before in zip((v, k, u), past))
        self.factors()

    # ---- rows

    def gather(self, x, past=None):
        """x (B, T, J, ·) as rows (n + w-1, ·), after those of the past; at the very end w-1 more, to look ahead."""
        buffer = self.Q.new_empty(self.n + self.w - 1, x.shape[-1])
        rows, first = buffer[:self.n].view(self.J, self.B, self.R, -1), 0
        if past is not None:
            first = self.w - 1
            rows[:, :, :first] = past.transpose(0, 1)
        rows[:, :, first:first + self.T] = x.permute(2, 0, 1, 3)
        rows[:, :, first + self.T:] = 0
        buffer[self.n:] = 0
        return buffer

    def ahead(self, buffer, j):
        """(J, B R ·): in the place of row t, row t + j."""
        return buffer[j:j + self.n].view(self.J, -1)

    def overlapping(self, buffer):
        """(n/8, 8+w-1, ·): the rows of each block and the w-1 after it."""
        c = buffer.shape[-1]
        return buffer.as_strided((self.n // BLOCK, BLOCK + self.w - 1, c), (BLOCK * c, c, 1))

    def clear(self, x):
        x.view(self.J, self.B, self.R, -1)[:, :, self.T:] = 0

    def chunks(self, buffer):
        return buffer[:self.n].view(-1, self.L, buffer.shape[-1])                   # (n/L, L, ·)

    def runs(self, x, table):
        """x and a table (J, rows, m) in shapes that broadcast, with long contiguous runs: those are fast."""
        return x.view(self.J, -1, table[0].numel()), table.reshape(self.J, 1, -1)

    def times(self, x, table):
        """(·, rows, m): every so many rows of x times the table; complex channels as pairs."""
        x, runs = self.runs(x, table)
        return flat((x * runs).view(-1, table.shape[1], self.m))

    def channels(self, x):
        return unflat(x, self.gamma)

    # ---- forward

    def factors(self):
        """r, and κ⁰ … κ^{w-1}, each with a row of zeros before it."""
        self.r = mix(self.q, [self.ahead(self.u, j) for j in range(self.w)],
                     self.u.new_empty(self.J, self.n // self.J * self.m))
        self.gammas = self.gamma[:, None].expand(-1, BLOCK, -1)
        self.kappa = []
        for i in reversed(range(self.w)):
            buffer = self.gamma.new_empty(self.n + 1, self.m)
            buffer[0] = 0
            kappa = buffer[1:].view(self.J, -1)
            out = torch.empty_like(self.r) if kappa.is_complex() else kappa
            mix(self.Q[:, i], [self.ahead(self.k, j) for j in range(self.w)], out)
            if out is not kappa:
                kappa.copy_(out)
            if self.kappa:
                before, gammas = self.runs(self.kappa[-1][:-1], self.gammas)
                kappa.view_as(before).addcmul_(before, gammas)
            self.clear(kappa)
            self.kappa.append(buffer)
        self.far = self.kappa[-1][1:]                                               # (n, m)

    def scores(self):
        """S (n/8, 8, 8+w-1): column t+w-1-c of row t is κ^c_t · r_t, all before it γ^{t-s} κ_s · r_t; they meet v_{s-w+1}."""
        self.U = self.times(self.r, self.up)                                        # (n/8, 8, m)
        K = self.gamma.new_empty(self.n + self.w - 1, self.m)
        x, table = self.runs(self.far, self.down)
        torch.mul(x, table, out=K[:self.n].view_as(x))
        K[self.n:] = 0
        K = flat(K)
        self.K = K[:self.n].view(-1, BLOCK, K.shape[-1])
        S = torch.bmm(self.U, self.overlapping(K).mT).tril_(-1)
        ones = self.r.new_ones(self.m)
        for c, kappa in enumerate(self.kappa):
            S.diagonal(self.w - 1 - c, 1, 2).copy_(((real(kappa[1:]) * self.r.view(-1, self.m)) @ ones).view(-1, BLOCK))
        return S

    def states(self):
        """M before each chunk (J B, C, d, m); what a chunk writes is put where the next begins."""
        self.Kw = self.times(self.far, self.write)                                  # (n/L, L, m)
        M = self.Kw.new_empty(self.n // self.L + 1, self.d, self.Kw.shape[-1])
        torch.bmm(self.chunks(self.v).mT, self.Kw, out=M[1:])
        M = self.channels(M[:-1]).view(self.J * self.B, -1, self.d, self.m)
        M[:, 0] = self.Z0.flatten(0, 1)
        scan_(M, self.carry(self.whole))
        return M

    def carry(self, whole):
        return whole.repeat_interleave(self.B, 0)[:, None, None]                    # (J B, 1, 1, m)

    def halves(self, n):
        """Of every 2n rows: read-outs right of the middle, keys and values left of it, scaled by γ to and from there."""
        r, kappa = (x.view(self.J, -1, 2, n, self.m) for x in (self.r, self.far))
        u, k = r[:, :, 1] * self.read[:, None, :n], kappa[:, :, 0] * self.write[:, None, -n:]
        return flat(u).flatten(0, 1), flat(k).flatten(0, 1), self.v[:self.n].view(-1, 2, n, self.d)[:, 0]

    def forward(self):
        o = torch.bmm(self.scores(), self.overlapping(self.v)).view(-1, self.L, self.d)
        o.baddbmm_(self.times(self.r, self.read), flat(self.states()).flatten(0, 1).mT)
        n = BLOCK
        while n < self.L:
            u, k, v = self.halves(n)
            o.view(-1, 2, n, self.d)[:, 1] += u @ k.mT @ v
            n *= 2
        return o.view(self.J, self.B, self.R, self.d)[:, :, :self.T].permute(1, 2, 0, 3)        # (B, T, J, d)

    # ---- backward

    def through(self, gy, x, gx, table, gtable):
        """Of y = x ⊙ table: adds to gx and to gtable."""
        gy, runs = self.runs(self.channels(gy), table)
        gtable += (gy * x.view_as(gy).conj()).sum(1).view_as(table)
        if gx.is_complex() == gy.is_complex():
            gx.view_as(gy).addcmul_(gy, runs.conj())
        else:
            gx.view_as(gy).add_((gy * runs.conj()).real)

    def backward(self, go, grads):
        rows, heads = self.where
        gv_out, gk_out, gu_out, gZ0, gpast = grads[:5]
        gQ, gq, ggamma, gwhole, gup, gdown, gread, gwrite = (x[heads] for x in grads[5:])
        J, n, w, L, d, m = self.J, self.n, self.w, self.L, self.d, self.m
        g = self.gather(go[rows, :, heads])[:n].view(-1, BLOCK, d)

        # o = S v
        parts = torch.bmm(self.scores().mT, g)                                      # (n/8, 8+w-1, d), overlapping
        gv = g.new_empty(n + w - 1, d)
        blocks = gv[:n].view(-1, BLOCK, d)
        blocks.copy_(parts[:, :BLOCK])
        blocks[1:, :w - 1] += parts[:-1, BLOCK:]
        gS = torch.bmm(g, self.overlapping(self.v).mT)
        gr, gkappa = torch.zeros_like(self.r).view(-1, m), []
        for c, kappa in enumerate(self.kappa):
            dot = gS.diagonal(w - 1 - c, 1, 2).reshape(-1, 1)
            gr.addcmul_(real(kappa[1:]), dot)
            gkappa.append((self.r.view(-1, m) * dot).to(kappa.dtype))
        gfar = gkappa[-1]
        gS = gS.tril_(-1)[..., :BLOCK]
        self.through(torch.bmm(gS, self.K), self.r, gr, self.up, gup)
        self.through(torch.bmm(gS.mT, self.U), self.far, gfar, self.down, gdown)

        # o += (r ⊙ γ…) Mᵀ, M carried from chunk to chunk
        g, M, Ur = g.view(-1, L, d), self.states(), self.times(self.r, self.read)
        gM = Ur.new_empty(n // L + 1, d, Ur.shape[-1])
        torch.bmm(g.mT, Ur, out=gM[:-1])
        gM[-1] = 0
        G = self.channels(gM)[:-1].view(M.shape)
        scan_(G, self.carry(self.whole).conj(), back=True)
        gwhole += (G[:, 1:] * M[:, :-1].conj()).sum((1, 2)).view(J, -1, m).sum(1)
        gZ0[rows, heads] = G[:, 0].unflatten(0, (J, -1)).transpose(0, 1)
        self.through(torch.bmm(g, flat(M).flatten(0, 1)), self.r, gr, self.read, gread)
        self.chunks(gv).baddbmm_(self.Kw, gM[1:].mT)
        self.through(torch.bmm(self.chunks(self.v), gM[1:]), self.far, gfar, self.write, gwrite)

        b = BLOCK
        while b < L:                                                                # halves of longer chunks
            u, k, v = self.halves(b)
            right = g.view(-1, 2, b, d)[:, 1]
            gS = right @ v.mT
            gv[:n].view(-1, 2, b, d)[:, 0] += (u @ k.mT).mT @ right
            for gy, x, gx, side, table, gtable in ((gS @ k, self.r, gr, 1, self.read[:, :b], gread[:, :b]),
                                                   (gS.mT @ u, self.far, gfar, 0, self.write[:, -b:], gwrite[:, -b:])):
                gy, (x, gx) = self.channels(gy).view(J, -1, b, m), (y.view(J, -1, 2, b, m)[:, :, side] for y in (x, gx))
                gtable += (gy * x.conj()).sum(1)
                gy = gy * table[:, None].conj()
                gx += gy if gx.is_complex() else real(gy)
            b *= 2

        # κ from K̃, K̃ and r from tokens
        gk, gu = torch.zeros_like(self.k), torch.zeros_like(self.u)
        for c in reversed(range(w)):
            self.clear(gkappa[c])
            if c:
                gy, gammas = self.runs(gkappa[c], self.gammas)
                ggamma += (gy * self.kappa[c - 1][:-1].view_as(gy).conj()).sum(1).view(J, BLOCK, m).sum(1)
                gkappa[c - 1][:-1] += (gy * gammas.conj()).view(n, m)[1:]
            self.unmix(real(gkappa[c]).reshape(J, -1), self.k, gk, self.Q[:, w - 1 - c], gQ[:, w - 1 - c])
        self.unmix(gr.view(J, -1), self.u, gu, self.q, gq)
        for out, gx, past in zip((gv_out, gk_out, gu_out), (gv, gk, gu), gpast[rows, heads].split([d, m, m], 2)):
            gx = gx[:n].view(J, self.B, self.R, -1)
            past.copy_(gx[:, :, :w - 1].permute(1, 0, 3, 2))
            out[rows, :, heads] = gx[:, :, w - 1:w - 1 + self.T].permute(1, 2, 0, 3)

    def unmix(self, gy, x, gx, weights, gweights):
        """Of y = mix(weights, the columns of x): adds to gx and to gweights."""
        for j in range(self.w):
            gweights[:, j] += torch.stack([torch.dot(a, b) for a, b in zip(gy, self.ahead(x, j))])
            self.ahead(gx, j).addcmul_(gy, weights[:, j:j + 1])


def mix(weights, columns, out):
    """Σ_j weights_j columns_j; weights (J, w), columns and out (J, ·)."""
    torch.mul(columns[0], weights[:, :1], out=out)
    for j, x in enumerate(columns[1:], 1):
        out.addcmul_(x, weights[:, j:j + 1])
    return out

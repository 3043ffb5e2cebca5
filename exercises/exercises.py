"""Three exercises. Replace each `raise NotImplementedError` until every test passes:

    .venv/bin/python -m pytest -q exercises                      yours
    GRIL_SOLUTIONS=1 .venv/bin/python -m pytest -q exercises     the reference in solutions.py

  1. a task family       y = W x + b: an offset, and the best step size with it          an hour
  2. momentum            k layers that are k steps of heavy-ball gradient descent        an evening
  3. a preconditioner    a third head, the diagonal of Σ x xᵀ, divides each step         an evening

They are one story. The offset makes the problem badly conditioned, since a constant feature is
longer than one that varies, and plain gradient descent slow. Momentum and a preconditioner are the
two classic remedies, and a linear recurrence can hold both. `python exercises/solutions.py` prints
how much each of them brings.

Read first: gril.py, sections 3 and 4; tasks.py, class NdRegression and closed_form.
"""
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parent.parent))                # where gril.py is
from gril import MultistepGRIL                                              # noqa: E402
from tasks import Batch, NdRegression                                       # noqa: E402, F401


# ---------------------------------------------------------------------------- 1. a new task family

class AffineRegression(NdRegression):
    """y = W x + b: y = W x where the last of the f features is always 1, and b W's last column.

    Write `sample` and `optimal`. Tokens, models, constructions and explicit learners are inherited:
    a task is its data.

    sample(B, generator) -> Batch(x, y, tokens). As in NdRegression, but x[..., -1] = 1, also in the
    query. W, with b in it, is normal with standard deviation weight_scale; the other features are
    uniform in (-½, ½) times scale.

    optimal() -> (η*, loss*) of one step of gradient descent from zero, in closed form. One step
    predicts η W S x with S = Σ_i x_i x_iᵀ / N, and W is normal, so the expected loss per coordinate
    is, times weight_scale²,

        ½ E[xᵀ (I - η S)² x] = ½ (tr Σ - 2 η tr Σ² + η² tr Σ E[S²]),     Σ = E[x xᵀ]

    Hints. Σ is diagonal: σ² = scale²/12 for f-1 features, 1 for the last. A product of two
    different examples has expectation Σ², of an example with itself E[‖x‖² x xᵀ], so
    N E[S²] = E[‖x‖² x xᵀ] + (N-1) Σ². For the middle one E[x_j⁴] = scale⁴/80. closed_form in
    tasks.py does the same without the offset. With f = 1 all that is left is b, and one step must
    find it: η* = 1, loss* = 0.
    """
    name = "affine_regression"

    def sample(self, B, generator):
        raise NotImplementedError

    def optimal(self):
        raise NotImplementedError


# ------------------------------------------------------------------------------------- 2. momentum

class MomentumGRIL(MultistepGRIL):
    """Heavy-ball gradient descent in the read-out: from W_0 = W_{-1} = 0, a step per layer,

        W_l = W_{l-1} + β (Z - W_{l-1} Z̃) + μ (W_{l-1} - W_{l-2})

    with Z = Σ y xᵀ, Z̃ = Σ x xᵀ and β = η/N.

    The state stays as it is, two sums; only how it is read changes. Write `walk`, which returns
    W_L r for the read-outs r (B, T, f).

    Hints. MultistepGRIL.walk goes from the top layer down with one vector, because
    W_l r = β Z r + W_{l-1} (r - β Z̃ r): what is left to read of layer l-1 is again a matrix times
    a vector. Momentum reaches two layers back, so carry two vectors: what is left to read is
    W_l r + W_{l-1} b, at the top with b = 0. Put the equation in, collect what multiplies W_{l-1}
    and what multiplies W_{l-2}. With μ = 0 it must be MultistepGRIL.walk. As there, self.heads
    gives Z r and Z̃ r. No matrix W needs to be formed: six lines.
    """
    mu = 0.0

    def walk(self, C, r, form):
        raise NotImplementedError


# ------------------------------------------------------------------------------ 3. a preconditioner

class PreconditionedGRIL(MultistepGRIL):
    """Gradient descent with each feature's own step size, one over the sum of its squares (Jacobi):

        W_l = W_{l-1} + η (Z - W_{l-1} Z̃) D⁻¹,     D = diag(Σ x ⊙ x) + ε

    N has gone: D grows with the examples, so β is η itself (construct_multistep(layer, eta, N=1))
    at any length. And so have the units: measure a feature in centimetres instead of metres, and no
    prediction changes (ε = 0). That is tested.

    Write `walk` with a third head whose state is D, f numbers for each prompt, made by the same
    recurrence as the others.

    Hints. The preconditioner stands between W and the vector it is applied to, so in the walk it
    meets the vector first: p = D⁻¹ r, then o += η Z p and r ← r - η Z̃ p. For the head:
    o, _ = form(C_v, C_k, C_u, Q, q, A) is Z_t = A ⊙ Z_{t-1} + C_v Q C_kᵀ, o_t = Z_t C_u q, with
    the shapes at the top of gril.py. A state with one column, d = f and m = w = J = 1, whose C_k,
    C_u, Q, q and A are ones, sums up its values and gives them out. The values are x ⊙ x; x is the
    first column of the window, C[..., 0].
    """
    epsilon = 1e-12

    def walk(self, C, r, form):
        raise NotImplementedError


# ------------------------------------------------------------------------------------------- given

def descent(steps, eta, mu=0.0, precondition=False, epsilon=0.0):
    """What exercises 2 and 3 must equal: x (B, N, f), y (B, N, f), x_query (B, f) -> (B, f)."""
    def learner(x, y, x_query):
        Z, Z_tilde = y.mT @ x, x.mT @ x
        D = x.square().sum(1, keepdim=True) + epsilon if precondition else x.shape[1]
        W = before = torch.zeros_like(Z)
        for _ in range(steps):
            W, before = W + eta * (Z - W @ Z_tilde) / D + mu * (W - before), W
        return (W @ x_query[..., None])[..., 0]
    return learner

"""Reference solutions of exercises.py: to be read after trying.

    python exercises/solutions.py     what the three bring: losses on the affine tasks of exercise 1
"""
import torch

from exercises import Batch, MultistepGRIL, NdRegression, descent
from gril import construct_multistep
from tasks import as_predictor, evaluate, tune


class AffineRegression(NdRegression):
    name = "affine_regression"

    def sample(self, B, generator):
        x = super().sample(B, generator).x
        x[..., -1] = 1                                          # the feature that b multiplies
        W = torch.randn(B, self.f, self.f, generator=generator, device=generator.device)
        y = x @ (self.weight_scale * W).mT                      # (B, N+1, f)
        return Batch(x, y, self.tokens(x, y))

    def optimal(self):
        n = self.f - 1                                          # features that vary
        variance, fourth = self.scale ** 2 / 12, self.scale ** 4 / 80
        trace, squared, cubed = (n * variance ** power + 1 for power in (1, 2, 3))  # tr Σ, Σ², Σ³
        itself = n * variance * (fourth + (n - 1) * variance ** 2 + variance) + trace
        e = (itself + (self.N - 1) * cubed) / self.N    # tr Σ E[S²]; itself: tr Σ E[‖x‖² x xᵀ]
        return squared / e, self.weight_scale ** 2 * 0.5 * (trace - squared ** 2 / e)


class MomentumGRIL(MultistepGRIL):
    mu = 0.0

    def walk(self, C, r, form):
        o, b = 0, torch.zeros_like(r)                           # left to read: W_l r + W_{l-1} b
        for l in reversed(list(range(len(self.Q))) * self.loops):
            beta, (Zr, Zr_tilde) = self.beta[l][:, None], self.heads(C, r, l, form)
            o = o + beta * Zr
            r, b = (1 + self.mu) * r - beta * Zr_tilde + b, -self.mu * r
        return o


class PreconditionedGRIL(MultistepGRIL):
    epsilon = 1e-12

    def walk(self, C, r, form):
        values = C[:, :, None, :, :1].square()                  # x ⊙ x, (B, T, 1, f, 1)
        ones, one = torch.ones_like(values[..., :1, :]), C.new_ones(1, 1)
        D, _ = form(values, ones, ones, one, one[0], one)       # the third head, (B, T, 1, f)
        o, D = 0, D[:, :, 0] + self.epsilon
        for l in reversed(list(range(len(self.Q))) * self.loops):
            beta, (Zp, Zp_tilde) = self.beta[l][:, None], self.heads(C, r / D, l, form)
            o = o + beta * Zp
            r = r - beta * Zp_tilde
        return o


def main(steps=5):
    task = AffineRegression(f=10, n=20, tasks=5_000)
    rows = {"zero predictor": lambda batch, x_query: torch.zeros_like(x_query)}
    for name, layer, N, numbers in (("gradient descent", MultistepGRIL, task.N, [0.5]),
                                    ("with momentum", MomentumGRIL, task.N, [0.5, 0.3]),
                                    ("with a preconditioner", PreconditionedGRIL, 1, [0.5])):
        precondition = layer is PreconditionedGRIL
        eta, *mu = tune(lambda eta, mu=0.0: descent(steps, eta, mu, precondition), numbers, task)
        layer = construct_multistep(layer(task.f, 1, loops=steps), eta, N)
        layer.mu = mu[0] if mu else 0.0
        label = f"{name}, η = {eta:.2f}" + "".join(f", μ = {m:.2f}" for m in mu)
        rows[label] = as_predictor(task, layer)
    print(f"affine regression, f = {task.f}, N = {task.N}: a constructed layer looped {steps} "
          "times, its numbers tuned;\nloss on the same 10,000 fresh tasks")
    for name, score in evaluate(task, rows, 10_000, seed=0, sensitivities=1).items():
        print(f"  {name:45s}{score['loss']:8.4f}")


if __name__ == "__main__":
    main()

"""The picture of one run, from what the run has in hand."""
import csv

import matplotlib.pyplot as plt
import torch

from pictures.plots import BLUE, GREY, ORANGE, WINDOW, curves, matrix
from tasks import as_learner, as_predictor, recovered



def draw_run(task, model, result):
    """The picture of one run: loss onto the gradient-descent line, predictions against it, weights beside theirs."""
    if not hasattr(task, "constructed"):
        return draw_curves(task, result)
    learned, aims = recovered(model, task.N), recovered(task.constructed(), task.N)
    panels = [key for key in ("Q", "q", "PsiTheta", "A") if key in learned and learned[key].numel() < 1e5]
    one_layer = "Q" in learned and len(learned["Q"]) == 1
    panels = panels if one_layer or "PsiTheta" in learned else []
    figure, axes = plt.subplots(1, 2 + len(panels), figsize=(6.4 + 1.9 * len(panels), 2.9),
                                width_ratios=[1.5, 1.2] + [0.75] * len(panels), layout="constrained")
    steps, loss, _ = curves([result], "loss")
    axes[0].plot(steps, loss, color=BLUE, label=f"trained {result['model']}")
    axes[0].axhline(float(curves([result], "gd_loss")[1][0]), color=ORANGE, ls="--", label=task.reference)
    axes[0].axhline(result["zero_loss"], color=GREY, ls=":", label="zero predictor")
    axes[0].set_xscale("log")
    axes[0].set(xlabel="optimiser step", ylabel="loss", title=f"{result['task']}, f = {task.f}, N = {task.N}")
    axes[0].legend()
    batch = task.sample(200, torch.Generator().manual_seed(7))
    with torch.no_grad():
        ours, gd = as_predictor(task, model)(batch, batch.x[:, -1]), as_learner(task.learner())(batch, batch.x[:, -1])
    limit = max(ours.abs().max(), gd.abs().max()).item()
    axes[1].plot([-limit, limit], [-limit, limit], color=GREY, lw=0.8)
    axes[1].plot(gd.flatten(), ours.flatten(), ".", ms=2, color=BLUE)
    axes[1].set(xlabel=f"prediction of {task.reference}", ylabel="prediction of the model",
                title=f"cosine {result['cosine']:.4f}")
    for ax, key in zip(axes[2:], panels):
        stacked = ax.get_subplotspec().subgridspec(2, 1)
        ax.remove()
        for part, (name, M) in zip(stacked, (("trained", learned[key]), ("constructed", aims.get(key)))):
            sub = figure.add_subplot(part)
            M = torch.ones_like(learned[key]) if M is None else M
            title = f"A {name}\n{M.mean():.3f} ± {M.std():.3f}" if key == "A" else f"{key.replace('PsiTheta', '$Ψ^TΘ$')} {name}"
            matrix(sub, M[0] if M.ndim == 3 else M, title, WINDOW if key in "Qq" else None)
    path = result["folder"] / "figure.png"
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path


def draw_curves(task, result):
    """The picture of a run without a construction beside it: losses, and the number that chose the weights."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.9), layout="constrained")
    for ax, columns in zip(axes, (("train_loss", "loss"), (task.choose, f"test_{task.choose}"))):
        for column, color in zip(columns, (BLUE, ORANGE)):
            with open(result["folder"] / "metrics.csv", newline="") as file:
                points = [(int(row["step"]), float(row[column])) for row in csv.DictReader(file) if column in row]
            if points:
                ax.plot(*zip(*points), color=color, label=column.replace("_", " "))
        ax.set(xlabel="optimiser step", title=f"{result['task']}, {result['model']}")
        ax.legend()
    path = result["folder"] / "figure.png"
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)
    return path

"""The picture of one run, from what the run has in hand: its task, model and result."""
import matplotlib.pyplot as plt
import torch

from pictures.plots import BLUE, GREY, ORANGE, WINDOW, band, losses, matrix, metrics, pm, save
from tasks import as_learner, as_predictor, recovered


def draw_run(task, model, result):
    """Loss onto the gradient-descent line, predictions against it, weights beside theirs."""
    if not hasattr(task, "constructed"):
        return draw_curves(task, result)
    learned, aims = recovered(model, task.N), recovered(task.constructed(), task.N)
    one_layer = len(learned.get("Q", [0])) == 1
    panels = [key for key in ("Q", "q", "PsiTheta", "A")
              if one_layer and key in learned and learned[key].numel() < 1e5]
    figure, axes = plt.subplots(1, 2 + len(panels), figsize=(6.4 + 1.9 * len(panels), 2.9),
                                width_ratios=[1.5, 1.2] + [0.75] * len(panels))
    losses(axes[0], {f"trained {result['model']}": [result]}, task.reference)
    axes[0].set(ylabel="loss", title=f"{result['task']}, f = {task.f}, N = {task.N}")
    axes[0].legend()
    batch = task.sample(200, torch.Generator().manual_seed(7))
    with torch.no_grad():
        ours = as_predictor(task, model)(batch, batch.x[:, -1])
        gd = as_learner(task.learner())(batch, batch.x[:, -1])
    limit = max(ours.abs().max(), gd.abs().max()).item()
    axes[1].plot([-limit, limit], [-limit, limit], color=GREY, lw=0.8)
    axes[1].plot(gd.flatten(), ours.flatten(), ".", ms=2, color=BLUE)
    axes[1].set(xlabel=f"prediction of {task.reference}", ylabel="prediction of the model",
                title=f"cosine {result['cosine']:.4f}")
    for ax, key in zip(axes[2:], panels):
        above, below = ax.get_subplotspec().subgridspec(2, 1)
        ax.remove()
        draw_weights(figure.add_subplot(above), key, "trained", learned[key])
        draw_weights(figure.add_subplot(below), key, "constructed", aims[key])
    return save(figure, result["folder"] / "figure.png")


def draw_weights(ax, key, name, M):
    title = f"{key.replace('PsiTheta', '$Ψ^TΘ$')} {name}"
    if key == "A":
        title += f"\n{pm(M.flatten().tolist(), 3)}"
    matrix(ax, M[0] if M.ndim == 3 else M, title, WINDOW if key in "Qq" else None)


def draw_curves(task, result):
    """A run without a construction beside it: losses, and the number that chose the weights."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.9))
    for ax, columns in zip(axes, (("train_loss", "loss"), (task.choose, f"test_{task.choose}"))):
        for column, color in zip(columns, (BLUE, ORANGE)):
            if column in metrics(result)[0]:
                band(ax, [result], column, color, column.replace("_", " "))
        ax.set(xlabel="optimiser step", title=f"{result['task']}, {result['model']}")
        ax.legend()
    return save(figure, result["folder"] / "figure.png")

"""The one training loop, and the command line for every task.

    python train.py --task nd_regression                    a random GRIL becomes gradient descent, in seconds
    python train.py --task multistep_regression --layers 3
    python train.py --task nd_regression --model no_window  an ablation
    python train.py --task nd_regression --model mamba      another sequence model (--width, --layers, --heads)
    python train.py --task nd_regression --recipe paper     the paper's optimiser and its 300,000 steps

The loop knows nothing of regression. A task gives it: recipes (presets), model(name), stream(seed, batch, device) of
batches whose position can be saved, loss(model, batch), validate(model), and report(model) for the end.
A run's folder holds config.json, metrics.csv, result.json, weights.pt, figure.png, and last.pt to go on from.
"""
import argparse
import csv
import json
import math
import os
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from gril import known
from tasks import TASKS

CHECKPOINT_EVERY = 1000


def is_logged(step):
    return step % 100 == 0 or step in (1, 2, 5, 10, 20, 50)     # dense at first: gradient descent is found early


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog="Options without a value here take "
                                     "it from the task's recipe.", formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--task", required=True, help=", ".join(TASKS))
    add("--model", default="gril", help="gril, a variant of the task, or another sequence model (an unknown "
        "one lists them)")
    add("--recipe", default="default", help="default, or paper: the paper's optimiser, rates and steps")
    add("--f", type=int, default=10, help="input width (default 10)")
    add("--n", type=int, default=10, help="examples in the prompt (default 10)")
    add("--k", type=int, default=3, help="classes (default 3)")
    add("--layers", type=int, help="of the model; gradient steps, for multistep_regression and nonlinear_regression")
    add("--width", type=int, help="of another sequence model than gril")
    add("--heads", type=int, help="of a model with attention")
    add("--scale", type=float, default=1.0, help="scale of the inputs (default 1)")
    add("--steps", type=int, help="optimiser steps")
    add("--batch", type=int, help="tasks per step")
    add("--lr", type=float, help="peak learning rate")
    add("--recurrent-lr", type=float, help="peak learning rate of the recurrent parameters")
    add("--weight-decay", type=float, help="of the other parameters")
    add("--warmup", type=int, help="steps of linear warm-up before the cosine")
    add("--clip", type=float, help="largest gradient norm, 0 for no limit")
    add("--hidden", type=int, help="state size of scalar_regression")
    add("--seed", type=int, default=0, help="fixes weights and data (default 0)")
    add("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    add("--threads", type=int, default=1, help="CPU threads (default 1: these models are too small for more)")
    add("--tasks", type=int, default=10_000, help="fresh tasks of the final evaluation (default 10,000)")
    add("--out", type=Path, help="run folder (default: a new one under runs/)")
    add("--force", action="store_true", help="overwrite the run in --out")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    add("--quiet", action="store_true", help="no progress bar, table or figure")
    return parser.parse_args(argv)


def train(args):
    """Train as the arguments say; the run's result, as in result.json."""
    # ---- task, recipe, folder
    Task = known("task", args.task, TASKS)
    recipe = Task.recipe(args.recipe, args.model, width=args.width, heads=args.heads, layers=args.layers)
    for name in ("steps", "batch", "lr", "recurrent_lr", "weight_decay", "warmup", "clip", "hidden"):
        if getattr(args, name) is not None:
            recipe[name] = getattr(args, name)
    for name in ("steps", "batch"):
        if recipe[name] < 1:
            raise ValueError(f"--{name} must be at least 1, got {recipe[name]}")
    task = Task(f=args.f, N=args.n, K=args.k, layers=args.layers, hidden=recipe.get("hidden"), scale=args.scale,
                tasks=args.tasks, calibrate=recipe.get("calibrate"), sizes=recipe.get("sizes"))
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = choose_device(args.device)
    model = task.model(args.model).to(device)
    config = dict(task=args.task, model=args.model, recipe=args.recipe, f=args.f, n=args.n, k=args.k,
                  layers=task.layers, scale=args.scale, seed=args.seed, tasks=args.tasks, **recipe)
    folder = run_folder(args, config)

    # ---- optimiser
    groups = parameter_groups(model, recipe)
    optimizer = torch.optim.AdamW(groups, lr=recipe["lr"], fused=device.type in ("cpu", "cuda"))
    parameters = [p for group in groups for p in group["params"]]
    stream = task.stream(1_000_000 + args.seed, recipe["batch"], device)
    step, seconds = 0, 0.0
    if args.resume and (folder / "last.pt").exists():
        step, seconds = resume(folder, config, model, optimizer, stream)
    elif args.resume:
        print(f"{folder} has no checkpoint yet; starting from the beginning", file=sys.stderr)

    if not args.quiet:
        print(f"task      {args.task}: f = {task.f}, N = {task.N}, {recipe['batch']} fresh prompts a step\n"
              f"device    {device}, {torch.float32}, {args.threads} thread{'s' * (args.threads > 1)}, seed {args.seed}")
        for group in groups:
            print(f"{group['name']:9s} {sum(p.numel() for p in group['params']):6,d} parameters, "
                  f"lr {group['lr']:g}, weight decay {group['weight_decay']:g}: {', '.join(group['names'][:8])}"
                  + f", … {len(group['names']) - 8} more" * (len(group["names"]) > 8))
        print(f"folder    {folder}")

    # ---- the loop
    rows, start = [], time.perf_counter() - seconds
    with tqdm(total=recipe["steps"], initial=step, disable=args.quiet, unit="step", ncols=100) as bar:
        while step < recipe["steps"]:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * schedule(step, recipe["warmup"], recipe["steps"])
            loss = task.loss(model, next(stream))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, recipe["clip"] or math.inf)
            loss, norm = torch.stack([loss.detach(), norm]).tolist()
            if not math.isfinite(loss + norm):
                stop_at_nonfinite(folder, model, step, loss, norm, groups)
            optimizer.step()
            step += 1
            if is_logged(step) or step == recipe["steps"]:
                scores = task.validate(model)
                rows.append(dict(step=step, train_loss=loss, lr=optimizer.param_groups[-1]["lr"], **scores))
                bar.set_postfix_str(f"loss {scores['loss']:.4f}, {task.reference} {scores['gd_loss']:.4f}")
                bar.update(step - bar.n)
            if step % CHECKPOINT_EVERY == 0 or step == recipe["steps"]:
                write_metrics(folder / "metrics.csv", rows)
                rows.clear()
                save(folder / "last.pt", dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step,
                                              stream=stream.position(), seconds=time.perf_counter() - start,
                                              config=config))

    # ---- the report
    result = dict(config, seconds=round(time.perf_counter() - start, 3), **task.report(model, 20_000 + args.seed))
    save(folder / "weights.pt", model.state_dict())
    write_text(folder / "result.json", json.dumps(result, indent=1))
    if not args.quiet:
        import figures                                          # here, because figures trains too
        print("\n" + task.table(result))
        print(f"\nfigure    {figures.draw_run(folder)}")
    return result


def choose_device(name):
    """auto is the CPU: an in-context step of a millisecond is too small to feed a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine (or this build of torch) has no CUDA device")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps: this machine (or this build of torch) has no MPS device")
    return torch.device("cpu" if name == "auto" else name)


def parameter_groups(model, recipe):
    """Two groups: what a module calls recurrent trains with its own rate and without decay."""
    groups = {name: dict(params=[], names=[], name=name, lr=lr, peak=lr, weight_decay=decay) for name, lr, decay in
              (("recurrent", recipe["recurrent_lr"], 0.0), ("other", recipe["lr"], recipe["weight_decay"]))}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(recurse=False):
            if p.requires_grad:
                group = groups["recurrent" if name in getattr(module, "recurrent", ()) else "other"]
                group["params"].append(p)
                group["names"].append(f"{prefix}.{name}".lstrip("."))
    return [group for group in groups.values() if group["params"]]


def schedule(step, warmup, steps):
    """Linear warm-up, then a cosine to zero."""
    return min((step + 1) / max(warmup, 1), 0.5 * (1 + math.cos(math.pi * step / steps)))


def stop_at_nonfinite(folder, model, step, loss, norm, groups):
    """Before the step is taken, so that the weights in memory are the last good ones."""
    save(folder / "weights.pt", model.state_dict())
    where = next((f"; its gradient is first not finite in {name} (group {group['name']})" for group in groups
                  for name, p in zip(group["names"], group["params"]) if not p.grad.isfinite().all()), "")
    raise FloatingPointError(f"step {step}: the loss is {loss}, the gradient norm {norm}{where}. The weights before this "
                             f"step are in {folder / 'weights.pt'}; a lower --lr or a --clip may help")


# -------------------------------------------------------------------------------------------------- files of a run

def run_folder(args, config):
    """A new folder under runs/, or --out, which must not hold a run unless --force or --resume says what to do."""
    if args.out is None:
        if args.resume:
            raise ValueError("--resume needs --out, the folder of the run to go on with")
        name = f"{args.task}-{args.model}-f{args.f}-n{args.n}-seed{args.seed}"
        numbers = (name if i == 1 else f"{name}-{i}" for i in range(1, sys.maxsize))
        folder = next(path for path in (Path("runs") / name for name in numbers) if not path.exists())
    else:
        folder = args.out
        if (folder / "config.json").exists() and not (args.force or args.resume):
            raise ValueError(f"{folder} already holds a run: choose another --out, --resume to go on with it, or --force "
                             "to overwrite it")
    folder.mkdir(parents=True, exist_ok=True)
    if not (args.resume and (folder / "last.pt").exists()):
        for name in ("metrics.csv", "last.pt", "weights.pt", "result.json", "figure.png"):
            (folder / name).unlink(missing_ok=True)
        write_text(folder / "config.json", json.dumps(config, indent=1))
    return folder


def write_text(path, text):
    """Whole or not at all: written beside, then renamed."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(text + "\n")
    os.replace(beside, path)


def save(path, state):
    beside = path.with_name(path.name + ".part")
    torch.save(state, beside)
    os.replace(beside, path)


def write_metrics(path, rows):
    new = not path.exists()
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def resume(folder, config, model, optimizer, stream):
    """Everything as it was at the checkpoint; metrics.csv cut back to its step."""
    state = torch.load(folder / "last.pt", weights_only=True)
    differs = [f"{k}: {state['config'].get(k)} there, {v} here" for k, v in config.items() if state["config"].get(k) != v]
    if differs:
        raise ValueError(f"{folder / 'last.pt'} is the checkpoint of another run ({'; '.join(differs)})")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    stream.seek(state["stream"])
    head, *rows = (folder / "metrics.csv").read_text().splitlines()
    write_text(folder / "metrics.csv", "\n".join([head] + [row for row in rows if int(row.split(",")[0]) <= state["step"]]))
    return state["step"], state["seconds"]


def load(folder):
    """(task, model, result) of a finished run."""
    result = json.loads((Path(folder) / "result.json").read_text())
    task = TASKS[result["task"]](f=result["f"], N=result["n"], K=result["k"], layers=result["layers"],
                                 hidden=result.get("hidden"), scale=result["scale"], tasks=result["tasks"],
                                 sizes=result.get("sizes"))
    model = task.model(result["model"])
    state = torch.load(Path(folder) / "weights.pt", weights_only=True, map_location="cpu")
    for name, value in state.items():                           # a construction may have given β another shape
        if name.endswith("beta"):
            model.get_parameter(name).data = value.clone()
    model.load_state_dict(state)
    return task, model, result


def main(argv=None):
    try:
        return train(arguments(argv))
    except (ValueError, FloatingPointError) as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    main()

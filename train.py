"""The one training loop, and the command line for every task.

    python train.py --task nd_regression                    a random GRIL becomes gradient descent, in seconds
    python train.py --task multistep_regression --layers 3
    python train.py --task nd_regression --model no_window  an ablation
    python train.py --task nd_regression --model mamba      another sequence model (--width, --layers, --heads)
    python train.py --task nd_regression --recipe paper     the paper's optimiser and its 300,000 steps
    python train.py --task nd_regression --dry-run          what a run would cost
    torchrun --nproc_per_node 4 train.py --task …           four GPUs; --batch is that of all together

The loop knows nothing of regression. A task gives it: recipes (presets), model(name), stream(seed, batch, device, rank,
world) of batches whose position can be saved, example(batch) of their shapes, loss(model, batch), validate(model),
report(model, seed) for the end, table(result) to print, paper_parameters (or None) for --dry-run, and adapt(recipe, model)
if another model changes the recipe. What a task does not say is in DEFAULTS.

Dropout draws from (seed, step, share of the batch) alone: there is no random state to save, and two shares of a batch
are the same whether two GPUs take them or one GPU in two turns (--accumulate 2).

A run's folder holds config.json, metrics.csv, result.json, figure.png, last.pt to go on from, previous.pt until the run
is over, and the weights that result.json speaks of: best.pt where validation chooses them, else weights.pt.
"""
import argparse
import errno
import json
import math
import os
import shlex
import signal
import sys
import textwrap
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from files.runs import read, read_checkpoint, run_folder, save, write, write_metrics
from lm import LM
from lra import LRA
from machine.cost import dry_run
from machine.devices import DEVICES, agree, catch_signals, choose_device, seed_dropout
from machine.errors import known
from pictures.run import draw_run
from tasks import TASKS as IN_CONTEXT

TASKS = {**IN_CONTEXT, **LRA, **LM}
DEFAULTS = dict(evaluate_every=1000, dense_start=False, checkpoint_every=1000, patience=0, choose=None, higher=True,
                device="auto", dtype="auto", threads=0, accumulate=1)
FIXED = {"choose", "higher", "dense_start"}                             # in a recipe, not on the command line
DENSE = (1, 2, 5, 10, 20, 50)                                           # validations at a dense start
DTYPES = {"auto": None, "bfloat16": torch.float32, "float32": torch.float32, "float64": torch.float64}     # of weights

HELP = dict(
    steps="optimiser steps", batch="examples a step, of all GPUs together", lr="peak learning rate",
    recurrent_lr="peak learning rate of the recurrent parameters", weight_decay="of the other parameters",
    warmup="steps of linear warm-up before the cosine", clip="largest gradient norm, 0 for no limit",
    evaluate_every="steps between validations", checkpoint_every="steps between checkpoints (last.pt)",
    patience="stop after so many validations without improvement, 0 for never",
    device="auto, cpu, cuda or mps; auto is the best there is", threads="CPU threads, 0 for all cores",
    dtype="auto, bfloat16 (autocast), float32 or float64; auto is bfloat16 on CUDA, else float32",
    accumulate="take the batch in so many turns, for fewer GPUs or less memory",
    width="of another sequence model than gril", heads="of a model with attention",
    f="input width", n="examples in the prompt", k="classes", hidden="state size of scalar_regression",
    layers="layers, or gradient steps in context", scale="scale of the inputs", weight_scale="scale of the true weights",
    tasks="fresh tasks of the final evaluation", calibrate="optimiser steps that tune gradient descent's step size",
    H="width of the model", P="state size", J="blocks of the state", inner="width inside a feed-forward layer",
    dropout="share of activations dropped in training", length="longest sequence", gate="real or complex",
    r_min="smallest |gate| at the start", r_max="largest |gate| at the start",
    max_phase="largest angle of a complex gate at the start", tokenizer="gpt2 or bytes",
    stateful="carry the state from block to block", evaluate_rows="rows of a validation, 0 for all",
    validate_tokens="tokens of a validation, 0 for all", report_tokens="tokens of the last report, 0 for all")


def arguments(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], usage="python train.py --task TASK [options]",
        epilog="""examples:
  python train.py --task nd_regression                    seconds
  python train.py --task nd_regression --model s5 --seed 1
  python train.py --task image                            a laptop, minutes
  python train.py --task image --size paper --dry-run --world 4
  torchrun --nproc_per_node 4 train.py --task image --size paper

Numbers not given are the recipe's; a run prints them.""",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=80))
    add = parser.add_argument
    add("--task", required=True, help=", ".join(TASKS))
    add("--model", default="gril", help="gril, a variant of the task, or another sequence model (an unknown one lists them)")
    add("--recipe", "--size", help="one of the task's presets, such as paper (default: its first)")
    add("--seed", type=int, default=0, help="fixes weights and data (default 0)")
    add("--data", type=Path, help="data folder (default: $GRIL_DATA, or data)")
    add("--out", type=Path, help="run folder (default: a new one under runs)")
    add("--force", action="store_true", help="overwrite the run in --out")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    add("--quiet", action="store_true", help="no progress bar, table or figure")
    add("--compile", action=argparse.BooleanOptionalAction, help="torch.compile: minutes at first, then faster (default: "
        "on CUDA, but for in-context tasks, which are over before it is done)")
    add("--test-every-validation", action="store_true", help="test at each validation, too, on all of the test set: the "
        "best score over the run, as the paper reports (Long Range Arena does it on --evaluate-rows rows unasked)")
    add("--dry-run", action="store_true", help="cost of the run, without data or GPU: parameters, FLOPs, memory, days")
    add("--world", type=int, help="GPUs, for --dry-run (default 1)")
    group, names = parser.add_argument_group("numbers of the recipe"), []
    recipes = [DEFAULTS] + [recipe for task in TASKS.values() for recipe in task.recipes.values()]
    for name in sorted({name for recipe in recipes for name in recipe} - FIXED,
                       key=lambda name: [*HELP, name].index(name)):
        kinds = {type(recipe[name]) for recipe in recipes if recipe.get(name) is not None}
        kind = float if kinds == {int, float} else kinds.pop() if len(kinds) == 1 else str
        how = dict(action=argparse.BooleanOptionalAction)
        if kind is not bool:
            how = dict(type=kind, metavar=kind.__name__.upper())
        group.add_argument(f"--{name.replace('_', '-')}", help=HELP.get(name), **how)
        names.append(name)
    args = parser.parse_args(argv)
    args.overrides = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    args.command = list(sys.argv[1:] if argv is None else argv)
    return args


def train(args):
    """Train as the arguments say; the run's result, as in result.json."""
    # ---- task and recipe
    Task = known("task", args.task, TASKS)
    args.recipe = args.recipe or next(iter(Task.recipes))
    recipe = {**DEFAULTS, **known("recipe", args.recipe, Task.recipes)}
    if hasattr(Task, "adapt"):
        recipe.update(Task.adapt(args.recipe, args.model))                      # another model, other rates
    for name, value in args.overrides.items():
        known(f"number in the recipe of {args.task},", name, {name: 0 for name in recipe if name not in FIXED})
        recipe[name] = value
    for name in ("steps", "batch", "accumulate", "evaluate_every", "checkpoint_every"):
        if recipe[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {recipe[name]}")
    for name in ("threads", "warmup", "weight_decay", "clip", "patience", "evaluate_rows", "calibrate", "max_phase"):
        if (recipe.get(name) or 0) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, got {recipe[name]}")
    if (args.world or 0) < 0:
        raise ValueError(f"--world must be 0 or more, got {args.world}")
    if not 0 <= args.seed < 2 ** 32:
        raise ValueError(f"--seed must be 0 to {2 ** 32 - 1}, got {args.seed}")
    known("device", recipe["device"], DEVICES), known("dtype", recipe["dtype"], DTYPES)
    rank, world = int(os.environ.get("RANK", 0)), args.world or int(os.environ.get("WORLD_SIZE", 1))
    shares = world * recipe["accumulate"]
    if recipe["batch"] % shares:
        raise ValueError(f"a batch of {recipe['batch']} is not divisible by {shares} (processes × --accumulate)")
    turns = [Task(recipe, data=args.data) for _ in range(recipe["accumulate"])]      # each may carry a state of its own
    task = turns[0]
    if args.dry_run:
        return dry_run(args, task, recipe, world)
    if args.test_every_validation and recipe["choose"] is None:
        raise ValueError(f"--test-every-validation: {args.task} keeps its last weights; no validation chooses any")
    if args.test_every_validation and not getattr(task, "has_test", True):
        raise ValueError(f"--test-every-validation: {args.task} has no test tokens in {task.data}")
    if recipe["patience"] and recipe["choose"] is None:
        raise ValueError(f"--patience: {args.task} keeps its last weights; no validation chooses any")
    if args.world:
        raise ValueError("--world is for --dry-run; a run has as many processes as torchrun --nproc_per_node starts")
    config = dict(task=args.task, model=args.model, recipe=args.recipe, seed=args.seed,
                  test_every_validation=args.test_every_validation, **recipe)

    # ---- device, processes
    device = choose_device(recipe["device"])
    dtype = recipe["dtype"] if recipe["dtype"] != "auto" else "bfloat16" if device.type == "cuda" else "float32"
    threads = recipe["threads"] or max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    torch.set_num_threads(threads)
    torch.set_default_dtype(DTYPES[dtype])
    # "high" is TF32, also for the products inside a recurrence; what they are summed up in is float32. --dtype float32: none
    torch.set_float32_matmul_precision("high" if dtype == "bfloat16" and device.type == "cuda" else "highest")
    autocast = torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else nullcontext()
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=10))

    # ---- model, optimiser, data
    torch.manual_seed(args.seed)
    model = task.model(args.model).to(device)
    folder = run_folder(args, config) if rank == 0 else args.out
    groups = parameter_groups(model, recipe)
    parameters = [p for group in groups for p in group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=recipe["lr"], fused=device.type in ("cpu", "cuda"))
    objective = Objective(turns, model, compiles(args.compile, device, args.task))
    if world > 1:
        objective = DistributedDataParallel(objective, device_ids=[device] if device.type == "cuda" else None)
    streams = [turn.stream(1_000_000 + args.seed, recipe["batch"], device, rank * len(turns) + i, shares)
               for i, turn in enumerate(turns)]
    weight = torch.tensor(1 / len(turns), device=device)                        # of a turn's loss

    # ---- from the beginning, or from the last checkpoint
    step, seconds, best = 0, 0.0, dict(score=None, step=0, since=0, weights=None, test=None)
    if args.resume and (state := read_checkpoint(folder, config, rank, world)):
        step, seconds, best = state["step"], state["seconds"], state["best"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        for stream in streams:
            stream.seek(state["stream"])
        del state                                                               # a day long, it would be memory lost
    if rank == 0 and not args.quiet:
        numbers = ", ".join(f"{name}={value}" for name, value in recipe.items() if value is not None)
        print(textwrap.fill(f"task      {args.task}, recipe {args.recipe}: {numbers}", 100, subsequent_indent=10 * " "))
        print(f"device    {device}, {dtype}, {threads} thread{'s' * (threads > 1)}, {world} process{'es' * (world > 1)}, "
              f"seed {args.seed}")
        for group in groups:
            names = group["names"][:6] + ["…"] * (len(group["names"]) > 6)
            print(f"{group['name']:9s} {sum(p.numel() for p in group['params']):6,d} parameters, "
                  f"lr {group['peak']:g}, weight decay {group['weight_decay']:g}: {', '.join(names)}")
        print(f"folder    {folder}")

    # ---- the loop
    def finished():
        return step == recipe["steps"] or 0 < recipe["patience"] <= best["since"]
    rows, batches, best_saved, stop, start = [], None, None, False, time.perf_counter() - seconds
    with (catch_signals(rank) as signals,
          tqdm(total=recipe["steps"], initial=step, disable=args.quiet or rank > 0, unit="step", ncols=100) as bar):
        while not (finished() or stop):
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * schedule(step, recipe["warmup"], recipe["steps"])
            optimizer.zero_grad(set_to_none=True)
            losses = []
            for i, batch in enumerate(batches or map(next, streams)):
                seed_dropout(device, (args.seed * 1_000_003 + step) * shares + rank * len(turns) + i)
                with objective.no_sync() if world > 1 and i < len(turns) - 1 else nullcontext():
                    with autocast:
                        loss = objective(i, batch)
                    loss.backward(weight)
                losses.append(loss.detach())
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            position, batches = streams[0].position(), [next(stream) for stream in streams]     # while a GPU still works
            loss, length, stop = agree(losses, norm, signals, world)            # here alone the CPU waits for it
            if not math.isfinite(loss + length):
                stop_at_nonfinite(folder, rank, model, args.seed, step, loss, length, groups, position)
            nn.utils.clip_grads_with_norm_(parameters, recipe["clip"] or math.inf, norm)    # not before: a NaN would spread
            optimizer.step()
            step += 1
            bar.update()
            if step % recipe["evaluate_every"] == 0 or step == recipe["steps"] or recipe["dense_start"] and step in DENSE:
                model.eval()
                with autocast:
                    scores = task.validate(model)
                    if args.test_every_validation:
                        test, name = task.report(model, 20_000 + args.seed), recipe["choose"]
                        scores[f"test_{name}"] = test[f"test_{name}" if f"test_{name}" in test else name]
                model.train()
                best = better(best, model, step, scores, recipe, device, world)
                rows.append(dict(step=step, train_loss=loss, lr=optimizer.param_groups[-1]["lr"], **scores))
                shown = [name for name in ("loss", "gd_loss", recipe["choose"]) if name in scores]
                bar.set_postfix_str(", ".join(f"{name} {scores[name]:.4g}" for name in shown))
            if step % recipe["checkpoint_every"] == 0 or finished() or stop:
                if hasattr(streams[0], "gathered"):
                    position = streams[0].gathered(position)
                if rank == 0:
                    write_metrics(folder / "metrics.csv", rows)
                    if best["step"] and best["step"] != best_saved:
                        save(folder / "best.pt", best["weights"])
                        best_saved = best["step"]
                    save(folder / "last.pt", dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step,
                                                  stream=position, seconds=time.perf_counter() - start, best=best,
                                                  config=config), keep=folder / "previous.pt")
                rows.clear()
    if world > 1:
        # gloo's thread drops its last tensors under Python's lock, and whoever joins it meanwhile holds that lock
        time.sleep(0.5)
        dist.destroy_process_group()                                            # together; the report is rank 0's alone
    if signals or stop:
        say_how_to_go_on(args, folder, step, rank, world)
        sys.exit(128 + (signals or [signal.SIGTERM])[0])
    if rank > 0:
        return None

    # ---- the report
    if best["weights"] is not None:
        model.load_state_dict(best["weights"])
    model.eval()
    with autocast:
        result = dict(config, seconds=round(time.perf_counter() - start, 3), **task.report(model, 20_000 + args.seed))
    if best["weights"] is None:
        save(folder / "weights.pt", model.state_dict())
    else:
        result.update({"best_step": best["step"], f"validation_{recipe['choose']}": best["score"]})
    if best["test"] is not None:
        result[f"best_test_{recipe['choose']}"] = best["test"]                  # of all validations, as in the paper
    write(folder / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    (folder / "previous.pt").unlink(missing_ok=True)
    if not args.quiet:
        print("\n" + task.table(result))
        print(f"\nfigure    {draw_run(task, model, dict(result, folder=folder))}")
    return result


class Objective(nn.Module):
    """The loss as a module: what DistributedDataParallel takes hold of is a module's call. Compiled, if that works."""

    def __init__(self, turns, model, compile=False):
        super().__init__()
        self.turns, self.model = turns, model
        for turn in turns:
            turn.compiled = compile
        self.losses = [torch.compile(turn.loss, dynamic=False) if compile else turn.loss for turn in turns]

    def forward(self, turn, batch):
        try:
            return self.losses[turn](self.model, batch)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).split("\n\n")[0].split())                 # what is beyond is advice for developers
            print(f"torch.compile failed, going on without it: {reason}", file=sys.stderr)
            self.losses = [task.loss for task in self.turns]
            return self.losses[turn](self.model, batch)


def compiles(asked, device, task):
    """--compile, --no-compile, or on CUDA whatever takes longer than compiling does."""
    return asked if asked is not None else device.type == "cuda" and task not in IN_CONTEXT


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


def better(best, model, step, scores, recipe, device, world):
    """The best validation so far with its weights, and the best test score seen, which chooses nothing."""
    choose, sign = recipe["choose"], 1 if recipe["higher"] else -1
    if choose is None:                                                          # the last weights are the run's
        return best
    score, test = scores[choose], scores.get(f"test_{choose}")
    if world > 1:                                                               # rank 0's, so that all stop together
        shared = torch.tensor([score], dtype=torch.float64, device=device)
        dist.broadcast(shared, 0)
        score = shared.item()
    if test is not None and (best["test"] is None or sign * test > sign * best["test"]):
        best = dict(best, test=test)
    if math.isfinite(score) and (best["score"] is None or sign * score > sign * best["score"]):
        weights = {name: value.to("cpu", copy=True) for name, value in model.state_dict().items()}
        return dict(best, score=score, step=step, since=0, weights=weights)
    return dict(best, since=best["since"] + 1)


# ---------------------------------------------------------------------------------------------- when something happens


def say_how_to_go_on(args, folder, step, rank, world):
    start = "python" if world == 1 else f"torchrun --nproc_per_node {os.environ.get('LOCAL_WORLD_SIZE', world)}"
    words = [word for word in args.command if word not in ("--force", "--resume")]
    words += ([] if args.out else ["--out", str(folder)]) + ["--resume"]
    if rank == 0:
        print(f"stopped after step {step:,}; go on with\n  {start} train.py {shlex.join(words)}", file=sys.stderr)


def stop_at_nonfinite(folder, rank, model, seed, step, loss, norm, groups, position):
    """Before the step is taken, so that the weights in memory are the last good ones."""
    if rank > 0:
        sys.exit(1)
    save(folder / "weights.pt", model.state_dict())
    where = next((f"; its gradient is first not finite in {name} (group {group['name']})" for group in groups
                  for name, p in zip(group["names"], group["params"])
                  if p.grad is not None and not p.grad.isfinite().all()), "")
    place = [x for x in tree_leaves(position) if isinstance(x, int)]            # epoch and index, where data has such
    place = f", ending at {place} of the data" if place else ""
    raise FloatingPointError(f"step {step}: the loss is {loss}, the gradient norm {norm}{where}. The batch is number {step} "
                             f"of seed {seed}{place}. The weights before this step are in {folder / 'weights.pt'}; a lower "
                             "--lr or a --clip may help" + ", or --dtype float64: float32 ends at 3e38" * (
                                 math.inf in (abs(loss), norm) and groups[0]["params"][0].dtype == torch.float32))


# -------------------------------------------------------------------------------------------------- files of a run


def load(folder):
    """(task, model, result) of a finished run."""
    folder = Path(folder)
    result = json.loads((folder / "result.json").read_text())
    task = TASKS[result["task"]](result)
    model = task.model(result["model"])
    state = read(folder / ("best.pt" if (folder / "best.pt").exists() else "weights.pt"))
    model.load_state_dict(state)
    return task, model, result


# ------------------------------------------------------------------------------------------------ the cost, beforehand

# how many; dense bf16 FLOP/s and bytes/s of memory of each


def main(argv=None):
    args, dtype = arguments(argv), torch.get_default_dtype()
    try:
        return train(args)
    except (ValueError, FloatingPointError) as error:
        sys.exit(f"train.py: {error}")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        sys.exit(f"train.py: {error}" + ". What was written before is whole: make room, then --resume" * full)
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        sys.exit(f"train.py: process {dist.get_rank()} of {dist.get_world_size()}: {str(error).splitlines()[0]}\n"
                 "If another process was lost, start the same command again with --resume")
    finally:
        torch.set_default_dtype(dtype)


if __name__ == "__main__":
    main()

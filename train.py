"""The one training loop, and the command line for every task.

  python train.py --task nd_regression                  becomes gradient descent
  python train.py --task multistep_regression --layers 3
  python train.py --task nd_regression --model no_window  an ablation
  python train.py --task nd_regression --model mamba    another sequence model
  python train.py --task nd_regression --form loop      as Definition 4.2 reads
  python train.py --task nd_regression --recipe paper   its 300,000 steps
  python train.py --task nd_regression --dry-run        what a run would cost
  torchrun --nproc_per_node 4 train.py --task …         four GPUs

The loop knows nothing of regression: what it asks of a task is tasks.Task.

Dropout draws from (seed, step, share of the batch) alone: there is no random state to save, and two
shares of a batch are the same whether two GPUs take them or one GPU in two turns (--accumulate 2).

What a run's folder holds is in files/runs.py.
"""
import argparse
import math
import os
import shlex
import signal
import sys
import textwrap
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from machine.errors import known, refuse, spoken    # before torch, which takes seconds to load

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from files.runs import BEST, begin, check_out, read_checkpoint, run_folder, save, write_metrics
from files.runs import load as load_run
from files.whole import write_json
from lm import LM
from lra import LRA
from machine.cost import dry_run
from machine.devices import agree, catch_signals, processes, same, seed_dropout, set_up
from machine.options import LOOP, flag
from pictures.run import draw_run
from tasks import TASKS as IN_CONTEXT

TASKS = {**IN_CONTEXT, **LRA, **LM}
DENSE = (1, 2, 5, 10, 20, 50)       # validations at a dense start
SEEDS = 10_000                      # of --seed; 20,000 + seed, a report's, stays below validation's


# -------------------------------------------------------------------------------- the command line

def arguments(argv=None):
    """The words of a command. Its task is found first, then what that task takes is offered."""
    script, *words = sys.argv if argv is None else ["train.py", *argv]
    early = argparse.ArgumentParser(add_help=False)
    early.add_argument("--task")
    Task = TASKS.get(early.parse_known_args(words)[0].task)

    title, examples = __doc__.split("\n\n")[:2]
    parser = argparse.ArgumentParser(
        allow_abbrev=False, usage="python train.py --task TASK [options]",
        description=title,
        epilog=f"examples:\n{examples}\n\nNumbers not given are the recipe's; a run prints them. "
               "--task TASK --help\nshows what that task takes, and the numbers of its recipe.",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=28, width=80))
    add = parser.add_argument
    add("--task", required=True, help=", ".join(TASKS))
    add("--model", default="gril", help="gril or another: an unknown one lists them all")
    add("--recipe", "--size", help="one of the task's presets, such as paper (default: its first)")
    add("--seed", type=int, default=0, help="fixes weights and data (default 0)")
    add("--data", type=Path, help="data folder (default: $GRIL_DATA, or data)")
    add("--out", type=Path, help="run folder (default: a new one under runs)")
    add("--force", action="store_true", help="overwrite the run in --out")
    add("--resume", action="store_true", help="go on from the last checkpoint in --out")
    add("--quiet", action="store_true", help="no progress bar, table or figure")
    add("--compile", action=argparse.BooleanOptionalAction,
        help="torch.compile: minutes at first, then faster (default: on CUDA, not in context)")
    add("--test-every-validation", action="store_true", help="test on the whole test set, too, for "
        "the best score of a run (unasked, Long Range Arena does on --evaluate-rows)")
    add("--dry-run", action="store_true", help="what the run costs, without data or GPU")
    add("--world", type=int, help="GPUs, for --dry-run (default 1)")

    groups, values = {"the training loop": LOOP}, {}
    if Task:
        groups[Task.name] = Task.options
        values = Task.numbers(next(iter(Task.recipes)))
    for title, options in groups.items():
        group = parser.add_argument_group(f"numbers of {title}")
        for name, option in options.items():
            how = dict(type=option.type, metavar=option.type.__name__.upper())
            if option.type is bool:
                how = dict(action=argparse.BooleanOptionalAction)
            value = "" if values.get(name) is None else f" ({values[name]})"
            group.add_argument(flag(name), help=option.help + value, **how)

    args, args.unknown = parser.parse_known_args(words)
    typed = {name: getattr(args, name) for options in groups.values() for name in options}
    args.overrides = {name: value for name, value in typed.items() if value is not None}
    args.command = [script, *words]
    return args


def numbers(args):
    """(task class, every number of its recipe) as the words say."""
    Task = known("task", args.task, TASKS)
    if args.unknown:
        word = args.unknown[0].split("=")[0]
        others = ", ".join(name for name in TASKS if word in map(flag, TASKS[name].options))
        raise ValueError(f"{word} is {f'for {others}' if others else 'unknown'}; {args.task} takes "
                         f"{' '.join(map(flag, {**Task.options, **LOOP}))}")
    args.recipe = args.recipe or next(iter(Task.recipes))
    recipe = {**Task.numbers(args.recipe, args.model), **args.overrides}
    shares = (args.world or processes()[1]) * recipe["accumulate"]
    refuse(((args.world or 0) < 0, f"--world must be 0 or more, got {args.world}"),
           (not 0 <= args.seed < SEEDS, f"--seed must be 0 to {SEEDS - 1}, got {args.seed}"),
           (shares and recipe["batch"] % shares, f"a batch of {recipe['batch']} is not divisible "
            f"by {shares} (processes × --accumulate)"))
    return Task, recipe


# ----------------------------------------------------------------------------------------- one run

def train(args):
    """Train as the arguments say; the run's result, as in result.json."""
    Task, recipe = numbers(args)
    task = Task(data=args.data, **recipe)
    if args.dry_run:
        return dry_run(args, task, recipe, args.world or processes()[1])
    run = setup(args, task, recipe)                 # what is wrong is said before a file changes
    with run_folder(args, run.config) if run.rank == 0 else nullcontext(args.out) as run.folder:
        start(run)
        loop(run)
        if run.rank > 0:
            return None
        try:
            return report(run)
        except KeyboardInterrupt:                   # the checkpoint has all steps
            say_how_to_go_on(run)
            sys.exit(130)


def setup(args, task, recipe):
    """What a run has in hand: its task, machine, model, optimiser, data."""
    tests, turns = args.test_every_validation, recipe["accumulate"]
    wants = "--test-every-validation" if tests else "--patience" if recipe["patience"] else None
    refuse((args.world, "--world is for --dry-run; a run has as many processes as torchrun "
            "--nproc_per_node starts"),
           (wants and task.choose is None,
            f"{wants}: {args.task} keeps its last weights; no validation chooses any"),
           (tests and not getattr(task, "has_test", True),
            f"--test-every-validation: {args.task} has no test tokens in the data folder"))

    run = SimpleNamespace(args=args, task=task, recipe=recipe, step=0, best=BEST, best_saved=0)
    run.rank, run.world = processes()
    run.device, run.dtype, run.autocast = set_up(recipe, run.world)
    run.config = dict(task=args.task, model=args.model, recipe=args.recipe, seed=args.seed,
                      test_every_validation=tests, **recipe)
    if run.rank == 0:
        check_out(args, run.config)
    same(dict(run.config, data=args.data, out=args.out, resume=args.resume), run.world)

    torch.manual_seed(args.seed)
    run.model = task.model(args.model).to(run.device)
    run.groups = parameter_groups(run.model, recipe)
    run.optimizer = torch.optim.AdamW(run.groups, lr=recipe["lr"],
                                      fused=run.device.type in ("cpu", "cuda"))
    run.objective = Objective(task, run.model, compiles(args.compile, run.device, task))
    if run.world > 1:
        run.objective = DistributedDataParallel(
            run.objective, device_ids=[run.device] if run.device.type == "cuda" else None)
    run.first, run.shares = run.rank * turns, run.world * turns                 # of a batch
    run.streams = [task.stream(1_000_000 + args.seed, recipe["batch"], run.device, run.first + i,
                               run.shares) for i in range(turns)]
    return run


def start(run):
    """From the beginning or from a checkpoint; no file is changed before that fits."""
    path, run.start = None, time.perf_counter()
    if run.args.resume:
        path, state = read_checkpoint(run.folder, run.config, run.rank, run.world)
    if path:
        run.step, run.best, run.start = state["step"], state["best"], run.start - state["seconds"]
        try:
            run.model.load_state_dict(state["model"])
            there = [group["names"] for group in state["optimizer"]["param_groups"]]
            if there != [group["names"] for group in run.groups]:
                raise ValueError(f"it trains other parameters, {there}")
            run.optimizer.load_state_dict(state["optimizer"])
            for stream in run.streams:
                stream.seek(state["stream"])
        except Exception as error:                  # of whatever kind: the file may hold anything
            what = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
            raise ValueError(f"{path} is whole, but not of this code or kind of device ({what}). "
                             "Go on with what wrote it, or begin again with --force") from None
    if run.rank == 0:
        begin(run.folder, run.args, run.config, path, run.step)
        if not run.args.quiet:
            print_facts(run)


def print_facts(run):
    """Before the first step: what will be trained, where, and how."""
    values = ", ".join(f"{name}={value}" for name, value in run.recipe.items() if value is not None)
    print(textwrap.fill(f"task      {run.args.task}, recipe {run.args.recipe}: {values}", 100,
                        subsequent_indent=10 * " "))
    threads = torch.get_num_threads()
    print(f"device    {run.device}, {run.dtype}, {threads} thread{'s' if threads > 1 else ''}, "
          f"{run.world} process{'es' if run.world > 1 else ''}, seed {run.args.seed}")
    for group in run.groups:
        names = group["names"][:6] + (["…"] if len(group["names"]) > 6 else [])
        print(f"{group['name']:9s} {sum(p.numel() for p in group['params']):6,d} parameters, "
              f"lr {group['peak']:g}, weight decay {group['weight_decay']:g}: {', '.join(names)}")
    warmup, steps = run.recipe["warmup"], run.recipe["steps"]
    if steps <= warmup:
        highest = max(schedule(step, warmup, steps) for step in range(steps))
        print(f"schedule  the warm-up, {warmup:,} steps, does not end within {steps:,}: "
              f"the rates come to {highest:.0%} of these")
    print(f"folder    {run.folder}")


def loop(run):
    """Step, validate, save, until the steps are over, patience is, or a signal came."""
    recipe, steps = run.recipe, run.recipe["steps"]
    parameters = [p for group in run.groups for p in group["params"]]

    def finished():
        return run.step >= steps or 0 < recipe["patience"] <= run.best["since"]

    rows, batches, stop, scores = [], None, False, ""
    with (catch_signals(run.rank) as signals,
          tqdm(total=steps, initial=run.step, disable=run.args.quiet or run.rank > 0, unit="step",
               ncols=100) as bar):
        while not (finished() or stop):
            for group in run.optimizer.param_groups:
                group["lr"] = group["peak"] * schedule(run.step, recipe["warmup"], steps)
            losses = backward(run, batches or map(next, run.streams))
            norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
            position = run.streams[0].position()
            batches = [next(stream) for stream in run.streams]  # while a GPU still works
            loss, length, stop = agree(losses, norm, signals, run.world)    # here the CPU waits
            if not math.isfinite(loss + length):
                stop_at_nonfinite(run, loss, length, position)
            # not before: a norm that is no number would spread
            nn.utils.clip_grads_with_norm_(parameters, recipe["clip"] or math.inf, norm)
            run.optimizer.step()
            run.step += 1
            bar.set_postfix_str(f"train {loss:.4g}{scores}", refresh=False)
            bar.update()
            dense = run.task.dense_start and run.step in DENSE
            if dense or run.step % recipe["evaluate_every"] == 0 or run.step == steps:
                rows.append(validation(run, loss))
                shown = [name for name in ("loss", "gd_loss", run.task.choose) if name in rows[-1]]
                scores = "".join(f", {name} {rows[-1][name]:.4g}" for name in shown)
            if run.step % recipe["checkpoint_every"] == 0 or finished() or stop:
                checkpoint(run, rows, position)
                rows.clear()
    if run.world > 1:
        # gloo's thread drops its last tensors under Python's lock, which whoever joins it holds
        time.sleep(0.5)
        dist.destroy_process_group()                            # the report is rank 0's alone
    if signals or stop:
        say_how_to_go_on(run)
        sys.exit(128 + (signals or [signal.SIGTERM])[0])


def backward(run, batches):
    """Gradients of the mean loss over this process's turns; the turns' losses."""
    run.optimizer.zero_grad(set_to_none=True)
    losses, weight = [], torch.tensor(1 / len(run.streams), device=run.device)
    for i, batch in enumerate(batches):
        step = run.args.seed * 1_000_003 + run.step
        seed_dropout(run.device, step * run.shares + run.first + i)
        last = run.world == 1 or i == len(run.streams) - 1
        with nullcontext() if last else run.objective.no_sync():
            with run.autocast:
                loss = run.objective(batch)
            loss.backward(weight)
        losses.append(loss.detach())
    return losses


def validation(run, loss):
    """A row of metrics.csv; run.best is brought up to date."""
    run.model.eval()
    with run.autocast:
        scores = run.task.validate(run.model)
        if run.args.test_every_validation:
            test, name = run.task.report(run.model, 20_000 + run.args.seed), run.task.choose
            scores[f"test_{name}"] = test.get(f"test_{name}", test.get(name))
    run.model.train()
    run.best = better(run, scores)
    return dict(step=run.step, train_loss=loss, lr=run.optimizer.param_groups[-1]["lr"], **scores)


def better(run, scores):
    """The best validation so far with its weights; the best test score, which chooses nothing."""
    best, choose, sign = run.best, run.task.choose, 1 if run.task.higher else -1
    if choose is None:                                          # the last weights are the run's
        return best
    score, test = scores[choose], scores.get(f"test_{choose}")
    if run.world > 1:                                           # rank 0's: all stop together
        shared = torch.tensor([score], dtype=torch.float64, device=run.device)
        dist.broadcast(shared, 0)
        score = shared.item()
    if test is not None and (best["test"] is None or sign * test > sign * best["test"]):
        best = dict(best, test=test)
    if math.isfinite(score) and (best["score"] is None or sign * score > sign * best["score"]):
        weights = {name: x.to("cpu", copy=True) for name, x in run.model.state_dict().items()}
        return dict(best, score=score, step=run.step, since=0, weights=weights)
    return dict(best, since=best["since"] + 1)


def checkpoint(run, rows, position):
    """metrics.csv, best.pt and last.pt, brought up to date by rank 0."""
    if hasattr(run.streams[0], "gathered"):
        position = run.streams[0].gathered(position)            # every process has its part
    if run.rank > 0:
        return
    write_metrics(run.folder / "metrics.csv", run.step, rows)
    if run.best["step"] != run.best_saved:
        save(run.folder / "best.pt", run.best["weights"])
        run.best_saved = run.best["step"]
    state = dict(model=run.model.state_dict(), optimizer=run.optimizer.state_dict(), step=run.step,
                 stream=position, seconds=time.perf_counter() - run.start, best=run.best,
                 config=run.config)
    save(run.folder / "last.pt", state, keep=run.folder / "previous.pt")


def report(run):
    """Score the weights that validation chose, or the last; write and show the result."""
    model, folder, best, choose = run.model, run.folder, run.best, run.task.choose
    chosen = {}
    if best["weights"] is None:
        save(folder / "weights.pt", model.state_dict())
    else:
        model.load_state_dict(best["weights"])
        chosen = {"best_step": best["step"], f"validation_{choose}": best["score"]}
    if best["test"] is not None:
        chosen[f"best_test_{choose}"] = best["test"]            # of all validations
    model.eval()
    with run.autocast:
        result = dict(run.config, seconds=round(time.perf_counter() - run.start, 3),
                      **run.task.report(model, 20_000 + run.args.seed), **chosen)
    write_json(folder / "result.json", result)
    (folder / "previous.pt").unlink(missing_ok=True)
    if not run.args.quiet:
        print("\n" + run.task.table(result))
        print(f"\nfigure    {draw_run(run.task, model.cpu(), dict(result, folder=folder))}")
    return result


def load(folder):
    """(task, model, result) of a finished run; the model as for evaluation."""
    return load_run(folder, TASKS, "a task", "result.json")


# ------------------------------------------------------------------------------- parts of the loop

class Objective(nn.Module):
    """The loss as a module, whose call DistributedDataParallel takes hold of."""

    def __init__(self, task, model, compile):
        super().__init__()
        self.task, self.model, task.compiled = task, model, compile
        self.loss = torch.compile(task.loss, dynamic=False) if compile else task.loss

    def forward(self, batch):
        try:
            return self.loss(self.model, batch)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).split("\n\n")[0].split())  # then follow developers' hints
            print(f"torch.compile failed, going on without it: {reason}", file=sys.stderr)
            self.loss = self.task.loss
            return self.loss(self.model, batch)


def compiles(asked, device, task):
    """--compile, --no-compile, or on CUDA whatever takes longer than compiling does."""
    return device.type == "cuda" and task.compiles if asked is None else asked


def parameter_groups(model, recipe):
    """Two groups: what a module calls recurrent trains with its own rate and without decay."""
    groups = {name: dict(params=[], names=[], name=name, lr=lr, peak=lr, weight_decay=decay)
              for name, lr, decay in (("recurrent", recipe["recurrent_lr"], 0.0),
                                      ("other", recipe["lr"], recipe["weight_decay"]))}
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False):
            if p.requires_grad:
                recurrent = name.split(".")[-1] in getattr(module, "recurrent", ())
                group = groups["recurrent" if recurrent else "other"]
                group["params"].append(p)
                group["names"].append(name)
    return [group for group in groups.values() if group["params"]]


def schedule(step, warmup, steps):
    """The lower of a linear warm-up and of a cosine over all steps, from 1 to zero."""
    return min((step + 1) / max(warmup, 1), 0.5 * (1 + math.cos(math.pi * step / steps)))


def say_how_to_go_on(run):
    if run.rank > 0:
        return
    each = os.environ.get("LOCAL_WORLD_SIZE", run.world)
    start = f"torchrun --nproc_per_node {each}" if run.world > 1 else "python"
    words = [word for word in run.args.command if word not in ("--force", "--resume")]
    words += ([] if run.args.out else ["--out", str(run.folder)]) + ["--resume"]
    print(f"stopped after step {run.step:,}; go on with", file=sys.stderr)
    print(f"  {start} {shlex.join(words)}", file=sys.stderr)


def stop_at_nonfinite(run, loss, norm, position):
    """Before the step is taken, so that the weights in memory are the last good ones."""
    if run.rank > 0:
        sys.exit(1)
    save(run.folder / "weights.pt", run.model.state_dict())
    where = next((f"; its gradient is first not finite in {name} (group {group['name']})"
                  for group in run.groups for name, p in zip(group["names"], group["params"])
                  if p.grad is not None and not p.grad.isfinite().all()), "")
    place = [x for x in tree_leaves(position) if isinstance(x, int)]    # epoch and index, if any
    place = f", ending at {place} of the data" if place else ""
    wider = math.inf in (abs(loss), norm) and run.groups[0]["params"][0].dtype == torch.float32
    raise FloatingPointError(
        f"step {run.step}: the loss is {loss}, the gradient norm {norm}{where}. The batch is "
        f"number {run.step} of seed {run.args.seed}{place}. The weights before this step are in "
        f"{run.folder / 'weights.pt'}; a lower --lr or a --clip may help"
        f"{', or --dtype float64: float32 ends at 3e38' if wider else ''}")


def main(argv=None):
    dtype = torch.get_default_dtype()
    try:
        with spoken("train.py"):
            return train(arguments(argv))
    except RuntimeError as error:
        if not dist.is_initialized():
            raise
        sys.exit(f"train.py: process {dist.get_rank()} of {dist.get_world_size()}: "
                 f"{str(error).splitlines()[0]}\n"
                 "If another process was lost, start the same command again with --resume")
    finally:
        torch.set_default_dtype(dtype)


if __name__ == "__main__":
    main()

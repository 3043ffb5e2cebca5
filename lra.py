"""Long Range Arena (Tay et al. 2021): five tasks and their classifier.

  python lra.py prepare listops    generate it by LRA's rules; --short: tiny's
  python lra.py prepare image      read CIFAR-10, downloaded if not there
  python lra.py show pathfinder    one example decoded, lengths, label counts
  python train.py --task text      train; --size paper, --model lru, …

The data folder is --data DIR, or the environment variable GRIL_DATA, or data/.
`prepare` leaves token arrays there that open at once; every task also opens
straight from the files as people download them.

  listops     nested MIN, MAX, MED, SM of digits    the value, 10 classes     500 to 2,000 tokens;
              at tiny size 20 to 256, which is not LRA's, but can be read whole
  text        an IMDb review, byte by byte          positive or negative      up to 4,096 bytes
  retrieval   two papers, byte by byte              does one cite the other?  2 × up to 4,000 bytes
  image       a CIFAR-10 picture in grey            10 classes                1,024 pixels
  pathfinder  dashed curves                         are two dots connected?   1,024 pixels

The data itself is files/arena.py's (Sec. 5, App. E). Text keeps its bytes' own numbers: 0 is
padding, 256 an end token, so the vocabulary is 257. ListOps has 15 symbols and padding. H, P, J, w
as in gril.py.
"""
import argparse
import bisect
import hashlib
import os
import sys
import textwrap
import time
from functools import cached_property
from math import pi

from machine.errors import Missing, known, refuse, spoken   # before torch, which loads for seconds

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from baselines import offered, parameters
from files import arena
from files.arena import OPERATORS, SYMBOLS
from files.downloads import data_folder, download, unpack
from machine.devices import Epochs, my_share, on, summed
from machine.options import Option, sequence_options
from tasks import Task

END = 256                                       # the end token


# --------------------------------------------------------------------------------------- 1. batches

class Stream(Epochs):
    """Endless training batches, of which each rank takes each world-th row.

    Rows are shuffled, then sorted by length within pools of 64 batches, so that little is padding,
    and the batches shuffled again.
    """

    def __init__(self, task, seed, batch, device="cpu", rank=0, world=1):
        self.task, self.data, self.seed, self.device = task, task.data["train"], seed, device
        if len(self.data.labels) < batch:
            raise ValueError(f"{task.name} has {len(self.data.labels):,} training rows, fewer than "
                             f"a batch of {batch}: choose a smaller --batch")
        super().__init__(batch, slice(rank, None, world))

    def ordered(self, epoch):
        rng, n = np.random.default_rng([self.seed, epoch]), len(self.data.labels)
        rows = rng.permutation(n)[:n // self.batch * self.batch]
        pool = np.arange(len(rows)) // (64 * self.batch)
        _, lengths = self.task.spans(self.data, rows)
        rows = rows[np.lexsort((lengths.max(0), pool))]
        rows = rows.reshape(-1, self.batch)                     # (batches, batch)
        return rows[rng.permutation(len(rows))]

    def take(self, rows):
        return self.task.batch(self.data, rows, self.device)


# ---------------------------------------------------------------------------------------- 2. models

class Pixels(nn.Linear):
    """Grey values 0 … 255, about standardised, to H channels."""

    def __init__(self, H):
        super().__init__(1, H)

    def forward(self, tokens):
        x = super().forward((tokens[..., None].to(self.weight.dtype) / 255 - 0.5) / 0.25)
        return x.to(self.weight.dtype)                  # layers add to it: in full precision


class Classifier(nn.Module):
    """Embedding, layers, mean over a document, head; two documents meet as [a, b, a - b, a ⊙ b].

    Padding changes nothing: it stands at the end, every layer is causal, the mean leaves it out.
    """

    def __init__(self, embed, layers, norm, H, classes, documents=1):
        super().__init__()
        self.embed, self.layers, self.documents = embed, nn.ModuleList(layers), documents
        self.norm = nn.LayerNorm(H) if norm else nn.Identity()
        if documents == 2:
            self.head = nn.Sequential(nn.Linear(4 * H, H), nn.GELU(), nn.Linear(H, classes))
        else:
            self.head = nn.Linear(H, classes)

    def forward(self, tokens, lengths):
        x = self.embed(tokens)                                  # (B, T, H), both documents in B
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]           # (B, T)
        x = (x * inside[..., None]).sum(1) / lengths[:, None].to(x.dtype)               # (B, H)
        if self.documents == 2:
            a, b = x.chunk(2)
            x = torch.cat([a, b, a - b, a * b], -1)                                     # (B, 4H)
        return self.head(x)


# -------------------------------------------------------------------------- 3. what the tasks share

class Arena(Task):
    """A Long Range Arena task; the five below say what differs."""
    classes, vocabulary = 2, None               # no vocabulary: grey values
    documents, end = 1, False                   # per row; does an end token follow each?
    places, parts = (), ()                      # where files may be; in a folder, which (globs)
    published, wanted = None, None              # (address, file, MD5); which part of an archive
    paper_accuracy = None
    choose = "accuracy"
    options = dict(
        sequence_options(layers=2, H=64, P=64, J=8, length=1024),
        gate=Option("real", "real or complex", among=("real", "complex")),
        r_min=Option(0.5, "smallest |gate| at the start", least=0),
        r_max=Option(0.9, "largest |gate| at the start", least=0, most=1),
        max_phase=Option(2 * pi, "largest angle of a complex gate at the start", least=0),
        evaluate_rows=Option(1000, "rows of a validation, 0 for all", least=0),
    )

    def __init__(self, data=None, **numbers):
        super().__init__(**numbers)
        self.folder = data_folder(data)
        self.prepared = self.folder / "prepared" / f"{self.name}.bin"
        least, most = self.recipe["r_min"], self.recipe["r_max"]
        if least > most:
            raise ValueError(f"--r-min {least} is more than --r-max {most}, where |gate| starts")

    # ---- data

    def sources(self):
        """The published files of the first place that has any, 2.npy before 10.npy."""
        for place in (self.folder / place for place in self.places):
            found = [place] if place.is_file() else [
                path for part in self.parts
                for path in sorted(place.glob(part), key=lambda path: (len(path.name), path))]
            if found:
                return found
        return []

    @cached_property
    def data(self):
        """{split: Split}, of the preparation if that is of these very sources, else of them."""
        sources = self.sources()
        if self.prepared.exists():
            try:
                return arena.reopen(self, sources)
            except ValueError as error:
                if not sources:
                    raise
                print(f"{error}; reading {sources[0].parent} instead", file=sys.stderr)
        elif not sources:
            looked = ", ".join(str(self.folder / place) for place in self.places)
            command = f"prepare {self.name} --data {self.folder}"
            command += " --short" if self.recipe.get("short") else ""
            how = f". This gets it:\n  python lra.py {command}" if self.name in LRA else ""
            raise Missing(f"{self.name}: no data. Looked for {looked}{how}")
        return arena.collect(self.read(sources), sources)

    def spans(self, data, rows):
        """Where each row's documents start, and how many tokens of them are read, with the end."""
        documents = rows * self.documents + np.arange(self.documents)[:, None]  # (documents, rows)
        starts, ends = data.offsets[documents], data.offsets[documents + 1]
        return starts, np.minimum(ends - starts + self.end, self.recipe["length"])

    def batch(self, data, rows, device="cpu"):
        """(tokens (B, T), lengths (B,), labels), padded; all first documents before all second."""
        starts, lengths = map(np.ravel, self.spans(data, rows))
        tokens = np.zeros((len(lengths), self.padded(lengths.max())), np.int32)
        for line, start, n in zip(tokens, starts, lengths - self.end):
            line[:n] = data.tokens[start:start + n]
            if self.end:
                line[n] = END
        return on(device, tokens, lengths, data.labels[rows].astype(np.int64))

    def padded(self, n):
        """n; if compiled, rounded up to an eighth of the longest: eight shapes, not hundreds."""
        eighth = -(-self.recipe["length"] // 8) if self.compiled else 1
        return min(-(-int(n) // eighth) * eighth, self.recipe["length"])

    def stream(self, seed, batch, device="cpu", rank=0, world=1):
        return Stream(self, seed, batch, device, rank, world)

    def example(self, batch):
        """A batch of full length on the default device, of ones: for the dry run."""
        n, length = batch * self.documents, self.recipe["length"]
        return (torch.ones(n, length, dtype=torch.int32), torch.full((n,), length),
                torch.ones(batch, dtype=torch.int64))

    # ---- model and loss

    def model(self, name="gril"):
        """The named classifier; a baseline's width gives it nearly as many parameters as GRIL."""
        r, models = self.recipe, offered("lra")
        known("model", name, models)

        def build(H, name=name):
            row = models[name]
            numbers = {"depth": 1, **r, **row.lra}
            embed = nn.Embedding(self.vocabulary, H) if self.vocabulary else Pixels(H)
            layers = [row.build(H, r["dropout"], **row.given(numbers))
                      for _ in range(max(1, round(r["layers"] * numbers["depth"])))]
            return Classifier(embed, layers, row.norm, H, self.classes, self.documents)

        if models[name].takes == models["gril"].takes:          # a variant: as wide
            return build(r["H"])
        with torch.device("meta"):
            goal = parameters(build(r["H"], "gril"))
            widths = range(4, 8 * r["H"], 4)
            i = bisect.bisect(widths, goal, key=lambda H: parameters(build(H)))
            H = min(widths[max(0, i - 1):i + 1], key=lambda H: abs(parameters(build(H)) - goal))
        return build(H)

    def loss(self, model, batch):
        tokens, lengths, labels = batch
        return F.cross_entropy(model(tokens, lengths), labels)

    @torch.no_grad()
    def evaluate(self, model, split, rows=0):
        """Mean loss and accuracy in percent on a split, on `rows` of it evenly spread, or these."""
        data, weight, batch = self.data[split], next(model.parameters()), self.recipe["batch"]
        if np.ndim(rows) == 0:
            n = len(data.labels)
            rows = np.linspace(0, n - 1, min(rows or n, n)).astype(int)
        rows = rows[np.argsort(self.spans(data, rows)[1].max(0), kind="stable")]
        sums = weight.new_zeros(2, dtype=torch.promote_types(weight.dtype, torch.float32))
        for start in my_share(range(0, len(rows), batch)):
            *inputs, labels = self.batch(data, rows[start:start + batch], weight.device)
            logits = model(*inputs).float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack([loss, (logits.argmax(-1) == labels).sum()])
        loss, correct = summed(sums).tolist()
        return loss / len(rows), 100 * correct / len(rows)

    def validate(self, model):
        """A row of metrics.csv. The test accuracy, of all validations, chooses none.

        Where a validation takes all rows, as at the paper's size, the test waits for
        --test-every-validation.
        """
        rows = self.recipe["evaluate_rows"]
        loss, accuracy = self.evaluate(model, "val", rows)
        test = dict(test_accuracy=self.evaluate(model, "test", rows)[1]) if rows else {}
        return dict(loss=loss, accuracy=accuracy, **test)

    def by_first_token(self, split):
        """Of each row: is the class right that most rows of train with its first token have?"""
        def first(data):
            return data.tokens[np.minimum(data.offsets[:-1:self.documents], len(data.tokens) - 1)]

        train, data, counts = self.data["train"], self.data[split], np.zeros((256, self.classes))
        np.add.at(counts, (first(train), train.labels), 1)
        return counts.argmax(1)[first(data)] == data.labels

    def report(self, model, seed=0):
        (loss, accuracy), labels = self.evaluate(model, "test"), self.data["test"].labels
        return dict(test_loss=loss, test_accuracy=accuracy, test_rows=len(labels),
                    most_frequent=100 * np.bincount(labels).max() / len(labels),
                    parameters=parameters(model))

    def table(self, r):
        lines = [(f"{r.get('model', 'model')}, {r['parameters']:,} parameters", r["test_accuracy"]),
                 ("  best on test, of all validations", r.get("best_test_accuracy")),
                 ("always the most frequent class", r["most_frequent"]),
                 ("the paper's GRIL, full size and data", self.paper_accuracy)]
        title = f"{self.name}: accuracy in percent on {r['test_rows']:,} test rows"
        return "\n".join([title, *(f"{name:52s}{value:8.2f}" for name, value in lines
                                   if value is not None)])


# ------------------------------------------------------------------------------------ 4. five tasks
# tiny: a laptop, at most 20 minutes on two CPU cores. paper: App. E, Tables 8 and 9; not in the
# paper are the recurrent rate (a quarter here), r_min to gate, clipping, validation and patience.

TINY = dict(batch=32, clip=1.0, weight_decay=0.05, evaluate_every=200, checkpoint_every=200)
PAPER = dict(TINY, evaluate_every=2000, checkpoint_every=2000, evaluate_rows=0, patience=50)
PIXELS = dict(r_min=0.9, r_max=0.999, max_phase=pi / 8, gate="complex")
RELEASE = "https://storage.googleapis.com/long-range-arena/lra_release.gz", "lra_release.gz", None


class ListOps(Arena):
    name, classes, vocabulary = "listops", 10, len(SYMBOLS) + 1
    paper_parameters, paper_accuracy = 0.26e6, 62.40
    options = dict(Arena.options, short=Option(False, "rows of 20 to 256 tokens by LRA's rules"))
    recipes = dict(
        tiny=dict(TINY, steps=8000, warmup=300, lr=4e-3, length=256, r_max=0.999, short=True),
        paper=dict(PAPER, layers=6, H=128, P=32, J=8, steps=300_000, warmup=30_000, lr=2e-3,
                   recurrent_lr=5e-4, length=2048, r_min=0.0))
    places = "listops", "lra_release/listops-1000", "lra_release/lra_release/listops-1000"
    parts, span = arena.LISTOPS_FILES, arena.LRAS
    read = staticmethod(arena.read_listops)

    def __init__(self, data=None, **numbers):
        super().__init__(data, **numbers)
        if self.recipe["short"]:
            self.places, self.span = ("listops_short",), (19, 257)
            self.prepared = self.prepared.with_name("listops_short.bin")

    def report(self, model, seed=0):
        """And by depth, beside what the outermost operator alone, seen on train, would answer."""
        right, test, by_depth = self.by_first_token("test"), self.data["test"], {}
        opened = np.isin(test.tokens, [SYMBOLS.index(op) + 1 for op in OPERATORS]).astype(int)
        level = np.cumsum(opened - (test.tokens == len(SYMBOLS)))       # 0 after every row
        depths = np.maximum.reduceat(level, test.offsets[:-1])
        for d in np.unique(depths):
            rows = np.flatnonzero(depths == d)
            by_depth[int(d)] = dict(rows=len(rows), outermost=100 * right[rows].mean(),
                                    accuracy=self.evaluate(model, "test", rows)[1])
        return dict(super().report(model), outermost=100 * right.mean(), by_depth=by_depth)

    def table(self, r):
        lines = [super().table(r), f"{'the outermost operator alone':52s}{r['outermost']:8.2f}"]
        for d, row in r["by_depth"].items():
            lines.append(f"  depth {d}, {row['rows']:,} rows: {row['accuracy']:.1f}, by the "
                         f"outermost operator {row['outermost']:.1f}")
        return "\n".join(lines)

    @staticmethod
    def decode(tokens):
        return " ".join(SYMBOLS[token - 1] for token in tokens)


class Text(Arena):
    name, vocabulary, end = "text", 257, True
    paper_parameters, paper_accuracy = 1.43e6, 86.86
    recipes = dict(
        tiny=dict(TINY, steps=600, warmup=100, lr=2e-3, dropout=0.1),
        paper=dict(PAPER, layers=6, H=256, P=128, J=16, steps=78_200, warmup=4_000, lr=5e-4,
                   recurrent_lr=1.25e-4, weight_decay=0.12, dropout=0.1, length=4096,
                   gate="complex"))
    places = tuple(f"{where}aclImdb{ending}" for ending in ("", "_v1.tar.gz", ".tar.gz", ".tar.xz")
                   for where in ("imdb/", ""))
    parts = arena.REVIEWS
    published = ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                 "imdb/aclImdb_v1.tar.gz", "7c2ac02c03563afcf9b574c7e56c153a")
    read = staticmethod(arena.read_text)

    @staticmethod
    def decode(tokens):
        return bytes(tokens).decode("utf-8", "replace")


class Retrieval(Arena):
    name, vocabulary, documents, end = "retrieval", 257, 2, True
    paper_parameters, paper_accuracy = 1.00e6, 87.90
    recipes = dict(
        tiny=dict(TINY, steps=200, warmup=50, lr=2e-3, dropout=0.1, batch=16),
        paper=dict(PAPER, layers=4, H=128, P=256, J=16, steps=100_000, warmup=10_000, lr=4e-3,
                   weight_decay=0.01, dropout=0.1, batch=64, length=4000, gate="complex"))
    places = "retrieval", "tsv_data", "lra_release/tsv_data", "lra_release/lra_release/tsv_data"
    parts = arena.RETRIEVAL_FILES
    published, wanted = RELEASE, "tsv_data"     # of LRA's release, which is 8 GB
    read, decode = staticmethod(arena.read_retrieval), staticmethod(Text.decode)


class Image(Arena):
    name, classes = "image", 10
    paper_parameters, paper_accuracy = 6.46e6, 72.56
    recipes = dict(
        tiny=dict(TINY, **PIXELS, steps=1300, warmup=100, lr=3e-3),
        paper=dict(PAPER, **PIXELS, layers=7, H=512, P=256, J=2, steps=281_400, warmup=28_000,
                   lr=4e-3, dropout=0.1))
    places, parts = ("cifar-10-batches-bin", "cifar-10-binary.tar.gz"), arena.CIFAR_FILES
    published = ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                 "cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530")
    read = staticmethod(arena.read_image)

    @staticmethod
    def decode(tokens):
        ink = [2 * " .:-=+*#%@"[pixel * 10 // 256] for pixel in tokens]
        return "\n".join("".join(ink[i:i + 32]) for i in range(0, 1024, 32))


class Pathfinder(Arena):
    name = "pathfinder"
    paper_parameters, paper_accuracy = 1.39e6, 72.86
    recipes = dict(
        tiny=dict(TINY, **PIXELS, steps=150, warmup=50, lr=2e-3),
        paper=dict(PAPER, **PIXELS, layers=6, H=256, P=128, J=16, steps=500_000, warmup=1_000,
                   lr=4e-4, recurrent_lr=1e-4, weight_decay=0.10, dropout=0.1))
    published, wanted = RELEASE, "pathfinder32/curv_contour_length_14"
    places = wanted, f"lra_release/{wanted}", f"lra_release/lra_release/{wanted}"
    parts = "metadata/*.npy", "imgs"
    read, decode = staticmethod(arena.read_pathfinder), staticmethod(Image.decode)


LRA = {task.name: task for task in (ListOps, Text, Retrieval, Image, Pathfinder)}


# ------------------------------------------------------------------------------ 5. the command line

def prepare(task, args):
    """Gets a task ready: generates, downloads or just reads, then writes the token arrays."""
    start, made = time.perf_counter(), isinstance(task, ListOps)
    again = args.rows or args.seed is not None or args.force
    refuse((args.incomplete and task.name not in ("text", "image"),
            f"--incomplete is for text and image, not for {task.name}"),
           (again and not made,
            f"--rows, --seed and --force are for listops, which is generated; {task.name} is read"))
    if not made:
        fetch(task)
    elif again or not task.sources():
        generate(task, args)
    sources = task.sources()
    print(*(f"read     {path}" for path in sources), sep="\n")
    arena.store(task, sources, **dict(incomplete=True) if args.incomplete else {})
    print(f"written  {task.prepared}")
    for split, (tokens, _, labels) in task.data.items():
        print(f"{split:8s} {len(labels):8,} rows {len(tokens):14,} tokens")
    print(f"{time.perf_counter() - start:.1f} seconds")


def generate(task, args):
    """ListOps' rows; never over what is write-protected: renaming over a file asks for no mode."""
    rows, seed = args.rows or (96_000, 2_000, 2_000), args.seed or 0
    for path in task.sources():
        refuse((not args.force, f"{path.parent} has rows already: --force replaces them, another "
                "--data leaves them alone"),
               (not path.stat().st_mode & 0o222, f"{path} is write-protected and stays as it is, "
                "also with --force: choose another --data"))
    if min(rows) < 1 or args.workers < 1 or seed < 0:
        raise ValueError("--rows and --workers must be at least 1, --seed at least 0")
    print(f"generating {' + '.join(f'{n:,}' for n in rows)} rows, seed {seed}, "
          f"{args.workers} workers")
    arena.generate_listops(task.folder / task.places[0], rows, seed, args.workers, task.span)


def fetch(task):
    """The published files, unless there are some; those that there are must be the published."""
    address, name, md5 = task.published
    path = task.folder / name
    if not task.sources():
        if not path.exists():
            download(address, path, md5)
        if task.wanted:
            unpack(path, task.folder, task.wanted)
    taken = md5 and path in task.sources()
    if taken and hashlib.md5(path.read_bytes()).hexdigest() != md5:
        raise ValueError(f"{path}: not the published file, whose MD5 is {md5}. Remove it to "
                         "download it again")


def show(task, args):
    """One example as a person reads it, then what there is."""
    data = task.data["train"]
    if not 0 <= args.row < len(data.labels):
        raise ValueError(f"--row {args.row}: the training rows are 0 to {len(data.labels) - 1:,}")
    for i in range(args.row * task.documents, (args.row + 1) * task.documents):
        text = task.decode(data.tokens[data.offsets[i]:data.offsets[i + 1]].tolist())
        if task.vocabulary:
            text = text if len(text) < 600 else text[:600] + " …"
            text = "\n".join(textwrap.fill(part, 78) for part in text.splitlines() if part.strip())
        print(f"document {i}\n{text}\n")
    print(f"label    {data.labels[args.row]}")
    tokens, lengths, labels = next(task.stream(0, min(32, len(data.labels))))
    print(f"a batch  tokens {tuple(tokens.shape)}, lengths {lengths.min()} to {lengths.max()}, "
          f"labels {tuple(labels.shape)}")
    right = 100 * task.by_first_token("train").mean()
    print(f"guess    {right:.1f}% of train are right by the first token alone")
    for split, (tokens, offsets, labels) in task.data.items():
        n, counts = np.diff(offsets), np.bincount(labels, minlength=task.classes)
        print(f"{split:8s} {len(labels):,} rows; tokens {n.min():,} to {n.max():,}, "
              f"median {int(np.median(n)):,}\n         labels {' '.join(map(str, counts))}")


def main(argv=None):
    parser = argparse.ArgumentParser(
        prog="lra.py", description=__doc__.split("\n\n  listops ")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=("prepare", "show"))
    add("task", help=", ".join(LRA))
    add("--data", help="data folder (default: GRIL_DATA, or data)")
    add("--rows", type=int, nargs=3, metavar=("TRAIN", "VAL", "TEST"),
        help="of ListOps (default 96000 2000 2000)")
    add("--seed", type=int, help="of ListOps (default 0)")
    add("--workers", type=int, default=os.cpu_count(),
        help="processes that generate ListOps (default: one a core)")
    add("--short", action="store_true", help="ListOps of 20 to 256 tokens, which tiny reads whole")
    add("--force", action="store_true", help="generate ListOps again over what is there")
    add("--incomplete", action="store_true",
        help="go on without reviews of a class or a batch of CIFAR-10")
    add("--row", type=int, default=0, help="which training example to show (default 0)")
    with spoken("lra.py"):
        args = parser.parse_args(argv)
        Task = known("task", args.task, LRA)
        if args.short and Task is not ListOps:
            raise ValueError(f"--short is for listops, not for {args.task}")
        task = Task(args.data, **(dict(short=args.short) if Task is ListOps else {}))
        dict(prepare=prepare, show=show)[args.command](task, args)


if __name__ == "__main__":
    main()

"""Long Range Arena (Tay et al. 2021): five tasks and their classifier.

  python lra.py prepare listops    generate it by LRA's rules, about a minute
  python lra.py prepare image      read CIFAR-10, downloaded if not there
  python lra.py show pathfinder    one example decoded, lengths, label counts
  python train.py --task text      train; --size paper, --model lru, …

The data folder is --data DIR, or the environment variable GRIL_DATA, or data/.
`prepare` leaves token arrays there that open at once; every task also opens
straight from the files as people download them.

  listops     nested MIN, MAX, MED, SM of digits     -> the value, 10 classes        500 to 2,000 tokens
  text        an IMDb review, byte by byte           -> positive or negative         up to 4,096 bytes
  retrieval   two papers, byte by byte               -> does one cite the other?     2 × up to 4,000 bytes
  image       a CIFAR-10 picture in grey, by pixels  -> 10 classes                   1,024 pixels
  pathfinder  dashed curves, pixel by pixel          -> are the two dots connected?  1,024 pixels

The file, top to bottom (Sec. 5, App. E; the data itself is files/arena.py's): 1. batches; 2. the classifier; 3. the five tasks with their presets; 4. the command line.

Glossary. A row has a label and one document, or two; a document is a string of tokens, each one byte. Text keeps its
bytes' own numbers: 0 is padding, 256 an end token, so the vocabulary is 257 (which makes Text and Retrieval about 2%
larger than the paper's count). ListOps has 15 symbols and padding. H, P, J, w as in gril.py.
"""
import argparse
import bisect
import hashlib
import os
import sys
import textwrap
import time
from math import pi

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from baselines import offered, parameters
from files.arena import (SPLITS, SYMBOLS, generate_listops, load, read_image, read_listops, read_pathfinder, read_retrieval,
                         read_text, store)
from files.downloads import data_folder, download, unpack
from machine.devices import my_share, on, summed
from machine.errors import known
from machine.options import Option
from tasks import Task

END = 256                                       # the end token


# ------------------------------------------------------------------------------------------------------ 1. batches

class Stream:
    """Endless training batches. Seed and epoch fix the order, so (epoch, index) is the whole position.

    Rows are shuffled, then sorted by length within pools of 64 batches, so that little is padding, and the batches
    shuffled again. Every rank has the same global batches and takes each world-th row of them.
    """

    def __init__(self, task, seed, batch, device="cpu", rank=0, world=1):
        self.task, self.data, self.seed, self.batch, self.device = task, task.data["train"], seed, batch, device
        self.rank, self.world = rank, world
        if batch % world:
            raise ValueError(f"a batch of {batch} cannot be shared equally by {world} processes")
        if len(self.data.labels) < batch:
            raise ValueError(f"{task.name} has {len(self.data.labels):,} training rows, fewer than a batch of {batch}: "
                             "choose a smaller --batch")
        self.seek((0, 0))

    def seek(self, position):
        self.epoch, self.index = position
        rng = np.random.default_rng([self.seed, self.epoch])
        rows = rng.permutation(len(self.data.labels))[:len(self.data.labels) // self.batch * self.batch]
        pool = np.arange(len(rows)) // (64 * self.batch)
        rows = rows[np.lexsort((self.task.lengths(self.data, rows), pool))].reshape(-1, self.batch)
        self.order = rows[rng.permutation(len(rows))]                           # (batches, batch)

    def position(self):
        return self.epoch, self.index

    def __iter__(self):
        return self

    def __next__(self):
        if self.index == len(self.order):
            self.seek((self.epoch + 1, 0))
        rows = self.order[self.index][self.rank::self.world]
        self.index += 1
        return self.task.batch(self.data, rows, self.device)


# -------------------------------------------------------------------------------------------------------- 2. models

class Pixels(nn.Linear):
    """Grey values 0 … 255, about standardised, to H channels."""

    def __init__(self, H):
        super().__init__(1, H)

    def forward(self, tokens):
        x = super().forward((tokens[..., None].to(self.weight.dtype) / 255 - 0.5) / 0.25)
        return x.to(self.weight.dtype)                                          # layers add to it: in full precision


class Classifier(nn.Module):
    """Embedding, layers, mean over the unpadded positions, head; two documents meet as [a, b, a - b, a ⊙ b].

    Padding changes nothing: it stands at the end, every layer is causal, and the mean leaves it out.
    """

    def __init__(self, embed, layers, norm, H, classes, documents=1):
        super().__init__()
        self.embed, self.layers, self.documents = embed, nn.ModuleList(layers), documents
        self.norm = nn.LayerNorm(H) if norm else nn.Identity()
        self.head = nn.Linear(H, classes) if documents == 1 else nn.Sequential(
            nn.Linear(4 * H, H), nn.GELU(), nn.Linear(H, classes))

    def forward(self, tokens, lengths):
        x = self.embed(tokens)                                                  # (B, T, H), both documents in one batch
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        inside = torch.arange(x.shape[1], device=x.device) < lengths[:, None]   # (B, T)
        x = (x * inside[..., None]).sum(1) / lengths[:, None].to(x.dtype)       # (B, H)
        if self.documents == 2:
            a, b = x.chunk(2)
            x = torch.cat([a, b, a - b, a * b], -1)                             # (B, 4H)
        return self.head(x)


# --------------------------------------------------------------------------------------------------------- 3. tasks

BASE = dict(layers=2, H=64, P=64, J=8, batch=32, clip=1.0, evaluate_every=200, checkpoint_every=200,
            evaluate_rows=1000, r_min=0.5, r_max=0.9, gate="real", recurrent_lr=1e-3,
            weight_decay=0.05, dropout=0.0, length=1024)
PIXELS = dict(BASE, r_min=0.9, r_max=0.999, max_phase=pi / 8, gate="complex")
TINY = dict(            # a laptop: at most 20 minutes on two CPU cores
    listops=dict(BASE, steps=1500, warmup=100, lr=4e-3, length=256, r_max=0.999),
    text=dict(BASE, steps=600, warmup=100, lr=2e-3, dropout=0.1),
    retrieval=dict(BASE, steps=200, warmup=50, lr=2e-3, dropout=0.1, batch=16),
    image=dict(PIXELS, steps=1300, warmup=100, lr=3e-3),
    pathfinder=dict(PIXELS, steps=150, warmup=50, lr=2e-3),
)
# App. E. Not in the paper: recurrent rate (a quarter here), r_min to gate, clipping, validation, patience.
LONG = dict(evaluate_every=2000, evaluate_rows=0, checkpoint_every=2000, patience=50)
PAPER = dict(
    listops=BASE | LONG | dict(
        layers=6, H=128, P=32, J=8, steps=300_000, warmup=30_000, lr=2e-3, recurrent_lr=5e-4, length=2048, r_min=0.0),
    text=BASE | LONG | dict(
        layers=6, H=256, P=128, J=16, steps=78_200, warmup=4_000, lr=5e-4, recurrent_lr=1.25e-4,
        weight_decay=0.12, dropout=0.1, length=4096, gate="complex"),
    retrieval=BASE | LONG | dict(
        layers=4, H=128, P=256, J=16, steps=100_000, warmup=10_000, lr=4e-3, weight_decay=0.01,
        dropout=0.1, batch=64, length=4000, gate="complex"),
    image=PIXELS | LONG | dict(
        layers=7, H=512, P=256, J=2, steps=281_400, warmup=28_000, lr=4e-3, dropout=0.1),
    pathfinder=PIXELS | LONG | dict(
        layers=6, H=256, P=128, J=16, steps=500_000, warmup=1_000, lr=4e-4, recurrent_lr=1e-4,
        weight_decay=0.10, dropout=0.1),
)


def presets(name):
    return dict(tiny=TINY[name], paper=PAPER[name])


class Arena(Task):
    """A Long Range Arena task; the five below say what differs."""
    documents, end = 1, False                   # per row; does an end token follow each?
    choose = "accuracy"
    options = dict(
        layers=Option(2, "layers", least=1),
        H=Option(64, "width of the model", least=1),
        P=Option(64, "state size", least=1),
        J=Option(8, "blocks of the state", least=1),
        dropout=Option(0.0, "share of activations dropped in training", least=0),
        length=Option(1024, "longest sequence", least=1),
        gate=Option("real", "real or complex", among=("real", "complex")),
        r_min=Option(0.5, "smallest |gate| at the start", least=0),
        r_max=Option(0.9, "largest |gate| at the start", least=0),
        max_phase=Option(2 * pi, "largest angle of a complex gate at the start", least=0),
        form=Option("chunk", "of the recurrence: loop, scan or chunk", among=("loop", "scan", "chunk")),
        evaluate_rows=Option(1000, "rows of a validation, 0 for all", least=0),
    )

    def __init__(self, data=None, **numbers):
        super().__init__(**numbers)
        self.folder, self._data = data_folder(data), None

    # ---- data

    @classmethod
    def sources(cls, folder):
        """The published files of the first place that has any."""
        found = ([path for path in cls.files(folder / place) if path.exists()] for place in cls.places)
        return next(filter(None, found), [])

    @staticmethod
    def files(place):
        return [place]

    @property
    def data(self):
        if self._data is None:
            self._data = load(self, self.folder)
        return self._data

    def lengths(self, data, rows):
        """Tokens that the model reads of each row's longer document: cut at the recipe's length, with the end token."""
        documents = rows[:, None] * self.documents + np.arange(self.documents)
        n = data.offsets[documents + 1] - data.offsets[documents]
        return np.minimum(n.max(1) + self.end, self.recipe["length"])

    def batch(self, data, rows, device="cpu"):
        """(tokens (B, T), lengths (B,), labels) of rows, padded; of two documents all first ones come first."""
        documents = (rows * self.documents + np.arange(self.documents)[:, None]).reshape(-1)
        starts = data.offsets[documents]
        lengths = np.minimum(data.offsets[documents + 1] - starts, self.recipe["length"] - self.end)
        tokens = np.zeros((len(documents), self.padded(lengths.max() + self.end)), np.int32)
        for line, start, n in zip(tokens, starts, lengths):
            line[:n] = data.tokens[start:start + n]
            if self.end:
                line[n] = END
        return on(device, tokens, lengths + self.end, data.labels[rows].astype(np.int64))

    def padded(self, n):
        """n, or if compiled n rounded up to an eighth of the recipe's length: eight shapes to compile, not hundreds."""
        eighth = -(-self.recipe["length"] // 8) if self.compiled else 1
        return min(-(-int(n) // eighth) * eighth, self.recipe["length"])

    def stream(self, seed, batch, device="cpu", rank=0, world=1):
        return Stream(self, seed, batch, device, rank, world)

    def example(self, batch):
        """A batch of full length on the default device, of ones: for the dry run."""
        n = batch * self.documents
        return (torch.ones(n, self.recipe["length"], dtype=torch.int32),
                torch.full((n,), self.recipe["length"]), torch.ones(batch, dtype=torch.int64))

    # ---- model and loss

    def model(self, name="gril"):
        """The named classifier; a baseline is as wide as makes its parameters come nearest to GRIL's on this task."""
        r, models = self.recipe, offered("lra")
        known("model", name, models)

        def build(H, name=name):
            row = models[name]
            numbers = {"depth": 1, **r, **row.lra}
            embed = nn.Embedding(self.vocabulary, H) if self.vocabulary else Pixels(H)
            layers = [row.build(H, r["dropout"], **row.given(numbers))
                      for _ in range(max(1, round(r["layers"] * numbers["depth"])))]
            return Classifier(embed, layers, row.norm, H, self.classes, self.documents)
        if models[name].mixer is models["gril"].mixer:
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
        """Mean loss and accuracy in percent on a split, or on `rows` of it evenly spread."""
        data, device = self.data[split], next(model.parameters()).device
        n = len(data.labels)
        rows = np.arange(n) if not rows or rows >= n else np.linspace(0, n - 1, rows).astype(int)
        rows = rows[np.argsort(self.lengths(data, rows), kind="stable")]
        sums = torch.zeros(2, dtype=torch.promote_types(next(model.parameters()).dtype, torch.float32), device=device)
        for part in my_share(range(0, len(rows), self.recipe["batch"])):
            tokens, lengths, labels = self.batch(data, rows[part:part + self.recipe["batch"]], device)
            logits = model(tokens, lengths).float()
            loss = F.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack([loss, (logits.argmax(-1) == labels).sum()])
        loss, correct = summed(sums).tolist()
        return loss / len(rows), 100 * correct / len(rows)

    def validate(self, model):
        """A row of metrics.csv. The test accuracy is there for the paper's "best over a run"; it chooses nothing.

        Where a validation takes all rows, as at the paper's size, the test waits for --test-every-validation.
        """
        rows = self.recipe["evaluate_rows"]
        loss, accuracy = self.evaluate(model, "val", rows)
        test = dict(test_accuracy=self.evaluate(model, "test", rows)[1]) if rows else {}
        return dict(loss=loss, accuracy=accuracy, **test)

    def report(self, model, seed=0):
        (loss, accuracy), labels = self.evaluate(model, "test"), self.data["test"].labels
        return dict(test_loss=loss, test_accuracy=accuracy, test_rows=len(labels),
                    most_frequent=100 * np.bincount(labels).max() / len(labels), parameters=parameters(model))

    def table(self, r):
        """result.json as a person reads it."""
        lines = [(f"{r.get('model', 'model')}, {r['parameters']:,} parameters", r["test_accuracy"]),
                 ("  best on test over the run, as in the paper", r.get("best_test_accuracy")),
                 ("always the most frequent class", r["most_frequent"]),
                 ("the paper's GRIL, full size and data", self.paper_accuracy)]
        return "\n".join([f"{self.name}: accuracy in percent on {r['test_rows']:,} test rows"]
                         + [f"{name:52s}{value:8.2f}" for name, value in lines if value is not None])


class ListOps(Arena):
    name, classes, vocabulary = "listops", 10, len(SYMBOLS) + 1
    paper_parameters, paper_accuracy = 0.26e6, 62.40
    recipes = presets("listops")
    places = "listops", "lra_release/listops-1000", "lra_release/lra_release/listops-1000"
    read = staticmethod(read_listops)

    @staticmethod
    def files(place):
        return [place / f"basic_{split}.tsv" for split in SPLITS]

    @staticmethod
    def decode(tokens):
        return " ".join(SYMBOLS[token - 1] for token in tokens)


class Text(Arena):
    name, classes, vocabulary, end = "text", 2, 257, True
    paper_parameters, paper_accuracy = 1.43e6, 86.86
    recipes = presets("text")
    places = tuple(f"{where}{name}" for name in ("aclImdb", "aclImdb_v1.tar.gz", "aclImdb.tar.gz", "aclImdb.tar.xz")
                   for where in ("imdb/", ""))
    published = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz", "imdb/aclImdb_v1.tar.gz", \
        "7c2ac02c03563afcf9b574c7e56c153a"
    read = staticmethod(read_text)

    @staticmethod
    def files(place):
        folders = [place / split / kind for split in ("train", "test") for kind in ("pos", "neg")]
        return [place, *folders] if place.is_dir() else [place]

    @staticmethod
    def decode(tokens):
        return bytes(tokens).decode("utf-8", "replace")


class Retrieval(Arena):
    name, classes, vocabulary, documents, end = "retrieval", 2, 257, 2, True
    paper_parameters, paper_accuracy = 1.00e6, 87.90
    recipes = presets("retrieval")
    places = "retrieval", "tsv_data", "lra_release/tsv_data", "lra_release/lra_release/tsv_data"
    published = "https://storage.googleapis.com/long-range-arena/lra_release.gz", "lra_release.gz", None
    wanted = "tsv_data"                         # of LRA's release, which is 8 GB
    read, decode = staticmethod(read_retrieval), staticmethod(Text.decode)

    @staticmethod
    def files(place):
        return [place / f"new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")]


class Image(Arena):
    name, classes, vocabulary = "image", 10, None
    paper_parameters, paper_accuracy = 6.46e6, 72.56
    recipes = presets("image")
    places = "cifar-10-batches-bin", "cifar-10-binary.tar.gz"
    published = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "cifar-10-binary.tar.gz", \
        "c32a1d4ab5d03f1284b67883e8d87530"
    read = staticmethod(read_image)

    @staticmethod
    def files(place):
        names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
        return [place / name for name in names] if place.is_dir() else [place]

    @staticmethod
    def decode(tokens):
        ink = [2 * " .:-=+*#%@"[pixel * 10 // 256] for pixel in tokens]
        return "\n".join("".join(ink[i:i + 32]) for i in range(0, 1024, 32))


class Pathfinder(Image):
    name, classes = "pathfinder", 2
    paper_parameters, paper_accuracy = 1.39e6, 72.86
    recipes = presets("pathfinder")
    wanted = "pathfinder32/curv_contour_length_14"
    places = wanted, f"lra_release/{wanted}", f"lra_release/lra_release/{wanted}"
    published = Retrieval.published
    read = staticmethod(read_pathfinder)

    @staticmethod
    def files(place):
        return sorted((place / "metadata").glob("*.npy"), key=lambda path: (len(path.name), path.name))


LRA = {task.name: task for task in (ListOps, Text, Retrieval, Image, Pathfinder)}


# ---------------------------------------------------------------------------------------------- 4. the command line

def prepare(task, args):
    """Gets a task ready: generates, downloads or just reads, then writes the token arrays."""
    folder, start = task.folder, time.perf_counter()
    if task.name == "listops":
        asked = args.rows is not None or args.seed is not None
        if asked and task.sources(folder) and not args.force:
            raise ValueError(f"{task.sources(folder)[0].parent} has rows already: --force replaces them, another --data "
                             "leaves them alone")
        if asked or args.force or not task.sources(folder):
            for path in task.sources(folder):                   # a file renamed over another does not ask for its mode
                if not path.stat().st_mode & 0o222:
                    raise ValueError(f"{path} is write-protected and stays as it is, also with --force: choose another --data")
            rows, seed = args.rows or (96_000, 2_000, 2_000), args.seed or 0
            if min(rows) < 1 or args.workers < 1 or seed < 0:
                raise ValueError("--rows and --workers must be at least 1, --seed at least 0")
            print(f"generating {' + '.join(f'{n:,}' for n in rows)} rows, seed {seed}, {args.workers} workers")
            generate_listops(folder / "listops", rows, seed, args.workers)
    else:
        if args.rows is not None or args.seed is not None or args.force:
            raise ValueError(f"--rows, --seed and --force are for listops, which is generated; {task.name} is read")
        address, name, md5 = task.published
        if not task.sources(folder):
            if not (folder / name).exists():
                download(address, folder / name, md5)
            if hasattr(task, "wanted"):
                unpack(folder / name, folder, task.wanted)
        path = folder / name
        if md5 and path in task.sources(folder) and hashlib.md5(path.read_bytes()).hexdigest() != md5:
            raise ValueError(f"{path}: not the published file, whose MD5 is {md5}. Remove it to download it again")
    for path in task.sources(folder):
        print(f"read     {path}")
    home = folder / "prepared" / task.name
    store(home, task, task.sources(folder))
    data = load(task, folder)
    print(f"written  {home}")
    for split, (tokens, _, labels) in data.items():
        print(f"{split:8s} {len(labels):8,} rows {len(tokens):14,} tokens")
    print(f"{time.perf_counter() - start:.1f} seconds")


def show(task, args):
    """One example as a person reads it, then what there is."""
    data = task.data["train"]
    if not 0 <= args.row < len(data.labels):
        raise ValueError(f"--row {args.row}: the training rows are 0 to {len(data.labels) - 1:,}")
    for i in range(args.row * task.documents, (args.row + 1) * task.documents):
        text = task.decode(data.tokens[data.offsets[i]:data.offsets[i + 1]].tolist())
        if task.vocabulary:
            text = text if len(text) < 600 else text[:600] + " …"
            text = "\n".join(line for part in text.splitlines() for line in textwrap.wrap(part, 78))
        print(f"document {i}\n{text}\n")
    print(f"label    {data.labels[args.row]}")
    tokens, lengths, labels = next(task.stream(0, min(32, len(data.labels))))
    print(f"a batch  tokens {tuple(tokens.shape)}, lengths {lengths.min()} to {lengths.max()}, "
          f"labels {tuple(labels.shape)}")
    first = data.tokens[np.minimum(data.offsets[:-1:task.documents], len(data.tokens) - 1)]
    right = sum(np.bincount(data.labels[first == token]).max() for token in np.unique(first))
    print(f"guess    {100 * right / len(first):.1f}% of train are right by the first token alone")
    for split, (tokens, offsets, labels) in task.data.items():
        n = np.diff(offsets)
        print(f"{split:8s} {len(labels):,} rows; tokens {n.min():,} to {n.max():,}, median {int(np.median(n)):,}\n"
              f"         labels {' '.join(map(str, np.bincount(labels, minlength=task.classes)))}")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="lra.py", description=__doc__.split("\n\n  listops ")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("command", choices=("prepare", "show"))
    add("task", help=", ".join(LRA))
    add("--data", help="data folder (default: GRIL_DATA, or data)")
    add("--rows", type=int, nargs=3, metavar=("TRAIN", "VAL", "TEST"), help="of ListOps (default 96000 2000 2000)")
    add("--seed", type=int, help="of ListOps (default 0)")
    add("--workers", type=int, default=os.cpu_count(), help="processes that generate ListOps (default: one a core)")
    add("--force", action="store_true", help="generate ListOps again over what is there")
    add("--row", type=int, default=0, help="which training example to show (default 0)")
    args = parser.parse_args(argv)
    try:
        Task = known("task", args.task, LRA)
        {"prepare": prepare, "show": show}[args.command](Task(args.data), args)
    except (ValueError, OSError) as error:
        sys.exit(f"lra.py: {error}")


if __name__ == "__main__":
    main()

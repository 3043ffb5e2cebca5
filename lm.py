"""A GRIL language model (App. F): WikiText-103 at the paper's size, WikiText-2 or your own text on a laptop.

  1. tokens       GPT-2's byte-pair encoding from scratch, or plain bytes; token files, made by `prepare`
  2. model        x + W_o(x0 ⊙ GRIL(v ⊙ x1)), then x + MLP; any other mixer in GRIL's place: MIXERS
  3. tasks        what train.py trains on: blocks, loss, perplexity; LM, a table of tasks with their recipes
  4. generation   one token at a time, each at the same cost and memory however long the text

    python lm.py prepare wikitext2                     files in data/, or downloaded, become token files
    python lm.py prepare --text book.txt --bytes       your own text; bytes need no vocabulary
    python train.py --task wikitext2                   --model transformer, --size bytes, --stateful, …
    python lm.py generate runs/wikitext2-gril --prompt "The lobster"

V is the vocabulary, L the length of a block; H, P, J, w as in gril.py. A model has three ways of being called:
run(tokens (B, T), state) -> logits, state; step(tokens (B,), state); and forward(tokens, targets, state) -> loss, state.
"""
import argparse
import codecs
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import sys
import unicodedata
import urllib.request
import zipfile
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from baselines import LRU, MLP, S5, Attention, CausalConv, Mamba, Mixer, RecurrentBlock
from gril import Block, GrilMixer, known


def data_folder(argument=None):
    """--data, or the environment's GRIL_DATA, or data/."""
    return Path(argument or os.environ.get("GRIL_DATA") or "data")


# ------------------------------------------------------------------------------------------------------- 1. tokens

WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"      # White_Space; re's \s adds \x1c to \x1f


@cache
def splitter():
    """GPT-2's cut of a text into words. re has no \\p{L} and \\p{N}, so that every range of them is spelled out here."""
    ranges = {"L": "", "N": ""}
    for kind, run in itertools.groupby(map(chr, range(sys.maxunicode + 1)), lambda c: unicodedata.category(c)[0]):
        if kind in ranges:
            first, *_, last = [*run] * 2
            ranges[kind] += f"{first}-{last}"
    L, N = ranges["L"], ranges["N"]
    return re.compile(f"'s|'t|'re|'ve|'m|'ll|'d| ?[{L}]+| ?[{N}]+| ?[^{WHITE}{L}{N}]+|[{WHITE}]+(?![^{WHITE}])|[{WHITE}]+")


def utf8(text):
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the text is the lone surrogate U+{ord(text[error.start]):04X}, which no "
                         "UTF-8 can hold: read the text with its true encoding, or remove it") from None


class Bytes:
    """The 256 bytes of UTF-8 as tokens: nothing to learn, nothing to download."""
    name, size, start, silent = "bytes", 256, ord("\n"), None

    def encode(self, text):
        return list(utf8(text))

    def raw(self, ids):
        return bytes(ids)

    def decode(self, ids):
        return self.raw(ids).decode(errors="replace")


class BPE(Bytes):
    """GPT-2's byte-pair encoding (Radford et al. 2019): a word's bytes, merged pair by pair, the earliest merge first.

    encoder.json holds token -> id, vocab.bpe the merges in order; both write a byte as a printable character. Every text
    comes back whole from decode(encode(text)); "<|endoftext|>" written in a text is text, not the token.
    """
    name = "gpt2"

    def __init__(self, encoder_json, vocab_bpe):
        plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]       # written as themselves
        others = [b for b in range(256) if b not in plain]                      # written as characters from 256 on
        byte = {**{chr(b): b for b in plain}, **{chr(256 + i): b for i, b in enumerate(others)}}
        wrong = f"is not GPT-2's vocabulary; get both files with: python lm.py prepare wikitext2, after moving {encoder_json} " \
                f"and {vocab_bpe} away"
        try:
            ids = json.loads(Path(encoder_json).read_text(encoding="utf-8"))
            first, *lines = Path(vocab_bpe).read_text(encoding="utf-8").splitlines()
            merges = [tuple(line.split(" ")) for line in lines if line]
            *tokens, end = sorted(ids, key=ids.get)
            if sorted(ids.values()) != list(range(len(ids))) or end != "<|endoftext|>" or not first.startswith("#version"):
                raise ValueError
            self.tokens = [bytes(byte[c] for c in token) for token in tokens]   # id -> bytes
            self.rank = {tuple(bytes(byte[c] for c in part) for part in (a, b)): i for i, (a, b) in enumerate(merges)}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{encoder_json} with {vocab_bpe} {wrong}") from None
        self.id = {token: i for i, token in enumerate(self.tokens)}
        missing = [token for token in (*(bytes([b]) for b in range(256)), *map(b"".join, self.rank)) if token not in self.id]
        if missing:
            raise ValueError(f"{encoder_json} has no token for {missing[0]}, a byte or a merge of {vocab_bpe}: it {wrong}")
        self.start = self.silent = len(self.tokens)                             # end of text, 50256
        self.tokens.append(end.encode())
        self.size = len(self.tokens)
        self.word = lru_cache(1 << 18)(self.word)                               # most words come again and again

    def encode(self, text):
        utf8(text)                                                              # refuses what could not come back
        return list(itertools.chain.from_iterable(map(self.word, splitter().findall(text))))

    def word(self, word):
        """The ids of one word: its most senior pair is merged, wherever it stands, until no merge applies."""
        parts = [bytes([b]) for b in word.encode()]
        while len(parts) > 1:
            pair = min(zip(parts, parts[1:]), key=lambda pair: self.rank.get(pair, math.inf))
            if pair not in self.rank:
                break
            merged, i = [], 0
            while i < len(parts):
                n = 2 if tuple(parts[i:i + 2]) == pair else 1
                merged.append(b"".join(parts[i:i + n]))
                i += n
            parts = merged
        return tuple(self.id[part] for part in parts)

    def raw(self, ids):
        return b"".join(self.tokens[i] for i in ids)


GPT2 = {    # file: where it comes from, its SHA-256
    "encoder.json": ("https://openaipublic.blob.core.windows.net/gpt-2/models/124M/encoder.json",
                     "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    "vocab.bpe": ("https://openaipublic.blob.core.windows.net/gpt-2/models/124M/vocab.bpe",
                  "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
}
TOKENIZERS = {"gpt2": 50257, "bytes": 256}                                      # and the size of their vocabulary


def tokenizer(name, folder):
    """The tokenizer of that name, its files read from folder/gpt2."""
    known("tokenizer", name, TOKENIZERS)
    if name == "bytes":
        return Bytes()
    paths = [folder / "gpt2" / file for file in GPT2]
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no {path}: `python lm.py prepare wikitext2 --data {folder}` gets it, --data names "
                             "another folder, and bytes need none")
    bpe = BPE(*paths)
    if bpe.encode("Hello world") != [15496, 995]:
        raise ValueError(f"{paths[0]} is a vocabulary, but not GPT-2's ('Hello world' is {bpe.encode('Hello world')}, not "
                         f"[15496, 995]): move the files in {paths[0].parent} away and prepare again")
    return bpe


# ---- token files: uint16, beside a header that says what they are

WIKITEXT = {    # name: folder, and where the raw text comes from, its SHA-256
    "wikitext103": ("wikitext-103", "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-103-raw-v1.zip",
                    "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794"),
    "wikitext2": ("wikitext-2", "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-raw-v1.zip",
                  "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
}
SPLITS = ("train", "valid", "test")


def prepare(name, data, source=None, text=None, bytes_only=False, workers=None, quiet=False):
    """Texts to token files in data; the header, as written.

    WikiText becomes tokens as in the S5 code that the paper builds on: each line that is not blank on its own, with its
    line end, then the end-of-text token; blank lines are dropped. So WikiText-2, 2,448,382 tokens when the train file is
    encoded in one piece, has 2,446,247 this way. Your own text stays in one piece and is cut 90 : 5 : 5. Bytes are the
    file's, whatever it is.
    """
    data, source = Path(data), Path(source or data)
    if text is None:
        folder, url, checksum = known("data set", name, WIKITEXT)
        files = find(source, folder)
        if not files:
            download(url, data / Path(url).name, checksum, quiet)
            files = find(data, folder)
    else:
        folder, files = "text_file", {"text": Path(text)}
    kind = "bytes" if bytes_only else "gpt2"
    if kind == "gpt2":
        for file, (url, checksum) in GPT2.items():
            path, there = data / "gpt2" / file, source / "gpt2" / file
            if not path.exists() and there.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(there, path)
            elif not path.exists():
                download(url, path, checksum, quiet)
        tokenizer(kind, data)                                                   # refuses a wrong one here, not in a worker
    ids = {split: encode_file(path, kind, data, text is None, workers, quiet) for split, path in files.items()}
    if text is not None:
        whole = ids.pop("text")
        a, b = round(0.9 * len(whole)), round(0.95 * len(whole))
        ids = {"train": whole[:a], "valid": whole[a:b], "test": whole[b:]}
        if len(ids["test"]) < 2 or len(ids["valid"]) < 2:
            raise ValueError(f"{text} has {len(whole)} tokens, too few to cut into train, valid and test: give a longer text")
    header = dict(tokenizer=kind, vocabulary=TOKENIZERS[kind], dtype="uint16", splits={})
    (data / folder).mkdir(parents=True, exist_ok=True)
    for split, array in ids.items():
        write(data / folder / f"{kind}.{split}.bin", array.tobytes())
        header["splits"][split] = dict(tokens=len(array), sha256=hashlib.sha256(array).hexdigest(),
                                       source=str(files.get(split, text)))
    write(data / folder / f"{kind}.json", json.dumps(header, indent=1).encode() + b"\n")
    return header


def find(source, folder):
    """The files of a WikiText, {split: path}: raw before tokens, plain before zipped, all from one place; or nothing."""
    bases = [source / f"{folder}-raw", source / folder, source]
    for base, ending in itertools.product(bases[:2], ("raw", "tokens")):
        paths = {split: base / f"wiki.{split}.{ending}" for split in SPLITS}
        if paths["train"].exists() and paths["valid"].exists():
            return {split: path for split, path in paths.items() if path.exists()}      # test may be missing
    for path in (path for base in bases for path in sorted(base.glob(f"{folder}*.zip"))):
        try:
            members = zipfile.ZipFile(path).namelist()
        except zipfile.BadZipFile:
            raise ValueError(f"{path} is not a whole zip file: remove it and prepare again") from None
        paths = {split: zipfile.Path(path, member) for split in SPLITS for member in members
                 if re.search(rf"(^|/)wiki\.{split}\.(raw|tokens)$", member)}
        if "train" in paths and "valid" in paths:
            return paths
    return {}


def download(url, path, checksum, quiet=False):
    """Whole, checked, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside, digest = path.with_name(path.name + ".part"), hashlib.sha256()
    try:
        with urllib.request.urlopen(url, timeout=30) as answer, open(beside, "wb") as file, tqdm(
                total=int(answer.headers.get("Content-Length", 0)) or None, unit="B", unit_scale=True, desc=path.name,
                ncols=100, disable=quiet) as bar:
            while part := answer.read(1 << 20):
                file.write(part)
                digest.update(part)
                bar.update(len(part))
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ValueError(f"cannot get {url} ({error}). On a machine that can:\n  curl -L -o {path.name} {url}\n"
                         f"then put the file at {path} and prepare again") from None
    if digest.hexdigest() != checksum:
        beside.unlink()
        raise ValueError(f"{url} gave {digest.hexdigest()} where {checksum} is right: try again, or get {path.name} elsewhere")
    os.replace(beside, path)


def encode_file(path, kind, folder, lines, workers=None, quiet=False):
    """A text file's ids, uint16; one worker per core, each with parts of a few megabytes."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if not raw.strip():
        raise ValueError(f"{path} is empty: there is nothing to learn from")
    if kind == "bytes":
        return np.frombuffer(raw, np.uint8).astype(np.uint16)
    jobs = [(start, raw[start:end], lines) for start, end in itertools.pairwise(cuts(raw, lines))]
    workers = min(workers or os.cpu_count(), len(jobs))
    with tqdm(total=len(raw), unit="B", unit_scale=True, desc=path.name, ncols=100, disable=quiet) as bar:
        if workers == 1:
            pool, parts = None, map(Worker(kind, folder), jobs)
        else:
            pool = multiprocessing.Pool(workers)
            parts = pool.imap(Worker(kind, folder), jobs)
        try:
            ids = []
            for (_, part, _), array in zip(jobs, parts):
                ids.append(array)
                bar.update(len(part))
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: byte {error.start} is {error.object[:1].hex()}. Convert it, for example "
                             f"with: iconv -f latin1 -t utf-8 {path.name} > utf8.txt") from None
        finally:
            if pool:
                pool.terminate()
    return np.concatenate(ids)


class Worker:
    """Encodes a part of a file; a process makes its tokenizer once."""
    made = {}

    def __init__(self, kind, folder):
        self.key = kind, folder

    def __call__(self, job):
        start, raw, lines = job
        if self.key not in self.made:
            self.made[self.key] = tokenizer(*self.key)
        bpe = self.made[self.key]
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:                                     # counted from the start of the file
            at = error.start
            raise UnicodeDecodeError("utf-8", raw[at:at + 1], start + at, start + at + 1, error.reason) from None
        if not lines:
            return np.array(bpe.encode(text), np.uint16)
        return np.array([i for line in re.findall(".+\n?", text) if line.strip() for i in (*bpe.encode(line), bpe.start)],
                        np.uint16)


def cuts(raw, lines, size=1 << 22):
    """Where a file may be cut without changing its ids: after a line, if lines are encoded one by one.

    Else before a line end that follows something visible, since no word of GPT-2's goes on from there into white space;
    elsewhere in white space it would matter, for its last blank belongs to the next word.
    """
    found = [0]
    for line_end in re.finditer(rb"\r?\n", raw):
        at = line_end.end() if lines else line_end.start()
        if at - found[-1] >= size and (lines or not raw[at - 4:at].decode(errors="ignore")[-1:].isspace()):
            found.append(at)
    return [*found, len(raw)] if found[-1] < len(raw) else found


def write(path, content):
    """Whole or not at all: written beside, then renamed."""
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(content)
    os.replace(beside, path)


def read_tokens(folder, kind, split, command):
    """The ids of a split, memory-mapped, after the header's word for them is checked; None if there is no such split."""
    path, again = folder / f"{kind}.json", f"make it with: {command}"
    try:
        header = json.loads(path.read_text())
        splits, found = header["splits"], (header["tokenizer"], header["vocabulary"])
        entry = splits.get(split)
        count, checksum = (entry["tokens"], entry["sha256"]) if entry else (0, "")
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: {again}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not the header of a token file: {again}") from None
    if found != (kind, TOKENIZERS[kind]):
        raise ValueError(f"{path} belongs to tokens of {found[0]} ({found[1]} of them), not of {kind}: {again}")
    if entry is None:
        return None
    path = folder / f"{kind}.{split}.bin"
    if not path.exists() or path.stat().st_size != 2 * count or not count:
        raise ValueError(f"{path} does not hold the {count} tokens of its header: {again}")
    ids = np.memmap(path, np.uint16, "r")
    if hashlib.sha256(ids).hexdigest() != checksum:
        raise ValueError(f"{path} does not have the checksum of its header, it is damaged or half replaced: {again}")
    return ids


# -------------------------------------------------------------------------------------------------------- 2. model

class Gated(Mixer):
    """W_o(x0 ⊙ mixer(v ⊙ x1)), where v, x1, x0 are W_3H z after a causal filter of 3 per channel: Hyena's frame.

    The mixer inside has neither norm nor residual of its own.
    """

    def __init__(self, H, mixer):
        super().__init__()
        self.W_3H, self.conv, self.mixer = nn.Linear(H, 3 * H, bias=False), CausalConv(3 * H, 3), mixer
        self.W_o = nn.Linear(H, H, bias=False)
        nn.init.normal_(self.W_3H.weight, std=(3 / H) ** 0.5)                   # the filters start with a gain of 1/√3

    def through(self, how, z, state):
        past, inner = state or (None, None)
        y, past = getattr(self.conv, how)(self.W_3H(z), past)
        v, x1, x0 = y.chunk(3, -1)
        y, inner = getattr(self.mixer, how)(v * x1, inner)
        return self.W_o(x0 * y), (past, inner)

    def run(self, z, state=None):
        return self.through("run", z, state)

    def step(self, z, state=None):
        return self.through("step", z, state)


def heads(H):
    return max(1, H // 64)


def griffin(H, i):
    """Griffin's pattern: recurrent, recurrent, local attention."""
    return Attention(H, heads(H), 1, 1024) if i % 3 == 2 else RecurrentBlock(H, heads(H) * round(4 * H / 3 / heads(H)), heads(H))


MIXERS = {      # the mixer of layer i; linear attention is GRIL with a window of one (Sec. 4.5), gate and all
    "gril":             lambda i, H, P, J, **gril: Gated(H, GrilMixer(H, P, J, **gril)),
    "linear_attention": lambda i, H, P, J, **gril: Gated(H, GrilMixer(H, P, J, w=1, **gril)),
    "s5":               lambda i, H, P, J, **gril: Gated(H, S5(H, J=J)),
    "lru":              lambda i, H, P, J, **gril: Gated(H, LRU(H)),
    "mamba":            lambda i, H, P, J, **gril: Mamba(H),
    "griffin":          lambda i, H, P, J, **gril: griffin(H, i),
    "transformer":      lambda i, H, P, J, **gril: Attention(H, heads(H)),
}


class LanguageModel(nn.Module):
    """Embedding, layers of x + mixer(LayerNorm(x)) and x + MLP(LayerNorm(x)), LayerNorm, head tied to the embedding.

    No positions: the recurrence knows the order. Every model has GRIL's number of parameters: `inner` is the width of
    GRIL's MLP, and the MLPs beside other mixers take up the difference. Weights that write into the residual stream start
    smaller by √(2 layers), as GPT-2's.
    """

    def __init__(self, V, layers, H, inner, P, J, model="gril", dropout=0.0, **gril):
        super().__init__()
        mixer = known("model", model, MIXERS)
        with torch.device("meta"):
            budget = size(MIXERS["gril"](0, H, P, J, **gril)) + size(MLP(H, inner))
        self.embed = nn.Embedding(V, H)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.drop, self.layers, self.norm = nn.Dropout(dropout), nn.ModuleList(), nn.LayerNorm(H)
        for i in range(layers):
            part = mixer(i, H, P, J, **gril)
            rest = MLP(H, inner if model == "gril" else max(1, round((budget - size(part) - H) / (2 * H + 1))))
            self.layers += [Block(part, H, dropout), Block(rest, H, dropout)]
        with torch.no_grad():
            for W in (getattr(block.mixer, name, None) for block in self.layers for name in ("W_o", "W_out", "W_2")):
                if W is not None:
                    W.weight /= math.sqrt(2 * layers)

    @property
    def constant(self):
        """Whether the state stops growing with the text; it does but for attention without a window."""
        return all(getattr(module, "window", 0) < math.inf for module in self.modules())

    def hidden(self, tokens, state=None, how="run"):
        x, states = self.drop(self.embed(tokens)), []                           # (B, T, H), or (B, H) for a step
        for layer, s in zip(self.layers, state or [None] * len(self.layers)):
            x, s = getattr(layer, how)(x, s)
            states.append(s)
        return self.norm(x), states

    def head(self, x):
        return F.linear(x, self.embed.weight)                                   # (…, V)

    def run(self, tokens, state=None):
        """(B, T) tokens, state -> logits (B, T, V) of the tokens after them, state."""
        x, state = self.hidden(tokens, state)
        return self.head(x), state

    def step(self, tokens, state=None):
        """(B,) tokens, state -> logits (B, V), state."""
        x, state = self.hidden(tokens, state, "step")
        return self.head(x), state

    def forward(self, tokens, targets, state=None):
        """Mean loss of the targets (B, T), and the state after them."""
        x, state = self.hidden(tokens, state)
        return HeadLoss.apply(x.flatten(0, 1), self.embed.weight, targets.flatten(), torch.is_grad_enabled()), state


def size(module):
    return sum(p.numel() for p in module.parameters())


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of the logits x Eᵀ, some hundred tokens at a time, so that (tokens, V) logits never exist.

    The gradient, softmax minus one-hot, is made along with the loss while a part's logits are there: nothing is kept but
    dx and dE, and nothing computed twice.
    """

    @staticmethod
    def forward(ctx, x, E, targets, learn, entries=1 << 24):
        total, dx, dE = 0.0, [], torch.zeros_like(E) if learn else None
        for x_n, y_n in zip(x.split(max(1, entries // len(E))), targets.split(max(1, entries // len(E)))):
            logits = x_n @ E.mT                                                 # (n, V)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logits -= logits.logsumexp(-1, keepdim=True)                        # log-probabilities from here
            total = total - logits.gather(1, y_n[:, None]).sum()
            if learn:
                d = logits.exp_().scatter_add_(1, y_n[:, None], -torch.ones_like(logits[:, :1]))
                dx.append((d @ E).to(x.dtype))
                dE += d.mT @ x_n
        ctx.n = len(x)
        if learn:
            ctx.save_for_backward(torch.cat(dx), dE)
        return total / ctx.n

    @staticmethod
    def backward(ctx, g):
        dx, dE = ctx.saved_tensors
        return g / ctx.n * dx, g / ctx.n * dE, None, None


# -------------------------------------------------------------------------------------------------------- 3. tasks

TINY = dict(steps=2000, batch=8, lr=4e-3, recurrent_lr=1e-3, weight_decay=0.05, warmup=100, clip=1.0, evaluate_every=200,
            checkpoint_every=200, patience=0, choose="perplexity", higher=False, tokenizer="gpt2", length=256, layers=4,
            H=128, inner=128, P=64, J=16, dropout=0.0, stateful=False, validate_tokens=32_768)
RECIPES = {
    "tiny": TINY,
    "bytes": dict(TINY, tokenizer="bytes", length=512, choose="bits", validate_tokens=262_144),
    # the paper's, but for the recurrent rate, clipping and dropout, of which it says nothing: 230,000 steps are 32 epochs
    "paper": dict(TINY, steps=230_000, batch=16, lr=2e-3, recurrent_lr=5e-4, warmup=16_000, evaluate_every=1000,
                  checkpoint_every=1000, patience=20, length=1024, layers=16, H=768, inner=768, P=128, J=32, dropout=0.1,
                  validate_tokens=0),
}


class WikiText103:
    """The next token, in blocks of `length`; the other tasks say what differs."""
    name, folder, command = "wikitext103", "wikitext-103", "prepare wikitext103"
    recipes, paper_parameters = RECIPES, 117e6

    def __init__(self, recipe, data=None, **options):
        known("tokenizer", recipe["tokenizer"], TOKENIZERS)
        for key in ("length", "layers", "H", "inner", "P", "J"):
            if recipe[key] < 1:
                raise ValueError(f"{self.name}: {key} must be at least 1, got {recipe[key]}")
        self.recipe, self.length, self.data = recipe, recipe["length"], data_folder(data)
        self.state = None                                                       # carried from block to block if stateful

    def model(self, name="gril"):
        sizes = {key: self.recipe[key] for key in ("layers", "H", "inner", "P", "J", "dropout")}
        model = LanguageModel(TOKENIZERS[self.recipe["tokenizer"]], model=name, **sizes)
        if self.recipe["stateful"] and not model.constant:
            raise ValueError(f"{name} remembers every token, so that a carried state would only grow: train it without "
                             f"--stateful, or choose one of {', '.join(row for row in MIXERS if row != name)}")
        return model

    # ---- data

    def tokens(self, split):
        kind = self.recipe["tokenizer"]
        command = f"python lm.py {self.command} --data {self.data}{' --bytes' * (kind == 'bytes')}"
        ids = read_tokens(self.data / self.folder, kind, split, command)
        if ids is None and split != "test":
            raise ValueError(f"{self.data / self.folder} has no {split} tokens: make them with: {command}")
        return ids

    def stream(self, seed, batch, device="cpu", rank=0, world=1):
        return Blocks(self, seed, batch, device, rank, world)

    def example(self, batch):
        return torch.zeros(batch, self.length, dtype=torch.long), torch.zeros(batch, self.length, dtype=torch.long)

    # ---- training and scores

    def loss(self, model, batch):
        if not self.recipe["stateful"]:
            return model(*batch)[0]
        loss, state = model(*batch, self.state)
        self.state = detached(state)                                            # truncated backpropagation
        return loss

    @torch.no_grad()
    def score(self, model, ids, stateful=False):
        """Mean loss of every token of ids but the first, in blocks that follow each other; stateful carries the state."""
        L, device, total, state = self.length, next(model.parameters()).device, 0.0, None
        starts = range(0, len(ids) - 1, L)
        if len(ids) < 2:
            raise ValueError(f"a text of {len(ids)} tokens leaves nothing to predict")
        n = 1 if stateful else self.recipe["batch"]
        whole = [starts[i:i + n] for i in range(0, (len(ids) - 1) // L, n)]     # the last one may reach past the end
        parts = [[s for s in part if s + L < len(ids)] for part in whole] + [[s] for s in starts if s + L >= len(ids)]
        for part in parts:
            x, y = blocks(ids, part, L, device)
            loss, state = model(x, y, state if stateful else None)
            total += loss.double() * y.numel()
        return float(total) / (len(ids) - 1)

    def numbers(self, loss):
        bits = dict(bits=loss / math.log(2)) if self.recipe["tokenizer"] == "bytes" else {}    # per byte
        return dict(loss=loss, perplexity=math.exp(min(loss, 700)), **bits)

    def validate(self, model):
        ids = self.tokens("valid")
        return self.numbers(self.score(model, ids[:self.recipe["validate_tokens"] or len(ids)]))

    def report(self, model, seed):
        """Scores on the whole test file, or valid where there is none; stateful_… with the state carried on."""
        test = self.tokens("test")
        ids, split = (self.tokens("valid"), "valid") if test is None else (test, "test")
        result = dict(split=split, tokens=len(ids), **self.numbers(self.score(model, ids)))
        if getattr(model, "module", model).constant:
            carried = self.numbers(self.score(model, ids, stateful=True))
            result.update({f"stateful_{key}": value for key, value in carried.items()})
        return result

    def table(self, result):
        rows = [f"{result['model']} on {self.name}, {result['split']}: {result['tokens']:,d} tokens of {result['tokenizer']}",
                f"{'':24s}{'loss':>8s}{'perplexity':>12s}{'bits/byte':>11s}" if "bits" in result else
                f"{'':24s}{'loss':>8s}{'perplexity':>12s}"]
        for name, prefix in ((f"blocks of {result['length']}", ""), ("state carried on", "stateful_")):
            if f"{prefix}loss" in result:
                bits = f"{result[f'{prefix}bits']:11.3f}" if "bits" in result else ""
                rows.append(f"{name:24s}{result[f'{prefix}loss']:8.4f}{result[f'{prefix}perplexity']:12.2f}{bits}")
        return "\n".join(rows)


class WikiText2(WikiText103):
    name, folder, command, paper_parameters = "wikitext2", "wikitext-2", "prepare wikitext2", None


class TextFile(WikiText103):
    name, folder, command, paper_parameters = "text_file", "text_file", "prepare --text FILE", None


LM = {task.name: task for task in (WikiText103, WikiText2, TextFile)}


def blocks(ids, starts, L, device):
    """Tokens and targets (n, L), the same shifted by one; shorter at the end of ids."""
    block = torch.from_numpy(np.stack([ids[s:s + L + 1] for s in starts]).astype(np.int64)).to(device)
    return block[:, :-1], block[:, 1:]


def detached(state):
    if state is None or torch.is_tensor(state):
        return state if state is None else state.detach()
    return type(state)(map(detached, state))


class Blocks:
    """Endless batches of training blocks; epoch and index are the whole position, whatever the number of ranks.

    Blocks are shuffled anew every epoch. Stateful: the text is cut into as many lanes as the batch has rows, each lane is
    read from its start to its end, and an epoch begins with an empty state and all lanes moved by a few tokens.
    """

    def __init__(self, task, seed, batch, device, rank, world):
        self.task, self.seed, self.device, self.L = task, seed, device, task.length
        if batch % world:
            raise ValueError(f"--batch {batch} cannot be shared equally by {world} processes")
        self.ids, self.batch, self.world = task.tokens("train"), batch, world
        self.mine = slice(rank * batch // world, (rank + 1) * batch // world)
        self.count = (len(self.ids) - 1) // self.L // batch                     # batches in an epoch
        if self.count < 1:
            raise ValueError(f"the training text of {len(self.ids)} tokens is shorter than one batch, {batch} "
                             f"block{'s' * (batch > 1)} of {self.L} + 1: give a longer text, or lower --length or --batch")
        self.seek(dict(epoch=0, index=0))

    def starts(self, epoch):
        """(count, batch): where the blocks of each batch begin."""
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * epoch)
        if not self.task.recipe["stateful"]:
            order = torch.randperm((len(self.ids) - 1) // self.L, generator=generator)
            return self.L * order[:self.count * self.batch].view(self.count, self.batch)
        spare = len(self.ids) - self.count * self.batch * self.L
        shift = torch.randint(spare, (), generator=generator)
        return shift + self.L * torch.arange(self.count * self.batch).view(self.batch, self.count).mT

    def __iter__(self):
        return self

    def __next__(self):
        if self.index == self.count:
            self.seek(dict(epoch=self.epoch + 1, index=0))
        self.index += 1
        return blocks(self.ids, self.order[self.index - 1, self.mine].tolist(), self.L, self.device)

    def position(self):
        """With the carried state; not if several processes have one each: those resume with an empty one."""
        state = dict(state=self.task.state) if self.world == 1 else {}
        return dict(epoch=self.epoch, index=self.index, **state)

    def seek(self, position):
        self.epoch, self.index, self.task.state = position["epoch"], position["index"], position.get("state")
        self.order = self.starts(self.epoch)


# --------------------------------------------------------------------------------------------------- 4. generation

def load(folder):
    """(task, model, config) of a run that train.py made, finished or not."""
    folder = Path(folder)
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} is not the folder of a run: it has no config.json. python train.py --task wikitext2 makes "
                         "one under runs/")
    config = json.loads((folder / "config.json").read_text())
    if config.get("task") not in LM:
        raise ValueError(f"{folder} is a run of {config.get('task')}, not of a language model: {', '.join(LM)}")
    task = LM[config["task"]]({key: config.get(key, value) for key, value in TINY.items()}, config.get("data"))
    model = task.model(config["model"])
    path = next((folder / name for name in ("weights.pt", "best.pt", "last.pt") if (folder / name).exists()), None)
    if path is None:
        raise ValueError(f"{folder} has no weights yet (weights.pt, best.pt, last.pt): let the training run reach its first "
                         "checkpoint, or finish it with --resume")
    state = torch.load(path, weights_only=True, map_location="cpu")
    model.load_state_dict(state.get("model", state))
    return task, model.eval(), config


@torch.inference_mode()
def generate(model, prompt, tokens, temperature=1.0, top_k=0, seed=0):
    """Ids after the prompt's, one by one; a temperature of 0 takes the likeliest. Only the state remembers the text."""
    device, state = next(model.parameters()).device, None
    generator = torch.Generator(device).manual_seed(seed)
    for part in torch.tensor(prompt, device=device).split(1024):                # a long prompt needs no more memory
        x, state = model.hidden(part[None], state)
    logits = model.head(x[:, -1])                                               # (1, V)
    for i in range(tokens):
        if temperature == 0:
            token = logits.argmax(-1)                                           # (1,)
        else:
            likely, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]))
            token = ids[0, torch.multinomial((likely / temperature).softmax(-1), 1, generator=generator)[0]]
        yield token.item()
        if i + 1 < tokens:
            logits, state = model.step(token, state)


def as_text(ids, tokens):
    """Ids to pieces of text as they come; bytes that are not yet a whole character wait. End of text is not shown."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in ids:
        yield "" if i == tokens.silent else decoder.decode(tokens.raw([i]))
    yield decoder.decode(b"", final=True)


def arguments(argv=None):
    parser = argparse.ArgumentParser(description="Texts to token files, and trained models to text. Training itself is\n"
                                     "python train.py --task wikitext103 | wikitext2 | text_file",
                                     formatter_class=argparse.RawDescriptionHelpFormatter, epilog="""examples:
  python lm.py prepare wikitext2
  python lm.py prepare --text book.txt --bytes
  python lm.py generate runs/wikitext2-gril --prompt "The lobster" --tokens 200

python lm.py prepare --help and python lm.py generate --help list the options.""")
    commands = parser.add_subparsers(dest="command", required=True, metavar="prepare | generate")
    data = dict(type=Path, help="data folder (default: $GRIL_DATA, or data)")
    add = commands.add_parser("prepare", help="read or download a text, write its tokens").add_argument
    add("name", nargs="?", help=f"{' or '.join(WIKITEXT)}; not needed with --text")
    add("--text", type=Path, metavar="FILE", help="a text of your own, UTF-8, for --task text_file")
    add("--data", **data)
    add("--source", type=Path, metavar="DIR", help="read texts and vocabulary from here, write to --data")
    add("--bytes", action="store_true", help="bytes as tokens, not GPT-2's")
    add("--workers", type=int, metavar="N", help="processes (default: one per core)")
    add = commands.add_parser("generate", help="stream text from a trained model").add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a run, as train.py made it")
    add("--prompt", default="", help="text to go on with, of any length")
    add("--tokens", type=int, default=200, metavar="N", help="how many to make (default 200)")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest token (default 1)")
    add("--top-k", type=int, default=0, metavar="K", help="choose among the K likeliest (default 0: all)")
    add("--seed", type=int, default=0, help="(default 0)")
    add("--device", default="cpu", help="cpu, cuda or mps (default cpu)")
    add("--data", **data)
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    try:
        if args.command == "prepare":
            if (args.name is None) == (args.text is None):
                raise ValueError(f"prepare: name one data set, {' or '.join(WIKITEXT)}, or give --text FILE")
            header = prepare(args.name, data_folder(args.data), args.source, args.text, args.bytes, args.workers)
            for split, entry in header["splits"].items():
                print(f"{split:6s}{entry['tokens']:12,d} tokens of {header['tokenizer']} from {entry['source']}")
            return
        for flag, value in (("--tokens", args.tokens), ("--temperature", args.temperature), ("--top-k", args.top_k)):
            if not value >= 0:
                raise ValueError(f"{flag} must be 0 or more, got {value}")
        task, model, config = load(args.run)
        tokens = tokenizer(task.recipe["tokenizer"], data_folder(args.data or config.get("data")))
        prompt = tokens.encode(args.prompt) or [tokens.start]
        print(args.prompt, end="", flush=True)
        ids = generate(model.to(args.device), prompt, args.tokens, args.temperature, args.top_k, args.seed)
        for piece in as_text(ids, tokens):
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(flush=True)
        sys.exit(130)
    except ValueError as error:
        sys.exit(f"lm.py: {error}")


if __name__ == "__main__":
    main()

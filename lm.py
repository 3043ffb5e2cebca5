"""A GRIL language model (App. F): WikiText-103 at the paper's size; on a laptop, any text.

  1. model        x + W_o(x0 ⊙ GRIL(v ⊙ x1)), then x + MLP (causal window: gril_chunk); other mixers
  2. tasks        blocks, loss, perplexity, as train.py asks for them: LM
  3. generation   one token at a time, each at the same cost however long the text
  4. commands     prepare (files/tokens.py, where GPT-2's byte pairs are, too) and generate

  python lm.py prepare wikitext2                files in data/, or downloaded
  python lm.py prepare --text book.txt --bytes  your own text, no vocabulary
  python train.py --task wikitext2              --size bytes, --model lru, …
  python lm.py generate runs/wikitext2-gril-tiny-seed0 --prompt "The lobster"

V is the vocabulary, L the length of a block; H, P, J, w as in gril.py.
"""
import argparse
import codecs
import math
import os
from itertools import chain
from pathlib import Path

from machine.errors import Missing, known, refuse, spoken   # before torch, which loads for seconds

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from baselines import MLP, MODELS, Gated, Stack, offered, parameters
from files.downloads import data_folder
from files.runs import load as load_run
from files.tokens import TOKENIZERS, WIKITEXT, prepare, read_tokens, tokenizer
from gril import Block
from machine.devices import Epochs, choose_device, my_share, on, summed
from machine.options import LOOP, Option, sequence_options
from tasks import Task


# ---------------------------------------------------------------------------------------- 1. model

def models():
    """The rows of baselines.MODELS, and two variants of GRIL's.

    The paper's model is gril: GRIL in Hyena's frame, whose filters of 3 see as far as its window.
    What the window alone is worth shows without the frame: gril_alone against linear_attention, a
    window of one (Sec. 4.5), gate and all; gril_w1 is that in the frame, and filtered the same
    after short filters, the control of what a window adds. S5 and LRU stand in the frame with the
    gated units of their papers: other models than the paper's Hyena-S5. The others bring their own.
    """
    gril = MODELS["gril"]
    return {**offered("lm"), "gril_w1": gril._replace(lm=dict(framed=True, w=1)),
            "gril_alone": gril._replace(lm={})}


def make_mixer(row, H, i=0, **numbers):
    """Of layer i. β starts at a tenth: the recurrence starts small among the frame's products."""
    numbers = dict(beta=0.1, heads=max(1, H // 64), i=i) | numbers | row.lm
    part = row.mixer(H, **row.given(numbers))
    return Gated(H, part) if "framed" in row.lm else part


class LanguageModel(Stack):
    """x = E[tokens];  x + mixer(LayerNorm(x)), x + MLP(LayerNorm(x)) a layer;  LayerNorm(x) Eᵀ.

    No positions: the recurrence knows the order. Every model has GRIL's number of parameters:
    `inner` is the width of GRIL's MLP, and the MLPs beside other mixers take up the difference.
    The weights that write into the residual stream start smaller by √(2 layers), as GPT-2's.
    """

    def __init__(self, V, layers, H, inner, P, J, model="gril", dropout=0.0, **gril):
        super().__init__()
        row, numbers, channel = known("model", model, models()), dict(P=P, J=J, **gril), 2 * H + 1
        budget = parameters(make_mixer(MODELS["gril"], H, **numbers)) + inner * channel  # a layer's
        self.embed = nn.Embedding(V, H)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.drop, self.norm = nn.Dropout(dropout), nn.LayerNorm(H)
        for i in range(layers):
            part = make_mixer(row, H, i, **numbers)
            rest = MLP(H, max(1, round((budget - parameters(part)) / channel)))
            self.layers += [Block(part, H, dropout), Block(rest, H, dropout)]
        with torch.no_grad():
            for part in (block.mixer for block in self.layers if block.mixer.writes):
                part.get_submodule(part.writes).weight /= math.sqrt(2 * layers)

    @property
    def constant(self):
        """Whether the state stops growing with the text: not that of attention to all of it."""
        return all(getattr(module, "window", 0) < math.inf for module in self.modules())

    def hidden(self, tokens, state=None):
        x, state = super().run(self.drop(self.embed(tokens)), state)        # (B, T, H)
        return self.norm(x), state

    def run(self, tokens, state=None):
        """(B, T) tokens, state -> logits (B, T, V) of the tokens after them, state; so step."""
        x, state = self.hidden(tokens, state)
        return F.linear(x, self.embed.weight), state

    def forward(self, tokens, targets, state=None):
        """Mean loss of the targets (B, T), and the state after them."""
        x, state = self.hidden(tokens, state)
        return HeadLoss.apply(x.flatten(0, 1), self.embed.weight, targets.flatten(),
                              torch.is_grad_enabled()), state


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of the logits x Eᵀ, a part at a time: (tokens, V) of them never exist.

    The gradient, softmax minus one-hot, is made while a part's logits are there: only dx and dE
    are kept, nothing is computed twice. Each part reads and writes all of dE, so that a GPU, which
    has the room, takes parts 16 times as large.
    """

    @staticmethod
    def forward(ctx, x, E, targets, learn, entries=None):
        entries = entries or 1 << (24 if x.device.type == "cpu" else 28)    # logits at a time
        n = max(1, entries // len(E))                                       # tokens at a time
        total, dx, dE = 0.0, [], torch.zeros_like(E) if learn else None
        for x_n, y_n in zip(x.split(n), targets[:, None].split(n)):
            logits = x_n @ E.mT                                             # (n, V)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logits -= logits.logsumexp(-1, keepdim=True)                    # now log-probabilities
            total = total - logits.gather(1, y_n).sum()
            if learn:
                d = logits.exp_().scatter_add_(1, y_n, -torch.ones_like(logits[:, :1]))
                dx.append((d @ E).to(x.dtype))
                dE += d.mT @ x_n
        ctx.n = len(x)
        if learn:
            ctx.save_for_backward(torch.cat(dx), dE)
        return total / ctx.n

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        dx, dE = ctx.saved_tensors
        return g / ctx.n * dx, g / ctx.n * dE, None, None, None


# ---------------------------------------------------------------------------------------- 2. tasks

TINY = dict(steps=1200, batch=8, lr=4e-3, recurrent_lr=1e-3, weight_decay=0.05, warmup=100,
            clip=1.0, evaluate_every=200, checkpoint_every=200)
RECIPES = dict(
    tiny=TINY,
    bytes=dict(TINY, tokenizer="bytes", steps=2000, length=512, validate_tokens=262_144),
    # App. F, which says nothing of the recurrent rate, clipping and dropout
    paper=dict(TINY, layers=16, H=768, inner=768, P=128, J=32, length=1024, batch=16,
               steps=230_000, warmup=16_000, lr=2e-3, recurrent_lr=5e-4, dropout=0.1, patience=20,
               evaluate_every=1000, checkpoint_every=1000, validate_tokens=0),
)


class NextToken(Task):
    """The next token, in blocks of `length`; the tasks below say of which text."""
    higher = False
    recipes = RECIPES
    options = dict(
        sequence_options(layers=4, H=128, P=64, J=16, length=256),
        tokenizer=Option("gpt2", "gpt2 or bytes", among=tuple(TOKENIZERS)),
        inner=Option(128, "width inside a feed-forward layer", least=1),
        stateful=Option(False, "carry the state from block to block"),
        validate_tokens=Option(32_768, "tokens of a validation, 0 for all", least=0),
        report_tokens=Option(0, "tokens of the last report, 0 for all", least=0),
    )

    def __init__(self, data=None, **numbers):
        super().__init__(**numbers)
        r, few = self.recipe, "must be 0 (all) or at least 2: a token is scored by those before it"
        refuse((r["validate_tokens"] == 1, f"--validate-tokens {few}"),
               (r["report_tokens"] == 1, f"--report-tokens {few}"),
               (r["stateful"] and r["accumulate"] > 1, "--stateful carries one state from step to "
                "step, --accumulate would need several: choose one"))
        self.length, self.data = r["length"], data_folder(data)
        self.bytes = r["tokenizer"] == "bytes"
        self.choose = "bits" if self.bytes else "perplexity"
        self.state = None                                                   # carried, if stateful

    def model(self, name="gril"):
        V, names = TOKENIZERS[self.recipe["tokenizer"]], "layers H inner P J dropout form".split()
        model = LanguageModel(V, model=name, **{key: self.recipe[key] for key in names})
        if self.recipe["stateful"] and not model.constant:
            others = ", ".join(other for other in models() if other != name)
            raise ValueError(f"{name} remembers every token, so that a carried state would only "
                             f"grow: train it without --stateful, or choose one of {others}")
        return model

    # ---- data

    @property
    def has_test(self):
        return self.tokens("test") is not None

    def tokens(self, split):
        folder = self.data / self.folder
        kind = " --bytes" if self.bytes else ""
        command = f"python lm.py {self.command} --data {self.data}{kind}"
        ids = read_tokens(folder, self.recipe["tokenizer"], split, command)
        if ids is None and split != "test":
            raise Missing(f"{folder} has no {split} tokens: make them with: {command}")
        return ids

    def stream(self, seed, batch, device="cpu", rank=0, world=1):
        self.tokens("valid")                # if it is not there, better said now than after an hour
        return Blocks(self, seed, batch, device, rank, world)

    def example(self, batch):
        return tuple(torch.zeros(2, batch, self.length, dtype=torch.long))

    # ---- training and scores

    def loss(self, model, batch):
        loss, state = model(*batch, self.state)
        if self.recipe["stateful"]:
            self.state = detached(state)                                    # backpropagation stops
        return loss

    @torch.no_grad()
    def score(self, model, ids, stateful=False):
        """Mean loss of every token of ids but the first, in blocks; stateful carries the state on.

        Then it does not matter where the text is cut: a block is as long as a whole batch.
        """
        L, n = self.length, self.recipe["batch"]
        if stateful:
            L, n = n * L, 1
        whole, weight, state = range(0, len(ids) - L, L), next(model.parameters()), None
        parts = [whole[i:i + n] for i in range(0, len(whole), n)]
        if (len(ids) - 1) % L:
            parts.append([L * len(whole)])                                  # what is left over
        total = torch.zeros((), dtype=weight.dtype, device=weight.device)
        for starts in parts if stateful else my_share(parts):
            x, y = blocks(ids, starts, L, weight.device)
            loss, state = model(x, y, state if stateful else None)
            total += loss * y.numel()
        return (total if stateful else summed(total)).item() / (len(ids) - 1)

    def scores(self, loss):
        scores = dict(loss=loss, perplexity=math.exp(min(loss, 700)))
        if self.bytes:
            scores["bits"] = loss / math.log(2)                             # of a byte
        return scores

    def validate(self, model):
        ids = self.tokens("valid")[:self.recipe["validate_tokens"] or None]
        return self.scores(self.score(model, ids))

    def report(self, model, seed):
        """Scores on test, or valid where there is no test; stateful_… with the state carried on."""
        split = "test" if self.has_test else "valid"
        ids = self.tokens(split)[:self.recipe["report_tokens"] or None]
        losses = {split: self.score(model, ids)}
        if model.constant:
            losses["stateful"] = self.score(model, ids, stateful=True)
        return dict(split=split, tokens=len(ids), parameters=parameters(model),
                    **{f"{name}_{key}": value for name, loss in losses.items()
                       for key, value in self.scores(loss).items()})

    def table(self, result):
        rows = ["{model} on {task}, {parameters:,d} parameters; {split}, {tokens:,d} tokens of "
                "{tokenizer}".format(**result)]
        names = {result["split"]: f"blocks of {result['length']}", "stateful": "state carried on"}
        for name, how in names.items():
            scores = [f"{key} {result[f'{name}_{key}']:.4g}"
                      for key in ("loss", "perplexity", "bits") if f"{name}_{key}" in result]
            if scores:
                rows.append(f"  {how:18s}{', '.join(scores)}")
        return "\n".join(rows)


class WikiText103(NextToken):
    name, folder, command = "wikitext103", "wikitext-103", "prepare wikitext103"
    paper_parameters = 117e6


class WikiText2(NextToken):
    name, folder, command = "wikitext2", "wikitext-2", "prepare wikitext2"


class TextFile(NextToken):
    name, folder, command = "text_file", "text_file", "prepare --text FILE"


LM = {task.name: task for task in (WikiText103, WikiText2, TextFile)}


def blocks(ids, starts, L, device):
    """(x_1, …, x_L) and (x_2, …, x_{L+1}), App. F: (n, L) both; shorter at the end of ids."""
    block, = on(device, np.stack([ids[s:s + L + 1] for s in starts]).astype(np.int64))
    return block[:, :-1], block[:, 1:]


def detached(state, device=None, rows=slice(None)):
    """Those rows of a state, copied, since a view would keep all of its block."""
    return tree_map_only(torch.Tensor, lambda x: x.detach()[rows].to(device, copy=True), state)


class Blocks(Epochs):
    """Endless batches of training blocks, and the state that is carried from one to the next.

    Blocks are shuffled anew every epoch. Stateful: the text is cut into as many lanes as the batch
    has rows, each lane is read from its start to its end, and an epoch begins with an empty state
    and all lanes moved by a few tokens.
    """

    def __init__(self, task, seed, batch, device, rank, world):
        self.task, self.seed, self.device, self.world = task, seed, device, world
        self.ids, self.L = task.tokens("train"), task.length
        self.count = (len(self.ids) - 1) // self.L // batch                 # batches in an epoch
        if self.count < 1:
            raise ValueError(f"the training text of {len(self.ids)} tokens is shorter than one "
                             f"batch, {batch} block{'s' if batch > 1 else ''} of {self.L} + 1: "
                             "give a longer text, or lower --length or --batch")
        super().__init__(batch, slice(rank * batch // world, (rank + 1) * batch // world))

    def ordered(self, epoch):
        """(count, batch): where the blocks of each batch begin."""
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * epoch)
        used = self.count * self.batch
        if not self.task.recipe["stateful"]:
            order = torch.randperm((len(self.ids) - 1) // self.L, generator=generator)
            return self.L * order[:used].view(self.count, self.batch)
        shift = torch.randint(len(self.ids) - used * self.L, (), generator=generator)
        return shift + self.L * torch.arange(used).view(self.batch, self.count).mT

    def take(self, starts):
        return blocks(self.ids, starts.tolist(), self.L, self.device)

    def position(self):
        return *super().position(), self.task.state

    def gathered(self, position):
        """A position with the carried state of the whole batch, of which each process has rows."""
        def rows(x):
            parts = [torch.empty_like(x.contiguous()) for _ in range(self.world)]
            dist.all_gather(parts, x.contiguous())
            return torch.cat(parts)
        return position if self.world == 1 else tree_map_only(torch.Tensor, rows, position)

    def seek(self, position):
        super().seek(position[:2])
        state, = position[2:] or [None]
        self.task.state = detached(state, self.device, self.mine)


# ----------------------------------------------------------------------------------- 3. generation

def load(folder):
    """(task, model, config) of a run that train.py made, finished or not."""
    return load_run(folder, LM, "a language model", "config.json")


@torch.inference_mode()
def generate(model, prompt, tokens, temperature=1.0, top_k=0, seed=0):
    """Ids after the prompt's, one by one; only the state remembers. Temperature 0: likeliest."""
    device, state = next(model.parameters()).device, None
    generator = torch.Generator(device).manual_seed(seed)
    for part in torch.tensor(prompt, device=device).split(1024):            # in bounded memory
        x, state = model.hidden(part[None], state)
    logits = F.linear(x[:, -1], model.embed.weight)                         # (1, V)
    for _ in range(tokens):
        if 0 < top_k < logits.shape[-1]:
            least = logits.topk(top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        token = logits.argmax(-1)                                           # (1,)
        if temperature:
            p = (logits / temperature).softmax(-1)
            token = torch.multinomial(p, 1, generator=generator)[:, 0]
        yield token.item()
        logits, state = model.step(token, state)


def as_text(ids, tokens):
    """Ids to text as they come; bytes that are not yet a character wait, end of text is silent."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in ids:
        yield "" if i == tokens.silent else decoder.decode(tokens.raw([i]))
    yield decoder.decode(b"", final=True)


# ------------------------------------------------------------------------------------- 4. commands

def run_prepare(args):
    refuse(((args.name is None) == (args.text is None),
            f"prepare: name one data set, {' or '.join(WIKITEXT)}, or give --text FILE"),
           (args.text and (not args.text.exists() or args.text.is_dir()),
            f"cannot read {args.text}: there is no such file"),
           (args.workers < 1, f"--workers must be at least 1, got {args.workers}"))
    header = prepare(args.name, data_folder(args.data), args.text, args.kind, args.workers)
    for split, entry in header["splits"].items():
        print(f"{split:6s}{entry['tokens']:12,d} tokens of {header['tokenizer']} "
              f"from {entry['source']}")


def run_generate(args):
    LOOP["device"].check("device", args.device)
    refuse((args.tokens < 0, f"--tokens must be 0 or more, got {args.tokens}"),
           (args.top_k < 0, f"--top-k must be 0 or more, got {args.top_k}"),
           (args.temperature != 0 and not 1e-6 <= args.temperature <= 1e6,
            f"--temperature must be 0, or 1e-6 to 1e6, got {args.temperature}"),
           (not 0 <= args.seed < 2 ** 32, f"--seed must be 0 to {2 ** 32 - 1}, got {args.seed}"))
    task, model, config = load(args.run)
    tokens = tokenizer(task.recipe["tokenizer"], data_folder(args.data or config.get("data")))
    prompt = tokens.encode(args.prompt) or [tokens.start]
    model.to(choose_device(args.device))
    ids = generate(model, prompt, args.tokens, args.temperature, args.top_k, args.seed)
    for piece in chain([args.prompt], as_text(ids, tokens), "\n"):
        print(piece, end="", flush=True)


def main(argv=None):
    parser = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Texts to token files, and trained models to text.",
        epilog="examples:\n" + __doc__.split("\n\n")[2] + "\n\n"
               "python lm.py prepare --help and python lm.py generate --help list the options.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="prepare | generate")
    data = dict(type=Path, help="data folder (default: $GRIL_DATA, or data)")

    add = commands.add_parser("prepare", help="texts or downloads to token files").add_argument
    add("name", nargs="?", help=f"{' or '.join(WIKITEXT)}; not needed with --text")
    add("--text", type=Path, metavar="FILE", help="a text of your own, UTF-8, for --task text_file")
    add("--data", **data)
    add("--bytes", dest="kind", action="store_const", const="bytes", default="gpt2",
        help="bytes as tokens, not GPT-2's")
    add("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")

    add = commands.add_parser("generate", help="stream text from a trained model").add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a run, as train.py made it")
    add("--prompt", default="", help="text to go on with, of any length")
    add("--tokens", type=int, default=200, help="how many to make (default 200)")
    add("--temperature", type=float, default=1.0, help="0 takes the likeliest token (default 1)")
    add("--top-k", type=int, default=0, help="choose among the likeliest (default 0: all)")
    add("--seed", type=int, default=0, help="(default 0)")
    add("--device", default="cpu", help="auto, cpu, cuda or mps (default cpu)")
    add("--data", **data)

    with spoken("lm.py"):
        args = parser.parse_args(argv)
        dict(prepare=run_prepare, generate=run_generate)[args.command](args)


if __name__ == "__main__":
    main()

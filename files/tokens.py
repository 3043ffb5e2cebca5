"""Text to tokens and back, for lm.py: GPT-2's byte pairs from scratch, bytes, and their files.

  1. tokenizers   BPE(encoder.json, vocab.bpe) gives GPT-2's own ids; Bytes needs no vocabulary
  2. token files  prepare makes them from WikiText or any text, read_tokens maps them into memory

The tokens of a text are one file per tokenizer (files/whole.py): uint16 ids of train, valid and
test, and a header that names the tokenizer, how many there are, and from where.
"""
import json
import math
import re
import sys
import unicodedata
import zipfile
from functools import cache, lru_cache, partial
from itertools import chain, groupby, pairwise, product
from pathlib import Path

import numpy as np
from tqdm import tqdm

from files.downloads import download, unpacked
from files.whole import read_arrays, write_arrays
from files.workers import spread
from machine.errors import Missing, known


# ----------------------------------------------------------------------------------- 1. tokenizers

# Unicode's White_Space; re's \s has \x1c to \x1f as well
WHITE = "\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


@cache
def splitter():
    """GPT-2's cut of a text into words; re has no \\p{L} and \\p{N}: every range is spelled out."""
    ranges = {"L": "", "N": ""}
    every = map(chr, range(sys.maxunicode + 1))
    for kind, run in groupby(every, lambda c: unicodedata.category(c)[0]):
        if kind in ranges:
            first, *_, last = [*run] * 2
            ranges[kind] += f"{first}-{last}"
    L, N = ranges["L"], ranges["N"]
    return re.compile(f"'s|'t|'re|'ve|'m|'ll|'d| ?[{L}]+| ?[{N}]+| ?[^{WHITE}{L}{N}]+|"
                      f"[{WHITE}]+(?![^{WHITE}])|[{WHITE}]+")           # " a" keeps its blank


def utf8(text):
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        at = error.start
        raise ValueError(f"character {at} of the text is the lone surrogate U+{ord(text[at]):04X}, "
                         "which no UTF-8 can hold: read the text with its true encoding, or remove "
                         "it") from None


class Bytes:
    """The 256 bytes of UTF-8. A text starts after the token `start`; `silent` is never shown."""
    start, silent = ord("\n"), None

    def encode(self, text):
        return list(utf8(text))

    def raw(self, ids):
        return bytes([*ids])                                            # of an array, its numbers

    def decode(self, ids):
        return self.raw(ids).decode(errors="replace")


class BPE(Bytes):
    """GPT-2's byte-pair encoding (Radford et al. 2019): bytes merged pair by pair, in their order.

    encoder.json holds token -> id, vocab.bpe the merges, the first first; both write a byte as a
    printable character. Every text comes back from decode(encode(text)) as it was, and
    "<|endoftext|>" written in a text is text, not the token.
    """

    def __init__(self, encoder_json, vocab_bpe):
        plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
        others = [b for b in range(256) if b not in plain]
        byte = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
        self.symbol = {b: c for c, b in byte.items()}
        try:
            if max(encoder_json.stat().st_size, vocab_bpe.stat().st_size) > 1 << 22:
                raise ValueError                                        # nothing longer is parsed
            ids = json.loads(encoder_json.read_text(encoding="utf-8"))
            first, *lines = vocab_bpe.read_text(encoding="utf-8").splitlines()
            *tokens, end = sorted(ids, key=ids.get)
            self.id = {token: i for i, token in enumerate(tokens)}
            self.tokens = [bytes(byte[c] for c in token) for token in tokens]       # id -> bytes
            self.rank = {(a, b): i for i, (a, b) in enumerate(map(str.split, lines))}
            needed = {*byte, *map("".join, self.rank)}
            if not (end == "<|endoftext|>" and first[0] == "#" and needed <= self.id.keys()
                    and sorted(ids.values()) == list(range(257 + len(lines)))):
                raise ValueError
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            raise ValueError(f"{encoder_json} and {vocab_bpe} are not the two halves of GPT-2's "
                             "vocabulary: move them away, and `python lm.py prepare wikitext2` "
                             "gets the right ones") from None
        self.start = self.silent = len(self.tokens)                     # end of text, 50256
        self.tokens.append(end.encode())
        self.word = lru_cache(1 << 18)(self.word)                       # most words come again

    def encode(self, text):
        utf8(text)                                                      # or it could not come back
        return list(chain.from_iterable(map(self.word, splitter().findall(text))))

    def word(self, word):
        """The ids of one word: its first pair in rank is merged everywhere, until none is left."""
        parts = [self.symbol[b] for b in word.encode()]
        while len(parts) > 1:
            pair = min(pairwise(parts), key=lambda pair: self.rank.get(pair, math.inf))
            if pair not in self.rank:
                break
            merged, i = [], 0
            while i < len(parts):
                n = 2 if tuple(parts[i:i + 2]) == pair else 1
                merged.append("".join(parts[i:i + n]))
                i += n
            parts = merged
        return tuple(self.id[part] for part in parts)

    def raw(self, ids):
        return b"".join(self.tokens[i] for i in ids)


GPT2_FROM = "https://openaipublic.blob.core.windows.net/gpt-2/models/124M"
GPT2 = {                                                                # file: its SHA-256
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
TOKENIZERS = {"gpt2": 50257, "bytes": 256}                              # size of the vocabulary


@cache
def tokenizer(name, data):
    """The tokenizer of that name, its files read from data/gpt2."""
    if name == "bytes":
        return Bytes()
    folder = data / "gpt2"
    paths = [folder / file for file in GPT2]
    if not all(path.exists() for path in paths):
        raise Missing(f"{folder} lacks {' or '.join(GPT2)}: `python lm.py prepare wikitext2 --data "
                      f"{data}` gets them; --data names another folder; bytes need none")
    bpe = BPE(*paths)
    hello, size = bpe.encode("Hello world"), len(bpe.tokens)
    if hello != [15496, 995] or size != TOKENIZERS[name]:
        raise ValueError(f"{paths[0]} is a vocabulary, but not GPT-2's ('Hello world' is {hello}, "
                         f"not [15496, 995], or its {size} tokens are not {TOKENIZERS[name]}): "
                         f"move the files in {folder} away and prepare again")
    return bpe


# ---------------------------------------------------------------------------------- 2. token files

WIKITEXT_FROM = "https://wikitext.smerity.com"
WIKITEXT = {                                # name: folder, address of the raw text, its SHA-256
    "wikitext103": ("wikitext-103", f"{WIKITEXT_FROM}/wikitext-103-raw-v1.zip",
                    "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794"),
    "wikitext2": ("wikitext-2", f"{WIKITEXT_FROM}/wikitext-2-raw-v1.zip",
                  "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
}
SPLITS = ("train", "valid", "test")
LARGEST = 1 << 30                                                       # bytes, twice WikiText-103


def prepare(name, data, text=None, kind="gpt2", workers=1):
    """Texts to a file of tokens of that kind in data; its header.

    WikiText becomes tokens as in the S5 code that the paper builds on: each line that is not blank
    by itself, with its line end, then the end-of-text token. So WikiText-2, 2,448,382 tokens when
    the train file is encoded in one piece, has 2,446,247. Your own text stays in one piece and is
    cut 90 : 5 : 5. Bytes are the file's, whatever it is.
    """
    folder, files = "text_file", dict(text=text)
    if text is None:
        folder, url, checksum = known("data set", name, WIKITEXT)
        if not find(data, folder):
            download(url, data / Path(url).name, checksum)
        files = find(data, folder)
    if kind == "gpt2":
        for file, checksum in GPT2.items():
            if not (data / "gpt2" / file).exists():
                download(f"{GPT2_FROM}/{file}", data / "gpt2" / file, checksum)
        tokenizer("gpt2", data)                         # a wrong one is refused before the work
    ids = {split: encode_file(path, kind, data, text is None, workers)
           for split, path in files.items()}
    if text is not None:
        n = len(ids["text"])
        ids = dict(zip(SPLITS, np.split(ids["text"], [round(0.9 * n), round(0.95 * n)])))
        if min(map(len, ids.values())) < 2:
            raise ValueError(f"{text} has {n} tokens, too few for train, valid and test: give a "
                             "longer text")
    splits = {split: dict(tokens=len(array), source=str(files.get(split, text)))
              for split, array in ids.items()}
    header = dict(tokenizer=kind, vocabulary=TOKENIZERS[kind], dtype="uint16", splits=splits)
    write_arrays(data / folder / f"{kind}.bin", ids, **header)
    return header


def find(data, folder):
    """A WikiText's {split: path}, all of one place: plain before zipped, raw before tokens."""
    bases = [data / f"{folder}-raw", data / folder, data]
    for base, ending in product(bases[:2], ("raw", "tokens")):
        paths = {split: base / f"wiki.{split}.{ending}" for split in SPLITS}
        there = {split: path for split, path in paths.items() if path.exists()}
        if {"train", "valid"} <= there.keys():
            return there                                                # test may be missing
        if "train" in there or "valid" in there:
            raise ValueError(f"{base} has one of {paths['train'].name} and {paths['valid'].name}, "
                             "but both are needed")
    for path in (path for base in bases for path in sorted(base.glob(f"{folder}*.zip"))):
        try:
            with zipfile.ZipFile(path) as file:
                packed = {info.filename: info.compress_type for info in file.infolist()}
            there = {split: zipfile.Path(path, member) for split in SPLITS for member in packed
                     if re.search(rf"(^|/)wiki\.{split}\.(raw|tokens)$", member)}
        except Exception:                                               # a decoder has its own
            raise ValueError(f"{path} is not a whole zip file: remove it, prepare again") from None
        bounded = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if any(packed[member.at] not in bounded for member in there.values()):
            raise ValueError(f"{path}: its texts are packed in a way that Python unpacks without a "
                             "bound; pack them by deflate")
        if {"train", "valid"} <= there.keys():
            return there
    return {}


def encode_file(path, kind, data, lines, workers=1):
    """A text file's ids, uint16; the workers take parts of a few megabytes."""
    try:
        with path.open("rb") as file:
            zipped = isinstance(path, zipfile.Path)
            raw = unpacked(file, LARGEST).getvalue() if zipped else file.read()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:                                          # of a zip file's decoder
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: no whole member of a zip file ({why})") from None
    if not raw.strip():
        raise ValueError(f"{path} is empty: there is nothing to learn from")
    if kind == "bytes":
        return np.frombuffer(raw, np.uint8).astype(np.uint16)
    ends = cuts(raw, lines)
    encode = partial(encode_part, str(path), data, lines)               # zipfile.Path: no pickle
    parts = ((start, raw[start:end]) for start, end in pairwise(ends))
    ids = spread(encode, parts, min(workers, len(ends) - 1))
    return np.concatenate([*tqdm(ids, path.name, len(ends) - 1, unit="part", ncols=100)])


def encode_part(path, data, lines, part):
    start, raw = part
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        at, name = error.start, Path(path).name
        raise ValueError(f"{path} is not UTF-8: byte {start + at} is 0x{raw[at]:02x}. Convert it, "
                         f"for example with: iconv -f latin1 -t utf-8 {name} > utf8.txt, or use "
                         "--bytes") from None
    bpe = tokenizer("gpt2", data)                                       # made once a process
    if not lines:
        return np.array(bpe.encode(text), np.uint16)
    ids = ((*bpe.encode(line), bpe.start) for line in re.findall(".+\n?", text) if line.strip())
    return np.array(list(chain.from_iterable(ids)), np.uint16)


def cuts(raw, lines, size=1 << 22):
    """Where a file may be cut without changing its ids: after a line, if lines are encoded so.

    Else before a line end that follows something visible, since no word of GPT-2's goes on from
    there into white space; elsewhere in white space its last blank belongs to the next word.
    """
    found = [0]
    for line_end in re.finditer(rb"\r?\n", raw):
        at = line_end.end() if lines else line_end.start()
        if at - found[-1] >= size:
            before = raw[max(0, at - 4):at].decode(errors="ignore")[-1:]        # one character
            if lines or not before.isspace():
                found.append(at)
    return [*found, len(raw)]


def read_tokens(folder, kind, split, command):
    """The ids of a split, memory-mapped, checked against the header; None if there is none."""
    path, again = folder / f"{kind}.bin", f"make it with: {command}"
    try:
        header, arrays = read_arrays(path, {split: np.uint16})
    except FileNotFoundError:
        raise Missing(f"there is no {path}: {again}") from None
    except ValueError as error:
        raise ValueError(f"{error}: {again}") from None
    name, size, ids = header.get("tokenizer"), header.get("vocabulary"), arrays.get(split)
    if (name, size) != (kind, TOKENIZERS[kind]):
        raise ValueError(f"{path} is of tokens of {name} ({size} of them), not of {kind}: {again}")
    if ids is not None and ids.max() >= size:
        raise ValueError(f"{path}, {split}: token {ids.argmax():,} is {ids.max()}, beyond the "
                         f"{size} of {kind}; {again}")
    return ids

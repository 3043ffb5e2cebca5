"""Text to tokens and back, for lm.py: GPT-2's byte-pair encoding from scratch, plain bytes, and the files that hold them.

  1. tokenizers   BPE(encoder.json, vocab.bpe) gives GPT-2's own ids; Bytes needs no vocabulary at all
  2. token files  prepare makes them from WikiText or any text; read_tokens maps them into memory

A tokenizer has encode(text) -> list of int and decode(ids) -> str. A folder of token files holds, per tokenizer, one
uint16 file for each of train, valid and test, and a header in JSON that names tokenizer, counts and checksums.
"""
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import unicodedata
import zipfile
from contextlib import nullcontext
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
from tqdm import tqdm

from files.downloads import download, unpacked
from files.whole import write
from machine.errors import known


# --------------------------------------------------------------------------------------------------- 1. tokenizers

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
    return re.compile(f"'s|'t|'re|'ve|'m|'ll|'d| ?[{L}]+| ?[{N}]+| ?[^{WHITE}{L}{N}]+|"
                      f"[{WHITE}]+(?![^{WHITE}])|[{WHITE}]+")                   # the last blank goes with the next word


def utf8(text):
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the text is the lone surrogate U+{ord(text[error.start]):04X}, which "
                         "no UTF-8 can hold: read the text with its true encoding, or remove it") from None


def short_text(path, most=1 << 22):
    """A vocabulary or a header, which are a megabyte at the most; nothing else gets the memory to be parsed."""
    with open(path, encoding="utf-8") as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"{path} has more than {most:,} characters")
    return text


class Bytes:
    """The 256 bytes of UTF-8 as tokens: nothing to download. A text starts after `start`; `silent` is never shown."""
    start, silent = ord("\n"), None

    def encode(self, text):
        return list(utf8(text))

    def raw(self, ids):
        return bytes([*ids])                                                    # of an array, its numbers

    def decode(self, ids):
        return self.raw(ids).decode(errors="replace")


class BPE(Bytes):
    """GPT-2's byte-pair encoding (Radford et al. 2019): a word's bytes, merged pair by pair, the earliest merge first.

    encoder.json holds token -> id, vocab.bpe the merges in order; both write a byte as a printable character. Every text
    comes back whole from decode(encode(text)); "<|endoftext|>" written in a text is text, not the token.
    """

    def __init__(self, encoder_json, vocab_bpe):
        plain = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]           # written as themselves,
        byte = {chr(b): b for b in plain}
        byte |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in plain)}    # others from 256 on
        try:
            ids = json.loads(short_text(encoder_json))
            first, *lines = short_text(vocab_bpe).splitlines()
            *tokens, end = sorted(ids, key=ids.get)
            self.tokens = [bytes(byte[c] for c in token) for token in tokens]               # id -> bytes
            self.id = {token: i for i, token in enumerate(self.tokens)}
            merges = [tuple(bytes(byte[c] for c in part) for part in line.split()) for line in lines]
            self.rank = {(a, b): i for i, (a, b) in enumerate(merges)}
            right = (end == "<|endoftext|>" and sorted(ids.values()) == list(range(257 + len(merges))) and first[0] == "#"
                     and all(token in self.id for token in (*(bytes([b]) for b in range(256)), *map(b"".join, merges))))
        except OSError as error:
            raise ValueError(f"cannot read {error.filename}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            right = False
        if not right:
            raise ValueError(f"{encoder_json} and {vocab_bpe} are not the two halves of GPT-2's vocabulary: move them away, "
                             "and `python lm.py prepare wikitext2` gets the right ones")
        self.start = self.silent = len(self.tokens)                             # end of text, 50256
        self.tokens.append(end.encode())
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


@cache
def tokenizer(name, folder):
    """The tokenizer of that name, its files read from folder/gpt2."""
    known("tokenizer", name, TOKENIZERS)
    if name == "bytes":
        return Bytes()
    paths = [folder / "gpt2" / file for file in GPT2]
    if not all(path.exists() for path in paths):
        raise ValueError(f"{paths[0].parent} lacks {' or '.join(GPT2)}: `python lm.py prepare wikitext2 --data {folder}` "
                         "gets them; --data names another folder; bytes need none")
    bpe = BPE(*paths)
    if bpe.encode("Hello world") != [15496, 995] or len(bpe.tokens) != TOKENIZERS[name]:
        raise ValueError(f"{paths[0]} is a vocabulary, but not GPT-2's ('Hello world' is {bpe.encode('Hello world')}, "
                         f"not [15496, 995], or its {len(bpe.tokens)} tokens are not {TOKENIZERS[name]}): move the files in "
                         f"{paths[0].parent} away and prepare again")
    return bpe


# -------------------------------------------------------------------------------------------------- 2. token files

WIKITEXT = {    # name: folder, and where the raw text comes from, its SHA-256
    "wikitext103": ("wikitext-103", "https://wikitext.smerity.com/wikitext-103-raw-v1.zip",
                    "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794"),
    "wikitext2": ("wikitext-2", "https://wikitext.smerity.com/wikitext-2-raw-v1.zip",
                  "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
}
SPLITS = ("train", "valid", "test")
LARGEST = 1 << 30                                                               # bytes of a zipped text; WikiText-103 is half


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
            download(url, data / Path(url).name, checksum)
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
                download(url, path, checksum)
        tokenizer(kind, data)                                                   # refuses a wrong one before the work
    ids = {split: encode_file(path, kind, data, text is None, workers, quiet) for split, path in files.items()}
    if text is not None:
        whole = ids.pop("text")
        a, b = round(0.9 * len(whole)), round(0.95 * len(whole))
        ids = {"train": whole[:a], "valid": whole[a:b], "test": whole[b:]}
        if len(ids["test"]) < 2 or len(ids["valid"]) < 2:
            raise ValueError(f"{text} has {len(whole)} tokens, too few for train, valid and test: give a longer text")
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
        if paths["train"].exists() != paths["valid"].exists():
            raise ValueError(f"{base} has one of {paths['train'].name} and {paths['valid'].name}, but both are needed")
        if paths["train"].exists():
            return {split: path for split, path in paths.items() if path.exists()}      # test may be missing
    for path in (path for base in bases for path in sorted(base.glob(f"{folder}*.zip"))):
        try:
            with zipfile.ZipFile(path) as file:
                packed = {info.filename: info.compress_type for info in file.infolist()}
            paths = {split: zipfile.Path(path, member) for split in SPLITS for member in packed
                     if re.search(rf"(^|/)wiki\.{split}\.(raw|tokens)$", member)}
        except Exception:                                                       # a decoder has exceptions of its own
            raise ValueError(f"{path} is not a whole zip file: remove it and prepare again") from None
        if any(packed[member.at] not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in paths.values()):
            raise ValueError(f"{path}: its texts are packed in a way that Python unpacks without a bound; pack them by deflate")
        if "train" in paths and "valid" in paths:
            return paths
    return {}


def encode_file(path, kind, folder, lines, workers=None, quiet=False):
    """A text file's ids, uint16; one worker per core, each with parts of a few megabytes."""
    try:
        with path.open("rb") as file:
            raw = unpacked(file, LARGEST).getvalue() if isinstance(path, zipfile.Path) else file.read()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:                                                  # of a zip file's decoder
        raise ValueError(f"{path}: no whole member of a zip file ({type(error).__name__}: {error})") from None
    if not raw.strip():
        raise ValueError(f"{path} is empty: there is nothing to learn from")
    if kind == "bytes":
        return np.frombuffer(raw, np.uint8).astype(np.uint16)
    ends = cuts(raw, lines)
    jobs = ((str(path), start, raw[start:end], kind, folder, lines)             # no zipfile.Path can be pickled before 3.12
            for start, end in itertools.pairwise(ends))
    workers = min(workers or os.cpu_count(), len(ends) - 1)
    ignore = (signal.signal, (signal.SIGINT, signal.SIG_IGN))                   # Ctrl-C is for the parent alone
    with multiprocessing.Pool(workers, *ignore) if workers > 1 else nullcontext() as pool:
        parts = pool.imap(encode_part, jobs) if pool else map(encode_part, jobs)
        return np.concatenate(list(tqdm(parts, path.name, len(ends) - 1, unit="part", ncols=100, disable=quiet)))


def encode_part(job):
    path, start, raw, kind, folder, lines = job
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {start + error.start} is 0x{raw[error.start]:02x}. Convert it, for "
                         f"example with: iconv -f latin1 -t utf-8 {Path(path).name} > utf8.txt, or use --bytes") from None
    bpe = tokenizer(kind, folder)                                               # made once a process
    if not lines:
        return np.array(bpe.encode(text), np.uint16)
    ids = ((*bpe.encode(line), bpe.start) for line in re.findall(".+\n?", text) if line.strip())
    return np.array(list(itertools.chain.from_iterable(ids)), np.uint16)


def cuts(raw, lines, size=1 << 22):
    """Where a file may be cut without changing its ids: after a line, if lines are encoded one by one.

    Else before a line end that follows something visible, since no word of GPT-2's goes on from there into white space;
    elsewhere in white space it would matter, for its last blank belongs to the next word.
    """
    found = [0]
    for line_end in re.finditer(rb"\r?\n", raw):
        at = line_end.end() if lines else line_end.start()
        if at - found[-1] >= size and (lines or not raw[max(0, at - 4):at].decode(errors="ignore")[-1:].isspace()):
            found.append(at)
    return [*found, len(raw)] if found[-1] < len(raw) else found


def read_tokens(folder, kind, split, command):
    """The ids of a split, memory-mapped, checked against the header; None if there is no such split."""
    path, again = folder / f"{kind}.json", f"make it with: {command}"
    try:
        header = json.loads(short_text(path))
        found, entry = (header["tokenizer"], header["vocabulary"]), header["splits"].get(split)
        count, checksum = (entry["tokens"], entry["sha256"]) if entry else (0, None)
        size = 2 * count
    except FileNotFoundError:
        raise ValueError(f"there is no {path}: {again}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is not the header of a token file: {again}") from None
    if found != (kind, TOKENIZERS[kind]):
        raise ValueError(f"{path} belongs to tokens of {found[0]} ({found[1]} of them), not of {kind}: {again}")
    if entry is None:
        return None
    path = folder / f"{kind}.{split}.bin"
    ids = np.memmap(path, np.uint16, "r") if path.exists() and path.stat().st_size == size > 0 else None
    if ids is None or hashlib.sha256(ids).hexdigest() != checksum:
        raise ValueError(f"{path} is not the file of {count} tokens that its header describes: it is damaged or half "
                         f"replaced; {again}")
    if (largest := ids.max()) >= TOKENIZERS[kind]:
        raise ValueError(f"{path}: token {ids.argmax():,} is {largest}, beyond the {TOKENIZERS[kind]} of {kind}; {again}")
    return ids

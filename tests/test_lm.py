"""Tokens against a slow reference and GPT-2's own ids; the model against itself in every form.

GRIL_DATA=DIR adds the real DIR/gpt2/ and DIR/wikitext-2/wiki.{train,valid}.tokens.
"""
import contextlib
import functools
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import unicodedata
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lm
from baselines import (LRU, MLP, S5, Attention, Filtered, Longhorn, Mamba, Mixer, RecurrentBlock,
                       parameters)
from files import runs, tokens
from files.tokens import BPE, Bytes, cuts, encode_file, prepare, splitter
from gril import GrilMixer
from lm import LM, RECIPES, HeadLoss, LanguageModel, as_text, generate
from machine import cost
from machine.errors import Missing
from test_baselines import leaves
from test_gril import agree
from test_lra import ROUNDS, fuzz, modules

f64 = torch.float64
refuses = functools.partial(pytest.raises, ValueError)
MODELS = lm.models()
SPLITS = "train", "valid", "test"
DATA = Path(os.environ.get("GRIL_DATA", "/nowhere"))
GPT2 = DATA / "gpt2" / "encoder.json", DATA / "gpt2" / "vocab.bpe"
TEXT = DATA / "wikitext-2" / "wiki.valid.tokens"
real = pytest.mark.skipif(not GPT2[1].exists(), reason="GRIL_DATA has no gpt2/vocab.bpe")
real_wikitext = pytest.mark.skipif(not (GPT2[1].exists() and TEXT.exists()),
                                   reason="GRIL_DATA has no wikitext-2")


# --------------------------------------------------------------------------- vocabularies and texts

@functools.cache
def symbols():
    """How GPT-2's files write each byte, in the order of its ids: printable ones, then others."""
    ranges = [("!", "~"), ("¡", "¬"), ("®", "ÿ")]
    printable = [b for first, last in ranges for b in range(ord(first), ord(last) + 1)]
    others = [b for b in range(256) if b not in printable]
    return {**{b: chr(b) for b in printable}, **{b: chr(256 + i) for i, b in enumerate(others)}}


def spelled(text):
    return "".join(symbols()[b] for b in text.encode())


def write_vocabulary(folder, merges):
    """encoder.json and vocab.bpe with these merges, pairs of strings in the files' own spelling."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [*symbols().values(), *map("".join, merges), "<|endoftext|>"]
    (folder / "encoder.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    lines = ["#version: 0.2", *map(" ".join, merges), ""]
    (folder / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    return folder / "encoder.json", folder / "vocab.bpe"


def learned(text, count):
    """Merges as byte-pair encoding learns them: the most frequent pair of each round."""
    words, merges = [" ".join(spelled(word)) for word in reference_words(text)], []
    for _ in range(count):
        pairs = [pair for word in words for pair in pairwise(word.split())]
        pair = max(sorted(set(pairs)), key=pairs.count)
        merges.append(pair)
        found = rf"(?<!\S){re.escape(' '.join(pair))}(?!\S)"
        words = [re.sub(found, "".join(pair), word) for word in words]
    return merges


def hello_world():
    """50,000 merges of which those of 'Hello world' mean anything, the words at GPT-2's ids."""
    early = [(word[:i], word[i]) for word in ("Hell", "Ġworl") for i in range(1, len(word))]
    filler = ((a, b) for a in symbols().values() for b in symbols().values() if (a, b) not in early)
    merges = early + [next(filler) for _ in range(50_000 - len(early) - 2)]
    merges.insert(995 - 256, ("Ġworl", "d"))
    merges.insert(15496 - 256, ("Hell", "o"))
    return merges


SPACES = {*map(chr, (*range(9, 14), *range(0x2000, 0x200b))),    # Unicode's White_Space
          *" \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"}
ENDINGS = ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"]


def kind(c):
    letter = unicodedata.category(c)[0]
    return "S" if c in SPACES else letter if letter in "LN" else "other"


def reference_words(text):
    """GPT-2's words, scanned character by character."""
    words, i = [], 0
    while i < len(text):
        end = next((i + len(s) for s in ENDINGS if text.startswith(s, i)), i)
        j = i + (text[i] == " " and i + 1 < len(text))          # a blank in front belongs to a word
        if end == i and kind(text[j]) != "S":
            end = j
            while end < len(text) and kind(text[end]) == kind(text[j]):
                end += 1
        elif end == i:
            while end < len(text) and kind(text[end]) == "S":
                end += 1
            end -= end < len(text) and end - i > 1      # the last is left to the word behind
        words.append(text[i:end])
        i = end
    return words


@functools.cache
def read_vocabulary(encoder_json, vocab_bpe):
    merges = vocab_bpe.read_text(encoding="utf-8").splitlines()[1:]
    rank = {tuple(line.split()): i for i, line in enumerate(merges)}
    return json.loads(encoder_json.read_text()), rank


def reference_ids(text, encoder_json, vocab_bpe):
    """One merge at a time: of all pairs the earliest merge, of those the leftmost."""
    (ids, rank), out = read_vocabulary(encoder_json, vocab_bpe), []
    for word in reference_words(text):
        parts = list(spelled(word))
        while True:
            found = [(rank[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in rank]
            if not found:
                break
            i = min(found)[1]
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        out += [ids[part] for part in parts]
    return out


ALPHABETS = ("abcdeHlo wr'sdtmv", " \n\t\r\x0b\x85\xa0\u2003\u3000\x1c\x1f", "½Ⅳ²3٣৪",
             "éßдЖ한年ーª", "🦞🏽👩‍🚀é́", "\x00\x01\x7f\xad\u200b\ufeff", "=<>|_-.,!?…", "the and of aaa")


def random_text(seed, n=400):
    draw = random.Random(seed)
    pieces = [draw.choice(draw.choice(ALPHABETS)) for _ in range(n)]
    points = [draw.randrange(0x110000) for _ in range(n // 4)]
    pieces += [chr(c) for c in points if not 0xd800 <= c < 0xe000]
    draw.shuffle(pieces)
    return "".join(pieces)


CORPUS = ("the lobster and the crab saw the sea; they'll see the other lobsters' sea. " * 3
          + "年年年 éé \n\n\n  the end")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_vocabulary(tmp_path_factory.mktemp("small"), learned(CORPUS, 40))


# ------------------------------------------------------------------------------- byte-pair encoding

def test_words_of_every_character():
    points = *range(0xd800), *range(0xe000, 0x40000), *range(0xe0000, 0xe0200), 0x10ffff
    text = "".join(map(chr, points))
    assert splitter().findall(text) == reference_words(text)


@pytest.mark.parametrize("text, words", (
    ("x²½Ⅳ3 年2", ["x", "²½Ⅳ3", " 年", "2"]),
    ("we'll  go\n\n now'S", ["we", "'ll", " ", " go", "\n\n", " now", "'", "S"]),
    ("a\x1cb \x1c\x85 ", ["a", "\x1c", "b", " \x1c", "\x85 "]),   # \x1c is no white space
    ("a \n ", ["a", " \n "]),
    *((f"x{ending}a", ["x", ending, "a"]) for ending in ENDINGS)))
def test_words_by_hand(text, words):
    assert splitter().findall(text) == words


@pytest.mark.parametrize("seed", range(20))
def test_ids_are_those_of_the_slow_reference_and_come_back(seed, small):
    text, bpe = random_text(seed), BPE(*small)
    assert bpe.encode(text) == reference_ids(text, *small)
    assert bpe.decode(bpe.encode(text)) == text and Bytes().decode(Bytes().encode(text)) == text


def test_merges_happen_in_the_small_vocabulary(small):
    bpe = BPE(*small)
    ids = bpe.encode(CORPUS)
    assert ids == reference_ids(CORPUS, *small)
    assert len(ids) < 0.5 * len(CORPUS.encode()) and max(ids) > 256
    assert bpe.encode("") == [] and bpe.decode([]) == ""
    assert bpe.encode("<|endoftext|>") != [bpe.start] and bpe.decode([bpe.start]) == "<|endoftext|>"


@real
def test_known_ids():
    bpe = BPE(*GPT2)
    assert bpe.encode("Hello world") == [15496, 995]
    assert bpe.encode("Hello, my dog is cute") == [15496, 11, 616, 3290, 318, 13779]
    assert bpe.encode("<|endoftext|>") == [27, 91, 437, 1659, 5239, 91, 29]
    assert bpe.encode("\n\n") == [628] and bpe.encode(" \n") == [220, 198] and bpe.start == 50256
    for seed in range(20):
        text = random_text(seed)
        ids = bpe.encode(text)
        assert ids == reference_ids(text, *GPT2) and bpe.decode(ids) == text


@real_wikitext
def test_whole_valid_file():
    text, bpe = TEXT.read_bytes().decode(), BPE(*GPT2)
    ids = bpe.encode(text)
    assert len(ids) == 258_659 and bpe.decode(ids) == text


@pytest.mark.slow
@real_wikitext
def test_whole_train_file_serial_and_in_parallel():
    path = DATA / "wikitext-2" / "wiki.train.tokens"
    ids = BPE(*GPT2).encode(path.read_bytes().decode())
    assert len(ids) == 2_448_382
    parallel = encode_file(path, "gpt2", DATA, lines=False, workers=2)
    assert np.array_equal(parallel, np.array(ids, np.uint16))
    lines = encode_file(path, "gpt2", DATA, lines=True, workers=2)
    assert len(lines) == 2_446_247 and (lines == 50256).sum() == sum(
        bool(line.strip()) for line in path.read_bytes().decode().split("\n"))


@pytest.mark.parametrize("seed", range(10))
def test_a_file_cut_anywhere_it_may_be_has_the_same_ids(seed, small):
    text, bpe = random_text(seed, 600), BPE(*small)
    text = text.replace("a", "a\r\n").replace("年", "年\n")
    raw = text.encode()
    ends = cuts(raw, lines=False, size=1)
    assert len(ends) > 5 and ends[0] == 0 and ends[-1] == len(raw)
    parts = [bpe.encode(raw[a:b].decode()) for a, b in zip(ends, ends[1:])]
    assert sum(parts, []) == bpe.encode(text)
    ends = cuts(raw, lines=True, size=40)
    assert all(raw[end - 1:end] == b"\n" for end in ends[1:-1])
    assert all(b - a >= 40 for a, b in zip(ends, ends[1:-1]))


def test_lone_surrogates_are_refused(small):
    for encode in (BPE(*small).encode, Bytes().encode):
        with refuses(match=r"character 3 .* U\+D83E"):
            encode("abc\ud83e")


def test_other_vocabularies_are_refused(tmp_path):
    encoder, merges = write_vocabulary(tmp_path, [("a", "b")])
    good = encoder.read_text()
    ids = json.loads(good)

    def refused(*paths, message="not the two halves of GPT-2's vocabulary.*prepare wikitext2"):
        with refuses(match=message):
            BPE(*paths)
    BPE(encoder, merges)
    refused(merges, encoder)
    refused(tmp_path / "nothing.json", merges, message="cannot read .*nothing.json")
    for damage in ("{", json.dumps(list(ids)), json.dumps(ids | {"ab": 400}),       # a hole
                   json.dumps(ids | {"<|endoftext|>": 0, "!": 257}),                # another end
                   good.replace("<|endoftext|>", "<|end|>"),
                   "[" * 100_000, " " * (5 << 20) + good):      # too deep; JSON, but more than 4 MB
        encoder.write_text(damage)
        refused(encoder, merges)
    encoder.write_text(good)
    merges.write_text("#version: 0.2\na c\n")                   # a merge without its token
    refused(encoder, merges)


# -------------------------------------------------------------------------------------- token files

WIKI = (" \n = Lobster = \n \n The lobster is blue ; Hello world . \n It lives in the sea . \n"
        " \n\n = Crab = \n \n Crabs walk . \n")


def write_wiki(folder, ending="tokens", splits=SPLITS):
    folder.mkdir(parents=True, exist_ok=True)
    for i, split in enumerate(splits):
        (folder / f"wiki.{split}.{ending}").write_text(WIKI * (2 + i), newline="\n")


def zipped(path, text=WIKI, prefix="raw/", packing=zipfile.ZIP_DEFLATED, splits=SPLITS[:2]):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", packing) as archive:
        for i, split in enumerate(splits, 1):
            archive.writestr(f"{prefix}wiki.{split}.raw", text * i)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    """A full-size vocabulary that passes for GPT-2's."""
    folder = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(folder / "gpt2", hello_world())
    return folder


def with_vocabulary(data, vocabulary):
    data.mkdir(exist_ok=True)
    (data / "gpt2").symlink_to(vocabulary / "gpt2")
    return data


def test_prepare_wikitext(tmp_path, vocabulary):
    """Lines by themselves, end of text after each, blank ones dropped."""
    write_wiki(tmp_path / "wikitext-2")
    header = prepare("wikitext2", with_vocabulary(tmp_path, vocabulary))
    bpe = tokens.tokenizer("gpt2", tmp_path)
    lines = [line + "\n" for line in WIKI.split("\n") if line.strip()]
    expected = [i for line in lines for i in bpe.encode(line) + [50256]]
    for n, split in enumerate(SPLITS):
        ids = LM["wikitext2"](tmp_path).tokens(split)
        assert ids.dtype == np.uint16 and ids.tolist() == expected * (2 + n)
        assert header["splits"][split]["tokens"] == len(ids) and header["tokenizer"] == "gpt2"
    assert 15496 in expected and 995 in expected and expected.count(50256) == 5
    assert not list(tmp_path.rglob("*.part"))


def test_prepare_reads_zip_files_raw_before_tokens_and_bytes(tmp_path):
    zipped(tmp_path / "wikitext-103-raw-v1.zip", splits=SPLITS)
    prepare("wikitext103", tmp_path, kind="bytes")
    task = LM["wikitext103"](tmp_path, **RECIPES["bytes"])
    for i, split in enumerate(SPLITS, 1):
        assert Bytes().decode(task.tokens(split)) == WIKI * i
    assert task.has_test
    write_wiki(tmp_path / "wikitext-103", splits=("train", "valid"))        # plain files come first
    header = prepare("wikitext103", tmp_path, kind="bytes")
    assert header["splits"]["train"]["source"].endswith("wiki.train.tokens")
    assert task.tokens("test") is None and not task.has_test
    for folder in ("wikitext-103", "wikitext-103-raw"):             # raw ones before, in one folder
        write_wiki(tmp_path / folder, "raw")
        header = prepare("wikitext103", tmp_path, kind="bytes")
        assert {entry["source"] for entry in header["splits"].values()} == {
            str(tmp_path / folder / f"wiki.{split}.raw") for split in SPLITS}
    (tmp_path / "wikitext-103-raw" / "wiki.valid.raw").unlink()
    with refuses(match="both are needed"):
        prepare("wikitext103", tmp_path, kind="bytes")


def test_a_zip_file_is_encoded_in_parallel(tmp_path, vocabulary, monkeypatch):
    zipped(tmp_path / "wikitext-2-raw-v1.zip", WIKI * 20)
    monkeypatch.setattr(tokens, "cuts", functools.partial(cuts, size=200))
    with_vocabulary(tmp_path, vocabulary)
    for workers in (1, 2):
        prepare("wikitext2", tmp_path, workers=workers)
        ids = LM["wikitext2"](tmp_path).tokens("train").tolist()
        assert ids == [*ids[:len(ids) // 20]] * 20 and ids.count(50256) == 20 * 5


def test_a_text_of_ones_own_in_parts_and_in_parallel(tmp_path, vocabulary, monkeypatch):
    text = "".join(random_text(seed, 200) + "visible\n" for seed in range(20))
    (tmp_path / "my.txt").write_bytes(text.encode())
    monkeypatch.setattr(tokens, "cuts", functools.partial(cuts, size=1000))
    assert len(tokens.cuts(text.encode(), False)) > 5
    whole = tokens.tokenizer("gpt2", vocabulary).encode(text)
    for workers in (1, 2):
        data = with_vocabulary(tmp_path / str(workers), vocabulary)
        prepare(None, data, tmp_path / "my.txt", workers=workers)
        task = LM["text_file"](data)
        parts = [task.tokens(split).tolist() for split in SPLITS]
        assert sum(parts, []) == whole
        assert [round(20 * len(part) / len(whole)) for part in parts] == [18, 1, 1]


def test_bad_texts(tmp_path, vocabulary, monkeypatch):
    with_vocabulary(tmp_path, vocabulary)

    def refused(content, message, **options):
        (tmp_path / "my.txt").write_bytes(content)
        with refuses(match=message):
            prepare(None, tmp_path, tmp_path / "my.txt", **options)
        assert not (tmp_path / "text_file").exists()
    refused(b"", "my.txt is empty")
    refused(b" \n\n", "my.txt is empty", kind="bytes")
    refused(b"0123456\xe9 89", "my.txt is not UTF-8: byte 7 is 0xe9")
    refused(b"abc", "3 tokens, too few", kind="bytes")
    monkeypatch.setattr(tokens, "cuts", functools.partial(cuts, size=50))
    for workers in (1, 2):                                      # counted from the file's start
        refused(b"a line of text\n" * 40 + b"\xff\n", "byte 600 is 0xff", workers=workers)
    with refuses(match="cannot read .*none.txt"):
        prepare(None, tmp_path, tmp_path / "none.txt")
    with refuses(match="did you mean wikitext2"):
        prepare("wikitxt2", tmp_path)


def text_file(folder, text=None, **recipe):
    """A text_file task on bytes, its token files written."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "my.txt").write_text(text or "".join(random_text(seed) for seed in range(8)))
    prepare(None, folder, text=folder / "my.txt", kind="bytes")
    small = dict(RECIPES["bytes"], H=16, inner=16, P=8, J=2, layers=2, length=32, batch=4)
    torch.manual_seed(0)                                        # of a model made next
    return LM["text_file"](folder, **small, **recipe)


@pytest.fixture
def task(tmp_path):
    return text_file(tmp_path)


def test_damaged_token_files(task, tmp_path):
    file = tmp_path / "text_file" / "bytes.bin"
    header, ids = good = file.read_bytes().split(b"\n", 1)
    again = f"python lm.py prepare --text FILE --data {tmp_path} --bytes"

    def refused(message):
        with refuses(match=f"{message}.*{again}"):
            [task.tokens(split) for split in SPLITS]
    for damage in (b"", b"[]", b"{}", header[:50], header.replace(b"arrays", b"parts"),
                   b"[" * 100_000, b" " * (5 << 20) + header):          # too deep, too long
        file.write_bytes(damage + b"\n" + ids)
        refused("bytes.bin is damaged")
    header = header.replace(b'"bytes"', b'"gpt2"').replace(b'y": 256', b'y": 50257')
    file.write_bytes(header + b"\n" + ids)
    refused("tokens of gpt2 .50257 of them., not of bytes")
    header, ids = good
    for damage in (ids[:100] + bytes([ids[100] ^ 1]) + ids[101:], ids[:-1], ids[:-2], b""):
        file.write_bytes(header + b"\n" + damage)
        refused("bytes.bin is damaged")
    file.unlink()
    refused("there is no .*bytes.bin")
    with pytest.raises(Missing, match="there is no .*gpt2.bin"):
        LM["text_file"](tmp_path).tokens("train")


def test_ids_beyond_the_vocabulary_are_refused(task, tmp_path, vocabulary):
    def replace(task, kind, split, at, i):
        """The file with token i there, and a header that is right about it."""
        file, ids = tmp_path / f"text_file/{kind}.bin", np.array(task.tokens(split))
        header, content = file.read_bytes().split(b"\n", 1)
        before, ids[at] = ids.tobytes(), i
        sums = (str(zlib.crc32(x)).encode() for x in (before, ids))
        file.write_bytes(header.replace(*sums) + b"\n" + content.replace(before, ids.tobytes()))
    replace(task, "bytes", "train", 7, 256)
    again = "beyond the 256 of bytes; make it with: python lm.py"
    with refuses(match=f"bytes.bin, train: token 7 is 256, {again}"):
        task.tokens("train")
    prepare(None, with_vocabulary(tmp_path, vocabulary), tmp_path / "my.txt")
    task = LM["text_file"](tmp_path)
    replace(task, "gpt2", "valid", -1, 50256)
    assert task.tokens("valid")[-1] == 50256                                    # the last there is
    replace(task, "gpt2", "valid", -1, 50257)
    with refuses(match="gpt2.bin, valid: token .* is 50257, beyond the 50257 of gpt2"):
        task.tokens("valid")


@ROUNDS
def test_fuzzed_token_files_are_read_or_refused(tmp_path, monkeypatch, rounds):
    task = text_file(tmp_path / "data", LOBSTER)
    (tmp_path / "data/my.txt").unlink()

    def read():
        for split in SPLITS:
            ids = task.tokens(split)
            assert split == "test" or ids is not None
            assert ids is None or ids.dtype == np.uint16 and ids.ndim == 1 and ids.max() < 256
    fuzz(tmp_path / "data", rounds, read, monkeypatch)


@ROUNDS
def test_fuzzed_vocabularies_are_read_or_refused(tmp_path, monkeypatch, rounds):
    """One that is taken still gives every text back."""
    paths = write_vocabulary(tmp_path / "gpt2", learned(CORPUS, 40))

    def read():
        bpe = BPE(*paths)
        ids = bpe.encode(CORPUS)
        assert min(ids) >= 0 and max(ids) < len(bpe.tokens) == 297 and bpe.decode(ids) == CORPUS
    fuzz(tmp_path / "gpt2", rounds, read, monkeypatch)


@pytest.mark.filterwarnings("ignore")                                   # names twice in a list
@ROUNDS
def test_fuzzed_zip_files_are_read_or_refused(tmp_path, monkeypatch, rounds):
    zipped(tmp_path / "data/wikitext-2-raw-v1.zip")

    def read():
        for path in tokens.find(tmp_path / "data", "wikitext-2").values():
            ids = encode_file(path, "bytes", tmp_path, True)
            assert ids.dtype == np.uint16 and ids.max() < 256
    fuzz(tmp_path / "data", rounds, read, monkeypatch)


def test_zip_files_that_would_take_the_memory_or_lead_elsewhere(tmp_path, monkeypatch):
    path = tmp_path / "data/wikitext-2-raw-v1.zip"

    def found(prefix, packing=zipfile.ZIP_DEFLATED):
        zipped(path, "x" * 100_000, prefix, packing)
        return prepare("wikitext2", tmp_path / "data", kind="bytes")
    names = {path.name, "bytes.bin"}
    for prefix in ("", "/", "../../", f"{tmp_path}/"):          # members are read, never unpacked
        assert found(prefix)["splits"]["train"]["tokens"] == 100_000
        assert {file.name for file in tmp_path.rglob("*.*")} == names
    with refuses(match="wikitext-2-raw-v1.zip: .* pack them by deflate"):
        found("", zipfile.ZIP_LZMA)
    monkeypatch.setattr(tokens, "LARGEST", 99_999)
    with refuses(match="raw-v1.zip/.*wiki.train.raw: .*unpacks to more than 99,999 bytes"):
        found("")


@pytest.mark.parametrize("nth", (1, 2, 3, 4))
def test_a_disk_that_fills_up_leaves_the_old_preparation_or_the_new(task, tmp_path, monkeypatch,
                                                                    nth):
    """At the nth write: all splits change together, or none."""
    def splits():
        return [task.tokens(split).tolist() for split in SPLITS]
    text, old, calls = "another text " * 100, splits(), []

    def fsync(file):
        calls.append(file)
        if len(calls) == nth:
            raise OSError(28, "No space left on device")
    (tmp_path / "my.txt").write_text(text)
    monkeypatch.setattr(os, "fsync", fsync)
    words = f"prepare --text {tmp_path}/my.txt --bytes --data {tmp_path}"
    with contextlib.suppress(SystemExit):
        lm.main(words.split())
    new = np.split(np.frombuffer(text.encode(), np.uint8), [1170, 1235])
    expected = old if len(calls) == nth else [part.tolist() for part in new]
    assert splits() == expected and not list(tmp_path.rglob("*.part"))


def test_downloads(tmp_path, monkeypatch):
    served, data = tmp_path / "served/wikitext-2-raw-v1.zip", tmp_path / "data"
    zipped(served)
    content = served.read_bytes()
    url, checksum = served.as_uri(), hashlib.sha256(content).hexdigest()
    for address, expected, message in (
            (url, "0" * 64, "its sha256 is"),
            ("http://localhost:9/x.zip", checksum, r"could not download .*\n  curl -L -o .*x.zip")):
        monkeypatch.setitem(tokens.WIKITEXT, "wikitext2", ("wikitext-2", address, expected))
        with refuses(match=message):
            prepare("wikitext2", data, kind="bytes")
        assert not list(data.rglob("*.*"))
    monkeypatch.setitem(tokens.WIKITEXT, "wikitext2", ("wikitext-2", url, checksum))
    assert prepare("wikitext2", data, kind="bytes")["splits"]["train"]["tokens"] == len(WIKI)
    (data / served.name).write_bytes(content[:100])
    with refuses(match="not a whole zip file"):
        prepare("wikitext2", data, kind="bytes")


@pytest.mark.parametrize("larger", (False, True))
def test_a_vocabulary_of_the_right_shape_that_is_not_gpt2s(tmp_path, larger):
    """One that is larger has ids beyond the model's embedding."""
    merges = [*hello_world(), ("Hello", "o")] if larger else learned(CORPUS, 20)
    write_vocabulary(tmp_path / "gpt2", merges)
    size = 257 + len(merges)
    with refuses(match=f"a vocabulary, but not GPT-2's .*its {size} tokens are not 50257"):
        tokens.tokenizer("gpt2", tmp_path)
    with refuses(match="lacks encoder.json or vocab.bpe.*prepare wikitext2"):
        tokens.tokenizer("gpt2", tmp_path / "elsewhere")


# ---------------------------------------------------------------------------------------- the model

def built(model="gril", layers=3, V=50, **options):
    torch.manual_seed(0)
    options = dict(H=16, inner=16, P=8, J=4) | options
    net = LanguageModel(V, layers, **options, model=model).to(f64).eval()
    with torch.no_grad():
        net.embed.weight.mul_(25)                       # logits that differ, so that a fault shows
    return net


def same_states(got, expected):
    pairs = enumerate(zip(leaves(got), leaves(expected), strict=True))
    agree(1e-10, **{f"state {i}": pair for i, pair in pairs if pair[1].numel()})    # w = 1: no past


def draw(B, T, seed=0):
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(seed))


def test_parameters_of_the_paper_and_of_every_row():
    with torch.device("meta"):
        task = LM["wikitext103"](**RECIPES["paper"])
        count, H, P = parameters(task.model()), 768, 128
        assert count == pytest.approx(task.paper_parameters, rel=0.01)
        formula = 50257 * H + 16 * (8 * H * H + 2 * P * H + 2 * P * P)
        assert count == pytest.approx(formula, rel=0.003)
        for name, recipe in RECIPES.items():
            task = LM["wikitext103"](**dict(recipe, layers=3))    # Griffin's pattern once
            nets = {model: task.model(model) for model in MODELS}
            counts = {model: parameters(net) - parameters(net.embed) for model, net in nets.items()}
            assert counts == pytest.approx(dict.fromkeys(MODELS, counts["gril"]), rel=0.01), name
            loss = task.loss(nets["gril"], task.example(1))
            assert loss.shape == () and loss.device.type == "meta"


def test_the_paper_recipe_is_that_of_the_paper():
    """App. F, and Table 2's 117M."""
    sizes = dict(layers=16, H=768, inner=768, P=128, J=32, length=1024, tokenizer="gpt2")
    training = dict(steps=230_000, warmup=16_000, lr=2e-3, weight_decay=0.05, batch=16)
    r = LM["wikitext103"].numbers("paper")
    assert {key: r[key] for key in (*sizes, *training)} == dict(sizes, **training)
    assert LM["wikitext103"].recipes is RECIPES and LM["wikitext103"].paper_parameters == 117e6
    assert r["recurrent_lr"] == r["lr"] / 4 and r["validate_tokens"] == r["report_tokens"] == 0
    assert r["patience"] > 0, "early stopping, by validation"


@pytest.mark.parametrize("size", RECIPES)
def test_recipes_choose_by_the_lowest_validation_score(size):
    Task = LM["wikitext103"]
    r, task = Task.numbers(size), Task(**Task.numbers(size))
    assert task.choose == dict(bytes="bits", gpt2="perplexity")[r["tokenizer"]] and not task.higher
    assert 0 < r["recurrent_lr"] < r["lr"] and 0 < r["warmup"] < r["steps"] and r["clip"] == 1
    assert r["report_tokens"] == 0 and not r["stateful"], "a report is of the whole text"
    assert RECIPES[size].items() <= r.items(), "a number that nobody declares is lost"


# Of each mixer: the frame around it, or not; what is inside; its window.
BUILT = {
    "gril":             (True, GrilMixer, 3),
    "gril_w1":          (True, GrilMixer, 1),
    "gril_alone":       (False, GrilMixer, 3),
    "linear_attention": (False, GrilMixer, 1),
    "filtered":         (True, Filtered, 1),
    "longhorn":         (False, Longhorn, None),
    "s5":               (True, S5, None),
    "lru":              (True, LRU, None),
    "mamba":            (False, Mamba, None),
    "griffin":          (False, RecurrentBlock, None),
    "transformer":      (False, Attention, None),
}


@pytest.mark.parametrize("model", MODELS)
def test_models_are_built_as_the_recipe_says(model):
    recipe = dict(RECIPES["bytes"], layers=6, H=128, inner=40, P=24, J=4, dropout=0.3)
    net = LM["text_file"]("/nonexistent", **recipe).model(model)
    framed, kind, w = BUILT[model]
    mixers = [block.mixer for block in net.layers[::2]]
    assert len(mixers) == 6 and all(isinstance(mixer, lm.Gated) == framed for mixer in mixers)
    inside = [mixer.mixer if framed else mixer for mixer in mixers]
    kinds = [kind, kind, Attention] * 2 if model == "griffin" else [kind] * 6
    assert [type(mixer) for mixer in inside] == kinds
    assert [drop.p for drop in modules(net, nn.Dropout)] == [0.3] * (1 + 2 * 6)
    assert isinstance(net.norm, nn.LayerNorm)
    assert net.embed.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert all(len(mixer.conv.W) == 3 for mixer in modules(net, lm.Gated))
    for mixer in modules(net, GrilMixer):
        assert mixer.Q.shape == (4, w, w) and mixer.W_in.weight.shape == (24, 128)
        assert (mixer.beta == torch.tensor(0.1)).all() and mixer.theta is not None
    for attention in modules(net, Attention):
        kv_heads, window = (1, 1024) if model == "griffin" else (2, np.inf)
        assert (attention.heads, attention.kv_heads, attention.window) == (2, kv_heads, window)
    for mixer in modules(net, S5):
        assert len(mixer.Lambda_im.unique()) == 3, "P = 24: 12 frequencies in four equal blocks"
    assert all(len(mixer.conv.W) == 3 for mixer in modules(net, Filtered))


@pytest.mark.parametrize("model", MODELS)
def test_the_mlps_make_every_layer_as_large_as_grils(model):
    with torch.device("meta"):
        net, gril = (LanguageModel(50, 3, H=64, inner=200, P=32, J=4, model=name)
                     for name in (model, "gril"))
    assert [mlp.W_1.out_features for mlp in modules(gril, MLP)] == [200] * 3
    for i in range(0, 6, 2):
        ours, theirs = (sum(parameters(layer) for layer in x.layers[i:i + 2]) for x in (net, gril))
        channel = 2 * 64 + 1                                    # of an MLP: half is rounded
        assert abs(ours - theirs) <= channel / 2, f"layer {i // 2}"


def test_the_frame_is_hyenas():
    """W_o(x0 ⊙ mixer(v ⊙ x1)), a filter of 3 in front of all three; the mixer here is a cube."""
    class Cube(Mixer):
        def run(self, x, state=None):
            return x ** 3, state
    torch.manual_seed(0)
    frame, z = lm.Gated(4, Cube()).to(f64), torch.randn(2, 7, 4, dtype=f64)
    padded = F.pad(z @ frame.W_3H.weight.mT, (0, 0, 2, 0))
    filtered = frame.conv.b + sum(frame.conv.W[i] * padded[:, i:i + 7] for i in range(3))
    v, x1, x0 = filtered.split(4, -1)
    expected, state, steps = (x0 * (v * x1) ** 3) @ frame.W_o.weight.mT, None, []
    for t in range(7):
        y, state = frame.step(z[:, t], state)
        steps.append(y)
    agree(1e-12, forward=(frame(z), expected), run=(frame.run(z)[0], expected),
          steps=(torch.stack(steps, 1), expected))


def test_the_last_norm_stands_before_the_head():
    net = built()
    x = net.embed.weight[draw(2, 9)]
    for layer in net.layers:
        x = layer(x)
    logits = F.layer_norm(x, (16,)) @ net.embed.weight.mT       # a norm starts without weights
    agree(1e-10, logits=(net.run(draw(2, 9))[0], logits))


def test_the_embedding_is_dropped_out_in_training():
    """A model without layers has no other dropout; what stays is larger by 1 / (1 - p)."""
    net, seen = built(layers=0, dropout=0.25), []
    with torch.no_grad():
        net.embed.weight.fill_(3.0)
    net.norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    net.run(draw(4, 250))
    net.train().run(draw(4, 250))
    whole, dropped = seen
    assert set(whole.flatten().tolist()) == {3} and set(dropped.flatten().tolist()) == {0, 4}
    share = (dropped == 0).double().mean()
    assert abs(share - 0.25) < 6 * (0.25 * 0.75 / dropped.numel()) ** 0.5


def test_the_head_is_the_embedding():
    net = built()
    assert sum(p.shape == (50, 16) for p in net.parameters()) == 1
    x = draw(2, 6).clamp(max=48)
    before = net.run(x)[0]
    with torch.no_grad():
        net.embed.weight[49] += torch.randn(16)         # the text lacks it: its logit alone changes
    changed = net.run(x)[0] != before
    assert not changed[..., :49].any() and changed[..., 49].all()


@pytest.mark.parametrize("model, layers, form", (
    *(("gril", 16, form) for form in ("loop", "scan", "chunk")),
    *((model, 3, "chunk") for model in MODELS)))
def test_causality_at_the_papers_depth(model, layers, form):
    """And of the other mixers in three layers."""
    net, x = built(model, layers, form=form), draw(1, 40)
    logits = net.run(x)[0]
    for t in (0, 1, 20, 38):
        other = x.clone()
        other[0, t + 1] = (x[0, t + 1] + 1) % 50
        changed = net.run(other)[0]
        agree(1e-12, before=(changed[:, :t + 1], logits[:, :t + 1]))
        assert (changed[:, t + 1] - logits[:, t + 1]).abs().max() > 1e-3


def test_forms_agree():
    results = [built(form=form).run(draw(2, 37)) for form in ("loop", "scan", "chunk")]
    for logits, state in results[1:]:
        agree(1e-10, logits=(logits, results[0][0]))
        same_states(state, results[0][1])


@pytest.mark.parametrize("model", MODELS)
def test_cuts_and_steps_are_the_whole(model):
    net, x = built(model), draw(2, 23)
    whole, end = net.run(x)
    for call, pieces, join in ((net.run, x.split([1, 2, 9, 11], 1), torch.cat),
                               (net.step, x.unbind(1), torch.stack)):
        state, parts = None, []
        for piece in pieces:
            logits, state = call(piece, state)
            parts.append(logits)
        agree(1e-10, **{join.__name__: (join(parts, 1), whole)})
        same_states(state, end)
    assert len(leaves(end)) >= 3, "every layer carries state"
    sizes = [sum(map(torch.numel, leaves(net.run(draw(2, T))[1]))) for T in (23, 46)]
    assert (sizes[1] > sizes[0]) == (model in ("transformer", "griffin"))    # with room yet
    assert net.constant == (model != "transformer")


@pytest.mark.parametrize("entries", (1, 50 * 7, 1 << 24))
def test_the_loss_in_parts_is_cross_entropy_with_its_gradients(entries):
    x, E = (torch.randn(n, 8, dtype=f64, requires_grad=True) for n in (23, 50))
    y = draw(1, 23)[0]
    expected = F.cross_entropy(x @ E.mT, y)
    got = HeadLoss.apply(x, E, y, True, entries)
    pairs = zip(torch.autograd.grad(3 * got, (x, E)), torch.autograd.grad(3 * expected, (x, E)))
    agree(1e-12, loss=(got, expected), **dict(zip(("dx", "dE"), pairs)))
    agree(1e-12, scored=(HeadLoss.apply(x, E, y, False, entries), expected))


def test_a_gpu_takes_the_loss_in_larger_parts():
    """Each reads and writes all of dE: 4,096 tokens of GPT-2's are one part there, 13 on a CPU."""
    with torch.device("meta"):
        x, E, y = torch.empty(4096, 8), torch.empty(50257, 8), torch.empty(4096, dtype=torch.long)
    kernels = []
    for entries in (None, 1 << 24):
        with cost.OneDevice() as device:
            HeadLoss.apply(x, E, y, False, entries)
        kernels.append(device.kernels)
    assert kernels[1] == 13 * (kernels[0] - 1) + 1              # the last one divides by the tokens


@pytest.mark.parametrize("gate", ("real", "complex"))
@pytest.mark.parametrize("backend", ("eager", pytest.param("inductor", marks=pytest.mark.slow)))
def test_the_loss_compiles_into_one_graph(gate, backend):
    torch.manual_seed(0)
    net, x, y = LanguageModel(50, 2, 16, 16, 8, 4, gate=gate), draw(2, 40), draw(2, 40, seed=1)
    torch.compiler.reset()
    compiled = torch.compile(lambda *b: net(*b)[0], backend=backend, fullgraph=True, dynamic=False)
    got, expected = ([loss, *torch.autograd.grad(loss, list(net.parameters()))]
                     for loss in (compiled(x, y), net(x, y)[0]))
    agree(1e-4, **{f"{i}": pair for i, pair in enumerate(zip(got, expected))})


def test_the_processes_of_a_run_share_a_score(three_processes, task):
    """Each scores its parts, and the sum over all processes is the score of the whole."""
    model, ids = task.model().to(f64).eval(), task.tokens("valid")[:200]
    whole, carried = task.score(model, ids), task.score(model, ids, stateful=True)
    parts = three_processes(lambda: task.score(model, ids))
    assert task.score(model, ids, stateful=True) == carried             # a state cannot be shared
    assert sum(parts) == pytest.approx(whole, rel=1e-9) and all(0 < part < whole for part in parts)


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_learns(model):
    net = built(model)
    net(draw(2, 12), draw(2, 12, seed=1))[0].backward()
    silent = [name for name, p in net.named_parameters()
              if p.grad is None or not p.grad.abs().sum() > 0]
    assert not silent, silent


@pytest.mark.parametrize("model", MODELS)
def test_what_a_mixer_adds_starts_smaller_by_the_depth(model):
    net = built(model, layers=1)
    torch.manual_seed(0)
    lm.make_mixer(MODELS["gril"], 16, P=8, J=4)                      # the draws before the mixer's
    nn.init.normal_(nn.Embedding(50, 16).weight)
    alone = lm.make_mixer(MODELS[model], 16, P=8, J=4)
    changed = {name: W for name, W in alone.named_parameters()
               if not torch.equal(W.to(f64), net.layers[0].mixer.get_parameter(name))}
    (name, W), = changed.items()                        # one weight, through which all must go
    agree(1e-6, smaller=(net.layers[0].mixer.get_parameter(name), W.to(f64) / 2 ** 0.5))
    with torch.no_grad():
        W.zero_()
    bias = [b for key, b in alone.named_parameters() if key == name.replace("weight", "bias")]
    left = (F.glu(bias[0], 0) if "glu" in name else bias[0]) if bias else 0
    assert (alone.run(torch.randn(1, 5, 16))[0] == left).all()


def test_loss_is_that_of_the_logits_and_unknown_models_are_listed():
    net, x, y = built(), draw(2, 12), draw(2, 12, seed=1)
    agree(1e-12, loss=(net(x, y)[0], F.cross_entropy(net.run(x)[0].flatten(0, 1), y.flatten())))
    with refuses(match="unknown model 'grill', did you mean gril.*mamba"):
        built("grill")


# -------------------------------------------------------------------------------- blocks and scores

def test_blocks_cover_the_text_once_an_epoch_with_targets_shifted(task):
    ids, stream = torch.tensor(task.tokens("train").astype(np.int64)), task.stream(1, 4)
    epochs = [[next(stream) for _ in range(stream.count)] for _ in range(2)]
    orders = []
    for epoch in epochs:
        x, y = (torch.cat(part) for part in zip(*epoch))
        assert torch.equal(x[:, 1:], y[:, :-1]) and x.shape == (4 * stream.count, 32)
        starts = [next(s for s in range(0, len(ids) - 32, 32) if torch.equal(ids[s:s + 32], row))
                  for row in x]
        assert all(ids[s + 32] == row[-1] for s, row in zip(starts, y))
        assert len(set(starts)) == len(starts)
        orders.append(starts)
    assert orders[0] != orders[1] and len(orders[0]) > (len(ids) - 1) // 32 - 4


def test_order_is_the_same_for_any_number_of_processes(tmp_path):
    for stateful in (False, True):
        task = text_file(tmp_path, stateful=stateful)
        alone, two = task.stream(3, 4), [task.stream(3, 4, rank=rank, world=2) for rank in (0, 1)]
        for _ in range(alone.count + 3):
            x = next(alone)[0]
            assert torch.equal(x, torch.cat([next(stream)[0] for stream in two]))


@pytest.mark.parametrize("stateful", (False, True))
def test_every_seed_and_epoch_has_an_order_of_its_own(tmp_path, stateful):
    task = text_file(tmp_path, stateful=stateful)
    ids = np.arange(4 * 32 * 3 + 100, dtype=np.uint16)          # a token is its place
    task.tokens = lambda split: ids
    orders = {(seed, epoch): tuple(task.stream(seed, 4).ordered(epoch).flatten().tolist())
              for seed in range(5) for epoch in range(4)}
    assert len(set(orders.values())) > (10 if stateful else 19), "a few of 100 shifts may agree"
    assert stateful or all(list(order) != sorted(order) for order in orders.values())


def test_lanes_move_as_far_as_the_text_allows(tmp_path):
    """Two batches of 4 lanes and 3 tokens more: lanes begin at 0, 1 or 2, never beyond."""
    task = text_file(tmp_path, stateful=True)
    ids = np.arange(2 * 4 * 32 + 3, dtype=np.uint16)
    task.tokens = lambda split: ids
    stream, firsts = task.stream(0, 4), set()
    for _ in range(50):
        x, y = (torch.cat(part, 1) for part in zip(next(stream), next(stream)))
        assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(64)), "in one piece"
        assert (x[:, 0] - x[0, 0]).tolist() == [0, 64, 128, 192]
        firsts.add(x[0, 0].item())
    assert firsts == {0, 1, 2} and ids[-1] == 2 + 256


@pytest.mark.parametrize("stateful", (False, True))
def test_training_goes_on_where_it_was(tmp_path, stateful):
    task = text_file(tmp_path / "a", stateful=stateful)
    model, stream = task.model(), task.stream(1, 4)
    for _ in range(stream.count - 1):
        task.loss(model, next(stream))
    torch.save(stream.position(), tmp_path / "position.pt")
    assert (tmp_path / "position.pt").stat().st_size < 60_000
    expected = [task.loss(model, next(stream)).item() for _ in range(3)]    # over an epoch's end
    again = text_file(tmp_path / "a", stateful=stateful)
    stream = again.stream(1, 4)
    stream.seek(torch.load(tmp_path / "position.pt", weights_only=True))
    assert [again.loss(model, next(stream)).item() for _ in range(3)] == expected


def test_stateful_blocks_follow_each_other_and_their_losses_are_those_of_one_long_block(tmp_path):
    task = text_file(tmp_path, stateful=True)
    model, stream = task.model().to(f64), task.stream(1, 4)
    batches = [next(stream) for _ in range(5)]
    x, y = (torch.cat(part, 1) for part in zip(*batches))
    assert torch.equal(x[:, 1:], y[:, :-1])
    losses = [task.loss(model, batch) for batch in batches]
    agree(1e-12, loss=(torch.stack(losses).mean(), model(x, y)[0]))
    assert not any(s.requires_grad for s in leaves(task.state)), "backpropagation stops there"
    cold = model(*batches[1])[0]
    assert abs(cold - losses[1]) > 1e-6
    stream.seek((1, 0))
    assert task.state is None
    agree(1e-12, fresh=(task.loss(model, batches[1]), cold))
    with refuses(match="transformer remembers every token"):
        task.model("transformer")
    with refuses(match="--accumulate would need several"):
        LM["text_file"](**dict(task.recipe, accumulate=2))


def test_scores_count_every_token_once(task):
    model = task.model().to(f64).eval()
    for n in (2, 32, 33, 34, 200):                      # from less than a block to many and a rest
        ids = task.tokens("valid")[:n]
        x = torch.tensor(ids.astype(np.int64))[None]
        losses = [F.cross_entropy(model.run(a)[0][0], b[0], reduction="sum").item()
                  for a, b in zip(x[:, :-1].split(32, 1), x[:, 1:].split(32, 1))]
        assert task.score(model, ids) == pytest.approx(sum(losses) / (n - 1), rel=1e-9)
        whole = F.cross_entropy(model.run(x[:, :-1])[0][0], x[0, 1:]).item()
        assert task.score(model, ids, stateful=True) == pytest.approx(whole, rel=1e-9)
    scores = task.validate(model)
    assert scores["perplexity"] == pytest.approx(2 ** scores["bits"])
    assert scores["loss"] == pytest.approx(task.score(model, task.tokens("valid")))


def test_validation_reads_the_validation_text_and_the_report_the_test_text(task, monkeypatch):
    """On canned losses: they tell the split, how much of it was scored, whether with its state."""
    lengths = {split: len(task.tokens(split)) for split in SPLITS}

    def loss(split, count, stateful=False):
        return dict(train=2, valid=3, test=4)[split] + count / 1e5 - stateful / 2

    def score(model, ids, stateful=False):
        split, = (x for x in lengths if np.array_equal(ids, task.tokens(x)[:len(ids)]))
        return loss(split, len(ids), stateful)

    def expect(name, loss):
        return {name + key: value for key, value in dict(
            loss=loss, perplexity=np.exp(loss), bits=loss / np.log(2)).items()}
    monkeypatch.setattr(task, "score", score)
    model = task.model()
    for part in (0, 50):
        task.recipe.update(validate_tokens=part, report_tokens=0)
        n = part or lengths["valid"]
        assert task.validate(model) == pytest.approx(expect("", loss("valid", n)))
        task.recipe.update(validate_tokens=0, report_tokens=part)
        n = part or lengths["test"]
        assert task.report(model, 0) == pytest.approx(dict(
            split="test", tokens=n, parameters=parameters(model),
            **expect("test_", loss("test", n)), **expect("stateful_", loss("test", n, True))))


def test_report_and_table(task, tmp_path):
    canned = dict(task="text_file", model="lru", parameters=1234, split="test", tokens=5678,
                  tokenizer="bytes", length=32,
                  test_loss=1.5, test_perplexity=4.482, test_bits=2.164,
                  stateful_loss=1.25, stateful_perplexity=3.49, stateful_bits=1.803)
    assert task.table(canned).splitlines() == [
        "lru on text_file, 1,234 parameters; test, 5,678 tokens of bytes",
        "  blocks of 32      loss 1.5, perplexity 4.482, bits 2.164",
        "  state carried on  loss 1.25, perplexity 3.49, bits 1.803"]
    file = tmp_path / "text_file" / "bytes.bin"                 # as WikiText without its test
    file.write_bytes(file.read_bytes().replace(b'"test"', b'"x"'))
    assert task.report(task.model().eval(), 0)["valid_bits"] > 0
    assert "stateful_loss" not in task.report(task.model("transformer").eval(), 0)
    assert task.choose in task.validate(task.model().eval())


def test_texts_shorter_than_a_block(tmp_path):
    task = text_file(tmp_path, "a short text of few words\n" * 3)
    with refuses(match="shorter than one batch, 4 blocks of 32 .* lower --length or --batch"):
        task.stream(0, 4)


LOBSTER = "the lobster saw the sea and the sea saw the lobster. " * 100


def learn(task, model, steps, lr=1e-2):
    torch.manual_seed(0)
    net, stream = task.model(model), task.stream(0, task.recipe["batch"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)
    for _ in range(steps):
        loss = task.loss(net, next(stream))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return net.eval()


@pytest.mark.parametrize("stateful", (False, True))
def test_a_model_learns_a_text(tmp_path, stateful, run):
    task = text_file(tmp_path, LOBSTER, stateful=stateful)
    assert task.validate(learn(task, "gril", 0))["bits"] > 6
    net = learn(task, "gril", 60) if stateful else lm.load(run)[1]
    assert task.validate(net)["bits"] < 1


# --------------------------------------------------------------------------------------- generation

@pytest.mark.parametrize("model", MODELS)
def test_streaming_is_decoding_by_a_full_pass(model):
    """By causality one pass over what was streamed has the logits that each token was chosen by."""
    net, prompt = built(model, layers=2, V=200), [5, 6, 7]
    with torch.no_grad():
        net.norm.weight.copy_(torch.randn(16))                  # or a tied head repeats its token
        for block in net.layers[::2]:
            getattr(block.mixer, "W_o" if hasattr(block.mixer, "W_o") else "W_out").weight.mul_(20)

    def streamed(temperature):
        ids = list(generate(net, prompt, 60, temperature))
        assert len(ids) == 60
        return ids, net.run(torch.tensor([prompt + ids[:-1]]))[0][0, 2:]
    ids, logits = streamed(0)
    assert ids == logits.argmax(-1).tolist()
    ids, logits = streamed(2)
    generator = torch.Generator().manual_seed(0)
    p = (logits / 2).softmax(-1)
    assert ids == [torch.multinomial(row, 1, generator=generator).item() for row in p]
    assert len(set(ids)) > 10, "a text that says one thing over and over shows little"


def sampled(net, prompt, count, temperature, top_k, seed):
    """By definition: from softmax(logits / T) of the k likeliest, after a pass over all so far."""
    generator, ids = torch.Generator().manual_seed(seed), list(prompt)
    for _ in range(count):
        logits = net.run(torch.tensor([ids]))[0][0, -1] / temperature
        if top_k:
            kept = logits.topk(top_k).indices
            logits = torch.full_like(logits, -np.inf).index_copy(0, kept, logits[kept])
        ids.append(torch.multinomial(logits.softmax(-1), 1, generator=generator).item())
    return ids[len(prompt):]


def test_sampling():
    net, results, plain = built(layers=1), {}, dict(temperature=1.0, top_k=0, seed=0)
    with torch.no_grad():
        net.norm.weight.copy_(torch.randn(16))                  # or a tied head repeats its token
    for options in (dict(), dict(seed=1), dict(temperature=0.5), dict(temperature=2.0),
                    dict(top_k=3), dict(top_k=3, temperature=2.0)):
        result = list(generate(net, [1], 25, **options))
        assert result == sampled(net, [1], 25, **{**plain, **options}), options
        results[tuple(result)] = options
    assert len(results) == 6, "options that change nothing"
    assert list(generate(net, [1], 25, top_k=1)) == list(generate(net, [1], 25, temperature=0))


def test_a_long_prompt_is_remembered_whole(monkeypatch):
    """With gates so slow that the first of 2,500 tokens still count."""
    net, prompt = built(r_min=0.9999, r_max=0.99999, gate="real"), draw(1, 2500)
    seen, multinomial = [], torch.multinomial

    def watched(p, *args, **options):
        seen.append(p)
        return multinomial(p, *args, **options)
    monkeypatch.setattr(torch, "multinomial", watched)
    first, second = generate(net, prompt[0].tolist(), 2)
    whole = net.run(torch.cat([prompt, torch.tensor([[first]])], 1))[0][0, -2:].softmax(-1)
    agree(1e-9, sampled_from=(torch.cat(seen), whole))
    for kept in (2500 % 1024, 2048):                            # the last part; all but the first
        forgetful = net.run(prompt[:, -kept:])[0][0, -1].softmax(-1)
        assert (forgetful - whole[0]).abs().max() > 1e-3, "forgetting would not show"


def test_half_characters_wait(small):
    text = "é🦞a年"
    pieces = list(as_text(Bytes().encode(text), Bytes()))
    assert pieces == ["", "é", "", "", "", "🦞", "a", "", "", "年", ""]
    assert "".join(as_text(Bytes().encode("🦞")[:2], Bytes())) == "\ufffd"
    bpe = BPE(*small)
    assert "".join(as_text([*bpe.encode(text), bpe.start, *bpe.encode("b")], bpe)) == text + "b"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run, as train.py leaves it."""
    folder = tmp_path_factory.mktemp("run")
    task = text_file(folder / "data", LOBSTER)
    net = learn(task, "gril", 60)
    config = dict(task.recipe, task="text_file", model="gril", seed=0)
    (folder / "config.json").write_text(json.dumps(config))
    runs.save(folder / "weights.pt", net.state_dict())
    return folder


def test_generate_as_typed(run, capsys):
    lm.main(["generate", str(run), "--prompt=the lobster saw ", "--tokens=30", "--temperature=0"])
    made = bytes(generate(lm.load(run)[1], list(b"the lobster saw "), 30, temperature=0)).decode()
    assert capsys.readouterr().out == f"the lobster saw {made}\n" and set(made) <= set(LOBSTER)


@pytest.mark.parametrize("typed, expected", (
    ("", ([ord("\n")], 200, 1.0, 0, 0)),                        # no prompt: a new line
    ("--prompt=éa", ([0xc3, 0xa9, 0x61], 200, 1.0, 0, 0)),
    ("--prompt=a --tokens=7 --temperature=0.5 --top-k=3 --seed=9", ([0x61], 7, 0.5, 3, 9))))
def test_what_is_typed_is_what_is_generated(run, capsys, monkeypatch, typed, expected):
    def generate(model, *arguments):
        assert arguments == expected
        return [0x62, 0x63]
    monkeypatch.setattr(lm, "generate", generate)
    lm.main(["generate", str(run), *typed.split()])
    prompt = bytes(expected[0]).decode() if typed else ""
    assert capsys.readouterr().out == f"{prompt}bc\n"


class Hostile:                                                  # unpickled, it would make a file
    def __reduce__(self):
        return Path.touch, (Path("touched"),)


def test_load_takes_what_is_there(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task, net, config = lm.load(run)
    (tmp_path / "config.json").write_text((run / "config.json").read_text())

    def refused(message):
        with pytest.raises(SystemExit, match=message):
            lm.main(["generate", str(tmp_path)])
    refused("has no weights yet .*--resume")
    runs.save(tmp_path / "last.pt", dict(model=net.state_dict(), step=3))       # not finished
    for a, b in zip(lm.load(tmp_path)[1].parameters(), net.parameters()):
        assert torch.equal(a, b)
    assert task.recipe == {key: config[key] for key in task.recipe}
    for i, name in enumerate(("weights.pt", "best.pt"), 1):     # each comes before those before it
        runs.save(tmp_path / name, {key: x + i for key, x in net.state_dict().items()})
        assert torch.equal(lm.load(tmp_path)[1].embed.weight, net.embed.weight + i), name
        assert not lm.load(tmp_path)[1].training
    for name in ("weights.pt", "best.pt"):
        (tmp_path / name).unlink()
    (tmp_path / "config.json").write_text(json.dumps(dict(config, H=32)))
    refused("does not fit the model of config.json")
    runs.save(tmp_path / "last.pt", 3)
    refused("does not fit the model of config.json")
    runs.save(tmp_path / "last.pt", dict(model=Hostile()))
    refused("last.pt is refused: it is no file of tensors and plain values")
    (tmp_path / "last.pt").write_bytes((run / "weights.pt").read_bytes()[:-40])
    refused("last.pt is damaged: its checksum")
    assert not Path("touched").exists()
    (tmp_path / "config.json").write_text(json.dumps(dict(task="nd_regression", model="gril")))
    refused("a run of nd_regression, not of a language model: wikitext103")
    for edited in ("", "{", "[]", "{}", *(json.dumps(dict(config, **edit)) for edit in (
            dict(task=[]), dict(model="grill"), dict(model=None), dict(H="wide"), dict(H=0),
            dict(P=7), dict(layers=2.5), dict(data=5), dict(tokenizer=[])))):
        (tmp_path / "config.json").write_text(edited)
        refused("config.json is not as train.py wrote it")
    (tmp_path / "config.json").unlink()
    refused("not the folder of a run")


@pytest.mark.parametrize("arguments, message", (
    (["prepare"], "name one data set, wikitext103 or wikitext2, or give --text FILE"),
    (["prepare", "wikitext2", "--text", "a.txt"], "name one data set"),
    (["prepare", "--text", "nothing.txt"], "cannot read nothing.txt: there is no such file"),
    (["prepare", "--text", "."], "cannot read .: there is no such file"),
    (["prepare", "wikitext2", "--workers", "-2"], "--workers must be at least 1, got -2"),
    (["generate", "RUN", "--seed", "-1"], "--seed must be 0 to"),
    (["generate", "RUN", "--temperature", "-1"], "--temperature must be 0, or 1e-6 to 1e6, got -1"),
    (["generate", "RUN", "--temperature", "1e-40"], "must be 0, or 1e-6 to 1e6, got 1e-40"),
    (["generate", "RUN", "--temperature", "nan"], "must be 0, or 1e-6 to 1e6, got nan"),
    (["generate", "RUN", "--tokens", "-1"], "--tokens must be 0 or more"),
    (["generate", "RUN", "--device", "gpu"], "unknown device 'gpu'.*cuda"),
    (["generate", "RUN", "--prompt", "ab\udcff"],
     r"character 2 of the text is the lone surrogate U\+DCFF")))
def test_bad_arguments(arguments, message, run):
    with pytest.raises(SystemExit, match=message):
        lm.main([str(run) if a == "RUN" else a for a in arguments])


@pytest.mark.parametrize("control_c", (False, True))
def test_a_stream_ends_cleanly(run, control_c):
    """By Ctrl-C, or when nobody reads any more; on a terminal that has no é."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)   # a child inherits "ignored"
    command = [sys.executable, lm.__file__, "generate", run, f"--tokens={10 ** 9}", "--prompt=é"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               env=dict(os.environ, PYTHONIOENCODING="ascii"))
    signal.signal(signal.SIGINT, before)
    assert process.stdout.read(50).startswith(b"?")
    process.send_signal(signal.SIGINT) if control_c else process.stdout.close()
    _, errors = process.communicate(timeout=60)
    ended = (130, b"\nlm.py: stopped\n") if control_c else (0, b"")
    assert (process.returncode, errors) == ended


def test_help_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["--help"], ["prepare", "--help"], ["generate", "--help"]):
        with pytest.raises(SystemExit):
            lm.main(arguments)
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80

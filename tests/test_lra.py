"""Long Range Arena: labels recomputed, data against LRA's, good and bad files, batches, models.

    .venv/bin/python -m pytest -q tests/test_lra.py             GRIL_DATA=DIR adds the real files
    .venv/bin/python -m pytest -q tests/test_lra.py -m slow     64 rows learnt, 10,000 files damaged
"""
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import baselines
import lra
from baselines import offered, parameters
from files import arena, downloads
from files.arena import listops_lines, listops_row
from gril import GrilMixer, complex_gate
from lra import LRA
from machine.errors import Missing

REAL = Path(os.environ.get("GRIL_DATA", "/nonexistent"))
f64 = torch.float64
small = dict(layers=2, H=8, P=8, J=2, dropout=0.0)


def opened(name, folder, **numbers):
    """A task at its tiny size, but ListOps on LRA's rows, which files hold."""
    return LRA[name](folder, **dict(short=False) if name == "listops" else {}, **numbers)


def real(name):
    """The task on real files, or no test."""
    if not opened(name, REAL).sources():
        pytest.skip(f"no {name} in GRIL_DATA")
    return REAL


# ------------------------------------------------------------------------- small files of each kind

EXPRESSIONS = ["( ( ( [MAX 3 ) 7 ) ] )\t7", "( ( ( ( [MED 1 ) 4 ) 8 ) ] )\t4",
               "( ( ( [SM 9 ) ( ( ( [MIN 5 ) 2 ) ] ) ) ] )\t1"]


def write_files(folder, files):
    """{name: bytes} into folder."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def write_listops(folder, rows=20):
    for first, split in enumerate(("val", "train", "test")):    # each file begins with another
        lines = ["Source\tTarget", *(EXPRESSIONS[(first + i) % 3] for i in range(rows))]
        text = "".join(f"{line}\r\n" for line in lines)
        write_files(folder / "listops", {f"basic_{split}.tsv": text.encode()})


def write_retrieval(folder, rows=20):
    for split in ("train", "eval", "test"):
        text = "".join(f"{i % 2}.0\tA{i}\tB{i}\tpaper {i} of {split}\tcites \"{'x' * i}\n"
                       for i in range(rows))
        write_files(folder / "retrieval", {f"new_aan_pairs.{split}.tsv": text.encode()})


def reviews(rows=20):
    return {f"aclImdb/{part}/{kind}/{i}_{rating}.txt": f"{kind} film {i} in {part}".encode()
            for part in ("train", "test") for kind, rating in (("pos", 7), ("neg", 2))
            for i in range(rows)}


def archive(*members):
    """A tar of (name, type, size that it claims, content); a link leads to /etc/passwd."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.GNU_FORMAT) as file:
        for name, kind, size, content in members:
            info = tarfile.TarInfo(name)
            link = kind in (tarfile.SYMTYPE, tarfile.LNKTYPE)
            info.type, info.size, info.linkname = kind, size, "/etc/passwd" if link else ""
            data.write(info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512))
    return data.getvalue()


def tar(members):
    return archive(*((name, tarfile.REGTYPE, len(x), x) for name, x in members.items()))


def write_text(folder, rows=20):
    write_files(folder / "imdb", {"aclImdb.tar.xz": lzma.compress(tar(reviews(rows)))})


def cifar(rows=20):
    rng, names = np.random.default_rng(0), arena.CIFAR_FILES
    records = {name: rng.integers(0, 256, (rows, 3073), dtype=np.uint8) for name in names}
    for array in records.values():
        array[:, 0] = np.arange(rows) % 10
    return records


def write_image(folder, rows=20):
    files = {name: records.tobytes() for name, records in cifar(rows).items()}
    write_files(folder / "cifar-10-batches-bin", files)


def png(pixels):
    """Grey values (height, width), or (height, width, 3) of colours, 4 with alpha."""
    data = io.BytesIO()
    Image.fromarray(pixels).save(data, "png")
    return data.getvalue()


def picture(i):
    return np.random.default_rng(i).integers(0, 256, (32, 32), dtype=np.uint8)


def write_pathfinder(folder, rows=20):
    home = folder / "pathfinder32/curv_contour_length_14"
    for d in range(2):
        lines = (f"imgs/{d} sample_{i}.png {i} {int(i % 3 == 0)} 1.0 14\n" for i in range(rows))
        write_files(home, {f"metadata/{d}.npy": "".join(lines).encode()})
        write_files(home / f"imgs/{d}", {f"sample_{i}.png": png(picture(rows * d + i))
                                         for i in range(rows)})


WRITE = dict(listops=write_listops, text=write_text, retrieval=write_retrieval,
             image=write_image, pathfinder=write_pathfinder)
PATHS = dict(train="listops/basic_train.tsv", val="listops/basic_val.tsv",
             pairs="retrieval/new_aan_pairs.train.tsv", reviews="imdb/aclImdb.tar.xz",
             batch="cifar-10-batches-bin/data_batch_2.bin",
             test_batch="cifar-10-batches-bin/test_batch.bin",
             list="pathfinder32/curv_contour_length_14/metadata/1.npy",
             png="pathfinder32/curv_contour_length_14/imgs/1/sample_3.png")


def task(name, folder):
    """The task on small files that are written now, unless there are some."""
    if not opened(name, folder).sources():
        WRITE[name](folder)
    return opened(name, folder, **small)


def prepare(folder, name="listops", *words):
    lra.main(["prepare", name, "--data", str(folder), *words])


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def full_disk(*args, **options):
    raise OSError(28, "No space left on device")


def documents(split):
    return [split.tokens[a:b].tobytes() for a, b in zip(split.offsets, split.offsets[1:])]


def filled(made, splits):
    """The task with {split: [(label, document, …), …]} in the place of its files."""
    rows = ((split, *row) for split, part in splits.items() for row in part)
    made.data = arena.collect(rows, [Path("here")])
    return made


# -------------------------------------------------------------------------------- 1. ListOps itself

def evaluate(symbols):
    """An expression's value, and LRA's text of it, by a stack: nothing of the generator's."""
    stack = []
    for symbol in symbols:
        if symbol != "]":
            stack.append((symbol, None) if symbol[0] == "[" else (symbol, int(symbol)))
            continue
        arguments = []
        while stack[-1][1] is not None:
            arguments.insert(0, stack.pop())
        (op, _), values = stack.pop(), sorted(value for _, value in arguments)
        value = {"[MIN": values[0], "[MAX": values[-1], "[SM": sum(values) % 10,
                 "[MED": int(statistics.median(values))}[op]
        text = op
        for argument, _ in arguments:
            text = f"( {text} {argument} )"
        stack.append((f"( {text} ] )", value))
    [(text, value)] = stack
    return text, value


def checked(lines):
    """[(symbols, value)] of rows, each label and each parenthesis as the evaluator has them."""
    rows = []
    for i, line in enumerate(lines):
        source, target = line.rstrip("\r\n").split("\t")
        symbols = [symbol for symbol in source.split() if symbol not in "()"]
        text, value = evaluate(symbols)
        assert value == int(target), f"row {i}: {value}, not {target}"
        assert text == source, f"row {i}: the parentheses stand elsewhere"
        rows.append((symbols, value))
    return rows


def generated(rows, seed):
    return checked(line.decode() for line in listops_lines(rows, seed))


def test_generated_rows_do_not_depend_on_the_workers():
    one = list(listops_lines(600, seed=5, workers=1))
    assert one == list(listops_lines(600, seed=5, workers=2))
    assert one[:100] == list(listops_lines(100, seed=5))
    assert one[:100] != list(listops_lines(100, seed=6)) and len(set(one)) == 600


def test_duplicates_are_left_out(monkeypatch):
    rows = [b"a", b"b", b"a", b"a", b"c", b"b", b"d", b"e"]
    monkeypatch.setattr(arena, "listops_row", lambda seed, span, i: rows[i])
    assert list(listops_lines(5)) == [b"a", b"b", b"c", b"d", b"e"]


def slow_rows(n, seed):
    """LRA's rules once more, the plain way: one tree after the other, node by node."""
    rng = random.Random(seed)

    def grow(depth):
        if depth == 10 or rng.random() > 0.25:
            return [str(rng.randrange(10))]
        inside = [symbol for _ in range(rng.randint(2, 10)) for symbol in grow(depth + 1)]
        return [rng.choice(["[MIN", "[MAX", "[MED", "[SM"]), *inside, "]"]
    rows = []
    while len(rows) < n:
        symbols = grow(1)
        if 500 < len(symbols) < 2000:
            rows.append((symbols, evaluate(symbols)[1]))
    return rows


def depth(symbols):
    """How deep the symbols stand, on average."""
    return np.cumsum([(symbol[0] == "[") - (symbol == "]") for symbol in symbols]).mean()


def assert_same_distribution(ours, theirs):
    """Two samples of (symbols, value): each statistic within what chance does once in 1,000."""
    n, m = len(ours), len(theirs)
    a, b = (np.sort([len(symbols) for symbols, _ in rows]) for rows in (ours, theirs))
    both = np.concatenate([a, b])
    below = np.searchsorted(a, both, "right") / n, np.searchsorted(b, both, "right") / m
    gap = np.abs(below[0] - below[1]).max()
    assert gap < 1.95 * np.sqrt((n + m) / (n * m)), f"lengths: Kolmogorov-Smirnov {gap}"
    kinds = {"labels": (lambda s, v: [v], 27.9),
             "operators": (lambda s, v: [x for x in s if x[0] == "["], 16.3),
             "digits": (lambda s, v: [x for x in s if x.isdigit()], 27.9)}
    for name, (of, limit) in kinds.items():
        counts = [Counter(x for row in rows for x in of(*row)) for rows in (ours, theirs)]
        x, y = (np.array([count[key] for key in sorted(counts[0] | counts[1])]) for count in counts)
        scale = np.sqrt(y.sum() / x.sum())
        chi2 = ((scale * x - y / scale) ** 2 / (x + y)).sum()
        assert chi2 < limit, f"{name}: chi² {chi2}, {counts}"
    means = {"operators a row": lambda s: s.count("]"), "depth": depth,
             "arguments an operator": lambda s: (len(s) - s.count("]") - 1) / s.count("]")}
    for name, of in means.items():
        x, y = (np.array([of(symbols) for symbols, _ in rows], float) for rows in (ours, theirs))
        z = (x.mean() - y.mean()) / np.sqrt(x.var() / n + y.var() / m)
        assert abs(z) < 3.3, f"{name}: {x.mean()} and {y.mean()}, z = {z}"


@pytest.mark.parametrize("split, least", (("train", 2000), ("val", 200)))
def test_the_evaluator_agrees_with_lras_files_and_generated_rows_are_like_them(split, least):
    theirs = checked((real("listops") / PATHS[split]).read_text().splitlines()[1:])
    assert len(theirs) >= least
    assert_same_distribution(generated(least, seed=0), theirs)


def test_the_evaluator_agrees_with_generated_rows_and_they_are_like_the_plain_recursion():
    ours = generated(1000, seed=1)
    assert len(ours) == 1000 and all(500 < len(symbols) < 2000 for symbols, _ in ours)
    assert_same_distribution(ours, slow_rows(300, seed=1))


def test_a_short_row_would_be_noticed():
    """The statistics above can tell: the same generator with other settings fails them."""
    ours, theirs = generated(1000, seed=2), generated(1000, seed=3)
    with pytest.raises(AssertionError, match="lengths"):
        assert_same_distribution([row for row in ours if len(row[0]) < 1700], theirs)
    with pytest.raises(AssertionError, match="labels"):
        assert_same_distribution([(s, v if i % 8 else 5) for i, (s, v) in enumerate(ours)], theirs)


# --------------------------------------------------------------------------------------- 2. readers

def test_listops_is_read(tmp_path):
    data = task("listops", tmp_path).data
    assert {split: len(x.labels) for split, x in data.items()} == dict(train=20, val=20, test=20)
    assert {split: x.labels[:3].tolist() for split, x in data.items()} == dict(
        val=[7, 4, 1], train=[4, 1, 7], test=[1, 7, 4])
    assert [LRA["listops"].decode(x) for x in documents(data["val"])[:3]] == \
        ["[MAX 3 7 ]", "[MED 1 4 8 ]", "[SM 9 [MIN 5 2 ] ]"]
    assert [path.name for path in tmp_path.iterdir()] == ["listops"], "opening writes nothing"


@pytest.mark.parametrize("missing, tests", (("test", "val"), ("val", "test")))
def test_without_a_test_file_the_validation_file_tests(tmp_path, capsys, missing, tests):
    whole = task("listops", tmp_path).data
    (tmp_path / f"listops/basic_{missing}.tsv").unlink()
    data = task("listops", tmp_path).data
    assert f"no basic_{missing}.tsv: " in capsys.readouterr().err
    assert documents(data["test"]) == documents(whole[tests])
    rows = documents(whole["train"])
    assert documents(data["val"]) == rows[9::10]
    assert documents(data["train"]) == rows[:9] + rows[10:19]


def test_reviews_are_the_same_from_folder_and_archives(tmp_path):
    data = task("text", tmp_path).data
    assert {split: (len(x.labels), int(x.labels.sum())) for split, x in data.items()} == \
        dict(train=(36, 18), val=(4, 2), test=(40, 20))
    for document, label in zip(documents(data["test"]), data["test"].labels):
        assert document.startswith(b"pos" if label else b"neg") and document.endswith(b"in test")
    assert not set(documents(data["train"])) & set(documents(data["val"]))
    members = {**reviews(), "aclImdb/train/unsup/1_0.txt": b"no label"}
    write_files(tmp_path, {"gz/aclImdb.tar.gz": gzip.compress(tar(members))})
    write_files(tmp_path / "folder", reviews())
    for where in ("gz", "folder"):
        other = task("text", tmp_path / where).data
        assert all(documents(other[split]) == documents(data[split]) for split in data), where


@pytest.mark.parametrize("harm", (os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"),
                                  lambda path: path.symlink_to("nowhere")))
def test_a_review_that_never_ends_is_refused(tmp_path, harm):
    write_files(tmp_path, reviews(3))
    harm(tmp_path / "aclImdb/train/neg/9_1.txt")
    with pytest.raises(ValueError, match="9_1.txt: no file, or one of more than"):
        task("text", tmp_path).data


def test_pairs_are_read(tmp_path):
    for split, data in task("retrieval", tmp_path).data.items():
        assert data.labels.tolist() == [0, 1] * 10
        file = dict(val="eval").get(split, split)
        assert documents(data)[6:8] == [b"paper 3 of %s" % file.encode(), b'cites "xxx']


def test_of_long_texts_the_first_4096_bytes_are_kept(tmp_path):
    first, second = (b"".join(b"%s%04d " % (a, i) for i in range(1000)) for a in (b"a", b"b"))
    members = {**reviews(), "aclImdb/test/pos/99_9.txt": first}
    for files in (members, {"imdb/aclImdb.tar.xz": lzma.compress(tar(members))}):
        folder = tmp_path / str(len(files))
        write_files(folder, files)
        assert max(documents(task("text", folder).data["test"]), key=len) == first[:4096]
    write_retrieval(tmp_path)
    with open(tmp_path / "retrieval/new_aan_pairs.test.tsv", "ab") as file:
        file.write(b"1.0\tA\tB\t%s\t%s\n" % (first, second))
    assert documents(task("retrieval", tmp_path).data["test"])[-2:] == [first[:4096], second[:4096]]


@pytest.mark.parametrize("packed", (False, True))
def test_pictures_become_luma(tmp_path, packed):
    if packed:
        members = {f"cifar-10-batches-bin/{name}": x.tobytes() for name, x in cifar().items()}
        (tmp_path / "cifar-10-binary.tar.gz").write_bytes(gzip.compress(tar(members)))
    data = task("image", tmp_path).data
    *train, test = cifar().values()
    train = np.concatenate(train)
    for split, records in dict(train=train[:90], val=train[90:], test=test).items():
        assert data[split].labels.tolist() == records[:, 0].tolist(), split
        r, g, b = records[:, 1:].reshape(-1, 3, 1024).swapaxes(0, 1).astype(float)
        exact = 0.299 * r + 0.587 * g + 0.114 * b
        assert np.abs(data[split].tokens.reshape(-1, 1024) - exact).max() < 0.501, split


def test_curves_are_read(tmp_path):
    data = task("pathfinder", tmp_path).data
    assert {split: len(x.labels) for split, x in data.items()} == dict(train=32, val=4, test=4)
    assert documents(data["val"]) == [picture(i).tobytes() for i in (8, 18, 28, 38)]
    assert documents(data["test"]) == [picture(i).tobytes() for i in (9, 19, 29, 39)]
    assert data["val"].labels.tolist() == [0, 1] * 2 and data["test"].labels.tolist() == [1, 0] * 2
    assert not opened("pathfinder", tmp_path / "empty").sources()
    home = tmp_path / LRA["pathfinder"].places[0]
    write_files(home, {f"metadata/{d}.npy": b"" for d in range(12)})
    found = [path.name for path in opened("pathfinder", tmp_path).sources()]
    assert found == [*(f"{d}.npy" for d in range(12)), "imgs"], "by number, however many there are"


@pytest.mark.parametrize("channels", (3, 4))
def test_a_coloured_picture_is_the_mean_of_its_colours(tmp_path, channels):
    """Without alpha, which would make an opaque picture lighter."""
    write_pathfinder(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, channels), dtype=np.uint8)
    (tmp_path / PATHS["png"]).write_bytes(png(pixels))
    read = documents(task("pathfinder", tmp_path).data["train"])[16 + 3]        # of the second list
    exact = pixels[..., :3].mean(-1).ravel()
    assert np.abs(np.frombuffer(read, np.uint8) - exact).max() < 0.51


@pytest.mark.parametrize("name", LRA)
def test_real_files_are_read(name):
    """Whatever is there: labels of every class, tokens in range, and nothing in two splits."""
    data, T = check_arrays(name, real(name)), LRA[name]
    for split, (_, offsets, labels) in data.items():
        assert set(labels.tolist()) == set(range(T.classes)) and (np.diff(offsets) > 0).all(), split
    seen = [set(map(hash, documents(data[split]))) for split in data]
    assert not T.vocabulary or name == "retrieval" or len(seen[0] & seen[2]) < 0.01 * len(seen[2])
    if name == "pathfinder":
        assert sum(int(x.labels.sum()) for x in data.values()) == 1033
        assert len(documents(data["test"])[0]) == 1024
    if name == "image":
        assert 0.3 < data["train"].tokens.mean() / 255 < 0.6


# -------------------------------------------------------------------- 3. preparations and downloads

@pytest.mark.parametrize("name", LRA)
def test_a_preparation_reopens_by_memory_map(tmp_path, name, capsys):
    read = task(name, tmp_path).data
    prepare(tmp_path, name)
    path = tmp_path / f"prepared/{name}.bin"
    assert str(path) in capsys.readouterr().out
    again = task(name, tmp_path).data
    for split in read:
        assert isinstance(again[split].tokens, np.memmap)
        assert not isinstance(read[split].tokens, np.memmap)
        for field, x, y in zip(read[split]._fields, read[split], again[split]):
            assert x.dtype == y.dtype and np.array_equal(x, y), (split, field)
    assert list(path.parent.iterdir()) == [path], "something else was left behind"
    header = json.loads(path.read_bytes().split(b"\n")[0])
    assert header["rows"] == {split: len(x.labels) for split, x in read.items()}


@pytest.mark.parametrize("name, file, edit", (
    ("listops", "listops/basic_val.tsv", lambda data: data.replace(b"[MAX", b"[MIN")),
    ("listops", "listops/basic_val.tsv", lambda data: data + data.splitlines(True)[1]),
    ("text", "aclImdb/train/neg/3_2.txt", lambda data: data.replace(b"film", b"flim")),
    ("pathfinder", PATHS["png"], lambda data: png(255 - picture(23)))))
def test_an_edit_after_the_preparation_is_noticed(tmp_path, name, file, edit, capsys):
    """Of a table, of one review, of one picture; it may leave the size."""
    if name == "text":
        write_files(tmp_path, reviews())
    before = task(name, tmp_path).data
    prepare(tmp_path, name)
    assert isinstance(task(name, tmp_path).data["train"].tokens, np.memmap)
    path = tmp_path / file
    path.write_bytes(edit(path.read_bytes()))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))             # a clock may be coarse
    after = task(name, tmp_path).data
    assert any(documents(after[split]) != documents(before[split]) for split in before)
    assert "was made from other files" in capsys.readouterr().err


@pytest.mark.parametrize("name, missing, rows", (
    ("image", "cifar-10-batches-bin/data_batch_2.bin", 80), ("text", "aclImdb/train/neg", 20)))
def test_with_a_word_what_is_missing_is_left_out(tmp_path, name, missing, rows, capsys):
    write_files(tmp_path, reviews())
    write_image(tmp_path)
    (tmp_path / missing).rename(tmp_path / "away")
    with pytest.raises(Missing, match=f" should be there.* prepare {name} --incomplete"):
        task(name, tmp_path).data
    prepare(tmp_path, name, "--incomplete")
    assert " should be there; going on without" in capsys.readouterr().err
    data = task(name, tmp_path).data
    assert isinstance(data["val"].tokens, np.memmap)
    (tmp_path / "away").rename(tmp_path / missing)              # what comes back is taken
    for part, expected in ((data, rows), (task(name, tmp_path).data, rows + 20)):
        assert len(part["train"].labels) + len(part["val"].labels) == expected


def test_a_damaged_preparation_is_not_taken(tmp_path, capsys):
    task("listops", tmp_path)
    path = tmp_path / "prepared/listops.bin"
    prepare(tmp_path)
    good = path.read_bytes()
    arrays = json.loads(good.split(b"\n")[0])["arrays"]
    for name in ("", "train_tokens", "test_offsets", "val_labels"):     # none: the header
        data = bytearray(good)
        data[arrays[name][0] + good.index(b"\n") + 1 if name else 2] ^= 0x60
        path.write_bytes(data)
        assert len(task("listops", tmp_path).data["train"].labels) == 20
        assert f"{path} is damaged" in capsys.readouterr().err, name
    (tmp_path / "listops").rename(tmp_path / "away")
    with pytest.raises(ValueError, match="listops.bin is damaged"):
        opened("listops", tmp_path).data
    path.write_bytes(good)                                              # which is enough
    assert len(opened("listops", tmp_path).data["train"].labels) == 20


def test_a_failed_preparation_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    write_listops(tmp_path)
    prepare(tmp_path)
    before = contents(tmp_path)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(SystemExit, match="No space left.* is whole: make room, then once more"):
        prepare(tmp_path)
    assert contents(tmp_path) == before


def test_listops_is_generated_on_command(tmp_path, capsys):
    command = [tmp_path, "listops", "--rows", "40", "10", "20", "--workers", "2"]
    prepare(*command, "--seed", "4")
    home = tmp_path / "listops"
    assert {path.name for path in home.iterdir()} == set(arena.LISTOPS_FILES)
    rows = [(home / name).read_bytes().splitlines(True) for name in arena.LISTOPS_FILES]
    assert [len(part) for part in rows] == [41, 11, 21]
    assert {part[0] for part in rows} == {b"Source\tTarget\r\n"}
    assert [line for part in rows for line in part[1:]] == list(listops_lines(70, seed=4))
    with pytest.raises(SystemExit, match="--force"):
        prepare(*command)
    prepare(*command, "--force")
    first = (home / "basic_train.tsv").read_bytes().splitlines(True)[1]
    assert first == listops_row(0, (500, 2000), 0)
    assert len(opened("listops", tmp_path).data["test"].labels) == 20


def test_as_many_rows_as_lra_has_are_generated_unasked(tmp_path, monkeypatch):
    calls = []

    def generate(folder, *arguments):
        calls.append(arguments[:2])
        write_listops(folder.parent)
    monkeypatch.setattr(arena, "generate_listops", generate)
    prepare(tmp_path)
    prepare(tmp_path)               # what is there is read
    assert calls == [((96_000, 2_000, 2_000), 0)]


def test_write_protected_rows_are_not_generated_over(tmp_path):
    """Neither through a link: renaming over a file asks for the folder's mode, not for its own."""
    write_listops(tmp_path / "theirs")
    before = contents(tmp_path / "theirs")
    (tmp_path / "theirs/listops/basic_val.tsv").chmod(0o444)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/listops").symlink_to(tmp_path / "theirs/listops")
    refused = "basic_val.tsv is write-protected and stays as it is, also with --force"
    with pytest.raises(SystemExit, match=refused):
        prepare(tmp_path / "ours", "listops", "--rows", "4", "2", "2", "--force")
    assert contents(tmp_path / "theirs") == before


def test_an_interrupted_generation_leaves_nothing(tmp_path, monkeypatch, capsys):
    def stopped(seed, span, i):
        if i == 200:
            raise KeyboardInterrupt
        return listops_row(seed, span, i)
    monkeypatch.setattr(arena, "listops_row", stopped)
    with pytest.raises(SystemExit, match="130"):
        prepare(tmp_path, "listops", "--rows", "5000", "1", "1", "--workers", "1")
    assert not contents(tmp_path) and capsys.readouterr().err.endswith("\nlra.py: stopped\n")


def test_downloads_are_checked(tmp_path, monkeypatch):
    (tmp_path / "web").write_bytes(b"published")
    address, goal = (tmp_path / "web").as_uri(), tmp_path / "data/imdb/file"
    downloads.download(address, goal, hashlib.md5(b"published").hexdigest())
    assert goal.read_bytes() == b"published"
    goal.unlink()
    for wrong in ((address, goal, "0" * 32), (address + "-not-there", goal)):
        with pytest.raises(Missing) as error:
            downloads.download(*wrong)
        assert f"curl -L -o {goal} {address}" in str(error.value)
        assert not list(goal.parent.iterdir()), "something half-made was left behind"
    monkeypatch.setattr(LRA["image"], "published", (address, "cifar-10-binary.tar.gz", "0" * 32))
    with pytest.raises(SystemExit, match="its md5 is"):
        prepare(tmp_path / "data", "image")
    (tmp_path / "data/cifar-10-binary.tar.gz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="not the published file"):
        prepare(tmp_path / "data", "image")


class Response(io.BytesIO):
    """What a server sends, before the line is cut or not."""
    headers = {"Content-Length": "1000"}


def test_a_download_cut_short_is_refused(tmp_path, monkeypatch):
    sent = iter((Response(bytes(999)), Response(bytes(1000))))
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **options: next(sent))
    with pytest.raises(Missing, match="only 999 of 1,000 bytes came"):
        downloads.download("http://nowhere/file", tmp_path / "file")
    assert not list(tmp_path.iterdir()), "something half-made was left behind"
    downloads.download("http://nowhere/file", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == bytes(1000)


STRANGE = {"a symbolic link": tarfile.SYMTYPE, "a hard link": tarfile.LNKTYPE,
           "a device": tarfile.CHRTYPE, "a block device": tarfile.BLKTYPE,
           "a pipe": tarfile.FIFOTYPE, "a folder": tarfile.DIRTYPE}


@pytest.mark.parametrize("kind", ("an absolute path", "a path out of it", *STRANGE))
def test_an_archive_writes_files_and_only_where_they_belong(tmp_path, kind):
    """A file lands inside, or the archive is refused; nothing else is made, by reading nothing."""
    name = {"an absolute path": f"{tmp_path}/tsv_data/evil",
            "a path out of it": "x/tsv_data/../../../evil"}.get(kind, "x/tsv_data/evil")
    good = ("x/tsv_data/good", tarfile.REGTYPE, 4, b"good")
    content = b"" if kind in STRANGE else b"evil"
    strange = (name, STRANGE.get(kind, tarfile.REGTYPE), len(content), content)
    path, data = tmp_path / "data/release.gz", tmp_path / "data"
    last = ("x/tsv_data/last", tarfile.REGTYPE, 4, b"last")
    write_files(data, {"release.gz": gzip.compress(archive(good, strange, last))})
    if kind == "a path out of it":
        with pytest.raises(ValueError, match="release.gz: no whole archive .*outside"):
            downloads.unpack(path, data, "tsv_data")
        assert [found.name for found in tmp_path.rglob("*")] == ["data", "release.gz"]
    else:
        downloads.unpack(path, data, "tsv_data")
        names = ("evil", "good", "last") if kind == "an absolute path" else ("good", "last")
        assert contents(data / "tsv_data") == {data / "tsv_data" / x: x.encode() for x in names}
        found = {found.name for found in tmp_path.rglob("*")}
        assert found == {"data", "release.gz", "tsv_data", *names}
    before = sorted(tmp_path.rglob("*"))
    members = dict(downloads.archive(path))
    assert members.keys() - {name} == {"x/tsv_data/good", "x/tsv_data/last"}
    assert sorted(tmp_path.rglob("*")) == before and (name in members) == (kind not in STRANGE)


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path):
    path = tmp_path / "release.gz"
    path.write_bytes(gzip.compress(tar({"tsv_data/a": bytes(3 << 20)})))
    much = "release.gz: no whole archive .*unpacks to more than 2,000,000 bytes"
    with pytest.raises(ValueError, match=much):
        downloads.unpack(path, tmp_path, "tsv_data", limit=2_000_000)
    with pytest.raises(ValueError, match=much):
        list(downloads.archive(path, limit=2_000_000))
    assert path.stat().st_size < 10_000 and list(tmp_path.iterdir()) == [path]
    downloads.unpack(path, tmp_path, "tsv_data", limit=4_000_000)
    assert len(dict(downloads.archive(path, 4_000_000))["tsv_data/a"]) == 3 << 20


@pytest.mark.parametrize("kind", (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
                                  tarfile.XHDTYPE, tarfile.XGLTYPE))
def test_a_name_of_megabytes_is_refused_before_it_takes_the_memory(tmp_path, kind):
    path, long = tmp_path / "release.gz", ("tsv_data/a", kind, 2 << 20, b"a" * (2 << 20))
    path.write_bytes(gzip.compress(archive(long, ("tsv_data/b", tarfile.REGTYPE, 0, b""))))
    refused = "release.gz: no whole archive .*a header of 2,097,152 bytes"
    with pytest.raises(ValueError, match=refused):
        downloads.unpack(path, tmp_path, "tsv_data")


@pytest.mark.slow
def test_an_archive_of_many_gigabytes_takes_a_bounded_memory(tmp_path):
    """The limit as it is: 1 GB of content, in less than 3 GB of memory."""
    with gzip.open(tmp_path / "bomb.tar.gz", "wb", compresslevel=1) as file:
        for _ in range(3 << 10):
            file.write(bytes(1 << 20))
    much = "ValueError: unpacks to more than 1,073,741,824 bytes"
    with bounded(3 << 30), pytest.raises(ValueError, match=much):
        list(downloads.archive(tmp_path / "bomb.tar.gz"))


def test_the_release_is_unpacked_safely(tmp_path, monkeypatch):
    write_retrieval(tmp_path / "made")
    files = {f"lra_release/lra_release/tsv_data/{path.name}": path.read_bytes()
             for path in (tmp_path / "made/retrieval").iterdir()}
    address = (tmp_path / "web.gz").as_uri()
    monkeypatch.setattr(LRA["retrieval"], "published", (address, "lra_release.gz", None))
    command = [tmp_path / "data", "retrieval"]
    good = gzip.compress(tar({**files, "lra_release/listops-1000/other": b"not wanted"}))
    outside = tar({**files, "lra_release/tsv_data/../../evil": b"x"})
    bad = {"outside": gzip.compress(outside), "no whole": good[:-200]}
    for why, data in bad.items():
        (tmp_path / "web.gz").write_bytes(data)
        with pytest.raises(SystemExit, match=why):
            prepare(*command)
        assert [path.name for path in (tmp_path / "data").iterdir()] == ["lra_release.gz"], why
        (tmp_path / "data/lra_release.gz").unlink()
    (tmp_path / "web.gz").write_bytes(good)
    with monkeypatch.context() as patch:                # a full disk is not the archive's fault
        patch.setattr(tarfile.TarFile, "extract", full_disk)
        with pytest.raises(SystemExit, match=r"\[Errno 28\] No space left"):
            prepare(*command)
    prepare(*command)
    assert len(task("retrieval", tmp_path / "data").data["test"].labels) == 20
    assert not (tmp_path / "evil").exists() and not (tmp_path / "data/listops-1000").exists()


# ------------------------------------------------------------------------------------- 4. bad files


def change(old, new):
    return lambda data: data.replace(old, new, 1)


FAULTS = {      # which file, its bytes then or None to remove it, what is said besides its name
    "a cut row": ("train", lambda data: data[:-6], "row 21: no line end"),
    "a missing column": ("val", change(b"\t4", b" 4"), "row 3: 1 columns"),
    "an unknown token": ("val", change(b"[MED", b"[MOD"), "row 3: unknown token b'[MOD'"),
    "no digit": ("val", change(b"\t4", b"\t]"),
                 "row 3: no expression, or the target b']' is no digit"),
    "no header": ("train", change(b"Source", b"Sauce"), "row 1: the header"),
    "an endless line": ("train", lambda data: b"Source\tTarget\r\n" + b"1 " * (1 << 25),
                        "row 2: no line end"),
    "an empty file": ("train", lambda data: b"", "no rows for train"),
    "a missing file": ("train", None, "is missing beside basic_val.tsv, basic_test.tsv"),
    "a label of 2": ("pairs", change(b"1.0\tA3", b"2.0\tA3"), "row 4: the label b'2.0'"),
    "four columns": ("pairs", change(b"\tA3", b" A3"), "row 4: 4 columns"),
    "a zero byte": ("pairs", change(b"per 5", b"p\0r 5"), "row 6: byte 3 is 0"),
    "a cut archive": ("reviews", lambda data: data[:-300], "no whole archive"),
    # a header in the middle: tarfile alone would take the members before it for the whole
    "a damaged archive": ("reviews", lambda data: lzma.compress(
        lzma.decompress(data).replace(b"/neg/7_", b"/neX/7_", 1)), "damaged at byte"),
    "a cut batch": ("batch", lambda data: data[:-1], "61,459 bytes"),
    "a label of 11": ("test_batch", lambda data: data[:12292] + b"\x0b" + data[12293:],
                      "byte 12,292 should be a label, it is 11"),
    "no test batch": ("test_batch", None, "should be there"),
    "no second batch": ("batch", None, "should be there"),
    "one good review": ("reviews",
                        lambda data: lzma.compress(tar({"a/train/pos/1_7.txt": b"good"})),
                        "train/neg, test/pos, test/neg should be there"),
    "a cut picture": ("png", lambda data: data[:500], "no picture"),
    "a large picture": ("png", lambda data: png(np.zeros((64, 64), np.uint8)), "32 × 32"),
    "a missing picture": ("png", None, "not there"),
    "a picture elsewhere": ("list", change(b"imgs/1", b"../../"), "row 1: not"),
    "a list twice": ("list", lambda data: data.replace(b"imgs/1", b"imgs/0"),
                     "imgs/0/sample_0.png is listed a second time"),
    "a pickle": ("list", lambda data: b"\x93NUMPY\1\0" + np.array([{}]).dumps(), "row 1: not"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_is_named(tmp_path, fault):
    file, harm, message = FAULTS[fault]
    file = PATHS[file]
    name = next(name for name in LRA
                if any(Path(file).is_relative_to(place) for place in LRA[name].places))
    WRITE[name](tmp_path)
    before = (tmp_path / file).read_bytes()
    (tmp_path / file).unlink()
    if harm:
        assert harm(before) != before
        (tmp_path / file).write_bytes(harm(before))
    with pytest.raises(ValueError) as error:
        task(name, tmp_path).data
    assert Path(file).name in str(error.value) and message in str(error.value), error.value
    with pytest.raises(SystemExit):
        prepare(tmp_path, name)
    assert not (tmp_path / "prepared").exists() or not list((tmp_path / "prepared").iterdir())


@pytest.mark.parametrize("name", LRA)
def test_missing_data_says_where_it_looked_and_what_to_do(tmp_path, name, monkeypatch):
    monkeypatch.setenv("GRIL_DATA", str(tmp_path))
    with pytest.raises(Missing) as error:
        LRA[name]().data
    assert str(tmp_path / LRA[name].places[0]) in str(error.value)
    assert f"python lra.py prepare {name} --data {tmp_path}" in str(error.value)


def mutated(data, rng):
    """A few bytes changed, often near the start; a stretch cut out, doubled, cut off or added."""
    data = bytearray(data)
    kind, length = rng.randrange(5), rng.randint(1, 40)
    places = [rng.randrange(min(len(data), rng.choice((64, len(data)))))
              for _ in range(rng.randint(1, 4))]
    if kind == 0:
        for at in places:
            data[at] = rng.choice([0, 9, 10, 32, 48, 255, rng.randrange(256),
                                   data[at] ^ 1 << rng.randrange(8)])
        return bytes(data)
    at = places[0]
    return bytes((data[:at], data[:at] + data[at + length:], data[:at + length] + data[at:],
                  data + rng.randbytes(length))[kind - 1])


def chunks_resummed(data):
    """A PNG whose chunks have the checksums of what is in them now."""
    data, at = bytearray(data), 8
    while (end := at + 8 + int.from_bytes(data[at:at + 4], "big")) + 4 <= len(data):
        data[end:end + 4] = zlib.crc32(data[at + 4:end]).to_bytes(4, "big")
        at = end + 4
    return bytes(data)


def harmed(path, data, rng):
    """The bytes mutated; every other time the sums that give it away are right again."""
    if rng.random() < 0.5:
        return mutated(data, rng)
    if path.suffix == ".xz":
        return lzma.compress(mutated(lzma.decompress(data), rng), preset=0)
    if path.suffix == ".pt":
        data = mutated(data[:-32], rng)
        return data + hashlib.sha256(data).digest()
    if path.suffix == ".bin" and data[:1] == b"{":              # of arrays
        header, data = data.split(b"\n", 1)
        header, data = json.loads(header), mutated(data, rng)
        for place in header["arrays"].values():
            place[2] = zlib.crc32(data[place[0]:][:place[1]])
        return json.dumps(header).encode() + b"\n" + data
    data = mutated(data, rng)
    return chunks_resummed(data) if path.suffix == ".png" else data


@contextlib.contextmanager
def bounded(memory, seconds=60):
    """What takes so many bytes more than are taken gets a MemoryError; what hangs fails."""
    def stop(number, frame):
        pytest.fail("a reader hangs")
    statm, limits = Path("/proc/self/statm"), resource.getrlimit(resource.RLIMIT_AS)
    if statm.exists():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + memory, limits[1]))
    handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def fuzz(folder, rounds, read, monkeypatch):
    """Mutates one file at a time: read() finds it right, or a ValueError names a file.

    Nothing else happens, nothing is written; content may take 256 MB, whatever it says.
    """
    monkeypatch.chdir(folder.parent)
    files = contents(folder)
    rng, taken, refused, there = random.Random(0), 0, 0, sorted(folder.parent.rglob("*"))
    for _ in range(rounds):
        path = rng.choice(list(files))
        path.write_bytes(harmed(path, files[path], rng))
        with bounded(256 << 20):
            try:
                read()
                taken += 1
            except ValueError as error:
                refused += 1
                said, lists = str(error), path.suffix in (".npy", ".json")
                culprits = files if lists else [path]       # what they name may be missed
                named = lists and ".png" in said or any(path.name in said for path in culprits)
                assert named and str(folder) in said and "MemoryError" not in said, (path, error)
        path.write_bytes(files[path])
    assert taken and refused and sorted(folder.parent.rglob("*")) == there
    assert contents(folder) == files


def check_arrays(name, folder):
    T, data = LRA[name], opened(name, folder).data
    for tokens, offsets, labels in data.values():
        assert tokens.dtype == labels.dtype == np.uint8 and offsets.dtype == np.int64
        assert (np.diff(offsets) >= 0).all() and offsets[0] == 0 and offsets[-1] == len(tokens)
        assert len(offsets) == T.documents * len(labels) + 1 and labels.max() < T.classes
        assert T.vocabulary is None or 0 < tokens.min() <= tokens.max() < T.vocabulary
    return data


ROUNDS = pytest.mark.parametrize("rounds", (200, pytest.param(10_000, marks=pytest.mark.slow)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", LRA)
@ROUNDS
def test_fuzzed_files_are_read_or_refused(tmp_path, monkeypatch, name, rounds):
    WRITE[name](tmp_path / "data", rows=dict(image=2, pathfinder=5).get(name, 10))
    check_arrays(name, tmp_path / "data")
    fuzz(tmp_path / "data", rounds, lambda: check_arrays(name, tmp_path / "data"), monkeypatch)


@ROUNDS
def test_a_fuzzed_preparation_is_taken_or_refused(tmp_path, monkeypatch, rounds):
    write_listops(tmp_path / "data")
    prepare(tmp_path / "data")
    shutil.rmtree(tmp_path / "data/listops")
    fuzz(tmp_path / "data", rounds, lambda: check_arrays("listops", tmp_path / "data"), monkeypatch)


def test_the_bounds_of_the_fuzzing_hold(tmp_path, monkeypatch):
    """A reader that takes too much, hangs, writes, or says nothing of the file would be caught."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data/file").write_bytes(bytes(100))
    alternate = iter([False, True] * 1000).__next__

    def reads(harm):
        return lambda: harm() if alternate() else None
    faults = {MemoryError: lambda: bytes(300 << 20), TypeError: lambda: len(5),
              pytest.fail.Exception: lambda: signal.raise_signal(signal.SIGALRM),
              AssertionError: lambda: int("no file is named")}
    for error, harm in faults.items():
        with pytest.raises(error):
            fuzz(tmp_path / "data", 10, reads(harm), monkeypatch)

    def writes():
        Path("outside").touch()
        raise ValueError(tmp_path / "data")
    with pytest.raises(AssertionError):
        fuzz(tmp_path / "data", 10, reads(writes), monkeypatch)


# --------------------------------------------------------------------------------------- 5. batches

ALPHABETS = dict(train=(1, 6), val=(6, 11), test=(11, 16))       # a token tells its split


def varied(tmp_path, name="text", rows=100):
    """A task with documents of many lengths; its splits differ in tokens, size and labels."""
    made, rng = task(name, tmp_path), np.random.default_rng(0)

    def row(split, label):
        lengths = rng.integers(1, 40, made.documents)
        return label, *(rng.integers(*ALPHABETS[split], n, np.uint8).tobytes() for n in lengths)
    sizes = ("train", rows, 5), ("val", 60, 3), ("test", 40, 8)             # rows, and ones in ten
    return filled(made, {split: [row(split, int(i % 10 < ones)) for i in range(n)]
                         for split, n, ones in sizes})


def test_a_batch_is_padded_to_its_longest_cut_and_ended(tmp_path):
    """If compiled, to one of eight lengths."""
    made = task("text", tmp_path)
    made.recipe["length"] = 12
    tokens, lengths, labels = made.batch(made.data["test"], np.array([0, 25]))
    assert bytes(tokens[0, :11].tolist()) == b"neg film 0 " and tokens[0, 11] == lra.END
    assert lengths.tolist() == [12, 12] and labels.tolist() == [0, 1]
    made.recipe["length"] = 4096
    tokens, lengths, _ = made.batch(made.data["test"], np.array([0, 2]))
    assert lengths.tolist() == [19, 20] and tokens.shape == (2, 20)
    assert tokens[0, 18:].tolist() == [lra.END, 0] and tokens[1, 19] == lra.END
    made.recipe["length"], made.compiled = 48, True
    tokens, lengths, _ = made.batch(made.data["test"], np.array([0, 2]))
    assert lengths.tolist() == [19, 20] and tokens.shape == (2, 24)
    assert {made.padded(n) for n in range(1, 49)} == set(range(6, 49, 6))
    assert all(n <= made.padded(n) < n + 6 for n in range(1, 49))


def test_the_processes_of_a_run_share_an_evaluation(three_processes, tmp_path):
    """Each takes its batches, and the sum over all processes is the evaluation of the whole."""
    made = task("text", tmp_path)
    made.recipe["batch"] = 4
    torch.manual_seed(0)
    model = made.model().eval()
    whole = made.evaluate(model, "test")
    parts = three_processes(lambda: made.evaluate(model, "test"))
    assert np.sum(parts, 0) == pytest.approx(whole, rel=1e-5)
    assert all(part[0] < whole[0] for part in parts)


def test_two_documents_come_one_after_the_other(tmp_path):
    made = task("retrieval", tmp_path)
    tokens, lengths, labels = made.batch(made.data["train"], np.array([4, 7]))
    text = [bytes(line[:n - 1].tolist()) for line, n in zip(tokens, lengths)]
    assert text == [b"paper 4 of train", b"paper 7 of train", b'cites "xxxx', b'cites "xxxxxxx']
    assert labels.tolist() == [0, 1]


def test_an_epoch_has_every_row_once_in_another_order(tmp_path):
    made = varied(tmp_path, rows=1000)
    stream = made.stream(3, 20)
    first = stream.order.copy()
    stream.seek((1, 0))
    assert sorted(first.ravel()) == sorted(stream.order.ravel()) == list(range(1000))
    assert not np.array_equal(first, stream.order)
    assert not np.array_equal(first, made.stream(4, 20).order)
    assert np.array_equal(first, made.stream(3, 20).order)
    batches = [next(stream) for _ in range(50)]
    for tokens, _, _ in batches:
        assert set(tokens.flatten().tolist()) - {0, lra.END} <= set(range(*ALPHABETS["train"]))
    padding = [1 - int(lengths.sum()) / tokens.numel() for tokens, lengths, _ in batches]
    assert np.mean(padding) < 0.15, "rows of like length belong together"
    assert len({tokens.shape[1] for tokens, _, _ in (next(stream) for _ in range(5))}) > 1


def test_rows_meet_others_in_every_epoch(tmp_path):
    """Were all rows sorted by length at once, those of a batch would never part."""
    made = task("text", tmp_path)
    filled(made, {split: [(0, b"a" * n) for n in range(1, 1001)] for split in arena.SPLITS})
    stream, epochs = made.stream(0, 2), []
    for epoch in range(2):
        stream.seek((epoch, 0))
        shortest = stream.order[:64].min(1).tolist()
        assert shortest != sorted(shortest), "short rows first, long ones last"
        epochs.append({tuple(sorted(rows)) for rows in stream.order.tolist()})
    assert len(epochs[0]) == 500 and len(epochs[0] & epochs[1]) < 50


def test_a_stream_goes_on_where_it_was(tmp_path):
    made = varied(tmp_path)
    stream, other = made.stream(3, 30), made.stream(3, 30)
    for i in range(8):                                                      # three batches an epoch
        position = stream.position()
        expected = next(stream)
        other.seek(position)
        assert all(torch.equal(x, y) for x, y in zip(next(other), expected)), f"batch {i}"
    assert stream.position() == (2, 2)


@pytest.mark.parametrize("name", ("text", "retrieval"))
def test_ranks_share_each_batch_equally(tmp_path, name):
    made = varied(tmp_path, name)
    model = made.model().to(f64)
    whole, parts = made.stream(1, 12), [made.stream(1, 12, rank=rank, world=3) for rank in range(3)]
    for _ in range(10):
        loss = made.loss(model, next(whole))
        shards = [next(part) for part in parts]
        assert [len(labels) for _, _, labels in shards] == [4, 4, 4]
        assert abs(loss - sum(made.loss(model, shard) for shard in shards) / 3) < 1e-12
    with pytest.raises(ValueError, match="100 training rows, fewer than a batch of 128"):
        made.stream(1, 128)


# ---------------------------------------------------------------------------------------- 6. models

@pytest.mark.parametrize("model", offered("lra"))
@pytest.mark.parametrize("name", ("listops", "retrieval"))
def test_padding_changes_nothing(tmp_path, name, model):
    torch.manual_seed(0)
    made = varied(tmp_path, name)
    network = made.model(model).to(f64).eval()
    tokens, lengths, _ = made.batch(made.data["train"], np.arange(6))
    together = network(tokens, lengths)
    longer = network(torch.nn.functional.pad(tokens, (0, 37)), lengths)
    assert (longer - together).abs().max() < 1e-10
    for i in range(6):
        alone = network(*made.batch(made.data["train"], np.array([i]))[:2])
        assert (alone[0] - together[i]).abs().max() < 1e-10, f"row {i} alone is not as in its batch"
    single = made.model(model).eval()
    longer = single(torch.nn.functional.pad(tokens, (0, 37)), lengths)
    assert (longer - single(tokens, lengths)).abs().max() < 1e-5


@pytest.mark.parametrize("name, allowed", (("listops", 0.04), ("text", 0.02), ("retrieval", 0.03),
                                           ("image", 0.01), ("pathfinder", 0.01)))
def test_paper_sizes_have_the_papers_parameters(name, allowed):
    T = LRA[name]
    with torch.device("meta"):
        paper, tiny = (parameters(T(**T.numbers(size)).model()) for size in ("paper", "tiny"))
    assert abs(paper / T.paper_parameters - 1) < allowed, f"{paper:,}"
    assert 50_000 < tiny < 100_000, f"{tiny:,}"


@pytest.mark.parametrize("name, size", (("text", "tiny"), ("image", "tiny"),
                                        ("retrieval", "paper")))
def test_models_are_of_like_size(name, size):
    with torch.device("meta"):
        made = LRA[name](**LRA[name].numbers(size))
        networks = {model: made.model(model) for model in offered("lra")}
        with pytest.raises(ValueError, match="did you mean mamba.*transformer"):
            made.model("mambo")
    counts = {model: parameters(network) for model, network in networks.items()}
    for model, network in networks.items():
        H = network.head[-1].in_features if LRA[name].documents == 2 else network.head.in_features
        off = counts[model] / counts["gril"] - 1
        assert abs(off) < min(0.07, 1.1 * 4 / H), f"{model}: another width is nearer, {counts}"


@pytest.mark.parametrize("model", offered("lra"))
@pytest.mark.parametrize("name", LRA)
def test_every_model_runs_on_every_task_without_data(name, model):
    made = LRA[name]("/nonexistent", length=40)
    with torch.device("meta"):
        network, batch = made.model(model), made.example(4)
        assert network(*batch[:2]).shape == (4, LRA[name].classes)
        made.loss(network, batch).backward()
        assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("numbers, answer", (
    (dict(dropout=1.0), "--dropout must be less than 1, got 1.0"),
    (dict(r_max=1.01), "--r-max must be at most 1, got 1.01"),
    (dict(r_min=0.95), "--r-min 0.95 is more than --r-max 0.9"),
    (dict(hidden=8), "unknown number of text, 'hidden'")))
def test_numbers_have_their_ranges(numbers, answer):
    with pytest.raises(ValueError, match=answer):
        LRA["text"](**numbers)


NUMBERS = "layers H J P steps warmup lr weight_decay dropout batch length".split()
TABLES = {      # Tables 8 and 9, LRA's length; then millions of parameters, accuracy (Table 10)
    "retrieval": (4, 128, 16, 256, 100_000, 10_000, 4e-3, 0.01, 0.1, 64, 4000, 1.00, 87.90),
    "listops": (6, 128, 8, 32, 300_000, 30_000, 2e-3, 0.05, 0.0, 32, 2048, 0.26, 62.40),
    "text": (6, 256, 16, 128, 78_200, 4_000, 5e-4, 0.12, 0.1, 32, 4096, 1.43, 86.86),
    "image": (7, 512, 2, 256, 281_400, 28_000, 4e-3, 0.05, 0.1, 32, 1024, 6.46, 72.56),
    "pathfinder": (6, 256, 16, 128, 500_000, 1_000, 4e-4, 0.10, 0.1, 32, 1024, 1.39, 72.86),
}


@pytest.mark.parametrize("name", LRA)
def test_the_paper_recipe_is_that_of_the_papers_tables(name):
    T, r = LRA[name], LRA[name].numbers("paper")
    results = T.paper_parameters / 1e6, T.paper_accuracy
    assert (*(r[key] for key in NUMBERS), *results) == TABLES[name]
    assert r["recurrent_lr"] == r["lr"] / 4
    assert r["evaluate_rows"] == 0, "the paper's size validates on all rows"


@pytest.mark.parametrize("size", ("tiny", "paper"))
@pytest.mark.parametrize("name", LRA)
def test_recipes_choose_by_the_highest_validation_accuracy(name, size):
    r = LRA[name].numbers(size)
    assert (LRA[name].choose, LRA[name].higher) == ("accuracy", True)
    assert 0 < r["recurrent_lr"] < r["lr"] and 0 < r["warmup"] < r["steps"] and r["clip"] == 1
    assert 0 <= r["r_min"] < r["r_max"] < 1 and 0 < r["max_phase"] <= 2 * np.pi
    assert set(LRA[name].recipes[size]) <= set(r), "a number that the task does not have"


def modules(network, kind):
    return [module for module in network.modules() if isinstance(module, kind)]


LAYERS = dict(gril=GrilMixer, linear_attention=GrilMixer, filtered=baselines.Filtered,
              longhorn=baselines.Longhorn, s5=baselines.S5, lru=baselines.LRU,
              mamba=baselines.Mamba, griffin=baselines.Griffin, transformer=baselines.Transformer)


@pytest.mark.parametrize("model", offered("lra"))
def test_models_are_built_as_the_recipe_says(model):
    """Numbers that no preset has, so that none can be there by itself."""
    odd = dict(layers=6, H=18, P=24, J=3, dropout=0.3, r_min=0.61, r_max=0.62, max_phase=0.01)
    for gate in ("real", "complex") if issubclass(LAYERS[model], GrilMixer) else ("real",):
        network = LRA["text"](**odd, gate=gate).model(model)
        layers = modules(network, LAYERS[model])
        assert len(layers) == (2 if model == "griffin" else 6)
        drops = modules(network, torch.nn.Dropout)
        assert len(drops) >= 6 and {drop.p for drop in drops} == {0.3}
        normed = model in ("mamba", "longhorn", "griffin", "transformer")
        assert isinstance(network.norm, torch.nn.LayerNorm) == normed
        for mixer in modules(network, GrilMixer):
            w = 3 if model == "gril" else 1
            assert mixer.Q.shape == (3, w, w) and mixer.W_in.weight.shape == (24, 18)
            assert (mixer.beta == 1).all() and (mixer.theta is None) == (gate == "real")
        rings = [complex_gate(*mixer.gates()[:2]) for mixer in modules(network, GrilMixer)]
        rings += [mixer.system()[0] for mixer in modules(network, baselines.LRU)]
        for gates in rings:
            assert ((gates.abs() - 0.615).abs() < 0.0051).all()
            assert ((gates.angle() - 0.005).abs() < 0.0051).all()
        assert {len(mixer.Lambda_im) for mixer in modules(network, baselines.S5)} <= {24 // 2}
        assert {len(mixer.conv.W) for mixer in modules(network, baselines.Filtered)} <= {3}
        heads = {attention.heads for attention in modules(network, baselines.Attention)}
        assert heads == dict(griffin={4}, transformer={2}).get(model, set())


def test_black_and_white_are_two_standard_deviations_from_grey():
    torch.manual_seed(0)
    embed = lra.Pixels(4)
    expected = embed.bias + torch.tensor([[-2.0], [2.0]]) * embed.weight[:, 0]
    assert torch.allclose(embed(torch.tensor([0, 255])), expected, atol=1e-6)


def head_input(network, *batch):
    """What the head of a classifier is given."""
    seen = []
    hook = network.head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    network(*batch)
    hook.remove()
    return seen[0]


def test_the_head_reads_the_mean_over_a_document():
    network = lra.Classifier(torch.nn.Embedding(257, 4), [], False, 4, 2).to(f64)
    tokens, lengths = torch.tensor([[5, 6, 9, 0], [7, 7, 8, 9]]), torch.tensor([3, 4])
    mean = torch.stack([network.embed.weight[row].mean(0) for row in ([5, 6, 9], [7, 7, 8, 9])])
    assert (head_input(network, tokens, lengths) - mean).abs().max() < 1e-12
    assert (network(tokens, lengths) - network.head(mean)).abs().max() < 1e-12


def test_two_documents_meet_as_both_difference_and_product(tmp_path):
    made = varied(tmp_path, "retrieval")
    network = made.model().to(f64).eval()
    tokens, lengths, _ = made.batch(made.data["train"], np.arange(3))
    single = lra.Classifier(network.embed, network.layers, False, 8, 2).to(f64)
    a, b = head_input(single, tokens, lengths).chunk(2)         # all first ones, then all second
    expected = torch.cat([a, b, a - b, a * b], -1)
    assert (head_input(network, tokens, lengths) - expected).abs().max() < 1e-12
    inner, _, outer = network.head
    logits = outer(torch.nn.functional.gelu(inner(expected)))
    assert (network(tokens, lengths) - logits).abs().max() < 1e-12


class Says(torch.nn.Module):
    """A classifier that gives every row the same logits, and keeps what it was given."""

    def __init__(self, *logits):
        super().__init__()
        self.logits, self.rows = torch.nn.Parameter(torch.tensor(logits)), []

    def forward(self, tokens, lengths):
        self.rows += [bytes(row[:n].tolist()) for row, n in zip(tokens, lengths)]
        return self.logits.expand(len(tokens), -1)


def test_validation_and_test_are_scored_on_their_own_rows(tmp_path):
    """Always to say 1 is right for 30% of the validation rows, 80% of test, half of train."""
    made = varied(tmp_path, "listops")
    made.recipe.update(batch=7, evaluate_rows=1000)                     # more than there are
    p = torch.tensor([0.2, 0.8]).log()

    def cost(ones):
        return -(ones * p[1] + (1 - ones) * p[0]).item()
    scores = made.validate(Says(*p))
    assert scores == pytest.approx(dict(loss=cost(0.3), accuracy=30, test_accuracy=80))
    for rows in (5, 0):                                                     # of a validation alone
        made.recipe["evaluate_rows"] = rows
        report = made.report(Says(*p))
        depths = report.pop("by_depth")
        assert report == pytest.approx(dict(
            test_loss=cost(0.8), test_accuracy=80, test_rows=40, most_frequent=80, parameters=2,
            outermost=report["outermost"]))
        assert sum(row["rows"] * row["accuracy"] for row in depths.values()) == 40 * 80
    assert made.validate(Says(*p)).keys() == {"loss", "accuracy"}, "of all rows: test waits"
    batch = made.batch(made.data["train"], np.arange(7))                    # five ones, two zeros
    assert made.loss(Says(*p), batch).item() == pytest.approx(cost(5 / 7))


def test_listops_is_reported_by_depth_beside_its_outermost_operator(tmp_path):
    """MAX is mostly 7 in train, MED 4; SM, which it does not have, is taken for 0."""
    def rows(*texts):
        return [(int(label), bytes(arena.SYMBOLS.index(symbol) + 1 for symbol in symbols))
                for *symbols, _, label in map(str.split, texts)]
    made = filled(task("listops", tmp_path), dict(
        train=rows("[MAX 7 ] = 7", "[MAX 2 ] = 2", "[MAX 7 1 ] = 7", "[MED 4 ] = 4"),
        val=rows("[MAX 7 ] = 7"),
        test=rows("[MAX 2 ] = 2", "[MED 4 ] = 4", "[MAX 7 [MIN 2 [SM 3 ] ] ] = 7", "[SM 0 ] = 0")))
    report = made.report(Says(0.0, 0.0, 1.0, *[0.0] * 7))                   # 2, whatever there is
    assert report["outermost"] == 75 and report["by_depth"] == {
        1: dict(rows=3, outermost=pytest.approx(200 / 3), accuracy=pytest.approx(100 / 3)),
        3: dict(rows=1, outermost=100, accuracy=0)}
    assert made.table(report).endswith("\n  depth 1, 3 rows: 33.3, by the outermost operator 66.7"
                                       "\n  depth 3, 1 rows: 0.0, by the outermost operator 100.0")


def test_a_part_of_a_validation_is_spread_over_the_rows(tmp_path):
    """Text's rows come class by class: the first of them are of one class."""
    made = filled(task("listops", tmp_path), {
        split: [(int(i >= 50), bytes([place, i // 10 + 1, i % 10 + 1])) for i in range(100)]
        for place, split in enumerate(("train", "val", "test"), 1)})
    made.recipe["evaluate_rows"] = 20
    says = Says(0.0, 1.0)
    scores = made.validate(says)
    loss = -torch.tensor([0.0, 1.0]).log_softmax(0).mean().item()           # half of the rows each
    assert scores == pytest.approx(dict(loss=loss, accuracy=50, test_accuracy=50))
    for place, rows in ((2, says.rows[:20]), (3, says.rows[20:])):
        assert {row[0] for row in rows} == {place} and len(set(rows)) == 20
        assert Counter(row[1] for row in rows) == dict.fromkeys(range(1, 11), 2), "two of each ten"
    assert len(says.rows) == 40


def test_accuracy_counts_every_row_once(tmp_path):
    made = varied(tmp_path)
    network = made.model().to(f64).eval()
    made.recipe["batch"] = 7
    for split in ("val", "test"):
        data = made.data[split]
        alone = (made.batch(data, np.array([i]))[:2] for i in range(len(data.labels)))
        logits = torch.cat([network(*row) for row in alone])
        labels = torch.tensor(data.labels.astype(int))
        loss, accuracy = made.evaluate(network, split)
        assert accuracy == pytest.approx(100 * (logits.argmax(-1) == labels).double().mean().item())
        expected = torch.nn.functional.cross_entropy(logits, labels).item()
        assert loss == pytest.approx(expected, rel=1e-5)


def test_the_table_says_which_number_is_which():
    made = LRA["image"]()
    result = dict(model="lru", parameters=12_345, test_rows=678, test_accuracy=41.5,
                  best_test_accuracy=43.25, most_frequent=10.75)
    title, *lines = made.table(result).splitlines()
    assert title == "image: accuracy in percent on 678 test rows"
    assert [line.rsplit(maxsplit=1) for line in lines] == [
        ["lru, 12,345 parameters", "41.50"],
        ["  best on test, of all validations", "43.25"],
        ["always the most frequent class", "10.75"],
        ["the paper's GRIL, full size and data", "72.56"]]
    assert max(map(len, lines)) <= 80
    del result["best_test_accuracy"]
    assert "best" not in made.table(result)


# ------------------------------------------------------------------------ 7. command line, training

def test_the_command_line_reads_well(tmp_path, capsys):
    with pytest.raises(SystemExit):
        lra.main(["--help"])
    for name in LRA:
        WRITE[name](tmp_path)
        lra.main(["show", name, "--data", str(tmp_path), "--row", "1"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "[SM 9 [MIN 5 2 ] ]\n\nlabel    1\n" in shown
    assert 'cites "x' in shown and "GRIL_DATA" in shown and "% of train are right" in shown
    for command, answer in (("show lisops", "did you mean listops"),
                            ("show text --row 99", "0 to 35"),
                            ("prepare listops --incomplete", "is for text and image"),
                            ("prepare listops --rows 0 1 1 --force", "at least 1")):
        with pytest.raises(SystemExit, match=answer):
            lra.main([*command.split(), "--data", str(tmp_path)])


def test_what_show_counts(tmp_path, capsys, monkeypatch):
    made = filled(task("listops", tmp_path), dict(
        train=[(3, b"\1\2"), (3, b"\1"), (5, b"\2\2\3\4"), (7, b"\2\2")],
        val=[(0, b"\1")], test=[(9, b"\1\2\3")]))
    monkeypatch.setattr(LRA["listops"], "data", made.data)
    lra.main(["show", "listops", "--data", str(tmp_path), "--row", "2"])
    assert capsys.readouterr().out.splitlines() == [
        "document 2", "1 1 2 3", "", "label    5",
        "a batch  tokens (4, 4), lengths 1 to 4, labels (4,)",
        "guess    75.0% of train are right by the first token alone",   # two 3 after 1, one after 2
        "train    4 rows; tokens 1 to 4, median 2", "         labels 0 0 0 2 0 1 0 1 0 0",
        "val      1 rows; tokens 1 to 1, median 1", "         labels 1 0 0 0 0 0 0 0 0 0",
        "test     1 rows; tokens 3 to 3, median 3", "         labels 0 0 0 0 0 0 0 0 0 1"]


@pytest.mark.parametrize("script", ("train.py", "lra.py", "lm.py", "figures.py",
                                    "bench.py"))
def test_control_c_while_torch_loads_leaves_no_traceback(tmp_path, script):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    done = subprocess.run([sys.executable, Path(lra.__file__).with_name(script)],
                          env=dict(os.environ, PYTHONPATH=str(tmp_path)), stderr=subprocess.PIPE)
    assert done.returncode and not done.stderr


def test_the_data_folder(monkeypatch):
    monkeypatch.delenv("GRIL_DATA", raising=False)
    assert lra.data_folder() == Path("data") and lra.data_folder("x") == Path("x")
    monkeypatch.setenv("GRIL_DATA", "y")
    assert lra.data_folder() == Path("y") and lra.data_folder("x") == Path("x")


def overfit(made, steps, rows=64):
    """Trains on rows evenly spread over the split until all are right; the last accuracy."""
    data = made.data["train"]
    texts, k = documents(data), made.documents
    chosen = [(data.labels[row], *texts[row * k:row * k + k])
              for row in np.linspace(0, len(data.labels) - 1, rows).astype(int)]
    filled(made, {split: chosen for split in arena.SPLITS})
    torch.manual_seed(0)
    model, stream = made.model(), made.stream(0, 32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    for step in range(1, steps + 1):
        loss = made.loss(model, next(stream))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == steps or step % 10 == 0 and loss < 0.3:
            accuracy = made.evaluate(model, "train")[1]
            if accuracy == 100:
                break
    return accuracy


@pytest.mark.parametrize("name, steps", (("text", 150), ("listops", 300)))
def test_64_rows_are_learnt_by_heart(tmp_path, name, steps):
    """Real reviews, and generated rows where there are no files; the first 32 tokens of each."""
    if name == "listops":
        arena.generate_listops(tmp_path / "listops", (64, 1, 1))
    folder = tmp_path if name == "listops" else real(name)
    assert overfit(opened(name, folder, length=32, H=32, P=32, dropout=0.0), steps) == 100


@pytest.mark.slow
@pytest.mark.parametrize("name", LRA)
def test_64_real_rows_are_learnt_by_heart_at_tiny_size(name):
    assert overfit(opened(name, real(name), dropout=0.0), steps=400) == 100

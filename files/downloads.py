"""The data folder, and files from the web or out of archives, checked and unpacked safely.

Every reader takes bounded memory and answers anything malformed with a ValueError that names the
file. Nothing half-made ever has the name of something whole.
"""
import gzip
import hashlib
import io
import lzma
import os
import tarfile
import tempfile
import urllib.request
from http.client import HTTPException
from pathlib import Path

import numpy as np
from tqdm import tqdm

from files.whole import whole
from machine.errors import Missing


def data_folder(argument=None):
    """--data, or the environment variable GRIL_DATA, or data/."""
    return Path(argument or os.environ.get("GRIL_DATA") or "data")


def unpacked(file, limit):
    """All that a packed file holds; read(limit) would take so much memory whatever there is."""
    content = io.BytesIO()
    while chunk := file.read(1 << 20):
        content.write(chunk)
        if content.tell() > limit:
            raise ValueError(f"unpacks to more than {limit:,} bytes")
    content.seek(0)
    return content


def broken(path, error):
    return ValueError(f"{path}: no whole archive ({type(error).__name__}: {error})")


def archive(path, limit=1 << 30):
    """(name, bytes) of the plain files in a tar.gz or tar.xz, unpacked in memory, 1 GB at most.

    Reading to the end makes gzip and xz check their sums. tarfile takes a damaged header for the
    end of the archive, so what follows its last member must be zeros.
    """
    try:
        with (lzma if path.suffix == ".xz" else gzip).open(path) as file:
            content = unpacked(file, limit)
        data = np.frombuffer(content.getbuffer(), np.uint8)
        with tarfile.open(fileobj=content, mode="r:") as tar:
            members = tar.getmembers()
            if data[tar.offset:].any():
                raise ValueError(f"damaged at byte {tar.offset:,} of the unpacked archive")
    except Exception as error:                          # a decoder has exceptions of its own
        raise broken(path, error) from None
    for member in members:
        if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            yield member.name, data[member.offset_data:][:member.size].tobytes()


def download(address, path, checksum=None):
    """A file from the web, named when its length and checksum (MD5 or SHA-256) are right."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = "sha256" if len(checksum or "") == 64 else "md5"
    digest = hashlib.new(kind)
    # some servers refuse urllib's own name
    request = urllib.request.Request(address, headers={"User-Agent": "Mozilla/5.0"})
    try:
        with whole(path) as file, urllib.request.urlopen(request, timeout=60) as response:
            size = int(response.headers.get("Content-Length") or 0) or None
            with tqdm(desc=path.name, total=size, unit="B", unit_scale=True, ncols=80) as bar:
                while chunk := response.read(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
                    bar.update(len(chunk))
            if size and file.tell() != size:
                raise OSError(f"only {file.tell():,} of {size:,} bytes came")
            if checksum and digest.hexdigest() != checksum:
                raise OSError(f"its {kind} is {digest.hexdigest()}, published is {checksum}")
    except (OSError, HTTPException) as error:
        raise Missing(f"could not download {address} ({error}). By hand:\n"
                      f"  curl -L -o {path} {address}") from None


class Header(tarfile.TarInfo):
    """tarfile takes a long name or attributes into memory whole, whatever their size: here 1 MB."""
    LONG = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE,
            tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        header = super().frombuf(buf, encoding, errors)
        if header.size > 1 << 20 and header.type in cls.LONG:
            raise ValueError(f"a header of {header.size:,} bytes")
        return header


def unpack(path, folder, wanted, limit=1 << 34):
    """The part of LRA's release whose names hold `wanted`, into folder; 16 GB at most, or nothing.

    Links, devices and pipes are left out; a name is taken from `wanted` on, and may not lead out.
    """
    if not hasattr(tarfile, "data_filter"):
        raise ValueError("this Python's tarfile has no data filter to unpack safely: "
                         "use 3.10.12, 3.11.4, 3.12 or newer")
    total = 0
    with tempfile.TemporaryDirectory(dir=folder, prefix=".part-") as part:
        try:
            with tarfile.open(path, "r|gz", tarinfo=Header) as tar:
                for member in tqdm(tar, unit="file", ncols=80, desc=path.name):
                    if not member.isreg() or wanted not in member.name:
                        continue
                    total += member.size
                    if total > limit:
                        raise ValueError(f"unpacks to more than {limit:,} bytes")
                    name = member.name[member.name.index(wanted):]
                    tar.extract(member.replace(name=name, deep=False), part, filter="data")
        except Exception as error:
            if getattr(error, "errno", None):               # the disk's fault, not the archive's
                raise
            raise broken(path, error) from None
        if not (Path(part) / wanted).exists():
            raise ValueError(f"{path}: no {wanted} in it")
        (folder / wanted).parent.mkdir(parents=True, exist_ok=True)
        os.replace(Path(part) / wanted, folder / wanted)

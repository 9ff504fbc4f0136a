"""Files of a shard set wherever they are: a local folder, or any URL that fsspec knows (s3://, gs://, hf://, http://).

A remote shard is fetched whole into a local file, kept in a cache folder of bounded size or for as long as it is read.
A broken download resumes where it stopped; a place that sends nothing for GIVE_UP seconds is given up.
"""

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

from draftgrid.common.files import atomic

T = TypeVar("T")

GIVE_UP = 40.0
"""Seconds without one new byte after which a file counts as unreadable."""
LONGEST_WAIT = 8.0
CHUNK = 4 << 20
"""Bytes requested at once: the most that a broken connection costs."""


def is_url(place: str | Path) -> bool:
    return "://" in str(place) or str(place).startswith("memory:")


def join(place: str | Path, name: str) -> str:
    return f"{str(place).rstrip('/')}/{name}"


def read_bytes(place: str, what: str = "file") -> bytes:
    """A small file as a whole. Raises FileNotFoundError, or ValueError naming it once it is given up."""

    def read() -> bytes:
        with _open(place) as file:
            return file.read()

    return _patiently(read, f"{what} {place}")


def fetch(place: str, size: int, sha256: str, out: IO[bytes]) -> None:
    """Copy a remote shard into `out`. Raises ValueError naming it if it is given up or is not what it should be."""
    out.seek(0)

    def copy() -> None:
        with _open(place) as file:
            file.seek(out.tell())
            while chunk := file.read(CHUNK):
                out.write(chunk)
        if out.tell() < size:
            raise OSError(f"connection closed after {out.tell()} of {size} bytes")

    _patiently(copy, f"shard {place}", out.tell)
    out.flush()
    out.seek(0)
    digest, held = hashlib.file_digest(out, "sha256").hexdigest(), out.tell()  # type: ignore[arg-type]
    out.seek(0)
    if held != size or digest != sha256:
        raise ValueError(f"shard {place} is not the one its manifest names: {held} bytes, sha256 {digest[:12]}")


def _open(place: str) -> Any:
    import fsspec

    settings: dict[str, Any] = {}
    if place.startswith(("http://", "https://")):
        import aiohttp

        settings["block_size"] = CHUNK
        settings["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(sock_connect=10, sock_read=10)}
    return fsspec.open(place, "rb", **settings).open()


def _patiently(call: Callable[[], T], what: str, progress: Callable[[], int] = lambda: 0) -> T:
    """Call until it works, waiting longer each time; give up when nothing has moved for GIVE_UP seconds."""
    wait, last, moved = 0.5, progress(), time.monotonic()
    while True:
        try:
            return call()
        except Exception as error:  # every file system has its own
            # fsspec's HTTP says "not found" of any answer but the right one, and keeps the answer as the cause.
            if isinstance(error, FileNotFoundError) and getattr(error.__cause__, "status", 404) == 404:
                raise
            if progress() > last:
                wait, last, moved = 0.5, progress(), time.monotonic()
            if time.monotonic() - moved + wait > GIVE_UP:
                reason = str(error).replace("\n", " ") or type(error).__name__
                raise ValueError(f"{what} cannot be read, tried for {GIVE_UP:.0f} s: {reason}") from None
            time.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT)


class Cache:
    """A folder of fetched shards that many processes share, kept below `limit` bytes by dropping the longest unused.

    A shard that is dropped while it is read stays readable: the reader holds the open file.
    """

    def __init__(self, folder: str | Path, limit: int) -> None:
        self.folder, self.limit = Path(folder), limit

    def open(self, place: str, size: int, sha256: str) -> IO[bytes]:
        path = self.folder / f"{sha256}.tar"
        with contextlib.suppress(FileNotFoundError):
            file = open(path, "rb")  # noqa: SIM115 - the caller closes it
            if os.fstat(file.fileno()).st_size == size:
                os.utime(file.fileno())
                return file
            file.close()
        with atomic(path) as temporary:
            with open(temporary, "w+b") as out:
                fetch(place, size, sha256, out)
            file = open(temporary, "rb")  # noqa: SIM115 - before another process may drop it
        self._shrink(keep=path)
        return file

    def _shrink(self, keep: Path) -> None:
        held = []
        for path in self.folder.glob("*.tar"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                held.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in held)
        for _, size, path in sorted(held):
            if total > self.limit and path != keep:
                path.unlink(missing_ok=True)
                total -= size


@contextmanager
def open_shard(place: str, size: int, sha256: str, cache: Cache | None = None) -> Iterator[IO[bytes]]:
    """A shard as a local file open for reading. Raises ValueError naming it if it cannot be fetched or opened."""
    file: IO[bytes]
    with contextlib.ExitStack() as opened:
        try:
            if not is_url(place):
                file = _patiently(lambda: opened.enter_context(open(place, "rb")), f"shard {place}")
            elif cache:
                file = opened.enter_context(cache.open(place, size, sha256))
            else:
                file = opened.enter_context(tempfile.TemporaryFile())
                fetch(place, size, sha256, file)
        except FileNotFoundError:
            raise ValueError(f"shard {place} is missing") from None
        yield file

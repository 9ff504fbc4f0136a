"""Shard sets at URLs: fetched whole, resumed where a connection broke off, cached within a limit, given up by name."""

import itertools
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
from torch.utils.data import DataLoader

from draftgrid.common.files import sha256
from draftgrid.data import places
from draftgrid.data.config import StreamConfig
from draftgrid.data.module import TokenDataModule
from draftgrid.data.places import Cache, open_shard
from draftgrid.data.shards import read_manifest
from draftgrid.data.stream import ShardSet, Split, TokenStream
from tests.data_fixtures import TOKENIZER, all_keys, write_set


class Server:
    """A folder over HTTP on the loopback, as unreliable as it is told to be."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.requests = folder, list[str]()
        self.drop_after = 0
        """Close every second connection after so many bytes of a shard, `drops` times."""
        self.drops = 0
        self.dead: set[str] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET(body=False)

            def do_GET(self, body: bool = True) -> None:
                path = outer.folder / self.path.lstrip("/")
                if not path.is_file() or path.name in outer.dead:
                    self.send_error(503 if path.name in outer.dead else 404)
                    return
                content = path.read_bytes()
                first, last = 0, len(content) - 1
                if wanted := self.headers.get("Range"):
                    a, _, b = wanted.removeprefix("bytes=").partition("-")
                    first, last = int(a), min(int(b or last), last)
                self.send_response(206 if wanted else 200)
                self.send_header("Accept-Ranges", "bytes")
                self.send_header("Content-Length", str(last - first + 1))
                if wanted:
                    self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
                self.end_headers()
                if not body:
                    return
                outer.requests.append(f"{path.name} {first}")
                part = content[first : last + 1]
                if outer.drops and path.suffix == ".tar" and len(outer.requests) % 2:
                    outer.drops -= 1
                    self.wfile.write(part[: outer.drop_after])
                    self.wfile.flush()
                    self.connection.close()
                    return
                self.wfile.write(part)

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    write_set(tmp_path / "served" / "train", [40, 30, 20])
    write_set(tmp_path / "served" / "validation", [3])
    server = Server(tmp_path / "served")
    yield server
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "GIVE_UP", 1.5)
    monkeypatch.setattr(places, "LONGEST_WAIT", 0.5)


def keys(place: str, cache: Cache | None = None, workers: int = 0) -> list[str]:
    shards = ShardSet(place, read_manifest(place), cache=cache)
    stream = TokenStream([shards], Split(1, max(1, workers), 1))
    batches = itertools.islice(DataLoader(stream, batch_size=None, num_workers=workers), 90)
    return [k for b in batches for k in b.keys]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["file", "http", "memory"])
def test_a_set_at_a_url_streams_as_the_same_set_in_a_folder(
    server: Server, tmp_path: Path, kind: str, workers: int
) -> None:
    local = tmp_path / "served" / "train"
    place = {"file": f"file://{local}", "http": f"{server.url}/train", "memory": "memory://set/train"}[kind]
    if kind == "memory":
        fsspec.filesystem("memory").put(str(local), "/set/train", recursive=True)
    assert keys(place, workers=workers) == keys(str(local), workers=workers)
    assert sorted(keys(place)) == all_keys([40, 30, 20])


def test_a_module_reads_both_its_sets_from_a_url(server: Server) -> None:
    module = TokenDataModule(StreamConfig(dir=server.url, batch_size=5, workers=0), TOKENIZER, (4, 4))
    assert len(next(iter(module.train_dataloader())).keys) == 5
    assert [k for b in module.val_dataloader() for k in b.keys] == all_keys([3])
    assert len(module.sample_tokens(50)) == 50


def test_a_dropped_connection_is_taken_up_where_it_broke_off(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "CHUNK", 16384)
    server.drops, server.drop_after = 3, 5000
    assert sorted(keys(f"{server.url}/train")) == all_keys([40, 30, 20])
    assert server.drops == 0
    assert any(not r.endswith(" 0") for r in server.requests if ".tar" in r)  # not from the beginning


def test_a_shard_that_stays_unreadable_is_given_up_by_its_name(server: Server) -> None:
    server.dead.add("shard-000001.tar")
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"shard http.*/train/shard-000001\.tar cannot be read, tried for \d+ s: "):
        keys(f"{server.url}/train")
    assert time.monotonic() - begun < 10
    server.dead.clear()
    assert sorted(keys(f"{server.url}/train")) == all_keys([40, 30, 20])


def test_a_shard_or_manifest_that_is_not_there_is_missing_at_once(server: Server, tmp_path: Path) -> None:
    (tmp_path / "served" / "train" / "shard-000002.tar").unlink()
    with pytest.raises(ValueError, match=r"shard http.*shard-000002\.tar is missing"):
        keys(f"{server.url}/train")
    with pytest.raises(ValueError, match="nowhere holds no token shards"):
        keys(f"{server.url}/nowhere")


def test_other_bytes_than_the_manifests_are_refused(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "served" / "train" / "shard-000000.tar"
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"shard-000000\.tar is not the one its manifest names: \d+ bytes, sha256"):
        keys(f"{server.url}/train")


def test_the_cache_spares_the_second_fetch_and_stays_below_its_limit(server: Server, tmp_path: Path) -> None:
    place, folder = f"{server.url}/train", tmp_path / "cache"
    shards = read_manifest(place).shards
    keys(place, Cache(folder, 10**9))
    fetched = len(server.requests)
    keys(place, Cache(folder, 10**9))
    assert len(server.requests) == fetched + 1  # the manifest
    assert {p.name for p in folder.iterdir()} == {f"{s.sha256}.tar" for s in shards}
    small = Cache(tmp_path / "small", shards[0].bytes + shards[1].bytes)
    for shard in (shards[0], shards[1], shards[0], shards[2]):
        small.open(f"{place}/{shard.file}", shard.bytes, shard.sha256).close()
        os.sync()
        time.sleep(0.02)
    held = {p.name for p in (tmp_path / "small").iterdir()}
    assert held == {f"{shards[0].sha256}.tar", f"{shards[2].sha256}.tar"}  # the longest unused is gone


def test_a_shard_dropped_from_the_cache_while_it_is_read_stays_readable(server: Server, tmp_path: Path) -> None:
    place = f"{server.url}/train"
    first, second, _ = read_manifest(place).shards
    cache = Cache(tmp_path / "cache", 1)
    with open_shard(f"{place}/{first.file}", first.bytes, first.sha256, cache) as file:
        with open_shard(f"{place}/{second.file}", second.bytes, second.sha256, cache):
            assert [p.name for p in (tmp_path / "cache").iterdir()] == [f"{second.sha256}.tar"]
        assert len(file.read()) == first.bytes


def test_a_cut_file_in_the_cache_is_fetched_again(server: Server, tmp_path: Path) -> None:
    place = f"{server.url}/train"
    shard = read_manifest(place).shards[0]
    cache = Cache(tmp_path / "cache", 10**9)
    path = tmp_path / "cache" / f"{shard.sha256}.tar"
    path.parent.mkdir()
    path.write_bytes(b"half")
    cache.open(f"{place}/{shard.file}", shard.bytes, shard.sha256).close()
    assert sha256(path) == shard.sha256

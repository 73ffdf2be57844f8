"""Files of raw rows in a bucket, on a web server and on a Hub of our own: found, copied while read, and refused."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.data.stores import find
from spotune_trainer.data.stores.find import find_stored_files, local_copy
from tests.trainer.support.hub_datasets import Files, serving, serving_dataset


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "PAUSES_SECONDS", (0.01, 0.01, 0.01))


def names(source: str) -> list[str]:
    return [file.url.removeprefix("s3://bucket/") for file in find_stored_files(source)]


# Buckets


@pytest.fixture
def tree(s3: Any) -> None:
    keys = ("b.jsonl", "a.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl", ".hidden.jsonl", "_SUCCESS", "sub/", "a [1].jsonl")
    for key in keys:
        s3.put_object(Bucket="bucket", Key=f"rows/{key}", Body=b"{}\n")
    s3.put_object(Bucket="bucket", Key="rows-of-others/x.jsonl", Body=b"{}\n")


@pytest.mark.usefixtures("tree")
def test_a_folder_a_pattern_and_a_file_name_files_as_on_a_disk() -> None:
    everything = ["rows/_SUCCESS", "rows/a [1].jsonl", "rows/a.jsonl", "rows/b.jsonl"]
    everything += ["rows/sub/c.jsonl", "rows/sub/deep/d.jsonl"]
    assert names("s3://bucket/rows") == names("s3://bucket/rows/") == everything
    assert names("s3://bucket/rows/*.jsonl") == ["rows/a [1].jsonl", "rows/a.jsonl", "rows/b.jsonl"]
    assert names("s3://bucket/rows/[!b].jsonl") == ["rows/a.jsonl"]
    assert names("s3://bucket/rows/?.jsonl") == ["rows/a.jsonl", "rows/b.jsonl"]
    assert names("s3://bucket/rows/*/*.jsonl") == ["rows/sub/c.jsonl"]
    assert names("s3://bucket/rows/**/*.jsonl") == [name for name in everything if name != "rows/_SUCCESS"]
    assert names("s3://bucket/rows/a.jsonl") == ["rows/a.jsonl"]
    assert names("s3://bucket/rows/a [1].jsonl") == ["rows/a [1].jsonl"], "the name itself goes before the pattern"
    assert names("s3://bucket/rows/.hidden.jsonl") == ["rows/.hidden.jsonl"]


def test_a_folder_with_more_files_than_a_page_is_listed_whole(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "2")
    for number in range(7):
        s3.put_object(Bucket="bucket", Key=f"pages/{number}.jsonl", Body=b"")
    assert len(s3.list_objects_v2(Bucket="bucket", Prefix="pages")["Contents"]) == 2
    assert len(names("s3://bucket/pages")) == 7


@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("s3://bucket/nothing", "there is no file or folder at s3://bucket/nothing: check the name"),
        ("s3://bucket/rows/*.csv", r"no file matches s3://bucket/rows/\*\.csv: check the name"),
        ("s3://absent/rows", r"s3://absent/rows is missing, or access is denied \(.*NoSuchBucket.*AWS_ACCESS_KEY_ID"),
        ("az://container/rows", r"AZURE_ACCOUNT_NAME: set it to the account's name"),
        ("hf://datasets/owner", "names no dataset: write hf://datasets/owner/name"),
        ("ftp://host/rows", r"unknown scheme; use s3://, gs://, az://, hf://, http://, https:// or a path"),
    ],
)
def test_error_names_the_source_and_the_remedy(source: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_ACCOUNT_NAME", raising=False)
    with pytest.raises(JobError, match=message):
        find_stored_files(source)


def test_an_unreachable_store_is_an_infrastructure_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"S3_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    find.open_store.cache_clear()
    with pytest.raises(InfrastructureError, match=r"s3://bucket/x could not be read in 4 attempts \(Endpoint"):
        find_stored_files("s3://bucket/x")
    find.open_store.cache_clear()


def test_a_copy_is_deleted_when_it_has_been_read(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket="bucket", Key="one/a.jsonl", Body=b"content")
    (file,) = find_stored_files("s3://bucket/one")
    with local_copy(file, tmp_path) as path:
        assert path.read_bytes() == b"content"
        assert path.name == "a.jsonl"
    assert [left.name for left in tmp_path.iterdir()] == ["lock"]


def test_a_file_that_is_replaced_meanwhile_is_not_read(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket="bucket", Key="changed/a.jsonl", Body=b"old")
    (file,) = find_stored_files("s3://bucket/changed")
    s3.put_object(Bucket="bucket", Key="changed/a.jsonl", Body=b"new")
    with (
        pytest.raises(InfrastructureError, match=r"s3://bucket/changed/a\.jsonl was replaced while"),
        local_copy(file, tmp_path),
    ):
        pass
    assert find_stored_files("s3://bucket/changed")[0].version != file.version
    s3.delete_object(Bucket="bucket", Key="changed/a.jsonl")
    with pytest.raises(JobError, match=r"s3://bucket/changed/a\.jsonl is missing"), local_copy(file, tmp_path):
        pass
    assert [left.name for left in tmp_path.iterdir()] == ["lock"]


def test_a_file_that_does_not_fit_on_the_disk_is_not_downloaded(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket="bucket", Key="large/a.jsonl", Body=b"content")
    file = dataclasses.replace(find_stored_files("s3://bucket/large")[0], size=1 << 60)
    with (
        pytest.raises(InfrastructureError, match="use fewer processes, or set SPOTUNE_CACHE"),
        local_copy(file, tmp_path),
    ):
        pass


KILLED = """
import os, sys
from pathlib import Path
from spotune_trainer.data.stores.find import find_stored_files, local_copy
(file,) = find_stored_files("s3://bucket/killed")
with local_copy(file, Path(sys.argv[1])) as path:
    print(path, flush=True)
    sys.stdin.read()
"""


def test_the_copy_of_a_killed_process_is_deleted_and_that_of_a_living_one_is_kept(s3: Any, tmp_path: Path) -> None:
    s3.put_object(Bucket="bucket", Key="killed/a.jsonl", Body=b"content")
    (file,) = find_stored_files("s3://bucket/killed")
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        other = Path(process.stdout.readline().strip())
        with local_copy(file, tmp_path):
            assert other.read_bytes() == b"content"
        process.kill()
        process.wait()
        assert other.exists()
    with local_copy(file, tmp_path) as path:
        assert not other.exists()
        assert path.exists()


# Web servers


class Web(BaseHTTPRequestHandler):
    """Serves one file in the ways that servers differ."""

    protocol_version = "HTTP/1.1"
    requests: list[str]
    content: bytes

    def do_GET(self) -> None:
        self.requests.append(self.path)
        path = urlsplit(self.path).path
        kind = path.strip("/").split("/")[0]
        missing = path.endswith("absent.jsonl")
        self.send_response(403 if kind == "closed" else 404 if missing else 200)
        short = kind == "short" and len(self.requests) in {2, 3}  # the listing, then two downloads that break off
        if kind != "unversioned":
            self.send_header("ETag", hashlib.md5(self.content, usedforsecurity=False).hexdigest())
        self.send_header("Content-Length", str(len(self.content)))
        if short:
            self.send_header("Connection", "close")
        self.end_headers()
        try:
            self.wfile.write(self.content[:3] if short else self.content)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # a client that wanted the headers only
        if short:
            self.close_connection = True

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def web() -> Iterator[tuple[str, type[Web]]]:
    class Handler(Web):
        requests: list[str] = []  # noqa: RUF012 - one server for each test
        content = b'{"a": 1}\n'

    with serving(Handler) as url:
        yield url, Handler


def test_a_file_of_a_web_server_is_read_with_its_query_and_named_without(
    web: tuple[str, type[Web]], tmp_path: Path
) -> None:
    url, handler = web
    (file,) = find_stored_files(f"{url}/rows/a.jsonl?signature=secret")
    assert (file.url, file.size) == (f"{url}/rows/a.jsonl", 9)
    with local_copy(file, tmp_path) as path:
        assert path.read_bytes() == handler.content
    assert set(handler.requests) == {"/rows/a.jsonl?signature=secret"}
    handler.content = b'{"a": 2}\n'
    with pytest.raises(InfrastructureError, match="was replaced while"), local_copy(file, tmp_path):
        pass


def test_a_download_that_breaks_off_is_repeated(web: tuple[str, type[Web]], tmp_path: Path) -> None:
    url, handler = web
    (file,) = find_stored_files(f"{url}/short/a.jsonl")
    with local_copy(file, tmp_path) as path:
        assert path.read_bytes() == handler.content
    assert len(handler.requests) == 4


def test_error_says_what_a_web_server_cannot_do(web: tuple[str, type[Web]]) -> None:
    url, _ = web
    with pytest.raises(JobError, match=r"/absent\.jsonl is missing.*404.*name one file: a web server lists no folders"):
        find_stored_files(f"{url}/absent.jsonl?signature=secret")
    with pytest.raises(JobError, match=r"/closed/a\.jsonl is missing, or access is denied .*403"):
        find_stored_files(f"{url}/closed/a.jsonl")
    with pytest.raises(JobError, match=r"sends no ETag or Last-Modified.*download it and name its path"):
        find_stored_files(f"{url}/unversioned/a.jsonl")


# The Hugging Face Hub


READ = """
import sys
from pathlib import Path
from spotune.errors import SpotuneError
from spotune_trainer.data.stores.find import find_stored_files, local_copy
for argument in sys.argv[2:]:
    try:
        source, config, split = argument.split(",") if "," in argument else (argument, "", "")
        for file in find_stored_files(source, config, split):
            with local_copy(file, Path(sys.argv[1])) as path:
                print(file.url, path.read_text())
    except SpotuneError as error:
        print(type(error).__name__, error)
assert not {"torch", "streaming"} & set(sys.modules), "the preflight has no memory for them"
"""


DATASET = {"data/test-0.jsonl": b"test", "data/train-0.jsonl": b"one", "data/train-1.jsonl": b"two", "z.py": b"0"}


def read_from_hub(folder: Path, *sources: str, revisions: Mapping[str, Files] | None = None) -> list[str]:
    """What another process reads, or why not: a line for each file or error."""
    with serving_dataset(revisions or {"main": DATASET, "v2": DATASET}) as url:
        environment = {"HF_ENDPOINT": url, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", READ, str(folder / "copies"), *sources],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_data_files_of_a_dataset_on_the_hub_are_read_and_not_kept(tmp_path: Path) -> None:
    sources = ["hf://datasets/me/rows/data/train-*.jsonl", "hf://me/rows@v2/data/test-0.jsonl"]
    sources += ["hf://datasets/me/rows/nothing/*.jsonl", "hf://datasets/me/other"]
    one, two, test, none, other = read_from_hub(tmp_path, *sources)
    assert (one, two) == (
        "hf://datasets/me/rows/data/train-0.jsonl one",
        "hf://datasets/me/rows/data/train-1.jsonl two",
    )
    assert test == "hf://datasets/me/rows@v2/data/test-0.jsonl test"
    assert none.startswith("JobError no file matches hf://datasets/me/rows/nothing/*.jsonl")
    assert other.startswith("JobError hf://datasets/me/other is missing, or access is denied")
    assert "set HF_TOKEN" in other
    assert not [path for path in tmp_path.rglob("*.jsonl") if path.is_file()]


def test_a_dataset_with_several_splits_is_read_only_if_one_is_named(tmp_path: Path) -> None:
    sources = ["hf://datasets/me/rows", "hf://me/rows/data", "hf://datasets/me/rows,,validation"]
    bare, folder, unknown, test, one, two = read_from_hub(
        tmp_path, *sources, "hf://datasets/me/rows,,test", "hf://datasets/me/rows/data,,train"
    )
    fix = "set prepare.split (--split) to"
    assert bare == f"JobError hf://datasets/me/rows has the splits train, test: {fix} the one to read"
    assert folder == f"JobError hf://me/rows/data has the splits train, test: {fix} the one to read"
    assert unknown == f"JobError hf://datasets/me/rows has no split validation, but train, test: {fix} one of them"
    assert test == "hf://datasets/me/rows/data/test-0.jsonl test"
    assert (one[-3:], two[-3:]) == ("one", "two")


def test_a_file_or_pattern_has_no_split(tmp_path: Path) -> None:
    (file, pattern) = read_from_hub(
        tmp_path, "hf://datasets/me/rows/data/test-0.jsonl,,test", "hf://datasets/me/rows/*/train*.jsonl,x,"
    )
    assert file.startswith("JobError hf://datasets/me/rows/data/test-0.jsonl names files itself: remove split")
    assert pattern.startswith("JobError hf://datasets/me/rows/*/train*.jsonl names files itself: remove config")


def test_the_card_says_which_files_are_a_configuration_and_split(tmp_path: Path) -> None:
    card = b"""---
configs:
- config_name: small
  default: true
  data_files: [{split: train, path: data/train-1.jsonl}]
- config_name: all
  data_files: [{split: train, path: data/*}, {split: holdout, path: data/test-0.jsonl}]
---
"""
    sources = ["hf://datasets/me/rows", "hf://datasets/me/rows,all,holdout", "hf://datasets/me/rows,all,"]
    small, holdout, refused, *everything = read_from_hub(
        tmp_path, *sources, "hf://datasets/me/rows,all,train", revisions={"main": {**DATASET, "README.md": card}}
    )
    assert (small[-3:], holdout[-4:]) == ("two", "test")
    assert "has the splits train, holdout of configuration all (other configurations: small)" in refused
    assert len(everything) == 3
    hidden = {".huggingface.yaml": b"configs: [{config_name: x, data_files: data/train-0.jsonl}]"}
    (one,) = read_from_hub(tmp_path, "hf://datasets/me/rows", revisions={"main": {**DATASET, **hidden}})
    assert one[-3:] == "one"


def test_revisions_with_slashes_are_read(tmp_path: Path) -> None:
    converted = {"en/train/0000.parquet": b"1", "en/test/0000.parquet": b"2", "fr/train/0000.parquet": b"3"}
    revisions = {
        "main": DATASET,
        "refs/convert/parquet": converted,
        "refs/pr/1": {"a.csv": b"4"},
        "x/y": {"a.csv": b"5"},
    }
    base = "hf://datasets/me/rows"
    sources = [f"{base}@refs/convert/parquet,en,test", f"{base}@refs%2Fconvert%2Fparquet/en/train,,"]
    sources += [f"{base}@refs/convert/parquet/fr/train/0000.parquet", f"{base}@refs/pr/1", f"{base}@x%2Fy/*.csv"]
    *read, missing, malformed = read_from_hub(
        tmp_path, *sources, f"{base}@x/y", f"{base}@refs/heads/x", revisions=revisions
    )
    assert read == [
        f"{base}@refs/convert/parquet/en/test/0000.parquet 2",
        f"{base}@refs%2Fconvert%2Fparquet/en/train/0000.parquet 1",
        f"{base}@refs/convert/parquet/fr/train/0000.parquet 3",
        f"{base}@refs/pr/1/a.csv 4",
        f"{base}@x%2Fy/a.csv 5",
    ]
    assert missing.startswith(f"JobError {base}@x/y is missing, or access is denied")
    assert malformed.endswith("has a revision with slashes: write each of them as %2F, as in name@refs%2Fheads%2Fdev")

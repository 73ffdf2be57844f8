"""The next start reads what was compiled before; a file that does not fit is ignored."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.codecache import CppCodeCache, PyCodeCache
from transformers import LlamaConfig

from spotune_trainer.engine.compile import cache as cache_module
from spotune_trainer.engine.compile.cache import IMAGE_FOLDER, CompileCache, local_folder
from spotune_trainer.engine.compile.cache_key import compile_key
from spotune_trainer.engine.compile.compile_meter import Compilation, CompileMeter
from tests.trainer.support.runs import Layout, Runs, make_plan

KEY = {"device": "cpu 0123", "shapes": [1, 2]}


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `load` sets does not reach other tests."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.delenv(IMAGE_FOLDER, raising=False)


def kept(tmp_path: Path, key: dict[str, Any] = KEY, local: str = "first") -> CompileCache:
    """A cache whose local folder has a file, and has been saved."""
    cache = CompileCache(tmp_path / "compiled", key, tmp_path / local, writes=True)
    assert cache.load() == ""
    (tmp_path / local / "fxgraph").mkdir()
    (tmp_path / local / "fxgraph" / "code.py").write_text("1 + 1")
    cache.save()
    cache.wait()
    return cache


def next_start(tmp_path: Path, key: dict[str, Any] = KEY, local: str = "second") -> str:
    """Load the cache into an empty folder, as the next start does."""
    return CompileCache(tmp_path / "compiled", key, tmp_path / local, writes=True).load()


def test_the_next_start_finds_what_the_last_one_left(tmp_path: Path) -> None:
    kept(tmp_path)
    assert next_start(tmp_path) == "job"
    assert (tmp_path / "second" / "fxgraph" / "code.py").read_text() == "1 + 1"
    assert next_start(tmp_path) == "node", "another rank has filled the folder"


@pytest.mark.parametrize("damage", [b"torn", b""])
def test_a_damaged_file_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes) -> None:
    path = kept(tmp_path).path
    path.write_bytes(damage or path.read_bytes()[:-9])
    with caplog.at_level(logging.WARNING):
        assert next_start(tmp_path) == ""
    assert "is damaged" in caplog.text
    assert list((tmp_path / "second").iterdir()) == []


def test_a_file_of_another_key_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = kept(tmp_path)
    other = KEY | {"shapes": [4, 2]}
    path = CompileCache(tmp_path / "compiled", other, tmp_path / "second", writes=True).path
    assert path != cache.path
    cache.path.rename(path)
    assert next_start(tmp_path, other) == ""
    assert "was made for something else" in caplog.text


def test_the_folder_of_an_image_is_read_if_the_job_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path)
    (tmp_path / "compiled").rename(tmp_path / "image")
    assert next_start(tmp_path) == ""
    monkeypatch.setenv(IMAGE_FOLDER, str(tmp_path / "image"))
    assert next_start(tmp_path, local="third") == "image"


def test_nothing_is_written_without_something_new(tmp_path: Path) -> None:
    path = kept(tmp_path).path
    written = path.stat().st_mtime_ns
    cache = CompileCache(tmp_path / "compiled", KEY, tmp_path / "second", writes=True)
    cache.load()
    cache.save()
    cache.wait()
    assert path.stat().st_mtime_ns == written


def test_a_binary_that_is_still_being_built_is_not_kept(tmp_path: Path) -> None:
    cache = kept(tmp_path)
    for name in ("done", "half"):
        (tmp_path / "first" / f"{name}.so").write_bytes(b"binary")
    (tmp_path / "first" / f"half_{cache_module._BUILDING}").mkdir()
    cache.save()
    cache.wait()
    next_start(tmp_path)
    assert [path.name for path in (tmp_path / "second").glob("*.so")] == ["done.so"]


def test_folders_of_earlier_generations_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    earlier = local_folder(tmp_path / "job", 1)
    earlier.mkdir()
    later = local_folder(tmp_path / "job", 2)
    assert later.parent == earlier.parent
    assert not earlier.exists()


def test_the_key_changes_with_shapes_versions_and_architecture(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    job, plan, config = runs.job("causal"), make_plan(Layout(1, 1)), LlamaConfig(num_hidden_layers=2)
    key = compile_key(job, plan, config)
    elsewhere = LlamaConfig(num_hidden_layers=2)
    elsewhere.name_or_path = "elsewhere"
    assert compile_key(job, plan, elsewhere) == key
    others = [
        compile_key(job, replace(plan, micro_batch_size=plan.micro_batch_size + 1), config),
        compile_key(runs.job("causal", dataset={"maxLength": 77}), plan, config),
        compile_key(job, plan, LlamaConfig(num_hidden_layers=2, hidden_size=64)),
        compile_key(runs.job("causal", "bfloat16"), plan, config),
    ]
    monkeypatch.setattr("spotune_trainer.engine.compile.cache_key.version", lambda _name: "another")
    others.append(compile_key(job, plan, config))
    assert all(other != key for other in others)


@pytest.mark.slow
def test_a_start_from_the_cache_runs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Otherwise the compiler builds a program for each instruction set first, to try it.
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    first = compile_once(tmp_path, "first")
    monkeypatch.setenv("PATH", "/nowhere")  # there is no g++ either
    second = compile_once(tmp_path, "second")
    assert (first.start, second.start) == ("cold", "warm")
    assert second.graphs == first.graphs > 0
    assert 0 < second.seconds < first.seconds


def compile_once(tmp_path: Path, local: str) -> Compilation:
    """Compile a function with the cache, as in a new process."""
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    CppCodeCache.cache_clear()
    counters.clear()
    cache = CompileCache(tmp_path / "compiled", KEY, tmp_path / local, writes=True)
    cache.load()
    meter = CompileMeter()
    rows = torch.ones(4, 8, requires_grad=True)
    torch.compile(lambda rows: (rows * 2).relu().softmax(dim=1).sum(), dynamic=False)(rows).backward()
    cache.save()
    cache.wait()
    return meter.stop()

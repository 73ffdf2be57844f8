"""Raw files to shards: the output is byte-identical after kills, and no incomplete dataset is ever visible."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.data.preparation import process_pool as pool
from spotune_trainer.data.preparation.inputs import find_inputs, split_into_parts
from spotune_trainer.data.preparation.prepare import PrepareOptions, PrepareProgress, prepare
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.shards import ShardedDataset
from tests.trainer.support.waiting import wait_until

pytestmark = pytest.mark.slow

Rows = list[dict[str, Any]]

TEXT = TextOptions("seq2seq", "{question}", "{sql}", keep=("database",), max_length=64)
OPTIONS = PrepareOptions(TEXT, processes=1, part_size=2000)
KILLS = 8


def make_rows(count: int, seed: int = 0) -> Rows:
    words, generator = ["how", "many", "singers", "are", "there", "select", "count", "name", "age"], random.Random(seed)
    return [
        {
            "question": f"{number}: {' '.join(generator.choices(words, k=generator.randint(1, 9)))}",
            "sql": "select " + generator.choice(words),
            "database": f"db{number % 3}",
        }
        for number in range(count)
    ]


def write_jsonl(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def digest(folder: Path) -> dict[str, str]:
    """Hash of every file below a folder."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def read(folder: Path, tmp_path: Path) -> Rows:
    dataset = ShardedDataset(str(folder), tmp_path / "cache")
    return [dataset[number] for number in range(len(dataset))]


def decoded(rows: Rows, column: str, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(tokenizer.decode(row[column].tolist())) for row in rows]


def test_samples_are_the_rows_in_order(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = make_rows(300)
    done: list[PrepareProgress] = []
    prepared = prepare(
        [write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "out", OPTIONS, tokenizer, progress=done.append
    )
    samples = read(tmp_path / "out", tmp_path)
    assert decoded(samples, "input_ids", tokenizer) == [row["question"] for row in rows]
    assert decoded(samples, "labels", tokenizer) == [row["sql"] + "</s>" for row in rows]
    assert [sample["completion"] for sample in samples] == [row["sql"] for row in rows]
    assert [sample["database"] for sample in samples] == [row["database"] for row in rows]
    assert done[-1].parts_total == len(done) > 5
    assert (done[-1].bytes_done, done[-1].documents) == (done[-1].bytes_total, 300)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]
    counts = prepared.manifest["splits"]["train"]
    assert counts["documents"] == counts["samples"] == 300
    assert counts["tokens"] == sum(len(sample["input_ids"]) for sample in samples)
    assert counts["lossTokens"] == sum(len(sample["labels"]) for sample in samples)
    lengths = sorted(len(sample["input_ids"]) for sample in samples)
    assert counts["inputTokens"]["p50"] == lengths[149]
    assert counts["inputTokens"]["max"] == lengths[-1]


def test_every_shard_has_a_hash_in_the_index(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    prepare([write_jsonl(tmp_path / "a.jsonl", make_rows(50))], tmp_path / "out", OPTIONS, tokenizer)
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert all(shard["raw_data"]["hashes"]["xxh3_64"] for shard in index["shards"])


def test_the_held_out_split_keeps_duplicates_together(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = make_rows(200) * 3
    random.Random(1).shuffle(rows)
    options = dataclasses.replace(OPTIONS, eval_fraction=0.2, eval_seed=3)
    prepare([write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "out", options, tokenizer)
    train, held = (
        decoded(read(tmp_path / "out" / name, tmp_path), "input_ids", tokenizer) for name in ("train", "eval")
    )
    assert not set(train) & set(held)
    assert sorted(train + held) == sorted(row["question"] for row in rows)
    assert 0.1 < len(held) / len(rows) < 0.3


def test_packed_rows_contain_every_document(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [{"body": row["question"]} for row in make_rows(300)] + [{"body": "singers " * 80}]
    options = dataclasses.replace(OPTIONS, text=TextOptions("causal", text="body", max_length=64, packing=True))
    prepared = prepare([write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "out", options, tokenizer)
    samples = read(tmp_path / "out", tmp_path)
    assert len(samples) < 301 / 2
    assert all(len(sample["input_ids"]) == sample["lengths"].sum() <= 64 for sample in samples)
    documents = [
        str(tokenizer.decode(part.tolist()))
        for sample in samples
        for part in np.split(sample["input_ids"], np.cumsum(sample["lengths"])[:-1])
    ]
    assert {row["body"] + "</s>" for row in rows[:300]} <= set(documents)
    assert "".join(documents).count("singers ") >= 80  # a long text is split over rows, not truncated
    assert prepared.manifest["splits"]["train"]["truncated"] == 0


def test_packed_prompts_carry_no_loss(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = make_rows(40)
    text = TextOptions("causal", "{question}", "{sql}", max_length=128, packing=True)
    options = dataclasses.replace(OPTIONS, text=text)
    prepared = prepare([write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "out", options, tokenizer)
    samples = read(tmp_path / "out", tmp_path)
    assert len(samples) < 30
    learned = [token for sample in samples for token in sample["labels"].tolist() if token != -100]
    answers = str(tokenizer.decode(learned)).split("</s>")[:-1]
    assert sorted(answers) == sorted(row["sql"] for row in rows)
    assert prepared.manifest["splits"]["train"]["lossTokens"] == len(learned)


def test_options_of_later_versions_do_not_change_the_key_of_older_datasets(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_rows(20))
    manifest = prepare([path], tmp_path / "out", OPTIONS, tokenizer).manifest
    options = {
        "evalFraction": 0.0,
        "evalSeed": 42,
        "partSize": 2000,
        "shardSize": 1 << 25,
        "text": {
            "completion": "{sql}",
            "keep": ["database"],
            "maxCompletionLength": 0,
            "maxLength": 64,
            "messages": "",
            "packing": False,
            "prompt": "{question}",
            "task": "seq2seq",
            "text": "",
        },
    }
    assert manifest["options"] == options
    content = [[source["bytes"], source["xxh3_128"]] for source in manifest["sources"]]
    key = json.dumps([1, options, manifest["tokenizerHash"], content], sort_keys=True).encode()
    assert manifest["key"] == hashlib.sha256(key).hexdigest()[:16]


def test_a_rerun_does_nothing_and_changed_options_are_rejected(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path, output = write_jsonl(tmp_path / "a.jsonl", make_rows(100)), tmp_path / "out"
    first = prepare([path], output, OPTIONS, tokenizer)
    times = {file: file.stat().st_mtime_ns for file in output.iterdir()}
    again = prepare([path], output, OPTIONS, tokenizer)
    assert again.reused
    assert again.manifest == first.manifest
    assert {file: file.stat().st_mtime_ns for file in output.iterdir()} == times

    longer = dataclasses.replace(OPTIONS, text=dataclasses.replace(TEXT, max_length=32))
    write_jsonl(tmp_path / "b.jsonl", make_rows(100, seed=9))
    for source, options in ((path, longer), (tmp_path / "b.jsonl", OPTIONS)):
        with pytest.raises(JobError, match="--overwrite"):
            prepare([source], output, options, tokenizer)
    assert {file: file.stat().st_mtime_ns for file in output.iterdir()} == times
    replaced = prepare([tmp_path / "b.jsonl"], output, dataclasses.replace(OPTIONS, overwrite=True), tokenizer)
    assert not replaced.reused
    assert decoded(read(output, tmp_path), "input_ids", tokenizer)[5] == make_rows(100, seed=9)[5]["question"]
    assert not list(tmp_path.glob(".*"))


def test_output_of_another_tokenizer_is_rejected(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_rows(20))
    prepare([path], tmp_path / "out", OPTIONS, tokenizer)
    other = type(tokenizer).__new__(type(tokenizer))
    other.__dict__.update(tokenizer.__dict__)
    other.chat_template = "{{ messages }}"
    with pytest.raises(JobError, match="another tokenizer"):
        prepare([path], tmp_path / "out", OPTIONS, other)


def test_a_folder_not_written_by_spotune_is_never_replaced(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path, output = write_jsonl(tmp_path / "a.jsonl", make_rows(20)), tmp_path / "out"
    output.mkdir()
    (output / "thesis.txt").write_text("ten years of work")
    for overwrite in (False, True):
        with pytest.raises(JobError, match="not written by `spotune shard`"):
            prepare([path], output, dataclasses.replace(OPTIONS, overwrite=overwrite), tokenizer)
    assert (output / "thesis.txt").read_text() == "ten years of work"


def test_an_empty_split_is_rejected(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, eval_fraction=0.001)
    with pytest.raises(JobError, match="none of the 20 rows is in eval"):
        prepare([write_jsonl(tmp_path / "a.jsonl", make_rows(20))], tmp_path / "out", options, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def run_prepare(
    path: Path, output: Path, options: PrepareOptions, tokenizer: PreTrainedTokenizerBase, parts: int
) -> None:
    """Prepare, but stop once so many parts are complete, until the process is killed."""

    def stop(progress: PrepareProgress) -> None:
        if progress.parts_done >= parts:
            time.sleep(600)

    prepare([path], output, options, tokenizer, stop)


def start(*arguments: Any, parts: int) -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["spotune_trainer.data.preparation.prepare"])
    process = context.Process(target=run_prepare, args=(*arguments, parts))
    process.start()
    return process


def assert_no_dataset(output: Path) -> None:
    assert not output.exists() or (output / "manifest.json").exists()


def test_output_is_identical_after_kills_at_random_moments(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """No process completes more than three parts: they are not done before the last kill, however fast they are."""
    path = write_jsonl(tmp_path / "a.jsonl", make_rows(4000))
    options = dataclasses.replace(OPTIONS, part_size=9000, eval_fraction=0.1)
    done: list[PrepareProgress] = []
    prepare([path], tmp_path / "undisturbed", options, tokenizer, done.append)
    assert done[-1].parts_total > 3 * KILLS
    moments = random.Random(11)
    output = tmp_path / "killed"

    def staged() -> int:
        return len(list((tmp_path / ".killed.preparing").glob("*/part-*")))

    for _ in range(KILLS):
        process = start(path, output, options, tokenizer, parts=staged() + 3)
        more = staged() + moments.randrange(2)
        while process.is_alive() and staged() < more:
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.05))
        process.kill()
        process.join()
        assert_no_dataset(output)
    assert staged() > 2  # the killed runs did some work
    prepare([path], output, options, tokenizer)
    assert digest(output) == digest(tmp_path / "undisturbed")
    assert not list(tmp_path.glob(".*"))


def alive(pids: Sequence[int]) -> list[int]:
    return [pid for pid in pids if is_alive(pid)]


def is_alive(pid: int) -> bool:
    try:
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it has ended, perhaps just now
        return False


def test_output_is_identical_after_a_failure_at_any_rename(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = write_jsonl(tmp_path / "a.jsonl", make_rows(150)), write_jsonl(tmp_path / "b.jsonl", make_rows(9))
    options = dataclasses.replace(OPTIONS, part_size=4000, eval_fraction=0.2, overwrite=True)
    prepare([path], tmp_path / "undisturbed", options, tokenizer)
    prepare([other], tmp_path / "out", options, tokenizer)
    rename = Path.rename
    for stop_at in range(1, 99):
        calls = iter(range(1, 999))

        def stop(source: Path, target: Path, stop_at: int = stop_at, calls: Iterator[int] = calls) -> Path:
            if next(calls) == stop_at:
                raise OSError("no space left on device")
            return rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", stop)
            try:
                prepare([path], tmp_path / "out", options, tokenizer)
                break
            except InfrastructureError:
                pass
        assert_no_dataset(tmp_path / "out")
        prepare([path], tmp_path / "out", options, tokenizer)
        assert digest(tmp_path / "out") == digest(tmp_path / "undisturbed")
        prepare([other], tmp_path / "out", options, tokenizer)
    assert stop_at > 8


def descendants(pid: int) -> list[int]:
    children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [pid for child in children for pid in descendants(child)]


@pytest.mark.long
def test_two_processes_write_the_same_bytes_as_one_and_exit_with_their_parent(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_rows(3000))
    options = dataclasses.replace(OPTIONS, part_size=9000)
    prepare([path], tmp_path / "one", options, tokenizer)
    process = start(path, tmp_path / "two", dataclasses.replace(options, processes=2), tokenizer, parts=1)
    deadline = time.monotonic() + 120
    while not list((tmp_path / ".two.preparing").glob("*/part-*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    workers = descendants(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert len(workers) > 2  # the fork server too
    while alive(workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(workers)
    prepare([path], tmp_path / "two", dataclasses.replace(options, processes=2), tokenizer)
    assert digest(tmp_path / "two") == digest(tmp_path / "one")


def test_a_killed_pool_process_is_an_infrastructure_error(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_rows(200))
    monkeypatch.setattr(pool, "_write_in_worker", exit_at_once)
    with pytest.raises(InfrastructureError, match="lack of memory: use fewer than 2 processes"):
        prepare([path], tmp_path / "out", dataclasses.replace(OPTIONS, processes=2), tokenizer)
    assert (tmp_path / ".out.preparing").exists()
    assert not (tmp_path / "out").exists()


def exit_at_once(*_: Any) -> None:
    os._exit(9)


def test_two_runs_cannot_prepare_the_same_folder_at_once(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", make_rows(20))

    def meanwhile(_: PrepareProgress) -> None:
        with pytest.raises(InfrastructureError, match="another process is preparing"):
            prepare([path], tmp_path / "out", OPTIONS, tokenizer)

    assert not prepare([path], tmp_path / "out", OPTIONS, tokenizer, meanwhile).reused


def test_processes_are_no_further_ahead_than_is_allowed(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    files = find_inputs([write_jsonl(tmp_path / "a.jsonl", make_rows(400))])
    parts = split_into_parts(files, frozenset(), OPTIONS.part_size)
    assert len(parts) > 12
    written = pool.write_parts(parts, tmp_path / "parts", OPTIONS.part, tokenizer, 2, ahead=2)
    most = 0

    def ahead(number: int) -> int:
        return len(list((tmp_path / "parts").glob("part-*"))) - number

    def is_limit_reached(number: int) -> bool:
        return ahead(number) >= min(4, len(parts) - number)

    for number, _ in enumerate(written):
        assert wait_until(partial(is_limit_reached, number), 60)
        time.sleep(0.05)  # in which the processes would write another one
        most = max(most, ahead(number))
    assert most == 4, "this part, and those that were written meanwhile"

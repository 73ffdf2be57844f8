"""Raw text files to a dataset of tokenised MDS shards, on all cores.

The input is cut into parts that depend on the files alone; each becomes a folder of shards in a staging folder beside
the output. When all are there they are made into one dataset, which is renamed to the output folder: it is never seen
half-written. A killed run goes on with the parts that are missing. What is in the staging folder belongs to a key over
options, tokenizer and the content of the input, so a change of any of them starts anew. The output is the same to
the byte, whatever the number of processes and kills.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.data.preparation.assemble import MANIFEST, publish, statistics
from spotune_trainer.data.preparation.inputs import InputFile, Part, cut, find_inputs
from spotune_trainer.data.preparation.parts import SPLITS, PartOptions, PartSummary, SplitCounts
from spotune_trainer.data.preparation.process_pool import write_parts
from spotune_trainer.data.tokenization import Renderer, TextOptions, Tokeniser
from spotune_trainer.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spotune.job import FinetuneJob

_VERSION = 1  # of what is written; raised when the same input gives other shards


@dataclass(frozen=True)
class PrepareOptions:
    """How raw files become shards.

    Attributes:
        text: What is made of a row.
        eval_fraction: Part of the documents that goes into ``OUTPUT/eval``, the rest into ``OUTPUT/train``; 0 writes
            one dataset into ``OUTPUT`` itself.
        eval_seed: Seed of the choice.
        shard_size: Bytes at which a shard is closed.
        part_size: Bytes of input per part.
        processes: How many work at once; 0: one per core.
        overwrite: Replace what an earlier run with other input or options wrote to the output folder.
    """

    text: TextOptions
    eval_fraction: float = 0.0
    eval_seed: int = 42
    shard_size: int = 1 << 25
    part_size: int = 1 << 25
    processes: int = 0
    overwrite: bool = False

    @staticmethod
    def of_job(job: FinetuneJob) -> PrepareOptions:
        """The options that a job's ``dataset`` and ``model.task`` stand for, without a split of its own.

        Raises:
            JobError: They contradict one another.
        """
        dataset = job.spec.dataset
        try:
            text = TextOptions(
                task=job.spec.model.task,
                prompt=dataset.prompt,
                completion=dataset.completion,
                text=dataset.text,
                messages=dataset.messages,
                keep=tuple(dataset.keep),
                max_length=dataset.max_length,
                max_completion_length=dataset.max_completion_length,
                packing=dataset.packing,
            )
        except ValueError as error:
            raise JobError(f"spec.dataset: {error}") from error
        return PrepareOptions(text)

    @property
    def part(self) -> PartOptions:
        """What the writer of a part needs of it."""
        return PartOptions(self.text, self.eval_fraction, self.eval_seed, self.shard_size)

    @property
    def folders(self) -> dict[str, str]:
        """Folder of each split that is written, relative to the output."""
        return {split: split for split in SPLITS} if self.eval_fraction else {"train": "."}

    def as_json(self) -> dict[str, Any]:
        """Everything that decides what is written, in camelCase."""
        options = _camel_case(dataclasses.asdict(self))
        del options["processes"], options["overwrite"]
        options["text"]["keep"] = list(self.text.keep)
        return options


@dataclass(frozen=True)
class PrepareProgress:
    """How far a preparation is; bytes are those of the input, documents those of the finished parts."""

    parts_done: int
    parts_total: int
    bytes_done: int
    bytes_total: int
    documents: int


@dataclass(frozen=True)
class PrepareManifest:
    """What was made.

    Attributes:
        folder: The output folder.
        content: The JSON of ``manifest.json``: ``key``, ``options``, ``tokenizerHash``, ``splits`` and ``sources``.
        reused: Whether it was there already, made from the same input with the same options.
    """

    folder: Path
    content: dict[str, Any]
    reused: bool


def prepare(
    inputs: Sequence[str | Path],
    output: Path,
    options: PrepareOptions,
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[PrepareProgress], None] = lambda _: None,
) -> PrepareManifest:
    """Write the shards of ``inputs`` to ``output``; does nothing if they are there already.

    Args:
        inputs: Files, folders and patterns.
        output: Folder that becomes the dataset, or the parent of ``train`` and ``eval``.
        options: How.
        tokenizer: Turns text into tokens.
        progress: Called in this process whenever a part is done.

    Raises:
        JobError: The input or the options are wrong (with file and line), and nothing is left behind; or the output
            folder holds something else.
        InfrastructureError: Another process prepares the same output, one of ours died, or the disk failed. What was
            done is kept; run it again.
    """
    columns = _needed_columns(options.text, tokenizer)
    files = find_inputs(inputs)
    staging = output.with_name(f".{output.name}.preparing")
    with _sole_writer(staging, output), _cleaned_up(staging, output):
        sources = _describe(files)
        key = _key(options, tokenizer, sources)
        existing = _existing(output, key, overwrite=options.overwrite)
        if existing is not None:
            return existing
        _drop_others(staging, key)
        parts = cut(files, columns, options.part_size)
        written = write_parts(parts, staging / key, options.part, tokenizer, options.processes)
        summaries = _report(written, parts, progress)
        splits = _merge(summaries, options, inputs)
        content = {
            "version": _VERSION,
            "key": key,
            "tokenizer": str(tokenizer.name_or_path),
            "tokenizerHash": tokenizer_hash(tokenizer),
            "options": options.as_json(),
            "splits": {split: statistics(counts) for split, counts in splits.items()},
            "sources": sources,
        }
        publish(staging / key, output, summaries, options.folders, content)
        return PrepareManifest(output, content, reused=False)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over everything of a tokenizer that decides which tokens a text gets, in hex."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return _hash_json([type(tokenizer).__name__, model, special, tokenizer.chat_template])


def _needed_columns(text: TextOptions, tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    try:
        Tokeniser(text, tokenizer)
        return Renderer(text, tokenizer).columns
    except ValueError as error:
        raise JobError(f"spec.dataset: {error}") from error


@contextmanager
def _sole_writer(staging: Path, output: Path) -> Iterator[None]:
    """Hold the staging folder's lock, which ends with this process however it ends."""
    staging.mkdir(parents=True, exist_ok=True)
    with (staging / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InfrastructureError(f"another process is preparing {output}; wait for it to end") from None
        yield


@contextmanager
def _cleaned_up(staging: Path, output: Path) -> Iterator[None]:
    """Remove the staging folder at the end and after the user's errors; keep it when running again would help."""
    try:
        yield
    except JobError:
        shutil.rmtree(staging)
        raise
    except OSError as error:
        raise InfrastructureError(f"{output} could not be prepared: {error}; run it again to go on") from error
    shutil.rmtree(staging)


def _describe(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """Path, size and checksum of each file."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing and reading release the interpreter
        checksums = list(pool.map(_checksum, files))
    return [
        {"path": str(file.path), "bytes": file.size, "xxh3_128": checksum}
        for file, checksum in zip(files, checksums, strict=True)
    ]


def _checksum(file: InputFile) -> str:
    digest = xxhash.xxh3_128()
    with file.path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _key(options: PrepareOptions, tokenizer: PreTrainedTokenizerBase, sources: Sequence[dict[str, Any]]) -> str:
    """Of all that decides the output. Names of files do not, their order and content do."""
    content = [(source["bytes"], source["xxh3_128"]) for source in sources]
    return _hash_json([_VERSION, options.as_json(), tokenizer_hash(tokenizer), content])[:16]


def _camel_case(options: dict[str, Any]) -> dict[str, Any]:
    renamed = {re.sub(r"_(\w)", lambda match: match[1].upper(), name): value for name, value in options.items()}
    return {name: _camel_case(value) if isinstance(value, dict) else value for name, value in renamed.items()}


def _hash_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _existing(output: Path, key: str, *, overwrite: bool) -> PrepareManifest | None:
    """What the output folder already holds, if it is what would be written; None if there is room for it."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    try:
        manifest = read_json(output / MANIFEST) if output.is_dir() else None
    except ValueError as error:
        raise JobError(str(error)) from error
    if not isinstance(manifest, dict) or "key" not in manifest:
        raise JobError(f"{output} exists and was not made by `spotune shard`; name a folder that does not exist")
    if manifest["key"] == key:
        return PrepareManifest(output, manifest, reused=True)
    if not overwrite:
        raise JobError(
            f"{output} holds shards of other input, or made with other options or another tokenizer; name another "
            "folder, or replace them with --overwrite"
        )
    return None


def _drop_others(staging: Path, key: str) -> None:
    for path in staging.iterdir():
        if path.is_dir() and path.name != key:
            shutil.rmtree(path)


def _report(
    summaries: Iterator[PartSummary], parts: Sequence[Part], progress: Callable[[PrepareProgress], None]
) -> list[PartSummary]:
    sizes = [sum(piece.size for piece in part) for part in parts]
    done: list[PartSummary] = []
    documents = 0
    for summary in summaries:
        done.append(summary)
        documents += sum(split.documents for split in summary.splits.values())
        progress(PrepareProgress(len(done), len(parts), sum(sizes[: len(done)]), sum(sizes), documents))
    return done


def _merge(
    summaries: Sequence[PartSummary], options: PrepareOptions, inputs: Sequence[str | Path]
) -> dict[str, SplitCounts]:
    """The counts of each split over all parts.

    Raises:
        JobError: A split is empty.
    """
    merged = {split: SplitCounts() for split in options.folders}
    for split, total in merged.items():
        for counts in (summary.splits[split] for summary in summaries):
            total.add(counts)
    if not any(split.documents for split in merged.values()):
        raise JobError(f"the input has no rows: {', '.join(map(str, inputs))}")
    for split, counts in merged.items():
        if not counts.documents:
            total_documents = sum(other.documents for other in merged.values())
            raise JobError(
                f"a held-out fraction of {options.eval_fraction} leaves no rows of {total_documents} for {split}; "
                "choose another fraction"
            )
        if not counts.samples:
            raise JobError(
                f"no row of {split} has a token to learn from: all prompts fill maxLength ({options.text.max_length} "
                "tokens), or the texts are empty. Raise maxLength."
            )
    return merged

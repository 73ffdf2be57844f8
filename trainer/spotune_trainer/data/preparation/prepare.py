"""Prepares a dataset: raw text files to tokenized MDS shards, on all cores.

1. The input is split into parts. The split depends on the files only.
2. Each part is tokenized into shards, in a staging folder.
3. When all parts are complete, they are joined into one dataset: a folder that appears at once, or one in a store, to
   which each part was uploaded before, and whose index is uploaded last. See `outputs`.

A run that is killed continues with the missing parts. What is staged is keyed by a hash of the options, the tokenizer
and the content of the input, of files in stores their versions; if one of them changes, preparation starts over. The
output is byte-identical for any number of processes and kills, in a folder and in a store.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from spotune.errors import JobError
from spotune_trainer.data.counts.left_out import check_left_out, count_left_out, count_of_splits, remedy
from spotune_trainer.data.counts.split_counts import PartSummary, SplitCounts
from spotune_trainer.data.preparation.assemble import statistics
from spotune_trainer.data.preparation.inputs import Part, RawInput, find_inputs, split_into_parts
from spotune_trainer.data.preparation.outputs import Output, exclusive_staging, open_output
from spotune_trainer.data.preparation.parts import SPLITS, PartOptions
from spotune_trainer.data.preparation.process_pool import write_parts
from spotune_trainer.data.preparation.raw_files import InputFile
from spotune_trainer.data.rows.options import TextOptions
from spotune_trainer.data.rows.renderer import RowRenderer
from spotune_trainer.data.rows.tokenization import DocumentTokenizer
from spotune_trainer.files import content_hash, content_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spotune.job import FinetuneJob

_VERSION = 1  # of the output; increased when the same input gives different shards
_CHAT_VERSION = 3  # the same for chats; 3 since calls without a closing token end with the token of the next role
# Options of later versions. They are no part of the key where they have these values, so older datasets keep theirs.
_LATER_OPTIONS: Mapping[str, Any] = {
    "tools": "",
    "trainOn": "assistant",
    "trainTrailingWhitespace": False,
    "chosen": "",
    "rejected": "",
    "label": "",
    "labels": [],
    "labelEachWord": False,
    "query": "",
    "positive": "",
    "negative": "",
}


@dataclass(frozen=True)
class PrepareOptions:
    """How raw files become shards. The field names are written to the manifest and are part of its key.

    Attributes:
        text: How rows become text and tokens.
        eval_fraction: Fraction of the documents that go into ``OUTPUT/eval``; the others go into ``OUTPUT/train``.
            With 0, one dataset is written into ``OUTPUT`` itself.
        eval_seed: Seed of that choice.
        shard_size: Maximum bytes per shard.
        part_size: Approximate bytes of input per part.
        processes: Number of processes; 0 means one per core.
        overwrite: Replace an output folder that was made from other input or with other options.
        max_skipped: Maximum rows, and assistant turns of chats, that may be left out; see `LeftOutError`.
    """

    text: TextOptions
    eval_fraction: float = 0.0
    eval_seed: int = 42
    shard_size: int = 1 << 25
    part_size: int = 1 << 25
    processes: int = 0
    overwrite: bool = False
    max_skipped: int = 0

    @staticmethod
    def from_job(job: FinetuneJob) -> PrepareOptions:
        """The options of a job's ``dataset`` and ``model.task``. The data is not split into train and eval.

        Raises:
            JobError: The job's settings contradict each other.
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
                tools=dataset.tools,
                train_on=dataset.train_on,
                train_trailing_whitespace=dataset.train_trailing_whitespace,
                chosen=dataset.chosen,
                rejected=dataset.rejected,
                label=dataset.label,
                labels=tuple(dataset.labels) if dataset.label else (),
                label_each_word=job.spec.training.objective == "tokenClassification",
                query=dataset.query,
                positive=dataset.positive,
                negative=dataset.negative,
            )
        except ValueError as error:
            raise JobError(f"spec.dataset: {error}") from error
        return PrepareOptions(text, max_skipped=dataset.max_skipped)

    @property
    def part(self) -> PartOptions:
        """The options for writing one part."""
        return PartOptions(self.text, self.eval_fraction, self.eval_seed, self.shard_size, self.max_skipped)

    @property
    def folders(self) -> dict[str, str]:
        """The folder of each split, relative to the output."""
        return {split: split for split in SPLITS} if self.eval_fraction else {"train": "."}

    def as_json(self) -> dict[str, Any]:
        """The options that determine the output, with camelCase keys."""
        options = _camel_case(dataclasses.asdict(self))
        del options["processes"], options["overwrite"], options["maxSkipped"]
        text = options["text"]
        text |= {"keep": list(self.text.keep), "labels": list(self.text.labels)}
        options["text"] = {name: value for name, value in text.items() if _LATER_OPTIONS.get(name) != value}
        return options


@dataclass(frozen=True)
class PrepareProgress:
    """Progress of a preparation: bytes of input, and documents in the parts that are complete."""

    parts_done: int
    parts_total: int
    bytes_done: int
    bytes_total: int
    documents: int


@dataclass(frozen=True)
class PreparedDataset:
    """A dataset that `prepare` wrote, or that existed already.

    Attributes:
        place: Path or URL of the output.
        manifest: Content of ``manifest.json``: ``key``, ``options``, ``tokenizerHash``, ``splits`` and ``sources``.
        reused: Whether the output already existed, made from the same input with the same options.
    """

    place: str
    manifest: dict[str, Any]
    reused: bool

    @property
    def folder(self) -> Path:
        """The output folder of a dataset on this machine."""
        return Path(self.place)


def prepare(
    inputs: Sequence[RawInput],
    output: Path | str,
    options: PrepareOptions,
    tokenizer: PreTrainedTokenizerBase,
    progress: Callable[[PrepareProgress], None] = lambda _: None,
) -> PreparedDataset:
    """Write the shards of ``inputs`` to ``output``. Does nothing if they exist already.

    Args:
        inputs: Files, folders, patterns and datasets; paths, and URLs of stores. A file in a store is on this node only
            while a process reads it, so the input may be larger than the disk.
        output: Folder of the dataset; with an eval fraction, the parent of ``train`` and ``eval``. A path, or the URL
            of a folder in a store; then a part is on this machine only until it is uploaded, so the dataset may be
            larger than the disk.
        options: How rows are tokenized and written.
        tokenizer: The model's tokenizer.
        progress: Called in this process after each part.

    Raises:
        JobError: The input or the options are wrong (the message names file and line); staged files are deleted. Or the
            output folder has other content.
        InfrastructureError: Another process is preparing the same output, a process was killed, or the disk failed.
            Complete parts are kept; run it again.
    """
    columns = needed_columns(options.text, tokenizer)
    target = open_output(output, options.folders)
    files = find_inputs(inputs)
    with exclusive_staging(target):
        sources = _describe_sources(files)
        key = _output_key(options, tokenizer, sources)
        existing = _find_existing(target, key, overwrite=options.overwrite, max_skipped=options.max_skipped)
        if existing is not None:
            return existing
        target.begin(key)
        parts = split_into_parts(files, columns, options.part_size)
        staged = target.staging / key
        written = write_parts(parts, staged, options.part, tokenizer, options.processes, ahead=target.ahead)
        summaries = _collect_summaries(written, parts, target, progress)
        splits = _merge_counts(summaries, options, inputs)
        manifest = {
            "version": _VERSION,
            "key": key,
            "tokenizer": str(tokenizer.name_or_path),
            "tokenizerHash": tokenizer_hash(tokenizer),
            "options": options.as_json(),
            "splits": {split: statistics(counts) for split, counts in splits.items()},
            "sources": sources,
        }
        if warnings := RowRenderer(options.text, tokenizer).warnings:
            manifest["warnings"] = list(warnings)
        target.finish(summaries, manifest)
        return PreparedDataset(target.place, manifest, reused=False)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256, in hex, over everything that determines a tokenizer's output: class, model, special tokens, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return content_hash([type(tokenizer).__name__, model, special, tokenizer.chat_template])


def needed_columns(text: TextOptions, tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """The columns that every row must have.

    Raises:
        JobError: The options do not fit the tokenizer.
    """
    try:
        DocumentTokenizer(text, tokenizer)
        return RowRenderer(text, tokenizer).columns
    except ValueError as error:
        raise JobError(f"spec.dataset: {error}") from error


def no_rows(inputs: Sequence[RawInput]) -> JobError:
    """The error for input without any row."""
    return JobError(f"the input has no rows: {', '.join(map(str, inputs))}: write rows into it, or name other files")


def nothing_to_learn(split: str, problems: Sequence[str], reasons: Collection[str]) -> JobError:
    """The error for rows none of which has a token that carries loss.

    Args:
        split: That they are in.
        problems: File, line and reason of the first of them.
        reasons: All reasons, see `count_left_out`.
    """
    return JobError(f"no row of {split} has a token that carries loss: {'; '.join(problems)}. {remedy(reasons)}")


def _describe_sources(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """Path, size, split, and what identifies the content of each file: a checksum, or the version in a store."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # reading and hashing release the GIL
        identities = list(pool.map(_identify, files))
    return [
        {"path": file.name, "bytes": file.size, **identity} for file, identity in zip(files, identities, strict=True)
    ]


def _identify(file: InputFile) -> dict[str, str]:
    if file.stored is not None:
        chosen = {"config": file.stored.config, "split": file.stored.split} if file.stored.split else {}
        return {"version": file.stored.version, **chosen}
    digest = xxhash.xxh3_128()
    with file.path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return {"xxh3_128": digest.hexdigest()}


def _output_key(options: PrepareOptions, tokenizer: PreTrainedTokenizerBase, sources: Sequence[dict[str, Any]]) -> str:
    """Hash of everything that determines the output: options, tokenizer, content and order of the files."""
    content = [(source["bytes"], source.get("version") or source["xxh3_128"]) for source in sources]
    version = _CHAT_VERSION if options.text.is_chat else _VERSION
    return content_key([version, options.as_json(), tokenizer_hash(tokenizer), content])


def _camel_case(options: dict[str, Any]) -> dict[str, Any]:
    renamed = {re.sub(r"_(\w)", lambda match: match[1].upper(), name): value for name, value in options.items()}
    return {name: _camel_case(value) if isinstance(value, dict) else value for name, value in renamed.items()}


def _find_existing(output: Output, key: str, *, overwrite: bool, max_skipped: int) -> PreparedDataset | None:
    """The output, if it already exists with this key; None if it is to be written.

    Raises:
        JobError: The output folder has other content, and ``overwrite`` does not allow to replace it. Or it was made
            with a higher ``max_skipped``, and leaves out more than is allowed now.
    """
    manifest = output.find_manifest()
    if manifest is None:
        return None
    if manifest["key"] == key:
        splits = manifest["splits"].values()
        problems = [problem for split in splits for problem in split.get("problems", [])]
        check_left_out(problems, count_of_splits(splits), max_skipped)
        return PreparedDataset(output.place, manifest, reused=True)
    if not overwrite:
        raise JobError(
            f"{output.place} has shards that were made from other input, with other options or another tokenizer; "
            "choose another folder, or replace them with --overwrite"
        )
    return None


def _collect_summaries(
    summaries: Iterator[PartSummary],
    parts: Sequence[Part],
    output: Output,
    progress: Callable[[PrepareProgress], None],
) -> list[PartSummary]:
    sizes = [sum(piece.size for piece in part) for part in parts]
    done: list[PartSummary] = []
    documents = 0
    for number, summary in enumerate(summaries):
        output.keep_part(number, summary)
        done.append(summary)
        documents += sum(split.documents for split in summary.splits.values())
        progress(PrepareProgress(len(done), len(parts), sum(sizes[: len(done)]), sum(sizes), documents))
    return done


def _merge_counts(
    summaries: Sequence[PartSummary], options: PrepareOptions, inputs: Sequence[RawInput]
) -> dict[str, SplitCounts]:
    """The counts of each split, summed over all parts.

    Raises:
        JobError: A split has no samples, or more is left out than is allowed.
    """
    merged = {split: SplitCounts() for split in options.folders}
    for split, total in merged.items():
        for counts in (summary.splits[split] for summary in summaries):
            total.add(counts)
    problems = [problem for counts in merged.values() for problem in counts.problems]
    left_out = {split: count_left_out(counts.turns, counts.left_out) for split, counts in merged.items()}
    check_left_out(problems, sum(left_out.values(), Counter()), options.max_skipped)
    if not any(split.documents for split in merged.values()):
        raise no_rows(inputs)
    for split, counts in merged.items():
        if not counts.documents:
            total_documents = sum(other.documents for other in merged.values())
            raise JobError(
                f"with an eval fraction of {options.eval_fraction}, none of the {total_documents} rows is in {split}; "
                "choose another fraction"
            )
        if not counts.samples:
            raise nothing_to_learn(split, counts.problems, left_out[split])
    return merged

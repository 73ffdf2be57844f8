"""A checkpoint on the volume: the name of its folder, its files, its manifest, and whether it can be used.

`checkpoints/step-00000120.gen-7/` holds a file of fragments and an `.ok` file for each rank of generation 7. The
manifest is written last (fsync, rename), so a folder without one was never committed. Which of the whole checkpoints
may be resumed from depends on the generations: see `spotune_trainer.checkpoint.generations`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel, to_snake

from spotune_trainer import files
from spotune_trainer.bucket.checkpoints import BUCKET_FILES
from spotune_trainer.checkpoint.evaluations import Evaluation
from spotune_trainer.checkpoint.memory.segment import Label

MANIFEST = "manifest.json"
FORMAT = 1
_NAME = re.compile(r"step-(\d{8})\.gen-(\d+)")
_UNKNOWN_FIELD = "unexpected_keyword_argument"
"""Type of pydantic's error."""
_MAX_TIME = 253402300799.0
"""The last second of the year 9999."""


class NewerManifestError(ValueError):
    """A manifest has a format or field that this version does not know yet."""


def _inside(name: str) -> str:
    if not files.is_inner_path(name):
        raise ValueError(f"{name!r} is not the name of a file in the folder of a checkpoint")
    return name


Size = Annotated[int, Field(ge=0, lt=1 << 63)]
FileName = Annotated[str, AfterValidator(_inside)]
"""Name of a file below the folder of a checkpoint, never of one elsewhere."""


@dataclass(frozen=True, order=True)
class CheckpointName:
    """Step (number of optimizer steps done) and generation of a checkpoint. Names sort by step first."""

    step: int
    generation: int

    def __str__(self) -> str:
        return f"step-{self.step:08d}.gen-{self.generation}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName:
        """Parse a name such as `step-00000120.gen-7`.

        Raises:
            ValueError: `text` is not the name of a checkpoint.
        """
        match = _NAME.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not the name of a checkpoint (example: step-00000120.gen-7)")
        return cls(step=int(match[1]), generation=int(match[2]))


@dataclass(frozen=True)
class FileEntry:
    """A file: name, size in bytes, and XXH3-64 of its content in hex."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # for `Manifest.from_json`

    name: FileName
    size: Size
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. Its presence in the folder is the commit.

    Attributes:
        step: number of optimizer steps done.
        generation: of the worker group that wrote it.
        optimizer_step: Adam's step count (for bias correction); differs from `step` if steps were skipped.
        fingerprint: hash of the fields of the job that determine the result.
        plan_version: version of the `plan.json` in force.
        world_size: number of ranks that wrote it.
        zero_stage: ZeRO stage that it was written at; any stage can read it.
        time: when it was committed, in seconds since the epoch.
        files: one for each rank, or those that a training function has saved.
        parameters: shape of every trainable parameter, by name.
        bad_steps: number of consecutive steps, up to this one, with a non-finite loss or gradient.
        loss_scale: state of the float16 loss scaling; None in other precisions.
        evaluations: all evaluations before the commit, by step.
        optimizer_scalars: numbers that the optimizer keeps for all parameters together, besides its step count.
        is_output: whether it is the model of a program that has checkpoints of its own.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # for `from_json`

    step: int
    generation: int
    optimizer_step: int
    fingerprint: str
    plan_version: int
    world_size: int
    zero_stage: int
    time: Annotated[float, Field(ge=0, le=_MAX_TIME)]
    files: tuple[FileEntry, ...]
    parameters: dict[str, tuple[Size, ...]]
    bad_steps: int = 0
    loss_scale: dict[str, int | float] | None = None
    evaluations: tuple[Evaluation, ...] = ()
    optimizer_scalars: dict[str, float] = field(default_factory=dict)
    is_output: bool = False

    def to_json(self) -> dict[str, Any]:
        """As a JSON object, with the format's version.

        Earlier versions can read it if it has neither evaluations nor scalars of the optimizer, and is no output.
        """
        fields = {to_camel(name): value for name, value in asdict(self).items()}
        fields["evaluations"] = [each.to_json() for each in self.evaluations]
        added_later = ("evaluations", "optimizerScalars", "isOutput")
        return {"format": FORMAT} | {name: value for name, value in fields.items() if value or name not in added_later}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Manifest:
        """The inverse of `to_json`.

        Raises:
            NewerManifestError: the object has the format, or a field, of a newer version.
            ValueError: the object is not a manifest.
        """
        fields = {to_snake(name): entry for name, entry in value.items()}
        version = fields.pop("format", None)
        if version != FORMAT:
            kind = NewerManifestError if isinstance(version, int) and version > FORMAT else ValueError
            raise kind(f"manifest of format {version}, this version reads format {FORMAT}")
        try:
            fields["evaluations"] = tuple(map(Evaluation.from_json, fields.get("evaluations", ())))
            return _validator().validate_python(fields)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            if all(each["type"] == _UNKNOWN_FIELD for each in error.errors()):
                raise NewerManifestError(f"manifest with {field}, a field that this version does not know") from error
            raise ValueError(f"not a manifest: {field}: {first['msg']}") from error
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a manifest: {error}") from error


@cache
def _validator() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def newest_complete(checkpoints: Path, generation: int, names: Iterable[str]) -> str | None:
    """The newest of these checkpoints that this generation has committed; None if it has committed none of them.

    Args:
        checkpoints: the folder of all checkpoints.
        generation: number of the generation.
        names: of the checkpoints.
    """
    newest_first = sorted((CheckpointName.parse(name) for name in names), reverse=True)
    own = (name for name in newest_first if name.generation == generation)
    return next((str(name) for name in own if (checkpoints / str(name) / MANIFEST).exists()), None)


def file_label(name: CheckpointName, entry: FileEntry) -> Label:
    """The label of a segment of shared memory that holds this file of a checkpoint."""
    return Label(str(name), entry.name, entry.size, entry.xxh3)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its folder and manifest."""

    path: Path
    name: CheckpointName
    manifest: Manifest

    @property
    def bytes(self) -> int:
        """Total size of its files."""
        return sum(entry.size for entry in self.manifest.files)


@dataclass(frozen=True)
class UnusableCheckpoint:
    """A folder with the name of a checkpoint that cannot be resumed from.

    Attributes:
        reason: why, for messages.
        committed: whether it was committed once. If not, it is still being written, or a killed worker group left it.
        is_newer: whether a newer version has written it, which may be able to read it.
    """

    path: Path
    name: CheckpointName
    reason: str
    committed: bool = True
    is_newer: bool = False


def rank_file(rank: int) -> str:
    """Name of the file that holds the fragments of `rank`."""
    return f"rank-{rank:05d}.safetensors"


def rank_ok(rank: int) -> str:
    """Name of the file that `rank` writes once its fragments are durable."""
    return f"rank-{rank:05d}.ok"


def open_checkpoint(path: Path) -> Checkpoint | UnusableCheckpoint:
    """Read a checkpoint's manifest and check the sizes of its files. Checksums are verified when it is restored.

    If the storage is a bucket, the sizes are those of the objects.
    """
    name = CheckpointName.parse(path.name)
    try:
        value = files.read_json(path / MANIFEST)
        if value is None:
            return UnusableCheckpoint(path, name, "it was never committed (no manifest)", committed=False)
        manifest = Manifest.from_json(value)
    except ValueError as error:
        return UnusableCheckpoint(path, name, str(error), is_newer=isinstance(error, NewerManifestError))
    in_bucket = files.read_json(path / BUCKET_FILES)
    for entry in manifest.files:
        size = _size(path / entry.name) if in_bucket is None else in_bucket.get(entry.name)
        if size is None:
            return UnusableCheckpoint(path, name, f"{entry.name} is missing")
        if size != entry.size:
            return UnusableCheckpoint(path, name, f"{entry.name} has {size} bytes, its manifest records {entry.size}")
    return Checkpoint(path, name, manifest)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def list_folders(checkpoints: Path) -> list[Path]:
    """The folders in `checkpoints` with the name of a checkpoint, ascending by step."""
    if not checkpoints.is_dir():
        return []
    found = [path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: CheckpointName.parse(path.name))


def list_checkpoints(checkpoints: Path) -> list[Checkpoint | UnusableCheckpoint]:
    """All checkpoints in the folder `checkpoints`, usable or not, ascending by step."""
    return [open_checkpoint(path) for path in list_folders(checkpoints)]

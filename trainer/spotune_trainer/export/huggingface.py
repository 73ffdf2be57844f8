"""Exports the trained model as a directory for `transformers.AutoModel*.from_pretrained`.

The directory is written under a temporary name and renamed, so a kill leaves the old export or none. Services may still
load the old one: on request it is kept beside the new one under another name. The weight files
depend only on the parameters and `model.dtype`: the same training gives the same SHA-256.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune.prompting.export_manifest import MANIFEST, ExportManifest, previous_export, previous_exports
from spotune_trainer import files
from spotune_trainer.export.embedding_modules import write_modules
from spotune_trainer.export.model_card import model_card
from spotune_trainer.models.decoding import generation_config_with_special_tokens
from spotune_trainer.models.lora import attach_trained_adapter
from spotune_trainer.models.pretrained import build_model, build_on_meta_device, load_tokenizer, no_progress_bars
from spotune_trainer.observability.repeating import repeating

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HASH_BLOCK_BYTES = 16 << 20
_MAX_SHARD_SIZE = "50GB"  # transformers' own default
_POLL_SECONDS = 0.5


def export_model(
    parameters: Mapping[str, Tensor],
    job: FinetuneJob,
    output: Path,
    result: Mapping[str, Any],
    max_shard_size: str = _MAX_SHARD_SIZE,
    *,
    step: int | None = None,
    keep_previous: bool = False,
    before_replacing: Callable[[], None] = lambda: None,
    heartbeat: Callable[[], None] = lambda: None,
) -> str:
    """Write the model with its tokenizer, generation configuration and model card to the directory `output`.

    Args:
        parameters: fp32 master weights of the trained parameters, by their name in `named_parameters`. Parameters that
            are not in it keep the values from `build_model`.
        job: the job that trained the model.
        output: the directory; replaced if it exists.
        result: fields of `result.json` for the model card; unknown ones are None or absent.
        max_shard_size: maximum size of a weight file, as transformers writes it ("50GB"); larger weights are split.
        step: optimizer steps that the parameters were trained for; recorded in the export.
        keep_previous: rename an existing export of another step (`previous_export`) instead of deleting it. One is
            kept: those of earlier steps are deleted.
        before_replacing: called when the export is written, before it takes its place; what it raises leaves the old
            export.
        heartbeat: called after each tensor, while files grow, and after each block that is hashed and each file that
            is made durable. While files grow, another thread calls it.

    Returns:
        SHA-256, in hex, over the contents of the weight files in the order of their names.

    Raises:
        JobError: the parameters do not match the job's model.
    """
    temporary = _hidden(output)
    _remove_unfinished_exports(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(parameters, job, temporary, max_shard_size, step, heartbeat)
        sha256 = weights_sha256(temporary, heartbeat)
        card = model_card(job, {**result, "exportSha256": sha256})
        files.write_text(temporary / "README.md", card)
        files.fsync_tree(temporary, heartbeat)
        before_replacing()
        if keep_previous:
            _rename_previous(output, step)
        _replace(temporary, output)
        if keep_previous:
            _delete_older_exports(output, step)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sha256


def weights_sha256(directory: Path, heartbeat: Callable[[], None] = lambda: None) -> str:
    """SHA-256, in hex, over the contents of a directory's `*.safetensors` files in the order of their names.

    Args:
        directory: the directory.
        heartbeat: called after each block.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as stream:
            while block := stream.read(_HASH_BLOCK_BYTES):
                digest.update(block)
                heartbeat()
    return digest.hexdigest()


def _write(
    parameters: Mapping[str, Tensor],
    job: FinetuneJob,
    directory: Path,
    max_shard_size: str,
    step: int | None,
    heartbeat: Callable[[], None],
) -> None:
    tokenizer = load_tokenizer(job)
    model, saved = _trained_model(parameters, job, heartbeat)
    heartbeat()
    if job.spec.generates_text:
        pretrained = job.spec.model.initialise == "pretrained"
        config = _saveable_config(generation_config_with_special_tokens(model, tokenizer, pretrained=pretrained))
        model.generation_config = config
        config.save_pretrained(directory)
    with no_progress_bars(), _calling_while_files_grow(heartbeat, directory):
        saved.save_pretrained(str(directory), max_shard_size=max_shard_size)
    tokenizer.save_pretrained(directory)
    if job.spec.model_kind == "embedding":
        write_modules(directory, job, model.config.get_text_config().hidden_size)
    files.write_json(directory / MANIFEST, asdict(ExportManifest.from_job(job, step)))


@contextmanager
def _calling_while_files_grow(heartbeat: Callable[[], None], directory: Path) -> Iterator[None]:
    """Call `heartbeat` while the files of a directory grow: `save_pretrained` itself does not report progress."""
    last: set[tuple[str, int, int]] = set()

    def call_if_grown() -> None:
        nonlocal last
        with suppress(OSError):  # not there yet, or renamed meanwhile
            stats = [(path.name, path.stat()) for path in directory.iterdir()]
            found = {(name, stat.st_size, stat.st_blocks) for name, stat in stats}
            if found != last:
                last = found
                heartbeat()

    with repeating(call_if_grown, _POLL_SECONDS, "export"):
        yield


def _saveable_config(config: GenerationConfig) -> GenerationConfig:
    """The configuration, or only its special tokens if transformers cannot save it.

    Some published generation configurations contradict themselves, and `save_pretrained` rejects those.
    """
    try:
        config.validate(strict=True)
    except ValueError:
        return GenerationConfig(
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            decoder_start_token_id=config.decoder_start_token_id,
        )
    return config


def _trained_model(
    parameters: Mapping[str, Tensor], job: FinetuneJob, heartbeat: Callable[[], None]
) -> tuple[PreTrainedModel, Any]:
    """The model, and what to save: the same model, the model with its adapter merged, or only the adapter."""
    if job.spec.adapter is None:
        model = _filled_model(parameters, job, heartbeat)
        return model, model
    model = build_model(job)
    heartbeat()
    adapted = attach_trained_adapter(model, job, parameters)
    return model, adapted.merge_and_unload() if job.spec.output.merge_adapter else adapted


def _filled_model(parameters: Mapping[str, Tensor], job: FinetuneJob, heartbeat: Callable[[], None]) -> PreTrainedModel:
    """The job's model with the trained values, in the job's dtype.

    If the trained parameters are the complete state of the model, its original weights are neither loaded nor
    initialized.
    """
    model = build_on_meta_device(job)
    saved = model.state_dict(keep_vars=True)
    trained = {name: parameter for name, parameter in model.named_parameters() if name in parameters}
    aliases = {id(parameter) for parameter in trained.values()}
    if any(id(tensor) not in aliases for tensor in saved.values()):
        model = build_model(job)
        heartbeat()
        saved = model.state_dict(keep_vars=True)
        trained = {name: parameter for name, parameter in model.named_parameters() if name in parameters}
    _check_names(parameters, trained)
    values: dict[int, Tensor] = {}
    for name, parameter in trained.items():
        values[id(parameter)] = _cast(name, parameters[name], parameter)
        heartbeat()
    filled = {name: values.get(id(tensor), tensor.detach()) for name, tensor in saved.items()}
    model.load_state_dict(filled, assign=True)
    model.tie_weights()
    return model


def _cast(name: str, value: Tensor, parameter: Tensor) -> Tensor:
    if value.shape != parameter.shape:
        raise JobError(
            f"parameter {name!r} was trained with shape {list(value.shape)}, but has {list(parameter.shape)} in "
            "model.source: the model changed since the run started. Restore it and export again."
        )
    return value.detach().to(device="cpu", dtype=parameter.dtype).contiguous()


def _check_names(parameters: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
    unknown = sorted(set(parameters) - set(trained))
    if unknown:
        raise JobError(
            f"the trained parameter {unknown[0]!r} ({len(unknown)} in all) is not in model.source: the model changed "
            "since the run started. Restore it and export again."
        )


def _rename_previous(output: Path, step: int | None) -> None:
    """Keep an existing export of another step under another name; one whose step is not recorded is replaced.

    Replicas that have opened it read on. A kill after the rename leaves no `output` until the next attempt has written
    it, but those who know the step find it under the other name.
    """
    try:
        existing = ExportManifest.read(output).step
    except JobError:
        return
    if existing is None or existing == step:
        return
    kept = previous_export(output, existing)
    _delete(kept, output)
    output.rename(kept)


def _delete_older_exports(output: Path, step: int | None) -> None:
    """Delete all kept exports but the newest, and one of the step that `output` has now."""
    kept = previous_exports(output)
    same = kept.pop(step, None) if step is not None else None
    newest = max(kept, default=None)
    for path in [same, *(path for number, path in kept.items() if number != newest)]:
        if path is not None:
            _delete(path, output)


def _delete(directory: Path, output: Path) -> None:
    """Delete a directory beside `output` if it exists; a kill in between leaves nothing under its name."""
    if directory.exists():
        hidden = _hidden(output)
        directory.rename(hidden)
        shutil.rmtree(hidden)


def _hidden(output: Path) -> Path:
    """A new name for a temporary directory beside `output`; `_remove_unfinished_exports` finds it after a kill."""
    return output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}")


def _replace(temporary: Path, output: Path) -> None:
    """Replace a directory by a complete one. A kill in between leaves the new one or none."""
    if output.exists():
        old = _hidden(output)
        output.rename(old)
        temporary.rename(output)
        shutil.rmtree(old)
    else:
        temporary.rename(output)
    files.fsync_directory(output.parent)


def _remove_unfinished_exports(output: Path) -> None:
    """Delete temporary directories beside `output` that a killed export left."""
    for path in output.parent.glob(f".{output.name}.????????"):
        shutil.rmtree(path, ignore_errors=True)

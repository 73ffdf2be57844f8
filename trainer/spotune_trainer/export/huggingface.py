"""The finished model as a directory that `transformers.AutoModel*.from_pretrained` loads.

Written beside its place and renamed, so that a kill leaves the old export or none. The weights' files depend on the
parameters and `model.dtype` alone: the same training gives the same SHA-256.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationConfig

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.export.model_card import model_card
from spotune_trainer.models.decoding import aligned_config
from spotune_trainer.models.lora import fill_adapter
from spotune_trainer.models.pretrained import build_model, build_skeleton, load_tokenizer, no_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "spotune.json"
_HASH_BLOCK_BYTES = 16 << 20
_LARGEST_FILE = "50GB"  # transformers' own default


@dataclass(frozen=True)
class ExportManifest:
    """What `spotune predict` needs to know of an exported model, kept in its `spotune.json`.

    Attributes:
        name: of the job.
        task: `causal` or `seq2seq`.
        prompt: template over the columns of a row; empty where the model was not trained on prompts of a template.
        messages: column with chat messages, rendered by the tokenizer's chat template; empty if there were none.
        max_length: longest prompt in tokens.
        max_new_tokens: longest answer in tokens.
    """

    name: str
    task: str
    prompt: str
    messages: str
    max_length: int
    max_new_tokens: int

    @classmethod
    def of(cls, job: FinetuneJob) -> ExportManifest:
        """What a job says about its model's use."""
        dataset, spec = job.spec.dataset, job.spec
        return cls(
            name=job.metadata.name,
            task=spec.model.task,
            prompt=dataset.prompt,
            messages=dataset.messages,
            max_length=dataset.max_length,
            max_new_tokens=spec.training.evaluation.max_new_tokens,
        )

    @classmethod
    def read(cls, directory: Path) -> ExportManifest:
        """The manifest in an export directory.

        Raises:
            JobError: there is none, or it is not one that this version wrote.
        """
        path = directory / MANIFEST
        try:
            value = files.read_json(path)
            if value is None:
                raise JobError(f"{directory} is no model that spotune exported: there is no {MANIFEST} in it.")
            return cls(**value)
        except (TypeError, ValueError) as error:
            raise JobError(f"{path} is damaged or of another version: {error}. Export the model again.") from error


def export_model(
    parameters: Mapping[str, Tensor],
    job: FinetuneJob,
    output: Path,
    figures: Mapping[str, Any],
    largest_file: str = _LARGEST_FILE,
) -> str:
    """Write the model with its tokenizer, generation configuration and model card to the directory `output`.

    Args:
        parameters: fp32 masters of the trained parameters by `named_parameters` name; the others keep the values that
            `build_model` gives them.
        job: whose model it is.
        output: replaced if it exists.
        figures: fields of `result.json` for the model card; None where unknown.
        largest_file: the weights are cut into files of at most this size, with an index.

    Returns:
        SHA-256 over the contents of the weights' files in the order of their names, in hex. For a single file, its own.

    Raises:
        JobError: the parameters are not those of the job's model.
    """
    temporary = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}")
    _remove_leftovers(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        _write(parameters, job, temporary, largest_file)
        sha256 = weights_sha256(temporary)
        card = model_card(job, {**figures, "exportSha256": sha256})
        files.write_text(temporary / "README.md", card)
        files.fsync_tree(temporary)
        _replace(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return sha256


def weights_sha256(directory: Path) -> str:
    """SHA-256 over the contents of all `*.safetensors` files of a directory in the order of their names, in hex."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as stream:
            while block := stream.read(_HASH_BLOCK_BYTES):
                digest.update(block)
    return digest.hexdigest()


def _write(parameters: Mapping[str, Tensor], job: FinetuneJob, directory: Path, largest_file: str) -> None:
    tokenizer = load_tokenizer(job)
    model, saved = _trained_model(parameters, job)
    config = _valid(aligned_config(model, tokenizer, pretrained=job.spec.model.initialise == "pretrained"))
    model.generation_config = config
    with no_progress_bars():
        saved.save_pretrained(str(directory), max_shard_size=largest_file)
    config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    files.write_json(directory / MANIFEST, asdict(ExportManifest.of(job)))


def _valid(config: GenerationConfig) -> GenerationConfig:
    """The configuration, or its special tokens alone: published ones may contradict themselves and cannot be saved."""
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


def _trained_model(parameters: Mapping[str, Tensor], job: FinetuneJob) -> tuple[PreTrainedModel, Any]:
    """The model, and what is saved of it: the whole, or where the job wants it so its adapter alone."""
    if job.spec.adapter is None:
        model = _filled_model(parameters, job)
        return model, model
    model = build_model(job)
    adapted = fill_adapter(model, job, parameters)
    return model, adapted.merge_and_unload() if job.spec.output.merge_adapter else adapted


def _filled_model(parameters: Mapping[str, Tensor], job: FinetuneJob) -> PreTrainedModel:
    """The job's model with the trained values, in the job's dtype.

    Where the parameters are all that is saved of a model, its own weights are neither read nor drawn.
    """
    model = build_skeleton(job)
    saved = model.state_dict(keep_vars=True)
    trained = {name: parameter for name, parameter in model.named_parameters() if name in parameters}
    aliases = {id(parameter) for parameter in trained.values()}
    if any(id(tensor) not in aliases for tensor in saved.values()):
        model = build_model(job)
        saved = model.state_dict(keep_vars=True)
        trained = {name: parameter for name, parameter in model.named_parameters() if name in parameters}
    _check_names(parameters, trained)
    values = {id(parameter): _cast(name, parameters[name], parameter) for name, parameter in trained.items()}
    filled = {name: values.get(id(tensor), tensor.detach()) for name, tensor in saved.items()}
    model.load_state_dict(filled, assign=True)
    model.tie_weights()
    return model


def _cast(name: str, value: Tensor, parameter: Tensor) -> Tensor:
    if value.shape != parameter.shape:
        raise JobError(
            f"parameter {name!r} was trained with shape {list(value.shape)}, but model.source now says "
            f"{list(parameter.shape)}: the model changed since the run began. Put it back and export again."
        )
    return value.detach().to(device="cpu", dtype=parameter.dtype).contiguous()


def _check_names(parameters: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
    unknown = sorted(set(parameters) - set(trained))
    if unknown:
        raise JobError(
            f"the trained parameter {unknown[0]!r} ({len(unknown)} in all) is not in model.source: the model changed "
            "since the run began. Put it back and export again."
        )


def _replace(temporary: Path, output: Path) -> None:
    """Put a whole directory in the place of another; a kill in between leaves the new one or none."""
    if output.exists():
        old = output.with_name(f".{output.name}.{uuid.uuid4().hex[:8]}")
        output.rename(old)
        temporary.rename(output)
        shutil.rmtree(old)
    else:
        temporary.rename(output)
    files.fsync_directory(output.parent)


def _remove_leftovers(output: Path) -> None:
    """Delete what an export that was killed left beside `output`."""
    for path in output.parent.glob(f".{output.name}.????????"):
        shutil.rmtree(path, ignore_errors=True)

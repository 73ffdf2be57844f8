"""Checks of what a job reads: the model with its tokenizer, the data, and the user's metric functions."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from rich.filesize import decimal

from spotune.errors import InfrastructureError, JobError
from spotune.job import FinetuneJob, PrepareSpec, ShardsSpec
from spotune.job.training.metric import is_function
from spotune.plan.config_reader import SUPPORTED_MODEL_TYPES, read_architecture
from spotune.plan.execution import training_setup
from spotune.plan.parameters import TrainedParameters
from spotune_trainer.commands.locate import missing_user_code
from spotune_trainer.data.manifests import INDEX
from spotune_trainer.evaluation import harness
from spotune_trainer.evaluation.custom_metrics import FIELD, missing_functions
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.admission import missing_sources
from spotune_trainer.supervisor.preflight.object_store import read_object
from spotune_trainer.user_code.fetch import described, fetch_code, with_code

_Response = TypeVar("_Response")

_CONFIG = "config.json"
_HUB = "hf://"
_WEIGHTS = (".safetensors", ".bin")
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "tokenizer_config.json",
)  # fmt: skip
_MAX_INDEX_BYTES = 16 << 20
"""A longer index is accepted unread: parsing it would take more memory than the supervisor has beside the head."""
_REMEDY = "upload it, or correct the job; the check is repeated by itself"


@dataclass(frozen=True)
class ModelFacts:
    """What the preflight has read about a model.

    Attributes:
        parameters: numbers of trained and frozen parameters; None for a model type whose size is not computed.
        description: one sentence for people.
        config: its `config.json`.
    """

    parameters: TrainedParameters | None
    description: str
    config: Mapping[str, Any]


def read_model(job: FinetuneJob) -> ModelFacts:
    """Read the model's configuration, and check that its tokenizer and its weights exist.

    Raises:
        JobError: a part of the model is missing, or the source is not a model.
        InfrastructureError: the Hugging Face Hub did not return it.
    """
    refuse_missing(job, lambda field: field.startswith("spec.model."))
    spec = job.spec.model
    field, pretrained = "spec.model.source", spec.initialise == "pretrained"
    config, names = _config(spec.source, spec.revision, field), _names(spec.source, spec.revision, field)
    if pretrained and not any(name.endswith(_WEIGHTS) for name in names):
        raise JobError(
            f"{field}: {spec.source} has no weights (*.safetensors, *.bin): name a source with weights, or set "
            "initialise: random to train from scratch"
        )
    if spec.tokenizer:
        field, names = "spec.model.tokenizer", _names(spec.tokenizer, "main", "spec.model.tokenizer")
    tokenizer = next((name for name in _TOKENIZERS if name in names), None)
    if tokenizer is None and not spec.trust_remote_code:
        where = spec.tokenizer or spec.source
        raise JobError(f"{field}: {where} has no tokenizer: name a source with one in model.tokenizer")
    parameters = _count(config, job)
    size = f"{_model_size(parameters) / 1e6:,.1f} million parameters" if parameters is not None else "unknown size"
    kind = f"{spec.source} is a {config.get('model_type')} model of {size}"
    return ModelFacts(parameters, f"{kind}, tokenized by {tokenizer or 'its own code'}", config)


def count_parameters(job: FinetuneJob) -> TrainedParameters | None:
    """Number of parameters, from the model's configuration alone; None for a type whose size is not computed.

    Raises:
        JobError: the source has no configuration.
        InfrastructureError: the Hugging Face Hub did not return it.
    """
    spec = job.spec.model
    return _count(_config(spec.source, spec.revision, "spec.model.source"), job)


def check_data(job: FinetuneJob, directory: JobDirectory) -> str:
    """Check that the shards exist, or the raw data that shards are made of.

    Returns:
        One sentence with the numbers of samples and shards.

    Raises:
        JobError: they are missing or damaged.
        InfrastructureError: the object store did not return them.
    """
    refuse_missing(job, lambda field: not field.startswith("spec.model."))
    dataset, prepared = job.spec.dataset, directory.prepared()
    found = [read_training_data("spec.dataset", dataset.train, dataset.prepare, prepared)]
    if dataset.eval is not None and dataset.eval.source is not None:
        found.append(read_shards(dataset.eval.source, "spec.dataset.eval.source"))
    return "; ".join(map(str, found))


def check_metrics(job: FinetuneJob) -> str:
    """Check that this image has the functions of `training.evaluation.metrics`; they are not run.

    Raises:
        JobError: a function is missing.
    """
    evaluation = job.spec.training.evaluation
    if missing := missing_functions(evaluation):
        raise JobError(f"spec.{FIELD}: {'; '.join(missing)}")
    return f"the image has {', '.join(filter(is_function, evaluation.metrics))}"


def check_user_code(job: FinetuneJob, directory: JobDirectory) -> str:
    """Read the code of the user, and check that it has the function or the program of the job; it is not run.

    Raises:
        JobError: it is missing, or the code cannot be read.
        InfrastructureError: the source of the code cannot be reached.
    """
    refuse_missing(job, lambda _: True)
    version = fetch_code(job, directory)
    if problem := missing_user_code(with_code(job, directory, version)):
        raise JobError(f"{problem.field}: {problem.message}")
    training = job.spec.training
    place = training.code or "the image"
    if training.code_from is not None:
        place = described(training.code_from, version)
    return f"{place} has {training.function or training.command[0]}"


def check_harness(job: FinetuneJob) -> str:
    """Check that this image has lm-evaluation-harness. Its tasks are loaded when the driver starts.

    Raises:
        JobError: it is not installed.
    """
    if problem := harness.missing_package():
        raise JobError(f"spec.{harness.FIELD}: {problem}")
    return f"the image has lm-eval {version('lm-eval')}"


def refuse_missing(job: FinetuneJob, concerns: Callable[[str], bool]) -> None:
    """Raise JobError if a local path does not exist that a field names which `concerns` accepts."""
    missing = [problem for problem in missing_sources(job) if concerns(problem.field)]
    if missing:
        raise JobError(f"{'; '.join(map(str, missing))}: {_REMEDY}")


# Models


def _config(source: str, revision: str, field: str) -> Mapping[str, Any]:
    """The model's `config.json`."""
    path = _folder(source, field) / _CONFIG if not source.startswith(_HUB) else _download(source, revision, field)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobError(f"{field}: {source} is not a model: it has no {_CONFIG}; {_REMEDY}") from None
    except (ValueError, RecursionError) as error:
        raise JobError(f"{field}: {_CONFIG} of {source} is not JSON ({error}); {_REMEDY}") from error
    if not isinstance(config, dict):
        raise JobError(f"{field}: {_CONFIG} of {source} is not a JSON object; {_REMEDY}")
    return config


def _names(source: str, revision: str, field: str) -> Collection[str]:
    """File names of a source. With HF_HUB_OFFLINE, names of the files in the local cache."""
    if not source.startswith(_HUB):
        return {path.name for path in _folder(source, field).iterdir()}
    from huggingface_hub import HfApi, constants, snapshot_download

    name = source.removeprefix(_HUB).strip("/")
    if constants.HF_HUB_OFFLINE:
        folder = _from_hub(field, source, lambda: snapshot_download(name, revision=revision, local_files_only=True))
        return {path.name for path in Path(folder).iterdir()}
    listed = _from_hub(field, source, lambda: HfApi().list_repo_files(name, revision=revision))
    return {path for path in listed if "/" not in path}


def _folder(source: str, field: str) -> Path:
    if "://" in source:
        raise JobError(f"{field}: {source} cannot be loaded: a model is named as hf://owner/name or as a folder")
    if not Path(source).is_dir():
        raise JobError(f"{field}: {source} is not a folder; {_REMEDY}")
    return Path(source)


def _download(source: str, revision: str, field: str) -> Path:
    """Download a model's `config.json` from the Hub into the cache that the driver uses too."""
    from huggingface_hub import hf_hub_download

    name = source.removeprefix(_HUB).strip("/")
    return Path(_from_hub(field, source, lambda: hf_hub_download(name, _CONFIG, revision=revision)))


def _from_hub(field: str, source: str, call: Callable[[], _Response]) -> _Response:
    """The result of a call of the Hub's client; raises InfrastructureError with the reason and the remedy."""
    try:
        return call()
    except Exception as error:  # the Hub's client passes on any exception of its HTTP client
        reason = textwrap.shorten(str(error) or type(error).__name__, width=300, placeholder=" ...")
        raise InfrastructureError(
            f"{field}: {source} cannot be read from the Hugging Face Hub ({reason}): check the name, the revision, "
            "that the cluster may reach it, and HF_TOKEN for a model that is private or gated"
        ) from error


def _count(config: Mapping[str, Any], job: FinetuneJob) -> TrainedParameters | None:
    if config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        return None
    return training_setup(read_architecture(config), job).trained


def _model_size(parameters: TrainedParameters) -> int:
    """Parameters of the model itself, without an adapter."""
    return parameters.frozen or parameters.count


# Data


@dataclass(frozen=True)
class ShardsFacts:
    """What the preflight has read about a folder of shards; as text, one sentence for people.

    Attributes:
        source: the folder.
        samples: their number; None if the index is too long to be read here.
        shards: their number.
    """

    source: str
    samples: int | None
    shards: int = 0

    def __str__(self) -> str:
        if self.samples is None:
            return f"{self.source} has an {INDEX} of more than {_MAX_INDEX_BYTES >> 20} MiB"
        return f"{self.source} has {self.samples:,} samples in {self.shards:,} shards"


def read_training_data(
    field: str, train: ShardsSpec | None, raw_data: PrepareSpec | None, prepared: Path
) -> ShardsFacts | str:
    """Read the index of training shards, or find the raw data that they are made of.

    Args:
        field: of the job that `train` and `raw_data` belong to.
        train: the shards; None if they are made of `raw_data`.
        raw_data: one of both is set.
        prepared: folder of the shards that are made of the raw data.

    Returns:
        What is known about the shards; one sentence on the raw data while there are no shards.

    Raises:
        JobError: they are missing or damaged.
        InfrastructureError: the object store did not return them.
    """
    if train is not None:
        return read_shards(train.source, f"{field}.train.source")
    if (prepared / INDEX).exists():
        return read_shards(str(prepared), f"{field}.prepare")
    assert raw_data is not None
    return _raw_data(raw_data, f"{field}.prepare.source")


def read_shards(source: str, field: str) -> ShardsFacts:
    """Read the index of shards.

    Raises:
        JobError: they are missing, damaged or empty.
        InfrastructureError: the object store did not return the index.
    """
    index = f"{source.rstrip('/')}/{INDEX}"
    if "://" in source:
        content = read_object(index, _MAX_INDEX_BYTES, field)
    elif Path(index).is_file():
        with Path(index).open("rb") as stream:
            content = stream.read(_MAX_INDEX_BYTES)
    else:
        raise JobError(f"{field}: {source} is not a dataset of MDS shards: it has no {INDEX}; {_REMEDY}")
    if len(content) == _MAX_INDEX_BYTES:
        return ShardsFacts(source, None)
    try:
        shards = json.loads(content)["shards"]
        samples = sum(shard["samples"] for shard in shards)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise JobError(
            f"{field}: {index} is not an index of MDS shards ({error}): write it with `spotune shard`"
        ) from error
    if samples == 0:
        raise JobError(f"{field}: {source} has no samples")
    return ShardsFacts(source, samples, len(shards))


def _raw_data(source: PrepareSpec, field: str) -> str:
    from spotune_trainer.data.preparation.inputs import find_inputs

    try:
        inputs = find_inputs([source])
    except JobError as error:
        raise JobError(f"{field}: {error}") from error
    except InfrastructureError as error:
        raise InfrastructureError(f"{field}: {error}") from error
    size = decimal(sum(file.size for file in inputs))
    return f"{source} has {len(inputs):,} files of raw data ({size}); shards are made of them before the first step"

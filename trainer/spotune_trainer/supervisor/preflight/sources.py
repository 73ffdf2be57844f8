"""Whether what a job reads can be read: the model with its tokenizer, the data, and functions that judge answers."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.filesize import decimal

from spotune.errors import InfrastructureError, JobError
from spotune.job import FinetuneJob
from spotune.job.metric import is_function
from spotune.plan.config_reader import SUPPORTED_MODEL_TYPES, read_architecture
from spotune.plan.execution import setup_of
from spotune.plan.parameters import TrainedParameters
from spotune_trainer.evaluation.custom_metrics import FIELD, missing_functions
from spotune_trainer.job_directory.job import missing_sources
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.preflight.object_store import read_object

_Answer = TypeVar("_Answer")

_CONFIG = "config.json"
_HUB = "hf://"
_INDEX = "index.json"
_WEIGHTS = (".safetensors", ".bin")
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt",
    "tokenizer_config.json",
)  # fmt: skip
_MOST_INDEX_BYTES = 16 << 20
"""A longer index is taken to be well: parsing it takes more memory than there is beside the head."""
_AGAIN = "it is looked for again all the time, so upload it, or correct the job"


@dataclass(frozen=True)
class ModelFacts:
    """What the preflight knows of a model.

    Attributes:
        parameters: that are trained, and that stay as they are; None for a kind of model whose size is not computed.
        sentence: for people.
    """

    parameters: TrainedParameters | None
    sentence: str


def read_model(job: FinetuneJob) -> ModelFacts:
    """Read the model's configuration, and see that its tokenizer and its weights are there.

    Raises:
        JobError: something of it is not there, or is no model.
        InfrastructureError: the Hugging Face Hub did not give it.
    """
    _refuse_missing(job, lambda field: field.startswith("spec.model."))
    spec = job.spec.model
    field, pretrained = "spec.model.source", spec.initialise == "pretrained"
    config, names = _config(spec.source, spec.revision, field), _names(spec.source, spec.revision, field)
    if pretrained and not any(name.endswith(_WEIGHTS) for name in names):
        raise JobError(
            f"{field}: {spec.source} has no weights (*.safetensors, *.bin): name one that has, or set initialise: "
            "random to train from scratch"
        )
    if spec.tokenizer:
        field, names = "spec.model.tokenizer", _names(spec.tokenizer, "main", "spec.model.tokenizer")
    tokenizer = next((name for name in _TOKENIZERS if name in names), None)
    if tokenizer is None and not spec.trust_remote_code:
        where = spec.tokenizer or spec.source
        raise JobError(f"{field}: {where} has no tokenizer: name a source that has one in model.tokenizer")
    parameters = _count(config, job)
    size = f"{_whole(parameters) / 1e6:,.1f} million parameters" if parameters is not None else "unknown size"
    kind = f"{spec.source} is a {config.get('model_type')} model of {size}"
    return ModelFacts(parameters, f"{kind}, tokenised by {tokenizer or 'code of its own'}")


def count_parameters(job: FinetuneJob) -> TrainedParameters | None:
    """Parameters by the model's configuration alone; None for a kind of model whose size is not computed.

    Raises:
        JobError: it has none.
        InfrastructureError: the Hugging Face Hub did not give it.
    """
    spec = job.spec.model
    return _count(_config(spec.source, spec.revision, "spec.model.source"), job)


def check_data(job: FinetuneJob, directory: JobDirectory) -> str:
    """That the shards, or the raw data that shards are made of, are there.

    Raises:
        JobError: they are not.
        InfrastructureError: the store did not give them.
    """
    _refuse_missing(job, lambda field: not field.startswith("spec.model."))
    dataset = job.spec.dataset
    prepared = directory.data / "train"
    found = []
    if dataset.train is not None:
        found.append(_shards(dataset.train.source, "spec.dataset.train.source"))
    elif (prepared / _INDEX).exists():
        found.append(_shards(str(prepared), "spec.dataset.prepare"))
    elif dataset.prepare is not None:
        found.append(_raw_data(dataset.prepare.source))
    if dataset.eval is not None and dataset.eval.source is not None:
        found.append(_shards(dataset.eval.source, "spec.dataset.eval.source"))
    return "; ".join(found)


def check_metrics(job: FinetuneJob) -> str:
    """That the functions of `training.evaluation.metrics` are in this image; they are not run here.

    Raises:
        JobError: one of them is not.
    """
    evaluation = job.spec.training.evaluation
    if missing := missing_functions(evaluation):
        raise JobError(f"spec.{FIELD}: {'; '.join(missing)}")
    return f"the image has {', '.join(filter(is_function, evaluation.metrics))}"


def _refuse_missing(job: FinetuneJob, concerns: Callable[[str], bool]) -> None:
    missing = [problem for problem in missing_sources(job) if concerns(problem.field)]
    if missing:
        raise JobError(f"{'; '.join(map(str, missing))}: {_AGAIN}")


# Models


def _config(source: str, revision: str, field: str) -> Mapping[str, Any]:
    """The model's `config.json`."""
    path = _folder(source, field) / _CONFIG if not source.startswith(_HUB) else _download(source, revision, field)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise JobError(f"{field}: {source} is no model: there is no {_CONFIG} in it; {_AGAIN}") from None
    except ValueError as error:
        raise JobError(f"{field}: {_CONFIG} of {source} is not JSON ({error}); {_AGAIN}") from error
    if not isinstance(config, dict):
        raise JobError(f"{field}: {_CONFIG} of {source} is no JSON object; {_AGAIN}")
    return config


def _names(source: str, revision: str, field: str) -> Collection[str]:
    """Names of the files of a source; of one on a Hub that is not to be asked, of those that are here."""
    if not source.startswith(_HUB):
        return {path.name for path in _folder(source, field).iterdir()}
    from huggingface_hub import HfApi, constants, snapshot_download

    name = source.removeprefix(_HUB).strip("/")
    if constants.HF_HUB_OFFLINE:
        folder = _of_the_hub(field, source, lambda: snapshot_download(name, revision=revision, local_files_only=True))
        return {path.name for path in Path(folder).iterdir()}
    listed = _of_the_hub(field, source, lambda: HfApi().list_repo_files(name, revision=revision))
    return {path for path in listed if "/" not in path}


def _folder(source: str, field: str) -> Path:
    if "://" in source:
        raise JobError(f"{field}: {source} cannot be loaded: a model is named as hf://owner/name or as a folder")
    if not Path(source).is_dir():
        raise JobError(f"{field}: {source} is no folder; {_AGAIN}")
    return Path(source)


def _download(source: str, revision: str, field: str) -> Path:
    """A model's `config.json` from the Hub, by way of the cache that the driver reads, too."""
    from huggingface_hub import hf_hub_download

    name = source.removeprefix(_HUB).strip("/")
    return Path(_of_the_hub(field, source, lambda: hf_hub_download(name, _CONFIG, revision=revision)))


def _of_the_hub(field: str, source: str, ask: Callable[[], _Answer]) -> _Answer:
    try:
        return ask()
    except Exception as error:  # the Hub's client lets through whatever its HTTP client raises
        reason = textwrap.shorten(str(error) or type(error).__name__, width=300, placeholder=" ...")
        raise InfrastructureError(
            f"{field}: {source} cannot be read from the Hugging Face Hub ({reason}): check the name, the revision, "
            "that the cluster may reach it, and HF_TOKEN for a model that is private or gated"
        ) from error


def _count(config: Mapping[str, Any], job: FinetuneJob) -> TrainedParameters | None:
    if config.get("model_type") not in SUPPORTED_MODEL_TYPES:
        return None
    return setup_of(read_architecture(config), job).trained


def _whole(parameters: TrainedParameters) -> int:
    """Parameters of the model itself."""
    return parameters.frozen or parameters.count


# Data


def _shards(source: str, field: str) -> str:
    place = f"{source.rstrip('/')}/{_INDEX}"
    if "://" in source:
        content = read_object(place, _MOST_INDEX_BYTES, field)
    elif Path(place).is_file():
        with Path(place).open("rb") as stream:
            content = stream.read(_MOST_INDEX_BYTES)
    else:
        raise JobError(f"{field}: {source} is no dataset of MDS shards: there is no {_INDEX} in it; {_AGAIN}")
    if len(content) == _MOST_INDEX_BYTES:
        return f"{source} has an {_INDEX} of more than {_MOST_INDEX_BYTES >> 20} MiB"
    try:
        shards = json.loads(content)["shards"]
        samples = sum(shard["samples"] for shard in shards)
    except (ValueError, KeyError, TypeError) as error:
        raise JobError(
            f"{field}: {place} is no index of MDS shards ({error}): write it with `spotune shard`"
        ) from error
    if samples == 0:
        raise JobError(f"{field}: {source} has no samples")
    return f"{source} has {samples:,} samples in {len(shards):,} shards"


def _raw_data(source: str) -> str:
    from spotune_trainer.data.preparation.inputs import find_inputs

    try:
        inputs = find_inputs([source])
    except JobError as error:
        raise JobError(f"spec.dataset.prepare.source: {error}") from error
    size = decimal(sum(file.size for file in inputs))
    return f"{source} has {len(inputs):,} files of raw data ({size}), of which shards are made before the first step"

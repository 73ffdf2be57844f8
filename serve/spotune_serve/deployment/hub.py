"""Models on the Hugging Face Hub: each process downloads what it needs into the cache of its node."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spotune.errors import InfrastructureError, JobError
from spotune.prompting.export_manifest import find_export
from spotune_serve.deployment.bucket import BucketModel, bucket_model_folder

_CONFIG = "config.json"
_WITHOUT_WEIGHTS = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""Configuration, tokenizer, chat template and the manifest of an export. No Python: code of models is not run."""
_WEIGHTS = ("*.safetensors",)
_DUPLICATES = ("*/*", "consolidated*.safetensors")
"""The same weights in other formats, which transformers does not read."""
_RETRIABLE_STATUS = 500
_TOO_MANY_REQUESTS = 429


@dataclass(frozen=True)
class HubModel:
    """A model on the Hub.

    Attributes:
        repository: `owner/name`.
        revision: branch, tag or commit. Only a commit is the same for all replicas, whenever they start.
    """

    repository: str
    revision: str = "main"

    @property
    def name(self) -> str:
        """The name without the owner."""
        return self.repository.rpartition("/")[2]

    def __str__(self) -> str:
        return f"hf://{self.repository} at revision {self.revision}"


ModelSource = Path | HubModel | BucketModel
"""Where a model is: in a folder, on the Hub, or in a bucket."""


class Download(Protocol):
    """The part of `huggingface_hub.snapshot_download` that is used."""

    def __call__(
        self,
        repo_id: str,
        *,
        revision: str,
        cache_dir: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
    ) -> str:
        """Download the files of a repository and return the path of their folder."""


def model_folder(model: ModelSource, *, weights: bool = True, download: Download | None = None) -> Path:
    """The folder of a model on this machine; a model on the Hub or in a bucket is downloaded first.

    Args:
        model: a folder with `config.json`, a job directory with an export, a model on the Hub, or one in a bucket.
        weights: whether the weights of a model that is downloaded are needed, too.
        download: downloads a snapshot; None: `huggingface_hub.snapshot_download`.

    Raises:
        UsageError: the folder has no model.
        JobError: the Hub or the bucket has no such model, or denies access to it.
        InfrastructureError: the Hub or the store cannot be reached, or the cache cannot be written.
    """
    if isinstance(model, Path):
        return model if (model / _CONFIG).is_file() else find_export(model)
    patterns: Sequence[str] = (*_WITHOUT_WEIGHTS, *(_WEIGHTS if weights else ()))
    if isinstance(model, BucketModel):
        return bucket_model_folder(model, patterns, _DUPLICATES)
    try:
        folder = Path(
            (download or _snapshot_download())(
                model.repository,
                revision=model.revision,
                cache_dir=_cache(os.environ.get("HF_HOME", ""), os.environ.get("SPOTUNE_CACHE", "")),
                allow_patterns=list(patterns),
                ignore_patterns=list(_DUPLICATES),
            )
        )
    except Exception as error:  # the client raises errors of several libraries
        raise _error_of(error, model) from error
    if not (folder / _CONFIG).is_file():
        raise JobError(f"{model} has no {_CONFIG}, so it is not a transformers model. Name another repository.")
    return folder


def _snapshot_download() -> Download:
    from huggingface_hub import snapshot_download

    return snapshot_download


def _cache(hub_home: str, spotune_cache: str) -> str | None:
    """The folder for downloads; None: the client's own default, which HF_HOME sets."""
    return str(Path(spotune_cache) / "hub") if spotune_cache and not hub_home else None


def _error_of(error: Exception, model: HubModel) -> JobError | InfrastructureError:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    reason = textwrap.shorten(str(error) or type(error).__name__, width=300, placeholder=" ...")
    message = f"{model} cannot be downloaded: {reason}"
    if isinstance(error, RevisionNotFoundError):
        return JobError(f"{message} Name a branch, tag or commit of the repository.")
    if isinstance(error, RepositoryNotFoundError | HFValidationError) or _is_refusal(error, HfHubHTTPError):
        return JobError(f"{message} Check the name. A private or gated model needs a token with access in HF_TOKEN.")
    return InfrastructureError(
        f"{message} Check that the Hub can be reached from here and that its cache (HF_HOME) can be written. "
        "A private or gated model needs a token with access in HF_TOKEN."
    )


def _is_refusal(error: Exception, http_error: type[Exception]) -> bool:
    """Whether the Hub answered that the request is wrong, so that the same request fails again."""
    status = getattr(getattr(error, "response", None), "status_code", _RETRIABLE_STATUS)
    return isinstance(error, http_error) and status < _RETRIABLE_STATUS and status != _TOO_MANY_REQUESTS

"""Where the code of the user comes from, if neither the image nor a folder of the volume has it."""

import re
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from spotune.custom_resource.base import RawSource, SecretKeyRef, Section, invalid, with_cel_rules

GIT_TOKEN: Final = "GIT_TOKEN"
"""Environment variable with the token that reads a git repository by https."""
CONFIG_MAP_FOLDER: Final = "SPOTUNE_CODE_CONFIG_MAP"
"""Environment variable with the folder of a ConfigMap's files; set by the operator."""
GIT_SCHEMES: Final = ("https", "http", "ssh", "file")
ARCHIVE_SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".zip")
_GIT_URL: Final = f"({'|'.join(GIT_SCHEMES)})://[^\\s]+"
_EXPECTED_URL: Final = "a URL that starts with https://, http://, ssh:// or file://"
_REVISION: Final = "[A-Za-z0-9][A-Za-z0-9._/+-]*"
_EXPECTED_REVISION: Final = "a branch, a tag, a commit or HEAD"
ARCHIVE: Final = f"({'|'.join(map(re.escape, ARCHIVE_SUFFIXES))})(\\?.*)?$"
NO_ARCHIVE: Final = f"must end in one of {', '.join(ARCHIVE_SUFFIXES)}"
NOT_ONE_SOURCE: Final = "set exactly one of git, archive and configMap"
NOT_WITHIN: Final = "must be a relative path without .."
NO_PASSWORD: Final = "must hold no password, since everyone who can read the job would see it: use tokenSecretRef"


def _check_url(url: str) -> str:
    if not re.fullmatch(_GIT_URL, url):
        raise PydanticCustomError("expected", "expected {expected}", {"expected": _EXPECTED_URL})
    if "@" in url and urlsplit(url).password is not None:
        invalid("", NO_PASSWORD)
    return url


def _check_revision(revision: str) -> str:
    if not re.fullmatch(_REVISION, revision) or ".." in revision:
        raise PydanticCustomError("expected", "expected {expected}", {"expected": _EXPECTED_REVISION})
    return revision


GitUrl = Annotated[
    str,
    AfterValidator(_check_url),
    with_cel_rules(
        (f"self.matches(r'^{_GIT_URL}$')", f"expected {_EXPECTED_URL}"),
        ("!self.matches('^[a-z]+://[^/@]*:[^/@]*@')", NO_PASSWORD),
        max_length=1024,
    ),
]
GitRevision = Annotated[
    str,
    AfterValidator(_check_revision),
    with_cel_rules(
        (f"self.matches(r'^{_REVISION}$') && !self.contains('..')", f"expected {_EXPECTED_REVISION}"), max_length=256
    ),
]


class GitSource(Section):
    """A git repository. It is read once: all worker groups train with the same commit until a field here changes."""

    url: GitUrl
    """URL of the repository, such as https://github.com/acme/training."""
    revision: GitRevision = "HEAD"
    """Branch, tag or commit. HEAD: the repository's default branch."""
    token_secret_ref: SecretKeyRef | None = None
    """Secret with a token that may read the repository by https://. `spotune run` reads it from GIT_TOKEN."""


class ArchiveSource(Section):
    """A tar or zip file. It is read once: all worker groups train with the same files until a field here changes."""

    source: RawSource
    """The file: s3://, gs://, az://, http://, https://, or a path, such as one on the shared volume."""
    sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    """SHA-256 of the file in hex. Another file is refused. Empty: any file is taken."""

    @model_validator(mode="after")
    def _check_suffix(self) -> Self:
        if not re.search(ARCHIVE, self.source):
            invalid("source", NO_ARCHIVE)
        return self


class ConfigMapSource(Section):
    """A ConfigMap whose keys are names of files. A change of it applies to the next worker group."""

    name: Annotated[str, Field(pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
    """Name of the ConfigMap."""


class CodeFromSpec(Section):
    """Where code is read from, once, before workers are asked for. Later the run does not need the source."""

    git: GitSource | None = None
    """A git repository."""
    archive: ArchiveSource | None = None
    """A tar or zip file."""
    config_map: ConfigMapSource | None = None
    """A ConfigMap, for a few short files."""
    directory: Annotated[str, Field(max_length=1024)] = ""
    """Folder within the source that takes the place of code. Empty: the whole source."""

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if [self.git, self.archive, self.config_map].count(None) != 2:
            invalid("", NOT_ONE_SOURCE)
        if self.directory.startswith("/") or ".." in self.directory.split("/"):
            invalid("directory", NOT_WITHIN)
        return self

"""Reads one commit of a git repository, by git itself."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from spotune.errors import InfrastructureError, JobError
from spotune.job.training.code_source import GIT_SCHEMES, GIT_TOKEN, GitSource

FIELD: Final = "training.codeFrom.git"
_TIMEOUT_SECONDS: Final = 600.0
_CREDENTIALS: Final = f'!f() {{ [ "$1" = get ] && echo "username=$GIT_USERNAME" && echo "password=${GIT_TOKEN}"; }}; f'
"""A credential helper of git. The shell that git starts reads the token, so no list of processes shows it."""
_TOKEN_USER: Final = "x-access-token"  # GitHub asks for this name, others take any
_FOR_THE_USER: Final = re.compile(
    r"authentication failed|could not read (username|password)|permission denied|access denied|returned error: 40[134]"
    r"|not found|does not appear to be a git repository|couldn't find remote ref|not allowed|unsupported",
    re.IGNORECASE,
)
"""In messages of git: errors that do not go away by themselves."""


def fetch_commit(source: GitSource, folder: Path) -> str:
    """Write the files of `source.revision` to a new folder; returns its commit, 40 or 64 hexadecimal digits.

    Raises:
        JobError: git is not installed, there is no such repository or revision, or access is denied.
        InfrastructureError: the repository cannot be reached.
    """
    _git(source, "init", "--quiet", str(folder))
    try:
        _git(source, "fetch", "--quiet", "--depth=1", source.url, source.revision, folder=folder)
        revision = "FETCH_HEAD"
    except (JobError, InfrastructureError):  # a short commit, or a server without shallow copies
        everything = "+refs/*:refs/remotes/source/*"
        _git(source, "fetch", "--quiet", source.url, everything, "+HEAD:refs/remotes/source/HEAD", folder=folder)
        revision = _find(source, folder)
    _git(source, "checkout", "--quiet", "--detach", revision, folder=folder)
    _git(source, "submodule", "--quiet", "update", "--init", "--recursive", "--depth=1", folder=folder)
    return _git(source, "rev-parse", "HEAD", folder=folder).strip()


def _find(source: GitSource, folder: Path) -> str:
    """The commit of the revision in a full copy of the repository."""
    for prefix in ("refs/remotes/source/", "refs/remotes/source/heads/", "refs/remotes/source/tags/", ""):
        command = ("rev-parse", "--verify", "--quiet", f"{prefix}{source.revision}^{{commit}}")
        if commit := _run(command, folder, source).stdout.strip():
            return commit
    raise JobError(f"{FIELD}: {source.url} has no revision {source.revision}: correct training.codeFrom.git.revision")


def _git(source: GitSource, *arguments: str, folder: Path | None = None) -> str:
    """Run git and return what it prints; its failure is raised as an error of the job or of the infrastructure."""
    done = _run(arguments, folder, source)
    if done.returncode == 0:
        return done.stdout
    message = " ".join(done.stderr.split()) or f"git {arguments[0]} failed with exit status {done.returncode}"
    if not _FOR_THE_USER.search(message):
        raise InfrastructureError(f"{FIELD}: {source.url}: {message}")
    remedy = f"correct url and revision, or give a token that may read it (tokenSecretRef; on one machine ${GIT_TOKEN})"
    raise JobError(f"{FIELD}: {source.url} at {source.revision}: {message}: {remedy}")


def _run(arguments: tuple[str, ...], folder: Path | None, source: GitSource) -> subprocess.CompletedProcess[str]:
    place = ["-C", str(folder)] if folder is not None else []
    token = ["-c", f"credential.helper={_CREDENTIALS}"] if os.environ.get(GIT_TOKEN) else []
    environment = {
        "GIT_SSH_COMMAND": "ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new",
        **os.environ,
        "GIT_ALLOW_PROTOCOL": ":".join(GIT_SCHEMES),
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_USERNAME": urlsplit(source.url).username or _TOKEN_USER,
        "LC_ALL": "C",  # messages are read
    }
    try:
        return subprocess.run(
            ["git", *token, *place, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=_TIMEOUT_SECONDS,
        )
    except FileNotFoundError as error:
        remedy = "install it in the image (cluster.image) or on this machine, or use training.codeFrom.archive"
        raise JobError(f"{FIELD}: git is not installed where the trainer runs: {remedy}") from error
    except subprocess.TimeoutExpired as error:
        reason = f"git {arguments[0]} took longer than {_TIMEOUT_SECONDS:.0f} s"
        raise InfrastructureError(f"{FIELD}: {source.url}: {reason}") from error

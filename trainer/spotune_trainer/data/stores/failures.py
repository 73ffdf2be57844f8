"""Tells errors of the stores' clients that the user has to fix from those that may go away by themselves."""

from __future__ import annotations

import textwrap

# Error names and codes of the storage clients that mean "not found" or "access denied".
_USER_ERRORS = frozenset({
    "401", "403", "404", "410", "AccessDenied", "ClientAuthenticationError", "DefaultCredentialsError",
    "EntryNotFoundError", "FileNotFoundError", "Forbidden", "GatedRepoError", "HFValidationError",
    "InvalidAccessKeyId", "InvalidBucketName", "NoCredentialsError", "NoSuchBucket", "NoSuchKey", "NotFound",
    "PermissionError", "RemoteEntryNotFoundError", "RepositoryNotFoundError", "ResourceNotFoundError",
    "RevisionNotFoundError", "SignatureDoesNotMatch",
})  # fmt: skip


def is_for_the_user(error: Exception) -> bool:
    """Whether the error means that a file is missing or that access is denied."""
    response = getattr(error, "response", None)  # where botocore's errors carry their code
    code = response.get("Error", {}).get("Code", "") if isinstance(response, dict) else getattr(error, "code", "")
    return bool(_USER_ERRORS & {type(error).__name__, str(code)})


def detail(error: Exception) -> str:
    """The error's message in one line; the clients of Azure append whole documents to theirs."""
    return textwrap.shorten(str(error), width=300, placeholder=" ...") or type(error).__name__

"""Jobs with training.codeFrom: which sources are refused, and that code is not part of the fingerprint."""

from typing import Any

import pytest

from spotune.errors import JobError
from spotune.fingerprint import fingerprint
from tests.api.job.test_training_function import a_job

REFUSED_CODE: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "set exactly one of git, archive and configMap"),
    ({"git": {"url": "https://a/b"}, "configMap": {"name": "c"}}, "set exactly one of git, archive and configMap"),
    ({"git": {"url": "git@github.com:acme/training.git"}}, "expected a URL that starts with https://"),
    ({"git": {"url": "https://me:password@a/b"}}, "must hold no password"),
    ({"git": {"url": "https://a/b", "revision": "--upload-pack=x"}}, "expected a branch, a tag, a commit or HEAD"),
    ({"git": {"url": "https://a/b", "revision": "a..b"}}, "expected a branch, a tag, a commit or HEAD"),
    ({"archive": {"source": "s3://bucket/code"}}, "must end in one of .tar, .tar.gz"),
    ({"archive": {"source": "ftp://bucket/code.zip"}}, "expected a path or one of hf://"),
    ({"archive": {"source": "a.zip"}, "directory": "../other"}, "must be a relative path without .."),
    ({"archive": {"source": "a.zip"}, "directory": "/other"}, "must be a relative path without .."),
)
"""Values of `training.codeFrom` that are refused, and a part of the message."""


@pytest.mark.parametrize(("code_from", "message"), REFUSED_CODE)
def test_wrong_sources_are_refused(code_from: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as refused:
        a_job(training={"codeFrom": code_from})
    assert message in str(refused.value)


def test_code_has_one_source() -> None:
    config_map = {"configMap": {"name": "c"}}
    with pytest.raises(JobError, match=r"spec\.training\.codeFrom: set code or codeFrom, not both"):
        a_job(training={"code": "code", "codeFrom": config_map})
    with pytest.raises(JobError, match=r"spec\.training\.codeFrom: is only used by function and command"):
        a_job(training={"function": "", "epochs": 1, "codeFrom": config_map})


def test_code_may_change_after_the_first_checkpoint() -> None:
    fingerprints = {
        fingerprint(a_job(training={"codeFrom": {"git": {"url": "https://a/b", "revision": revision}}}))
        for revision in ("v1", "v2")
    }
    assert fingerprints == {fingerprint(a_job())}


@pytest.mark.parametrize("name", ["code.tar.gz", "code.zip", "https://host/code.tgz?signature=x"])
def test_names_of_archives(name: str) -> None:
    assert a_job(training={"codeFrom": {"archive": {"source": name}}}).spec.training.code_from is not None

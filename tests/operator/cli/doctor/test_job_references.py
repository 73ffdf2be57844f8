"""Checks that the objects that FinetuneJobs name exist."""

from typing import Any

import pytest

from spotune_operator.cli.doctor.check import Check
from spotune_operator.cli.doctor.job_references import needs_objects, references
from spotune_operator.cli.doctor.references import named_objects
from spotune_operator.errors import NotFoundError, RefusedError

CORE = "/api/v1/namespaces/team"
SECRET = {"data": {"token": "c2VjcmV0"}}
TOKEN = {"name": "tokens", "key": "token"}


def examined(objects: dict[str, dict[str, Any]], hidden: bool = False, **spec: Any) -> list[tuple[str, str]]:
    """Verdict and message of each check of a job."""

    def get(path: str) -> dict[str, Any]:
        if hidden:
            raise RefusedError("you may not get it", 403)
        if path not in objects:
            raise NotFoundError("not found", 404)
        return objects[path]

    job = {"metadata": {"name": "ghost", "namespace": "team"}, "spec": spec}
    checks: list[Check] = list(named_objects("jobs", "FinetuneJob", [job], references, get))
    assert all(check.remedy for check in checks if check.verdict == "failed")
    return [(check.verdict.value, check.message) for check in checks]


def test_a_missing_claim_is_a_failure() -> None:
    (check,) = examined({}, storage={"existingClaim": "nope"})
    message = "ghost: spec.storage.existingClaim: there is no PersistentVolumeClaim nope: all pods stay Pending"
    assert check == ("failed", message)


@pytest.mark.parametrize(
    ("spec", "path", "found"),
    [
        ({"storage": {"existingClaim": "mine"}}, "persistentvolumeclaims/mine", {}),
        ({"storage": {"bucket": "s3://a/b", "credentials": {"secretName": "tokens"}}}, "secrets/tokens", {}),
        ({"dataset": {"credentials": {"secretName": "tokens"}}}, "secrets/tokens", {}),
        ({"model": {"source": "hf://a/b", "tokenSecretRef": TOKEN}}, "secrets/tokens", SECRET),
        ({"output": {"hub": {"repo": "a/b", "tokenSecretRef": TOKEN}}}, "secrets/tokens", SECRET),
        ({"tracking": {"wandb": {"project": "a", "keySecretRef": TOKEN}}}, "secrets/tokens", SECRET),
        (
            {"training": {"codeFrom": {"git": {"url": "https://a/b", "tokenSecretRef": TOKEN}}}},
            "secrets/tokens",
            SECRET,
        ),
        ({"training": {"codeFrom": {"configMap": {"name": "code"}}}}, "configmaps/code", {}),
        ({"workers": {"serviceAccountName": "runner"}}, "serviceaccounts/runner", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_object_that_a_job_names_must_exist(spec: dict[str, Any], path: str, found: dict[str, Any]) -> None:
    assert examined({f"{CORE}/{path}": found}, **spec) == [
        ("passed", "all objects that the 1 FinetuneJob(s) name exist")
    ]
    ((verdict, message),) = examined({}, **spec)
    assert verdict == "failed"
    assert message.startswith("ghost: spec.")
    assert path.rpartition("/")[2] in message


def test_the_remedy_for_a_missing_secret_is_a_command() -> None:
    metadata, create = {"namespace": "team"}, "kubectl create secret generic tokens --namespace team"
    spec = {"model": {"tokenSecretRef": TOKEN}, "dataset": {"credentials": {"secretName": "tokens"}}}
    token, credentials = references({"metadata": metadata, "spec": spec})
    assert token.remedy == f"{create} --from-file=token=FILE; or correct the field"
    assert credentials.remedy == f"{create} --from-env-file=FILE; or correct the field"


def test_a_secret_needs_the_key() -> None:
    ((verdict, message),) = examined({f"{CORE}/secrets/tokens": {"data": {}}}, model={"tokenSecretRef": TOKEN})
    assert (verdict, message.split(": ")[2]) == ("failed", "Secret tokens has no key token")


def test_objects_that_the_user_may_not_see_are_a_warning() -> None:
    (check,) = examined({}, hidden=True, storage={"existingClaim": "mine"})
    assert check == ("warning", "you may not check whether these exist: PersistentVolumeClaim mine")


@pytest.mark.parametrize(("phase", "needs"), [("", True), ("Stalled", True), ("Complete", False), ("Failed", False)])
def test_a_job_that_has_ended_needs_nothing(phase: str, needs: bool) -> None:
    assert needs_objects({"metadata": {}, "status": {"phase": phase}}) is needs
    assert needs_objects({"metadata": {}})

"""The storage classes of manifests/: one for each cloud without the default class of jobs."""

from typing import Any

import pytest
import yaml

from spotune_operator.children.pods import head_pod
from spotune_operator.providers import AKS, EKS, Provider, refuse_unfit_class
from tests import ROOT
from tests.operator.support.resolved_jobs import resolved_job_of

MANIFESTS = ROOT / "manifests"


def storage_class(provider: Provider) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((MANIFESTS / provider.name / "storageclass.yaml").read_text())
    return found


@pytest.mark.parametrize("provider", [AKS, EKS], ids=lambda provider: provider.name)
def test_the_class_is_the_one_that_jobs_get_and_fit_for_checkpoints(provider: Provider) -> None:
    found = storage_class(provider)
    assert found["metadata"]["name"] == provider.storage_class
    refuse_unfit_class(found)


@pytest.mark.parametrize("provider", [AKS, EKS], ids=lambda provider: provider.name)
def test_other_nodes_see_new_files_soon(provider: Provider) -> None:
    assert {"acdirmin=1", "acdirmax=3"} <= set(storage_class(provider)["mountOptions"])


def test_files_on_efs_belong_to_the_user_of_the_pods() -> None:
    security = head_pod(resolved_job_of(EKS)).template["spec"]["securityContext"]
    parameters = storage_class(EKS)["parameters"]
    assert (parameters["uid"], parameters["gid"]) == (str(security["runAsUser"]), str(security["runAsGroup"]))

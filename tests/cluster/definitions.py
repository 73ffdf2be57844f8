"""CustomResourceDefinitions of a cluster: applied, and waited for until clients find their kinds."""

from spotune.crd import CUSTOM_RESOURCES
from spotune.custom_resource import API_VERSION
from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.waiting import wait_for
from tests import ROOT

CRD = ROOT / "manifests" / "crd.yaml"
SECONDS_TO_BE_SERVED = 60.0


def apply_definitions(kubectl: Kubectl) -> None:
    """Apply the definitions of spotune, and wait until the API server serves their kinds."""
    kubectl("apply", "--server-side", "--force-conflicts", f"--filename={CRD}")
    group = API_VERSION.partition("/")[0]
    wait_until_served(kubectl, *(f"{resource.plural}.{group}" for resource in CUSTOM_RESOURCES))


def wait_until_served(kubectl: Kubectl, *names: str) -> None:
    """Wait until kubectl finds kinds by the names of their definitions, such as `finetunejobs.spotune.dev`.

    `kubectl wait --for=condition=Established` is not enough: it fails while a new definition has no condition at all,
    and clients find the kind of an established one only a moment later.
    """

    def served() -> bool:
        try:
            kubectl("get", ",".join(names))
        except KubectlError:
            return False
        return True

    wait_for(f"{', '.join(names)} in the API server", SECONDS_TO_BE_SERVED, served)


def explained(kubectl: Kubectl, field: str) -> str:
    """What `kubectl explain` shows of a field, in one line. The schemas are published after the kinds."""

    def shown() -> str:
        try:
            return kubectl("explain", field)
        except KubectlError:
            return ""

    return " ".join(wait_for(f"the documentation of {field}", SECONDS_TO_BE_SERVED, shown).split())

"""CustomResourceDefinitions of a cluster: applied, and waited for until clients find their kinds."""

import json
import ssl
from http.client import HTTPSConnection
from urllib.parse import urlsplit

import yaml

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


def dry_run(kubectl: Kubectl, plural: str, text: str) -> None:
    """Create an object in the namespace `default` by dry-run, validated as strictly as kubectl asks for.

    Hundreds of objects are tried: a kubectl for each takes much longer.

    Args:
        kubectl: Whose API server and user.
        plural: Of the object's kind, such as `finetunejobs`.
        text: The object as YAML or JSON; a namespace `team` in it is left out.

    Raises:
        KubectlError: The API server refuses the object.
    """
    config = yaml.safe_load(kubectl.kubeconfig.read_text())
    server, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    context = ssl.create_default_context(cafile=server["certificate-authority"])
    context.load_cert_chain(user["client-certificate"], user["client-key"])
    connection = HTTPSConnection(urlsplit(server["server"]).netloc, context=context, timeout=60)
    path = f"/apis/{API_VERSION}/namespaces/default/{plural}?dryRun=All&fieldValidation=Strict"
    try:
        body = text.replace("namespace: team, ", "").encode()
        connection.request("POST", path, body, {"Content-Type": "application/yaml", "Accept": "application/json"})
        answer = connection.getresponse()
        content = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status != 201:
        raise KubectlError(content["message"])

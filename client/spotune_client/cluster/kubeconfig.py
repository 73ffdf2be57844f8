"""Creates a client from a kubeconfig: server, credentials and namespace, with the same rules as kubectl."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config
from urllib3.exceptions import HTTPError
from urllib3.util import parse_url

from spotune.custom_resource.metadata import NAME_PATTERN
from spotune.errors import KubernetesError, UsageError
from spotune_client.cluster.client import QUIET_SECONDS, Cluster
from spotune_client.cluster.credential_errors import logged_errors

_INVALID = (ConfigException, yaml.YAMLError, HTTPError, AttributeError, KeyError, OSError, TypeError, ValueError)
"""What the readers of YAML, kubeconfig and URLs raise for files that are not as they should be, or cannot be read."""
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class ClusterOptions:
    """The command-line options that select a cluster. Empty values get kubectl's defaults.

    Attributes:
        namespace: Namespace of the jobs.
        kubeconfig: File to read instead of ``$KUBECONFIG`` and ``~/.kube/config``.
        context: Context in the kubeconfig.
    """

    namespace: str = ""
    kubeconfig: Path | None = None
    context: str = ""


def open_cluster(target: ClusterOptions, quiet_seconds: float = QUIET_SECONDS) -> Cluster:
    """Create a client for the selected cluster, without sending a request yet.

    Args:
        target: Selects the cluster.
        quiet_seconds: Time without a byte after which a stream counts as lost.

    Raises:
        UsageError: There is no kubeconfig, or it does not contain the context.
        KubernetesError: The kubeconfig's credential plugin fails.
    """
    if target.namespace and not re.fullmatch(NAME_PATTERN, target.namespace):
        raise UsageError(f"--namespace {target.namespace}: this cannot be the name of a namespace")
    files = _kubeconfigs(target.kubeconfig)
    # No retries: urllib3 prints a line for each, and callers that wait retry themselves.
    configuration = Configuration(retries=False)
    if not files:
        client, namespace = _log_in_as_pod(configuration, target)
    else:
        client, namespace = _log_in(configuration, files, target.context)
    return Cluster(client, target.namespace or namespace, quiet_seconds)


def _kubeconfigs(given: Path | None) -> list[Path]:
    """The existing kubeconfig files: the given one, or those of ``$KUBECONFIG`` or the default.

    Raises:
        UsageError: The given file does not exist.
    """
    if given is not None:
        if not given.is_file():
            raise UsageError(f"--kubeconfig {given}: {'is no file' if given.exists() else 'the file does not exist'}")
        return [given]
    named = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    return [Path(file) for file in named.split(os.pathsep) if file and Path(file).is_file()]


def _log_in_as_pod(configuration: Configuration, target: ClusterOptions) -> tuple[ApiClient, str]:
    """A client with the service account of the pod that this process runs in, and the pod's namespace."""
    try:
        load_incluster_config(client_configuration=configuration)
        namespace = _SERVICE_ACCOUNT.read_text(encoding="utf-8").strip()
    except (ConfigException, OSError) as error:
        raise UsageError(
            "there is no kubeconfig: neither $KUBECONFIG nor ~/.kube/config is an existing file, and this is not a "
            "pod. Use --kubeconfig FILE, or create one with `az aks get-credentials`, `gcloud container clusters "
            "get-credentials` or `aws eks update-kubeconfig`"
        ) from error
    if target.context:
        raise UsageError(f"--context {target.context}: there is no kubeconfig to find it in")
    return ApiClient(configuration), namespace


def _log_in(configuration: Configuration, files: Sequence[Path], context: str) -> tuple[ApiClient, str]:
    """A client with the credentials of the kubeconfigs, and the context's namespace."""
    joined = os.pathsep.join(map(str, files))
    try:
        chosen, namespace = _choose(files, context)
        with logged_errors() as errors:
            load_kube_config(joined, context=chosen, client_configuration=configuration, persist_config=False)
        if parse_url(configuration.host).scheme not in ("https", "http"):
            raise ConfigException(f"server {configuration.host} of context {chosen} does not begin with https://")
        client = ApiClient(configuration)
    except _INVALID as error:
        raise UsageError(f"{joined} is not a valid kubeconfig: {_one_line(error)}") from error
    if errors:
        raise KubernetesError(f"context {chosen}: the credential plugin of {joined} failed: {'; '.join(errors)}")
    return client, namespace


def _choose(files: Sequence[Path], name: str) -> tuple[str, str]:
    """The context and its namespace. Files are merged as by kubectl: the first definition wins.

    Raises:
        UsageError: The context does not exist, or none is selected.
    """
    found: dict[str, str] = {}
    current = ""
    for file in files:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        current = current or content.get("current-context") or ""
        for context in content.get("contexts") or ():
            found.setdefault(context["name"], str(context["context"].get("namespace") or "default"))
    names, where = ", ".join(found) or "none", os.pathsep.join(map(str, files))
    if not (name or current):
        raise UsageError(f"{where} has no current context: use --context; available: {names}")
    chosen = name or current
    if chosen not in found:
        near = get_close_matches(chosen, found, n=1)
        hint = f"did you mean {near[0]}?" if near else f"available: {names}"
        raise UsageError(f"--context {chosen}: {where} does not contain this context; {hint}")
    return chosen, found[chosen]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""From a kubeconfig to a client: which API server, as whom, and in which namespace, as kubectl would have it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import ConfigException, load_incluster_config, load_kube_config

from spotune.errors import UsageError
from spotune_operator.cli.cluster.client import Cluster
from spotune_operator.errors import KubernetesError

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


@dataclass(frozen=True)
class Target:
    """What the command line says about the cluster; empty values are found as kubectl finds them.

    Attributes:
        namespace: Of the jobs.
        kubeconfig: The file to read instead of ``$KUBECONFIG`` and ``~/.kube/config``.
        context: The context in it.
    """

    namespace: str = ""
    kubeconfig: Path | None = None
    context: str = ""


def open_cluster(target: Target) -> Cluster:
    """A client for the cluster that is meant; nothing is asked of it yet.

    Raises:
        UsageError: There is no kubeconfig, or it has no such context.
        KubernetesError: The program by which the kubeconfig logs in fails.
    """
    files = _kubeconfigs(target.kubeconfig)
    # Without retries: urllib3 prints a line for each, and those who wait try again by themselves.
    configuration = Configuration(retries=False)
    if not files:
        namespace = _log_in_as_pod(configuration, target)
    else:
        namespace = _log_in(configuration, files, target.context)
    return Cluster(ApiClient(configuration), target.namespace or namespace)


def _kubeconfigs(given: Path | None) -> list[Path]:
    """The kubeconfigs that there are, of those that are meant.

    Raises:
        UsageError: The one that the command line names does not exist.
    """
    if given is not None:
        if not given.is_file():
            raise UsageError(f"--kubeconfig {given}: there is no such file")
        return [given]
    named = os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    return [Path(file) for file in named.split(os.pathsep) if file and Path(file).is_file()]


def _log_in_as_pod(configuration: Configuration, target: Target) -> str:
    """Log in as the pod that this process runs in; its namespace."""
    try:
        load_incluster_config(client_configuration=configuration)
        namespace = _SERVICE_ACCOUNT.read_text(encoding="utf-8").strip()
    except (ConfigException, OSError) as error:
        raise UsageError(
            "there is no kubeconfig: neither $KUBECONFIG nor ~/.kube/config names a file that exists, and this is no "
            "pod. Give --kubeconfig FILE; `az aks get-credentials`, `gcloud container clusters get-credentials` and "
            "`aws eks update-kubeconfig` write one"
        ) from error
    if target.context:
        raise UsageError(f"--context {target.context}: there is no kubeconfig that could have it")
    return namespace


def _log_in(configuration: Configuration, files: Sequence[Path], context: str) -> str:
    """Log in as the kubeconfigs say; the namespace of the context."""
    joined = os.pathsep.join(map(str, files))
    try:
        chosen, namespace = _choose(files, context)
        with _complaints() as complaints:
            load_kube_config(joined, context=chosen, client_configuration=configuration, persist_config=False)
    except (ConfigException, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(f"{joined} is not a kubeconfig that can be used: {_on_one_line(error)}") from error
    if complaints:
        raise KubernetesError(f"context {chosen}: the login of {joined} fails: {'; '.join(complaints)}")
    return namespace


def _choose(files: Sequence[Path], name: str) -> tuple[str, str]:
    """Context and its namespace, of files that are merged as kubectl does: what is said first holds.

    Raises:
        UsageError: There is no such context, or none is chosen.
    """
    found: dict[str, str] = {}
    current = ""
    for file in files:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        current = current or content.get("current-context") or ""
        for context in content.get("contexts") or ():
            found.setdefault(context["name"], context["context"].get("namespace") or "default")
    names, where = ", ".join(found) or "none at all", os.pathsep.join(map(str, files))
    if not (name or current):
        raise UsageError(f"{where} has no current context: give --context; there is {names}")
    chosen = name or current
    if chosen not in found:
        near = get_close_matches(chosen, found, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there is {names}"
        raise UsageError(f"--context {chosen}: {where} has no such context; {hint}")
    return chosen, found[chosen]


@contextmanager
def _complaints() -> Iterator[list[str]]:
    """What the library logs as an error meanwhile: that is how it tells that a login program has failed."""
    found: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(" ".join(record.getMessage().split()))

    collector = Collector(logging.ERROR)
    logging.getLogger().addHandler(collector)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(collector)


def _on_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""Renders the chart with Helm, as objects for tests, and installs it in a cluster.

python -m tests.cluster.chart > manifests/install.yaml
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from spotune_testcluster import binaries
from spotune_testcluster.home import Home
from spotune_testcluster.kubectl import Kubectl
from tests import ROOT

CHART = ROOT / "charts/spotune"
RELEASE = "spotune"
NAMESPACE = "spotune-system"
PRESETS = sorted(CHART.glob("values-*.yaml"))
HEALING = ("healing.cordon=true", "healing.restartDevicePlugin=true", "healing.drain=true", "healing.deleteNode=true")
"""All healing steps for lost GPUs."""
EVERYTHING = (
    "monitoring.namespace=monitoring",
    "monitoring.rules=true",
    "monitoring.dashboard=true",
    "monitoring.labels.release=prometheus",
    *HEALING,
)
"""All optional parts."""
_KUBERNETES = "--kube-version=1.34.0"
_SECONDS = 300
_HEADER = """# The operator in plain YAML, for clusters without Helm; made from charts/spotune by `make manifests`.
#
#   kubectl apply --server-side --filename manifests/crd.yaml
#   kubectl apply --filename manifests/install.yaml
---
apiVersion: v1
kind: Namespace
metadata:
  name: spotune-system
  labels:
    pod-security.kubernetes.io/enforce: restricted
"""


class HelmError(Exception):
    """Helm failed; the message has its standard error."""


@cache
def program() -> Path:
    """The path of Helm, which is built with the test cluster."""
    return binaries.build(Home.default().root, lambda _line: None) / "helm"


def helm(*arguments: str) -> str:
    """Run Helm and return its output.

    Raises:
        HelmError: Helm failed.
    """
    done = subprocess.run(
        [str(program()), *arguments], capture_output=True, text=True, timeout=_SECONDS + 60, check=False
    )
    if done.returncode != 0:
        raise HelmError(done.stderr.strip())
    return done.stdout


def manifest() -> str:
    """The content of `manifests/install.yaml`: the chart with its defaults, for clusters without Helm."""
    return _HEADER + template("crds.install=false")


def rendered(*values: str) -> list[dict[str, Any]]:
    """The output of `template` as objects."""
    return [found for found in yaml.safe_load_all(template(*values)) if found]


def template(*values: str, namespace: str = NAMESPACE, preset: Path | None = None) -> str:
    """Render the chart with values such as `healing.cordon=true`, as YAML.

    Args:
        values: Values in addition to those of the preset.
        namespace: The namespace of the release.
        preset: A file of values.

    Raises:
        HelmError: The values violate the schema, or a template rejects them.
    """
    presets = [f"--values={preset}"] if preset else []
    return helm("template", RELEASE, str(CHART), f"--namespace={namespace}", _KUBERNETES, *presets, *_given(values))


def install(kubectl: Kubectl, image: str, *values: str, chart: Path = CHART) -> None:
    """Install the operator of an image, or upgrade it, and wait until it is ready. `chart` may be an older one."""
    repository, _, tag = image.rpartition(":")
    of_image = (f"--set-string=image.repository={repository}", f"--set-string=image.tag={tag}")
    flags = ("--install", "--take-ownership", "--wait", f"--timeout={_SECONDS}s")
    helm("upgrade", RELEASE, str(chart), *flags, *_where(kubectl), *of_image, *_given(values))


def roll_back(kubectl: Kubectl) -> None:
    """Roll back to the previous revision, and wait until it is ready."""
    helm("rollback", RELEASE, "--wait", f"--timeout={_SECONDS}s", *_where(kubectl))


def uninstall(kubectl: Kubectl) -> None:
    """Uninstall the operator; does not wait until its pods are gone."""
    helm("uninstall", RELEASE, "--ignore-not-found", *_where(kubectl))


def _where(kubectl: Kubectl) -> list[str]:
    context = [f"--kube-context={kubectl.context}"] if kubectl.context else []
    return [f"--kubeconfig={kubectl.kubeconfig}", *context, f"--namespace={NAMESPACE}"]


def _given(values: Sequence[str]) -> list[str]:
    return [f"--set={value}" for value in values]


if __name__ == "__main__":
    sys.stdout.write(manifest())

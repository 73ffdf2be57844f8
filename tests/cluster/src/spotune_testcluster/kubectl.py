"""Runs kubectl for one cluster, and returns text or objects."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune_testcluster.errors import ClusterError


class KubectlError(ClusterError):
    """kubectl failed; the message has its standard error."""


@dataclass(frozen=True)
class Kubectl:
    """kubectl with a kubeconfig.

    Attributes:
        program: kubectl's path or name.
        kubeconfig: The file with the server and the user.
        context: A context of the kubeconfig, "" for the current one.
        namespace: Namespace of commands that do not name one, "" for that of the context.
    """

    program: str
    kubeconfig: Path
    context: str = ""
    namespace: str = ""

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 120) -> str:
        """Run kubectl with `arguments` and return its output.

        Raises:
            KubectlError: kubectl failed.
        """
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        done = subprocess.run(
            self.command(*arguments),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=environment,
        )
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def command(self, *arguments: str) -> list[str]:
        """The command line of kubectl with `arguments`."""
        return [self.program, f"--kubeconfig={self.kubeconfig}", *self._scope(), *arguments]

    def get(self, *arguments: str) -> Any:
        """Run `kubectl get ARGUMENTS`; returns an object, or a list of objects if the command lists."""
        found = json.loads(self("get", *arguments, "--output=json"))
        return found["items"] if found.get("kind", "").endswith("List") else found

    def apply(self, *objects: dict[str, Any]) -> None:
        """Apply manifests by server-side apply."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=text)

    def within(self, namespace: str) -> "Kubectl":
        """The same kubectl with another namespace."""
        return Kubectl(self.program, self.kubeconfig, self.context, namespace)

    def _scope(self) -> list[str]:
        context = [f"--context={self.context}"] if self.context else []
        return [*context, *([f"--namespace={self.namespace}"] if self.namespace else [])]

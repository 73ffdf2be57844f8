"""kubectl for one cluster: text in, text or objects out."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune_testcluster.errors import ClusterError


class KubectlError(ClusterError):
    """kubectl refused or failed; the text is its standard error."""


@dataclass(frozen=True)
class Kubectl:
    """A way to speak to the API server as the owner of a kubeconfig.

    Attributes:
        program: kubectl's path or name.
        kubeconfig: The file that says where and as whom.
        context: The context in it, "" for its current one.
        namespace: Used where a command does not name one, "" for the context's.
    """

    program: str
    kubeconfig: Path
    context: str = ""
    namespace: str = ""

    def __call__(self, *arguments: str, stdin: str | None = None, timeout: float = 120) -> str:
        """Run kubectl with `arguments` and return what it printed.

        Raises:
            KubectlError: It ended with an error.
        """
        command = [self.program, f"--kubeconfig={self.kubeconfig}", *self._scope(), *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
        done = subprocess.run(
            command, input=stdin, capture_output=True, text=True, timeout=timeout, check=False, env=environment
        )
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> Any:
        """`kubectl get ARGUMENTS` as an object, or a list of objects where it lists."""
        found = json.loads(self("get", *arguments, "--output=json"))
        return found["items"] if found.get("kind", "").endswith("List") else found

    def apply(self, *objects: dict[str, Any]) -> None:
        """Server-side apply of manifests."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self("apply", "--server-side", "--force-conflicts", "--filename=-", stdin=text)

    def within(self, namespace: str) -> "Kubectl":
        """The same, in another namespace."""
        return Kubectl(self.program, self.kubeconfig, self.context, namespace)

    def _scope(self) -> list[str]:
        context = [f"--context={self.context}"] if self.context else []
        return [*context, *([f"--namespace={self.namespace}"] if self.namespace else [])]

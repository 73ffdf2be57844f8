"""Options that the commands about a cluster share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Namespace = Annotated[
    str, typer.Option("--namespace", "-n", metavar="NAME", help="Namespace to use. Default: the context's.")
]
Kubeconfig = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Kubeconfig. Default: $KUBECONFIG or ~/.kube/config.")
]
Context = Annotated[str, typer.Option(metavar="NAME", help="Context of the kubeconfig. Default: the current one.")]
Output = Annotated[Literal["text", "json"], typer.Option(help="Output format.")]

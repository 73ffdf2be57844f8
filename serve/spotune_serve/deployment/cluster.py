"""The applications of a RayService, by import_path in its serveConfigV2: one gateway, and one per version of the model.

Ray builds an application in a task on the head, which has neither the model's volume nor the file with the keys. So
nothing is read here: gateways and replicas read both in their own pods.

A node runs a gateway or a replica only if it offers the Ray resource for it, `spotune_gateway` or `spotune_replica`.
Clients must connect to the gateways: a connection ends with the process that holds it, and replicas run on nodes that
may be taken away.
"""

from __future__ import annotations

from typing import Any

from ray import serve

from spotune_serve.deployment.application import gateway_application, model_application
from spotune_serve.deployment.arguments import gateway_config, model_config


def build_gateway(args: dict[str, Any]) -> serve.Application:
    """The gateway's application. The option `user_config` of its deployment `Gateway` lists the versions.

    Args:
        args: see `GatewayArguments`.

    Raises:
        JobError: an argument is missing, unknown or wrong.
    """
    return gateway_application(gateway_config(args))


def build_model(args: dict[str, Any]) -> serve.Application:
    """The application of one version of a model: replicas only.

    Args:
        args: see `ModelArguments`.

    Raises:
        JobError: an argument is missing, unknown or wrong.
    """
    return model_application(model_config(args))

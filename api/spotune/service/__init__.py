"""The ModelService: Pydantic models of the resource that serves a trained model."""

from spotune.service.modelservice import SERVICE_KIND, ModelService
from spotune.service.spec import (
    ClaimSource,
    GatewaySpec,
    IngressSpec,
    ModelServiceSpec,
    ReplicasSpec,
    ServedAdapterSpec,
    ServedModelSpec,
    ServingClusterSpec,
    ServingSpec,
)
from spotune.service.status import ModelServiceStatus, ServedVersionStatus

__all__ = [
    "SERVICE_KIND",
    "ClaimSource",
    "GatewaySpec",
    "IngressSpec",
    "ModelService",
    "ModelServiceSpec",
    "ModelServiceStatus",
    "ReplicasSpec",
    "ServedAdapterSpec",
    "ServedModelSpec",
    "ServedVersionStatus",
    "ServingClusterSpec",
    "ServingSpec",
]

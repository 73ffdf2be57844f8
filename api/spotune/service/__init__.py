"""The ModelService: Pydantic models of the resource that serves a trained model."""

from spotune.service.modelservice import SERVICE_KIND, ModelService
from spotune.service.spec import (
    ClaimSource,
    GatewaySpec,
    IngressSpec,
    ModelServiceSpec,
    PromotionSpec,
    ReplicasSpec,
    RolloutSpec,
    ServedAdapterSpec,
    ServedModelSpec,
    ServingClusterSpec,
    ServingSpec,
)
from spotune.service.status import (
    LocationStatus,
    ModelServiceStatus,
    PinnedServiceStatus,
    RejectedStatus,
    RetiringVersionStatus,
    RolloutStatus,
    ServedVersionStatus,
)

__all__ = [
    "SERVICE_KIND",
    "ClaimSource",
    "GatewaySpec",
    "IngressSpec",
    "LocationStatus",
    "ModelService",
    "ModelServiceSpec",
    "ModelServiceStatus",
    "PinnedServiceStatus",
    "PromotionSpec",
    "RejectedStatus",
    "ReplicasSpec",
    "RetiringVersionStatus",
    "RolloutSpec",
    "RolloutStatus",
    "ServedAdapterSpec",
    "ServedModelSpec",
    "ServedVersionStatus",
    "ServingClusterSpec",
    "ServingSpec",
]

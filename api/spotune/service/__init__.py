"""The ModelService: Pydantic models of the resource that serves a trained model."""

from spotune.service.modelservice import SERVICE_KIND, ModelService
from spotune.service.spec import (
    ClaimSource,
    GatewaySpec,
    HttpRouteSpec,
    IngressSpec,
    ModelServiceSpec,
    ParentRefSpec,
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
    "HttpRouteSpec",
    "IngressSpec",
    "LocationStatus",
    "ModelService",
    "ModelServiceSpec",
    "ModelServiceStatus",
    "ParentRefSpec",
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

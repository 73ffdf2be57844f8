"""What the custom resources share: base classes, metadata, pods and conditions."""

from spotune.custom_resource.base import API_VERSION, SecretKeyRef, Section, Source
from spotune.custom_resource.metadata import Metadata
from spotune.custom_resource.pods import PodTemplate, ResourcesSpec
from spotune.custom_resource.status import Condition, Conditions, StatusSection, Timestamp

__all__ = [
    "API_VERSION",
    "Condition",
    "Conditions",
    "Metadata",
    "PodTemplate",
    "ResourcesSpec",
    "SecretKeyRef",
    "Section",
    "Source",
    "StatusSection",
    "Timestamp",
]

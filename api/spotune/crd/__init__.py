"""The CustomResourceDefinitions, generated from the models of the custom resources.

With them, the API server rejects what the models reject, with a message that names the field. The operator validates
every object with the models as well, as the API server cannot check everything. The differences are:

- ``targetModules`` that is neither a string nor a list: Kubernetes has no schema for a union of the two.
- A fractional quantity such as ``cpu: 1.5``: the models accept it, the API server requires quotes.
- ``retry.backoff.initial`` at most ``max``: the API server skips the check if one of them uses days, which CEL
  durations do not support.
- A duration of more than 64 characters: the models accept it, the API server needs a maximum length for its rules.
- ``training.config`` without ``function`` and ``command``: Kubernetes has no schema for it, and 1.29 refuses a rule
  that reads it as too slow.
- ``values`` of a sweep's parameter: Kubernetes has no schema for them, so only the models check them.
- The trials of a sweep: only the models apply its parameters to its template.
- An empty field or section in the file (``adapter:``): the API server drops it or fills in its defaults.
"""

from spotune.crd.definition import (
    CUSTOM_RESOURCES,
    FINETUNE_JOBS,
    FINETUNE_SWEEPS,
    GROUP,
    MODEL_SERVICES,
    PLURAL,
    SERVICE_PLURAL,
    SERVICE_SHORT_NAME,
    SHORT_NAME,
    SWEEP_PLURAL,
    SWEEP_SHORT_NAME,
    VERSION,
    CustomResource,
    custom_resource_definition,
    custom_resource_definitions,
)

__all__ = [
    "CUSTOM_RESOURCES",
    "FINETUNE_JOBS",
    "FINETUNE_SWEEPS",
    "GROUP",
    "MODEL_SERVICES",
    "PLURAL",
    "SERVICE_PLURAL",
    "SERVICE_SHORT_NAME",
    "SHORT_NAME",
    "SWEEP_PLURAL",
    "SWEEP_SHORT_NAME",
    "VERSION",
    "CustomResource",
    "custom_resource_definition",
    "custom_resource_definitions",
]

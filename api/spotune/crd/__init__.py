"""The CustomResourceDefinition of FinetuneJobs, generated from the models in ``spotune.job``.

With it, the API server rejects what the models reject, with a message that names the field. The operator validates
every job with the models as well, as the API server cannot check everything. The differences are:

- ``targetModules`` that is neither a string nor a list: Kubernetes has no schema for a union of the two.
- A fractional quantity such as ``cpu: 1.5``: the models accept it, the API server requires quotes.
- ``retry.backoff.initial`` at most ``max``: the API server skips the check if one of them uses days, which CEL
  durations do not support.
- A duration of more than 64 characters: the models accept it, the API server needs a maximum length for its rules.
- An empty field or section in the file (``adapter:``): the API server drops it or fills in its defaults.
"""

from spotune.crd.definition import GROUP, PLURAL, SHORT_NAME, VERSION, custom_resource_definition

__all__ = ["GROUP", "PLURAL", "SHORT_NAME", "VERSION", "custom_resource_definition"]

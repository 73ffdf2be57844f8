"""The CustomResourceDefinition of FinetuneJobs, made from the models of ``spotune.job``.

The API server then refuses what the models refuse, with a sentence that names the field. What it cannot say is left to
the operator, which checks every job with the models. They differ in:

- a ``targetModules`` that is neither a text nor a list: Kubernetes has no schema for a union of the two;
- a fractional number as a quantity, ``cpu: 1.5``: the models take it, the API server wants it in quotes;
- whether ``retry.backoff.initial`` is at most ``max`` where one of them is written in days: CEL's durations have none;
- a duration of more than 64 characters: the models take it, the API server's rules need a longest text;
- a field or section that is empty in the file (``adapter:``): the API server leaves it out, or fills in its defaults.
"""

from spotune.crd.definition import GROUP, PLURAL, SHORT_NAME, VERSION, custom_resource_definition

__all__ = ["GROUP", "PLURAL", "SHORT_NAME", "VERSION", "custom_resource_definition"]

"""The ModelService of a job: how its model is served once it is trained."""

from spotune.service.field_types import OptionalServiceName
from spotune.service.spec import ServingSpec


class JobServingSpec(ServingSpec):
    """The ModelService that the operator creates when the model is trained, and deletes with the job."""

    name: OptionalServiceName = ""
    """Name of the ModelService, which is also the model id in the API. Empty: the name of the job."""

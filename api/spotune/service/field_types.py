"""Types of a ModelService's fields that are text of a certain form.

The models check the form, and the API server checks it by a CEL rule.
"""

import re
from dataclasses import dataclass
from typing import Annotated, Any, Final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from spotune.custom_resource.metadata import MAX_NAME_LENGTH


@dataclass(frozen=True)
class Form:
    """Annotation of a text field that has to match a regular expression as a whole.

    Attributes:
        pattern: Regular expression that Python and RE2 (of CEL) read alike.
        expected: Description of the allowed text.
        max_characters: Maximum number of characters. Kubernetes estimates the cost of a CEL rule from it.
    """

    pattern: str
    expected: str
    max_characters: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Check the text after its type."""
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """JSON schema for the CRD: a string with a CEL rule, whose message is more readable than that of a pattern."""
        rule = {"rule": f"self.matches(r'^({self.pattern})$')", "message": f"expected {self.expected}"}
        return {"type": "string", "maxLength": self.max_characters, "x-kubernetes-validations": [rule]}

    def _check(self, text: str) -> str:
        if len(text) > self.max_characters or not re.fullmatch(self.pattern, text):
            raise PydanticCustomError("expected", "expected {expected}", {"expected": self.expected})
        return text


METRIC_NAME: Final = r"[A-Za-z0-9_][A-Za-z0-9_./@-]{0,99}"
"""Pattern of a metric's name in the scores of a job. lm-evaluation-harness has names such as gsm8k/acc_norm,
20_newsgroups/acc and humaneval/pass@1."""

_ID = r"[A-Za-z0-9]([A-Za-z0-9._:/-]*[A-Za-z0-9])?"
_ID_EXPECTED = "letters and digits, with . _ - : / between them, at most 128 characters"
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_REPOSITORY = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_KEY = r"[A-Za-z0-9._=+@,:-]+(/[A-Za-z0-9._=+@,:-]+)*/?"
_COMPONENT = r"([^./]|[.][^./]|[.]{2}[^/])[^/]*|[.]?"
"""A part of a path, except `..`."""

ModelId = Annotated[str, Form(_ID, _ID_EXPECTED, 128)]
"""Id of a model in the API, as in the field ``model`` of a request."""
OptionalModelId = Annotated[str, Form(f"({_ID})?", _ID_EXPECTED, 128)]
"""A ``ModelId`` or an empty string."""
ModelSource = Annotated[
    str,
    Form(
        f"(hf://{_REPOSITORY}(/{_REPOSITORY})?|s3://{_BUCKET}/{_KEY})?",
        "hf://owner/name or s3://bucket/prefix (for a folder use claim, for a trained job finetuneJob)",
        256,
    ),
]
"""A model on the Hugging Face Hub or in a bucket, or an empty string."""
ClaimPath = Annotated[
    str, Form(rf"({_COMPONENT})(/({_COMPONENT}))*", "a path on the volume, without .., at most 1024 characters", 1024)
]
"""Path of a folder on a volume, relative to its root."""
ClaimName = Annotated[
    str, Form(rf"{_LABEL}([.]{_LABEL})*", "the name of a PersistentVolumeClaim: a-z, 0-9, - and .", 253)
]
"""Name of a PersistentVolumeClaim."""
OptionalServiceName = Annotated[
    str, Form(f"({_LABEL})?", "the name of a ModelService: a-z, 0-9 and -, at most 40 characters", MAX_NAME_LENGTH)
]
"""Name of a ModelService, or an empty string."""
HostName = Annotated[
    str,
    Form(rf"{_LABEL}([.]{_LABEL})*", "a DNS name such as models.example.com, without https:// and without a path", 253),
]
"""DNS name of an endpoint."""
GatewayName = Annotated[str, Form(rf"{_LABEL}([.]{_LABEL})*", "the name of a Gateway: a-z, 0-9, - and .", 253)]
"""Name of a Gateway of the Gateway API."""
OptionalNamespace = Annotated[str, Form(f"({_LABEL})?", "the name of a namespace: a-z, 0-9 and -", 63)]
"""Name of a namespace, or an empty string."""
OptionalListener = Annotated[
    str, Form(rf"({_LABEL}([.]{_LABEL})*)?", "the name of a listener of the Gateway: a-z, 0-9, - and .", 253)
]
"""Name of a listener of a Gateway, or an empty string."""
OptionalMetric = Annotated[str, Form(f"({METRIC_NAME})?", "the name of a metric such as loss or exactMatch", 100)]
"""Name of a metric of an evaluation, or an empty string."""
OptionalAddress = Annotated[
    str,
    Form(
        r"([A-Za-z0-9._:\[\]-]+:[0-9]{1,5})?", "host:port such as redis.team.svc:6379, without redis:// before it", 300
    ),
]
"""Host and port of a server, or an empty string."""

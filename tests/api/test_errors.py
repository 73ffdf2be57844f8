import json

import pytest

from spotune.errors import InfrastructureError, JobError, Problem


@pytest.mark.parametrize(
    "error",
    [JobError("no column \ud800"), JobError(problems=[Problem("\udfff", "spec")]), InfrastructureError("\ud800")],
)
def test_messages_with_half_a_surrogate_pair_can_be_printed(error: JobError | InfrastructureError) -> None:
    assert r"\ud" in str(error)
    assert str(error).encode()
    assert json.loads(json.dumps(error.as_json()))["message"] == str(error)

"""Features that do not exist yet are refused by name, and what concerns pods alone is not."""

from typing import Any

import pytest

from spotune.errors import JobError
from spotune.unbuilt import refuse_unbuilt
from tests.api.job_files import a_job


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"execution": {"compile": True}},
            "spec.execution.compile: compiled layers are not built yet: use auto or false",
        ),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
def test_a_feature_that_does_not_exist_yet_is_refused(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(JobError) as refused:
        refuse_unbuilt(a_job(**sections))
    assert str(refused.value) == line


def test_what_concerns_pods_alone_is_no_matter_on_one_machine() -> None:
    refuse_unbuilt(
        a_job(
            workers={"resources": {"limits": {"cpu": 8}}, "podTemplate": {"spec": {}}, "serviceAccountName": "reader"},
            head={"capacity": "spot"},
            storage={"existingClaim": "claim"},
            cluster={"queueName": "gpus", "image": "trainer:1"},
            execution={"compile": False, "gradientCheckpointing": True, "zeroStage": 3},
        )
    )

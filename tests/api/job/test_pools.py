"""A zone and the selector for its label are the same nodes: only the models see that, not the API server."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from spotune.job import WorkersSpec

ZONE = {"topology.kubernetes.io/zone": "z"}


def test_zone_and_selector_of_the_same_zone_overlap() -> None:
    one, other = {"name": "a", "zone": "z"}, {"name": "b", "nodeSelector": ZONE}
    with pytest.raises(ValidationError, match="b overlaps a: both have the same nodes"):
        WorkersSpec.model_validate({"count": 4, "pools": [one, other]})
    assert len(WorkersSpec.model_validate({"count": 4, "pools": [one, other | {"capacity": "on-demand"}]}).pools) == 2

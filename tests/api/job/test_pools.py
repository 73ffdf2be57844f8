"""What only the models see of pools, and not the API server: equal places written in two ways, and names of labels."""

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


def test_names_of_labels_are_checked() -> None:
    def pool(key: str) -> WorkersSpec:
        return WorkersSpec.model_validate({"pools": [{"name": "a", "nodeSelector": {key: "x"}}]})

    for key in ("team", "example.com/team", "node.kubernetes.io/instance-type"):
        assert pool(key).pools[0].labels == {key: "x"}
    for key in ("", "a b", "/team", "a/b/c", "example.com/", "UPPER.com/team", "x" * 64):
        with pytest.raises(ValidationError, match="is not a valid name of a label: use letters, digits"):
            pool(key)

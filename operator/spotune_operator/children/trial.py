"""The FinetuneJob of a trial of a sweep."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from spotune.custom_resource import API_VERSION
from spotune.job import KIND
from spotune.sweep import SWEEP_KIND, FinetuneSweep
from spotune_operator.children.owner import Owner

SWEEP_LABEL: Final = "spotune.dev/sweep"
"""Label of all trials; the value is the name of the sweep."""
TRIAL_LABEL: Final = "spotune.dev/trial"
"""Label with the number of a trial."""
PRUNED_LABEL: Final = "spotune.dev/pruned"
"""Label of a pruned trial, with the value ``true``."""
PARAMETERS_ANNOTATION: Final = "spotune.dev/trial-parameters"
"""Annotation with the parameters of a trial as JSON, by field of the job's spec."""
SUSPENDED_ANNOTATION: Final = "spotune.dev/suspended-by-sweep"
"""Annotation of a trial that the sweep has suspended, and resumes."""


def trial_manifest(
    sweep: FinetuneSweep, uid: str, number: int, parameters: Mapping[str, Any], job: Mapping[str, Any]
) -> dict[str, Any]:
    """The FinetuneJob to create for a trial.

    Args:
        sweep: The sweep.
        uid: ``metadata.uid`` of the FinetuneSweep; empty outside a cluster: the job then has no owner.
        number: Number of the trial.
        parameters: Its parameters.
        job: The object of ``spotune.job_file.trials.trial_job``.
    """
    name, namespace = sweep.metadata.name, sweep.metadata.namespace
    owner = Owner(SWEEP_KIND, name, namespace, label=SWEEP_LABEL, child_name=sweep.trial_name(number), uid=uid)
    manifest = owner.child(API_VERSION, KIND, "trial")
    manifest["metadata"]["labels"] |= {TRIAL_LABEL: str(number)}
    manifest["metadata"]["annotations"] = {PARAMETERS_ANNOTATION: json.dumps(dict(parameters), sort_keys=True)}
    return manifest | {"spec": job["spec"]}

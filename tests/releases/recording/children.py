"""What the operator of a release makes of jobs and services. `tests.releases.record` runs this file with its code.

python tests/releases/recording/children.py BODIES OUTPUT

BODIES is a JSON list of objects as that release's API server stores them, with defaults. OUTPUT gets for each its
status while it runs, with the pin, and the children that the operator applies then.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from spotune.job_file.load import parse_job, parse_service
from spotune.job_file.yaml_file import Document
from spotune_operator.reconcile.pinned import template_hashes
from spotune_operator.serving.state import TrainedModel
from spotune_operator.settings import Settings
from tests.operator.serving import scenario as services
from tests.operator.support import scenarios as jobs

SETTINGS = Settings(
    image="spotune/trainer:old",
    ray_version="2.0.0",
    serve_image="spotune/serve:old",
    serve_vllm_image="spotune/serve-vllm:old",
    serving=True,
    monitoring_namespace="monitoring",
)


def running_job(body: dict[str, Any]) -> tuple[Any, Any]:
    """The last decision about a job that trains on all workers, and its status."""
    scenario = jobs.Scenario(parse_job(Document(content=body)), settings=SETTINGS)
    scenario.observe(storage_classes=None)
    scenario.decide()
    scenario.has_children()
    scenario.has_pods(workers=0)
    scenario.supervisor_reports(phase="WaitingForWorkers")
    scenario.decide()
    observe_running_job(scenario)
    return scenario.decide(), scenario.status


def observe_running_job(scenario: jobs.Scenario) -> None:
    """All workers of a job run, in its first group, and train."""
    scenario.observe(storage_classes=None)
    scenario.has_children()
    scenario.has_pods()
    assert scenario.status.pinned is not None
    hashes = template_hashes(scenario.status.pinned)
    group = next(name for name in hashes if name != "head")
    (head,) = scenario.observed.pods
    worker = replace(head, component="workers", group=group, template=hashes[group], gpus=1, node="n2")
    names = [f"worker-{number}" for number in range(scenario.job.spec.workers.count)]
    scenario.observe(pods=(head, *(replace(worker, name=name, uid=f"uid-{name}") for name in names)))
    progress: dict[str, Any] = {"step": 10, "highestStep": 10, "totalSteps": 100, "loss": 1.5}
    scenario.supervisor_reports(**progress, lastCheckpoint={"step": 8, "time": jobs.NOW - 5})


def running_service(body: dict[str, Any]) -> tuple[Any, Any]:
    """The last decision about a service whose model is trained, and its status."""
    scenario = services.Scenario(parse_service(Document(content=body)), settings=SETTINGS)
    observe_running_service(scenario)
    scenario.decide()
    return scenario.decide(), scenario.status


def observe_running_service(scenario: services.Scenario) -> None:
    """The jobs that a service names have trained their models."""
    spec = scenario.service.spec
    trained = TrainedModel("pvc://spotune-x/team/x-0123abcd/export", 9, "Complete", False, {}, "causal")
    names = [spec.model.finetune_job, *(adapter.finetune_job for adapter in spec.adapters)]
    scenario.observe(jobs=dict.fromkeys((name for name in names if name), trained))


def main() -> None:
    recorded = []
    for body in json.loads(Path(sys.argv[1]).read_text()):
        decision, status = (running_job if body["kind"] == "FinetuneJob" else running_service)(body)
        dumped = status.model_dump(mode="json", by_alias=True)
        recorded.append({"body": body, "status": dumped, "children": list(decision.apply)})
    Path(sys.argv[2]).write_text(json.dumps(recorded))


if __name__ == "__main__":
    main()

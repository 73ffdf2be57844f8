"""A ModelService with repeated decisions, while tests change its observed state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from spotune.custom_resource import Condition
from spotune.service import ModelService, ModelServiceStatus
from spotune_operator.children.serving.ray_service import CLUSTER_ANNOTATION, SPEC_ANNOTATION
from spotune_operator.children.serving.serve_config import APPLICATION
from spotune_operator.kube.conditions import find
from spotune_operator.serving.decide import ServiceDecision, decide_service
from spotune_operator.serving.gateway_stats import GatewayStats, Traffic, VersionCounters, VersionStats
from spotune_operator.serving.state import (
    ApplicationState,
    ObservedService,
    RayServiceState,
    ServiceChild,
    ServicePod,
    TrainedModel,
)
from spotune_operator.settings import Settings

NOW = 1_800_000_000.0
SETTINGS = Settings(serve_image="spotune/serve:1", serve_vllm_image="spotune/serve-vllm:1")
ACTIVE = "spotunems-answers-aaaaa"
PENDING = "spotunems-answers-bbbbb"
OUTPUT = "pvc://spotune-sql/team/sql-0123abcd/export"


def a_service(**spec: Any) -> ModelService:
    """A service of the FinetuneJob `sql` on processors, with parts of its spec replaced."""
    given = {"model": {"finetuneJob": "sql"}, "gpus": 0, "cluster": {"provider": "none"}} | spec
    body = {"metadata": {"name": "answers", "namespace": "team"}, "spec": given}
    return ModelService.model_validate(body, by_alias=True, by_name=False)


@dataclass
class Scenario:
    """A service and its observed state."""

    service: ModelService = field(default_factory=a_service)
    generation: int = 1
    status: ModelServiceStatus = field(default_factory=ModelServiceStatus)
    observed: ObservedService = field(default_factory=ObservedService)
    settings: Settings = SETTINGS
    now: float = NOW

    def decide(self) -> ServiceDecision:
        """Decide; the new status is the input of the next decision."""
        decision = decide_service(
            self.service,
            uid="uid-1",
            generation=self.generation,
            previous=self.status,
            observed=self.observed,
            now=self.now,
            settings=self.settings,
        )
        self.status = decision.status
        return decision

    def observe(self, **changes: Any) -> None:
        """Replace parts of the observed state."""
        self.observed = replace(self.observed, **changes)

    def edit(self, **spec: Any) -> None:
        """Change the spec, as a user would."""
        self.service = a_service(**spec)
        self.generation += 1

    def job(
        self,
        output: str = "",
        step: int = 0,
        phase: str = "Training",
        *,
        has_failed: bool = False,
        scores: Mapping[str, float] | None = None,
        task: str = "seq2seq",
    ) -> None:
        """Set the state of the FinetuneJob `sql`."""
        self.observe(jobs={"sql": TrainedModel(output, step, phase, has_failed, scores or {}, task)})

    def applications(self) -> dict[str, Any]:
        """The applications of Ray Serve that the next decision asks for, by name."""
        applied = [manifest for manifest in self.decide().apply if manifest["kind"] == "RayService"]
        content = yaml.safe_load(applied[0]["spec"]["serveConfigV2"]) if applied else {"applications": []}
        return {application["name"]: application for application in content["applications"]}

    def weights(self) -> dict[str, int]:
        """Percent of the requests by the version's name, as the next decision gives it to the gateway."""
        (gateway,) = self.applications()[APPLICATION]["deployments"]
        return {version["version"]: version["weight"] for version in gateway["user_config"]["versions"]}

    def ray_service(
        self,
        application: str = "RUNNING",
        message: str = "",
        active: str = ACTIVE,
        failed: Mapping[str, ApplicationState] | None = None,
        **state: Any,
    ) -> None:
        """Add a RayService in this state, with the spec that was applied last; `failed` are states of applications."""
        applied = [manifest for manifest in self.decide().apply if manifest["kind"] == "RayService"]
        annotations = applied[0]["metadata"]["annotations"] if applied else {}
        child = ServiceChild(
            *("RayService", "team", "spotunems-answers", "uid-r", "answers", "1"),
            spec_digest=annotations.get(SPEC_ANNOTATION, ""),
            cluster_digest=annotations.get(CLUSTER_ANNOTATION, ""),
        )
        found = ApplicationState(application, message, is_complete=application == "RUNNING")
        applications = dict.fromkeys(self.applications(), found) | dict(failed or {})
        ray = RayServiceState(applications, is_current=True, active_cluster=active, **state)
        self.observe(children={("RayService", child.name): replace(child, ray=ray)})

    def pods(self, cluster: str = ACTIVE, loading: int = 0, **ready: int) -> None:
        """Set ready pods of a cluster by component; the gateways of the active one report the replicas.

        Args:
            cluster: The cluster.
            loading: Number of replicas that load the model.
            ready: Number of ready pods.
        """
        others = [pod for pod in self.observed.pods if pod.cluster != cluster]
        self.observe(
            pods=[
                *others,
                *(
                    ServicePod(f"{cluster}-{component}-{number}", "team", "answers", component, cluster, ready=True)
                    for component, count in ready.items()
                    for number in range(count)
                ),
            ]
        )
        if cluster == self.observed.ray.active_cluster:
            running = ready.get("replicas", 0) - loading
            self.observe(traffic=replace(self.observed.traffic, running_replicas=running))

    def traffic(self, seconds: float = 5.0, **versions: VersionStats) -> None:
        """Let the gateway report these versions after a time; others have the weight that was decided, and no request.

        Args:
            seconds: Seconds since the last decision.
            versions: By the end of the version's name: its newest counters, as those since its weight changed.
        """
        weights = self.weights()
        self.now += seconds
        given = {f"sql-0123abcd-{name.replace('_', '-')}": stats for name, stats in versions.items()}
        reported = {name: VersionStats(weight, "", 0, VersionCounters()) for name, weight in weights.items()}
        reported |= given
        since = {name: stats.counters for name, stats in reported.items()}
        self.observe(
            traffic=Traffic(
                [GatewayStats("a", reported)],
                self.now,
                error="",
                since_change=since,
                running_replicas=self.observed.traffic.running_replicas,
            )
        )

    def serves(self, **scores: float) -> None:
        """Train the model, and let everything run."""
        self.job(OUTPUT, 120, "Complete", scores=scores)
        self.ray_service()
        self.pods(head=1, gateway=1, replicas=1)
        self.decide()

    def condition(self, name: str) -> Condition:
        """A condition of the current status."""
        found = find(self.status.conditions, name)
        assert found is not None, f"{name} of {[each.type for each in self.status.conditions]}"
        return found


def kinds(decision: ServiceDecision) -> list[str]:
    """Kinds of the applied children."""
    return [manifest["kind"] for manifest in decision.apply]

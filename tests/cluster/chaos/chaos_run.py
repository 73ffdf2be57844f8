"""One run: training jobs and a service, the faults of a schedule, the end of the jobs, and the judgement.

Each job trains a tiny model on one to three CPU workers with `execution.reproducible: worldSize`, so an undisturbed run
of two local processes has the same bits, whatever the faults did to the number of workers. A step has a pace while
faults are injected, so that no job ends before them; afterwards the steps that are left are made at full speed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune_testcluster.errors import ClusterError
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_trainer.data.shards import ShardedDataset
from spotune_trainer.job_directory.layout import JobDirectory
from tests.cluster import paced
from tests.cluster.chaos.checker import ChaosEvidence, findings
from tests.cluster.chaos.injector import Injector
from tests.cluster.chaos.job_volume import JobVolume
from tests.cluster.chaos.records import ChaosRecord, JobResult, ServiceResult
from tests.cluster.chaos.schedule import ChaosSchedule
from tests.cluster.chaos.serving.checker import ServiceEvidence, service_findings
from tests.cluster.chaos.serving.service import ServiceUnderChaos
from tests.cluster.chaos.serving.stream_client import Answer
from tests.cluster.chaos.serving.streams import SteadyStreams
from tests.cluster.chaos.target import Target
from tests.cluster.faults.timeline import TrainingInterval, training_intervals
from tests.cluster.finetune_jobs import CLAIM, GLOBAL_BATCH_SIZE, INPUTS, PACED, WORKERS, RunArtifacts, Workplace
from tests.cluster.finetune_jobs import RunningJob as Job
from tests.cluster.operator_install import Operator
from tests.proof.history import read_generations, steps_lost, surviving
from tests.provenance import commit, machine
from tests.trainer.support.runs import Layout, epoch_hash, train_generation

logger = logging.getLogger("spotune.chaos")

STEPS = 500
"""Of each job: more than it can make at its pace until the faults are over."""
STEP_SECONDS = 0.8
_SECONDS_TO_START = 400.0
_SECONDS_TO_RECOVER = 900.0
_SECONDS_TO_END = 600.0
_SECONDS_OF_REFERENCE = 3600.0
_MOST_FINDINGS = 20
_FAILURES = (ClusterError, AssertionError, subprocess.SubprocessError)


@dataclass
class ChaosBench:
    """What runs need.

    Attributes:
        cluster: the cluster on this machine.
        operator: the operator in it.
        workplace: a namespace with the inputs of the jobs on a volume.
        service: the service, which all runs share.
        folder: where artifacts are kept, a folder for each seed.
    """

    cluster: ClusterUnderTest
    operator: Operator
    workplace: Workplace
    service: ServiceUnderChaos
    folder: Path

    def run(self, schedule: ChaosSchedule) -> ChaosRecord:
        """Run jobs and the service under the faults of a schedule, and judge them."""
        run = _Run(schedule)
        with run.phase("start"):
            self.operator.wait_until_ready()
            self.service.wait_until_recovered()
            self._volume("").slow_down(PACED)
        try:
            with ExitStack() as stack:
                run.record = self._judged(run, stack)
        except ClusterError as error:
            if run.record is None:
                raise
            run.problems.append(f"a job was not deleted: {error}")
        return replace(run.record, problems=[*run.record.problems, *run.problems])

    def _judged(self, run: _Run, stack: ExitStack) -> ChaosRecord:
        """The result of the schedule, while its jobs and clients are still there; without the run's own problems."""
        schedule, began = run.schedule, time.time()
        jobs = [stack.enter_context(self.workplace.running(each)) for each in self._manifests(schedule)]
        clients = stack.enter_context(self.service.clients.steady(f"streams-{schedule.seed}"))
        targets = [self._target(job) for job in jobs]
        injector = Injector(targets)
        self._disturb(run, jobs, clients, injector)
        with run.phase("judgement"):
            results = [self._judge(run, target, injector) for target in targets]
            service = self._judge_service(run, injector, clients, began)
        return ChaosRecord(
            seed=schedule.seed,
            num_faults=len(schedule.faults),
            faults=injector.injected,
            jobs=results,
            service=service,
            problems=injector.findings,
            phases=run.phases,
            commit=commit(),
            machine=machine(),
        )

    def _disturb(self, run: _Run, jobs: Sequence[Job], clients: SteadyStreams, injector: Injector) -> None:
        """Everything until the jobs are complete and the last requests are answered."""
        with run.noting_problems():
            with run.phase("first commits"):
                for job in jobs:
                    _wait_for_commit(job)
            with run.phase("faults"):
                injector.play(run.schedule)
            run.over = time.time()
            with run.phase("recovery"):
                for job in jobs:
                    run.recovered[job.name] = _wait_for_recovery(job, run.over)
                run.service_recovered = self.service.wait_until_recovered()
            with run.phase("last steps"):
                self._volume("").speed_up(PACED)
                for job in jobs:
                    job.wait_until_complete(_SECONDS_TO_END)
        with run.phase("last requests"), run.noting_problems():
            clients.end()

    # -- jobs --------------------------------------------------------------------------------------------------------

    def _judge(self, run: _Run, target: Target, injector: Injector) -> JobResult:
        """Compare the files and statuses of a job with those of the undisturbed run."""
        job = target.job
        artifacts = RunArtifacts(target.volume.copy_to(run.folder(self.folder) / job.name))
        self._keep(artifacts.directory.root, job, injector)
        generations = read_generations(artifacts.directory)
        intervals = all_intervals(artifacts)
        evidence = ChaosEvidence(
            problem="",
            planned_steps=STEPS,
            steps_per_epoch=-(-self._num_samples() // GLOBAL_BATCH_SIZE),
            epoch_hash=epoch_hash(self.workplace.inputs / "shards", self.folder / "cache"),
            generations=generations,
            reference=self._undisturbed.steps(),
            sha256=_sha256(artifacts.directory),
            reference_sha256=_sha256(self._undisturbed.directory),
            statuses=job.history.seen,
            intervals=intervals,
            operator_downtime=injector.operator_downtime,
        )
        recovered = run.recovered.get(job.name, 0.0)
        return JobResult(
            name=job.name,
            steps=len({int(record["step"]) for record in surviving(generations)}),
            generations=len(generations),
            world_sizes=[size for size, _ in groupby(int(each["worldSize"]) for each in surviving(generations))],
            steps_lost=steps_lost(generations),
            restarts={cause: count for cause, count in artifacts.ledger.restarts().items() if count},
            gap_seconds=round(longest_gap_seconds(intervals, run.over + recovered), 1),
            recovered_seconds=round(recovered, 1),
            statuses=len(evidence.statuses),
            findings=findings(evidence)[:_MOST_FINDINGS],
        )

    def _keep(self, folder: Path, job: Job, injector: Injector) -> None:
        """Keep what explains a finding beside the files of the job."""
        _write_statuses(folder / "statuses.jsonl", job.history.seen)
        (folder / "faults.json").write_text(json.dumps([asdict(fault) for fault in injector.injected], indent=1))
        (folder / "downtime.json").write_text(json.dumps(injector.operator_downtime))
        with suppress(ClusterError, subprocess.SubprocessError):
            (folder / "operator.log").write_text(self.operator.log())
            (folder / "pods.txt").write_text(job.kubectl("get", "pods,events", "--output=wide"))

    def _manifests(self, schedule: ChaosSchedule) -> list[dict[str, Any]]:
        return [self._manifest(f"chaos-{schedule.seed}-{number}") for number in range(1, schedule.num_jobs + 1)]

    def _manifest(self, name: str) -> dict[str, Any]:
        pace = paced.pod_template(PACED, STEP_SECONDS)
        return self.workplace.manifest(
            name,
            training={"maxSteps": STEPS},
            execution={"microBatchSize": 2, "zeroStage": 1, "reproducible": "worldSize"},
            checkpoint={"every": 10, "keep": 3},
            workers={"count": WORKERS, "min": 1, "resizeCooldown": "5s", "podTemplate": pace},
            retry={"hangTimeout": "90s"},
        )

    def _target(self, job: Job) -> Target:
        machine = self.cluster.machine_for("chaos")
        return Target(machine, self.operator, job, self._volume(job.directory), self.service)

    def _volume(self, directory: str) -> JobVolume:
        claim = self.workplace.kubectl.get("pvc", CLAIM)
        return JobVolume(self.cluster.machine_for("chaos"), claim["spec"]["volumeName"], directory)

    def _num_samples(self) -> int:
        with ShardedDataset(str(self.workplace.inputs / "shards"), self.folder / "cache") as dataset:
            return dataset.num_samples

    @cached_property
    def _undisturbed(self) -> RunArtifacts:
        """The same job on two local processes, without Ray and without a cluster; all jobs are compared with it."""
        logger.info("an undisturbed run of %d steps", STEPS)
        directory = JobDirectory(self.folder / f"undisturbed-{time.time_ns():x}")
        directory.root.mkdir(parents=True)
        text = json.dumps(self._manifest("undisturbed")).replace(INPUTS, str(self.workplace.inputs))
        job = FinetuneJob.model_validate_json(text)
        layout = Layout(WORKERS, int(job.spec.execution.zero_stage))
        micro_batch_size = int(job.spec.execution.micro_batch_size)
        train_generation(directory, job, layout, micro_batch_size=micro_batch_size, timeout=_SECONDS_OF_REFERENCE)
        return RunArtifacts(directory)

    # -- service -----------------------------------------------------------------------------------------------------

    def _judge_service(self, run: _Run, injector: Injector, clients: SteadyStreams, began: float) -> ServiceResult:
        """Compare the answers and statuses of the service with the undisturbed answers."""
        answers: list[Answer] = []
        with run.noting_problems():
            answers = clients.answers()
        evidence = ServiceEvidence(
            problem="",
            answers=answers,
            undisturbed=self.service.undisturbed,
            statuses=self.service.statuses(began),
            operator_downtime=injector.operator_downtime,
        )
        folder = run.folder(self.folder) / "service"
        folder.mkdir(parents=True)
        _write_statuses(folder / "statuses.jsonl", evidence.statuses)
        (folder / "answers.jsonl").write_text("".join(json.dumps(asdict(each)) + "\n" for each in answers))
        with suppress(ClusterError, subprocess.SubprocessError):
            self.service.save_logs(folder)
        return ServiceResult(
            requests=len(answers),
            failed=len(evidence.failed),
            other_text=len(evidence.other_text),
            refused=sum(answer.refused > 0 and not answer.error for answer in answers),
            gap_seconds=max((answer.gap for answer in answers), default=0.0),
            recovered_seconds=round(run.service_recovered, 1),
            statuses=len(evidence.statuses),
            findings=service_findings(evidence)[:_MOST_FINDINGS],
        )


@dataclass
class _Run:
    """What one run has come to so far.

    Attributes:
        schedule: its faults.
        problems: why it did not come to its end.
        phases: seconds of each part.
        over: when the last fault was undone.
        recovered: seconds until each job had recovered.
        service_recovered: seconds until the service had, after the jobs.
        record: the result, once everything is judged.
    """

    schedule: ChaosSchedule
    problems: list[str] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    over: float = field(default_factory=time.time)
    recovered: dict[str, float] = field(default_factory=dict)
    service_recovered: float = 0.0
    record: ChaosRecord | None = None

    def folder(self, work: Path) -> Path:
        """Of its artifacts."""
        return work / f"seed-{self.schedule.seed}"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a part of the run."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = round(time.monotonic() - start, 1)
            logger.info("%s: %.0f s", name, self.phases[name])

    @contextmanager
    def noting_problems(self) -> Iterator[None]:
        """Note a failure of the block, so that what is there is still judged."""
        try:
            yield
        except _FAILURES as error:
            text = "; ".join([str(error).strip()[:500], *getattr(error, "__notes__", [])])[:1500]
            self.problems.append(text)
            logger.info("%s", text)


def _write_statuses(path: Path, statuses: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps({"time": each.time, "job": each.job}) + "\n" for each in statuses))


def _wait_for_commit(job: Job) -> None:
    """Wait until the status shows a commit of the job, and that it trains."""
    job.history.wait_for(
        "training and a commit",
        _SECONDS_TO_START,
        lambda seen: seen.holds("Ready") and bool(seen.status.get("lastCheckpoint")),
    )


def _wait_for_recovery(job: Job, since: float) -> float:
    """Wait until the status is Ready and shows a step that was never made before; returns the seconds that it took."""
    reached = max((int(seen.status.get("highestStep", 0)) for seen in job.history.seen if seen.time < since), default=0)
    found = job.history.wait_for(
        "training after all faults",
        _SECONDS_TO_RECOVER,
        lambda seen: seen.holds("Ready") and int(seen.status.get("highestStep", 0)) > reached,
        since,
    )
    return found.time - since


def all_intervals(artifacts: RunArtifacts) -> list[TrainingInterval]:
    """The times in which worker groups made steps, also of those that were lost before they wrote when.

    Of these, only their start and the next event in the ledger are known, so they count as making steps between.
    """
    known = {interval.generation: interval for interval in training_intervals(artifacts)}
    events = artifacts.ledger.records()
    for generation in read_generations(artifacts.directory):
        if generation.number in known or not generation.steps:
            continue
        begin = generation.claimed
        ends = [float(event["time"]) for event in events if event["time"] > begin + 1.0]
        last = int(generation.steps[-1]["step"])
        known[generation.number] = TrainingInterval(generation.number, begin, {last: min(ends, default=begin)}, {})
    return sorted(known.values(), key=lambda interval: interval.generation)


def longest_gap_seconds(intervals: Iterable[TrainingInterval], until: float) -> float:
    """Longest time in seconds between two steps that follow each other, before a time."""
    times = sorted(time for interval in intervals for time in interval.steps.values() if time <= until)
    return max((after - before for before, after in pairwise(times)), default=0.0)


def _sha256(directory: JobDirectory) -> str | None:
    weights = directory.export / "model.safetensors"
    return hashlib.sha256(weights.read_bytes()).hexdigest() if weights.exists() else None

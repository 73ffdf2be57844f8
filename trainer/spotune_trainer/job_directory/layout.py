"""Names of everything in a job's folder: the one place that knows where a file lies.

```
job.json plan.json status.json result.json ledger.jsonl notice.json preflight.json supervisor.json
generations/0000007/restored.json
checkpoints/step-00000120.gen-7/{manifest.json, rank-00000.safetensors, rank-00000.ok}
logs/gen-7/{steps.jsonl, events.jsonl, progress.json, worker-0.log, stacks-rank-00000.txt}
logs/driver-3.log logs/tensorboard/
export/
compiled/
profile/{flops.txt, flops.json}
```
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class JobDirectory:
    """Paths within the folder `root` of one job."""

    root: Path

    @property
    def job(self) -> Path:
        """The job as it was last started, with resolved paths."""
        return self.root / "job.json"

    @property
    def plan(self) -> Path:
        """What every `auto` and every moving name was resolved to."""
        return self.root / "plan.json"

    @property
    def status(self) -> Path:
        """Where the run stands now; written by the driver."""
        return self.root / "status.json"

    @property
    def ledger(self) -> Path:
        """What happened, a JSON line an event; appended by the driver and the supervisor."""
        return self.root / "ledger.jsonl"

    @property
    def result(self) -> Path:
        """The figures of a finished run."""
        return self.root / "result.json"

    @property
    def notice(self) -> Path:
        """A spot notice or a request to stop, written by the supervisor."""
        return self.root / "notice.json"

    @property
    def preflight(self) -> Path:
        """What was looked at before the first attempt, once all of it was well."""
        return self.root / "preflight.json"

    @property
    def supervisor(self) -> Path:
        """Process, port and Ray of the living supervisor."""
        return self.root / "supervisor.json"

    @property
    def generations(self) -> Path:
        """One folder for each start of a worker group."""
        return self.root / "generations"

    @property
    def checkpoints(self) -> Path:
        """One folder for each commit."""
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        """Logs of drivers, generations and trackers."""
        return self.root / "logs"

    def driver_log(self, attempt: int) -> Path:
        """What the driver of an attempt said."""
        return self.logs / f"driver-{attempt}.log"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files, of all generations."""
        return self.logs / "tensorboard"

    @property
    def export(self) -> Path:
        """The finished model."""
        return self.root / "export"

    @property
    def data(self) -> Path:
        """Shards made from raw data by `dataset.prepare`."""
        return self.root / "data"

    @property
    def compiled(self) -> Path:
        """What torch.compile has made of the layers, by device."""
        return self.root / "compiled"

    @property
    def profile(self) -> Path:
        """What DeepSpeed's flops profiler found in one step."""
        return self.root / "profile"

    @property
    def flops_profile(self) -> Path:
        """The figures of the profile; there once all of it is."""
        return self.profile / "flops.json"

    def generation_logs(self, generation: int) -> GenerationLogs:
        """Paths of what the workers of `generation` write."""
        return GenerationLogs(self.logs / f"gen-{generation}")


@dataclass(frozen=True)
class GenerationLogs:
    """What the workers of one generation write, and what the driver tells them."""

    root: Path

    @property
    def steps(self) -> Path:
        """A JSON line for each step."""
        return self.root / "steps.jsonl"

    @property
    def events(self) -> Path:
        """A JSON line for each restore, commit, evaluation and export."""
        return self.root / "events.jsonl"

    @property
    def progress(self) -> Path:
        """Heartbeat, phase and last step."""
        return self.root / "progress.json"

    @property
    def notice(self) -> Path:
        """Why and until when this generation is to leave, written by the driver."""
        return self.root / "notice.json"

    def worker(self, rank: int) -> Path:
        """What `rank` said, and the traceback that it ended with."""
        return self.root / f"worker-{rank}.log"

    def stacks(self, rank: int) -> Path:
        """Stacks of all threads of `rank` when it hung; empty while it has not."""
        return self.root / f"stacks-rank-{rank:05d}.txt"

    def failure(self, rank: int) -> Path:
        """Why `rank` failed, with its traceback."""
        return self.root / f"failure-rank-{rank:05d}.json"

"""Paths of all files in a job's folder; no other module spells them.

```
job.json plan.json status.json result.json ledger.jsonl notice.json preflight.json supervisor.json bucket.json
generations/0000007/restored.json
checkpoints/step-00000120.gen-7/{manifest.json, rank-00000.safetensors, rank-00000.ok}
logs/gen-7/{steps.jsonl, events.jsonl, progress.json, worker-0.log, stacks-rank-00000.txt}
logs/driver-3.log logs/tensorboard/
export/ previous-export-step-900/ export-ema/
data/train/manifest.json
code/{source.json, 3f2a91c0.tar}
compiled/
profile/{flops.txt, flops.json}
```
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOG_SUFFIXES: Final = (".jsonl", ".log")
"""Names of files that only grow end with one of these."""


@dataclass(frozen=True)
class JobDirectory:
    """Paths within the folder `root` of one job."""

    root: Path

    @property
    def job(self) -> Path:
        """The job as it was last started, with absolute paths."""
        return self.root / "job.json"

    @property
    def plan(self) -> Path:
        """The values to which each `auto` and each branch or tag was resolved."""
        return self.root / "plan.json"

    @property
    def status(self) -> Path:
        """Progress and phase of the run; written by the driver."""
        return self.root / "status.json"

    @property
    def ledger(self) -> Path:
        """Events, one JSON line each; appended by the driver and the supervisor."""
        return self.root / "ledger.jsonl"

    @property
    def result(self) -> Path:
        """Metrics of a finished run."""
        return self.root / "result.json"

    @property
    def notice(self) -> Path:
        """A spot notice or a request to stop, written by the supervisor."""
        return self.root / "notice.json"

    @property
    def preflight(self) -> Path:
        """Results of the preflight, written once all checks have passed."""
        return self.root / "preflight.json"

    @property
    def supervisor(self) -> Path:
        """Process, URL and Ray head of the running supervisor."""
        return self.root / "supervisor.json"

    @property
    def bucket(self) -> Path:
        """Which bucket keeps the state of the job; only of a run whose storage is a bucket."""
        return self.root / "bucket.json"

    @property
    def generations(self) -> Path:
        """One folder for each start of a worker group."""
        return self.root / "generations"

    def generation_numbers(self) -> list[int]:
        """Numbers of all generations that have been claimed, in ascending order."""
        if not self.generations.is_dir():
            return []
        return sorted(int(path.name) for path in self.generations.iterdir() if path.name.isdigit())

    @property
    def checkpoints(self) -> Path:
        """One folder for each commit."""
        return self.root / "checkpoints"

    @property
    def logs(self) -> Path:
        """Logs of drivers, generations and trackers."""
        return self.root / "logs"

    def driver_log(self, attempt: int) -> Path:
        """Log of an attempt's driver."""
        return self.logs / f"driver-{attempt}.log"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files, of all generations."""
        return self.logs / "tensorboard"

    @property
    def export(self) -> Path:
        """The finished model. `previous_export` of spotune has the name of the one before it."""
        return self.root / "export"

    @property
    def export_ema(self) -> Path:
        """The moving average of the finished model's weights, with `training.emaDecay`."""
        return self.root / "export-ema"

    @property
    def harness(self) -> Path:
        """Results of lm-evaluation-harness for the finished model, as the harness has them."""
        return self.root / "harness.json"

    @property
    def data(self) -> Path:
        """Shards made from raw data by `dataset.prepare`."""
        return self.root / "data"

    def prepared(self, source: str = "") -> Path:
        """Training shards made from raw data; of the source of this name in a mixture."""
        return self.data / "train" / source

    @property
    def data_manifest(self) -> Path:
        """What `dataset.prepare` read, wrote and cut."""
        return self.data / "train" / "manifest.json"

    @property
    def code_source(self) -> Path:
        """From where the code of the user was read last, with its version."""
        return self.root / "code" / "source.json"

    def code(self, version: str) -> Path:
        """The code of the user of one version, as a tar file."""
        return self.root / "code" / f"{version}.tar"

    @property
    def compiled(self) -> Path:
        """Compiled layers of torch.compile, by device."""
        return self.root / "compiled"

    @property
    def reference(self) -> Path:
        """Log-probabilities of the reference model of preference objectives, by model and dataset."""
        return self.root / "reference"

    @property
    def profile(self) -> Path:
        """Results of DeepSpeed's flops profiler for one step."""
        return self.root / "profile"

    @property
    def flops_profile(self) -> Path:
        """Totals of the flops profile; written last, so the profile is complete if this exists."""
        return self.profile / "flops.json"

    @property
    def command_checkpoints(self) -> Path:
        """Where the command of a job may keep checkpoints of its own, over all generations."""
        return self.root / "command" / "checkpoints"

    def command_output(self, generation: int) -> Path:
        """Where the command of a job writes its model in one generation."""
        return self.root / "command" / f"output-gen-{generation}"

    def generation_logs(self, generation: int) -> GenerationLogs:
        """Paths of the files of one generation's workers."""
        return GenerationLogs(self.logs / f"gen-{generation}")


@dataclass(frozen=True)
class GenerationLogs:
    """Files that the workers of one generation write, and the notices that driver and agents write for them."""

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
        """Reason and deadline for this generation to leave; written by the driver."""
        return self.root / "notice.json"

    @property
    def agent_notice(self) -> Path:
        """Reason for this generation to leave; written by the agent of a node while there is no driver."""
        return self.root / "agent-notice.json"

    def worker(self, rank: int) -> Path:
        """Log of `rank`, with the traceback if it failed."""
        return self.root / f"worker-{rank}.log"

    def stacks(self, rank: int) -> Path:
        """Stacks of all threads of `rank` at the time of a hang; empty without a hang."""
        return self.root / f"stacks-rank-{rank:05d}.txt"

    def command_task(self, node: int) -> Path:
        """The task of a generation, for the processes that a node's command starts."""
        return self.root / f"command-node-{node}-task.json"

    def command_result(self, node: int) -> Path:
        """How the command of a node ended that did not fail."""
        return self.root / f"command-node-{node}.json"

    def command_process(self, node: int) -> Path:
        """State of the first process of a node's command; it exists once that uses `spotune_train`."""
        return self.root / f"command-node-{node}-process.json"

    def failure(self, rank: int) -> Path:
        """Why `rank` failed, with its traceback."""
        return self.root / f"failure-rank-{rank:05d}.json"

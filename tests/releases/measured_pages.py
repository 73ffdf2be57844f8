"""The pages and records that are made by running the code, with the parts of the code that they measure.

A page is made again by people: it takes hours, a cluster or GPUs. `python -m tests.releases.check` lists those that
were made at another code than a release has. What `make manifests` writes is not here: tests compare it in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

API = ("api",)
TRAINING = (*API, "trainer", "constraints/trainer.txt")
SERVING = (*API, "serve", "constraints/serve.txt")
VLLM = (*API, "serve", "constraints/serve-vllm.txt")
OPERATOR = (*API, "client", "operator", "charts", "constraints/operator.txt")
JOBS = (*TRAINING, *OPERATOR)
SERVICES = (*SERVING, *OPERATOR)
EVERYTHING = (*JOBS, *SERVING)

HISTORY = (
    "benchmarks/results/*_before.json",
    "benchmarks/results/*_first.json",
    "benchmarks/results/*_after.json",
    "benchmarks/results/stage_3_*.json",
    "benchmarks/results/recovery_local_ray_train.json",
    "benchmarks/results/serving_speed.json",
    "benchmarks/results/hf_trainer*.json",
    "benchmarks/results/kernels_*.txt",
    "benchmarks/results/*.csv",
    "benchmarks/results/chaos_one_job.jsonl",
)
"""Records that stay as they are: of an older code or another program, to compare with."""


@dataclass(frozen=True)
class MeasuredPage:
    """A page, or the records of a benchmark.

    Attributes:
        name: Path of the page, or of the program that wrote the records.
        records: Patterns of the files that name the commits they were made at.
        measures: Folders and files of the code that is measured.
        command: Makes it again.
    """

    name: str
    records: tuple[str, ...]
    measures: tuple[str, ...]
    command: str

    def has_record(self, path: str) -> bool:
        """Whether a file is one of the records."""
        return _matches(path, self.records) and not _matches(path, HISTORY)


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def _page(name: str, measures: tuple[str, ...], command: str) -> MeasuredPage:
    return MeasuredPage(name, (name,), measures, command)


def _benchmark(program: str, records: str, measures: tuple[str, ...], command: str = "") -> MeasuredPage:
    """The records of a program in benchmarks/. Its docstring has the command, unless one is given."""
    patterns = tuple(f"benchmarks/{pattern}" for pattern in records.split())
    return MeasuredPage(f"benchmarks/{program}.py", patterns, measures, command or f"benchmarks/{program}.py")


PAGES = (
    _page("docs/proof.md", TRAINING, "make proof"),
    _page("docs/proof-recovery.md", TRAINING, "make proof-recovery"),
    _page("docs/faults.md", JOBS, "make faults AGAIN=1"),
    _page("docs/bucket-faults.md", JOBS, "make bucket-faults AGAIN=1"),
    _page("docs/serving-faults.md", SERVICES, "make serving-faults"),
    _page("docs/chaos.md", EVERYTHING, "make chaos"),
    MeasuredPage("docs/support.md", ("benchmarks/results/versions.jsonl",), EVERYTHING, "make versions"),
    _page("docs/fuzzing.md", EVERYTHING, "make fuzz AGAIN=1"),
    _page("docs/images/serve.png", ("serve/spotune_serve/gateway/routes",), "python -m docs.screenshot RUN"),
    _page("docs/images/report.png", ("trainer/spotune_trainer/observability/report",), "spotune report RUN"),
)

BENCHMARKS = (
    # On any machine.
    _benchmark("recovery_local", "results/recovery_local.json", TRAINING),
    _benchmark("recovery_processes", "results/recovery_processes.json results/recovery_processes_gpu_?.json", TRAINING),
    _benchmark("restore_from_memory", "results/restore_from_memory.json", TRAINING),
    _benchmark("many_workers", "results/many_workers.json", TRAINING),
    _benchmark("peer_copy", "results/peer_copy.json", TRAINING),
    _benchmark("function_cost", "results/function_cost.json", TRAINING),
    _benchmark("data_loading", "results/data_loading.json", TRAINING),
    _benchmark("preparation_speed", "results/preparation_speed.json", TRAINING),
    _benchmark("serving_load", "results/serving_load.json", SERVING),
    _benchmark("goodput_trace", "results/goodput_trace.json", TRAINING),
    _benchmark("trace_runs", "results/trace_runs.json", TRAINING),
    _benchmark("deadline", "results/deadline.json", API),
    _benchmark("text_to_sql_demo", "results/text_to_sql_demo.json", TRAINING),
    _benchmark("trl_preference", "results/trl_preference.json", TRAINING),
    _benchmark("sentence_transformers_embedding", "results/sentence_transformers_embedding.json", TRAINING),
    MeasuredPage(
        "benchmarks/cel_rules",
        ("benchmarks/results/cel_rules.json",),
        ("manifests/crd.yaml", "benchmarks/cel_rules", "examples/text-to-sql/finetunejob.yaml"),
        "benchmarks/cel_rules/main.go",
    ),
    # On a Kubernetes.
    _benchmark("recovery", "results/recovery.json", JOBS),
    _benchmark("scale", "results/scale.json results/scale_600.json", OPERATOR, "make scale"),
    # On GPUs.
    _benchmark("plan_memory", "plan_memory.json", TRAINING),
    _benchmark("gpu_exactness", "results/gpu_exactness_*.json", TRAINING),
    _benchmark("gpu_objectives", "results/gpu_objectives_*.json", TRAINING),
    _benchmark("reproducible_schedules", "results/reproducible_schedules.json", TRAINING),
    _benchmark("reproducible_cost", "results/reproducible_cost.json", TRAINING),
    _benchmark("gpu_proof", "results/gpu_proof*.json*", TRAINING),
    _benchmark("gpu_restart", "results/gpu_restart.json", TRAINING),
    _benchmark("zero_matrix", "results/zero_matrix_*.json", TRAINING),
    _benchmark("commit_stall", "results/commit_stall_*.json", TRAINING),
    _benchmark("node_check", "results/node_check_*.json", TRAINING),
    _benchmark("first_step", "results/first_step.json", TRAINING),
    _benchmark("first_step", "results/first_step_h200.json", TRAINING),
    _benchmark("step_profile", "results/step_profile.json results/step_profile_8B.json", TRAINING),
    _benchmark("kernel_alternatives", "results/kernel_alternatives.json", ()),
    _benchmark("long_rows", "results/long_rows.json", TRAINING),
    _benchmark("throughput", "results/throughput_*.json results/examples_*.json", TRAINING),
    _benchmark("torchtitan_fp8", "results/torchtitan_fp8_*.json", TRAINING),
    _benchmark("fp8_loss", "results/fp8_loss.json", TRAINING),
    _benchmark("large_models", "results/large_models.json", TRAINING),
    _benchmark("step_time", "results/step_time.json", ("api/spotune/plan",)),
    _benchmark("smollm2", "results/smollm2.json", TRAINING),
    _benchmark("serving_engine", "results/serving_engine_gpu.json", SERVING),
    _benchmark("serving_replicas", "results/serving_replicas*.json", SERVING),
    _benchmark("serving_speed", "results/serving_speed_gateways.json results/serving_speed_direct.json", VLLM),
    _benchmark("serving_start", "results/serving_start.json", VLLM),
    _benchmark("serving_vllm", "results/serving_vllm.json", VLLM),
    _benchmark("serving_gpu_faults", "results/serving_gpu_faults.json", VLLM),
    MeasuredPage(
        "tests/proof/recovery, on GPUs",
        ("benchmarks/results/proof_recovery_gpu_?.jsonl",),
        TRAINING,
        "python -m tests.proof.recovery --gpus 1",
    ),
)

OF_PAGES = (
    "benchmarks/results/chaos.jsonl",
    "benchmarks/results/faults.jsonl",
    "benchmarks/results/fuzz.jsonl",
    "benchmarks/results/proof_recovery.jsonl",
    "benchmarks/results/serving_faults.jsonl",
)
"""Records of the pages above, which name the same commits."""

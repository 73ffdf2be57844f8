"""Every job in examples/ is valid, is in the table of examples/README.md, and fits on the GPUs listed there."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from spotune.errors import JobError
from spotune.fingerprint import fingerprint
from spotune.job_file.load import load_job, sources_of
from spotune.plan.config_reader import read_architecture
from spotune.plan.devices import device_memory_bytes
from spotune.plan.execution import layout_request, training_setup
from spotune.plan.layout import LayoutChoice, choose_layout
from spotune.plan.parameters import count_parameters
from spotune.units.quantities import Quantity
from tests.examples.jobs import EXAMPLES, JOB_FILES, PUBLISHED, config_of

TABLE = (EXAMPLES / "README.md").read_text()
ROW = re.compile(
    r"^\| \[(?P<name>[\w-]+)\]\((?P<file>\S+)\) \| (?P<parameters>[\d,]+) .*\| (?P<count>\d+) x (?P<device>\S+) \|"
)


@dataclass(frozen=True)
class Stated:
    """The row of the table for a job."""

    parameters: int
    workers: int
    device: str


def stated(file: Path) -> Stated:
    for line in TABLE.splitlines():
        row = ROW.match(line)
        if row and EXAMPLES / row["file"] == file:
            assert row["name"] == file.stem
            return Stated(int(row["parameters"].replace(",", "")), int(row["count"]), row["device"])
    raise AssertionError(f"the table has no row of {file.name}")


def planned(file: Path, workers: int, device: str) -> LayoutChoice:
    job = load_job(file)
    setup = training_setup(read_architecture(config_of(job, file.parent)), job)
    return choose_layout(setup, workers, device_memory_bytes(device), layout_request(job, workers))


@pytest.mark.parametrize("file", JOB_FILES, ids=lambda file: file.stem)
def test_every_example_is_a_valid_job(file: Path) -> None:
    load_job(file)


@pytest.mark.parametrize("file", JOB_FILES, ids=lambda file: file.stem)
def test_every_example_is_in_the_table(file: Path) -> None:
    assert f"({file.relative_to(EXAMPLES)})" in TABLE


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_a_job_is_named_after_its_file(file: Path) -> None:
    assert load_job(file).metadata.name == file.stem


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_the_table_has_the_number_of_parameters(file: Path) -> None:
    job = load_job(file)
    architecture = training_setup(read_architecture(config_of(job, file.parent)), job).architecture
    assert count_parameters(architecture).total == stated(file).parameters


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_the_job_fits_on_the_gpus_in_the_table(file: Path) -> None:
    workers = load_job(file).spec.workers
    assert stated(file).workers == workers.world_size
    for count in (workers.min_world_size, workers.world_size):
        assert planned(file, count, stated(file).device).fits


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_pods_request_the_host_memory_of_the_plan(file: Path) -> None:
    """Besides the process and the page-locked copies, a worker has the weights in memory while it loads them."""
    workers = load_job(file).spec.workers
    asked = Quantity(workers.resources.requests.get("memory", "8Gi")).value  # the default request of the operator
    memory = planned(file, workers.min_world_size, stated(file).device).memory
    assert memory.host_bytes + memory.states.weights_bytes < asked


def test_the_layouts_of_t5_large_differ_only_in_layout() -> None:
    jobs = [load_job(file) for file in PUBLISHED if file.stem.startswith("t5-large")]
    assert len({job.spec.execution.zero_stage for job in jobs}) == len(jobs) == 3
    assert len({fingerprint(job) for job in jobs}) == 1


def test_all_t5_jobs_read_the_same_shards() -> None:
    datasets = [load_job(file).spec.dataset for file in PUBLISHED if file.parent.name == "t5-wikisql"]
    assert all(dataset == datasets[0] for dataset in datasets)


@pytest.mark.parametrize("device", ["a100-40gb", "a100-80gb"])
def test_t5_11b_on_one_gpu_is_rejected_with_alternatives(device: str) -> None:
    file = EXAMPLES / "t5-wikisql" / "t5-11b-wikisql.yaml"
    with pytest.raises(JobError, match="does not fit on 1 worker with") as refused:
        planned(file, 1, device)
    named = re.search(
        r"What would help: (\d+) workers of this size, execution.offload optimizer \(\d", str(refused.value)
    )
    assert named
    assert planned(file, int(named[1]), device).fits


def test_llama_2_without_zero_is_rejected_on_80_gb_at_any_world_size() -> None:
    file = EXAMPLES / "llama-dolly" / "llama2-7b-data-parallel.yaml"
    for workers in (1, 4, 64):
        with pytest.raises(JobError, match=r"needs 109\.8 GB per worker.*What would help: execution\.zeroStage auto"):
            planned(file, workers, "a100-80gb")


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_shards_in_a_bucket_replace_those_in_the_folder(file: Path, tmp_path: Path) -> None:
    on_a_cluster = tmp_path / "job.yaml"
    on_a_cluster.write_text(file.read_text().replace("data/shards", "s3://my-bucket/rows"))
    sources = sources_of(load_job(on_a_cluster))
    shards = [source for field, source in sources.items() if field.endswith("train.source")]
    assert shards
    assert all(source.startswith("s3://my-bucket/rows") for source in shards)


def test_the_published_accumulation_matches_the_plan() -> None:
    job = load_job(EXAMPLES / "bloomz-imdb" / "bloomz-1b1-imdb.yaml").spec
    assert job.training.global_batch_size == 8 * job.execution.micro_batch_size * job.workers.world_size

"""The Python client against a real HTTP server: what it sends, waits for and raises, synchronously and with asyncio."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune.errors import JobError, RefusedError, TimedOutError, UsageError
from spotune_client import AsyncClient, Client
from tests.api.support.job_files import a_job
from tests.client.support.stateful_server import ROOT, Store, serving_store
from tests.operator.support.objects import condition, finetune_job

JOBS = f"{ROOT}/namespaces/team/finetunejobs"
JOB = f"{JOBS}/t5-sql"
COMPLETE = condition("Complete", "True", "Trained")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Store, Path]]:
    """A server, and a kubeconfig for it."""
    with serving_store(tmp_path) as found:
        yield found


def no_pause(_: float) -> None:
    """Poll without a pause."""


def progressing(store: Store) -> None:
    """Let the job make a step after each time it is read, and complete after the third."""

    def advance(found: dict[str, Any]) -> None:
        status = dict(found["status"])
        step = status.get("step", 0) + 1
        conditions = [COMPLETE] if step >= 3 else []
        store.put(JOB, {**found, "status": {**status, "step": min(step, 3), "conditions": conditions}})

    store.put(JOB, finetune_job(step=0))
    store.after_get = advance


def test_a_job_is_applied_with_what_the_user_wrote_and_no_defaults(served: tuple[Store, Path], tmp_path: Path) -> None:
    store, kubeconfig = served
    job = a_job()
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_unset=True) | {"kind": "FinetuneJob"}))
    with Client(kubeconfig=kubeconfig) as client:
        of_model, of_file = client.jobs.apply(job), client.jobs.apply(str(file), force=True)
    assert (of_model.name, of_model.namespace) == (job.metadata.name, "team")
    assert of_model.raw["spec"] == of_file.raw["spec"] == job.spec.model_dump(mode="json", exclude_unset=True)
    assert of_model.model.spec == job.spec
    assert [(method, query, kind) for method, _, query, kind in store.requests] == [
        ("PATCH", {"fieldManager": "spotune-client"}, "application/apply-patch+yaml"),
        ("PATCH", {"fieldManager": "spotune-client", "force": "true"}, "application/apply-patch+yaml"),
    ]


def test_an_invalid_object_is_not_sent(served: tuple[Store, Path]) -> None:
    store, kubeconfig = served
    client = Client(kubeconfig=kubeconfig)
    with pytest.raises(JobError, match=r"spec\.training\.epocs"):
        client.jobs.apply({"metadata": {"name": "a"}, "spec": {"training": {"epocs": 1}}})
    with pytest.raises(UsageError, match="this is a FinetuneJob, where a ModelService is needed"):
        client.services.apply(a_job())
    assert store.requests == []


def test_create_refuses_a_name_that_is_taken(served: tuple[Store, Path]) -> None:
    client = Client(kubeconfig=served[1])
    client.jobs.create(a_job())
    with pytest.raises(RefusedError, match="already exists") as refused:
        client.jobs.create(a_job())
    assert refused.value.status == 409


def test_watch_yields_each_change_and_ends_with_the_job(served: tuple[Store, Path]) -> None:
    progressing(served[0])
    seen = [(job.status.step, job.outcome) for job in Client(kubeconfig=served[1]).jobs.watch("t5-sql", pause=no_pause)]
    assert seen == [(0, None), (1, None), (2, None), (3, "Complete")]


def test_wait_goes_on_while_the_api_server_is_away(served: tuple[Store, Path]) -> None:
    store, kubeconfig = served
    progressing(store)
    pauses = iter([True, True, False])
    told: list[str] = []

    def pause(_: float) -> None:
        store.is_down = next(pauses, False)

    steps: list[int] = []
    client = Client(kubeconfig=kubeconfig, notify=told.append)
    job = client.jobs.wait("t5-sql", progress=lambda job: steps.append(job.status.step), pause=pause)
    assert (job.outcome, steps) == ("Complete", [0, 1, 2, 3])
    assert len(told) == 1
    assert "retrying" in told[0]


def test_a_wait_times_out_while_the_api_server_is_away(served: tuple[Store, Path]) -> None:
    store, now = served[0], iter(range(0, 1000, 20))
    store.put(JOB, finetune_job())
    store.after_get = lambda _: setattr(store, "is_down", True)
    with pytest.raises(TimedOutError, match="timed out after 1 min 00 s: t5-sql is"):
        Client(kubeconfig=served[1]).jobs.wait("t5-sql", timeout=60, pause=no_pause, clock=lambda: float(next(now)))


def test_wait_ends_with_the_cause(served: tuple[Store, Path]) -> None:
    store, kubeconfig = served
    client = Client(kubeconfig=kubeconfig)
    stalled = condition("Stalled", "True", "InvalidSpec", "see condition StorageReady")
    storage = condition("StorageReady", "False", "UnfitStorageClass", "class x is not ReadWriteMany")
    store.put(JOB, finetune_job(stalled, storage, phase="Stalled"))
    with pytest.raises(JobError, match="t5-sql: Stalled: InvalidSpec: class x is not ReadWriteMany"):
        client.jobs.wait("t5-sql", fail_if_stalled=True, pause=no_pause)
    with pytest.raises(TimedOutError, match=r"timed out after .*: t5-sql is Stalled"):
        client.jobs.wait("t5-sql", timeout=0, pause=no_pause)
    store.put(JOB, finetune_job(condition("Failed", "True", "AppError", "loss is nan")))
    with pytest.raises(JobError, match="t5-sql failed: loss is nan"):
        client.jobs.wait("t5-sql", pause=no_pause)
    with pytest.raises(UsageError, match="no FinetuneJob t5-sq; did you mean t5-sql"):
        client.jobs.wait("t5-sq", pause=no_pause)


def test_suspend_resume_delete_and_list(served: tuple[Store, Path]) -> None:
    store, kubeconfig = served
    store.put(JOB, finetune_job())
    store.put(JOB.replace("team", "other"), finetune_job() | {"metadata": {"name": "t5-sql", "namespace": "other"}})
    client = Client(kubeconfig=kubeconfig)
    assert [client.jobs.suspend("t5-sql"), client.jobs.suspend("t5-sql")] == [True, False]
    assert client.jobs.get("t5-sql").model.spec.suspend
    assert client.jobs.resume("t5-sql")
    assert [job.namespace for job in client.jobs.list(everywhere=True)] == ["other", "team"]
    client.jobs.delete("t5-sql", wait=True, pause=no_pause)
    assert client.jobs.list() == []


def test_the_asynchronous_client_does_the_same(served: tuple[Store, Path]) -> None:
    progressing(served[0])

    async def run() -> tuple[list[int], str]:
        async with AsyncClient("team", kubeconfig=served[1]) as client:
            waiting = asyncio.create_task(client.jobs.wait("t5-sql", timeout=60))
            steps = [job.status.step async for job in client.jobs.watch("t5-sql")]
            return steps, (await waiting).outcome or ""

    steps, ended = asyncio.run(run())
    assert (steps[-1], ended) == (3, "Complete")


def test_a_cancelled_wait_leaves_no_thread_behind(served: tuple[Store, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pause = 60.0
    monkeypatch.setattr("spotune_client.waiting.POLL_SECONDS", pause)
    served[0].put(JOB, finetune_job())

    async def run() -> int:
        client = AsyncClient(kubeconfig=served[1])
        watch = client.jobs.watch("t5-sql")
        await anext(watch)
        waiting = asyncio.create_task(client.jobs.wait("t5-sql"))
        rest = asyncio.ensure_future(anext(watch))
        while len(served[0].requests) < 2:  # noqa: ASYNC110 - the other one follows after a pause
            await asyncio.sleep(0.01)
        for task in (waiting, rest):
            task.cancel()
        await asyncio.gather(waiting, rest, return_exceptions=True)
        return len(served[0].requests)

    start = time.monotonic()
    before = asyncio.run(run())
    assert time.monotonic() - start < pause
    assert len(served[0].requests) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncio_")]


def test_the_package_imports_no_kubernetes_before_a_client_is_made() -> None:
    code = "import sys, spotune_client; print([m for m in ('kubernetes', 'kopf', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"

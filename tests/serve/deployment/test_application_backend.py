"""A version whose Ray Serve controller is away, or has just come back, is not deleted."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from spotune_serve.deployment import application_backend
from spotune_serve.deployment.application_backend import REPLICA, ApplicationBackend
from spotune_serve.deployment.token_transport.receiver import TokenReceiver
from spotune_serve.engine.base import GenerationRequest, SamplingParams
from spotune_serve.gateway.backend import NoReplicaError, VersionGoneError
from tests.serve.support.ray_handle import ScriptedHandle
from tests.serve.support.scripted_backend import ScriptedBackend

MODEL = "model-1"
GATEWAY = "gateway"
RUNNING = {GATEWAY: ApplicationStatus.RUNNING, MODEL: ApplicationStatus.RUNNING}
no_controller = pytest.mark.parametrize(
    "error",
    [
        pytest.param(None, id="a new controller without applications, or none at all"),
        pytest.param(ActorDiedError(), id="a controller that has died"),
        pytest.param(RayServeException("There is no Serve instance"), id="no controller, for a new process"),
    ],
)
"""What Ray Serve 2.60 raises without its controller; None: it reports no application."""


@dataclass
class Serve:
    """What the backend uses of the module `ray.serve`.

    Attributes:
        applications: What the controller answers.
        error: Raised instead, by every call.
        replicas: Answer requests.
    """

    applications: dict[str, ApplicationStatus] = field(default_factory=lambda: dict(RUNNING))
    error: Exception | None = None
    replicas: ScriptedBackend = field(default_factory=lambda: ScriptedBackend([10, 11]))

    def status(self) -> Any:
        self._fail()
        return SimpleNamespace(
            applications={name: SimpleNamespace(status=status) for name, status in self.applications.items()}
        )

    def get_deployment_handle(self, deployment: str, application: str) -> ScriptedHandle:
        self._fail()
        if deployment != REPLICA or application not in self.applications:
            raise KeyError(f"{application} does not exist.")
        return ScriptedHandle(self.replicas, ActorDiedError())

    def get_replica_context(self) -> Any:
        return SimpleNamespace(app_name=GATEWAY)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture(name="serve")
def scripted_serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    scripted = Serve()
    monkeypatch.setattr(application_backend, "serve", scripted)
    return scripted


class Backend:
    """An `ApplicationBackend`, its event loop and its receiver."""

    def __init__(self, *, scales_to_zero: bool = False) -> None:
        self._runner = asyncio.Runner()
        self._receiver = TokenReceiver("127.0.0.1")
        self._backend = ApplicationBackend(MODEL, "1", self._receiver, scales_to_zero=scales_to_zero)

    def __enter__(self) -> Backend:
        return self

    def __exit__(self, *_: object) -> None:
        self._receiver.close()
        self._runner.close()

    def is_ready(self) -> bool:
        return self._runner.run(self._backend.is_ready())

    def failure(self) -> NoReplicaError:
        """The error of a request."""
        with pytest.raises(NoReplicaError) as raised:
            self._runner.run(self._generate())
        return raised.value

    async def _generate(self) -> None:
        async with aclosing(self._backend.generate(GenerationRequest("r", (5,), SamplingParams(5, seed=3)))) as chunks:
            await anext(chunks)


@pytest.mark.parametrize("status", [None, ApplicationStatus.DELETING])
def test_scaled_to_zero_version_is_not_ready_once_its_application_is_deleted(
    serve: Serve, status: ApplicationStatus | None
) -> None:
    with Backend(scales_to_zero=True) as backend:
        assert backend.is_ready()
        del serve.applications[MODEL]
        if status is not None:
            serve.applications[MODEL] = status
        assert not backend.is_ready()


@no_controller
def test_scaled_to_zero_version_stays_ready_while_the_controller_cannot_tell(
    serve: Serve, error: Exception | None
) -> None:
    with Backend(scales_to_zero=True) as backend:
        assert backend.is_ready()
        serve.applications, serve.error = {}, error
        assert backend.is_ready()


@pytest.mark.parametrize("scales_to_zero", [False, True])
@no_controller
def test_a_gateway_that_starts_without_a_controller_is_not_ready_and_recovers(
    serve: Serve, error: Exception | None, scales_to_zero: bool
) -> None:
    serve.applications, serve.error = {}, error
    with Backend(scales_to_zero=scales_to_zero) as backend:
        assert not backend.is_ready()
        assert not isinstance(backend.failure(), VersionGoneError), "its requests would move for good"
        serve.applications, serve.error = dict(RUNNING), None
        assert backend.is_ready()


def test_request_to_an_application_that_does_not_exist_moves_to_another_version(serve: Serve) -> None:
    del serve.applications[MODEL]
    with Backend() as backend:
        assert not backend.is_ready()
        assert isinstance(backend.failure(), VersionGoneError)


def test_refused_request_moves_if_its_application_is_deleted_but_not_if_it_failed(serve: Serve) -> None:
    serve.replicas.error = NoReplicaError("all replicas have failed")
    with Backend() as backend:
        assert not isinstance(backend.failure(), VersionGoneError)
        del serve.applications[MODEL]
        assert isinstance(backend.failure(), VersionGoneError)


@no_controller
def test_refused_request_does_not_move_while_the_controller_cannot_tell(serve: Serve, error: Exception | None) -> None:
    serve.replicas.error = NoReplicaError("all replicas have failed")
    with Backend() as backend:
        assert backend.is_ready()
        serve.applications, serve.error = {}, error
        assert not isinstance(backend.failure(), VersionGoneError)

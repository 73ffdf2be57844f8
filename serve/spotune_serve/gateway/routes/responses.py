"""Responses of a version, whole or as streams. A request whose version is gone before its first token moves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from spotune_serve.gateway.answers import Answer, AnswerPart, Choice, api_error_of, collect
from spotune_serve.gateway.backend import NoReplicaError, VersionGoneError
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from spotune_serve.gateway.version import Version
from spotune_serve.gateway.versions import VERSION_HEADER, Versions
from spotune_serve.protocol.errors import ApiError
from spotune_serve.protocol.sse import EventStream, started, until_disconnected

_FIRST_SERVER_STATUS = 500


class Writer(Protocol):
    """Writes answers in the format of one route."""

    def response(self, answers: Sequence[Answer]) -> BaseModel:
        """The whole response."""

    def chunks(self, parts: AsyncGenerator[AnswerPart, None]) -> AsyncGenerator[bytes, None]:
        """The events of a stream, as JSON."""


@dataclass(frozen=True)
class Plan:
    """What a version has to generate for a request.

    Attributes:
        choices: the sequences.
        writer: writes their answers.
    """

    choices: Sequence[Choice]
    writer: Writer


async def respond(
    versions: Versions, request: Request, model: str, plan: Callable[[ServedModel], Plan], *, stream: bool
) -> Response:
    """Let a version answer a request.

    Args:
        versions: one of them answers.
        request: its headers may name the version.
        model: id of the model or adapter that is asked for.
        plan: what a version has to generate; called again when the request moves to another version.
        stream: whether the response is a stream.

    Raises:
        ApiError: the response is an error.
        ClientDisconnect: the client has left.
    """
    settings = versions.settings
    tried: list[Version] = []
    while True:
        try:
            version = versions.choose(request.state.request_id, model, request.headers.get(VERSION_HEADER), tried)
        except VersionGoneError as error:
            if tried:
                tried[-1].counts.finish(failed=True)
            raise api_error_of(error, settings) from error
        request.state.version = version.name
        planned = _planned(version, plan, settings)
        parts = _counted(version, planned.choices, settings)
        try:
            if stream:
                begun = await started(request.receive, parts)
                return EventStream(planned.writer.chunks(begun), lambda error: api_error_of(error, settings))
            answers = await until_disconnected(request.receive, collect(planned.choices, parts))
            return JSONResponse(planned.writer.response(answers).model_dump(exclude_unset=True))
        except VersionGoneError:
            tried.append(version)


def _planned(version: Version, plan: Callable[[ServedModel], Plan], settings: GatewaySettings) -> Plan:
    """What the version has to generate. A fault of its template counts as its error, a wrong request does not."""
    try:
        return plan(version.model)
    except Exception as error:
        raise _counted_error(version, error, settings) from error


async def _counted(
    version: Version, choices: Sequence[Choice], settings: GatewaySettings
) -> AsyncGenerator[AnswerPart, None]:
    """The parts of the answers. The request counts for the version, unless it moves before the first part."""
    has_begun = False
    with version.counts.count_running():
        try:
            async with aclosing(version.answerer.parts(choices)) as parts:
                async with version.waiters.wait():
                    first = await anext(parts)
                has_begun = True
                yield first
                async for part in parts:
                    yield part
        except Exception as error:
            if isinstance(error, VersionGoneError) and not has_begun:
                raise
            raise _counted_error(version, error, settings) from error
        except BaseException:  # the client has left
            if has_begun:
                version.counts.finish()
            raise
        version.counts.finish()


def _counted_error(version: Version, error: Exception, settings: GatewaySettings) -> ApiError:
    """How the API reports an error of a version, which counts it if it is the service's fault."""
    if isinstance(error, NoReplicaError):
        error = NoReplicaError(f"version {version.name}: {error}")
    reported = api_error_of(error, settings)
    if reported.status >= _FIRST_SERVER_STATUS:
        version.counts.finish(failed=True)
    return reported

"""Tokens over a real TCP connection: order, losses at either end, and who may send."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from spotune_serve.deployment.token_transport.messages import Destination
from spotune_serve.deployment.token_transport.receiver import ConnectionLostError, TokenReceiver, TokenSequence
from spotune_serve.deployment.token_transport.sender import GatewayLostError, SequenceSender, TokenSender
from spotune_serve.engine.base import GeneratedToken, TokenChunk, TokenLogprob

PATIENCE_SECONDS = 30.0
pytestmark = pytest.mark.anyio


def chunk(*tokens: int) -> TokenChunk:
    return TokenChunk(tuple(GeneratedToken(token) for token in tokens))


@asynccontextmanager
async def listening() -> AsyncIterator[TokenReceiver]:
    receiver = TokenReceiver("127.0.0.1")
    await receiver.start()
    try:
        yield receiver
    finally:
        receiver.close()


async def read_all(sequence: TokenSequence) -> list[int]:
    tokens: list[int] = []
    reason = None
    while reason is None:
        found = await asyncio.wait_for(sequence.read(), PATIENCE_SECONDS)
        tokens += [token.token for token in found.tokens]
        reason = found.finish_reason
    return tokens


async def test_log_probabilities_arrive_exactly() -> None:
    top = (TokenLogprob(7, -0.1), TokenLogprob(128_255, -1 / 3))
    sent = TokenChunk((GeneratedToken(7, -0.1, top), GeneratedToken(8, -2.5e-320)), "stop")
    async with listening() as receiver:
        with receiver.sequence() as (destination, sequence):
            (await TokenSender().open(destination)).send(sent)
            assert await asyncio.wait_for(sequence.read(), PATIENCE_SECONDS) == sent


async def test_sequences_of_a_replica_share_a_connection_and_stay_apart() -> None:
    async with listening() as receiver:
        sender = TokenSender()

        async def play(number: int) -> list[int]:
            with receiver.sequence() as (destination, sequence):
                sequence_sender = await sender.open(destination)
                for position in range(50):
                    sequence_sender.send(chunk(1000 * number + position))
                    await asyncio.sleep(0)
                sequence_sender.send(TokenChunk((), "length"))
                return await read_all(sequence)

        found = await asyncio.gather(*(play(number) for number in range(20)))
        assert len(receiver.connections) == 1
    assert found == [[1000 * number + position for position in range(50)] for number in range(20)]


async def test_a_slow_reader_gets_all_waiting_tokens_at_once() -> None:
    async with listening() as receiver:
        with receiver.sequence() as (destination, sequence):
            sender = await TokenSender().open(destination)
            for token in range(10):
                sender.send(chunk(token))
            assert await asyncio.wait_for(sequence.read(), PATIENCE_SECONDS) == chunk(*range(10))


async def test_a_lost_connection_fails_only_the_sequences_that_came_by_it() -> None:
    async with listening() as receiver:
        with receiver.sequence() as (one, lost), receiver.sequence() as (other, kept):
            first, second = TokenSender(), TokenSender()
            (await first.open(one)).send(chunk(1))
            (await second.open(other)).send(chunk(2))
            assert await asyncio.wait_for(lost.read(), PATIENCE_SECONDS) == chunk(1)
            assert await asyncio.wait_for(kept.read(), PATIENCE_SECONDS) == chunk(2)
            by_first = next(each for each in receiver.connections if each is lost.connection)
            by_first.abort()
            with pytest.raises(ConnectionLostError):
                await asyncio.wait_for(lost.read(), PATIENCE_SECONDS)
            (await second.open(other)).send(chunk(3))
            assert await asyncio.wait_for(kept.read(), PATIENCE_SECONDS) == chunk(3)


async def test_tokens_that_arrived_before_an_error_are_read_before_it() -> None:
    async with listening() as receiver:
        with receiver.sequence() as (_destination, sequence):
            sequence.add([GeneratedToken(1)], None)
            sequence.fail(ValueError("broken"))
            assert await sequence.read() == chunk(1)
            with pytest.raises(ValueError, match="broken"):
                await sequence.read()


async def test_a_sender_learns_that_its_gateway_has_gone_and_connects_again() -> None:
    sender = TokenSender()
    async with listening() as receiver:
        with receiver.sequence() as (destination, _sequence):
            connection = await sender.open(destination)
    with pytest.raises(GatewayLostError, match="closed"):
        await send_until_refused(connection)
    with pytest.raises(GatewayLostError, match=f"127.0.0.1:{destination.port}"):
        await sender.open(destination)


async def send_until_refused(connection: SequenceSender) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            connection.send(chunk(1))
            await asyncio.sleep(0.01)


async def test_nobody_sends_tokens_without_the_secret() -> None:
    async with listening() as receiver:
        with receiver.sequence() as (destination, sequence):
            stranger = await TokenSender().open(replace(destination, secret=bytes(len(destination.secret))))
            with pytest.raises(GatewayLostError):
                await send_until_refused(stranger)
            (await TokenSender().open(destination)).send(chunk(5))
            assert await asyncio.wait_for(sequence.read(), PATIENCE_SECONDS) == chunk(5)


async def test_tokens_for_a_reader_that_left_are_dropped() -> None:
    async with listening() as receiver:
        sender = TokenSender()
        with receiver.sequence() as (left, _sequence):
            pass
        (await sender.open(left)).send(chunk(1))
        with receiver.sequence() as (destination, sequence):
            (await sender.open(destination)).send(chunk(2))
            assert await asyncio.wait_for(sequence.read(), PATIENCE_SECONDS) == chunk(2)


def test_a_destination_is_not_told_in_logs() -> None:
    assert "secret" not in repr(Destination("10.0.0.1", 8, b"secret", 1)).replace("secret=", "")


async def test_a_chosen_replica_must_accept_the_sequence_in_time() -> None:
    """A request to a node that vanished is never refused."""
    receiver = TokenReceiver("127.0.0.1", acceptance_seconds=0.2)
    await receiver.start()
    try:
        with receiver.sequence() as (destination, waiting):
            reading = asyncio.create_task(waiting.read())
            await asyncio.sleep(0.4)
            assert not reading.done(), "no replica was chosen: all are busy, or none runs"
            destination.on_chosen()
            with pytest.raises(ConnectionLostError, match="accept"):
                await asyncio.wait_for(reading, PATIENCE_SECONDS)
    finally:
        receiver.close()


async def test_a_sequence_that_was_accepted_in_time_may_wait_for_its_tokens() -> None:
    async with listening() as receiver:
        with receiver.sequence() as (destination, accepted):
            destination.on_chosen()
            sender = await TokenSender().open(destination)
            async with asyncio.timeout(PATIENCE_SECONDS):
                while accepted.connection is None:  # noqa: ASYNC110 - the sequence has no event for it
                    await asyncio.sleep(0.01)
            accepted._fail_if_not_accepted()  # what follows once the time is over
            sender.send(chunk(1))
            assert await asyncio.wait_for(accepted.read(), PATIENCE_SECONDS) == chunk(1)


def test_a_destination_travels_without_what_belongs_to_its_gateway() -> None:
    destination = Destination("10.0.0.1", 8, b"secret", 1, on_chosen=lambda: None)
    assert pickle.loads(pickle.dumps(destination)) == destination

"""What a replica sends to a gateway over TCP: msgpack values, one after the other.

The gateway's secret precedes them. A value is a list of three: number of the sequence, its new tokens, and its finish
reason or None. The first one of a sequence has no tokens: the replica has accepted it. A token is its id, or, with
log probabilities, a list of id, log probability and the most likely tokens as pairs of id and log probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from spotune_serve.engine.base import GeneratedToken, TokenChunk, TokenLogprob

SECRET_BYTES: Final = 32


@dataclass(frozen=True)
class Destination:
    """Where a replica sends the tokens of a sequence. It travels with the request, by Ray.

    Attributes:
        host: IP address of the gateway.
        port: TCP port of its receiver.
        secret: the first bytes of a connection; of length `SECRET_BYTES`.
        sequence: number of the sequence, unique in the receiver.
        on_chosen: called in the gateway each time that a replica was chosen. It does not travel.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)
    sequence: int
    on_chosen: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Destination, (self.host, self.port, self.secret, self.sequence)


def packed(sequence: int, chunk: TokenChunk) -> bytes:
    """A chunk as one msgpack value."""
    data: bytes = msgpack.packb((sequence, [_plain(token) for token in chunk.tokens], chunk.finish_reason))
    return data


def unpacked_tokens(values: Sequence[Any]) -> list[GeneratedToken]:
    """The tokens of a chunk, from its second part."""
    return [
        GeneratedToken(value)
        if isinstance(value, int)
        else GeneratedToken(value[0], value[1], tuple(TokenLogprob(*pair) for pair in value[2]))
        for value in values
    ]


def _plain(token: GeneratedToken) -> Any:
    if token.logprob is None:
        return token.token
    return token.token, token.logprob, [(each.token, each.logprob) for each in token.top]

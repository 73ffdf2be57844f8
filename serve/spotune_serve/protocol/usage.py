"""The number of tokens of a request."""

from __future__ import annotations

from pydantic import BaseModel


class Usage(BaseModel):
    """The number of tokens of a request. Prompts count once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int) -> Usage:
        """Usage with its total."""
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )

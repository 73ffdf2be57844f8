"""The metrics of one sequence: how long it waits and generates, and how it finishes."""

from __future__ import annotations

from spotune_serve.gateway.metrics.gateway_metrics import VersionMetrics
from spotune_serve.gateway.tracing import RequestTrace


class SequenceTimer:
    """Follows one sequence: waiting, running, finished.

    Args:
        metrics: of the version.
        trace: of the request; None if it is not traced.
        answer: index of the answer in the request.
        prompt_tokens: length of the prompt.
    """

    def __init__(
        self, metrics: VersionMetrics, trace: RequestTrace | None = None, answer: int = 0, prompt_tokens: int = 0
    ) -> None:
        self._metrics = metrics
        self._trace = trace
        self._answer = answer
        self._prompt_tokens = prompt_tokens
        self._num_tokens = 0
        self._start = metrics.clock()
        self._first_token = 0.0
        self._num_first_tokens = 0
        self._last_token: float | None = None
        self._finished = False
        metrics.waiting.inc()

    def add_tokens(self, count: int) -> None:
        """Count tokens that arrived together."""
        if not count:
            return
        metrics = self._metrics
        now = metrics.clock()
        if self._last_token is None:
            self._leave_queue()
            metrics.running.inc()
            metrics.first_token_seconds.observe(now - self._start)
            self._first_token, self._num_first_tokens = now, count
            if self._trace is not None:
                self._trace.add_first_token(self._answer)
        else:
            metrics.token_seconds.observe((now - self._last_token) / count, count)
        self._last_token = now
        self._num_tokens += count
        metrics.generated_tokens.inc(count)

    def add_resumption(self) -> None:
        """Count that the sequence is sent to another replica."""
        self._metrics.resumptions.inc()
        if self._trace is not None:
            self._trace.add_resumption(self._answer, self._num_tokens)

    def finish(self, reason: str | None) -> None:
        """The sequence finished: `stop`, `length` or `abort`; None after an error. Only the first call counts."""
        metrics = self._metrics
        if self._finished:
            return
        self._finished = True
        if self._last_token is None:
            self._leave_queue()
        else:
            metrics.running.dec()
            num_later_tokens = self._num_tokens - self._num_first_tokens
            if num_later_tokens:
                metrics.mean_token_seconds.observe((self._last_token - self._first_token) / num_later_tokens)
        if reason is not None:
            metrics.finished[reason].inc()
            metrics.request_seconds.observe(metrics.clock() - self._start)
            metrics.request_prompt_tokens.observe(self._prompt_tokens)
            metrics.request_generated_tokens.observe(self._num_tokens)
        if self._trace is not None:
            self._trace.finish(self._answer, self._num_tokens, reason)

    def _leave_queue(self) -> None:
        self._metrics.waiting.dec()

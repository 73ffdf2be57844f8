"""What the gateway knows about draining nodes, with a head that answers or fails."""

from __future__ import annotations

from collections.abc import Collection
from queue import Queue

from spotune_serve.deployment.token_transport.draining_nodes import DrainingNodes


def test_the_last_answer_holds_while_the_head_does_not_answer() -> None:
    answers: Queue[Collection[str] | None] = Queue()
    questions: Queue[None] = Queue()

    def ask() -> Collection[str]:
        questions.put(None)
        answer = answers.get()
        if answer is None:
            raise RuntimeError("the head was lost")
        return answer

    nodes = DrainingNodes(ask, period_seconds=0.0)
    questions.get(timeout=60)
    assert nodes() == set()
    for answer, known in [
        (["a", "b"], {"a", "b"}),
        (None, {"a", "b"}),
        (None, {"a", "b"}),
        (["b"], {"b"}),
        ([], set()),
    ]:
        answers.put(answer)
        questions.get(timeout=60)  # the next question: the answer has been taken
        assert nodes() == known

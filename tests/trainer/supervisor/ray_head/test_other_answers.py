"""Answers at the address of Ray's Jobs API that are not of Ray, found by fuzzing."""

import pytest

from tests.fuzz.targets.answers import read_ray_answer


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b'{"ray_version": 3}', b"[3]", b"[" * 5000, b'[{"submission_id": "x"}]']
)
def test_answer_of_another_program_is_an_unavailable_api(body: bytes) -> None:
    read_ray_answer((200, body))

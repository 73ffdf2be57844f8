"""Reading the log of a container over several connections, from a real server that goes silent."""

from pathlib import Path

from spotune_client.cluster.container_log import ReadPosition, whole_log
from tests.client.support.streaming_server import Stream, streaming_cluster


def line(second: int, text: str) -> str:
    """A line of a log as the kubelet sends it with timestamps."""
    return f"2026-01-02T03:04:{second:02}.123456789Z {text}\n"


def test_read_position_tells_equal_lines_of_one_moment_apart() -> None:
    position = ReadPosition()
    same = [line(1, "x").rstrip()] * 2
    assert [text for _, text in position.filter(same)] == ["x", "x"]
    assert [text for _, text in position.filter([*same, same[0]])] == ["x"]
    assert list(position.filter([*same, same[0]])) == []
    assert list(position.filter(["unable to retrieve container logs"])) == []


def test_a_log_goes_on_after_a_silent_connection(tmp_path: Path) -> None:
    asked: list[dict[str, str]] = []
    streams = iter(
        [
            Stream(end="silence"),
            Stream(line(1, "a") + line(2, "b") + "2026-01-02T03:04:02.5Z a half", end="silence"),
            Stream(line(2, "b") + line(3, "a half line and its end")),
        ]
    )

    def answer(_: str, query: dict[str, str]) -> Stream:
        asked.append(query)
        return next(streams)

    with streaming_cluster(answer, tmp_path) as cluster:
        assert list(whole_log(cluster, "pod")) == ["a", "b", "a half line and its end"]
    assert [query.get("sinceTime") for query in asked] == [None, None, "2026-01-02T03:04:02.123456+00:00"]

"""What answers are judged by: metrics of our own, and functions of the user's, each named by its entry point."""

from typing import Annotated, Final, Literal, get_args

from pydantic import StringConstraints

from spotune.job.base import checked_by_server, expecting

BuiltIn = Literal["loss", "exactMatch", "executionAccuracy"]
BUILT_IN: Final[tuple[str, ...]] = get_args(BuiltIn)
MAX_METRICS: Final = 16

_MAX_CHARACTERS: Final = 200
_NAME: Final = "[A-Za-z_][A-Za-z0-9_]*"
_ENTRY_POINT: Final = rf"{_NAME}([.]{_NAME})*:{_NAME}"
_EXPECTED: Final = f"{', '.join(BUILT_IN)} or a function of your own as package.module:function"

Metric = Annotated[
    BuiltIn | Annotated[str, StringConstraints(pattern=f"^{_ENTRY_POINT}$", max_length=_MAX_CHARACTERS)],
    expecting(_EXPECTED),
    checked_by_server(
        (f"self.matches(r'^({'|'.join(BUILT_IN)}|{_ENTRY_POINT})$')", f"expected {_EXPECTED}"),
        max_length=_MAX_CHARACTERS,
    ),
]


def metric_name(metric: str) -> str:
    """What the figures of a metric go by: its own name, or that of the function."""
    return metric.rpartition(":")[2]


def is_function(metric: str) -> bool:
    """Whether a metric is a function of the user's."""
    return metric not in BUILT_IN

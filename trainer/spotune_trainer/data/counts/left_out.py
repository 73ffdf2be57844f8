"""What raw rows lose although the job asks for it: reasons, remedies, and the limit ``dataset.maxSkipped``.

Turns of a chat and whole rows count towards the limit. A row is counted as its turns if they are the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from spotune.errors import JobError

RowReason = Literal["cut", "equal", "flagged", "empty", "turns"]
"""Why a row is left out whole. ``cut``: the maximum length leaves nothing to learn. ``equal``: the answers of a pair do
not differ within it. ``flagged``: all messages to learn are marked by ``train`` or ``weight``. ``empty``: the text is
blank. ``turns``: nothing but turns that are left out themselves."""

MAX_PROBLEMS: Final = 5
"""Problems that a message or a manifest names."""
LOST_TURNS: Final = ("refused", "notRendered", "notPlaced", "empty")
"""Outcomes of turns that are left out although the job asks for them."""
_EMPTY_TURN: Final = "emptyTurn"
_TEMPLATE: Final = ("refused", "notRendered", "notPlaced")
_TURNS: Final = (*_TEMPLATE, _EMPTY_TURN)
_REMEDIES: Final[tuple[tuple[Collection[str], str], ...]] = (
    (_TEMPLATE, "correct the data, use another chat template"),
    (("cut", "equal"), "raise dataset.maxLength"),
    (("flagged",), "remove the row, or the mark of a message"),
    (("empty", _EMPTY_TURN), "remove or correct what is empty"),
)


class LeftOutError(JobError):
    """More is left out than `maxSkipped` allows.

    Args:
        problems: File, line and reason of some of it.
        counts: What is left out so far, by reason, see `count_left_out`.
        max_skipped: How much is allowed.
        reasons: Those of the problems; None: all that are counted.
    """

    def __init__(
        self,
        problems: Sequence[str],
        counts: Mapping[str, int],
        max_skipped: int,
        reasons: Collection[str] | None = None,
    ) -> None:
        super().__init__(_message(problems, counts, max_skipped, counts if reasons is None else reasons))
        self.left_out = tuple(problems)
        self.counts = Counter(counts)

    def __reduce__(self) -> tuple[type[JobError], tuple[str]]:
        """Another process gets the message."""
        return JobError, (str(self),)


def count_left_out(turns: Mapping[str, int], rows: Mapping[str, int]) -> Counter[str]:
    """What counts towards `maxSkipped`, by reason.

    Args:
        turns: Turns of chats by outcome.
        rows: Rows that are left out, by `RowReason`.
    """
    counts = Counter({_EMPTY_TURN if name == "empty" else name: turns.get(name, 0) for name in LOST_TURNS})
    counts.update({reason: count for reason, count in rows.items() if reason != "turns"})
    return +counts


def count_of_splits(splits: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """As `count_left_out`, of all splits of a manifest. Manifests of earlier versions have no reasons of rows."""
    found: Counter[str] = Counter()
    for split in splits:
        rows = {reason: count["rows"] for reason, count in split.get("leftOut", {}).items()}
        found += count_left_out(split.get("turns", {}), rows)
    return found


def check_left_out(problems: Sequence[str], counts: Mapping[str, int], max_skipped: int) -> None:
    """Raise LeftOutError if more is left out than is allowed; see there."""
    if sum(counts.values()) > max_skipped:
        raise LeftOutError(problems[:MAX_PROBLEMS], counts, max_skipped)


def explain_row(reason: RowReason, tokens: int, max_length: int) -> str:
    """The reason why a row is left out, for people.

    Args:
        reason: The reason; not ``turns``, whose turns have their own.
        tokens: Of the row.
        max_length: Maximum tokens of a row.
    """
    match reason:
        case "cut":
            return f"nothing to learn is left within dataset.maxLength ({max_length:,} of {tokens:,} tokens)"
        case "equal":
            return f"chosen and rejected are the same within dataset.maxLength ({max_length:,} of {tokens:,} tokens)"
        case "flagged":
            return "no message is left to learn: train: false or weight: 0 marks those that dataset.trainOn asks for"
    return "the text is empty, so there is nothing to learn"


def remedy(reasons: Collection[str]) -> str:
    """What to do about what is left out for these reasons; the beginning of a sentence."""
    text = ", ".join(text for kinds, text in _REMEDIES if any(kind in reasons for kind in kinds))
    return text[:1].upper() + text[1:]


def describe(counts: Mapping[str, int]) -> str:
    """How many rows and assistant turns are left out."""
    turns = sum(counts.get(reason, 0) for reason in _TURNS)
    rows = sum(counts.values()) - turns
    return " and ".join(
        f"{count:,} {name}{'s' * (count > 1)}" for name, count in (("row", rows), ("assistant turn", turns)) if count
    )


def _message(problems: Sequence[str], counts: Mapping[str, int], max_skipped: int, reasons: Collection[str]) -> str:
    several = max_skipped or len(problems) > 1
    first = f"{describe(counts)} cannot be trained on (dataset.maxSkipped: {max_skipped}): " if several else ""
    what = "such turns" if all(reason in _TURNS for reason in reasons) else "such rows"
    return f"{first}{'; '.join(problems)}. {remedy(reasons)}, or raise dataset.maxSkipped to leave {what} out"

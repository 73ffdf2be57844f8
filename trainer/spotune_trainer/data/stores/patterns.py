"""Shell patterns over the names of files in stores."""

from __future__ import annotations

import re
from typing import Final

WILDCARD: Final = re.compile(r"[*?[]")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A shell pattern, with ``**`` for any number of folders, as a regular expression."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern)
    wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile(
        "".join(
            wildcards.get(piece) or (piece.replace("[!", "[^") if piece.startswith("[") else re.escape(piece))
            for piece in pieces
        )
    )

"""JSON that the YAML parser of the API server accepts, for server-side apply."""

import re
from typing import Final

_SURROGATE_PAIR: Final = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")


def as_yaml(text: str) -> str:
    """JSON that is valid YAML, too: YAML does not accept the surrogate pairs in which JSON escapes some characters."""

    def as_one_escape(pair: re.Match[str]) -> str:
        high, low = int(pair[1], 16) - 0xD800, int(pair[2], 16) - 0xDC00
        return f"\\U{0x10000 + (high << 10) + low:08x}"

    return _SURROGATE_PAIR.sub(as_one_escape, text)

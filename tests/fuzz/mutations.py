"""Inputs that are nearly right: valid samples of which a few places are changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

Path = tuple[str | int, ...]

TEXTS = st.one_of(
    st.text(max_size=12),
    st.text(st.characters(codec=None, categories=None), max_size=4),
    st.sampled_from(
        [
            *("", " ", "\x00", "\ud800", "a\nb", "~", "null", "true", "0x", "1_0", "12:30:45", "2027-99-99", "1e999"),
            *("../../x", "/etc/passwd", "{", "{}", "{x!r:>9999999}", "%s", "auto", "1s", "8Gi", "3 USD", "x" * 3000),
        ]
    ),
)
NUMBERS = st.one_of(
    st.integers(-3, 200),
    st.floats(),
    st.sampled_from([-1, 0, 2**31, 2**32, 10**12, 2**53, 2**63, 10**30, 10**400, 1e308, 5e-324, -0.0, 253402300800.0]),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
"""Any value of Python's JSON parser, with infinities and NaN."""
_NAUGHTY = (
    *(b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\n", b"\r", b'"', b"'", b"\\", b"[" * 3000, b"{" * 3000),
    *(b'{"a":' * 3000, b"9" * 5000, b"-", b"NaN", b"&a *a", b"&a [*a]", b"!!int x", b"!!timestamp x", b"\\ud800"),
    *(b"!!python/object:os.system x", b"---\n", b"<<: ", b"? [a]\n: b", b"\xff\xff\xff\xff", b"\x00" * 8),
)


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every value in a JSON value, the outermost first."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@st.composite
def changed_values(draw: st.DrawFn, samples: Sequence[Any], changes: int = 3) -> Any:
    """A sample of which up to `changes` values are replaced, left out, renamed or doubled."""
    value = copy.deepcopy(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(0, changes))):
        *parents, last = draw(st.sampled_from(list(places(value)))) or (None,)
        if last is None:
            value = draw(VALUES)
            continue
        section: Any = value
        for part in parents:
            section = section[part]
        action = draw(st.sampled_from(["replace", "replace", "remove", "rename", "double"]))
        if action == "replace":
            section[last] = draw(VALUES)
        elif action == "remove":
            del section[last]
        elif not isinstance(last, str):
            section.append(copy.deepcopy(section[last]))
        elif action == "rename":
            section[draw(TEXTS)] = section.pop(last)
        else:
            section[draw(TEXTS)] = copy.deepcopy(section[last])
    return value


@st.composite
def changed_bytes(draw: st.DrawFn, samples: Sequence[bytes], changes: int = 4) -> bytes:
    """A sample of which up to `changes` places are overwritten, cut out, filled in or doubled."""
    content = bytearray(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(0, changes))):
        start = draw(st.integers(0, len(content)))
        stop = min(len(content), start + draw(st.integers(0, 40)))
        match draw(st.sampled_from(["fill", "cut", "double", "overwrite", "end"])):
            case "fill":
                content[start:start] = draw(st.binary(max_size=8) | st.sampled_from(_NAUGHTY))
            case "cut":
                del content[start:stop]
            case "double":
                content[start:start] = content[start:stop]
            case "overwrite":
                content[start:stop] = draw(st.binary(max_size=8) | st.sampled_from(_NAUGHTY))
            case _:
                del content[start:]
    return bytes(content)


def changed_json(samples: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """JSON of changed values, or changed bytes of the JSON of a sample."""
    exact = changed_values(samples).map(lambda value: json.dumps(value).encode())
    return exact | changed_bytes([json.dumps(sample).encode() for sample in samples])


def changed_lines(samples: Sequence[Any]) -> st.SearchStrategy[bytes]:
    """JSON lines of which a few are changed, in any order."""
    line = changed_values(samples).map(lambda value: json.dumps(value).encode())
    whole = b"\n".join(json.dumps(sample).encode() for sample in samples) + b"\n"
    return st.lists(line, max_size=8).map(lambda lines: b"".join(each + b"\n" for each in lines)) | changed_bytes(
        [whole]
    )

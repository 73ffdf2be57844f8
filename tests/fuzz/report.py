"""The page on what was fuzzed: docs/fuzzing.md."""

from __future__ import annotations

from collections.abc import Sequence

from docs.wrapping import wrap_page
from tests.fuzz.limits import BYTES, CPU_SECONDS, SECONDS
from tests.fuzz.records import Record, seconds_of
from tests.fuzz.target import Target

_HEAD = f"""# Fuzzing

`make fuzz` writes this page. Do not edit it. The code is in [tests/fuzz](../tests/fuzz).

Every parser that reads what others write gets random inputs, by
[Hypothesis](https://hypothesis.readthedocs.io/). Most are valid ones with a few changed values or
bytes. Each input must give a value, or the documented error with a message that names
the file or field. Any other exception is a failure. So is an input that takes more than
{CPU_SECONDS:.0f} s of processor time, {SECONDS:.0f} s with its waits, or {BYTES >> 30} GiB of memory.

Hypothesis does not know which lines of the code an input reaches, as coverage-guided fuzzers do. A
parser without a failure here may still have a fault.

`make fuzz FUZZ_MINUTES=60` goes on until each parser was fuzzed for an hour. `make test` runs each
for about a second. Inputs that failed are kept in `build/fuzz`, and are the first of the next run.

"""


def write_page(records: Sequence[Record], targets: Sequence[Target]) -> str:
    """The page as Markdown.

    Args:
        records: all turns.
        targets: all parsers.
    """
    commits = dict.fromkeys(record.commit.strip("`") for record in records)
    days = sorted({record.day for record in records})
    when = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}" if days else "not yet"
    lines = [
        f"Run {when}, of {'commit' if len(commits) == 1 else 'commits'} {', '.join(f'`{each}`' for each in commits)}.",
        "",
        "| parser | reads | minutes | inputs | failures |",
        "|---|---|---|---|---|",
    ]
    done = [target for target in targets if seconds_of(records, target.name)]
    for target in done:
        own = [record for record in records if record.target == target.name]
        inputs, failures = sum(record.inputs for record in own), sum(record.failures for record in own)
        minutes = sum(record.seconds for record in own) / 60
        lines.append(f"| `{target.name}` | {target.reads} | {minutes:.1f} | {inputs:,} | {failures} |")
    missing = [f"`{target.name}`" for target in targets if target not in done]
    if missing:
        lines += ["", f"These were not run: {', '.join(missing)}."]
    lines += [
        "",
        "A failure that is counted here was mended since, or is the reason why `make fuzz` fails. An input",
        "that ends the process, as a wrong offset in an Arrow file once did, stops `make fuzz` and leaves",
        "no record. What was found and mended is in the [changelog](../CHANGELOG.md), and has tests of its",
        "own.",
    ]
    return wrap_page(_HEAD + "\n".join(lines) + "\n")

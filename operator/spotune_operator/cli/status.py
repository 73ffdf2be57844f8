"""`spotune status`: a table of all jobs, or one job in detail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from spotune.formatting import duration, evaluation, restarts
from spotune.units.timestamps import unix_time
from spotune_client.cluster.conditions import condition_heading, is_problem, main_problem, notable_conditions
from spotune_client.cluster.jobs import Job, outcome, phase, reason_and_message, status_of, with_cause

_COLUMNS: Final = ("name", "phase", "progress", "loss", "ETA", "workers", "restarts", "checkpoint", "age")
_BAR_WIDTH: Final = 16
_WIDE_BAR_WIDTH: Final = 40
STYLES: Final = {"Complete": "green", "Failed": "red", "Stalled": "red", "Suspended": "dim", "Training": "cyan"}


def table(jobs: Sequence[Job], now: float, *, with_namespace: bool, with_bar: bool) -> RenderableType:
    """A table with one row per job, followed by one line for each job with a problem.

    Args:
        jobs: The jobs as the API server returns them.
        now: Unix time in seconds.
        with_namespace: Whether to show a namespace column.
        with_bar: Whether to draw progress bars.
    """
    rows = [_cells(job, now, with_bar=with_bar) for job in jobs]
    return Group(listing_grid(jobs, _COLUMNS, rows, with_namespace=with_namespace), *_problem_lines(jobs))


def listing_grid(
    found: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    rows: Sequence[Sequence[RenderableType]],
    *,
    with_namespace: bool,
) -> Table:
    """The table of jobs or services.

    Args:
        found: The objects as the API server returns them.
        columns: The headings.
        rows: The cells of each object, in the order of the columns.
        with_namespace: Whether a column with the namespace comes first.
    """
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in [*(["namespace"] if with_namespace else []), *columns]:
        grid.add_column(column.upper(), no_wrap=True)
    for each, row in zip(found, rows, strict=True):
        grid.add_row(*([each["metadata"]["namespace"]] if with_namespace else []), *row)
    return grid


def _cells(job: Job, now: float, *, with_bar: bool) -> list[RenderableType]:
    status = status_of(job)
    checkpoint = status.get("lastCheckpoint")
    counts = status.get("restarts") or {}
    return [
        job["metadata"]["name"],
        Text(phase(job), STYLES.get(phase(job), "")),
        _progress_cell(status, with_bar=with_bar),
        _number(status.get("loss"), ".4f"),
        time_left(status, now) or "-",
        "-" if outcome(job) else status.get("workers") or "-",
        str(counts.get("total") or 0),
        f"step {checkpoint['step']}" if checkpoint else "-",
        age(job, now),
    ]


def _progress_cell(status: Mapping[str, Any], *, with_bar: bool) -> RenderableType:
    step, total = status.get("step") or 0, status.get("totalSteps")
    if not total:
        return f"step {step}" if step else "-"
    text = f"{step}/{total} ({step / total:.0%})"
    if not with_bar:
        return text
    cell = Table.grid(padding=(0, 1))
    cell.add_row(ProgressBar(total=total, completed=step, width=_BAR_WIDTH), text)
    return cell


def _problem_lines(jobs: Sequence[Job]) -> Iterator[Text]:
    for job in jobs:
        if (found := main_problem(job)) is not None:
            text = reason_and_message(with_cause(job, found))
            yield Text(f"{job['metadata']['name']}: {condition_heading(found)}: {text}", "yellow")


def panel(job: Job, now: float, bar_width: int = _WIDE_BAR_WIDTH) -> RenderableType:
    """All details of one job.

    Args:
        job: The job as the API server returns it.
        now: Unix time in seconds.
        bar_width: Width of the progress bar in characters.
    """
    return details_grid(job, STYLES, _rows(job, now, bar_width), notable_conditions(job), now)


def details_grid(
    found: Mapping[str, Any],
    styles: Mapping[str, str],
    rows: Iterable[tuple[str, RenderableType]],
    conditions: Iterable[Mapping[str, Any]],
    now: float,
) -> Table:
    """Name, phase, rows and conditions of a job or service.

    Args:
        found: The object as the API server returns it.
        styles: Style of each phase.
        rows: Label and content; rows without content are left out.
        conditions: The conditions to show.
        now: Unix time in seconds.
    """
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    shown = phase(found)
    grid.add_row(Text(found["metadata"]["name"], style="bold not dim"), Text(shown, f"bold {styles.get(shown, '')}"))
    for label, content in rows:
        if content:
            grid.add_row(label, content)
    for heading, text in _condition_rows(conditions, now):
        grid.add_row(heading, text)
    return grid


def _condition_rows(conditions: Iterable[Mapping[str, Any]], now: float) -> Iterator[tuple[str, Text]]:
    """Heading and content of the row of each condition."""
    for found in conditions:
        since = unix_time(found.get("lastTransitionTime"))
        lasting = f" ({duration(max(0.0, now - since))})" if since is not None else ""
        style = "yellow" if is_problem(found) else ""
        yield condition_heading(found), Text(f"{reason_and_message(found)}{lasting}", style)


def _rows(job: Job, now: float, bar_width: int) -> Iterator[tuple[str, RenderableType]]:
    """Label and content of each row; content is empty if unknown."""
    status = status_of(job)
    checkpoint = status.get("lastCheckpoint")
    counts = {cause: count for cause, count in (status.get("restarts") or {}).items() if cause != "total"}
    yield "progress", _bar(status, bar_width)
    yield "", metrics_line(status, now)
    yield "evaluation", evaluation(status.get("evalLoss"), status.get("evalScores") or {})
    yield "best", _best(status.get("best"))
    yield "workers", status.get("workers") or ""
    yield "stragglers", ", ".join(_straggler(each) for each in status.get("stragglers") or ())
    yield "checkpoint", _checkpoint(checkpoint, now) if checkpoint else "none yet"
    yield "restarts", restarts(counts)
    yield "steps lost", str(status["stepsLost"]) if status.get("stepsLost") else ""
    yield "goodput", f"{status['goodput']:.0%}" if status.get("goodput") is not None else ""
    yield "GPU time", gpu_time(status)
    yield "cost", cost_line(status)
    yield from pool_rows(status, now)
    yield "generation", _generation(status)
    yield "model", status.get("output") or ""
    yield "age", age(job, now)


def _straggler(found: Mapping[str, Any]) -> str:
    return f"rank {found['rank']} on {found['node']} takes {found['ratio']:.2f} times as long as the median rank"


def _best(best: Mapping[str, Any] | None) -> str:
    return f"{best['metric']} {best['value']:.4g} after step {best['step']}" if best else ""


def metrics_line(status: Mapping[str, Any], now: float) -> str:
    """Loss, throughput and remaining time on one line, without unknown values."""
    rate, mfu = status.get("tokensPerSecond"), status.get("mfu")
    left = time_left(status, now)
    parts = [
        f"epoch {status['epoch']:.2f}" if status.get("epoch") is not None else "",
        f"loss {status['loss']:.4f}" if status.get("loss") is not None else "",
        f"{rate:,.0f} tokens/s" if rate is not None else "",
        f"MFU {mfu:.0%}" if mfu is not None else "",
        f"{left} left" if left else "",
    ]
    return ", ".join(part for part in parts if part)


def time_left(status: Mapping[str, Any], now: float) -> str:
    """Time until the expected end of training, for display; empty if unknown."""
    eta = unix_time(status.get("eta"))
    return duration(max(0.0, eta - now)) if eta is not None else ""


def _bar(status: Mapping[str, Any], width: int) -> RenderableType:
    step, total = status.get("step") or 0, status.get("totalSteps")
    if not total:
        return f"step {step}"
    line = Table.grid(padding=(0, 1))
    line.add_row(ProgressBar(total=total, completed=step, width=width), f"step {step}/{total}")
    return line


def _generation(status: Mapping[str, Any]) -> str:
    if not status.get("generation"):
        return ""
    step = status.get("resumedFromStep")
    return f"{status['generation']}, from step {step}" if step else str(status["generation"])


def _checkpoint(checkpoint: Mapping[str, Any], now: float) -> str:
    committed = unix_time(checkpoint.get("time"))
    age = f", {duration(max(0.0, now - committed))} ago" if committed is not None else ""
    return f"step {checkpoint['step']}{age}"


def gpu_time(status: Mapping[str, Any]) -> str:
    """GPU time by kind of node, for display; empty if there was none."""
    seconds = status.get("gpuSeconds") or {}
    kinds = {"on spot": seconds.get("spot") or 0, "on demand": seconds.get("onDemand") or 0}
    return ", ".join(f"{duration(value)} {kind}" for kind, value in kinds.items() if value)


def cost_line(status: Mapping[str, Any]) -> str:
    """Money spent and saved with its source, or why it is not known; empty before any worker ran."""
    cost = status.get("cost") or {}
    parts = []
    if cost.get("spent") is not None:
        parts.append(f"{cost['spent']:.2f} {cost['currency']} spent")
    if cost.get("saved") is not None:
        parts.append(f"{cost['saved']:.2f} {cost['currency']} saved against on demand")
    text = ", ".join(parts)
    origin = ", ".join(part for part in (cost.get("source"), cost.get("date")) if part)
    text += f" ({origin})" if text and origin else ""
    return "; ".join(part for part in (text, cost.get("unknown")) if part)


def pool_rows(status: Mapping[str, Any], now: float) -> Iterator[tuple[str, str]]:
    """A row for each pool: its workers, its price, and what it refused."""
    for index, pool in enumerate(status.get("pools") or ()):
        parts = [f"{pool['name']}: {pool.get('running') or 0} running"]
        if pool.get("pending"):
            parts.append(f"{pool['pending']} pending")
        if pool.get("price"):
            parts.append(f"{pool['price']} per node and hour")
        refused_at, retry_at = unix_time(pool.get("refusedAt")), unix_time(pool.get("retryAt"))
        if refused_at is not None:
            times = f"{pool.get('refusals') or 1} times, last " if (pool.get("refusals") or 1) > 1 else ""
            again = f", tried again in {duration(retry_at - now)}" if retry_at is not None and retry_at > now else ""
            parts.append(f"refused {times}{duration(max(0.0, now - refused_at))} ago{again}")
        yield "pools" if index == 0 else "", ", ".join(parts)


def age(job: Job, now: float) -> str:
    """Time since the creation of a job or service, for display."""
    created = unix_time(job["metadata"].get("creationTimestamp"))
    return duration(max(0.0, now - created)) if created is not None else "-"


def _number(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else "-"

"""The fields of a job for rows, a model and a machine. Pure functions: profiles in, choices out.

Those of the section `training` are in `hyperparameters`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from spotune.custom_resource.metadata import MAX_NAME_LENGTH
from spotune.errors import JobError
from spotune.plan.memory import GB
from spotune_trainer.cli.init.formats.profile import ColumnProfile
from spotune_trainer.cli.init.lengths import max_length, packed_length, percentile, rows_cut, tokens_of
from spotune_trainer.cli.init.profiles import Choice, DataProfile, MachineProfile, ModelProfile

RESERVED_COLUMNS: Final = frozenset(
    {
        *("input_ids", "labels", "lengths", "pair_lengths", "packed_pair_lengths", "text_lengths", "desirable"),
        *("completion", "text_label", "token_labels"),
    }
)
"""Names that shards use themselves, so that `dataset.keep` cannot carry columns of these names along."""
_MIN_ROWS_TO_HOLD_OUT: Final = 20
_EVALUATION_ROWS: Final = 1000
_NAMED_COLUMNS: Final = 20
_LONGER: Final = "prompt with its longer answer"
_LONGEST: Final = "row's longest text"
_FORMAT_FIELDS: Final = (
    *("prompt", "completion", "text", "messages", "tools", "chosen", "rejected", "label"),
    *("query", "positive", "negative"),
)
_LORA: Final = {"r": 16, "alpha": 32, "targetModules": "all-linear"}


def name_of(data: str, model: str) -> str:
    """A name for the job, from the file of the rows and the model."""
    stem = re.split(r"[.*?\[]", data.rstrip("/").rpartition("/")[2])[0]
    parts = [re.sub(r"[^a-z0-9]+", "-", part.lower()).strip("-") for part in (model.rstrip("/").split("/")[-1], stem)]
    return "-".join(filter(None, parts))[:MAX_NAME_LENGTH].strip("-") or "finetune"


def decide_model(model: ModelProfile, machine: MachineProfile) -> list[Choice]:
    """The choices of the section `model`."""
    weights = (
        "The weights are loaded."
        if model.has_weights
        else "The folder has no *.safetensors, so the model starts from random weights."
    )
    dtype, reason = _dtype(model, machine)
    return [
        Choice(
            "spec.model.source",
            model.source,
            f"{model.model_type}, {model.parameters:,} parameters. A relative path starts at this file's folder; on a "
            "cluster, at the root of the job's volume.",
        ),
        *([Choice("spec.model.tokenizer", model.tokenizer, "As asked (--tokenizer).")] if model.tokenizer else []),
        Choice(
            "spec.model.task",
            model.task,
            "Encoders keep the default." if model.is_encoder else "From the model's configuration.",
        ),
        Choice("spec.model.dtype", dtype, reason),
        Choice("spec.model.initialise", "pretrained" if model.has_weights else "random", weights),
    ]


def decide_adapter(model: ModelProfile, training: str) -> list[Choice]:
    """The choices of the section `adapter`.

    Args:
        model: The model.
        training: full, lora or qlora: see `fit.find_fit`.
    """
    if training == "full":
        return [Choice("spec.adapter", None, "adapter: none, because training of all weights fits into the memory.")]
    reason = (
        "Training of all weights does not fit into the memory, so adapters are trained beside frozen weights. r is "
        "their rank; alpha / r scales them."
    )
    found = [Choice("spec.adapter.lora", dict(_LORA), reason)]
    if training == "qlora":
        reason = "The frozen weights do not fit either, so they are stored in 4 bits (QLoRA)."
        found.append(Choice("spec.adapter.quantization", "nf4", reason))
    return found


def decide_dataset(data: DataProfile, model: ModelProfile, max_skipped: int) -> list[Choice]:
    """The choices of the section `dataset`."""
    lengths = list(_length_choices(data, model))
    return [
        Choice("spec.dataset.prepare.source", data.source, _rows_reason(data)),
        *([Choice("spec.dataset.prepare.config", data.config, "As asked (--config).")] if data.config else []),
        *([Choice("spec.dataset.prepare.split", data.split, "As asked (--split).")] if data.split else []),
        *_format_choices(data),
        *lengths,
        *_skipped_choices(_rows_left_out(data, lengths[0].value), max_skipped),
        _held_out(data, model),
        *_unused_columns(data),
    ]


def decide_workers(machine: MachineProfile, minimum: int) -> Iterator[Choice]:
    """The choices of the section `workers`.

    Args:
        machine: The workers.
        minimum: Fewest workers whose memory is enough.
    """
    if not machine.gpus:
        yield Choice("spec.workers.count", 1, "One process on the CPU: no GPU was found or asked for (--gpus).")
        yield Choice("spec.workers.gpus", 0)
        return
    size = f"{machine.memory_bytes / GB:,.1f} GB"
    yield Choice("spec.workers.count", machine.gpus, f"GPUs: {machine.gpus} ({machine.description}, {size}).")
    reason = "Training continues with so many while others are lost: the fewest that the model fits on."
    yield Choice("spec.workers.min", minimum, reason)
    yield Choice("spec.workers.gpus", 1, "One worker per GPU.")


def samples_of(data: DataProfile, model: ModelProfile) -> int:
    """Rows of the shards: fewer than of the input if text is packed."""
    if not data.format.is_plain_text:
        return data.rows
    mean = tokens_of(data.lengths) / data.measured_rows
    return max(math.ceil(mean * data.rows / packed_length(data.lengths, model.max_positions)), 1)


def held_out_rows(data: DataProfile, model: ModelProfile) -> int:
    """Rows that are held out for evaluation; 0 if there are too few."""
    samples = samples_of(data, model)
    return max(1, round(_fraction(samples) * samples)) if samples >= _MIN_ROWS_TO_HOLD_OUT else 0


def _dtype(model: ModelProfile, machine: MachineProfile) -> tuple[str, str]:
    if not machine.gpus:
        return "float32", "For a CPU; on GPUs use bfloat16, which halves the memory of weights and activations."
    if machine.bfloat16:
        return "bfloat16", "The optimizer keeps float32 weights. float32 needs more memory and time."
    if model.task == "seq2seq":
        return "float32", "These GPUs have no bfloat16, and float16 overflows in T5-style models."
    return "float16", "These GPUs have no bfloat16; on newer ones use bfloat16, which needs no loss scaling."


def _rows_reason(data: DataProfile) -> str:
    measured = "" if data.measured_rows == data.rows else f" of the first {data.measured_rows:,} (--rows)"
    reason = f"{data.rows:,} rows, columns {_names(data.columns)}{_scripts(data.columns)}. "
    if not data.duplicates:
        return (
            f"{reason}No row repeats the text of another one{measured and f' within the first {data.measured_rows:,}'}."
        )
    return (
        f"{reason}{data.duplicates:,} rows{measured} repeat the text of an earlier one: remove them, because copies of "
        "rows to train on can be among the rows held out for evaluation."
    )


def _scripts(columns: Sequence[ColumnProfile]) -> str:
    """The Unicode scripts of the columns with text. They hint at the language, and do not name it."""
    scripts = {column.name: column.script for column in columns[:_NAMED_COLUMNS] if column.script}
    if len(set(scripts.values())) == 1:
        return f"; letters are mostly of the script {next(iter(scripts.values()))}"
    each = ", ".join(f"{name} {script}" for name, script in scripts.items())
    return f"; scripts of most letters: {each}" if each else ""


def _format_choices(data: DataProfile) -> Iterator[Choice]:
    row_format, reason = data.format, data.format.reason
    for name in _FORMAT_FIELDS:
        value = getattr(row_format, name)
        if value:
            yield Choice(f"spec.dataset.{name}", value, reason)
            reason = ""
    if row_format.labels:
        reason = "All labels of the rows, in the order of the model's outputs."
        if row_format.labels == tuple(map(str, range(len(row_format.labels)))):
            reason += " Better write their names, in this order: rows may then have the numbers."
        yield Choice("spec.dataset.labels", list(row_format.labels), reason)


def _length_choices(data: DataProfile, model: ModelProfile) -> Iterator[Choice]:
    if data.format.is_plain_text:
        length = packed_length(data.lengths, model.max_positions)
        reason = f"{_lengths_text(data.lengths, 'text')}. They are packed into rows of this length, and none is cut."
        yield Choice("spec.dataset.maxLength", length, reason)
        yield Choice("spec.dataset.packing", True, "Several short texts share a row, and a long one is divided.")
        return
    what, more = _measured_text(data)
    limit = _limit("spec.dataset.maxLength", data.lengths, what, model.max_positions)
    yield replace(limit, reason=limit.reason + _left_out(data, limit.value) + more)
    if data.target_lengths is not None:
        yield _limit("spec.dataset.maxCompletionLength", data.target_lengths, "target", model.max_positions)


def _measured_text(data: DataProfile) -> tuple[str, str]:
    """What has the lengths of the rows, and a remark on the memory of rows with several texts."""
    if data.format.chosen:
        return _LONGER, " A pair has up to twice as many: spotune plan counts with both answers."
    if data.format.query:
        return _LONGEST, " Each text of a row may have as many: spotune plan counts with all of them."
    return ("row" if data.target_lengths is None else "input"), ""


def _limit(path: str, lengths: Mapping[int, int], what: str, largest: int | None) -> Choice:
    limit = max_length(lengths, largest)
    cut, rows = rows_cut(lengths, limit), sum(lengths.values())
    reason = f"{_lengths_text(lengths, what)}. {limit} cuts {cut:,} rows ({cut / rows:.1%})."
    if largest is not None and limit == largest and cut:
        reason += f" The model has positions for no more than {largest:,} tokens."
    return Choice(path, limit, reason)


def _left_out(data: DataProfile, limit: int) -> str:
    """A remark on rows whose prompt fills the maximum length; empty if there are none.

    Raises:
        JobError: These are all rows.
    """
    rows = _rows_left_out(data, limit)
    if rows and rows == data.measured_rows:
        raise JobError(
            f"no row has anything to learn within {limit:,} tokens, the most that the model has positions for: shorten "
            "the prompts, or name a model with more positions"
        )
    return f" {rows:,} rows are left out: their prompts fill it." if rows else ""


def _rows_left_out(data: DataProfile, limit: int) -> int:
    """Rows whose prompt fills the maximum length."""
    return sum(rows for length, rows in data.prompt_lengths.items() if length >= limit)


def _skipped_choices(rows: int, max_skipped: int) -> Iterator[Choice]:
    """How much may be left out: the rows whose prompts fill the maximum length, and what was asked for."""
    reasons = [f"{rows:,} rows have prompts that fill maxLength"] * bool(rows)
    reasons += [f"{max_skipped:,} rows or answers may be left out, as asked (--max-skipped)"] * bool(max_skipped)
    if reasons:
        yield Choice("spec.dataset.maxSkipped", rows + max_skipped, f"{'; '.join(reasons)}. More is refused.")


def _lengths_text(lengths: Mapping[int, int], what: str) -> str:
    """The distribution of lengths in one sentence, without its full stop."""
    half, most, nearly_all = (f"{percentile(lengths, share):,}" for share in (0.5, 0.9, 0.99))
    return (
        f"Tokens of a{'n' if what == 'input' else ''} {what}: half have at most {half}, 90 % at most {most}, 99 % at "
        f"most {nearly_all}, the longest has {max(lengths):,}"
    )


def _held_out(data: DataProfile, model: ModelProfile) -> Choice:
    held_out, samples = held_out_rows(data, model), samples_of(data, model)
    if not held_out:
        return Choice(
            "spec.dataset.eval", None, f"eval: {samples} rows are too few to hold some out. eval.source names shards."
        )
    return Choice(
        "spec.dataset.eval.fraction",
        _fraction(samples),
        f"About {held_out:,} rows are not trained on, but evaluated. For rows of your own set eval.source to shards "
        "of them (spotune shard).",
    )


def _names(columns: Sequence[ColumnProfile]) -> str:
    """The names of the first columns."""
    more = f" and {len(columns) - _NAMED_COLUMNS} more" if len(columns) > _NAMED_COLUMNS else ""
    return ", ".join(column.name for column in columns[:_NAMED_COLUMNS]) + more


def _fraction(samples: int) -> float:
    """5 %, or less of a large dataset: about 1,000 rows, rounded to one digit."""
    fraction = min(0.05, _EVALUATION_ROWS / samples)
    return float(f"{fraction:.1g}")


def _unused_columns(data: DataProfile) -> Iterator[Choice]:
    """A comment on columns that the row format does not use."""
    others = [column for column in data.columns if f"{{{column.name}}}" not in data.format.templates]
    if not others or data.format.is_plain_text:  # packed rows keep no columns
        return
    reason = f"keep: not used are {_names(others)}. keep carries columns into the shards."
    reserved = sorted(column.name for column in others if column.name in RESERVED_COLUMNS)
    if reserved:
        reason += f" It cannot carry {', '.join(reserved)}: shards use this name themselves."
    yield Choice("spec.dataset.keep", None, reason)

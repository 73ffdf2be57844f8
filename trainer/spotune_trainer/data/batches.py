"""Collation of tokenized rows into batches of padded tensors, and hashes that identify the rows trained on.

A row is one sample of a shard, with these columns:

- ``input_ids``: its tokens.
- ``labels``: for seq2seq models the target tokens. For causal models as long as ``input_ids``, with -100 where there is
  no loss; if absent, every token carries loss.
- ``lengths``: tokens of each document; only in packed rows.
- ``pair_lengths``: tokens of the two documents of a row: of the chosen and of the rejected one, or of a labelled
  answer's document and its mismatched one.
- ``packed_pair_lengths``: instead, in packed rows of pairs, tokens of the chosen and of the rejected document of each
  pair.
- ``text_lengths``: tokens of each text of a row with embeddings: query, positive and, if any, negative.
- ``desirable``: whether a labelled answer is desirable, 1 or 0.
- ``text_label``: instead of labels, the position of the text's label in ``dataset.labels``.
- ``token_labels``: instead of labels, these positions as long as ``input_ids``, with -100 where there is no loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import xxhash

Task = Literal["causal", "seq2seq"]
Row = Mapping[str, Any]

NO_LOSS = -100  # the label that PyTorch's cross-entropy ignores

Tokens = npt.NDArray[np.int64]

_DOCUMENT_LENGTHS = ("pair_lengths", "packed_pair_lengths", "lengths")  # columns of rows with several documents


@dataclasses.dataclass(frozen=True)
class StepFeatures:
    """What an objective found out about all samples of a step.

    Attributes:
        values: ``[samples, features]``, fp32, in the order of the step's samples.
        first: Position in the step of the first sample of the batch.
    """

    values: torch.Tensor
    first: int


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of a batch, in the order of its rows. A packed row has several.

    Attributes:
        rows: Row of each pair, ascending, ``[pairs]``.
        starts: Position in its row of the first token of the chosen and of the rejected document, ``[pairs, 2]``.
        lengths: Tokens of these documents, ``[pairs, 2]``.
        longest: Tokens of the longest document.
    """

    rows: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    longest: int

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.rows)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows as padded tensors, ready for the model.

    Attributes:
        sample_ids: ``[batch]``.
        input_ids: ``[batch, sequence]``, padded on the right.
        labels: Causal ``[batch, sequence]``, seq2seq ``[batch, target sequence]``; -100 where there is no loss. Labels
            of texts ``[batch, 1]``, of words ``[batch, sequence]``.
        attention_mask: ``[batch, sequence]``, 1 on tokens, 0 on padding. ``None`` if not needed: without padding, and
            for causal language models, whose tokens do not attend to padding on their right.
        position_ids: ``[batch, sequence]``, from 0 in each packed document; ``None`` if rows are not packed.
        cu_seq_lens: Cumulative lengths of the packed documents over the flattened batch, int32, as FlashAttention's
            variable-length kernels take them: 0, then the offset after each document. Padding at the end of a row
            counts as one more document. Empty documents extend it to a power of two. ``None`` if rows are not packed.
        pairs: Where the pairs are in the rows; ``None`` if rows have no pairs.
        reference_log_probs: Log-probabilities of answers by the reference model, fp32: of both answers of each pair,
            ``[pairs, 2]``, or of the answer and the mismatched one of each row, ``[batch, 2]``; ``None`` if the
            objective has no reference model.
        desirable: Whether each answer is desirable, ``[batch]``, bool; ``None`` if answers have no label.
        mismatched: Of labelled answers, each prompt with the answer of another row; ``None`` for other rows. The other
            fields are those of the labelled answers, except ``tokens``, which counts both.
        texts: Texts of each sample, each in a row of its own: those of all samples, then all second ones, and so on.
            1 except for embeddings; ``sample_ids`` are shorter than the other fields by this factor.
        step_features: What the objective needs to know of all samples of the step; ``None`` if nothing.
        input_lengths: Tokens of each row without padding, ``[batch]``.
        label_lengths: Labels of each row without padding, ``[batch]``.
        loss_tokens: Number of labels that carry loss. For causal language models counted after the shift by one: the
            first token of a row is not predicted.
        tokens: All tokens that go through the model: the tokens of ``input_ids``, plus, for seq2seq models, the
            decoder's input tokens (as many as labels). Padding is not counted.
    """

    sample_ids: npt.NDArray[np.int64]
    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    cu_seq_lens: torch.Tensor | None
    input_lengths: npt.NDArray[np.int64]
    label_lengths: npt.NDArray[np.int64]
    loss_tokens: int
    tokens: int
    pairs: Pairs | None = None
    reference_log_probs: torch.Tensor | None = None
    desirable: torch.Tensor | None = None
    mismatched: Batch | None = None
    texts: int = 1
    step_features: StepFeatures | None = None

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for the model's ``forward``, with labels."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "labels": self.labels}
        if self.attention_mask is not None:
            inputs["attention_mask"] = self.attention_mask
        if self.position_ids is not None:
            # transformers separates packed documents by their position ids, but only without a mask and a cache.
            inputs |= {"position_ids": self.position_ids, "use_cache": False}
        return inputs

    def to(self, device: torch.device | str) -> Batch:
        """A copy with all tensors on the device."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> Batch:
        """A copy in page-locked memory, from which `to` copies asynchronously."""
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return dataclasses.replace(
            self,
            mismatched=self.mismatched._with_tensors(change) if self.mismatched is not None else None,
            pairs=dataclasses.replace(self.pairs, **_changed(self.pairs, change)) if self.pairs is not None else None,
            **_changed(self, change),
        )

    def row_hashes(self) -> list[int]:
        """A 64-bit hash of each row, computed from the tensors; equal to ``row_hash`` of the stored row.

        Call it before `to`: tensors on a GPU would be copied back to the host.
        """
        count = len(self.sample_ids)
        rows = self._rows()
        documents = [rows[start : start + count] for start in range(0, len(rows), count)]
        if self.mismatched is not None:
            documents.append(self.mismatched._rows())
        return [
            _hash(int(sample_id), *map(np.concatenate, zip(*of_sample, strict=True)))
            for sample_id, *of_sample in zip(self.sample_ids, *documents, strict=True)
        ]

    def document_lengths(self) -> Tokens:
        """Tokens of each document, without padding, ``[documents]``; like `row_hashes` before `to`."""
        if self.cu_seq_lens is None:
            return self.input_lengths
        width = self.input_ids.shape[1]
        offsets: Tokens = self.cu_seq_lens.numpy().astype(np.int64)
        starts, lengths = offsets[:-1], np.diff(offsets)
        rows, columns = np.divmod(np.minimum(starts, len(self.input_lengths) * width - 1), width)
        documents: Tokens = lengths[(lengths > 0) & (columns < self.input_lengths[rows])]
        return documents

    def _rows(self) -> list[tuple[Tokens, Tokens]]:
        """Input ids and labels of each row, without padding."""
        inputs, labels = self.input_ids.cpu().numpy(), self.labels.cpu().numpy()
        return [(inputs[i, : self.input_lengths[i]], labels[i, : self.label_lengths[i]]) for i in range(len(inputs))]


def collate(
    rows: Sequence[Row],
    task: Task,
    pad_token_id: int,
    sample_ids: npt.ArrayLike | None = None,
    *,
    pad_to_multiple_of: int = 1,
    reference_log_probs: npt.NDArray[np.float32] | None = None,
) -> Batch:
    """One batch of rows, padded on the right.

    Args:
        rows: At least one row.
        task: ``causal`` (a label per input token) or ``seq2seq`` (labels are a separate sequence).
        pad_token_id: Padding of ``input_ids``. Labels are padded with -100.
        sample_ids: Ids of the rows; by default their positions in ``rows``.
        pad_to_multiple_of: Sequence lengths are rounded up to a multiple of this.
        reference_log_probs: Of both answers of each pair, ``[pairs, 2]``, or of the two documents of each labelled
            answer, ``[rows, 2]``.
    """
    if "text_lengths" in rows[0]:
        texts = len(rows[0]["text_lengths"])
        rows_of_texts = [_document(row, index) for index in range(texts) for row in rows]
        batch = collate(rows_of_texts, task, pad_token_id, pad_to_multiple_of=pad_to_multiple_of)
        return _with_texts(batch, texts, np.arange(len(rows)) if sample_ids is None else sample_ids)
    if "desirable" in rows[0]:
        own, mismatched = (
            collate(
                [_document(row, index) for row in rows],
                task,
                pad_token_id,
                sample_ids,
                pad_to_multiple_of=pad_to_multiple_of,
            )
            for index in (0, 1)
        )
        return dataclasses.replace(
            own,
            tokens=own.tokens + mismatched.tokens,
            desirable=torch.tensor([bool(row["desirable"]) for row in rows]),
            mismatched=mismatched,
            reference_log_probs=None if reference_log_probs is None else torch.from_numpy(reference_log_probs),
        )
    inputs = [np.asarray(row["input_ids"], dtype=np.int64) for row in rows]
    labels = [row_labels(row) for row in rows]
    input_ids, input_lengths = _pad(inputs, pad_token_id, pad_to_multiple_of)
    padded_labels, label_lengths = _pad(labels, NO_LOSS, pad_to_multiple_of)
    several = any(name in row for row in rows for name in _DOCUMENT_LENGTHS)
    documents = _document_lengths(rows, input_ids.shape[1]) if several else None
    # Without a mask, attention can use its fastest kernel, and the model need not check on the GPU for padding.
    labelled = has_labels(rows[0])  # and a model may be bidirectional
    masked = (task == "seq2seq" or labelled) and int(input_lengths.min()) < input_ids.shape[1]
    mask = np.arange(input_ids.shape[1]) < input_lengths[:, None]
    if "text_label" in rows[0]:
        padded_labels = padded_labels[:, :1]
    counted = padded_labels[:, 1:] if task == "causal" and not labelled else padded_labels
    return Batch(
        sample_ids=np.arange(len(rows)) if sample_ids is None else np.asarray(sample_ids, dtype=np.int64),
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(padded_labels),
        attention_mask=torch.from_numpy(mask.astype(np.int64)) if masked else None,
        position_ids=None if documents is None else torch.from_numpy(_position_ids(documents)),
        cu_seq_lens=None if documents is None else torch.from_numpy(_cumulative_lengths(documents)),
        input_lengths=input_lengths,
        label_lengths=label_lengths,
        loss_tokens=int((counted != NO_LOSS).sum()),
        tokens=int(input_lengths.sum() + (label_lengths.sum() if task == "seq2seq" else 0)),
        pairs=_pairs(rows) if has_pairs(rows[0]) else None,
        reference_log_probs=None if reference_log_probs is None else torch.from_numpy(reference_log_probs),
    )


def has_pairs(columns: Container[str]) -> bool:
    """Whether rows with these columns have pairs of answers."""
    return ("pair_lengths" in columns and "desirable" not in columns) or "packed_pair_lengths" in columns


def has_labels(columns: Container[str]) -> bool:
    """Whether rows with these columns have labels of texts or of words, for a classifier."""
    return "text_label" in columns or "token_labels" in columns


def row_labels(row: Row) -> Tokens:
    """Labels of a row, ``[labels]``: the stored ones, else the input ids.

    In packed rows the first label of each document is -100.
    """
    if has_labels(row):
        return np.array(row["token_labels"] if "token_labels" in row else [row["text_label"]], dtype=np.int64)
    labels = np.array(row.get("labels", row["input_ids"]), dtype=np.int64)
    if "lengths" in row:
        # Otherwise it would be predicted from the last token of the previous document.
        labels[document_starts(row["lengths"])] = NO_LOSS
    return labels


def row_hash(sample_id: int, row: Row) -> int:
    """64-bit hash (XXH3) of a row's sample id, input ids and labels."""
    return _hash(sample_id, np.asarray(row["input_ids"]), row_labels(row))


def combine_hashes(hashes: Sequence[int]) -> int:
    """One 64-bit hash of many rows: the sum modulo 2**64.

    It does not depend on the order of the rows, but changes if a row is missing or repeated.
    """
    return sum(hashes) % (1 << 64)


def document_starts(lengths: npt.NDArray[np.integer[Any]]) -> Tokens:
    """Offset of each document in a packed row, ``[documents]``, from the documents' lengths."""
    return np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64)))


def _changed(record: Batch | Pairs, change: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
    """The tensors of a batch, or of its pairs, each changed."""
    return {name: change(value) for name, value in vars(record).items() if isinstance(value, torch.Tensor)}


def _with_texts(batch: Batch, texts: int, sample_ids: npt.ArrayLike) -> Batch:
    """A batch of texts as one of samples, with a mask: an encoder would see the padding."""
    mask = np.arange(batch.input_ids.shape[1]) < batch.input_lengths[:, None]
    return dataclasses.replace(
        batch,
        sample_ids=np.asarray(sample_ids, dtype=np.int64),
        texts=texts,
        attention_mask=torch.from_numpy(mask.astype(np.int64)),
    )


def _document(row: Row, index: int) -> Row:
    """One of the documents of a row, as a row of its own."""
    lengths = row.get("pair_lengths", row.get("text_lengths"))
    start = int(lengths[:index].sum())
    part = slice(start, start + int(lengths[index]))
    return {name: row[name][part] for name in ("input_ids", "labels") if name in row}


def _hash(sample_id: int, input_ids: npt.NDArray[Any], labels: npt.NDArray[Any]) -> int:
    digest = xxhash.xxh3_64(sample_id.to_bytes(8, "little"))
    digest.update(len(input_ids).to_bytes(8, "little"))
    digest.update(input_ids.astype("<i4").tobytes())
    digest.update(labels.astype("<i4").tobytes())
    return digest.intdigest()


def _pad(sequences: Sequence[Tokens], fill: int, pad_to_multiple_of: int) -> tuple[Tokens, Tokens]:
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    width = -(-int(lengths.max()) // pad_to_multiple_of) * pad_to_multiple_of
    padded = np.full((len(sequences), width), fill, dtype=np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    return padded, lengths


def _document_lengths(rows: Sequence[Row], width: int) -> list[list[int]]:
    """Tokens of each document of each row; a row's padding counts as one more document, without loss."""
    documents = []
    for row in rows:
        tokens = len(row["input_ids"])
        lengths = next((row[name] for name in _DOCUMENT_LENGTHS if name in row), [tokens])
        documents.append([*map(int, lengths), width - tokens])
    return documents


def _pairs(rows: Sequence[Row]) -> Pairs:
    """Where the pairs are in rows that have one or several each."""
    of_rows = [np.asarray(row.get("pair_lengths", row.get("packed_pair_lengths"))) for row in rows]
    lengths = torch.from_numpy(np.concatenate(of_rows).astype(np.int64)).view(-1, 2)
    starts = torch.from_numpy(np.concatenate([document_starts(of_row) for of_row in of_rows])).view(-1, 2)
    counts = torch.tensor([len(of_row) // 2 for of_row in of_rows])
    return Pairs(torch.arange(len(rows)).repeat_interleave(counts), starts, lengths, int(lengths.max()))


def _position_ids(documents: Sequence[Sequence[int]]) -> Tokens:
    """Positions that restart at 0 in every document, ``[rows, width]``."""
    return np.stack([np.concatenate([np.arange(length) for length in row]) for row in documents])


def _cumulative_lengths(documents: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Cumulative lengths of all documents, from 0, padded with the total to a power of two.

    The padding limits the number of different shapes, because compiled code is compiled again for each shape.
    """
    stops = np.cumsum([length for row in documents for length in row], dtype=np.int32)
    cumulative = np.full(1 << len(stops).bit_length(), stops[-1], dtype=np.int32)
    cumulative[0] = 0
    cumulative[1 : len(stops) + 1] = stops
    return cumulative

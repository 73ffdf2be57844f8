"""Tokenised rows, and the tensors that are made of them.

A row is what a shard holds for one sample: ``input_ids``, for sequence-to-sequence models ``labels``, for causal models
``labels`` with -100 where no loss is wanted (absent: the loss is on everything), and for packed rows the ``lengths`` of
the documents within it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import xxhash

Task = Literal["causal", "seq2seq"]
Row = Mapping[str, Any]

NO_LOSS = -100  # the label that PyTorch's cross-entropy ignores

Tokens = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows as padded tensors, ready for the model.

    Attributes:
        sample_ids: Which samples these are, ``[batch]``.
        input_ids: ``[batch, sequence]``, padded on the right.
        labels: Causal ``[batch, sequence]``, seq2seq ``[batch, target sequence]``; -100 where there is no loss.
        attention_mask: ``[batch, sequence]``, 1 on tokens; ``None`` where nobody needs one: for causal models, whose
            tokens do not see the padding on their right, and where there is no padding.
        position_ids: ``[batch, sequence]``, counting from 0 in each packed document; ``None`` when rows are not packed.
        document_starts: Where each packed document begins in the rows, one after the other, and where the last ends;
            int32, its length a power of two, to which documents without tokens fill it up; ``None`` as above.
        input_lengths: Tokens of each row without padding, ``[batch]``.
        label_lengths: Labels of each row without padding, ``[batch]``.
        tokens: Labels that carry loss, counted after the shift of causal models (which have nothing to predict the
            first token of a document from).
    """

    sample_ids: npt.NDArray[np.int64]
    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    document_starts: torch.Tensor | None
    input_lengths: npt.NDArray[np.int64]
    label_lengths: npt.NDArray[np.int64]
    tokens: int

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model's ``forward``, labels included."""
        inputs: dict[str, Any] = {"input_ids": self.input_ids, "labels": self.labels}
        if self.attention_mask is not None:
            inputs["attention_mask"] = self.attention_mask
        if self.position_ids is not None:
            # Transformers keeps packed documents apart by their position ids, but only without a mask or a cache.
            inputs |= {"position_ids": self.position_ids, "use_cache": False}
        return inputs

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on a device."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> Batch:
        """The same batch in page-locked memory, from which copies to a device do not wait for it."""
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return dataclasses.replace(
            self,
            input_ids=change(self.input_ids),
            labels=change(self.labels),
            attention_mask=None if self.attention_mask is None else change(self.attention_mask),
            position_ids=None if self.position_ids is None else change(self.position_ids),
            document_starts=None if self.document_starts is None else change(self.document_starts),
        )

    def row_hashes(self) -> list[int]:
        """A 64-bit hash of each row, computed from the tensors themselves; equals ``row_hash`` of the stored row.

        On an accelerator this copies the tensors back: call it before ``to``.
        """
        inputs, labels = self.input_ids.cpu().numpy(), self.labels.cpu().numpy()
        return [
            _hash(int(sample_id), inputs[i, : self.input_lengths[i]], labels[i, : self.label_lengths[i]])
            for i, sample_id in enumerate(self.sample_ids)
        ]


def collate(
    rows: Sequence[Row],
    task: Task,
    pad_token_id: int,
    sample_ids: npt.ArrayLike | None = None,
    *,
    width_multiple: int = 1,
) -> Batch:
    """Pad rows on the right into one batch.

    Args:
        rows: At least one row.
        task: ``causal`` (labels lie under the inputs) or ``seq2seq`` (labels are a sequence of their own).
        pad_token_id: Fills ``input_ids``.
        sample_ids: Ids of the rows; by default their position in ``rows``.
        width_multiple: Padded widths are a multiple of it.
    """
    inputs = [np.asarray(row["input_ids"], dtype=np.int64) for row in rows]
    labels = [row_labels(row) for row in rows]
    input_ids, input_lengths = _pad(inputs, pad_token_id, width_multiple)
    padded_labels, label_lengths = _pad(labels, NO_LOSS, width_multiple)
    documents = _documents(rows, input_ids.shape[1]) if any("lengths" in row for row in rows) else None
    # Without a mask attention may take its fastest kernel, and nobody asks the device whether there is padding.
    masked = task == "seq2seq" and int(input_lengths.min()) < input_ids.shape[1]
    mask = np.arange(input_ids.shape[1]) < input_lengths[:, None]
    counted = padded_labels[:, 1:] if task == "causal" else padded_labels
    return Batch(
        sample_ids=np.arange(len(rows)) if sample_ids is None else np.asarray(sample_ids, dtype=np.int64),
        input_ids=torch.from_numpy(input_ids),
        labels=torch.from_numpy(padded_labels),
        attention_mask=torch.from_numpy(mask.astype(np.int64)) if masked else None,
        position_ids=None if documents is None else torch.from_numpy(_position_ids(documents)),
        document_starts=None if documents is None else torch.from_numpy(_cumulative(documents)),
        input_lengths=input_lengths,
        label_lengths=label_lengths,
        tokens=int((counted != NO_LOSS).sum()),
    )


def row_labels(row: Row) -> Tokens:
    """Labels of a row, ``[labels]``: stored ones, or the inputs with the first token of each packed document masked."""
    labels = np.array(row.get("labels", row["input_ids"]), dtype=np.int64)
    if "lengths" in row:
        # A document's first token would otherwise be predicted from the end of the document before it.
        labels[document_starts(row["lengths"])] = NO_LOSS
    return labels


def row_hash(sample_id: int, row: Row) -> int:
    """64-bit hash over the sample id and the tokens and labels that the row trains on."""
    return _hash(sample_id, np.asarray(row["input_ids"]), row_labels(row))


def combine_hashes(hashes: Sequence[int]) -> int:
    """One 64-bit hash of many rows, whatever their order; a row that comes twice or not at all changes it."""
    return sum(hashes) % (1 << 64)


def document_starts(lengths: npt.NDArray[np.integer[Any]]) -> Tokens:
    """Offset of each document in a packed row, given the documents' lengths."""
    return np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64)))


def _hash(sample_id: int, input_ids: npt.NDArray[Any], labels: npt.NDArray[Any]) -> int:
    digest = xxhash.xxh3_64(sample_id.to_bytes(8, "little"))
    digest.update(len(input_ids).to_bytes(8, "little"))
    digest.update(input_ids.astype("<i4").tobytes())
    digest.update(labels.astype("<i4").tobytes())
    return digest.intdigest()


def _pad(sequences: Sequence[Tokens], fill: int, width_multiple: int) -> tuple[Tokens, Tokens]:
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
    width = -(-int(lengths.max()) // width_multiple) * width_multiple
    padded = np.full((len(sequences), width), fill, dtype=np.int64)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    return padded, lengths


def _documents(rows: Sequence[Row], width: int) -> list[list[int]]:
    """Tokens of each document of each row; the padding counts as one more, which has no loss."""
    documents = []
    for row in rows:
        tokens = len(row["input_ids"])
        documents.append([*map(int, row.get("lengths", [tokens])), width - tokens])
    return documents


def _position_ids(documents: Sequence[Sequence[int]]) -> Tokens:
    """Positions that restart in every document, ``[rows, width]``."""
    return np.stack([np.concatenate([np.arange(length) for length in row]) for row in documents])


def _cumulative(documents: Sequence[Sequence[int]]) -> npt.NDArray[np.int32]:
    """Starts of all documents and the end, of few different shapes: what is compiled is compiled for each."""
    ends = np.cumsum([length for row in documents for length in row], dtype=np.int32)
    starts = np.full(1 << len(ends).bit_length(), ends[-1], dtype=np.int32)
    starts[0] = 0
    starts[1 : len(ends) + 1] = ends
    return starts

"""Labels by an exported classifier, of texts or of words, with the tokens of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from spotune.errors import UsageError
from spotune.prompting.export_manifest import ExportManifest, find_export
from spotune.prompting.template import fill_prompt
from spotune_trainer.data.labels.encoding import tokenize_texts, tokenize_word_list
from spotune_trainer.models.pretrained import load_exported

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BATCH_SIZE: Final = 8


@dataclass(frozen=True)
class Label:
    """The label of a text or of a word.

    Attributes:
        text: what the label is of.
        label: its name.
        score: its probability, 0 to 1.
    """

    text: str
    label: str
    score: float


@dataclass(frozen=True)
class Classifier:
    """An exported classifier."""

    manifest: ExportManifest
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, directory: Path) -> Classifier:
        """Load the classifier of an export directory or a job directory, onto the GPU if there is one.

        Raises:
            UsageError: the directory has no exported model.
            JobError: the export cannot be loaded.
        """
        export = find_export(directory)
        manifest = ExportManifest.read(export)
        assert manifest.classifies
        model, tokenizer = load_exported(export, manifest.task)
        module: torch.nn.Module = model
        module.to("cuda" if torch.cuda.is_available() else "cpu")
        return cls(manifest, model, tokenizer)

    @property
    def label_names(self) -> list[str]:
        """Names of the labels, in the order of the model's outputs."""
        config: Any = self.model.config
        return [config.id2label[position] for position in range(config.num_labels)]

    @property
    def labels_each_word(self) -> bool:
        """Whether each word gets a label, and not the whole text."""
        return self.manifest.task == "tokenClassification"

    def text(self, question: str, fields: Mapping[str, Any]) -> str:
        """The text to classify, rendered as in training; words are joined by spaces.

        Args:
            question: plain text; empty if the fields are complete.
            fields: values of the columns of `dataset.text`.

        Raises:
            UsageError: the fields do not match the columns, or the text is empty.
        """
        template = self.manifest.text
        template = template if "{" in template or not template else f"{{{template}}}"
        if template:
            values = {
                name: " ".join(map(str, each)) if isinstance(each, list) else each for name, each in fields.items()
            }
            text = fill_prompt(template, question, values)
        elif fields:
            raise UsageError("this model was trained without a template of its texts: pass plain text without fields.")
        else:
            text = question
        if not text.strip():
            raise UsageError("the text is empty: pass a text.")
        return text

    def classify(self, texts: Sequence[str]) -> Iterator[list[Label]]:
        """The label of each text, or the labels of its words, in the order of the texts.

        Words that lie beyond the maximum length have none.

        Args:
            texts: results of `text`.
        """
        for start in range(0, len(texts), _BATCH_SIZE):
            batch = texts[start : start + _BATCH_SIZE]
            yield from self._word_labels(batch) if self.labels_each_word else self._text_labels(batch)

    def _text_labels(self, texts: Sequence[str]) -> Iterator[list[Label]]:
        encoded = tokenize_texts(self.tokenizer, texts, self.manifest.max_length)
        for text, row in zip(texts, self._probabilities([each.input_ids for each in encoded]), strict=True):
            yield [self._best(text, row)]

    def _word_labels(self, texts: Sequence[str]) -> Iterator[list[Label]]:
        divided = [text.split() for text in texts]
        encoded = [tokenize_word_list(self.tokenizer, each, self.manifest.max_length) for each in divided]
        probabilities = self._probabilities([each.input_ids for each in encoded])
        for word_list, each, row in zip(divided, encoded, probabilities, strict=True):
            yield [self._best(word_list[word], row[token]) for word, token in each.first_tokens.items()]

    def _probabilities(self, encoded: Sequence[list[int]]) -> torch.Tensor:
        """Probabilities of labels, on the CPU: of texts ``[texts, labels]``, of tokens ``[texts, tokens, labels]``."""
        batch = self.tokenizer.pad({"input_ids": list(encoded)}, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            inputs = {name: batch[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
            logits: torch.Tensor = self.model(**inputs).logits
        return logits.float().softmax(-1).cpu()

    def _best(self, text: str, probabilities: torch.Tensor) -> Label:
        position = int(probabilities.argmax())
        return Label(text, self.label_names[position], float(probabilities[position]))

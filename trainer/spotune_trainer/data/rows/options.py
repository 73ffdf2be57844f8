"""How raw rows become text and tokens: the columns, templates and limits of ``spec.dataset``."""

from __future__ import annotations

from dataclasses import dataclass

from spotune_trainer.data.batches import Task
from spotune_trainer.data.chat.renderer import TrainOn

_RESERVED = frozenset(
    {
        "input_ids",
        "labels",
        "lengths",
        "pair_lengths",
        "packed_pair_lengths",
        "text_lengths",
        "text_label",
        "token_labels",
        "desirable",
        "completion",
    }
)


@dataclass(frozen=True)
class TextOptions:
    """How rows become text and tokens. The fields are those of ``spec.dataset`` in a job.

    Exactly one of ``completion`` (with ``prompt``), ``text``, ``messages``, ``chosen`` and ``query`` is set. The field
    names are written to a dataset's manifest and are part of the key that identifies it.

    Attributes:
        task: ``causal`` or ``seq2seq``.
        prompt: Template of the prompt.
        completion: Template of the expected answer.
        text: Column, or template, of plain text.
        messages: Column with chat messages.
        tools: Column with the tools that a chat, or a pair of chats, may call.
        chosen: Template of the preferred answer of a pair; without a prompt, a column with a chat that ends with it.
        rejected: Template of the other answer of a pair, in the same form.
        label: Column with the label of a row, in braces. With ``text``, that of the text; all labels are in ``labels``.
            With ``prompt`` and ``completion``, or ``messages``, whether the answer is desirable.
        labels: Names of all labels of texts or words.
        label_each_word: Whether ``text`` is a column with a list of words, and ``label`` one with the label of each.
        query: Template of the text that an embedding brings near to ``positive``.
        positive: Template of the other text.
        negative: Template of a text that is not near to ``query``; may be empty.
        train_on: Which text of a chat carries loss.
        train_trailing_whitespace: Whether whitespace after the token that ends a turn carries loss.
        keep: Columns that are copied into the shards as text.
        max_length: Maximum tokens per row; for seq2seq, of the input.
        max_completion_length: Maximum tokens of a seq2seq target; 0 means ``max_length``.
        packing: Put several documents, or pairs, into one row. Long plain text is then split over rows instead of
            truncated.

    Raises:
        ValueError: The options contradict each other.
    """

    task: Task
    prompt: str = ""
    completion: str = ""
    text: str = ""
    messages: str = ""
    keep: tuple[str, ...] = ()
    max_length: int = 512
    max_completion_length: int = 0
    packing: bool = False
    tools: str = ""
    train_on: TrainOn = "assistant"
    train_trailing_whitespace: bool = False
    chosen: str = ""
    rejected: str = ""
    label: str = ""
    labels: tuple[str, ...] = ()
    label_each_word: bool = False
    query: str = ""
    positive: str = ""
    negative: str = ""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.completion, self.text, self.messages, self.chosen, self.query))) != 1:
            raise ValueError(
                "give exactly one of prompt with completion, text, messages, chosen with rejected, query with positive"
            )
        if self.several_documents and self.task == "seq2seq":
            raise ValueError(f"{self.several_documents} are not for seq2seq models")
        if self.label:
            self._check_label()
        if self.task == "seq2seq" and self.text:
            raise ValueError("a seq2seq model needs prompt and completion; plain text is for causal models")
        if self.task == "seq2seq" and self.messages:
            raise ValueError("chats are for causal models: write the messages before an answer into prompt")
        if self.tools and not self.is_chat:
            raise ValueError(
                "tools is for chats: set messages, or chosen and rejected as columns with chats, or remove it"
            )
        if not self.messages and (self.train_on != "assistant" or self.train_trailing_whitespace):
            raise ValueError("trainOn and trainTrailingWhitespace are for chats: set messages, or remove them")
        taken = _RESERVED.intersection(self.keep)
        if taken:
            raise ValueError(f"a kept column cannot be called {min(taken)!r}: the shards already use that name")
        if self.packing:
            self._check_packing()

    def _check_packing(self) -> None:
        if self.task == "seq2seq":
            raise ValueError("packing is for causal models: the encoder of a seq2seq model would mix the documents")
        if self.several_documents and not self.chosen:
            raise ValueError(f"{self.several_documents} cannot be packed")
        if self.keep:
            raise ValueError(
                "a packed row holds several documents and cannot keep columns of each; remove either keep or packing"
            )

    def _check_label(self) -> None:
        if self.has_labelled_answers:
            return
        if not self.text or not self.labels:
            raise ValueError("a label needs the text that it is of, and the names of all labels: set text and labels")
        if self.task == "seq2seq" or self.packing:
            raise ValueError("labels are for encoders and causal models, whose rows cannot be packed")

    @property
    def has_labels(self) -> bool:
        """Whether labels of tokens are stored. Texts alone need none: all tokens of plain text carry loss."""
        return not (self.text or self.query)

    @property
    def row_length(self) -> int:
        """Maximum tokens of a packed row; both documents of a pair have up to ``max_length``."""
        return 2 * self.max_length if self.chosen else self.max_length

    @property
    def several_documents(self) -> str:
        """What the documents of a row are if it has several; empty otherwise."""
        if self.has_labelled_answers:
            return "answers with a label"
        return "pairs of chosen and rejected answers" if self.chosen else "texts with embeddings" if self.query else ""

    @property
    def has_labelled_answers(self) -> bool:
        """Whether rows are answers with a label, for KTO."""
        return bool(self.label and (self.completion or self.messages))

    @property
    def has_labelled_texts(self) -> bool:
        """Whether rows are texts with a label, or words with one each, for a classifier."""
        return bool(self.label and self.text)

    @property
    def is_chat(self) -> bool:
        """Whether rows are chats, or pairs of chats, which the tokenizer's chat template renders."""
        return bool(self.messages or (self.chosen and not self.prompt))

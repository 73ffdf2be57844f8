"""What the gateway knows of a model: names, prompts and tokens. Weights belong to the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from spotune.errors import JobError, UsageError
from spotune.prompting.content import joined_content, render_content, rendering_errors
from spotune.prompting.encoding import encode_for_inference, encode_prompts
from spotune.prompting.export_manifest import MANIFEST, ExportManifest, find_export
from spotune.prompting.template import RowError, Template
from spotune_serve.protocol.errors import ApiError, context_length_error

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Value = TypeVar("Value")

_RENDERING_ERRORS = rendering_errors()
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_DEFAULT_LENGTH = 4096
"""Maximum length for models with relative positions, such as T5, and no other limit."""
_DEFAULT_NEW_TOKENS = 256
_MAX_PLAUSIBLE_LENGTH = 10_000_000
"""Tokenizers without a limit have 1e30 as `model_max_length`."""
_TEXT_FIELD = "prompt"
"""The field of a row for models without a template."""


@dataclass(frozen=True)
class ServedModel:
    """A model as the gateway knows it.

    Attributes:
        name: its id in the API.
        manifest: how to prompt it; for models that spotune did not export, one without a template.
        tokenizer: the model's tokenizer.
        max_sequence_length: maximum tokens of a sequence; for encoder-decoder models, of the decoder's sequence.
        adapters: names of the LoRA adapters, which are model ids as well.
        eos_token_ids: tokens that end an answer. They are not part of its text.
    """

    name: str
    manifest: ExportManifest
    tokenizer: PreTrainedTokenizerBase
    max_sequence_length: int
    adapters: tuple[str, ...]
    eos_token_ids: frozenset[int]

    @classmethod
    def load(cls, directory: Path, name: str = "", adapters: Mapping[str, Path] = {}) -> ServedModel:
        """Read tokenizer, configuration and manifest of an export directory or any transformers folder.

        Args:
            directory: a folder with `config.json`, or a job directory with an export.
            name: id in the API; empty: the job's name, or the folder's.
            adapters: folders of LoRA adapters by name.

        Raises:
            UsageError: there is no such model or adapter, or two have the same name.
            JobError: configuration, tokenizer or manifest cannot be read, or the model is a reward model.
        """
        export = directory if (directory / "config.json").is_file() else find_export(directory)
        config, tokenizer = _load_config_and_tokenizer(export)
        if (export / MANIFEST).is_file():
            manifest = ExportManifest.read(export)
            manifest.check_generates(export)
        else:
            manifest = _manifest_of_folder(export, config, tokenizer)
        name = name or manifest.name
        _check_adapters(name, adapters)
        length = _max_positions(config) or max(_DEFAULT_LENGTH, manifest.max_new_tokens)
        return cls(name, manifest, tokenizer, length, tuple(adapters), _eos_token_ids(export, config, tokenizer))

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the prompt is an encoder's input."""
        return self.manifest.task == "seq2seq"

    @property
    def fields(self) -> list[str]:
        """The fields of a row for `/v1/predict`."""
        if self.manifest.messages:
            return [self.manifest.messages]
        if self.manifest.prompt:
            return Template(self.manifest.prompt).columns
        return [_TEXT_FIELD]

    @property
    def has_chat_template(self) -> bool:
        """Whether chats are rendered by the tokenizer's chat template."""
        return bool(self.tokenizer.chat_template) and not self.manifest.prompt

    @property
    def chats(self) -> bool:
        """Whether `/v1/chat/completions` has answers: by a chat template, or a prompt template of one column."""
        return self.has_chat_template or (bool(self.manifest.prompt) and len(self.fields) == 1)

    @property
    def max_prompt_tokens(self) -> int:
        """Maximum tokens of a prompt; for encoder-decoder models, those that it was trained with."""
        return self.manifest.max_length if self.is_encoder_decoder else self.max_sequence_length - 1

    @property
    def default_chat_tokens(self) -> int:
        """Maximum tokens of a chat answer if the request does not say it: those that fit, as OpenAI does."""
        return self.manifest.max_new_tokens if self.is_encoder_decoder else self.max_sequence_length

    def example_request(self) -> dict[str, Any]:
        """A body for `/v1/predict`."""
        return {"row": dict.fromkeys(self.fields, "...")}

    def adapter(self, model: str) -> str:
        """The adapter that a model id names; empty for the model itself.

        Raises:
            ApiError: there is no such model.
        """
        if model == self.name:
            return ""
        if model in self.adapters:
            return model
        raise ApiError(
            404, f"The model {model!r} does not exist. This service has {', '.join((self.name, *self.adapters))}.",
            param="model", code="model_not_found",
        )  # fmt: skip

    def prediction_prompt(self, row: Mapping[str, Any]) -> str:
        """A row as the job's prompt, rendered as `spotune predict` does.

        Raises:
            ApiError: the row does not have the fields of the prompt.
        """
        template = self.manifest.prompt
        if self.manifest.messages:
            value = row.get(self.manifest.messages)
            if not value or not isinstance(value, str | list):
                raise ApiError(400, f"The row needs {self.manifest.messages!r}: chat messages, or a text.", param="row")
            return self.render_chat([{"role": "user", "content": value}] if isinstance(value, str) else value)
        try:
            return Template(template or f"{{{_TEXT_FIELD}}}").render(row)
        except RowError as error:
            message = f"The prompt {template or _TEXT_FIELD!r} cannot be filled: {error}."
            raise ApiError(400, message, param="row") from error

    def encode_prediction(self, prompt: str) -> list[int]:
        """Token ids of a prompt of `prediction_prompt`; an encoder's input is truncated as in training.

        Raises:
            ApiError: the prompt is empty or too long.
        """
        _check_characters(prompt)
        return self.check_length(encode_for_inference(self.tokenizer, self.manifest, [prompt])[0], "row")

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a plain text, with the tokenizer's special tokens, not truncated.

        Raises:
            ApiError: the text is empty or too long.
        """
        return self.check_length(self._encode(text), "prompt")

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), tool_choice: Any = None
    ) -> list[int]:
        """Token ids of a chat.

        A model trained with a prompt template of one column answers the last user message; it was trained on single
        questions.

        Raises:
            ApiError: the model does not chat, the messages cannot be rendered, or they are too long.
        """
        if self.has_chat_template:
            ids = self._encode_rendered(self.render_chat(messages, tools, tool_choice))
            return self.check_length(ids, "messages")
        if not self.chats:
            raise ApiError(400, self._no_chat_message(), param="messages")
        last = next((m["content"] for m in reversed(messages) if m.get("role") == "user"), None)
        question = str(joined_content(last) or "")
        if not question:
            raise ApiError(400, "The messages have no question: the last user message is empty.", param="messages")
        text = Template(self.manifest.prompt).render({self.fields[0]: question})
        return self.check_length(self._encode(text), "messages")

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), tool_choice: Any = None
    ) -> str:
        """Chat messages as the tokenizer's chat template writes them, up to the answer.

        Lists of text parts are rendered as they were for training: see `spotune.prompting.content`.

        Raises:
            ApiError: the template cannot render the messages.
        """
        extra = {"tools": list(tools), "tool_choice": tool_choice} if tools else {}

        def render(conversation: list[dict[str, Any]]) -> str:
            return str(
                self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True, **extra)
            )

        try:
            return render_content(render, messages, _RENDERING_ERRORS)
        except _RENDERING_ERRORS as error:
            message = f"The model's chat template cannot render the messages: {error}"
            raise ApiError(400, message, param="messages") from error

    def check_length(self, ids: list[int], param: str) -> list[int]:
        """The given prompt, after a check of its tokens and length.

        Raises:
            ApiError: it is empty, too long, or has tokens that the model does not know.
        """
        if not ids:
            raise ApiError(400, "The prompt is empty.", param=param)
        self.check_tokens(dict.fromkeys(ids), param)
        if len(ids) > self.max_prompt_tokens:
            raise context_length_error(self.max_prompt_tokens, len(ids), param)
        return ids

    def check_tokens(self, tokens: dict[int, Value], param: str) -> dict[int, Value]:
        """The given values by token id, after a check of the ids.

        Raises:
            ApiError: the model does not know one.
        """
        size = len(self.tokenizer)  # asking for it takes longer than looking at a token
        unknown = next((token for token in tokens if not 0 <= token < size), None)
        if unknown is not None:
            raise ApiError(400, f"{param}: the model has no token {unknown}; ids are 0 to {size - 1}.", param=param)
        return tokens

    def max_new_tokens(self, prompt: Sequence[int]) -> int:
        """The number of tokens that an answer to a prompt can have."""
        return self.max_sequence_length - (1 if self.is_encoder_decoder else len(prompt))

    def _encode(self, text: str) -> list[int]:
        _check_characters(text)
        return encode_prompts(self.tokenizer, "seq2seq" if self.is_encoder_decoder else "causal", [text])[0]

    def _encode_rendered(self, text: str) -> list[int]:
        """A rendered chat already has its special tokens; an encoder's input ends as in training."""
        if self.is_encoder_decoder:
            return self._encode(text)
        _check_characters(text)
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _no_chat_message(self) -> str:
        if self.manifest.prompt:
            return (
                f"This model fills a prompt with {' and '.join(self.fields)}, so it does not chat. Send them to "
                "/v1/predict, or a whole prompt to /v1/completions."
            )
        return "This model has no chat template. Send a prompt to /v1/completions."


def _check_characters(text: str) -> None:
    """JSON can write half a character, which no tokenizer takes.

    Raises:
        ApiError: the text has one.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"The prompt has half a character, \\u{ord(text[error.start]):x}: send the whole character."
        raise ApiError(400, message) from error


def _load_config_and_tokenizer(directory: Path) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    from transformers import AutoConfig, AutoTokenizer

    part = "configuration"
    try:
        config = AutoConfig.from_pretrained(str(directory))
        part = "tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(str(directory))
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, TypeError) as error:
        raise JobError(f"the {part} of the model in {directory} cannot be loaded: {error}") from error
    return config, tokenizer


def _manifest_of_folder(
    directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> ExportManifest:
    """A manifest without a prompt template, for a model that spotune did not export."""
    length = int(min(tokenizer.model_max_length, _MAX_PLAUSIBLE_LENGTH))
    return ExportManifest(
        name=directory.resolve().name,
        task="seq2seq" if config.is_encoder_decoder else "causal",
        prompt="",
        messages="messages" if tokenizer.chat_template else "",
        max_length=length if length < _MAX_PLAUSIBLE_LENGTH else _max_positions(config) or _DEFAULT_LENGTH,
        max_new_tokens=_DEFAULT_NEW_TOKENS,
    )


def _max_positions(config: PretrainedConfig) -> int:
    """Maximum sequence length by the configuration; 0 if it has none."""
    values = (getattr(config.get_text_config(decoder=True), name, None) for name in _POSITIONS)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _eos_token_ids(directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The end-of-text tokens of generation_config.json, or else of config.json, and that of the tokenizer."""
    path = directory / "generation_config.json"
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    except (OSError, ValueError, AttributeError) as error:
        raise JobError(f"{path} is damaged: {error}. Export the model again.") from error
    value = getattr(config, "eos_token_id", None) if value is None else value
    own = value if isinstance(value, list) else [value]
    return frozenset(int(token) for token in (*own, tokenizer.eos_token_id) if token is not None)


def _check_adapters(name: str, adapters: Mapping[str, Path]) -> None:
    for adapter, folder in adapters.items():
        if adapter == name:
            raise UsageError(f"the adapter {adapter!r} has the name of the model; give it another one.")
        if not (folder / "adapter_config.json").is_file():
            raise UsageError(f"the adapter {adapter!r} is not in {folder}: there is no adapter_config.json.")

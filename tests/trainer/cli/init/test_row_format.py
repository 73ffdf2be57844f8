"""The row format that columns suggest."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from spotune.errors import JobError
from spotune_trainer.cli.init.formats.answers import Task
from spotune_trainer.cli.init.formats.choose import choose_row_format
from spotune_trainer.cli.init.formats.profile import ColumnProfile, Kind


def columns(**kinds: Kind) -> list[ColumnProfile]:
    """Columns with a value in each of ten rows."""
    return [ColumnProfile(name, 10, 0, {kind: 10}, "", {}) for name, kind in kinds.items()]


def incomplete(name: str, kind: Kind = "text") -> ColumnProfile:
    return ColumnProfile(name, 9, 0, {kind: 9}, "rows.jsonl:4", {})


PUBLISHED: list[tuple[dict[str, Kind], str, str]] = [
    ({"instruction": "text", "input": "text", "output": "text"}, "{instruction} | {input}", "{output}"),
    ({"instruction": "text", "context": "text", "response": "text", "category": "text"},
     "{instruction} | {context}", "{response}"),
    ({"id": "number", "question": "text", "answer": "text"}, "{question}", "{answer}"),
    ({"prompt": "text", "completion": "text"}, "{prompt}", "{completion}"),
    ({"document": "text", "summary": "text", "id": "text"}, "{document}", "{summary}"),
    ({"article": "text", "highlights": "text"}, "{article}", "{highlights}"),
    ({"premise": "text", "hypothesis": "text", "label": "number"}, "{premise} | {hypothesis}", "{label}"),
    ({"text": "text", "label": "number"}, "{text}", "{label}"),
    ({"Question": "text", "Answer": "text"}, "{Question}", "{Answer}"),
    ({"question": "text", "columns": "text", "sql": "text", "database": "text"}, "{question} | {columns}", "{sql}"),
]  # fmt: skip
"""Columns of published datasets: Alpaca, Dolly, GSM8K, XSum, CNN/DailyMail, SNLI, IMDB and others."""


@pytest.mark.parametrize(("kinds", "prompt", "completion"), PUBLISHED, ids=[",".join(case[0]) for case in PUBLISHED])
def test_columns_of_published_datasets_are_known(kinds: dict[str, Kind], prompt: str, completion: str) -> None:
    found = choose_row_format(columns(**kinds), "seq2seq", has_chat_template=False)
    assert (found.prompt, found.completion) == (prompt, completion)


def test_a_causal_model_gets_headings_that_say_where_the_answer_begins() -> None:
    found = choose_row_format(columns(instruction="text", output="text"), "causal", has_chat_template=False)
    assert found.prompt == "### Instruction:\n{instruction}\n\n### Response:\n"


def test_a_column_called_prompt_is_a_prompt_as_it_is() -> None:
    found = choose_row_format(columns(prompt="text", completion="text"), "causal", has_chat_template=False)
    assert (found.prompt, found.completion) == ("{prompt}", "{completion}")


def with_values(name: str, values: Mapping[str, int], kind: Kind = "text") -> ColumnProfile:
    rows = sum(values.values())
    return ColumnProfile(name, rows, 0, {kind: rows}, "", {}, values)


JUDGED = with_values("label", {"true": 6, "false": 4}, "boolean")


@pytest.mark.parametrize("kinds", [{"prompt": "text", "completion": "text"}, {"messages": "chat"}])
def test_answers_with_a_label_are_not_all_learned(kinds: dict[str, Kind]) -> None:
    judged = [*columns(**kinds), JUDGED]
    assert choose_row_format(judged, "causal", has_chat_template=True).label == "{label}"
    if "completion" in kinds:
        with pytest.raises(JobError, match=r"'label' says whether an answer is desirable, which only causal models"):
            choose_row_format(judged, "seq2seq", has_chat_template=False)


TEXT_LABELS: list[tuple[dict[str, Kind], str, str, str]] = [
    ({"text": "text"}, "label", "{text}", "{label}"),
    ({"text": "text"}, "sentiment", "{text}", "{sentiment}"),
    ({"text": "text", "source": "text"}, "intent", "{text}", "{intent}"),
    ({"text": "text", "label": "number"}, "label_text", "{text}", "{label_text}"),
    ({"title": "text", "text": "text"}, "category", "{title}|{text}", "{category}"),
    ({"sentence1": "text", "sentence2": "text", "idx": "number"}, "label", "{sentence1}|{sentence2}", "{label}"),
    ({"review_body": "text", "id": "number"}, "stars", "{review_body}", "{stars}"),
]
"""Columns of published datasets: AG News, SetFit's, Banking77, MRPC, Amazon reviews and others."""


@pytest.mark.parametrize(("kinds", "name", "text", "label"), TEXT_LABELS)
def test_a_column_with_few_values_beside_a_text_is_its_label(
    kinds: dict[str, Kind], name: str, text: str, label: str
) -> None:
    rows = [*columns(**kinds), with_values(name, {"no": 10, "yes": 20})]
    found = choose_row_format(rows, "causal", has_chat_template=True, separator="|")
    assert (found.text, found.label, found.labels, found.completion) == (text, label, ("no", "yes"), "")


def test_a_seq2seq_model_writes_the_label() -> None:
    found = choose_row_format(
        [*columns(text="text"), with_values("label", {"no": 9, "yes": 9})], "seq2seq", has_chat_template=False
    )
    assert (found.completion, found.label) == ("{label}", "")


@pytest.mark.parametrize(
    ("kinds", "values", "completion"),
    [
        ({"instruction": "text", "response": "text"}, {"qa": 9, "chat": 9}, "{response}"),  # Dolly
        ({"text": "text"}, {f"label{n}": 1 for n in range(18)}, "{category}"),
    ],
)
def test_a_category_beside_an_answer_and_texts_of_their_own_are_no_labels(
    kinds: dict[str, Kind], values: dict[str, int], completion: str
) -> None:
    rows = [*columns(**kinds), with_values("category", values)]
    assert choose_row_format(rows, "causal", has_chat_template=False).completion == completion


def test_an_encoder_classifies_by_an_answer_with_few_values() -> None:
    rows = [*columns(question="text", passage="text"), with_values("answer", {"true": 9, "false": 9}, "boolean")]
    assert choose_row_format(rows, "causal", has_chat_template=False).completion == "{answer}"
    found = choose_row_format(rows, "causal", has_chat_template=False, is_encoder=True)
    assert (found.text, found.label) == ("{question}\n{passage}", "{answer}")


def test_a_model_without_a_head_writes_the_label() -> None:
    rows = [*columns(text="text"), with_values("label", {"no": 9, "yes": 9})]
    found = choose_row_format(rows, "causal", has_chat_template=False, classifies_texts=False)
    assert (found.completion, found.label) == ("{label}", "")


@pytest.mark.parametrize("model", ["causal", "encoder"])
def test_an_anchor_and_a_positive_belong_together(model: str) -> None:
    rows = columns(anchor="text", positive="text", negative="text", score="number")
    found = choose_row_format(rows, "causal", has_chat_template=True, is_encoder=model == "encoder")
    assert (found.query, found.positive, found.negative) == ("{anchor}", "{positive}", "{negative}")


@pytest.mark.parametrize("tags", ["ner_tags", "tags", "labels", "pos_tags"])
def test_words_beside_tags_are_labelled_one_by_one(tags: str) -> None:
    rows = [*columns(id="text", tokens="texts"), with_values(tags, {"O": 20, "B-X": 9, "I-X": 2, "B-A": 3}, "texts")]
    found = choose_row_format(rows, "causal", has_chat_template=False, is_encoder=True)
    assert (found.text, found.label, found.label_each_word) == ("{tokens}", f"{{{tags}}}", True)
    assert found.labels == ("O", "B-A", "B-X", "I-X")


def test_a_label_that_is_the_answer_is_learned() -> None:
    found = choose_row_format(columns(text="text", label="boolean"), "causal", has_chat_template=False)
    assert found.completion == "{label}"


def test_a_chat_is_preferred_to_columns_beside_it() -> None:
    both = columns(prompt="text", completion="text", messages="chat")
    assert choose_row_format(both, "causal", has_chat_template=True).messages == "messages"
    assert choose_row_format(both, "causal", has_chat_template=False).completion == "{completion}"
    assert choose_row_format(both, "seq2seq", has_chat_template=True).completion == "{completion}"


def test_a_prompt_column_with_gaps_is_left_out_and_named() -> None:
    found = choose_row_format(
        [*columns(instruction="text", output="text"), incomplete("input")], "seq2seq", has_chat_template=False
    )
    assert found.prompt == "{instruction}"
    assert "'input' is left out: it has no value in some rows (the first is rows.jsonl:4)" in found.reason


@pytest.mark.parametrize("missing", ["question", "answer"])
def test_a_gap_in_the_only_prompt_or_in_the_answer_is_refused(missing: str) -> None:
    present = columns(question="text") if missing == "answer" else columns(answer="text")
    with pytest.raises(JobError, match=rf"column '{missing}' has no value in some rows; the first is rows\.jsonl:4"):
        choose_row_format([*present, incomplete(missing)], "causal", has_chat_template=False)


def test_empty_and_numeric_answers_are_pointed_out() -> None:
    answer = ColumnProfile("label", 10, 3, {"number": 10}, "", {})
    reason = choose_row_format([*columns(text="text"), answer], "causal", has_chat_template=False).reason
    assert "3 rows have an empty 'label'" in reason
    assert "'label' holds numbers" in reason


PREFERENCES: list[tuple[dict[str, Kind], str, str, str]] = [
    ({"prompt": "text", "chosen": "text", "rejected": "text"}, "{prompt}", "{chosen}", "{rejected}"),
    ({"system": "text", "question": "text", "chosen": "text", "rejected": "text"},
     "### System:\n{system}\n\n### Question:\n{question}\n\n### Response:\n", "{chosen}", "{rejected}"),
    ({"qid": "number", "question": "text", "response_j": "text", "response_k": "text"},
     "### Question:\n{question}\n\n### Response:\n", "{response_j}", "{response_k}"),
    ({"source": "text", "prompt": "text", "response": "text", "chosen": "text", "rejected": "text"},
     "{prompt}", "{chosen}", "{rejected}"),
    ({"Prompt": "text", "Better": "text", "Worse": "text"}, "{Prompt}", "{Better}", "{Worse}"),
    ({"prompt": "text", "chosen": "chat", "rejected": "chat", "messages": "chat", "score_chosen": "number"},
     "", "{chosen}", "{rejected}"),
]  # fmt: skip
"""Columns of published preferences: Orca DPO pairs, Stack Exchange Paired, Full HH-RLHF, UltraFeedback and others."""


@pytest.mark.parametrize(
    ("kinds", "prompt", "chosen", "rejected"), PREFERENCES, ids=[",".join(case[0]) for case in PREFERENCES]
)
def test_a_causal_model_learns_preferences(kinds: dict[str, Kind], prompt: str, chosen: str, rejected: str) -> None:
    found = choose_row_format(columns(**kinds), "causal", has_chat_template=True)
    assert (found.prompt, found.chosen, found.rejected) == (prompt, chosen, rejected)
    assert (found.completion, found.messages, found.description) == ("", "", "preference pairs")


@pytest.mark.parametrize(("kinds", "prompt", "chosen", "rejected"), PREFERENCES[:-1])
def test_a_seq2seq_model_learns_the_preferred_answers(
    kinds: dict[str, Kind], prompt: str, chosen: str, rejected: str
) -> None:
    found = choose_row_format(columns(**kinds), "seq2seq", has_chat_template=False)
    assert (found.completion, found.chosen) == (chosen, "")
    assert "{source}" not in found.prompt
    assert f"{rejected.strip('{}')!r} is not used: to learn from preferences" in found.reason
    assert "needs a causal model" in found.reason


@pytest.mark.parametrize(
    ("kinds", "completion"),
    [
        ({"question": "text", "answer": "text", "better": "number", "worse": "number"}, "{answer}"),
        ({"question": "text", "answer": "text", "chosen": "boolean", "rejected": "boolean"}, "{answer}"),
        ({"prompt": "text", "response": "text", "rejected": "text"}, "{response}"),
        ({"prompt": "text", "chosen": "text"}, "{chosen}"),
    ],
)
def test_scores_and_single_answers_are_no_preferences(kinds: dict[str, Kind], completion: str) -> None:
    found = choose_row_format(columns(**kinds), "causal", has_chat_template=False)
    assert (found.completion, found.description) == (completion, "prompt and completion")


@pytest.mark.parametrize(
    ("kinds", "has_chat_template", "message"),
    [
        ({"prompt": "text", "response_0": "text", "response_1": "text", "better_response_id": "number"}, True,
         "--chosen '{...}' --rejected '{...}'"),
        ({"chosen": "text", "rejected": "text"}, True, "no column is known as their prompt.*Whole conversations"),
        ({"prompt": "text", "chosen": "chat", "rejected": "chat"}, False, "'chosen'.*has no chat template"),
        ({"prompt": "text", "chosen": "chat", "rejected": "text"}, True, "the kinds chat and text"),
        ({"conversations": "sharegpt", "chosen": "object", "rejected": "object"}, True, "the kinds object and object"),
        ({"prompt": "chat", "chosen": "answer", "rejected": "answer"}, True,
         r"without their prompt.*jq -c '\.\[\"prompt\"\] as \$prompt"),
        ({"question": "text", "chosen": "answer", "rejected": "answer"}, True,
         r"\[\{role: \"user\", content: \.\[\"question\"\]\}\] as \$prompt"),
    ],
)  # fmt: skip
def test_preferences_that_cannot_be_read_are_refused_with_the_fix(
    kinds: dict[str, Kind], has_chat_template: bool, message: str
) -> None:
    with pytest.raises(JobError, match=message):
        choose_row_format(columns(**kinds), "causal", has_chat_template=has_chat_template)


@pytest.mark.parametrize("missing", ["chosen", "rejected"])
def test_a_preference_with_a_gap_is_refused(missing: str) -> None:
    present = (
        columns(prompt="text", chosen="text") if missing == "rejected" else columns(prompt="text", rejected="text")
    )
    with pytest.raises(JobError, match=rf"column '{missing}' has no value in some rows; the first is rows\.jsonl:4"):
        choose_row_format([*present, incomplete(missing)], "causal", has_chat_template=False)


@pytest.mark.parametrize(
    ("kinds", "text"),
    [({"text": "text", "url": "text"}, "text"), ({"id": "number", "poem": "text"}, "poem"), ({"body": "text"}, "body")],
)
def test_text_by_its_name_or_the_only_one_is_plain_text(kinds: dict[str, Kind], text: str) -> None:
    assert choose_row_format(columns(**kinds), "causal", has_chat_template=False).text == text


@pytest.mark.parametrize(
    ("kinds", "task", "message"),
    [
        ({"de": "text", "en": "text"}, "causal", r"'de' \(text\), 'en' \(text\).*--prompt '{...}' --completion"),
        ({"answers": "object", "question": "text"}, "seq2seq", "plain text .'question'.*learns a completion"),
        ({"conversations": "sharegpt", "id": "text"}, "causal", "'conversations' has chats in ShareGPT's form"),
        ({"messages": "chat"}, "seq2seq", "which seq2seq models cannot learn"),
        ({}, "causal", "there are none"),
    ],
)
def test_what_is_unclear_is_refused_with_the_options(kinds: dict[str, Kind], task: Task, message: str) -> None:
    with pytest.raises(JobError, match=message):
        choose_row_format(columns(**kinds), task, has_chat_template=True)

"""`spotune predict`: answers or labels of a finished model on the command line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from spotune.errors import UsageError


def predict(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="An exported model, or the directory of a run.")],
    question: Annotated[str, typer.Argument(help="Text, or a JSON object with the fields of the prompt.")] = "",
    file: Annotated[Path | None, typer.Option(help="Questions, one a line: *.jsonl, or plain text.")] = None,
    field: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A field of the prompt's template; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Maximum length of an answer in tokens.")] = None,
    output: Annotated[
        Literal["text", "json"],
        typer.Option(help="json: one line for each question."),
    ] = "text",
) -> None:
    """Generate answers with a trained model. A classifier prints label and score of each text, or of each word.

    Example: spotune predict runs/text-to-sql "How many singers are there?"
    """
    fields = _parse_fields(field or [])
    if bool(file) == bool(question) and (file or not fields):
        raise UsageError("give either a question or --file with questions.")
    from spotune.prompting.export_manifest import ExportManifest, find_export
    from spotune_trainer.export.predict import Predictor, parse_question, read_questions

    questions = read_questions(file) if file else [parse_question(question)]
    if ExportManifest.read(find_export(directory)).classifies:
        _print_labels(directory, [(text, {**fields, **values}) for text, values in questions], output)
        return
    predictor = Predictor.load(directory)
    prompts = [predictor.prompt(text, {**fields, **values}) for text, values in questions]
    for answer in predictor.answer(prompts, max_new_tokens):
        if output == "json":
            typer.echo(json.dumps({"prompt": answer.prompt, "answer": answer.answer}, ensure_ascii=False))
        else:
            typer.echo(answer.answer)


def _print_labels(directory: Path, questions: list[tuple[str, dict[str, Any]]], output: str) -> None:
    """Print label and score of each text; of a classifier of words, one word a line and an empty line after a text."""
    from spotune_trainer.export.classify import Classifier

    classifier = Classifier.load(directory)
    texts = [classifier.text(text, values) for text, values in questions]
    width = max(map(len, classifier.label_names))
    for text, labels in zip(texts, classifier.classify(texts), strict=True):
        if output == "json":
            found = [dataclasses.asdict(label) for label in labels]
            value = {"text": text, "words": found} if classifier.labels_each_word else found[0]
            typer.echo(json.dumps(value, ensure_ascii=False))
            continue
        for label in labels:
            typer.echo(f"{label.label:<{width}}  {label.score:.4f}  {' '.join(label.text.split())}")
        if classifier.labels_each_word:
            typer.echo()


def _parse_fields(options: list[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for option in options:
        name, separator, value = option.partition("=")
        if not name or not separator:
            raise UsageError(f"--field {option}: write NAME=VALUE.")
        fields[name] = value
    return fields

"""Job files of classifiers whose labels do not fit their data, model or sections."""

from __future__ import annotations

from tests.api.support.broken_objectives import SEQ2SEQ_DATASET, TRAIN

_LABELS = "    labels: [good, bad]\n"
_TEXTS = '    text: "{body}"\n    label: "{stars}"\n' + _LABELS
_END = "    eval: {fraction: 0.1}\n  training: {objective: classification, "
_WORDS_END = _END.replace("classification", "tokenClassification")


def _classifier(dataset: str = _TEXTS, end: str = _END, sections: str = "") -> str:
    """What comes after `task:` in the job file of a classifier."""
    return "causal}\n" + sections + "  dataset:\n" + TRAIN + dataset + end


# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_LABELS = [
    (
        "labels that no objective learns",
        TRAIN,
        TRAIN + _LABELS,
        ":8: spec.dataset.labels: is not used by sft: set training.objective to classification or tokenClassification",
    ),
    (
        "a label of more than one column",
        SEQ2SEQ_DATASET,
        _classifier(_TEXTS.replace("{stars}", "{a} {b}")),
        ':9: spec.dataset.label: must be one column in braces, such as "{label}"',
    ),
    (
        "one label",
        SEQ2SEQ_DATASET,
        _classifier(_TEXTS.replace("[good, bad]", "[good]")),
        ":10: spec.dataset.labels: needs at least two labels, or there is nothing to learn",
    ),
    (
        "a classifier without labels",
        SEQ2SEQ_DATASET,
        _classifier(_TEXTS.replace(_LABELS, "")),
        ":6: spec.dataset.labels: is required by classification: name all labels, such as [negative, positive]",
    ),
    (
        "a text without a label",
        SEQ2SEQ_DATASET,
        _classifier('    text: "{body}"\n' + _LABELS),
        ":6: spec.dataset.label: classification needs text and label together: name the column, or remove both",
    ),
    (
        "labels of answers",
        SEQ2SEQ_DATASET,
        _classifier('    prompt: "{q}"\n    completion: "{a}"\n' + _LABELS),
        (
            ":9: spec.dataset.completion: classification learns labels of texts: replace it by dataset.text and "
            "dataset.label"
        ),
    ),
    (
        "words of several columns",
        SEQ2SEQ_DATASET,
        _classifier(_TEXTS.replace("{body}", "{a} {b}"), _WORDS_END),
        ':8: spec.dataset.text: must be one column with lists of words for tokenClassification, such as "{tokens}"',
    ),
    (
        "packed texts with labels",
        SEQ2SEQ_DATASET,
        _classifier(_TEXTS + "    packing: true\n"),
        ":11: spec.dataset.packing: is not supported for classification: remove it",
    ),
    (
        "a classifier of two parts",
        "epochs: 3",
        "epochs: 3, objective: classification",
        ":9: spec.training.objective: classification is for causal models; model.task is seq2seq",
    ),
    (
        "answers of a classifier",
        SEQ2SEQ_DATASET,
        _classifier(end=_END + "evaluation: {generate: true}, "),
        ":12: spec.training.evaluation.generate: is not supported for classification: remove it",
    ),
    (
        "noise on the embeddings of a classifier",
        SEQ2SEQ_DATASET,
        _classifier(end=_END + "neftuneNoiseAlpha: 5.0, "),
        ":12: spec.training.neftuneNoiseAlpha: is not supported for classification: remove it",
    ),
    (
        "a classifier that is served",
        SEQ2SEQ_DATASET,
        _classifier(sections="  serving: {}\n"),
        ":6: spec.serving: is not supported for classification: the model generates no text",
    ),
    (
        "an adapter whose head is exported apart",
        SEQ2SEQ_DATASET,
        _classifier(sections="  adapter: {lora: {}}\n  output: {mergeAdapter: false}\n"),
        ":7: spec.output.mergeAdapter: false is not supported for classification: the head is exported with the model",
    ),
    (
        "the best entities of texts",
        SEQ2SEQ_DATASET,
        _classifier(end=_END + "evaluation: {everySteps: 5, best: {metric: entityF1}}, "),
        (
            ":12: spec.training.evaluation.best.metric: entityF1 is not evaluated for classification: use loss, "
            "accuracy, macroF1"
        ),
    ),
    (
        "the best accuracy of generated text",
        "epochs: 3",
        "epochs: 3, evaluation: {everySteps: 5, best: {metric: accuracy}}",
        ":9: spec.training.evaluation.best.metric: accuracy is not evaluated for sft: use loss, or one of metrics",
    ),
    (
        "which accuracies are better",
        SEQ2SEQ_DATASET,
        _classifier(end=_END + "evaluation: {everySteps: 5, best: {metric: accuracy, mode: min}}, "),
        (
            ":12: spec.training.evaluation.best.mode: is only for functions and tasks; higher values of accuracy are "
            "better: remove this field"
        ),
    ),
]

# The definition's rules cannot read a field that is a word or a truth value, and comparing all labels costs too much.
LABELS_FOR_MODELS_ALONE = [
    (
        "a classifier that is compiled",
        SEQ2SEQ_DATASET,
        _classifier(sections="  execution: {compile: true}\n"),
        ":6: spec.execution.compile: is not supported for classification: use auto or false",
    ),
    (
        "a label without a name",
        SEQ2SEQ_DATASET,
        _classifier(_TEXTS.replace("[good, bad]", '[good, ""]')),
        ":10: spec.dataset.labels: contains an empty name: name the label, or remove it",
    ),
    (
        "a label twice",
        SEQ2SEQ_DATASET,
        _classifier(_TEXTS.replace("[good, bad]", "[good, bad, good]")),
        ":10: spec.dataset.labels: contains 'good' twice: each label has one output of the model",
    ),
    (
        "entities in labels that mark none",
        SEQ2SEQ_DATASET,
        _classifier(end=_WORDS_END + "evaluation: {everySteps: 5, best: {metric: entityF1}}, "),
        (
            ":12: spec.training.evaluation.best.metric: entityF1 needs labels in IOB2 format (O, B-TYPE, I-TYPE): use "
            "accuracy, or other labels"
        ),
    ),
]

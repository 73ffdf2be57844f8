"""Job files with invalid evaluation settings, and the expected errors."""

TRAIN = "    train: {source: shards/train}\n"

# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_EVALUATIONS = [
    (
        "task with a long name",
        "epochs: 3",
        "epochs: 3, evaluation: {harness: {tasks: [" + "a" * 201 + "]}}",
        (
            ":9: spec.training.evaluation.harness.tasks[0]: expected a text of at most 200 characters, not "
            '"' + "a" * 59 + "..."
        ),
    ),
    (
        "item that is not in the list",
        "epochs: 3",
        "epochs: 3, evaluation: {metrics: [loss, exact_match]}",
        (
            ":9: spec.training.evaluation.metrics[1]: expected loss, exactMatch, executionAccuracy or a "
            'function of your own as package.module:function, not "exact_match"; did you mean exactMatch?'
        ),
    ),
    (
        "empty list",
        "epochs: 3",
        "epochs: 3, evaluation: {metrics: []}",
        ":9: spec.training.evaluation.metrics: expected a list of at least 1, not an empty list",
    ),
    (
        "function that is not named by its module",
        "epochs: 3",
        "epochs: 3, evaluation: {generate: true, metrics: [my_metrics.bleu]}",
        (
            ":9: spec.training.evaluation.metrics[0]: expected loss, exactMatch, executionAccuracy or a "
            'function of your own as package.module:function, not "my_metrics.bleu"'
        ),
    ),
    (
        "too many metrics",
        "epochs: 3",
        f"epochs: 3, evaluation: {{generate: true, metrics: [{', '.join(f'a:b{number}' for number in range(17))}]}}",
        ":9: spec.training.evaluation.metrics: expected a list of at most 16, not 17",
    ),
    (
        "exact match without answers",
        "epochs: 3",
        "epochs: 3, evaluation: {metrics: [exactMatch]}",
        ":9: spec.training.evaluation.metrics: exactMatch compares generated answers: set generate: true",
    ),
    (
        "function without answers",
        "epochs: 3",
        'epochs: 3, evaluation: {metrics: ["my_metrics:bleu"]}',
        ":9: spec.training.evaluation.metrics: my_metrics:bleu compares generated answers: set generate: true",
    ),
    (
        "function with the name of a metric",
        "epochs: 3",
        'epochs: 3, evaluation: {generate: true, metrics: ["my_metrics:loss"]}',
        (
            ":9: spec.training.evaluation.metrics: my_metrics:loss has the name of a built-in metric: "
            "rename the function"
        ),
    ),
    (
        "two functions of one name",
        "epochs: 3",
        'epochs: 3, evaluation: {generate: true, metrics: ["a.b:bleu", loss, "c:bleu"]}',
        (
            ":9: spec.training.evaluation.metrics: contains 2 functions named bleu, but scores are reported by name: "
            "rename all but one"
        ),
    ),
    (
        "execution accuracy without databases",
        "epochs: 3",
        "epochs: 3, evaluation: {generate: true, metrics: [executionAccuracy]}",
        (
            ":9: spec.training.evaluation.sql: is required by executionAccuracy: "
            "set sql.databases to a folder of <name>.sqlite files"
        ),
    ),
    (
        "databases without execution accuracy",
        "epochs: 3",
        "epochs: 3, evaluation: {sql: {databases: d}}",
        ":9: spec.training.evaluation.sql: is only used by the metric executionAccuracy, which is not in metrics",
    ),
    (
        "metric twice",
        "epochs: 3",
        "epochs: 3, evaluation: {metrics: [loss, loss]}",
        ":9: spec.training.evaluation.metrics: lists a metric twice",
    ),
    (
        "early stopping without a metric",
        "epochs: 3",
        "epochs: 3, evaluation: {everySteps: 10, earlyStopping: {patience: 2}}",
        (
            ":9: spec.training.evaluation.earlyStopping: requires the metric that evaluations are compared by: "
            "set best.metric"
        ),
    ),
    (
        "best of evaluations that are never made",
        "epochs: 3",
        "epochs: 3, evaluation: {best: {metric: loss}}",
        (
            ":9: spec.training.evaluation.everySteps: must be at least 1, because best compares evaluations "
            "during training"
        ),
    ),
    (
        "best by a metric that is not evaluated",
        "epochs: 3",
        "epochs: 3, evaluation: {everySteps: 10, generate: true, best: {metric: exactMatch}}",
        ":9: spec.training.evaluation.best.metric: exactMatch is not evaluated: add it to metrics",
    ),
    (
        "best by an unknown metric",
        "epochs: 3",
        "epochs: 3, evaluation: {everySteps: 10, best: {metric: eval_loss}}",
        ":9: spec.training.evaluation.best.metric: eval_loss is not evaluated: add it to metrics",
    ),
    (
        "mode of a built-in metric",
        "epochs: 3",
        "epochs: 3, evaluation: {everySteps: 10, best: {metric: loss, mode: max}}",
        (
            ":9: spec.training.evaluation.best.mode: is only for functions and tasks; lower values of loss are better: "
            "remove this field"
        ),
    ),
    (
        "no patience",
        "epochs: 3",
        "epochs: 3, evaluation: {everySteps: 10, best: {metric: loss}, earlyStopping: {patience: 0}}",
        ":9: spec.training.evaluation.earlyStopping.patience: expected at least 1, not 0",
    ),
    (
        "negative difference",
        "epochs: 3",
        "epochs: 3, evaluation: {everySteps: 10, best: {metric: loss}, earlyStopping: {minDelta: -0.1}}",
        ":9: spec.training.evaluation.earlyStopping.minDelta: expected at least 0, not -0.1",
    ),
    (
        "export of the best without best",
        "  workers:",
        "  output: {export: best}\n  workers:",
        ":10: spec.output.export: best requires evaluations that are compared: set training.evaluation.best",
    ),
    (
        "database column that shards do not carry",
        TRAIN + "    eval: {fraction: 0.1, seed: 1}\n  training: {",
        (
            "    prepare: {source: x.csv}\n    prompt: '{a}'\n    completion: '{b}'\n    eval: {fraction: 0.1}\n"
            "  training: {evaluation: {generate: true, metrics: [executionAccuracy], sql: {databases: d}}, "
        ),
        ":6: spec.dataset.keep: must contain the column 'database', which training.evaluation.sql.column names",
    ),
    (
        "harness without tasks",
        "epochs: 3",
        "epochs: 3, evaluation: {harness: {tasks: []}}",
        ":9: spec.training.evaluation.harness.tasks: expected a list of at least 1, not an empty list",
    ),
    (
        "task of the harness twice",
        "epochs: 3",
        "epochs: 3, evaluation: {harness: {tasks: [arc_easy, arc_easy]}}",
        ":9: spec.training.evaluation.harness.tasks: lists a task twice",
    ),
    (
        "task files in a store",
        "epochs: 3",
        'epochs: 3, evaluation: {harness: {tasks: [arc_easy], includePath: "s3://bucket/tasks"}}',
        (":9: spec.training.evaluation.harness.includePath: must be a folder: task files are not read from stores"),
    ),
    (
        "best by a task without a harness",
        "epochs: 3",
        "epochs: 3, evaluation: {everySteps: 10, best: {metric: arc_easy/acc}}",
        (
            ":9: spec.training.evaluation.best.metric: arc_easy/acc is a score of lm-evaluation-harness: set "
            "harness.tasks"
        ),
    ),
    (
        "best by a task that is only evaluated at the end",
        "epochs: 3",
        "epochs: 3, evaluation: {everySteps: 10, best: {metric: arc_easy/acc}, harness: {tasks: [arc_easy]}}",
        (
            ":9: spec.training.evaluation.harness.everySteps: must be at least 1, because best compares scores of its "
            "tasks during training"
        ),
    ),
    (
        "tasks every minus one steps",
        "epochs: 3",
        "epochs: 3, evaluation: {harness: {tasks: [arc_easy], everySteps: -1}}",
        ":9: spec.training.evaluation.harness.everySteps: expected at least 0, not -1",
    ),
    (
        "harness for a reward model",
        "seq2seq}\n  dataset:\n" + TRAIN + "    eval: {fraction: 0.1, seed: 1}\n  training: {",
        "causal}\n  dataset:\n"
        + TRAIN
        + "  training: {objective: reward, evaluation: {harness: {tasks: [arc_easy]}}, ",
        (
            ":8: spec.training.evaluation.harness: evaluates language models, and reward trains a model that generates "
            "no text: remove it"
        ),
    ),
    (
        "harness for a model with embeddings",
        "seq2seq}\n  dataset:\n" + TRAIN + "    eval: {fraction: 0.1, seed: 1}\n  training: {",
        "causal}\n  dataset:\n"
        + TRAIN
        + "  training: {objective: embedding, evaluation: {harness: {tasks: [arc_easy]}}, ",
        (
            ":8: spec.training.evaluation.harness: evaluates language models, and embedding trains a model that "
            "generates no text: remove it"
        ),
    ),
    (
        "harness for an adapter alone",
        "  training: {",
        (
            "  adapter: {lora: {r: 8}}\n  output: {mergeAdapter: false}\n"
            "  training: {evaluation: {harness: {tasks: [arc_easy]}}, "
        ),
        (
            ":11: spec.training.evaluation.harness: evaluates a whole model, not an adapter alone: set "
            "output.mergeAdapter to true"
        ),
    ),
]

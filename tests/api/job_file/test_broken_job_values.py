"""Job files with invalid values or combinations: one clear line per error, and exit code 20."""

from pathlib import Path

import pytest

from tests.api.support.broken_evaluations import WRONG_EVALUATIONS
from tests.api.support.broken_execution import EAGER_FP8, WRONG_EXECUTION
from tests.api.support.broken_labels import LABELS_FOR_MODELS_ALONE, WRONG_LABELS
from tests.api.support.broken_mixtures import WRONG_MIXTURES
from tests.api.support.broken_objectives import COMPILED_REWARDS, WRONG_OBJECTIVES
from tests.api.support.broken_optimizers import WRONG_OPTIMIZERS
from tests.api.support.broken_pools import WRONG_LIMITS, WRONG_POOLS
from tests.api.support.broken_raw_data import WRONG_RAW_DATA
from tests.api.support.broken_storage import WRONG_STORAGE
from tests.api.support.job_files import check_broken_job

WORKERS = "  workers: {count: 2, min: 1}\n"
TRAIN = "    train: {source: shards/train}\n"
SOURCE = "expected a path or one of hf://, s3://, gs://, az:// with a name"
RAW_SOURCE = "expected a path or one of hf://, s3://, gs://, az://, http://, https:// with a name"
DURATION = "expected a duration such as 30s, 5m, 1h30m or 500ms"

# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_VALUES = [
    (
        "name with capitals",
        "t5-wikisql",
        "T5_wikisql",
        (
            ":3: metadata.name: 'T5_wikisql' is not a valid Kubernetes name: use a-z, 0-9 and -, and start "
            "and end with a letter or digit"
        ),
    ),
    ("name that is a number", "t5-wikisql", "5", ":3: metadata.name: expected text (put it in quotes), not 5"),
    (
        "label that is a number",
        "t5-wikisql",
        "job, labels: {team: 5}",
        ":3: metadata.labels.team: expected text (put it in quotes), not 5",
    ),
    ("unknown scheme", "hf:", "http:", f':5: spec.model.source: {SOURCE}, not "http://google-t5/t5-small"'),
    ("scheme alone", "hf://google-t5/t5-small", "hf://", f':5: spec.model.source: {SOURCE}, not "hf://"'),
    (
        "web server that is not one of raw data",
        "shards/train",
        "https://host/train",
        f':7: spec.dataset.train.source: {SOURCE}, not "https://host/train"',
    ),
    (
        "raw data at an unknown scheme",
        "train: {source: shards/train}",
        "prepare: {source: 'ftp://host/rows.jsonl'}",
        f':7: spec.dataset.prepare.source: {RAW_SOURCE}, not "ftp://host/rows.jsonl"',
    ),
    ("empty source", "shards/train", '""', f':7: spec.dataset.train.source: {SOURCE}, not ""'),
    (
        "value that is not in the list",
        "seq2seq",
        "seq2sek",
        ':5: spec.model.task: expected causal or seq2seq, not "seq2sek"; did you mean seq2seq?',
    ),
    ("number in quotes", "epochs: 3", 'epochs: "3"', ':9: spec.training.epochs: expected a whole number, not "3"'),
    ("part of an epoch", "epochs: 3", "epochs: 0.5", ":9: spec.training.epochs: expected a whole number, not 0.5"),
    ("true for a number", "epochs: 3", "epochs: yes", ":9: spec.training.epochs: expected a whole number, not true"),
    ("zero", "epochs: 3", "epochs: 0", ":9: spec.training.epochs: expected at least 1, not 0"),
    (
        "no value",
        "globalBatchSize: 96",
        "globalBatchSize:",
        ":9: spec.training.globalBatchSize: expected a whole number, not an empty value",
    ),
    (
        "negative learning rate",
        "epochs: 3",
        "epochs: 3, learningRate: -1e-4",
        ":9: spec.training.learningRate: expected more than 0, not -0.0001",
    ),
    (
        "noise of a negative scale",
        "epochs: 3",
        "epochs: 3, neftuneNoiseAlpha: -5",
        ":9: spec.training.neftuneNoiseAlpha: expected at least 0, not -5",
    ),
    (
        "not a number",
        "epochs: 3",
        "epochs: 3, learningRate: .nan",
        ":9: spec.training.learningRate: expected a finite number, not nan",
    ),
    (
        "large seed",
        "epochs: 3",
        "epochs: 3, seed: 4294967296",
        ":9: spec.training.seed: expected less than 4294967296, not 4294967296",
    ),
    ("fraction", "fraction: 0.1", "fraction: 10", ":8: spec.dataset.eval.fraction: expected less than 1, not 10"),
    ("text for a switch", WORKERS, '  suspend: "no"\n', ':10: spec.suspend: expected true or false, not "no"'),
    (
        "template without a column",
        TRAIN,
        TRAIN + "    prompt: question\n    completion: '{sql}'\n",
        (
            ':8: spec.dataset.prompt: "question" has no {column} in it, so every row would be the same; '
            "write column names in braces"
        ),
    ),
    (
        "template with an unmatched brace",
        TRAIN,
        TRAIN + "    prompt: '{question'\n    completion: '{sql}'\n",
        ':8: spec.dataset.prompt: has an unmatched { in "{question"; write it twice for a literal brace',
    ),
    (
        "template that is a mapping",
        TRAIN,
        TRAIN + "    text: {body}\n",
        ":8: spec.dataset.text: expected text (put it in quotes), not a mapping",
    ),
    (
        "micro-batch size",
        WORKERS,
        "  execution: {microBatchSize: big}\n",
        ':10: spec.execution.microBatchSize: expected auto or a whole number from 1, not "big"',
    ),
    (
        "ZeRO stage",
        WORKERS,
        "  execution: {zeroStage: 4}\n",
        ":10: spec.execution.zeroStage: expected auto, 0, 1, 2 or 3, not 4",
    ),
    (
        "checkpoint interval",
        WORKERS,
        "  checkpoint: {every: 5 minutes}\n",
        (
            ":10: spec.checkpoint.every: expected auto, a duration such as 300s, or a whole number of steps from 1, "
            'not "5 minutes"'
        ),
    ),
    (
        "duration without a unit",
        WORKERS,
        "  retry: {hangTimeout: 1800}\n",
        f":10: spec.retry.hangTimeout: {DURATION}, not 1800",
    ),
    ("no time at all", WORKERS, "  retry: {hangTimeout: 0s}\n", ":10: spec.retry.hangTimeout: must be longer than 0s"),
    (
        "very long text",
        "seq2seq",
        "x" * 100,
        f':5: spec.model.task: expected causal or seq2seq, not "{"x" * 59}...',
    ),
]
WRONG_TOGETHER = [
    ("no length", "epochs: 3, ", "", ":9: spec.training: has no length: set epochs, maxSteps, or both"),
    (
        "no data",
        TRAIN,
        "",
        (
            ":6: spec.dataset.train: is required: set train.source (a folder of shards), prepare.source (raw data), "
            "or mixture (several)"
        ),
    ),
    (
        "two kinds of evaluation data",
        "seed: 1",
        "source: shards/eval",
        (
            ":8: spec.dataset.eval: set exactly one of source (separate evaluation shards) and fraction "
            "(held out of the training data)"
        ),
    ),
    (
        "no kind of evaluation data",
        "fraction: 0.1, ",
        "",
        (
            ":8: spec.dataset.eval: set exactly one of source (separate evaluation shards) and fraction "
            "(held out of the training data)"
        ),
    ),
    (
        "prompt alone",
        TRAIN,
        TRAIN + '    prompt: "{question}"\n',
        ":6: spec.dataset.completion: prompt and completion must be set together; for plain text use text",
    ),
    (
        "completion alone",
        TRAIN,
        TRAIN + '    completion: "{sql}"\n',
        ":6: spec.dataset.prompt: prompt and completion must be set together; for plain text use text",
    ),
    (
        "two forms of text",
        TRAIN,
        TRAIN + "    text: body\n    messages: chat\n",
        (
            ":9: spec.dataset.messages: set only one of prompt with completion, text, messages, chosen with rejected, "
            "or query with positive"
        ),
    ),
    (
        "raw data without a form",
        "train: {source: shards/train}",
        "prepare: {source: rows.jsonl}",
        (
            ":7: spec.dataset.prepare: requires a row format: set prompt with completion, text, "
            "messages, chosen with rejected, or query with positive"
        ),
    ),
    (
        "which turns of a chat, without a chat",
        TRAIN,
        TRAIN + "    trainOn: last\n",
        ":8: spec.dataset.trainOn: is only for chats: set messages, the column with the chat, or remove it",
    ),
    (
        "tools of pairs that are no chats",
        TRAIN,
        TRAIN + '    prompt: "{q}"\n    chosen: "{a}"\n    rejected: "{b}"\n    tools: tools\n',
        ":11: spec.dataset.tools: is only for chats: set messages, the column with the chat, or remove it",
    ),
    (
        "plain text for seq2seq",
        TRAIN,
        TRAIN + "    text: body\n",
        ":8: spec.dataset.text: is not supported for seq2seq models: use prompt and completion",
    ),
    (
        "packing for seq2seq",
        TRAIN,
        TRAIN + "    packing: true\n",
        ":8: spec.dataset.packing: is only supported for causal models; model.task is seq2seq",
    ),
    (
        "completion length of a causal model",
        "seq2seq}\n  dataset:",
        "causal}\n  dataset:\n    maxCompletionLength: 5",
        (
            ":7: spec.dataset.maxCompletionLength: is only used by seq2seq models; for causal models "
            "maxLength limits prompt and completion together"
        ),
    ),
    ("more workers needed than wanted", "min: 1", "min: 3", ":10: spec.workers.min: 3 is more than count, 2"),
    (
        "micro-batch above the global batch",
        WORKERS,
        "  execution: {microBatchSize: 128}\n",
        ":10: spec.execution.microBatchSize: 128 is more than training.globalBatchSize, 96",
    ),
    (
        "backoff upside down",
        WORKERS,
        "  retry: {backoff: {initial: 10m}}\n",
        ":10: spec.retry.backoff.max: 5m is shorter than initial, 10m",
    ),
    (
        "evaluation without data",
        "    eval: {fraction: 0.1, seed: 1}\n  training: {",
        "  training: {evaluation: {everySteps: 5}, ",
        ":8: spec.training.evaluation: has no evaluation data: set dataset.eval.source or dataset.eval.fraction",
    ),
    (
        "answers without prompts",
        "task: seq2seq}\n  dataset:\n" + TRAIN + "    eval: {fraction: 0.1, seed: 1}\n  training: {",
        "task: causal}\n  dataset:\n"
        + TRAIN
        + "    text: body\n    eval: {fraction: 0.1}\n  training: {evaluation: {generate: true}, ",
        (
            ":10: spec.training.evaluation.generate: requires prompts, and dataset.text has none: use "
            "dataset.prompt and dataset.completion"
        ),
    ),
    (
        "two warm-ups",
        "epochs: 3",
        "epochs: 3, warmupRatio: 0.1, warmupSteps: 5",
        ":9: spec.training.warmupSteps: set warmupRatio or warmupSteps, not both",
    ),
    (
        "warm-up to the end",
        "epochs: 3",
        "maxSteps: 3, warmupSteps: 5",
        ":9: spec.training.warmupSteps: 5 is more than maxSteps, 3",
    ),
    (
        "warm-up that the scheduler ignores",
        "epochs: 3",
        "epochs: 3, scheduler: constant, warmupSteps: 5",
        ":9: spec.training.scheduler: constant has no warm-up: use constant_with_warmup",
    ),
    (
        "float16 for T5",
        "seq2seq}",
        "seq2seq, dtype: float16}",
        (
            ":5: spec.model.dtype: float16 overflows in T5-style models (its largest value is 65504): "
            "use bfloat16 or float32"
        ),
    ),
    (
        "profile that would miss the attention",
        WORKERS,
        "  execution: {attention: flash_attention_2, flopsProfile: 5}\n",
        (
            ":10: spec.execution.flopsProfile: cannot count flash_attention_2: set it to 0, or use attention "
            "sdpa or eager"
        ),
    ),
    (
        "adapter that is not there",
        WORKERS,
        "  output: {mergeAdapter: false}\n",
        ":10: spec.output.mergeAdapter: false requires an adapter: remove this field, or set spec.adapter",
    ),
    (
        "adapter of a randomly initialised model",
        "seq2seq}\n",
        "seq2seq, initialise: random}\n  adapter: {lora: {}}\n  output: {mergeAdapter: false}\n",
        (
            ":7: spec.output.mergeAdapter: must be true for a randomly initialised model, because its base "
            "weights are stored nowhere else"
        ),
    ),
    (
        "quantised parameters that are offloaded",
        WORKERS,
        "  adapter: {lora: {}, quantization: nf4}\n  execution: {offload: parameters}\n",
        ":11: spec.execution.offload: parameters cannot be offloaded with nf4 weights: use optimizer or none",
    ),
    (
        "quantised parameters that are sharded",
        WORKERS,
        "  adapter: {lora: {}, quantization: nf4}\n  execution: {zeroStage: 3}\n",
        ":11: spec.execution.zeroStage: 3 cannot shard nf4 weights: use auto or at most 2",
    ),
    (
        "adapter modules",
        WORKERS,
        "  adapter: {lora: {targetModules: q}}\n",
        ':10: spec.adapter.lora.targetModules: expected all-linear or a list of module names, not "q"',
    ),
]
BROKEN = [
    *WRONG_VALUES,
    *WRONG_TOGETHER,
    *WRONG_EVALUATIONS,
    *WRONG_MIXTURES,
    *WRONG_RAW_DATA,
    *WRONG_OBJECTIVES,
    *WRONG_OPTIMIZERS,
    *WRONG_EXECUTION,
    *WRONG_STORAGE,
    *WRONG_POOLS,
    *WRONG_LIMITS,
    *WRONG_LABELS,
]
COPIES_OF_NOTHING = [
    (
        "copies of nothing",
        WORKERS,
        "  checkpoint: {memoryCopies: 0, peerCopy: true}\n",
        ":10: spec.checkpoint.peerCopy: true copies what memoryCopies keeps in memory: set that to auto, 1 or 2",
    ),
]
REFUSED_BY_MODELS_ALONE = [
    (
        f"compiled layers beside an adapter, {name}",
        WORKERS,
        f"  adapter: {{lora: {{}}}}\n  execution: {{compile: true, {at_stage_3}}}\n",
        (
            ":11: spec.execution.compile: layers with frozen weights cannot be compiled at ZeRO stage 3: "
            "use auto or false"
        ),
    )
    for name, at_stage_3 in [("sharded", "zeroStage: 3"), ("offloaded", "offload: parameters")]
] + [*COPIES_OF_NOTHING, *COMPILED_REWARDS, *EAGER_FP8, *LABELS_FOR_MODELS_ALONE]
"""Jobs that only the models reject: CEL rules cannot read a field that is a string or a boolean."""


@pytest.mark.parametrize(
    ("valid", "broken", "line"),
    [pytest.param(*case[1:], id=case[0].replace(" ", "-")) for case in BROKEN + REFUSED_BY_MODELS_ALONE],
)
def test_a_wrong_value_gives_one_clear_line_and_exit_code_20(
    valid: str,
    broken: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    check_broken_job(valid, broken, line, tmp_path, monkeypatch, capsys)

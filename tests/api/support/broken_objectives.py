"""Job files whose training objective does not fit their data."""

from __future__ import annotations

TRAIN = "    train: {source: shards/train}\n"
PAIRS = '    prompt: "{question}"\n    chosen: "{better}"\n    rejected: "{worse}"\n'
ANSWERS = '    prompt: "{question}"\n    completion: "{answer}"\n'
TEXTS = '    query: "{question}"\n    positive: "{passage}"\n'
EMBEDDING_TRAINING = "    eval: {fraction: 0.1}\n  training: {objective: embedding, "
KTO_DATASET = "causal}\n  dataset:\n" + TRAIN
KTO_TRAINING = "    eval: {fraction: 0.1}\n  training: {objective: kto, "
SEQ2SEQ_DATASET = "seq2seq}\n  dataset:\n" + TRAIN + "    eval: {fraction: 0.1, seed: 1}\n  training: {"
REWARD_DATASET = TRAIN + PAIRS + "    eval: {fraction: 0.1}\n  training: {objective: reward, "

# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_OBJECTIVES = [
    (
        "a chosen answer without a rejected one",
        TRAIN,
        TRAIN + '    prompt: "{question}"\n    chosen: "{better}"\n',
        ":6: spec.dataset.rejected: chosen and rejected must be set together",
    ),
    (
        "packed pairs for a reward model",
        SEQ2SEQ_DATASET,
        "causal}\n  dataset:\n" + TRAIN + "    packing: true\n" + REWARD_DATASET.removeprefix(TRAIN),
        ":8: spec.dataset.packing: is not supported for reward, which scores each answer in its own row: remove it",
    ),
    (
        "pairs for cross-entropy",
        TRAIN,
        TRAIN + PAIRS,
        ":12: spec.training.objective: sft does not use dataset.chosen and rejected: use dpo, orpo, simpo or reward",
    ),
    (
        "a preference objective for seq2seq",
        "epochs: 3",
        "epochs: 3, objective: dpo",
        ":9: spec.training.objective: dpo is for causal models; model.task is seq2seq",
    ),
    (
        "a preference objective without pairs",
        "seq2seq}\n  dataset:\n" + TRAIN + "    eval: {fraction: 0.1, seed: 1}\n  training: {",
        "causal}\n  dataset:\n" + TRAIN + "    text: body\n    eval: {fraction: 0.1}\n  training: {objective: orpo, ",
        ":8: spec.dataset.text: orpo learns from pairs: replace it by dataset.chosen and dataset.rejected",
    ),
    (
        "answers of a preference objective",
        "seq2seq}\n  dataset:\n" + TRAIN + "    eval: {fraction: 0.1, seed: 1}\n  training: {",
        "causal}\n  dataset:\n"
        + TRAIN
        + PAIRS
        + "    eval: {fraction: 0.1}\n  training: {objective: dpo, evaluation: {generate: true}, ",
        ":12: spec.training.evaluation.generate: is not supported for dpo: remove it",
    ),
    (
        "the best of pairs by a metric of labelled answers",
        SEQ2SEQ_DATASET,
        "causal}\n  dataset:\n"
        + TRAIN
        + PAIRS
        + "    eval: {fraction: 0.1}\n  training: {objective: dpo, evaluation: {everySteps: 5, best: {metric: kl}}, ",
        (
            ":12: spec.training.evaluation.best.metric: kl is not evaluated for dpo: use loss, rewardChosen, "
            "rewardRejected, rewardMargin, rewardAccuracy"
        ),
    ),
    (
        "the best embeddings by a misspelt metric",
        SEQ2SEQ_DATASET,
        "causal}\n  dataset:\n"
        + TRAIN
        + TEXTS
        + EMBEDDING_TRAINING
        + "evaluation: {everySteps: 5, best: {metric: MRR}}, ",
        ":11: spec.training.evaluation.best.metric: MRR is not evaluated for embedding: use loss, accuracyAt1, mrr",
    ),
    (
        "which rewards of rejected answers are better",
        SEQ2SEQ_DATASET,
        "causal}\n  dataset:\n"
        + TRAIN
        + PAIRS
        + "    eval: {fraction: 0.1}\n  training: {objective: simpo, "
        + "evaluation: {everySteps: 5, best: {metric: rewardRejected, mode: max}}, ",
        (
            ":12: spec.training.evaluation.best.mode: is only for functions and tasks; lower values of rewardRejected "
            "are better: remove this field"
        ),
    ),
    (
        "labels for cross-entropy",
        TRAIN,
        TRAIN + ANSWERS + '    label: "{good}"\n',
        (
            ":10: spec.dataset.label: is not used by sft: set training.objective to kto, classification or "
            "tokenClassification"
        ),
    ),
    (
        "a label of two columns",
        TRAIN,
        TRAIN + ANSWERS + '    label: "{good}{better}"\n',
        ':10: spec.dataset.label: must be one column in braces, such as "{label}"',
    ),
    (
        "labels that are packed",
        SEQ2SEQ_DATASET,
        KTO_DATASET + ANSWERS + '    label: "{good}"\n    packing: true\n' + KTO_TRAINING,
        ":11: spec.dataset.packing: is not supported for kto, whose labels belong to one row each: remove it",
    ),
    (
        "pairs for kto",
        SEQ2SEQ_DATASET,
        KTO_DATASET + PAIRS + KTO_TRAINING,
        (
            ":9: spec.dataset.chosen: kto learns from answers with a label: set prompt, completion and label instead, "
            "or messages and label"
        ),
    ),
    (
        "answers without a label for kto",
        SEQ2SEQ_DATASET,
        KTO_DATASET + ANSWERS + KTO_TRAINING,
        ":6: spec.dataset.label: is required by kto: set the column that says whether an answer is desirable",
    ),
    (
        "all text of a chat for kto",
        SEQ2SEQ_DATASET,
        KTO_DATASET + '    messages: chat\n    label: "{good}"\n    trainOn: all\n' + KTO_TRAINING,
        ":10: spec.dataset.trainOn: all is not supported for kto, which learns from the last message: remove it",
    ),
    (
        "weights of labels for another objective than kto",
        "epochs: 3",
        "epochs: 3, objective: dpo, preference: {undesirableWeight: 2.0}",
        ":9: spec.training.preference.undesirableWeight: is only used by kto; objective is dpo",
    ),
    (
        "a query without a positive text",
        TRAIN,
        TRAIN + '    query: "{question}"\n',
        ":6: spec.dataset.positive: query and positive must be set together",
    ),
    (
        "a negative text without a query",
        TRAIN,
        TRAIN + '    negative: "{passage}"\n',
        ":8: spec.dataset.negative: requires query and positive",
    ),
    (
        "texts with embeddings that are packed",
        TRAIN,
        TRAIN + TEXTS + "    packing: true\n",
        ":10: spec.dataset.packing: is not supported for texts with embeddings: remove it",
    ),
    (
        "texts with embeddings for cross-entropy",
        TRAIN,
        TRAIN + TEXTS,
        ":8: spec.dataset.query: is only used by embedding; training.objective is sft",
    ),
    (
        "answers for embeddings",
        SEQ2SEQ_DATASET,
        KTO_DATASET + ANSWERS + EMBEDDING_TRAINING,
        ":9: spec.dataset.completion: embedding learns from texts: set query and positive instead",
    ),
    (
        "embeddings of a seq2seq model",
        "epochs: 3",
        "epochs: 3, objective: embedding",
        ":9: spec.training.objective: embedding is for causal models; model.task is seq2seq",
    ),
    (
        "embeddings for another objective",
        "epochs: 3",
        "epochs: 3, embedding: {pooling: cls}",
        ":9: spec.training.embedding: is only used by the objective embedding; objective is sft",
    ),
    (
        "embeddings without other rows in a step",
        "epochs: 3, globalBatchSize: 96",
        "epochs: 3, globalBatchSize: 1, objective: embedding",
        ":9: spec.training.globalBatchSize: must be at least 2: embedding needs other rows in a step as negatives",
    ),
    (
        "an adapter of a model with embeddings",
        SEQ2SEQ_DATASET,
        "causal}\n  adapter: {lora: {r: 8}}\n  dataset:\n" + TRAIN + TEXTS + EMBEDDING_TRAINING,
        ":6: spec.adapter: is not supported for embedding: remove it",
    ),
    (
        "a model with embeddings that is served",
        SEQ2SEQ_DATASET,
        "causal}\n  serving: {}\n  dataset:\n" + TRAIN + TEXTS + EMBEDDING_TRAINING,
        ":6: spec.serving: is not supported for embedding: the model generates no text",
    ),
    (
        "preference hyperparameters of cross-entropy",
        "epochs: 3",
        "epochs: 3, preference: {beta: 0.2}",
        ":9: spec.training.preference: is only used by the objectives dpo, orpo, simpo and kto: set objective",
    ),
    (
        "label smoothing of another objective than dpo",
        "epochs: 3",
        "epochs: 3, objective: simpo, preference: {labelSmoothing: 0.1}",
        ":9: spec.training.preference.labelSmoothing: is only used by dpo; objective is simpo",
    ),
    (
        "a target margin of another objective than simpo",
        "epochs: 3",
        "epochs: 3, objective: dpo, preference: {targetMargin: 0.5}",
        ":9: spec.training.preference.targetMargin: is only used by simpo; objective is dpo",
    ),
    (
        "smoothed cross-entropy of a preference objective",
        "epochs: 3",
        "epochs: 3, objective: dpo, labelSmoothing: 0.1",
        ":9: spec.training.labelSmoothing: smooths the cross-entropy of sft; objective is dpo: remove it",
    ),
    (
        "preference hyperparameters of a reward model",
        "epochs: 3",
        "epochs: 3, objective: reward, preference: {beta: 0.2}",
        ":9: spec.training.preference: is only used by the objectives dpo, orpo, simpo and kto: set objective",
    ),
    (
        "noise on the embeddings of a reward model",
        "epochs: 3",
        "epochs: 3, objective: reward, neftuneNoiseAlpha: 5.0",
        ":9: spec.training.neftuneNoiseAlpha: is not supported for reward: remove it",
    ),
    (
        "a reward model of two parts",
        "epochs: 3",
        "epochs: 3, objective: reward",
        ":9: spec.training.objective: reward is for causal models; model.task is seq2seq",
    ),
    (
        "a reward model that is served",
        SEQ2SEQ_DATASET,
        "causal}\n  serving: {}\n  dataset:\n" + REWARD_DATASET,
        ":6: spec.serving: is not supported for reward: the model generates no text",
    ),
]

# The definition's rules cannot read a field that is a word or a truth value.
COMPILED_REWARDS = [
    (
        "a reward model that is compiled",
        SEQ2SEQ_DATASET,
        "causal}\n  execution: {compile: true}\n  dataset:\n" + REWARD_DATASET,
        ":6: spec.execution.compile: is not supported for reward: use auto or false",
    ),
    (
        "a model with embeddings that is compiled",
        SEQ2SEQ_DATASET,
        "causal}\n  execution: {compile: true}\n  dataset:\n" + TRAIN + TEXTS + EMBEDDING_TRAINING,
        ":6: spec.execution.compile: is not supported for embedding: use auto or false",
    ),
]

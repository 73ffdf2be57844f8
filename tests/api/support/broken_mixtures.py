"""Job files with invalid mixtures, and the expected errors."""

TRAIN = "    train: {source: shards/train}\n"
SQL, CHAT = "name: sql, train: {source: shards/sql}", "name: chat, train: {source: shards/chat}"


def mixture(*sources: str) -> str:
    """The field of a dataset with these sources, on one line."""
    return f"    mixture: [{', '.join(f'{{{source}}}' for source in sources)}]\n"


# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_MIXTURES = [
    (
        "mixture beside shards",
        TRAIN,
        TRAIN + mixture(SQL),
        ":7: spec.dataset.train: cannot be combined with mixture: make it a source of the mixture",
    ),
    (
        "source of a mixture without data",
        TRAIN,
        mixture(SQL, "name: chat"),
        (
            ":7: spec.dataset.mixture[1]: set exactly one of train.source (a folder of shards) and prepare.source "
            "(raw data)"
        ),
    ),
    (
        "two sources of one name",
        TRAIN,
        mixture(SQL, SQL),
        ":7: spec.dataset.mixture: has 2 sources named sql: give each its own name",
    ),
    (
        "name with capitals in a mixture",
        TRAIN,
        mixture("name: SQL, train: {source: a}"),
        (
            ":7: spec.dataset.mixture[0].name: 'SQL' is not a name of a source: use a-z, 0-9 and -, start and end with "
            "a letter or digit, at most 40 characters"
        ),
    ),
    (
        "weight of zero",
        TRAIN,
        mixture(f"{SQL}, weight: 0"),
        ":7: spec.dataset.mixture[0].weight: expected more than 0, not 0",
    ),
    (
        "weight of one source alone",
        TRAIN,
        mixture(f"{SQL}, weight: 2", CHAT),
        ":7: spec.dataset.mixture: has weights, but none for chat: set weight for all sources, or for none",
    ),
    (
        "weights and a temperature",
        TRAIN,
        mixture(f"{SQL}, weight: 2") + "    mixtureTemperature: 2\n",
        (
            ":8: spec.dataset.mixtureTemperature: cannot be combined with weights: remove it, or the weights of all "
            "sources"
        ),
    ),
    (
        "temperature without a mixture",
        TRAIN,
        TRAIN + "    mixtureTemperature: 2\n",
        ":8: spec.dataset.mixtureTemperature: is only used with mixture",
    ),
    (
        "temperature below one",
        TRAIN,
        mixture(SQL) + "    mixtureTemperature: 0.5\n",
        ":8: spec.dataset.mixtureTemperature: expected at least 1, not 0.5",
    ),
    (
        "first steps without a source",
        TRAIN,
        mixture(f"{SQL}, fromStep: 10"),
        (
            ":7: spec.dataset.mixture: has no source for the steps after step 0: change fromStep or untilStep of a "
            "source"
        ),
    ),
    (
        "steps between two sources without one",
        TRAIN,
        mixture(f"{SQL}, untilStep: 10", f"{CHAT}, fromStep: 11"),
        (
            ":7: spec.dataset.mixture: has no source for the steps after step 10: change fromStep or untilStep of a "
            "source"
        ),
    ),
    (
        "source that ends before it begins",
        TRAIN,
        mixture(SQL, f"{CHAT}, fromStep: 11, untilStep: 11"),
        ":7: spec.dataset.mixture[1].untilStep: must be more than fromStep, or 0",
    ),
    (
        "raw data in a mixture without a row format",
        TRAIN,
        mixture("name: sql, prepare: {source: rows.jsonl}"),
        (
            ":7: spec.dataset.mixture: has raw data but no row format: set prompt with completion, text, messages, "
            "chosen with rejected, or query with positive"
        ),
    ),
    (
        "evaluation shards of a whole mixture",
        "    train: {source: shards/train}\n    eval: {fraction: 0.1, seed: 1}\n",
        mixture(SQL) + "    eval: {source: shards/eval}\n",
        (
            ":8: spec.dataset.eval.source: cannot be combined with mixture: set eval.source of its sources, or "
            "eval.fraction"
        ),
    ),
]

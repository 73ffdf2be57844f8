"""Job files with invalid raw data, and the expected errors."""

TRAIN = "    train: {source: shards/train}\n"
FORM = "    prompt: '{a}'\n    completion: '{b}'\n"
DATASET = "hf://datasets/me/rows"

# (what is broken, text of the valid file, what is there instead, what is printed after the file's name)
WRONG_RAW_DATA = [
    (
        "rows that may be left out of shards",
        TRAIN,
        TRAIN + "    maxSkipped: 3\n",
        (
            ":8: spec.dataset.maxSkipped: is only for raw rows, and shards are made already: set a row format, or "
            "remove it"
        ),
    ),
    (
        "split of files in a bucket",
        TRAIN,
        '    prepare: {source: "s3://bucket/rows", split: train}\n' + FORM,
        (
            ":7: spec.dataset.prepare.split: is only for datasets on the Hugging Face Hub, "
            "hf://datasets/owner/name: remove it"
        ),
    ),
    (
        "configuration of a local file in a mixture",
        TRAIN,
        "    mixture: [{name: sql, prepare: {source: rows.jsonl, config: en}}]\n" + FORM,
        (
            ":7: spec.dataset.mixture[0].prepare.config: is only for datasets on the Hugging Face Hub, "
            "hf://datasets/owner/name: remove it"
        ),
    ),
    (
        "split of a pattern",
        TRAIN,
        f'    prepare: {{source: "{DATASET}/*.jsonl", split: train}}\n' + FORM,
        (
            ":7: spec.dataset.prepare.split: cannot be combined with a pattern, which names files itself: "
            "remove one of them"
        ),
    ),
    (
        "slice of a split",
        TRAIN,
        f'    prepare: {{source: "{DATASET}", split: "train[:10%]"}}\n' + FORM,
        (
            ":7: spec.dataset.prepare.split: 'train[:10%]' is not the name of a split: slices and sums such as "
            "train[:10%] or train+test are not supported; name one split, and take several as sources of a mixture"
        ),
    ),
    (
        "name of a configuration that is too long",
        TRAIN,
        f'    prepare: {{source: "{DATASET}", config: {"x" * 201}}}\n' + FORM,
        ":7: spec.dataset.prepare.config: has 201 characters; at most 200 are allowed",
    ),
]

"""Configurations and splits of datasets: the same files as `datasets` finds, and refusals that say what there is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random

import pytest
import yaml
from datasets.data_files import DataFilesPatternsDict, get_data_patterns, sanitize_patterns
from datasets.utils.metadata import MetadataConfigs
from huggingface_hub import DatasetCardData

from spotune.errors import JobError
from spotune_trainer.data.preparation.raw_files import format_of
from spotune_trainer.data.stores.hub_splits import CARD, CARD_METADATA, CONVERTED_TO_PARQUET, choose_split
from spotune_trainer.data.stores.stored_file import StoredFile

Splits = dict[str, list[str]]

SHARDED = [f"data/{split}-{number:05}-of-00002-a1.parquet" for split in ("train", "test", "extra") for number in (0, 1)]
TREES: Mapping[str, Sequence[str]] = {
    "one file": ["rows.jsonl"],
    "files without the name of a split": ["a.csv", "sub/b.csv", "README.md", "config.json", "dataset_infos.json"],
    "sharded files": [*SHARDED, "other/x.parquet"],
    "one sharded split": ["data/train-00000-of-00001.parquet", "README.md"],
    "file names": ["train.jsonl", "test.jsonl", "other.jsonl"],
    "synonyms in file names": ["my-training_1.csv", "dev.csv", "eval-2.csv", "x.val.csv", "contest.csv", "trains.csv"],
    "folders": ["en/train/0.jsonl", "en/valid/0.jsonl", "fr/train_a/0.jsonl", "testing/0.jsonl", "latest/0.jsonl"],
    "folders go before file names": ["train/test.jsonl", "train/a.jsonl", "test.jsonl"],
    "two words": ["train/test/a.jsonl", "test.jsonl"],
    "hidden and special folders": ["train.csv", ".test/test.csv", "__pycache__/test.csv"],
    "upper case": ["Train.csv", "Test.csv"],
    "splits of a chat corpus": ["data/train_sft-00000-of-00001.parquet", "data/train_gen-00000-of-00001.parquet"],
}
CARDS = {
    "one pattern": "configs: [{config_name: default, data_files: 'data/*.csv'}]",
    "patterns": "configs: [{config_name: x, data_files: [data/a.csv, 'data/b*.csv']}]",
    "splits": "configs: [{config_name: x, data_files: [{split: train, path: data/a.csv},"
    " {split: test, path: [data/b.csv, data/c.csv]}]}]",
    "folder": "configs: [{config_name: x, data_dir: data}, {config_name: y, data_dir: fr, default: true}]",
    "folder with patterns": "configs: [{config_name: x, data_dir: fr, data_files: 'train*'}]",
    "every file": "configs: [{config_name: x, data_files: '**'}, {config_name: default, data_files: 'fr/**/*'}]",
}
CARD_FILES = ["data/a.csv", "data/b.csv", "data/c.csv", "fr/train.csv", "fr/test.csv", "fr/deep/train-1.csv"]


def choose(files: Sequence[str], config: str = "", split: str = "", folder: str = "", bucket: str = "me/rows",
           texts: Mapping[str, str] | None = None) -> list[StoredFile]:  # fmt: skip
    stored = [StoredFile(f"hf://datasets/{bucket}/{path}", bucket, path, 1, "v") for path in sorted(files)]
    stored = [file for file in stored if file.key.startswith(folder)]
    source = f"hf://datasets/{bucket}/{folder}".rstrip("/")
    contents = texts or {}
    return choose_split(
        source,
        folder,
        stored,
        config,
        split,
        lambda name: format_of(name) is not None,
        lambda file: contents.get(file.key, ""),
    )


def of_datasets(root: Path, patterns: Mapping[str, Sequence[str]], base: Path) -> Splits:
    """Files by split, as `datasets` finds them; each once."""
    resolved = DataFilesPatternsDict.from_patterns({split: list(each) for split, each in patterns.items()})
    found = resolved.resolve(str(base))
    return {
        str(split): list(dict.fromkeys(str(Path(path).relative_to(root)) for path in found[split])) for split in found
    }


def write(root: Path, files: Sequence[str]) -> None:
    for name in files:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def ours(files: Sequence[str], splits: Sequence[str], folder: str = "") -> Splits:
    return {split: [file.key for file in choose(files, split=split, folder=folder)] for split in splits}


@pytest.mark.parametrize("name", TREES)
def test_splits_by_name_are_those_of_datasets(name: str, tmp_path: Path) -> None:
    files = TREES[name]
    write(tmp_path, files)
    expected = of_datasets(tmp_path, get_data_patterns(str(tmp_path)), tmp_path)
    assert ours(files, list(expected)) == expected
    known = ", ".join(expected)
    with pytest.raises(JobError, match=re.escape(f"hf://datasets/me/rows has no split none, but {known}: set prepare")):
        choose(files, split="none")
    if len(expected) == 1:
        assert [file.key for file in choose(files)] == next(iter(expected.values()))
    else:
        message = rf"has the splits {known}: set prepare\.split \(--split\) to the one to read"
        with pytest.raises(JobError, match=message):
            choose(files)


def test_splits_of_random_names_are_those_of_datasets(tmp_path: Path) -> None:
    random = Random(1)
    words = ["train", "training", "test", "eval", "dev", "val", "en", "a1", "contest", "00000", "data", "extra"]
    for number in range(60):
        folders = ["/".join(random.choices(words, k=random.randint(0, 2))) for _ in range(3)]
        names = ["".join(random.sample([*words, "-", "_", "."], k=3)).strip(".") + ".csv" for _ in range(6)]
        files = sorted({f"{random.choice(folders)}/{name}".lstrip("/") for name in names})
        root = tmp_path / str(number)
        write(root, files)
        expected = of_datasets(root, get_data_patterns(str(root)), root)
        assert ours(files, list(expected)) == expected, files


def test_a_folder_has_splits_of_its_own(tmp_path: Path) -> None:
    files = TREES["folders"]
    write(tmp_path, files)
    expected = of_datasets(tmp_path, get_data_patterns(str(tmp_path / "en")), tmp_path / "en")
    assert expected.keys() == {"train", "validation"}
    assert ours(files, list(expected), folder="en/") == expected
    assert [file.key for file in choose(files, folder="en/train/")] == ["en/train/0.jsonl"]
    with pytest.raises(JobError, match="is a folder, which has no configurations: remove config, or the folder"):
        choose(files, config="x", folder="en/train/")


@pytest.mark.parametrize("name", CARDS)
def test_configurations_of_a_card_are_those_of_datasets(name: str, tmp_path: Path) -> None:
    files = [*CARD_FILES, CARD]
    write(tmp_path, files)
    card = f"---\n{CARDS[name]}\nlicense: mit\n---\n# A dataset\n"
    texts = {CARD: card}
    configs = MetadataConfigs.from_dataset_card_data(DatasetCardData(**yaml.safe_load(CARDS[name])))
    for config, params in configs.items():
        base = tmp_path / params.get("data_dir", "")
        given = params.get("data_files")
        patterns = sanitize_patterns(given) if given is not None else get_data_patterns(str(base))
        expected = of_datasets(tmp_path, patterns, base)
        found = {split: choose(files, config, split, texts=texts) for split in expected}
        assert {split: [file.key for file in each] for split, each in found.items()} == expected
        assert {(file.config, file.split) for each in found.values() for file in each} == {
            (config, split) for split in expected
        }
    default = configs.get_default_config_name()
    assert default is not None
    assert choose(files, split="train", texts=texts) == choose(files, default, "train", texts=texts)


def test_an_error_names_configurations_with_their_splits() -> None:
    card = """---
configs:
- {config_name: en, data_files: [{split: train, path: data/a.csv}, {split: test, path: data/b.csv}]}
- {config_name: fr, data_dir: fr}
---
"""
    files, texts = [*CARD_FILES, CARD], {CARD: card}
    known = r"en \(train, test\), fr \(train, test\)"
    with pytest.raises(JobError, match=rf"configurations, with their splits, {known}, and none of them is the default"):
        choose(files, split="train", texts=texts)
    with pytest.raises(JobError, match=rf"no configuration de, but these, with their splits: {known}: set prepare\."):
        choose(files, "de", texts=texts)
    message = r"the splits train, test of configuration en \(other configurations: fr\): set prepare\.split \(--split\)"
    with pytest.raises(JobError, match=message):
        choose(files, "en", texts=texts)
    with pytest.raises(JobError, match=r"no configuration x, but these, with their splits: default \(train\): set"):
        choose(["rows.csv"], "x")
    assert choose(["rows.csv"], "default")
    texts = {CARD: "---\nconfigs: [{config_name: en, data_dir: data}]\n---\n"}
    with pytest.raises(
        JobError, match=r"no configuration x, but these, with their splits: en \(train\): set prepare\."
    ):
        choose(files, "x", texts=texts)


BROKEN_CARDS = [
    ("configs: [", "the metadata in its README.md is not YAML"),
    ("configs: {en: data}", "configs in its card is not a list with a config_name in each item"),
    ("configs: [{data_files: x}]", "configs in its card is not a list with a config_name in each item"),
    ("configs: [{config_name: x, data_files: [{split: train}]}]", "neither patterns nor a list with split and path"),
    ("configs: [{config_name: x, data_files: 'https://host/x.csv'}]", "names files elsewhere, https://host/x.csv"),
    ("configs: [{config_name: x, data_files: gone.csv}]", "no file of rows at gone.csv, which its card names for"),
    ("configs: [{config_name: x, data_files: 'gone/*'}]", r"no file of rows at gone/\*, which its card names"),
    (
        "configs: [{config_name: x, data_files: [{split: a, path: data/a.csv}, {split: a, path: data/b.csv}]}]",
        "data_files in its card name a split twice",
    ),
    (
        "configs: [{config_name: x, data_dir: data, default: true}, {config_name: default, data_dir: fr}]",
        "and more than one of them is the default",
    ),
]


@pytest.mark.parametrize(("metadata", "message"), BROKEN_CARDS)
def test_a_card_that_is_wrong_is_refused(metadata: str, message: str) -> None:
    with pytest.raises(JobError, match=f"^hf://datasets/me/rows.*{message}"):
        choose([*CARD_FILES, CARD], texts={CARD: f"---\n{metadata}\n---\n"})


def test_metadata_beside_the_card_goes_before_it() -> None:
    texts = {
        CARD: "---\nconfigs: [{config_name: x, data_files: data/a.csv}]\n---\n",
        CARD_METADATA: "configs: [{config_name: y, data_files: data/b.csv}]",
    }
    (file,) = choose([*CARD_FILES, *texts], texts=texts)
    assert (file.key, file.config, file.split) == ("data/b.csv", "y", "train")


@pytest.mark.parametrize("text", ["", "# No metadata\n", "---\nnot closed", "---\n---\n", "---\n- a list\n---\n"])
def test_a_card_without_configurations_leaves_the_names(text: str) -> None:
    assert [file.key for file in choose(["train.csv", "test.csv", CARD], split="test", texts={CARD: text})] == [
        "test.csv"
    ]


def test_files_of_the_parquet_revision_are_of_a_configuration_and_split() -> None:
    bucket = "me/rows@" + CONVERTED_TO_PARQUET
    folders = ["main/train_sft", "main/train_gen", "socratic/train", "socratic/test"]
    files = [f"{folder}/{number:04}.parquet" for folder in folders for number in (0, 1)]
    (first, _) = choose(files, "socratic", "test", bucket=bucket)
    assert (first.key, first.config, first.split) == ("socratic/test/0000.parquet", "socratic", "test")
    known = r"main \(train_gen, train_sft\), socratic \(test, train\), and none of them is the default"
    with pytest.raises(JobError, match=known):
        choose(files, bucket=bucket)
    with pytest.raises(JobError, match="has the splits train_gen, train_sft"):
        choose(files, folder="main/", bucket=bucket)
    assert len(choose(files, folder="main/train_sft/", bucket=bucket)) == 2

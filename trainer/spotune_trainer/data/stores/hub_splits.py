"""Which files of a dataset on the Hugging Face Hub belong to which configuration and split.

The rules are those of `datasets.load_dataset` (`datasets.data_files`, `datasets.utils.metadata`): the dataset card
names configurations and their files, or else folders and files are named after the splits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from spotune.errors import JobError
from spotune_trainer.data.stores.hub import revision_of
from spotune_trainer.data.stores.patterns import WILDCARD, compile_pattern
from spotune_trainer.data.stores.stored_file import StoredFile

CARD: Final = "README.md"
CARD_METADATA: Final = ".huggingface.yaml"
"""Metadata of a dataset without a card; goes before that of the card."""
CONVERTED_TO_PARQUET: Final = "refs/convert/parquet"
"""The revision in which the Hub keeps each dataset as ``config/split/0000.parquet``."""
_DEFAULT_CONFIG: Final = "default"
_REMEDY: Final = "name files by a pattern in the source, or ask the owner to mend the card"
_KEYWORDS: Final = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATORS: Final = "-._ 0-9"
_SHARDED: Final = re.compile(r"data/([^/]+)-[0-9]{5}-of-[0-9]{5}[^/]*\.[^/]*")
_FOLDERS: Final = (
    "**/{keyword}/**",
    "**/{keyword}[{sep}]*/**",
    "**/*[{sep}]{keyword}/**",
    "**/*[{sep}]{keyword}[{sep}]*/**",
)
_FILE_NAMES: Final = ("**/{keyword}[{sep}]*", "**/*[{sep}]{keyword}[{sep}]*")
_NOT_ROWS: Final = frozenset(
    {CARD, "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json"}
)


@dataclass(frozen=True)
class _Config:
    """A configuration.

    Attributes:
        name: Its name.
        patterns: Patterns of files by split; None: splits are found by the names of folders and files.
        folder: That the patterns start at, with a slash at the end; empty: the whole dataset.
        is_default: Whether it is read if none is asked for.
    """

    name: str
    patterns: Mapping[str, Sequence[str]] | None = None
    folder: str = ""
    is_default: bool = False


def choose_split(
    source: str,
    folder: str,
    files: Sequence[StoredFile],
    config_name: str,
    split_name: str,
    is_rows: Callable[[str], bool],
    read_text: Callable[[StoredFile], str],
) -> list[StoredFile]:
    """The files of one split of a dataset, or of a folder in it, in the order of `datasets`.

    Args:
        source: URL, for messages.
        folder: Path in the repository; empty: the whole dataset, whose card counts.
        files: All files in there.
        config_name: Configuration; empty: the default one, or the only one.
        split_name: Split; empty: the only one.
        is_rows: Whether the format of a file name is one of rows.
        read_text: Downloads the card.

    Raises:
        JobError: There are several and none was asked for, or not the one that was, or the card is wrong.
    """
    base = f"{folder.rstrip('/')}/" if folder else ""
    paths = {file.key: file for file in files if is_rows(file.key.rpartition("/")[2])}
    if not paths:
        return []
    configs = _configs_of(source, base, files, list(paths), read_text)
    if config_name and base and configs[0].folder == base:
        raise JobError(f"{source} is a folder, which has no configurations: remove config, or the folder")
    config = _choose_config(source, configs, config_name, list(paths))
    splits = _splits_of(config, list(paths))
    split = _choose_split(source, config, list(splits), split_name, [other.name for other in configs])
    chosen = _matching(splits[split], config.folder, list(paths))
    missing = [
        pattern for pattern in splits[split] if not WILDCARD.search(pattern) and config.folder + pattern not in paths
    ]
    if missing or not chosen:
        raise JobError(
            f"{source} has no file of rows at {', '.join(missing or splits[split])}, which its card names for split "
            f"{split} of configuration {config.name}: name the files in the source, or ask the owner to mend the card"
        )
    return [dataclasses.replace(paths[path], config=config.name, split=split) for path in chosen]


def _configs_of(
    source: str,
    base: str,
    files: Sequence[StoredFile],
    paths: Sequence[str],
    read_text: Callable[[StoredFile], str],
) -> list[_Config]:
    if revision_of(files[0].bucket) == CONVERTED_TO_PARQUET:
        return _converted_configs(paths)
    if base:
        return [_Config(_DEFAULT_CONFIG, folder=base)]
    metadata: dict[str, Any] = {}
    metadata_files = {file.key: file for file in files if file.key in {CARD, CARD_METADATA}}
    if CARD in metadata_files:
        metadata |= _parse(source, CARD, _front_matter(read_text(metadata_files[CARD])))
    if CARD_METADATA in metadata_files:
        metadata |= _parse(source, CARD_METADATA, read_text(metadata_files[CARD_METADATA]))
    return _card_configs(source, metadata) or [_Config(_DEFAULT_CONFIG)]


def _converted_configs(paths: Iterable[str]) -> list[_Config]:
    """Configurations of the revision that the Hub itself writes: folders with a folder for each split."""
    found: dict[str, dict[str, list[str]]] = {}
    for path in sorted(paths):
        config, _, in_config = path.partition("/")
        split = in_config.rpartition("/")[0]
        found.setdefault(config, {}).setdefault(split, []).append(path)
    return [_Config(name, splits, is_default=name == _DEFAULT_CONFIG) for name, splits in found.items()]


# The card


def _front_matter(card: str) -> str:
    lines = card.splitlines()
    if not lines or lines[0] != "---" or "---" not in lines[1:]:
        return ""
    return "\n".join(lines[1 : lines.index("---", 1)])


def _parse(source: str, name: str, text: str) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise JobError(f"{source}: the metadata in its {name} is not YAML ({error}): {_REMEDY}") from error
    return found if isinstance(found, dict) else {}


def _card_configs(source: str, metadata: Mapping[str, Any]) -> list[_Config]:
    """The field ``configs`` of a card: https://huggingface.co/docs/hub/datasets-manual-configuration."""
    given = metadata.get("configs") or []
    if not isinstance(given, list) or not all(isinstance(each, dict) and "config_name" in each for each in given):
        raise JobError(f"{source}: configs in its card is not a list with a config_name in each item: {_REMEDY}")
    return [
        _Config(
            str(each["config_name"]),
            None if each.get("data_files") is None else _patterns(source, each["data_files"]),
            f"{str(each['data_dir']).strip('/')}/" if each.get("data_dir") else "",
            bool(len(given) == 1 or each["config_name"] == _DEFAULT_CONFIG or each.get("default")),
        )
        for each in given
    ]


def _patterns(source: str, given: Any) -> dict[str, list[str]]:
    """Patterns by split. Without names of splits they are all of the split train."""
    items = [given] if isinstance(given, str) else given
    if isinstance(items, list) and items and all(isinstance(item, str) for item in items):
        found = {"train": [_within(source, item) for item in items]}
    elif isinstance(items, list) and items and all(map(_names_split, items)):
        found = {
            str(item["split"]): [
                _within(source, path) for path in ([item["path"]] if isinstance(item["path"], str) else item["path"])
            ]
            for item in items
        }
        if len(found) < len(items):
            raise JobError(f"{source}: data_files in its card name a split twice: {_REMEDY}")
    else:
        raise JobError(
            f"{source}: data_files in its card are neither patterns nor a list with split and path: {_REMEDY}"
        )
    return found


def _names_split(item: Any) -> bool:
    return isinstance(item, dict) and "split" in item and isinstance(item.get("path"), str | list)


def _within(source: str, pattern: Any) -> str:
    if "://" in str(pattern):
        raise JobError(f"{source}: its card names files elsewhere, {pattern}: name them in the source")
    return str(pattern).removeprefix("./")


# Choices


def _choose_config(source: str, configs: Sequence[_Config], name: str, paths: Sequence[str]) -> _Config:
    defaults = [config for config in configs if config.is_default or len(configs) == 1]
    named = [config for config in configs if config.name == name]
    if named or (not name and len(defaults) == 1):
        return (named or defaults)[0]
    known = ", ".join(f"{config.name} ({', '.join(_splits_of(config, paths))})" for config in configs)
    if name:
        raise JobError(
            f"{source} has no configuration {name}, but these, with their splits: {known}: "
            "set prepare.config (--config) to one of them"
        )
    which = "and more than one of them is the default" if defaults else "and none of them is the default"
    raise JobError(
        f"{source} has the configurations, with their splits, {known}, {which}: "
        "set prepare.config (--config) to the one to read"
    )


def _choose_split(source: str, config: _Config, splits: Sequence[str], name: str, configs: Sequence[str]) -> str:
    if name in splits or (not name and len(splits) == 1):
        return name or splits[0]
    of = f" of configuration {config.name}" if len(configs) > 1 else ""
    others = f" (other configurations: {', '.join(name for name in configs if name != config.name)})" if of else ""
    if name:
        raise JobError(
            f"{source} has no split {name}{of}, but {', '.join(splits)}{others}: "
            "set prepare.split (--split) to one of them"
        )
    raise JobError(
        f"{source} has the splits {', '.join(splits)}{of}{others}: set prepare.split (--split) to the one to read"
    )


def _splits_of(config: _Config, paths: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Patterns by split, those of `config` or, by the names of folders and files, those of `datasets`."""
    if config.patterns is not None:
        return config.patterns
    names = [path.removeprefix(config.folder) for path in paths if path.startswith(config.folder)]
    sharded = {match[1] for name in names if (match := _SHARDED.fullmatch(name))}
    if sharded:
        order = [*(split for split in _KEYWORDS if split in sharded), *sorted(sharded - _KEYWORDS.keys())]
        digits = "[0-9]" * 5
        return {split: [f"data/{split}-{digits}-of-{digits}*.*"] for split in order}
    for templates in (_FOLDERS, _FILE_NAMES):
        found = {
            split: patterns
            for split, keywords in _KEYWORDS.items()
            if _matching(patterns := _for_keywords(templates, keywords), "", names)
        }
        if found:
            return found
    return {"train": ["**"]}


def _for_keywords(templates: Iterable[str], keywords: Iterable[str]) -> list[str]:
    return [template.format(keyword=keyword, sep=_SEPARATORS) for keyword in keywords for template in templates]


def _matching(patterns: Iterable[str], folder: str, paths: Iterable[str]) -> list[str]:
    """Paths that match, each once: by pattern, then by name.

    Hidden files, folders whose name starts with two underscores, and files of metadata match only if the pattern names
    them.
    """
    names = sorted(path.removeprefix(folder) for path in paths if path.startswith(folder))
    found: dict[str, None] = {}
    for pattern in patterns:
        regex = compile_pattern(pattern) if WILDCARD.search(pattern) else re.compile(re.escape(pattern))
        ignored = _NOT_ROWS - {pattern.rpartition("/")[2]}
        special = _special_parts(pattern)
        for name in names:
            if regex.fullmatch(name) and name.rpartition("/")[2] not in ignored and _special_parts(name) == special:
                found[folder + name] = None
    return list(found)


def _special_parts(path: str) -> tuple[int, int]:
    """Number of hidden parts, and of folders whose name starts with two underscores."""
    parts = PurePosixPath(path).parts
    return sum(part.startswith(".") for part in parts), sum(part.startswith("__") for part in parts[:-1])

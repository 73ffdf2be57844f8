r"""Copies the chart, with the images of a release in its values, by digest: what is then packaged and signed.

python -m charts.pin build/chart --operator REGISTRY/operator@sha256:... --trainer REGISTRY/trainer@sha256:... \
    --serve REGISTRY/serve@sha256:... --serve-vllm REGISTRY/serve-vllm@sha256:...
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import yaml

from charts import generate

_REFERENCE = re.compile(r"([^@\s]+)@(sha256:[0-9a-f]{64})")


def pinned(folder: Path, operator: str, trainer: str, serve: str, serve_vllm: str) -> None:
    """Write a copy of the chart whose defaults are these images.

    Raises:
        ValueError: A reference has no digest.
        FileExistsError: The folder is there already.
    """
    repository, digest = _parts("operator", operator)
    for name, reference in {"trainer": trainer, "serve": serve, "serve-vllm": serve_vllm}.items():
        _parts(name, reference)
    values = {
        "image.repository": repository,
        "image.digest": digest,
        "trainer.image": trainer,
        "serving.image": serve,
        "serving.vllmImage": serve_vllm,
    }
    shutil.copytree(generate.CHART, folder)
    path = folder / "values.yaml"
    path.write_text(with_values(path.read_text(encoding="utf-8"), values), encoding="utf-8")
    for path, text in generate.files(folder).items():
        path.write_text(text, encoding="utf-8")


def with_values(text: str, values: Mapping[str, str]) -> str:
    """A file of values with other texts at some paths (`image.digest`), and its comments.

    Raises:
        KeyError: There is no such path.
    """
    nodes = {path: _at(yaml.compose(text), path.split(".")) for path in values}
    for path, node in sorted(nodes.items(), key=lambda item: item[1].start_mark.index, reverse=True):
        text = text[: node.start_mark.index] + json.dumps(values[path]) + text[node.end_mark.index :]
    return text


def _parts(name: str, reference: str) -> tuple[str, str]:
    """Repository and digest."""
    found = _REFERENCE.fullmatch(reference)
    if not found:
        raise ValueError(f"{reference!r}: the {name}'s image must be named by its digest, as REPOSITORY@sha256:...")
    return found[1], found[2]


def _at(node: yaml.Node | None, path: list[str]) -> yaml.Node:
    for name in path:
        below = node.value if isinstance(node, yaml.MappingNode) else ()
        node = {key.value: value for key, value in below}[name]
    assert node
    return node


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the copy; must not be there yet")
    parser.add_argument("--operator", required=True, help="image of the operator, with its digest")
    parser.add_argument("--trainer", required=True, help="image of jobs that name none, with its digest")
    parser.add_argument("--serve", required=True, help="image of services that name none, with its digest")
    parser.add_argument("--serve-vllm", required=True, help="the same with vLLM, for services with GPUs")
    given = parser.parse_args()
    pinned(given.folder, given.operator, given.trainer, given.serve, given.serve_vllm)

"""Differences of two builds of an image are found and named; the builds themselves are `make images-reproducible`."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from tests.cluster.reproducible_images import differences


def save_image(path: Path, layers: list[dict[str, bytes]], modified: int = 0, configuration: bytes = b"{}") -> Path:
    """An archive as buildah saves it."""

    def packed(files: dict[str, bytes]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size, member.mtime = len(content), modified
                archive.addfile(member, io.BytesIO(content))
        return buffer.getvalue()

    names = [f"{index}.tar" for index in range(len(layers))]
    manifest = json.dumps([{"Config": "x.json", "Layers": names}]).encode()
    files = {"manifest.json": manifest, "x.json": configuration, **dict(zip(names, map(packed, layers), strict=True))}
    path.write_bytes(packed(files))
    return path


def test_same_images_have_no_differences(tmp_path: Path) -> None:
    first, second = (save_image(tmp_path / name, [{"a": b"1"}, {"b": b"2"}]) for name in ("first", "second"))
    assert differences(first, second) == []


def test_each_difference_names_layer_and_path(tmp_path: Path) -> None:
    first = save_image(tmp_path / "first", [{"a": b"1"}, {"b": b"2", "log": b""}])
    second = save_image(tmp_path / "second", [{"a": b"1"}, {"b": b"3"}], configuration=b"{ }")
    found = [each.split(": ")[:-1] for each in differences(first, second)]
    assert found == [["configuration"], ["layer 1", "b"], ["layer 1", "log"]]


def test_other_time_of_a_file_is_a_difference(tmp_path: Path) -> None:
    first, second = (save_image(tmp_path / str(time), [{"a": b"1"}], modified=time) for time in (0, 1))
    assert [each.split(": ")[1] for each in differences(first, second)] == ["a"]

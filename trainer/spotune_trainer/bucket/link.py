"""`bucket.json`: which bucket keeps the state of a job directory. Never uploaded: it belongs to this machine."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from spotune_trainer import files
from spotune_trainer.bucket.client import Bucket, open_bucket
from spotune_trainer.job_directory.layout import JobDirectory


@dataclass(frozen=True)
class Link:
    """The bucket of a job directory.

    Attributes:
        url: of the bucket, with its prefix.
        writer: number under which this directory's supervisor and driver write; 0: they are on another machine.
    """

    url: str
    writer: int = 0

    @property
    def is_of_a_node(self) -> bool:
        """Whether the directory is that of a node: supervisor and driver write on another machine."""
        return self.writer == 0

    def name(self, relative: str) -> str:
        """Name of the object of a file that supervisor and driver write."""
        return f"{writer_folder(self.writer)}/{relative}"


def writer_folder(number: int) -> str:
    """Folder of the objects of a writer."""
    return f"{WRITERS}/{number:07d}"


WRITERS = "writers"


def link_of(directory: JobDirectory) -> Link | None:
    """The bucket of a directory; None if the directory itself is the storage."""
    value = files.read_json(directory.bucket)
    with files.reading(directory.bucket):
        return Link(str(value["url"]), value["writer"]) if value else None


def put_link(directory: JobDirectory, link: Link) -> None:
    """Record the bucket of a directory."""
    directory.root.mkdir(parents=True, exist_ok=True)
    files.write_json(directory.bucket, {"url": link.url, "writer": link.writer})


def link_node(directory: JobDirectory, url: str) -> bool:
    """Link a directory of a node to a bucket, unless supervisor and driver write there.

    Args:
        directory: of the job on this node.
        url: of the job's bucket.

    Returns:
        Whether it is a directory of the node's own.
    """
    link = link_of(directory)
    if link is not None and not link.is_of_a_node:
        return False
    if link is not None and link.url != url:  # a local disk that outlived a job
        shutil.rmtree(directory.root)
    if link is None or link.url != url:
        put_link(directory, Link(url))
    return True


def bucket_of(directory: JobDirectory) -> Bucket | None:
    """The client of a directory's bucket; None if the directory itself is the storage."""
    link = link_of(directory)
    return open_bucket(link.url) if link is not None else None

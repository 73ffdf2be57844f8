"""Fields of the language whose feature does not exist yet: refused with a sentence, never ignored.

Fields that concern pods, nodes and storage only (resources, podTemplate, storage, cluster, ...) are not here: they have
nothing to say on one machine, and the operator reads them in a cluster.
"""

from collections.abc import Iterator

from spotune.errors import JobError, Problem
from spotune.job import FinetuneJob, FinetuneJobSpec
from spotune.yaml_file import Document


def refuse_unbuilt(job: FinetuneJob, document: Document | None = None) -> None:
    """Refuses a valid job that asks for something that this version cannot do.

    Args:
        job: A valid job.
        document: Where the job was read from, to name file and line in the message.

    Raises:
        JobError: Names every such field, and what to do instead.
    """
    document = document or Document(content=None)
    problems = [
        Problem(reason, f"spec.{field}", document.file, document.line(("spec", *field.split("."))))
        for field, reason in _asked_for(job.spec)
    ]
    if problems:
        raise JobError(problems=problems)


def _asked_for(spec: FinetuneJobSpec) -> Iterator[tuple[str, str]]:
    """(field, reason) of what does not exist yet."""
    yield from ()

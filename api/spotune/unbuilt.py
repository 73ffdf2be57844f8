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
        for field, reason in (*_in_meaning(job.spec), *_in_execution(job.spec), *_in_outcome(job.spec))
    ]
    if problems:
        raise JobError(problems=problems)


def _in_meaning(spec: FinetuneJobSpec) -> Iterator[tuple[str, str]]:
    """(field, reason) in what is trained."""
    if spec.model.dtype == "float16" and spec.model.task == "seq2seq":
        yield (
            "model.dtype",
            "float16 overflows in T5 and models like it (its largest number is 65504): use bfloat16 or float32",
        )
    elif spec.model.dtype == "float16":
        yield "model.dtype", "float16, with its loss scaling, is not built yet: use bfloat16 or float32"
    if spec.model.token_secret_ref is not None:
        yield "model.tokenSecretRef", "is not built yet: leave it out and set HF_TOKEN in the environment"
    if spec.adapter is not None:
        yield "adapter", "LoRA is not built yet: leave adapter out to train all parameters"
    if spec.dataset.credentials is not None:
        remedy = "set the store's own variables in the environment, such as AWS_ACCESS_KEY_ID"
        yield "dataset.credentials", f"is not built yet: leave it out and {remedy}"
    if spec.training.optimizer != "adamw":
        yield "training.optimizer", f"{spec.training.optimizer} is not built yet: use adamw"


def _in_execution(spec: FinetuneJobSpec) -> Iterator[tuple[str, str]]:
    """(field, reason) in how it is executed."""
    execution = spec.execution
    if execution.offload != "none":
        remedy = "use none, and a higher zeroStage or more workers where memory is short"
        yield "execution.offload", f"offloading the {execution.offload} is not built yet: {remedy}"
    if execution.attention != "auto":
        yield "execution.attention", f"choosing {execution.attention} is not built yet: use auto"
    if execution.compile is True:
        yield "execution.compile", "compiled layers are not built yet: use auto or false"


def _in_outcome(spec: FinetuneJobSpec) -> Iterator[tuple[str, str]]:
    """(field, reason) in what comes out, and when."""
    if spec.suspend:
        yield "suspend", "a suspended job is not run: set it to false, or leave it out"
    if spec.tracking.wandb is not None:
        yield "tracking.wandb", "logging to Weights & Biases is not built yet: leave it out and use tensorboard"
    if spec.tracking.mlflow is not None:
        yield "tracking.mlflow", "logging to MLflow is not built yet: leave it out and use tensorboard"
    if spec.output.hub is not None:
        remedy = "leave it out; the model is in export/ of the job's directory"
        yield "output.hub", f"uploading to the Hugging Face Hub is not built yet: {remedy}"

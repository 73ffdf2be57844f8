"""Train a model as a component of Kubeflow Pipelines 2; run this file to compile the pipeline to `finetune.yaml`.

Kubeflow takes the source of the component's function, so its imports are inside.
"""

from __future__ import annotations

from typing import Any


def finetune(job: dict[str, Any], namespace: str, hours: float) -> str:
    """Apply a FinetuneJob, wait until it is trained, and return where the model is.

    Args:
        job: The manifest of the job, as in YAML.
        namespace: Namespace of the job; empty: that of the pod.
        hours: Time limit of this step. The job goes on after it.
    """
    from spotune_client import Client

    with Client(namespace) as client:
        name = client.jobs.apply(job, force=True).name
        done = client.jobs.wait(
            name, timeout=hours * 3600, progress=lambda found: print(found.phase, found.status.step, flush=True)
        )
        return done.status.output


def compile_pipeline(file: str = "finetune.yaml") -> None:
    """Write the pipeline. It needs the package `kfp`."""
    from kfp import compiler, dsl

    component = dsl.component(base_image="registry.example.com/spotune-client:0.1.0")(finetune)

    @dsl.pipeline(name="finetune")  # type: ignore[untyped-decorator]
    def pipeline(job: dict, namespace: str = "", hours: float = 24.0) -> str:  # type: ignore[type-arg] # KFP's types
        return component(job=job, namespace=namespace, hours=hours).output  # type: ignore[no-any-return]

    compiler.Compiler().compile(pipeline, file)


if __name__ == "__main__":
    compile_pipeline()

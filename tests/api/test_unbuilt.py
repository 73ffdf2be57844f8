"""Features that do not exist yet are refused by name, and what concerns pods alone is not."""

from pathlib import Path
from typing import Any

import pytest

from spotune.errors import JobError
from spotune.load import load_job
from spotune.unbuilt import refuse_unbuilt
from tests.api.job_files import FULL_JOB_FILE, a_job

MODEL = {"source": "model", "task": "causal"}
SECRET = {"name": "hf", "key": "token"}


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"model": MODEL | {"dtype": "float16"}},
            "spec.model.dtype: float16, with its loss scaling, is not built yet: use bfloat16 or float32",
        ),
        (
            {"model": MODEL | {"dtype": "float16", "task": "seq2seq"}},
            (
                "spec.model.dtype: float16 overflows in T5 and models like it (its largest number is 65504): "
                "use bfloat16 or float32"
            ),
        ),
        (
            {"model": MODEL | {"tokenSecretRef": SECRET}},
            "spec.model.tokenSecretRef: is not built yet: leave it out and set HF_TOKEN in the environment",
        ),
        ({"adapter": {"lora": {}}}, "spec.adapter: LoRA is not built yet: leave adapter out to train all parameters"),
        (
            {"dataset": {"train": {"source": "s3://b/d"}, "credentials": {"secretName": "bucket"}}},
            (
                "spec.dataset.credentials: is not built yet: leave it out and set the store's own variables in the "
                "environment, such as AWS_ACCESS_KEY_ID"
            ),
        ),
        (
            {"training": {"epochs": 1, "optimizer": "lion"}},
            "spec.training.optimizer: lion is not built yet: use adamw",
        ),
        (
            {"execution": {"offload": "parameters"}},
            (
                "spec.execution.offload: offloading the parameters is not built yet: use none, and a higher "
                "zeroStage or more workers where memory is short"
            ),
        ),
        (
            {"execution": {"attention": "sdpa"}},
            "spec.execution.attention: choosing sdpa is not built yet: use auto",
        ),
        (
            {"execution": {"compile": True}},
            "spec.execution.compile: compiled layers are not built yet: use auto or false",
        ),
        (
            {"tracking": {"wandb": {"project": "x"}}},
            "spec.tracking.wandb: logging to Weights & Biases is not built yet: leave it out and use tensorboard",
        ),
        (
            {"tracking": {"mlflow": {"uri": "http://mlflow"}}},
            "spec.tracking.mlflow: logging to MLflow is not built yet: leave it out and use tensorboard",
        ),
        (
            {"suspend": True},
            "spec.suspend: a suspended job is not run: set it to false, or leave it out",
        ),
        (
            {"output": {"hub": {"repo": "me/t5"}}},
            (
                "spec.output.hub: uploading to the Hugging Face Hub is not built yet: leave it out; "
                "the model is in export/ of the job's directory"
            ),
        ),
    ],
    ids=lambda value: value.partition(":")[0] if isinstance(value, str) else "",
)
def test_a_feature_that_does_not_exist_yet_is_refused(sections: dict[str, Any], line: str) -> None:
    with pytest.raises(JobError) as refused:
        refuse_unbuilt(a_job(**sections))
    assert str(refused.value) == line


def test_all_of_them_are_listed_at_once(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(FULL_JOB_FILE)
    with pytest.raises(JobError) as refused:
        refuse_unbuilt(load_job(file))
    assert [problem.field for problem in refused.value.problems] == [
        "spec.model.tokenSecretRef",
        "spec.adapter",
        "spec.dataset.credentials",
        "spec.tracking.wandb",
        "spec.tracking.mlflow",
        "spec.output.hub",
    ]


def test_what_concerns_pods_alone_is_no_matter_on_one_machine() -> None:
    refuse_unbuilt(
        a_job(
            workers={"resources": {"limits": {"cpu": 8}}, "podTemplate": {"spec": {}}, "serviceAccountName": "reader"},
            head={"capacity": "spot"},
            storage={"existingClaim": "claim"},
            cluster={"queueName": "gpus", "image": "trainer:1"},
            execution={"compile": False, "gradientCheckpointing": True, "zeroStage": 3},
        )
    )

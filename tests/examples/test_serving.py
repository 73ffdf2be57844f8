"""Every ModelService in examples/ answers on a real Ray Serve, by the configuration that the operator renders.

`gpus` is 0, there is one gateway, and the models are random ones of the same architecture. Folders of the test are the
volumes of the pods. A Ray node of the test offers what a gateway pod and a replica pod offer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import AuthenticationError, OpenAI
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from spotune.job_file.load import load_service, parse_service
from spotune.job_file.yaml_file import Document
from spotune.plan.known_models import known_config
from spotune.prompting.export_manifest import MANIFEST, ExportManifest
from spotune.service import ModelService, ModelServiceStatus
from spotune_operator.children.serving.resolved_service import MODELS
from spotune_operator.children.serving.serve_config import API_KEYS_FILE, API_KEYS_FOLDER
from spotune_operator.serving.decide import decide_service
from spotune_operator.serving.state import ObservedService, TrainedModel
from spotune_operator.settings import Settings
from spotune_trainer.export.predict import Predictor
from tests.examples.jobs import JOBS, SERVICE_FILES
from tests.serve.support.ray_serve import RayServe
from tests.serve.support.toy_adapters import PEFT_WARNING, save_adapter
from tests.serve.support.toy_models import generated_by_transformers, toy_model
from tests.trainer.support.tiny import VOCABULARY, save_tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings(PEFT_WARNING)]

STEP = 9
KEY = "a-key"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKENS = 24
TEXTS = [f"how many singers {number} ?" for number in range(3)]
QUICK = {"t5-large-wikisql"}
"""`make test-long` serves the others."""
SIZES: dict[str, dict[str, int]] = {"t5": {}, "bloom": {}, "llama": {"max_position_embeddings": 256}}
"""Values of the configuration, beside those of every toy model, by family."""


@dataclass(frozen=True)
class Example:
    """A service with toy models.

    Attributes:
        service: the file in examples/, with `gpus: 0`.
        ray_service: the RayService that the operator renders.
        models: the models by their id in the API; that of an adapter has the adapter merged into its weights.
        folder: the folder of the base model.
    """

    service: ModelService
    ray_service: dict[str, Any]
    models: dict[str, PreTrainedModel]
    folder: Path

    @property
    def config(self) -> str:
        """The configuration of Ray Serve."""
        return str(self.ray_service["spec"]["serveConfigV2"])

    @property
    def resources(self) -> dict[str, float]:
        """The Ray resources that its gateways and replicas offer."""
        groups = self.ray_service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        found = [json.loads(group["rayStartParams"]["resources"].strip("'")) for group in groups]
        return {name: amount for each in found for name, amount in each.items()}


@dataclass(frozen=True)
class Cluster:
    """Ray Serve, with the volumes of all pods in one folder."""

    serve: RayServe
    volumes: Path
    examples: Mapping[str, Example]

    def deploy(self, example: Example) -> dict[str, int]:
        """Deploy what the operator renders, as KubeRay does; returns the number of running processes by deployment."""
        config = example.config.replace(f"{MODELS}/", f"{self.volumes}/")
        config = config.replace(API_KEYS_FOLDER, str(self.volumes))
        self.serve.deploy_config(yaml.safe_load(config))
        return self.serve.wait_until_running()


def on_processors(file: Path) -> ModelService:
    """A service file with `gpus: 0`."""
    content = yaml.safe_load(file.read_text())
    content["spec"]["gpus"] = 0
    return parse_service(Document(content=content))


def family(source: str) -> str:
    """The architecture of a model: that of a published one, or of the T5 that `make demo` makes."""
    published = known_config(source)
    return str(published["model_type"]) if published else "t5"


def write_model(folder: Path, source: str) -> PreTrainedModel:
    """Write a toy model in place of a source."""
    model = toy_model(family(source), vocab_size=VOCABULARY, **SIZES[family(source)])
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def write_cached(cache: Path, source: str) -> tuple[Path, PreTrainedModel]:
    """Write a toy model in place of a model on the Hub, as a download leaves it in the cache of a pod."""
    repository = cache / "hub" / f"models--{source.removeprefix('hf://').replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    folder = repository / "snapshots" / COMMIT
    return folder, write_model(folder, source)


def output_of(job: str) -> str:
    """Where a job leaves its export: claim and folder."""
    return f"spotune-{job}/default/{job}-01234567/export"


def write_example(file: Path, volumes: Path, cache: Path) -> Example:
    """Write the toy models of a service, and render it."""
    service, trained, models = on_processors(file), {}, {}
    spec = service.spec
    if spec.model.finetune_job:
        job = JOBS[spec.model.finetune_job]
        folder = volumes / output_of(job.metadata.name)
        models[service.model_id] = write_model(folder, job.spec.model.source)
        (folder / MANIFEST).write_text(json.dumps(asdict(ExportManifest.from_job(job, STEP))))
        trained[job.metadata.name] = folder
    else:
        folder, models[service.model_id] = write_cached(cache, spec.model.source)
    for adapter in spec.adapters:
        source = JOBS[adapter.finetune_job].spec.model.source
        assert source == spec.model.source
        place = volumes / output_of(adapter.finetune_job)
        kind = family(source)
        _, models[adapter.name] = save_adapter(place, kind, vocab_size=VOCABULARY, **SIZES[kind])
        trained[adapter.finetune_job] = place
    return Example(service, rendered(service, list(trained)), models, folder)


def rendered(service: ModelService, jobs: Sequence[str]) -> dict[str, Any]:
    """The RayService that the operator applies once these jobs have trained their models."""
    trained = {job: TrainedModel(f"pvc://{output_of(job)}", STEP, "Complete") for job in jobs}
    decision = decide_service(
        service,
        uid="a-uid",
        generation=1,
        previous=ModelServiceStatus(),
        observed=ObservedService(jobs=trained),
        now=0.0,
        settings=Settings(serving=True),
    )
    return next(child for child in decision.apply if child["kind"] == "RayService")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    volumes, cache = folder / "volumes", folder / "cache"
    examples = {file.stem: write_example(file, volumes, cache) for file in SERVICE_FILES}
    (volumes / API_KEYS_FILE).write_text(f"{KEY}\n")
    resources = examples["text-to-sql"].resources
    assert all(example.resources == resources for example in examples.values())
    specs = [example.service.spec for example in examples.values()]
    nodes = max(max(spec.gateway.replicas, spec.replicas.min) for spec in specs)
    with RayServe([resources] * nodes, {"SPOTUNE_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}) as serve:
        yield Cluster(serve, volumes, examples)


def generated(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """The greedy answer of a model, by its own `generate`."""
    ids = tokenizer(text)["input_ids"]
    prompt = ids if model.config.is_encoder_decoder else ids[:-1]  # the tokenizer ends every text with </s>
    answer = generated_by_transformers(model, prompt, TOKENS)
    return str(tokenizer.decode(list(answer), skip_special_tokens=True))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(file.stem, marks=() if file.stem in QUICK else pytest.mark.long, id=file.stem)
        for file in SERVICE_FILES
    ],
)
def test_an_example_answers_as_its_model_generates(name: str, cluster: Cluster) -> None:
    example = cluster.examples[name]
    spec, tokenizer = example.service.spec, AutoTokenizer.from_pretrained(example.folder)
    assert cluster.deploy(example) == {"Gateway": 1, "Replica": max(spec.replicas.min, 1)}
    url = f"{cluster.serve.client.base_url}/v1"
    with OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        assert {model.id for model in client.models.list()} == example.models.keys()
        answers = {}
        for model_id, model in example.models.items():
            for text in TEXTS:
                answer = client.completions.create(model=model_id, prompt=text, max_tokens=TOKENS, temperature=0)
                answers[model_id, text] = answer.choices[0].text
                assert answer.choices[0].text == generated(model, tokenizer, text)
        assert len(set(answers.values())) == len(answers), "answers must tell prompts and models apart"
        if (example.folder / MANIFEST).is_file():
            assert_predicts(client, example.folder)
    if spec.api_keys_secret_ref is not None:
        with OpenAI(base_url=url, api_key="another", max_retries=0) as stranger, pytest.raises(AuthenticationError):
            stranger.models.list()


def assert_predicts(client: OpenAI, folder: Path) -> None:
    """/v1/predict fills the prompt of the job, and answers as `spotune predict`."""
    predictor = Predictor.load(folder)
    row = dict.fromkeys(["question", "columns"] if predictor.manifest.prompt else ["prompt"], TEXTS[0])
    [expected] = predictor.answer([predictor.prompt("", row) if predictor.manifest.prompt else TEXTS[0]])
    response: Any = client.post("/predict", body={"row": row}, cast_to=object)
    assert [prediction["answer"] for prediction in response["predictions"]] == [expected.answer]


def test_the_examples_have_a_t5_a_causal_model_an_adapter_and_spot_nodes() -> None:
    specs = [load_service(file).spec for file in SERVICE_FILES]
    trained = [JOBS[spec.model.finetune_job].spec.model for spec in specs if spec.model.finetune_job]
    assert {model.task for model in trained} == {"seq2seq", "causal"}
    assert [spec.model.source for spec in specs if spec.adapters] == ["hf://meta-llama/Meta-Llama-3-8B"]
    assert {spec.capacity for spec in specs} == {"spot", "mixed"}

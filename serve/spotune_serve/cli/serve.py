"""`spotune serve`: answer requests with a finished model on this machine. Imports Ray only when called."""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from spotune.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotune_serve.gateway.served_model import ServedModel

_KEYS_VARIABLE = "SPOTUNE_API_KEYS"


def serve(
    model: Annotated[
        Path, typer.Argument(metavar="RUN|FOLDER|JOB.yaml", help="A run, an exported model, or the file of a job.")
    ],
    directory: Annotated[
        Path | None, typer.Option(help="With JOB.yaml: the folder of its run; runs/<name> if not given.")
    ] = None,
    name: Annotated[str, typer.Option(help="Model id in the API; the job's name if not given.")] = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="A LoRA adapter, served as model NAME; may be repeated."),
    ] = None,
    engine: Annotated[
        Literal["auto", "transformers", "vllm"],
        typer.Option(help="auto: vllm for causal models on a GPU where it is installed, else transformers."),
    ] = "auto",
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="With vllm: an answer has the same tokens whatever else the GPU computes."
        ),
    ] = False,
    replicas: Annotated[
        int, typer.Option(min=1, help="Processes that generate. The machine's GPUs are divided among them.")
    ] = 1,
    gateways: Annotated[
        int,
        typer.Option(min=1, help="Processes that take requests, on the same port. For hundreds of requests at once."),
    ] = 1,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the API; 0: any free port.")] = 8000,
    drain: Annotated[float, typer.Option(min=0, help="Seconds that running requests have to finish at a stop.")] = 30.0,
    output: Annotated[
        Literal["text", "json"], typer.Option(help="json: one line with URL and model once it is ready.")
    ] = "text",
) -> None:
    """Serve a finished model with OpenAI's API and a small page, until Ctrl-C.

    Keys: with SPOTUNE_API_KEYS=key1,key2 requests need one of them as "Authorization: Bearer KEY".

    Example: spotune serve runs/text-to-sql --port 8000

    Example: spotune serve finetunejob.yaml --replicas 2

    Example: spotune serve models/llama3-8b --adapter dolly=runs/llama3-8b-lora/export

    Example: SPOTUNE_API_KEYS=secret spotune serve runs/text-to-sql --host 0.0.0.0
    """
    from spotune.prompting.export_manifest import find_export
    from spotune_serve.deployment.config import GatewayConfig, ModelConfig
    from spotune_serve.deployment.local import local_service
    from spotune_serve.gateway.served_model import ServedModel
    from spotune_serve.gateway.settings import GatewaySettings, hash_key

    source = _model_directory(model, directory)
    export = source if (source / "config.json").is_file() else find_export(source)
    adapters = _parse_adapters(adapter or [])
    served = ServedModel.load(export, name, adapters)  # a wrong folder is refused before Ray starts
    keys = [key for key in os.environ.get(_KEYS_VARIABLE, "").split(",") if key]
    gateway_config = GatewayConfig(
        name=served.name,
        settings=GatewaySettings(api_keys=tuple(hash_key(key) for key in keys)),
        drain_seconds=drain,
        processes=gateways,
    )
    model_config = ModelConfig(
        directory=export.absolute(),
        adapters=adapters,
        replicas=replicas,
        engine=engine,
        batch_invariant=batch_invariant,
        gpus=_gpus_per_replica(replicas),
        threads=max(1, (os.cpu_count() or 1) // replicas),
        drain_seconds=drain,
    )
    stop = threading.Event()
    with local_service(gateway_config, model_config, host, port) as url, _stopped_by_signals(stop):
        _print_ready(url, served, output, needs_key=bool(keys))
        stop.wait()
        if output == "text":
            typer.echo("stopping: running requests finish first")


def _model_directory(model: Path, directory: Path | None) -> Path:
    """The folder of a run or a model: the argument itself, or the run of the job file that it names."""
    if model.suffix not in {".yaml", ".yml"}:
        if directory is not None:
            raise UsageError(f"--directory belongs to a job file; {model} is none. Pass the folder alone.")
        return model
    from spotune.job_file.load import load_job

    return directory or Path("runs") / load_job(model).metadata.name


def _parse_adapters(options: list[str]) -> dict[str, Path]:
    adapters: dict[str, Path] = {}
    for option in options:
        name, _, folder = option.partition("=")
        if not name or not folder:
            raise UsageError(f"--adapter {option}: write NAME=DIR.")
        adapters[name] = Path(folder).absolute()
    return adapters


def _gpus_per_replica(replicas: int) -> float:
    """An equal part of this machine's GPUs; 0 where there is none."""
    import torch

    count = torch.cuda.device_count()
    return min(1.0, count / replicas) if count else 0.0


@contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """Set `stop` at the first SIGINT or SIGTERM. A second one ends the process at once, and Ray with it."""

    def handle(number: int, _frame: Any) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if not stop.is_set():
            for number, handler in previous.items():
                signal.signal(number, handler)


def _print_ready(url: str, served: ServedModel, output: str, *, needs_key: bool) -> None:
    if output == "json":
        ready = {"url": url, "openaiBaseUrl": f"{url}/v1", "model": served.name, "pid": os.getpid()}
        typer.echo(json.dumps(ready))
        return
    body = json.dumps(served.example_request(), ensure_ascii=False).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $KEY"' if needs_key else ""
    typer.echo(
        f"{served.name} is ready: {url} (page), {url}/v1 (OpenAI's API). Stop with Ctrl-C. Try:\n\n"
        f"curl {url}/v1/predict{key} -H 'Content-Type: application/json' -d '{body}'\n"
    )

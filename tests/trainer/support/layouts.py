"""Engines of every ZeRO stage and world size in one pool of processes, and their state as DeepSpeed reports it.

The model is a Llama of two hundred parameters. Its embedding is tied to the head, and a matrix and a norm are frozen.
No world size divides its sizes, and norms have fewer elements than there are ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from torch import Tensor, distributed
from transformers import LlamaConfig, LlamaForCausalLM

from spotune.job import CheckpointSpec
from spotune.plan.memory import Offload
from spotune_trainer.checkpoint.async_checkpointer import AsyncCheckpointer
from spotune_trainer.checkpoint.fragment import STATES
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, FileEntry, Manifest, open_checkpoint
from spotune_trainer.checkpoint.reader import CheckpointReader
from spotune_trainer.engine import build as engine_module
from spotune_trainer.engine import zero_state
from spotune_trainer.engine.build import EngineConfig, _deepspeed_config, build_engine, set_learning_rate
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.tiny import make_job

VOCABULARY = 37
FROZEN = ("model.layers.0.self_attn.k_proj.weight", "model.norm.weight")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT16_LOSS_SCALE = 2.0**8
"""At which the small model's gradients do not overflow."""
BACKENDS = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


@dataclass(frozen=True)
class Layout:
    """A ZeRO stage, a number of ranks, and the precision of the model's own parameters."""

    stage: int
    world_size: int
    dtype: str
    offload: Offload = "none"

    def __str__(self) -> str:
        return f"stage {self.stage} on {self.world_size} ranks in {self.dtype}, offload {self.offload}"

    @property
    def steps(self) -> int:
        """Optimizer steps of an engine of this layout. They differ, so that layouts have different states."""
        return 1 + (self.stage + self.world_size) % 3


@contextmanager
def process_group(rank: int, world_size: int, store: Path) -> Iterator[None]:
    """A default process group of the first `world_size` processes of the pool, for an engine to train in."""
    os.environ["WORLD_SIZE"] = str(world_size)
    distributed.init_process_group(BACKENDS, init_method=f"file://{store}", rank=rank, world_size=world_size)
    yield
    leave_process_group()


def leave_process_group() -> None:
    """Destroy the default group on all ranks, and the groups that DeepSpeed has made of it."""
    distributed.barrier()
    if deepspeed.comm.comm.cdb is None:
        distributed.destroy_process_group()
    else:
        deepspeed.comm.destroy_process_group()
        deepspeed.comm.comm.cdb = None


def model_config(layers: int = 1) -> LlamaConfig:
    """The model's configuration."""
    sizes: dict[str, Any] = {
        "hidden_size": 3,
        "head_dim": 2,
        "intermediate_size": 5,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
    }
    return LlamaConfig(vocab_size=VOCABULARY, **sizes, tie_word_embeddings=True)


def build_model(dtype: torch.dtype, frozen: Sequence[str] = FROZEN, layers: int = 1) -> Any:
    """The model, with the parameters named in `frozen` not trained."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(model_config(layers))
    model.to(dtype)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return model


def build(layout: Layout, frozen: Sequence[str] = FROZEN) -> Any:
    """An engine of the small model that has not taken a step."""
    return wrap(build_model(DTYPES[layout.dtype], frozen), layout)


def wrap(model: Any, layout: Layout, **training: Any) -> Any:
    """An engine of a layout around any model; keyword arguments are fields of `training`.

    float16 is trained on CPUs, too, which have no support for it, and from a loss scale without overflow.
    """
    config = EngineConfig(layout.stage, 1, 1, DTYPES[layout.dtype], False, layout.offload)
    spec = make_job("/model", training={"learningRate": 0.01, **training}).spec.training
    if layout.dtype != "float16":
        return build_engine(model, spec, config)
    with patch.object(CPU_Accelerator, "is_fp16_supported", lambda _: True):
        engine = build_engine(model, spec, config)
    engine.optimizer.loss_scaler.cur_scale = FLOAT16_LOSS_SCALE
    return engine


def release(engine: Any) -> None:
    """Free an engine's memory. Empties masters and moments, since DeepSpeed keeps an engine that trained at stage 3."""
    engine.destroy()
    state = engine.basic_optimizer.state
    for master in state:
        master.data = master.data.new_empty(0)
    state.clear()


def train(
    engine: Any, steps: int, shape: tuple[int, int] = (2, 6), before_update: Callable[[], None] = lambda: None
) -> None:
    """Take optimizer steps on random tokens [batch, sequence], which differ by rank and layout."""
    seed = 100 * engine.zero_optimization_stage() + 10 * engine.dp_world_size + engine.global_rank
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(1, engine.module.config.vocab_size, shape, generator=random).to(engine.device)
        set_learning_rate(engine, 0.01)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        before_update()
        engine.step()


def train_in_passes(engine: Any, steps: int, passes: int, *, boundary: bool = True) -> int:
    """Take steps of several micro-batches. Returns the largest number of gradient elements held between two passes.

    Without `boundary` the optimizer takes no step.
    """
    random, most_held = torch.Generator().manual_seed(engine.global_rank), 0
    set_learning_rate(engine, 0.01)
    for index in range(steps * passes):
        tokens = torch.randint(1, engine.module.config.vocab_size, (2, 6), generator=random)
        engine.set_gradient_accumulation_boundary(boundary and index % passes == passes - 1)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss / passes)
        held = sum(each.grad.numel() for each in engine.module.parameters() if each.grad is not None)
        engine.step()
        most_held = max(most_held, held)
    return most_held


@contextmanager
def dividing_everything() -> Iterator[None]:
    """Engines built in this context partition all parameters at stage 3; DeepSpeed by default replicates small ones."""

    def divide_everything(*arguments: Any) -> dict[str, Any]:
        made = _deepspeed_config(*arguments)
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return made

    with patch.object(engine_module, "_deepspeed_config", divide_everything):
        yield


@contextmanager
def committing(engine: Any, directory: JobDirectory, name: CheckpointName) -> Iterator[AsyncCheckpointer]:
    """Commit the state of an engine as a worker does, in the background of the block; complete after the block."""
    step, stage = zero_state.optimizer_step(engine), engine.zero_optimization_stage()
    scalars = zero_state.optimizer_scalars(engine)

    def manifest(entries: tuple[FileEntry, ...]) -> Manifest:
        shapes = zero_state.parameter_shapes(engine)
        return Manifest(
            *(name.step, 1, step, "f", 1, engine.dp_world_size, stage, 0.0, entries, shapes), optimizer_scalars=scalars
        )

    checkpointer = AsyncCheckpointer(directory, engine.global_rank, engine.dp_world_size, CheckpointSpec())
    checkpointer.save(name, zero_state.fragments_to_save(engine), manifest)
    yield checkpointer
    checkpointer.wait()


def save(engine: Any, directory: JobDirectory, name: CheckpointName) -> None:
    """Commit the state of an engine, and wait for it."""
    with committing(engine, directory, name):
        pass


def opened(directory: JobDirectory, name: CheckpointName) -> Checkpoint:
    """Open a complete checkpoint."""
    checkpoint = open_checkpoint(directory.checkpoints / str(name))
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint


def restore(engine: Any, checkpoint: Checkpoint) -> None:
    """Restore a checkpoint as a worker does, without the verification of checksums."""
    CheckpointReader(checkpoint).restore(zero_state.fragments_to_load(engine))
    adopt(engine, checkpoint)


def adopt(engine: Any, checkpoint: Checkpoint) -> None:
    """Set the optimizer step of the checkpoint, and copy the restored masters to the model."""
    zero_state.set_optimizer_step(engine, checkpoint.manifest.optimizer_step, checkpoint.manifest.optimizer_scalars)
    zero_state.sync_model_from_masters(engine)


def state_of(engine: Any) -> dict[str, Tensor]:
    """Complete masters and moments by "parameter/state", and the step, read with DeepSpeed's API; on every rank."""
    if engine.zero_optimization_stage() in (1, 2):
        optimizer = engine.optimizer
        # DeepSpeed does this once, in the first step of the first parameter group: too early for the other groups.
        for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(group, flat, optimizer.optimizer.state)
    state = {"step": torch.tensor(zero_state.optimizer_step(engine))}
    for name, parameter in trainable(engine):
        for each in STATES:
            state[f"{name}/{each}"] = _whole(engine, parameter, each).detach().clone().flatten()
    return state


def weights_of(engine: Any) -> dict[str, Tensor]:
    """The model's own parameters, as the forward pass sees them; on every rank."""
    weights = {}
    for name, parameter in trainable(engine):
        with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
            weights[name] = parameter.detach().clone().flatten()
    return weights


def of_first_rank(engine: Any, state: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Broadcast a result of `state_of` from the first rank of an engine's group; other ranks may pass None."""
    shared = {"step": torch.zeros((), dtype=torch.int64)}
    for name, shape in zero_state.parameter_shapes(engine).items():
        shared |= {f"{name}/{each}": torch.empty(torch.Size(shape).numel(), device=engine.device) for each in STATES}
    for name, tensor in shared.items():
        if state is not None and engine.global_rank == 0:
            tensor.copy_(state[name])
        distributed.broadcast(tensor, 0)
    return shared


def trainable(engine: Any) -> list[tuple[str, Any]]:
    """Names and parameters that are trained; tied ones once."""
    return [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]


def differences(engine: Any, expected: Mapping[str, Tensor]) -> list[str]:
    """Names of all masters, moments, step and model weights that differ from `expected` in any bit."""
    found = state_of(engine)
    assert found.keys() == expected.keys()
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    for name, weight in weights_of(engine).items():
        if not torch.equal(weight, expected[f"{name}/fp32"].to(weight.dtype)):
            wrong.append(f"{name} of the model")
    return wrong


def _whole(engine: Any, parameter: Any, state: str) -> Tensor:
    if engine.zero_optimization_stage() == 0:
        return parameter if state == "fp32" else engine.basic_optimizer.state[parameter][state]  # type: ignore[no-any-return]
    if state == "fp32":
        return safe_get_full_fp32_param(parameter)  # type: ignore[no-any-return]
    return safe_get_full_optimizer_state(parameter, state)  # type: ignore[no-any-return]

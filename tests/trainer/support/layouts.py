"""Engines of every ZeRO stage and world size in one pool of processes, and what DeepSpeed itself says they hold.

The model is a Llama of two hundred parameters: the embedding tied to the head, a matrix and a norm frozen, sizes that
no world size divides, and norms of fewer elements than there are ranks.
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
from deepspeed.utils import (
    lazy_init_hp_params_optimizer_state,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from torch import Tensor, distributed
from transformers import LlamaConfig, LlamaForCausalLM

from spotune.job import CheckpointSpec
from spotune.plan.memory import Offload
from spotune_trainer.checkpoint.async_checkpointer import Committer
from spotune_trainer.checkpoint.fragment import STATES
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, FileEntry, Manifest, open_checkpoint
from spotune_trainer.checkpoint.reader import CheckpointReader
from spotune_trainer.engine import build as engine_module
from spotune_trainer.engine import zero_state as fragments
from spotune_trainer.engine.build import EngineConfig, _deepspeed_config, build_engine, set_learning_rate
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.tiny import make_job

VOCABULARY = 37
FROZEN = ("model.layers.0.self_attn.k_proj.weight", "model.norm.weight")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
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
        """Optimizer steps that an engine of this layout takes; they differ, so that no state is another's."""
        return 1 + (self.stage + self.world_size) % 3


@contextmanager
def process_group(rank: int, world_size: int, store: Path) -> Iterator[None]:
    """A group of the first `world_size` processes of the pool, as the group that an engine trains in."""
    os.environ["WORLD_SIZE"] = str(world_size)
    distributed.init_process_group(BACKENDS, init_method=f"file://{store}", rank=rank, world_size=world_size)
    yield
    leave_process_group()


def leave_process_group() -> None:
    """Leave the default group together, and have DeepSpeed forget the groups that it has made of it."""
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
    """The model; the parameters of some names are not trained."""
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
    """An engine of a layout around any model; keyword arguments are fields of `training`."""
    config = EngineConfig(layout.stage, 1, 1, DTYPES[layout.dtype], False, layout.offload)
    return build_engine(model, make_job("/model", training={"learningRate": 0.01, **training}).spec.training, config)


def release(engine: Any) -> None:
    """Give an engine's memory back: masters and moments by hand, as DeepSpeed keeps one that has trained at stage 3."""
    engine.destroy()
    state = engine.basic_optimizer.state
    for master in state:
        master.data = master.data.new_empty(0)
    state.clear()


def train(
    engine: Any, steps: int, shape: tuple[int, int] = (2, 6), before_update: Callable[[], None] = lambda: None
) -> None:
    """Take optimizer steps on random tokens [batch, sequence], other ones on every rank and at every layout."""
    seed = 100 * engine.zero_optimization_stage() + 10 * engine.dp_world_size + engine.global_rank
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(1, engine.module.config.vocab_size, shape, generator=random).to(engine.device)
        set_learning_rate(engine, 0.01)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        before_update()
        engine.step()


def train_in_passes(engine: Any, steps: int, passes: int, *, boundary: bool = True) -> int:
    """Take steps of several micro-batches each; the most elements of gradients that were held between two passes.

    Without `boundary` the optimizer takes no step after them.
    """
    random, held = torch.Generator().manual_seed(engine.global_rank), 0
    set_learning_rate(engine, 0.01)
    for index in range(steps * passes):
        tokens = torch.randint(1, engine.module.config.vocab_size, (2, 6), generator=random)
        engine.set_gradient_accumulation_boundary(boundary and index % passes == passes - 1)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss / passes)
        kept = sum(each.grad.numel() for each in engine.module.parameters() if each.grad is not None)
        engine.step()
        held = max(held, kept)
    return held


@contextmanager
def dividing_everything() -> Iterator[None]:
    """Within it, engines at stage 3 divide parameters of any size; DeepSpeed keeps small ones whole on every rank."""

    def divide_everything(*arguments: Any) -> dict[str, Any]:
        made = _deepspeed_config(*arguments)
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        return made

    with patch.object(engine_module, "_deepspeed_config", divide_everything):
        yield


@contextmanager
def committing(engine: Any, directory: JobDirectory, name: CheckpointName) -> Iterator[Committer]:
    """Commit what an engine holds as its worker would, beside what is done meanwhile; it is complete afterwards."""
    step, stage = fragments.optimizer_step(engine), engine.zero_optimization_stage()

    def manifest(entries: tuple[FileEntry, ...]) -> Manifest:
        shapes = fragments.parameter_shapes(engine)
        return Manifest(name.step, 1, step, "f", 1, engine.dp_world_size, stage, 0.0, entries, shapes)

    committer = Committer(directory, engine.global_rank, engine.dp_world_size, CheckpointSpec())
    committer.begin(name, fragments.owned_fragments(engine), manifest)
    yield committer
    committer.wait()


def save(engine: Any, directory: JobDirectory, name: CheckpointName) -> None:
    """Commit what an engine holds."""
    with committing(engine, directory, name):
        pass


def opened(directory: JobDirectory, name: CheckpointName) -> Checkpoint:
    """A checkpoint that is whole."""
    checkpoint = open_checkpoint(directory.checkpoints / str(name))
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint


def restore(engine: Any, checkpoint: Checkpoint) -> None:
    """What a worker does with the checkpoint that it starts from, but for its checksums."""
    CheckpointReader(checkpoint).restore(fragments.needed_fragments(engine))
    adopt(engine, checkpoint)


def adopt(engine: Any, checkpoint: Checkpoint) -> None:
    """Make what has been read of a checkpoint the engine's own."""
    fragments.set_optimizer_step(engine, checkpoint.manifest.optimizer_step)
    fragments.publish(engine)


def state_of(engine: Any) -> dict[str, Tensor]:
    """Whole masters and moments by "parameter/state", and the step, by DeepSpeed's own means; on every rank."""
    if engine.zero_optimization_stage() in (1, 2):
        optimizer = engine.optimizer
        # DeepSpeed does so once, in the first step of the first parameter group: too early for the other groups.
        for group, flat in zip(optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True):
            lazy_init_hp_params_optimizer_state(group, flat, optimizer.optimizer.state)
    state = {"step": torch.tensor(fragments.optimizer_step(engine))}
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
    """What `state_of` gave the first rank of an engine's group once, on every rank; the others need not know it."""
    shared = {"step": torch.zeros((), dtype=torch.int64)}
    for name, shape in fragments.parameter_shapes(engine).items():
        shared |= {f"{name}/{each}": torch.empty(torch.Size(shape).numel(), device=engine.device) for each in STATES}
    for name, tensor in shared.items():
        if state is not None and engine.global_rank == 0:
            tensor.copy_(state[name])
        distributed.broadcast(tensor, 0)
    return shared


def trainable(engine: Any) -> list[tuple[str, Any]]:
    """Names and parameters that are not frozen, tied ones once."""
    return [(name, parameter) for name, parameter in engine.module.named_parameters() if parameter.requires_grad]


def differences(engine: Any, expected: Mapping[str, Tensor]) -> list[str]:
    """Names of what an engine does not hold bit for bit: masters, moments, step, and the model's own weights."""
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

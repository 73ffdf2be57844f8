"""Ray's example of DeepSpeed: a BERT learns which sentences say the same, and F1 is reported.

It follows "Get Started with DeepSpeed" of Ray's documentation. What differs is where model and data come from: a small
BERT with random weights, its tokenizer and the pairs of sentences are made here, so that nothing is downloaded.
DeepSpeed and Ray Train are used as there, with one addition: `get_checkpoint`, so that training continues after a loss.
"""

from __future__ import annotations

import random
from tempfile import TemporaryDirectory
from typing import Any

import deepspeed
import ray.train
import torch
from deepspeed.accelerator import get_accelerator
from ray.train import Checkpoint
from ray.train.torch import prepare_data_loader
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, distributed
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast, set_seed

Pair = tuple[str, str, int]
"""Two sentences, and whether the second one says the same as the first one."""

PEOPLE = ("the minister", "the company", "a spokesman", "the court", "the union", "an analyst", "the bank")
DOES = (("said", "stated"), ("announced", "declared"), ("expects", "awaits"), ("reported", "published"))
DENIES = ("denied", "rejected", "disputed")
WHAT = ("higher prices", "a new plan", "the loss", "more jobs", "the merger", "lower profits", "an agreement")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def made_pairs(count: int, seed: int) -> list[Pair]:
    """Pairs of sentences as in the data set MRPC: half of the second sentences deny what the first ones say."""
    choice = random.Random(seed)
    pairs = []
    for _ in range(count):
        who, what, (said, also_said) = choice.choice(PEOPLE), choice.choice(WHAT), choice.choice(DOES)
        label = choice.randint(0, 1)
        pairs.append((f"{who} {said} {what}", f"{who} {also_said if label else choice.choice(DENIES)} {what}", label))
    return pairs


def made_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with the words of the sentences, which puts pairs together as that of BERT does."""
    words = " ".join([*PEOPLE, *(word for words in DOES for word in words), *DENIES, *WHAT]).split()
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *sorted(set(words))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]")


def made_model(tokenizer: PreTrainedTokenizerFast) -> BertForSequenceClassification:
    """A small BERT with random weights."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(tokenizer), intermediate_size=64, max_position_embeddings=32, **sizes)
    return BertForSequenceClassification(config)


def collator(tokenizer: PreTrainedTokenizerFast) -> Any:
    """The function that makes a batch of pairs."""

    def collate(pairs: list[Pair]) -> dict[str, Tensor]:
        first, second, labels = zip(*pairs, strict=True)
        batch = tokenizer(list(first), list(second), truncation=True, padding="longest", return_tensors="pt")
        return {**batch, "labels": torch.tensor(labels)}

    return collate


def deepspeed_config(config: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration: ZeRO-3 with AdamW."""
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": config["learningRate"], "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "zero_optimization": {"stage": config["zeroStage"]},
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": config["batchSize"],
        "steps_per_print": 1_000_000,
    }


def train(config: dict[str, Any]) -> None:
    """Train, with a checkpoint after each epoch. Every worker calls this.

    Args:
        config: `epochs`, `pairs`, `batchSize` of a worker, `learningRate`, `zeroStage` and `seed`.
    """
    set_seed(config["seed"])
    tokenizer = made_tokenizer()
    collate, size = collator(tokenizer), config["batchSize"]
    pairs: Any = made_pairs(config["pairs"], config["seed"])
    held_out: Any = made_pairs(config["pairs"] // 4, config["seed"] + 1)
    loader = prepare_data_loader(DataLoader(pairs, size, shuffle=True, collate_fn=collate))
    eval_loader = prepare_data_loader(DataLoader(held_out, size, collate_fn=collate))

    model = made_model(tokenizer)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=deepspeed_config(config))
    first_epoch = 0
    if checkpoint := ray.train.get_checkpoint():  # after a loss of workers, training continues here
        with checkpoint.as_directory() as folder:
            _, state = engine.load_checkpoint(folder)
        first_epoch = state["epoch"]

    for epoch in range(first_epoch, config["epochs"]):
        set_seed(config["seed"] + epoch + 1000 * engine.global_rank)  # the same dropout after a loss
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        engine.train()
        loss = torch.zeros(())
        for batch in loader:
            loss = train_step(engine, batch)
        metrics = {"loss": loss.item(), "epoch": epoch + 1, **evaluate(engine, eval_loader)}
        with TemporaryDirectory() as folder:
            engine.save_checkpoint(folder, client_state={"epoch": epoch + 1})  # each worker saves its own shard
            distributed.barrier()
            ray.train.report(metrics=metrics, checkpoint=Checkpoint.from_directory(folder))


def train_step(engine: Any, batch: dict[str, Tensor]) -> Tensor:
    """Train on one batch of a worker; returns its loss."""
    device = get_accelerator().device_name(engine.local_rank)
    loss: Tensor = engine(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
    engine.backward(loss)
    engine.step()
    return loss.detach()


@torch.no_grad()
def evaluate(engine: Any, loader: DataLoader[Any]) -> dict[str, float]:
    """F1 and accuracy over the batches of all workers."""
    engine.eval()
    device = get_accelerator().device_name(engine.local_rank)
    counts = torch.zeros(4, device=device)  # true positives, predicted positives, positives, correct ones
    total = torch.zeros((), device=device)
    for batch in loader:
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        predicted, labels = engine(**inputs).logits.argmax(dim=-1), inputs["labels"]
        found = [predicted * labels, predicted, labels, predicted == labels]
        counts += torch.stack([each.sum() for each in found])
        total += len(labels)
    distributed.all_reduce(counts)
    distributed.all_reduce(total)
    both, predictions, positives, correct = counts.tolist()
    return {"f1": 2 * both / max(predictions + positives, 1.0), "accuracy": correct / total.item()}

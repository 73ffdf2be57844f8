"""Models: loading them with transformers, adapters and quantization, the training loss, generation, and FLOPs."""

"""The training runtime: Ray, DeepSpeed, transformers and MosaicML streaming, and nothing of Kubernetes."""

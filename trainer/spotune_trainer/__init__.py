"""The training runtime: Ray Train, DeepSpeed, transformers and MosaicML streaming, and nothing of Kubernetes."""

"""Model formats: the transformers export, its model card, the Hub, predictions, and DeepSpeed's universal format."""

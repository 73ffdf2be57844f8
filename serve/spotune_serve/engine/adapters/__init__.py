"""LoRA adapters as peft saved them, before they are loaded."""

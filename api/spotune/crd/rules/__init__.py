"""CEL rules of single sections."""

"""What a gateway counts."""

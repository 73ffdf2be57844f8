"""`spotune serve`."""

"""One reconcile of one job: observe, decide, write the status, execute. Only reconciler and status writer do I/O."""

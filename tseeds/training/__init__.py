"""The policy update: losses, log-probs, batches, trainer, metrics."""

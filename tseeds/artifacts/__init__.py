"""Artifacts on disk: schemas, atomic commits, locks, policy directories."""

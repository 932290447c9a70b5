"""Thinking Seeds reinforcement learning: composable stages over Parquet artifacts."""

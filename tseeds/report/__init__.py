"""Figures, HTML reports and the trajectory viewer."""

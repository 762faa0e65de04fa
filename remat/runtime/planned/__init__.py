"""Training by a schedule."""

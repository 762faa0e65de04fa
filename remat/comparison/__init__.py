"""Every way to train a model within a budget, measured side by side."""

"""Figures, with matplotlib, which is imported only when one is made."""

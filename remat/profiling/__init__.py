"""A model becomes a `Chain`: its units are found and measured."""

"""A model becomes a `Chain`: passes over it measure every stage and the code between them."""

"""How bytes and seconds of one piece of a model are measured, and the model is left as it was."""

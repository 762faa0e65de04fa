"""What can be kept of a stage, or sent to the host: the options that planners choose from."""

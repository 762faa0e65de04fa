"""What a model would cost on a device that need not be there: shapes without data, and a table of devices."""

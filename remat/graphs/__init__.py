"""Rematerialisation on training graphs: networks by shape, and the static methods that DTR is compared with."""

"""Supports DTensors as arguments. Its slow modules are imported only for a call with a DTensor."""

"""Provides errors, argument records and validation for all other modules, and imports none of them."""

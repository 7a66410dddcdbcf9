"""Contains models that predict times instead of measuring them."""

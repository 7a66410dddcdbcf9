"""Integrates sparse_ce with training libraries. ``import sparse_ce`` imports none of these modules, and each module
needs the library it is named after."""

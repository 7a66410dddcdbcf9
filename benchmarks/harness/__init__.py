"""Provides timing, checks, peers, goals, records and tables for all problems."""

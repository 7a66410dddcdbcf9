"""Defines the ops that read logits."""

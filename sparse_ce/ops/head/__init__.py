"""Defines the ops that read the hidden states and the weight of a linear head, and compute its logits themselves."""

"""Learns the functions by which winnow finds and summarises keys; writes one artifact per model."""

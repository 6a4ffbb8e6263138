"""Packing a model anew in fewer bits."""

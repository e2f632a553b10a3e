"""Inference: one public name in, the right adapter version on the right replica out."""

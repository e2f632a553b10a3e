"""The engine host as a serving replica: the same HTTP as vLLM's."""

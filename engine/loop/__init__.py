"""Parts of a training loop, one job each; `engine.grpo` and `engine.supervised` are the loops."""

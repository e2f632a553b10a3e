"""The training engine: a few verbs over one frozen base model and many adapters."""

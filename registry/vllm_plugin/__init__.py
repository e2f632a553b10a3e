"""What stock vLLM needs to be a serving replica of this project; imported only inside vLLM's own environment.

Entry points (pyproject.toml): `vllm.general_plugins` calls `register` in every vLLM process, `vllm.endpoint_plugins` makes
`EspalierEndpoints` in the API server when VLLM_PLUGINS names `espalier`. deploy/vllm/serve.sh sets both and the worker extension
`registry.vllm_plugin.worker.AdapterInspector`.
"""


def register() -> None:
    """Registers the adapter resolver, and on CPU the LoRA ops that mend vLLM's own. Safe to call more than once."""
    from registry.vllm_plugin import lora_ops, resolver

    lora_ops.register()
    resolver.register()

"""Engines: vLLM, SGLang and a small one of our own, one or several replicas, behind the interface of `base`."""

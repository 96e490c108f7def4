"""twinpool: large language models served with prefill and decode in separate pools."""

__version__ = "0.1.0"

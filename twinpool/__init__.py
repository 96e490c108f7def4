"""twinpool: large language models served with prefill and decode in separate pools."""

from twinpool.client import AsyncClient, AsyncStream, Client, Stream

__version__ = "0.1.0"
__all__ = ["AsyncClient", "AsyncStream", "Client", "Stream", "__version__"]

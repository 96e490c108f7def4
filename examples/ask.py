"""Asks one question, prints the answer as it is made, and where the time went.

Start `twinpool up` in another terminal, then:

    python examples/ask.py "What is the capital of France?"
"""

import sys

from twinpool import Client, errors

question = " ".join(sys.argv[1:]) or "What is the capital of France?"

try:
    with Client() as client, client.stream_chat(question, max_tokens=100, temperature=0) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
except errors.TwinpoolError as error:
    sys.exit(f"no answer: {error}")

print()
if stream.usage and stream.timeline:
    usage, line = stream.usage, stream.timeline
    print(f"{usage.completion_tokens} tokens; the first after {line.ttft_ms:.0f} ms, then {line.tpot_ms:.1f} ms each")
    print(f"prefill on {line.prefill_worker}, {line.transfer_bytes:,} bytes of KV to {line.decode_worker}")

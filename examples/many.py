"""Many questions at once with asyncio: interactive ones and a batch, each with a deadline, failures one by one.

Start `twinpool up --prefill 2 --decode 2` in another terminal, then:

    python examples/many.py
"""

import asyncio
import time

from twinpool import AsyncClient, errors

CITIES = ["Paris", "Rome", "Tokyo", "Cairo", "Lima", "Oslo", "Delhi", "Quito"]


async def ask(client: AsyncClient, city: str) -> str:
    sla_class = "interactive" if len(city) == 4 else "batch"
    question = f"In one short sentence, what is {city} known for?"
    try:
        answer = await client.chat(question, max_tokens=40, temperature=0, sla_class=sla_class, deadline_s=60)
    except errors.Overloaded as error:
        return f"{city}: the queue is full, try again in {error.retry_after_s} s"
    except errors.TwinpoolError as error:
        return f"{city}: {type(error).__name__}: {error}"
    return f"{city} ({sla_class}, {answer.timeline.total_ms:.0f} ms): {answer.text.strip()}"


async def main() -> None:
    start = time.monotonic()
    async with AsyncClient() as client:
        for line in await asyncio.gather(*(ask(client, city) for city in CITIES)):
            print(line)
    print(f"{len(CITIES)} questions in {time.monotonic() - start:.1f} s")


asyncio.run(main())

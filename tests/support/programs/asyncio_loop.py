"""Runs an event loop before it knows its rank."""

import asyncio
import os
import sys


async def work():
    await asyncio.sleep(0)
    return os.environ["RANK"]


print("before")
loop = asyncio.new_event_loop()
print(loop.run_until_complete(work()))
loop.close()
sys.exit(3)

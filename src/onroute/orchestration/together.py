"""Coroutines side by side, and coroutines that an interrupt does not cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def together(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Results in the order of `coroutines`; the first failure cancels the others and is the one raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def finished(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """The result of `coroutine`, which an interrupt does not cut short: it is raised at the next await.

    What several ranks do together must be finished by all of them, and then counted as done.
    """
    me = asyncio.current_task()
    assert me is not None  # a coroutine is always run by a task
    task = asyncio.ensure_future(coroutine)
    is_interrupted = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_interrupted = True
            me.uncancel()
    result = task.result()
    if is_interrupted:
        me.cancel()
    return result

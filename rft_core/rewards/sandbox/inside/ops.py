"""What one process may ask of an object in the other: name -> how it is done where the object lives."""

from __future__ import annotations

import math
import operator


def run_awaitable(awaitable):
    """A coroutine runs to its end here: the event loop that awaits its stand-in is in the other process."""
    import asyncio

    async def wait():
        return await awaitable

    return asyncio.run(wait())


def leave(manager, error):
    return manager.__exit__(None if error is None else type(error), error, None)


OPS = {
    "call": lambda function, *args, **kwargs: function(*args, **kwargs),
    "getattr": getattr,
    "setattr": setattr,
    "delattr": delattr,
    "enter": lambda manager: manager.__enter__(),
    "exit": leave,
    "await": run_awaitable,
    **{kind.__name__: kind for kind in (bool, complex, float, int, reversed, str)},
    **{function.__name__: function for function in (abs, divmod, format, hash, iter, len, next, pow, repr, round)},
    **{function.__name__: function for function in (math.ceil, math.floor, math.trunc)},
    **{
        name: getattr(operator, f"__{name}__")
        for name in (
            *("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "lshift", "rshift", "and", "or", "xor"),
            *("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "invert", "index"),
            *("contains", "getitem", "setitem", "delitem"),
        )
    },
}

"""Runs the Triton kernels under the interpreter.

The variable must be set before triton is imported, so this folder needs a pytest process of its own.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError(
        "triton was imported without TRITON_INTERPRET=1; run tests/kernels in a separate pytest process"
    )
os.environ["TRITON_INTERPRET"] = "1"


def _spare_the_interpreter_repeated_work() -> None:
    """Change two functions of the interpreter that took a fifth of the tests' time. Results do not change.

    For each call of a device function, the interpreter patches the modules `triton.language` and
    `triton.language.core` again. The launch of the kernel has patched the first one, and a patch of the
    second one lasts as long as the process. For each operation, the interpreter builds the table of numpy's
    types again.
    """
    from triton.runtime import interpreter

    patched = {interpreter.tl}

    @functools.cache
    def languages_of(function: Any) -> set[ModuleType]:
        modules = [value for value in function.__globals__.values() if isinstance(value, ModuleType)]
        return {module for module in modules if module in (interpreter.tl, interpreter.tl.core)}

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        if not languages_of(self.fn) <= patched:
            interpreter._patch_lang(self.fn)
            patched.update(languages_of(self.fn))
        try:
            return self.rewrite()(*arguments, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call
    look_up = interpreter._get_np_dtype
    known = functools.cache(look_up)

    def numpy_type(dtype: Any) -> Any:
        if isinstance(dtype, interpreter.tl.block_type):
            dtype = dtype.element_ty
        return look_up(dtype) if isinstance(dtype, interpreter.tl.pointer_type) else known(dtype)

    interpreter._get_np_dtype = numpy_type


_spare_the_interpreter_repeated_work()

"""Proof that off is stock: which functions of a module are not what its source file says."""

from __future__ import annotations

import types
from collections.abc import Iterable


def changed_functions(module: types.ModuleType) -> list[str]:
    """Attribute paths of the module's functions, its classes' included, that are not as its source file says.

    Bytecode, constants and names are compared, so an edited body shows too. Code that was
    generated elsewhere (dataclasses, decorators of other packages) is none of the module's and is left out.
    """

    def codes(code: types.CodeType) -> Iterable[types.CodeType]:
        yield code
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from codes(constant)

    with open(str(module.__file__), "rb") as file:
        stock = set(codes(compile(file.read(), str(module.__file__), "exec", dont_inherit=True)))
    classes = {name: vars(value) for name, value in vars(module).items() if isinstance(value, type)}
    found = []
    for owner, attributes in {"": vars(module), **classes}.items():
        for name, value in attributes.items():
            code = getattr(value, "__code__", None)
            foreign = code is not None and code.co_filename == module.__file__ and code not in stock
            if foreign or type(value).__name__ == "FunctionWrapper":
                found.append(f"{owner}.{name}".lstrip("."))
    return sorted(found)

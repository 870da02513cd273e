"""Functions that travel by value and keep the name of their file, so that what they raise is told with its place.

cloudpickle 3.1.3 gives every function that it carries the file `<dynamic-code>`; earlier ones keep the name.
"""

import io
from collections import ChainMap
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, ClassVar, final

import cloudpickle


def dumps(value: object) -> bytes:
    """`cloudpickle.dumps`, with the names of files; `cloudpickle.loads` reads it."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, arguments = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return _in_file, (make, arguments, code.co_filename)


def _in_file(make: Callable[..., CodeType], arguments: Sequence[Any], filename: str) -> CodeType:
    return make(*arguments).replace(co_filename=filename)


@final
class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)

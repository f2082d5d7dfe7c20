# SPDX-License-Identifier: MIT
"""The structs of XLA's foreign function interface, version 0.3, that a handler reads and writes.

Source: ``xla/ffi/api/c_api.h`` in jaxlib. Later minor versions only add fields at the end of a
struct, so a handler can also read the structs of those versions.
"""

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

KNOWN = (0, 3)  # the major and the minor version
EXECUTE = 3  # the stage of a frame in which kernels run
_METADATA = 1  # the type of the extension that asks for metadata
_INTERNAL = 13  # the code of internal errors


def _struct(**fields: Any) -> Any:
    return type("_Struct", (ctypes.Structure,), {"_fields_": tuple(fields.items())})


_Size, _Int, _Int64, _Address = ctypes.c_size_t, ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_HEAD = {"struct_size": _Size, "extension": _Address}

_Extension = _struct(struct_size=_Size, type=_Int, next=_Address, metadata=_Address)
_Version = _struct(**_HEAD, major=_Int, minor=_Int)
_Metadata = _struct(struct_size=_Size, version=_Version, traits=ctypes.c_uint32)
_Api = _struct(
    **_HEAD,
    version=_Version,
    internal=_Address,
    error_create=_Address,
    error_get_message=_Address,
    error_destroy=_Address,
    handler_register=_Address,
    stream_get=_Address,
)
_Arrays = _struct(**_HEAD, size=_Int64, types=_Address, values=_Address)  # arguments or results
_Attributes = _struct(**_HEAD, size=_Int64, types=_Address, names=_Address, values=_Address)
_Buffer = _struct(**_HEAD, dtype=_Int, data=_Address, rank=_Int64, dims=_Address)
_Frame = _struct(  # a call of a handler
    **_HEAD,
    api=_Address,
    context=_Address,
    stage=_Int,
    arguments=_Arrays,
    results=_Arrays,
    attributes=_Attributes,
)
_ErrorCreate = _struct(**_HEAD, message=ctypes.c_char_p, code=_Int)
_StreamGet = _struct(**_HEAD, context=_Address, stream=_Address)
Function = ctypes.CFUNCTYPE(_Address, _Address)  # of the api: takes a struct, returns an error

# --- versions -------------------------------------------------------------------------------------


def library_version(include: str) -> tuple[int, int]:
    """Return the version in the header in jaxlib's folder `include`, (-1, -1) without a header."""
    header = Path(include, "xla", "ffi", "api", "c_api.h")
    text = header.read_text() if header.is_file() else ""
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)$", text, re.M))
    return int(found.get("MAJOR", -1)), int(found.get("MINOR", -1))


def refusal(version: tuple[int, int]) -> str | None:
    if version[0] == KNOWN[0] and version[1] >= KNOWN[1]:
        return None
    return (
        f"this JAX's foreign function interface (XLA FFI) is of version {version[0]}."
        f"{version[1]}, expected {KNOWN[0]}.{KNOWN[1]} or a later {KNOWN[0]}.x: install another "
        "JAX (pip install -U jax) or another cunorm"
    )


# --- frames ---------------------------------------------------------------------------------------

# All memory: reading a word of it takes a tenth of the time that making a struct takes.
WORD = ctypes.sizeof(ctypes.c_size_t)
_words = (ctypes.c_size_t * (sys.maxsize // WORD)).from_address(0)
_chars = (ctypes.c_char * sys.maxsize).from_address(0)

Frame = int  # the index in `_words` of the first word of a frame

_EXTENSION, _API, _CONTEXT, _STAGE, _ARGUMENTS, _RESULTS, _ATTRIBUTES = (
    getattr(_Frame, name).offset // WORD
    for name in ("extension", "api", "context", "stage", "arguments", "results", "attributes")
)
_SIZE, _VALUES = (getattr(_Arrays, name).offset // WORD for name in ("size", "values"))
_ATTRIBUTE_VALUES = _ATTRIBUTES + _Attributes.values.offset // WORD
_DATA = _Buffer.data.offset // WORD
_INT = 0xFFFFFFFF  # the half of a word that an int fills; the other half is undefined


def head(frame: Frame) -> tuple[int, int, int]:
    """Return the addresses of the extensions and of the api, and the stage of the call."""
    words = _words
    return words[frame + _EXTENSION], words[frame + _API], words[frame + _STAGE] & _INT


def answer_metadata_query(extension: int) -> bool:
    """Return whether XLA only asks for the version of the handler; if so, write the version."""
    address: int | None = extension
    while address:
        found = _Extension.from_address(address)
        if found.type == _METADATA:
            metadata = _Metadata.from_address(found.metadata)
            metadata.version.major, metadata.version.minor = KNOWN
            metadata.traits = 0
            return True
        address = found.next
    return False


def check(frame: Frame) -> None:
    version = _Api.from_address(_words[frame + _API]).version
    reason = refusal((version.major, version.minor))
    if reason is not None:
        raise RuntimeError(reason)


def buffers(frame: Frame) -> tuple[tuple[int, int], list[int]]:
    """Return the numbers of arguments and results, and all their addresses, 0 for empty arrays."""
    arguments, results = frame + _ARGUMENTS, frame + _RESULTS
    counts = _words[arguments + _SIZE], _words[results + _SIZE]
    first, first_result = _words[arguments + _VALUES] // WORD, _words[results + _VALUES] // WORD
    found = _words[first : first + counts[0]] + _words[first_result : first_result + counts[1]]
    return counts, [_words[buffer // WORD + _DATA] for buffer in found]


def attribute(frame: Frame) -> bytes:
    """Return the only attribute, which is the text of a call."""
    span = _words[_words[frame + _ATTRIBUTE_VALUES] // WORD] // WORD
    start, length = _words[span : span + 2]
    return _chars[start : start + length]  # type: ignore[return-value]  # a slice is bytes


def stream_of(frame: Frame) -> int:
    arguments = _StreamGet(ctypes.sizeof(_StreamGet), None, _words[frame + _CONTEXT], None)
    if _call_api(frame, "stream_get", arguments):
        raise RuntimeError("XLA gives no stream")
    return arguments.stream or 0


def error(frame: Frame, message: str) -> int | None:
    """Make XLA's error with a message; XLA frees the error."""
    code = _ErrorCreate.code
    size = code.offset + code.size  # XLA's size excludes the padding at the end
    text = message.encode(errors="replace")
    return _call_api(frame, "error_create", _ErrorCreate(size, None, text, _INTERNAL))


def _call_api(frame: Frame, function: str, arguments: Any) -> int | None:
    api = _Api.from_address(_words[frame + _API])
    return Function(getattr(api, function))(ctypes.addressof(arguments))

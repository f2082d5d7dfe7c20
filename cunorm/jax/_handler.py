# SPDX-License-Identifier: MIT
"""The functions that XLA calls to run the kernels on a CPU, or on a stream of a GPU.

XLA's threads call the functions. ctypes takes the GIL for each call, and releases it while a kernel
runs. On a GPU the functions allocate nothing: XLA gives results, workspace and stream.
"""

from collections.abc import Callable

from cunorm._arrays.cupy import cupy
from cunorm._backends import cuda
from cunorm._core.plan import Alignments
from cunorm._core.tensor import CPU, Device
from cunorm._dispatch import cache_entry
from cunorm._dispatch.loading import caps_for, cpu_loaded
from cunorm.jax import _xla_structs as xla
from cunorm.jax._call import Call, picker

_known_apis: set[int] = set()  # the addresses of apis with a known version
Run = Callable[[xla.Frame], None]
called: set[Run] = set()  # the functions that XLA has called, in any stage


def handler(run: Run) -> object:
    """Return a C function for XLA; the caller keeps it for as long as the process lives."""

    def handle(address: int) -> int | None:
        frame = address // xla.WORD
        try:
            called.add(run)
            extension, api, stage = xla.head(frame)
            if extension and xla.answer_metadata_query(extension):
                return None
            if api not in _known_apis:
                xla.check(frame)
                _known_apis.add(api)
            if stage == xla.EXECUTE:  # only this stage has values in the arrays
                run(frame)
        except BaseException as error:  # C cannot handle exceptions
            return xla.error(frame, f"cunorm: {type(error).__name__}: {error}")
        return None

    return xla.Function(handle)


def run_on_cpu(frame: xla.Frame) -> None:
    text = xla.attribute(frame)
    entry = cache_entry(text, CPU)
    executable = entry.executable
    if executable is None:
        call = Call.parse(text)
        run = cpu_loaded(call.op, call.spec, call.plan, caps_for(call.plan, CPU)).run
        executable = entry.executable = _Executable(call, run, has_workspace=False)
    executable.run(executable.pointers(*xla.buffers(frame)))


def run_on_cuda(frame: xla.Frame) -> None:
    text, (counts, found) = xla.attribute(frame), xla.buffers(frame)
    device = Device("cuda", cupy().cuda.runtime.pointerGetAttributes(found[counts[0]]).device)
    executable = _on_cuda(text, device, None)
    pointers = executable.pointers(counts, found)
    alignments = tuple([pointer & 15 for pointer in pointers])
    if any(alignments):
        executable = _on_cuda(text, device, alignments)
    executable.run(pointers, xla.stream_of(frame))


class _Executable:
    """A loaded call; `run` takes the pointers of all its arrays and, on CUDA, a stream."""

    def __init__(self, call: Call, run: Callable[..., object], *, has_workspace: bool) -> None:
        count = call.op.array_count
        arguments = [slot for slot, spec in enumerate(call.inputs) if spec is not None]
        results = [slot for slot, _ in call.plan.outputs]
        if has_workspace:
            results.append(count - 1)
        self.run, self._counts = run, (len(arguments), len(results))
        self._pick = picker((*arguments, *results), range(count))

    def pointers(self, counts: tuple[int, int], found: list[int]) -> tuple[int, ...]:
        """Return the pointer of each array of the call, or 0 for an absent array.

        XLA gives `found`; `counts` has the numbers of arguments and of results in it.
        """
        if counts != self._counts:
            raise RuntimeError(
                f"XLA gives {counts[0]} arguments and {counts[1]} results, expected "
                f"{self._counts[0]} and {self._counts[1]}"
            )
        return self._pick((0, *found))


def _on_cuda(text: bytes, device: Device, alignments: Alignments) -> _Executable:
    entry = cache_entry(text, device, alignments)
    if entry.executable is not None:
        return entry.executable
    call = Call.parse(text, device)
    plan = call.plan
    lowered = plan.lower(caps_for(plan, device), alignments)
    size = plan.workspace_bound(None)  # XLA's size, which was planned before the GPU was known
    if lowered.workspace > size:
        family, _, _ = call.op.name.partition("_")
        raise RuntimeError(
            f"cunorm: a {family} norm has {size} bytes of workspace, and takes "
            f"{lowered.workspace} on this GPU"
        )
    run = cuda.Launcher.load(lowered.calls(), device)
    entry.executable = _Executable(call, run, has_workspace=size > 0)
    return entry.executable

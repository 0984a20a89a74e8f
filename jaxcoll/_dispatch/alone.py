"""A warning for a process that trains alone though a launcher started several."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping

from jaxcoll._compat import settings

_MARKS = ("JAXCOLL_PROCESSES", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE")
"""Variables in which launchers say how many processes there are."""

_ALONE = """\
{name}={count} says that this process is one of several, and it is alone: each of them trains by \
itself. {advice}. If they are meant to run apart, ignore this."""

_INITIALIZE = "Call `jc.initialize()` first in the program, before any other use of JAX"
_SRUN = f"Start the program with `srun`. {_INITIALIZE}"


@functools.cache
def warn_where_alone() -> None:
    """Warn once if a launcher started several processes and this one has not joined the others."""
    if text := reason_to_warn(os.environ):
        settings.warn(text)


def reason_to_warn(environment: Mapping[str, str]) -> str:
    """Return what to say of a process that is alone in this environment; "": nothing.

    Examples:
      >>> reason_to_warn({"SLURM_NTASKS": "1"}), reason_to_warn({"SLURM_NTASKS": "4"})[:14]
      ('', 'SLURM_NTASKS=4')
    """
    for name in _MARKS:
        count = environment.get(name, "")
        if count.isdecimal() and int(count) > 1:
            is_task = "SLURM_STEP_NODELIST" in environment or name != "SLURM_NTASKS"
            return _ALONE.format(name=name, count=count, advice=_INITIALIZE if is_task else _SRUN)
    return ""

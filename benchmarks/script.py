"""What the scripts share: their options, a process for one measurement, clocks and peak memory."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np


def arguments(doc, *places, words=None, **options):
    """Parse words by place and options by their defaults.

    A type in place of a default is an option that may be left out, `...` one that must be given;
    False is a switch; a list takes several words.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in places:
        parser.add_argument(name)
    for name, default in options.items():
        is_list, is_type = isinstance(default, list), isinstance(default, type)
        first = (default[0] if is_list else default) if default is not ... else str
        how = {"default": None if is_type else default, "required": default is ...}
        if default is False:
            how["action"] = "store_true"
        else:
            how["type"] = first if isinstance(first, type) else type(first)
        if is_list:
            how |= {"nargs": "*", "default": [v for v in default if not isinstance(v, type)]}
        parser.add_argument("--" + name.replace("_", "-"), **how)
    return parser.parse_args(words)


def alone(function, *arguments):
    """What a function returns in a process of its own, whose peak memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def peak_kb():
    """The peak memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


def clocks():
    """Seconds on the wall, and of the processor in all threads: these tell if others were busy."""
    return np.array([time.perf_counter(), time.process_time()])

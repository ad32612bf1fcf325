"""`phalanx bench`: what this machine can do. Each verb prints a table, and keeps JSON if asked.

A verb is a module of this package with the dataclass of its settings and `run(config, console)`. It
is loaded when it is asked for, since most load torch.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Final

from phalanx.cli.screen import screen
from phalanx.config.command_line import read_command_line
from phalanx.errors import ConfigError, nearest

VERBS: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "ceiling": ("CeilingConfig", "the highest rate of matrix products on one device"),
        "mfu": ("MfuConfig", "the MFU and HFU of a plain perceptron"),
        "scaling": ("ScalingConfig", "the speed-up of strategies over one rank, in turns"),
        "tensor": ("TensorConfig", "a decoder block under layouts of tensor parallelism"),
    }
)
"""Verb -> the class of its settings in the module of its name, and what it measures."""


def run(argv: list[str]) -> int:
    """Run `phalanx bench` on its arguments and return the exit status.

    Raises:
        ConfigError: a setting is out of range, or this machine lacks what it asks for.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    verb, *words = argv
    if verb not in VERBS:
        raise ConfigError(
            f"'{verb}' is nothing that bench measures{nearest(verb, VERBS)}; it measures "
            f"{', '.join(VERBS)}"
        )
    module = import_module(f"phalanx.cli.bench.{verb}")
    schema = getattr(module, VERBS[verb][0])
    words = ["--help"] if words[:1] == ["help"] else words
    config = read_command_line(words, schema, prog=f"phalanx bench {verb}")
    return module.run(config, screen())


def _usage() -> str:
    lines = ["usage: phalanx bench VERB [OPTIONS]", "", "Measure this machine:", ""]
    lines += [f"  {verb:<8} {text}" for verb, (_, text) in VERBS.items()]
    return "\n".join([*lines, "", "phalanx bench VERB --help lists a verb's options."])

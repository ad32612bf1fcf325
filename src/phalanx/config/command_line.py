"""Parse the words of a command line after the verb: `--dotted.key value`, in any order.

`-` and `_` are equal in a key, and `--key=value` is `--key value`. `--section.flag` sets a flag and
`--section.no-flag` clears it. A tuple takes all words up to the next option; a list takes one word
for each repeat of its option. The word `none` unsets a setting that is optional.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_origin

from phalanx.config.fields import Schema, Setting, check_values, read_text, settings, with_value
from phalanx.config.file import closest
from phalanx.config.save_policy import RETIRED
from phalanx.errors import ConfigError


def read_command_line(argv: Sequence[str], schema: type[Schema], *, prog: str) -> Schema:
    """Return the configuration that a command line gives without files; check all values.

    Raises:
        ConfigError: an unknown option or an illegal value.
        SystemExit: with code 0, after --help or --completion.
    """
    config = schema()
    for key, value in read_words(argv, schema, prog=prog).items():
        config = with_value(config, key, value)
    check_values(config)
    return config


def read_words(argv: Sequence[str], *schemas: type, prog: str) -> dict[str, Any]:
    """Return the values that the words after a verb give, by dotted key.

    --help prints the docstring of the last schema, with `prog` as the name of the command.

    Raises:
        ConfigError: an unknown option, or a value that is missing or of a wrong type.
        SystemExit: with code 0, after --help or --completion.
    """
    known = [setting for schema in schemas for setting in settings(schema)]
    options = {setting.key: setting for setting in known if setting.positional is None}
    switches = {key: (key, True) for key, setting in options.items() if setting.hint is bool}
    switches |= {re.sub(r"(\w+)$", r"no_\1", key): (key, False) for key in switches}
    values: dict[str, Any] = {}
    loose: list[str] = []
    left = list(argv)
    while left:
        word = left.pop(0)
        name, has_value, text = word.partition("=")
        key = name.removeprefix("--").replace("-", "_")
        if word in ("-h", "--help", "--completion"):
            from phalanx.config.help import print_completion, print_help

            if word == "--completion":
                print_completion(prog, [*switches, *options])
            else:
                print_help(prog, schemas)
            raise SystemExit(0)
        if not word.startswith("-"):
            loose.append(word)
        elif not has_value and key in switches:
            key, values[key] = switches[key]
        elif name.startswith("--") and key in options:
            setting = options[key]
            most = len(left) if get_origin(setting.hint) is tuple else 1
            # --lr 0.1         one word       --lr=0.1           the word after the sign
            # --data a b c     all words up to the next option, of a setting with several values
            taken = [text] if has_value else list[str]()
            while not has_value and left and len(taken) < most:
                if left[0].startswith("--") or left[0] == "-h":
                    break
                taken.append(left.pop(0))
            values[key] = _value(name, setting, taken, values.get(key, []))
        else:
            close = closest(key.lstrip("_"), [*options, "help"])
            if "save" in options and key in RETIRED:
                close = f"save {RETIRED[key]}={text or [*left, 'VALUE'][0]}"
            near = f" (did you mean '--{close.replace('_', '-')}'?)" if close else ""
            raise ConfigError(f"option '{word}' is unknown{near}; --help lists all")
    for setting in known:  # positional settings take the words that belong to no option
        if setting.positional is None or not loose:
            continue
        if get_origin(setting.hint) is tuple:
            values[setting.key], loose = tuple(loose), []
        else:
            values[setting.key] = loose.pop(0)
    if loose:
        raise ConfigError(
            f"'{loose[0]}' on the command line belongs to no option; an option is written "
            "--name value"
        )
    return values


def _value(name: str, setting: Setting, taken: list[str], before: list[str]) -> Any:
    """Return an option's value from its words `taken`; a list also keeps the words `before`."""
    if not taken:
        raise ConfigError(f"option '{name}' lacks its value; write {name} VALUE")
    if get_origin(setting.hint) is tuple:
        return tuple(taken)
    if get_origin(setting.hint) is list:
        return [*before, *taken]
    return read_text(name, setting.hint, taken[0])

"""`phalanx show`: run a method step by step; or show the hardware catalogue."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from phalanx.config.command_line import read_command_line
from phalanx.errors import ConfigError, nearest
from phalanx.launch.local import prepare_server
from phalanx.report.output import check_writable, print_json, writing
from phalanx.report.tabular import Table
from phalanx.report.terminal import Terminal
from phalanx.show.shown import Shown
from phalanx.show.tables import printed
from phalanx.show.topics import CATALOGUE, LESSONS, TOPICS


def run(argv: list[str]) -> int:
    """Show the topic that the first word names; without a word, list the topics.

    Raises:
        ConfigError: the topic or the name is unknown, or a file cannot be written.
    """
    if not argv or argv[0] in ("-h", "--help", "help"):
        Terminal().show(*printed(_topics()))
        return 0
    name, *arguments = argv
    if (topic := TOPICS.get(name)) is None:
        raise ConfigError(
            f"{name!r} is not a topic of show{nearest(name, TOPICS)}; the topics are "
            f"{', '.join(TOPICS)}"
        )
    arguments = ["--help"] if arguments[:1] == ["help"] else arguments
    if name not in CATALOGUE and not {"-h", "--help"}.intersection(arguments):
        prepare_server()  # imports torch in parallel to this process
    schema, show, draw = topic.load()
    config = read_command_line(arguments, schema, prog=f"phalanx show {name}")
    path = None if (file := getattr(config, "svg", None)) is None else Path(file)
    if path is not None:
        check_writable(path, ".svg")
    shown = show(config)
    Terminal().show(*printed(shown))
    if path is not None:
        with writing(path):
            draw(shown, path)
        Terminal().say(f"wrote {path}")
    if config.json:
        document = shown.document
        if document is None:
            document = dataclasses.asdict(shown)
            del document["document"]
        print_json(document)
    return 0


def _topics() -> Shown:
    """Return the list of topics, lesson by lesson."""
    from phalanx.planner import hardware

    parts: list[Table | str] = [
        Table(f"{number}. {lesson}", ("topic", "shows"), [(n, t.about) for n, t in topics.items()])
        for number, (lesson, topics) in enumerate(LESSONS.items(), 1)
    ]
    return Shown(
        "usage: phalanx show TOPIC [OPTIONS]",
        ["Run a method on 4 ranks of this host, step by step (--ranks N, --svg FILE)."],
        [
            *parts,
            f"clusters: {', '.join([*hardware.CLUSTERS, hardware.THIS])}",
            "phalanx show TOPIC --help lists a topic's options.",
        ],
    )

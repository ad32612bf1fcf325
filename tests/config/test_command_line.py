"""The words of a command line: what they mean, and what is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

from phalanx.bench.scaling import ScalingConfig
from phalanx.cli.convert import ConvertConfig
from phalanx.config import TrainConfig
from phalanx.config.command_line import read_command_line
from phalanx.config.load import load_config
from phalanx.errors import ConfigError


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--optimizer.rl 1", "option '--optimizer.rl' is unknown (did you mean '--optimizer.lr'?)"),
        ("--lr 1", "did you mean '--optimizer.lr'?"),
        ("--learning-rate 1", "did you mean '--optimizer.lr'?"),
        ("--seq-len=4", "did you mean '--corpus.seq-len'?"),
        ("--show-confg", "did you mean '--show-config'?"),
        ("--steps", "option '--steps' lacks its value; write --steps VALUE"),
        ("--config", "option '--config' lacks its value"),
        ("--steps many", "--steps is 'many'; expected a whole number"),
        ("--optimizer.lr fast", "--optimizer.lr is 'fast'; expected a number"),
        ("--precision float23", "(did you mean 'float32'?)"),
        ("--shape.tied maybe", "--shape.tied is 'maybe'; expected true or false"),
        ("train", "'train' on the command line belongs to no option"),
    ],
)
def test_a_command_line_is_refused_in_words(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        load_config(line.split())
    assert "\n" not in str(caught.value) and "│" not in str(caught.value)


def test_values_of_any_form() -> None:
    words = ["--prompt", "-x", "--compile=true", "--corpus.no_shuffle", "--eval_every=3"]
    config = read_command_line(words, TrainConfig, prog="train")
    assert (config.prompt, config.compile, config.corpus.shuffle) == ("-x", True, False)
    assert config.eval_every == 3
    with pytest.raises(ConfigError, match="option '--prompt' lacks its value"):
        read_command_line(["--prompt", "--seed", "3"], TrainConfig, prog="train")


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Settings with a tuple that has a name."""

    layouts: tuple[str, ...] = ("tp4",)
    """Strategies of tp alone."""
    repeats: int = 5
    """Steps to time of each."""


def test_tuples_and_values_without_a_name() -> None:
    config = read_command_line(["dp2", "--rounds", "1", "tp2"], ScalingConfig, prog="scaling")
    assert (config.strategies, config.rounds) == (("dp2", "tp2"), 1)
    words = ["--layouts", "tp2", "tp4:2d", "--repeats", "0"]
    assert read_command_line(words, Layouts, prog="layouts").layouts == ("tp2", "tp4:2d")
    folders = read_command_line(["a", "--check", "b"], ConvertConfig, prog="convert")
    assert (folders.source, folders.destination, folders.check) == ("a", "b", True)
    with pytest.raises(ConfigError, match="'c' on the command line belongs to no option"):
        read_command_line(["a", "b", "c"], ConvertConfig, prog="convert")

"""The options of a profile are read from text, and refused in one message."""

import pytest

from phalanx.config.profile_options import ProfileOptions
from phalanx.errors import ConfigError


def test_options_are_read_from_text() -> None:
    options = ProfileOptions.parse("wait=0, warmup=2,active=3,with_stack=true")
    assert options == ProfileOptions(wait=0, warmup=2, active=3, with_stack=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("active=0", "profile: active is 0; expected at least 1; the nearest is 1"),
        ("wait=x", "profile: wait is 'x'; expected a whole number"),
        ("wait", "profile: 'wait' in 'wait'; expected NAME=VALUE once"),
        ("wamup=1", r"\(did you mean 'warmup'\?\)"),
        ("wait=1,wait=2", "profile: 'wait=2' in 'wait=1,wait=2', but wait is set before"),
        ("", "profile: '' in ''"),
        ("record_shapes=2", "profile: record_shapes is '2'; expected true or false"),
    ],
)
def test_bad_options_are_refused_in_one_message(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProfileOptions.parse(text)

"""The sampler that went."""

import pytest


def test_the_sampler_that_went_names_what_stands_in_its_place() -> None:
    with pytest.raises(ImportError, match=r"run\.prepare\(loader\)"):
        from phalanx.data.sampler import GlobalSampler  # noqa: F401 # pyright: ignore
